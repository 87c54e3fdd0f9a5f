"""Commands that prepare data and weights: python -m prepare.NAME.

Only tests import this room, for the miniature's data. It may import every room below it.
"""
