"""Reports on runs: their pages, MLPerf results and submissions, sample images, and the model card of an export.

Rooms above import this one. It imports run_folder/, config.py and common/; a run's files are read in run_folder/ alone.
"""

from common.command_help import answer_help_of_module

answer_help_of_module(__name__)
