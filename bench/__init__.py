"""Runs and times, each a command: python -m bench.NAME.

Nothing imports it. It may import every room below it.
"""
