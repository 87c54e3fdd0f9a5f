"""A real Slurm of two nodes on this machine, for tests/test_slurm.py and the measurement of restarts (__main__.py)."""
