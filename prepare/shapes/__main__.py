"""Run `python -m prepare.shapes`, see command.py."""

import sys

from prepare.shapes.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
