"""A run's folder: its files, its history, environment, metric names, the MLPerf log.

Rooms that write or read a run import this one. It imports common/, weights/, mds/ and config.py.
"""
