"""Prompts -> images -> FID and CLIP score; score tables and plots.

training/ and everything above it import this room. It imports zoo/, record/, weights/ and the rooms below them.
"""
