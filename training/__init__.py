"""The parts of a run: configuration, builders, optimizer, speed, memory, sharding, initial weights, start, loggers.

benchmark.py, eval.py, preflight/, prepare/ and bench/ import this room. It imports every room below it.
"""
