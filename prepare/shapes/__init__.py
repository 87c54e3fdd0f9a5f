"""The miniature's pictures, prompts and encoders: python -m prepare.shapes.

tests come in. Imports zoo/shapes/ and what lies below.
"""
