"""Reads the records of runs and writes what is to be shown: MLPerf results and submissions.

Nothing imports it. Imports cli/ and config.py, and may import record/.
"""
