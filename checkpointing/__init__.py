"""Checkpoints: their files, what they hold, when they are written, how a run resumes, and the way to and from a store.

training/, evaluation/ and the rooms above import this one. It imports ema.py, run_folder/ and the rooms below.
"""
