"""Is a run possible, and what will it take: the checks before a start, its plan, the machine, the stage.

benchmark.py, eval.py, prepare/ and bench/ come in. Imports training/ and what lies below.
"""
