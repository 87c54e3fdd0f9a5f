"""Tensors by name: published weights, weight files, LDM checkpoints' names.

Any file that reads weights imports this room. It imports only cli/.
"""
