"""What a run is made of: its configuration, optimizer, speed, memory, checkpoints, resume, snapshots, loggers.

benchmark.py, eval.py, preflight/, prepare/ and bench/ come in. Imports model.py, data.py, callbacks/, evaluation/ and below.
"""
