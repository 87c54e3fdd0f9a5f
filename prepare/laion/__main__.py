"""Run `python -m prepare.laion`, see command.py."""

from cli.command import start
from prepare.laion.command import main

if __name__ == "__main__":
    start(main)
