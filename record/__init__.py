"""A run's folder: its files, its checkpoints' files, environment, MLPerf events..

Whoever writes or reads a run comes in. Imports cli/ and config.py.
"""
