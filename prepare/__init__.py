"""Data and weights, each a command: `python -m prepare.NAME --help`."""
