"""Commands that prepare data and weights: python -m prepare.NAME.

Only tests import this room, for the miniature's data. It may import every room below it.
"""

import sys

from cli import interrupts

if sys.argv[:1] == ["-m"]:  # while Python looks for the command's module: its imports take seconds
    _name = sys.orig_argv[sys.orig_argv.index("-m") + 1]
    interrupts.told(f"{_name}: interrupted. What is done stays; the same command continues from there.")
