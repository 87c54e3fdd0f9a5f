"""Runs on clusters: batch scripts for Slurm, and MLPerf's way of launching. docs/launching.md says how.

The commands above import nothing of it. It imports training/, config.py and common/.
"""

from common.command_help import answer_help_of_module

answer_help_of_module(__name__)
