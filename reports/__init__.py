"""Reports on runs: their pages, MLPerf results and submissions, and sample pictures.

Rooms above it may import it. Imports cli/ and record/; a run's files are read in record/ alone.
"""
