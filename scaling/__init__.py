"""What a run takes on 8 to 4,096 GPUs: `python -m scaling`, its arithmetic and its report.

preflight/ imports this room. It imports training/, reports/ and the rooms below.
"""

from common.command_help import answer_help_of_module

answer_help_of_module(__name__)
