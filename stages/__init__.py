"""A stage of data, on disk or in a store, read safely: its description, shards, samples, images, workers, shared memory.

data.py, training/ and all above it come in. Imports cli/ alone.
"""
