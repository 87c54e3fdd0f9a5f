"""The miniature's images, prompts and encoders: python -m prepare.shapes.

Only tests import this room. It imports zoo/shapes/ and the rooms below it.
"""
