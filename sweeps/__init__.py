"""The parts of sweep.py: its file, its points, their runs, the table and the plots.

sweep.py alone imports this room. It imports preflight/, training/, reports/, run_folder/ and the rooms below.
"""
