"""Reports on runs: their pages, MLPerf results and submissions, sample pictures, and the model card of an export.

Rooms above it may import it. Imports cli/ and record/; a run's files are read in record/ alone.
"""
