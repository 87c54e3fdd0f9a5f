"""A run's folder: its files, its checkpoints' files, environment, MLPerf events; the one place that reports/ reads through.

Whoever writes or reads a run comes in. Imports cli/ and config.py.
"""
