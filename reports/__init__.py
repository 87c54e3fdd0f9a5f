"""Reads the records of runs and writes what is to be shown: MLPerf results and submissions.

Nothing imports it. Imports record/, cli/ and config.py.
"""
