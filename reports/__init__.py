"""Reports on runs: MLPerf results and submissions, and sample pictures.

No room imports it. Imports cli/ and record/; a run's files are read in record/ alone.
"""
