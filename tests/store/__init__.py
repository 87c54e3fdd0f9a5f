"""Faults of a real object store, and what reading from it makes of them: `python -m tests.store` (see __main__.py)."""
