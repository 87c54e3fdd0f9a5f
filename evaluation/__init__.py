"""Prompts -> images -> FID and CLIP score; score tables and plots.

training/ and all above it come in. Imports zoo/, record/, weights/ and what lies below.
"""
