"""A run's folder: its files, its checkpoints' files, environment, MLPerf events.

Rooms that write or read a run import it. Imports cli/ and config.py.
"""
