"""One Composer callback a file; none imports another.

training/, benchmark.py, eval.py and bench/ come in. Imports record/, cli/ and config.py.
"""
