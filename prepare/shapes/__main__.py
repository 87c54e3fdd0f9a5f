"""Run `python -m prepare.shapes`, see command.py."""

from cli.command import start
from prepare.shapes.command import main

if __name__ == "__main__":
    start(main)
