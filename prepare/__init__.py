"""Commands that prepare data and weights: python -m prepare.NAME.

Only tests import this room, for the miniature's data. It may import every room below it.
"""

from common import command_help, interrupts

# While Python looks for a command's module: its imports take seconds.
command_help.answer_help_of_module(__name__)
if (_name := command_help.module_to_run()) is not None:
    interrupts.print_on_interrupt(f"{_name}: interrupted. Finished work is kept; the same command resumes from there.")
