"""All of eval.py's work: prompts -> images -> FID and CLIP score; sources, tables and plots of scores; validation, samples.

training/ and the rooms above import this one. It imports model.py, data.py, reports/ and the rooms below.
"""

from common.command_help import answer_help_of_module

answer_help_of_module(__name__)
