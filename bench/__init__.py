"""Runs and times, each a command: python -m bench.NAME.

Nothing imports it. It may import every room below it.
"""

from common.command_help import answer_help_of_module

answer_help_of_module(__name__)
