"""A stage of data, on disk or in a store, read safely: its description, shards, samples, images, workers, shared memory.

data.py, prepare/, preflight/, training/ and bench/ come in. Imports cli/ alone.
"""
