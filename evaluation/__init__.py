"""Prompts -> images -> FID and CLIP score; score tables and plots.

eval.py, training/, prepare/ and bench/ come in. Imports zoo/, record/, weights/ and what lies below.
"""
