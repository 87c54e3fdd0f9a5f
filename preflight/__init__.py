"""Checks before a run starts (configuration, machine, dataset), and its plan: memory, compute and time.

benchmark.py, eval.py, prepare/, bench/ and sweeps/ import this room. It imports scaling/, training/ and the rooms below.
"""
