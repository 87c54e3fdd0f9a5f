"""Tensors by name: published weights, weight files, pickles without code, the names of LDM checkpoints.

Whoever reads weights comes in. Imports cli/ alone.
"""
