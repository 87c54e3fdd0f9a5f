"""One Composer callback per file, and the losses that several of them read. None imports another.

training/, benchmark.py, eval.py and bench/ import this room. It imports checkpointing/, run_folder/ and the rooms below.
"""
