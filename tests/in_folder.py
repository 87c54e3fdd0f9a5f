"""Run benchmark.py in another folder: python tests/in_folder.py FOLDER WORD ... There a relative run_folder is its own."""

import os
import sys

from benchmark import main
from training import shared_folder

if __name__ == "__main__":
    os.chdir(sys.argv[1])
    shared_folder.SEEN_SEC = 1.0  # no file system of a network is here, which may take longer
    sys.exit(main(sys.argv[2:]))
