"""Tensors by name: published weights, weight files, the names of LDM checkpoints, the Hugging Face Hub.

Any file that reads weights imports this room. It imports common/ and ranks/.
"""
