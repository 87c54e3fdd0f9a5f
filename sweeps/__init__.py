"""The parts of sweep.py: its file, its points, their runs, the table and the pictures.

sweep.py alone imports this room. It imports preflight/, training/, reports/, record/ and the rooms below them.
"""
