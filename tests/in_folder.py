"""Run benchmark.py in another folder: python tests/in_folder.py FOLDER WORD ... There a relative run_folder is its own."""

import os
import sys

from benchmark import main

if __name__ == "__main__":
    os.chdir(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
