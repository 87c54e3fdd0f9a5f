"""What every command shares: the command line, limits of values, errors, hidden passwords, the pages of keys.

Everybody may come in. It imports nothing of Easel but itself.
"""
