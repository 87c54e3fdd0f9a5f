"""What every command shares: words of the command line, limits of values, masked secrets, errors, ranks that stop together.

Anyone may come in. Imports nothing of the project.
"""
