"""Runs and times: each a command, `python -m bench.NAME`."""
