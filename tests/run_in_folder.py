"""Run benchmark.py in another folder, in which a relative run_folder lies: python tests/run_in_folder.py FOLDER WORD ..."""

import os
import sys

from benchmark import main

if __name__ == "__main__":
    os.chdir(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
