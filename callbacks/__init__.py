"""One Composer callback a file, and the losses, which several ask; none imports another.

training/, benchmark.py, eval.py and bench/ come in. Imports record/, cli/ and config.py.
"""
