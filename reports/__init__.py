"""Reports on runs: MLPerf results and submissions, sample pictures, and the model card of an export.

export.py and training/ import it. It imports cli/ and record/; a run's files are read in record/ alone.
"""
