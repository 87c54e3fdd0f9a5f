"""The parts of a run: its configuration, optimizer, speed, memory, checkpoints, resume, snapshots, loggers.

benchmark.py, eval.py, preflight/, prepare/ and bench/ import this room. It imports model.py, data.py, callbacks/,
evaluation/ and the rooms below them.
"""
