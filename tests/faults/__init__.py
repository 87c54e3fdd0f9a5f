"""Faults of whole runs, as a table: `python -m tests.faults` (see __main__.py)."""
