"""Run `python -m prepare.laion`, see command.py."""

import sys

from prepare.laion.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
