"""Checks before a run starts (configuration, machine, stage), and its plan: memory, compute and time.

benchmark.py, eval.py, prepare/ and bench/ import this room. It imports training/ and the rooms below it.
"""
