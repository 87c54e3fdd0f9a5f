"""Commands that prepare data and weights: python -m prepare.NAME.

Only tests import this room, for the miniature's data. It may import every room below it.
"""

from cli import later

later.hide("peft", "accelerate")  # which Composer and diffusers import; nothing here uses them
