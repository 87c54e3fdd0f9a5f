"""MDS datasets, on disk or in an object store: indexes, shards, caches, sample order, images, moments, videos.

data.py, training/ and the rooms above import this room. It imports common/ and ranks/.
"""
