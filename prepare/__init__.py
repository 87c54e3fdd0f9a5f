"""Data and weights, each a command: python -m prepare.NAME.

tests come in for the miniature's data. It may import every room below it.
"""
