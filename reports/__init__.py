"""Reports on runs: MLPerf results and submissions, and sample pictures.

training/ imports its pictures. Imports cli/ and record/; a run's files are read in record/ alone.
"""
