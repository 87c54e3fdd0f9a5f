"""Tells a run's watch (cli/watching.py) where the training is: at each of Composer's events.

RUN_FOLDER/RUN_NAME/stacks/rank0000N.txt    where each thread of a rank was, when a stall or a lost rank ended the run
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from composer import Callback, Event, Logger, State
from composer.utils import dist

from cli import ranks
from cli.watching import Watch, dump_stacks

STACKS = "stacks"
CHECKPOINTS = {Event.BATCH_CHECKPOINT.value, Event.EPOCH_CHECKPOINT.value, Event.FIT_END.value}
PHASES = {"train": "train", "data_wait": "waiting for data", "eval": "evaluation", "other": "between batches"}
"""Clock of callbacks/throughput.py -> phase."""


class Heartbeat(Callback):
    """Marks every event for the watch. It comes first of all callbacks, so that what they do belongs to the event.

    Args:
        watch: begun already, since building may hang too.
        folder: of the run.
        clock: returns which of PHASES runs.
    """

    def __init__(self, watch: Watch, folder: Path, clock: Callable[[], str]):
        self.watch, self.folder, self.clock = watch, folder, clock
        self._event = ""

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        self._event = event.value
        progress = self.watch.progress
        if event == Event.FIT_START:
            progress.phase = self._phase
            ranks.before_leaving(self._keep_stacks)
        progress.is_warm = progress.is_warm or event == Event.BATCH_END
        progress.mark(event.value.replace("_", " "), state.timestamp.batch.value)
        super().run_event(event, state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        progress = self.watch.progress
        progress.is_warm, progress.is_over = False, True  # what is left may be long: checkpoint, pictures, loggers

    def close(self, state: State, logger: Logger) -> None:
        progress = self.watch.progress
        progress.phase, progress.doing = (lambda: "end"), "closed"

    def _phase(self) -> str:
        clock = self.clock()
        return "checkpoint" if clock == "other" and self._event in CHECKPOINTS else PHASES[clock]

    def _keep_stacks(self, text: str) -> None:
        if "health.stall_sec: " in text:
            dump_stacks(self.folder / STACKS / f"rank{dist.get_global_rank():05d}.txt")
