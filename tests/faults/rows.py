"""The table: fault x moment, what is done, and what has to come of it.

Each row is a function of a row under way (acts.py). It returns a verdict, whose outcome has to be the row's:

    resumed    the run ended; the same command again ended as the unbroken run
    went on    the run did not end, and ended as the unbroken run
    refused    a start was refused with a message that says why; what was there is as it was
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tests.faults import acts
from tests.faults.acts import AWAY_SEC, SLOW_SEC, STALL_SEC, STOPPED_SEC
from tests.faults.runs import END_SEC, At, Verdict

Outcome = Literal["resumed", "went on", "refused"]

MOMENTS = {
    "start": "start",
    "first-step": "first step",
    "mid-epoch": "mid-epoch",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint, half written",
    "target": "target reached",
    "after": "after the end",
    "data": "waiting for data",
    "fetch": "waiting for data",
}


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    fault: str
    moment: str
    """A key of MOMENTS."""
    act: Callable[[At], Verdict]
    outcome: Outcome
    said: str | None = None
    """Pattern of the message that has to come; None: none can, or none is needed."""
    ranks: int = 2
    end_sec: float | None = END_SEC
    """Within which the last process has to have ended; None: the run goes on."""


def _signals(
    name: str, number: int, outcome: dict[str, Outcome], said: dict[str, str | None], to: dict[str, str]
) -> dict[str, Row]:
    """Return the rows of one signal. `to`: moment -> whom; rank 1 halts where it is hit, or waits for data, else rank 0."""
    rows = {}
    for moment, whom in to.items():
        halted = 1 if (whom == "1" and moment != "checkpoint") or moment == "data" else 0
        act = functools.partial(acts.signalled, number, whom, moment, halted)
        text = f"{signal.Signals(number).name} to {NAMES[whom]}"
        rows[f"{name}_{moment}".replace("-", "_")] = Row(
            text, moment, act, outcome.get(moment, "resumed"), said.get(moment)
        )
    return rows


NAMES = {"0": "rank 0", "1": "rank 1", "all": "every process", "launcher": "the launcher"}
EIGHT = ("start", "first-step", "mid-epoch", "evaluation", "checkpoint", "target", "after", "data")
IN_FIT = ("first-step", "mid-epoch", "evaluation", "checkpoint", "data")


def _each(whom: str) -> dict[str, str]:
    return dict.fromkeys(EIGHT, whom)


SAVED = r"SIGTERM: stopped after batch \d+; .* The same command resumes it\."
STOPPED_TERM = dict.fromkeys(IN_FIT, SAVED)
TERM_TO = dict(zip(EIGHT, ("1", "0", "1", "0", "all", "0", "0", "0"), strict=True))
INT_TO = dict.fromkeys(
    EIGHT, "all"
)  # one after the other: the launcher's SIGTERM may come to a rank before its own SIGINT

ROWS: dict[str, Row] = {
    **_signals("sigterm", signal.SIGTERM, {"target": "went on"}, STOPPED_TERM, TERM_TO),
    **_signals(
        "sigint",
        signal.SIGINT,
        {"target": "went on"},
        dict.fromkeys(IN_FIT, SAVED.replace("TERM", "(INT|TERM)")),
        INT_TO,
    ),
    **_signals("kill_rank_0", signal.SIGKILL, {}, {}, _each("0")),
    **_signals("kill_rank_1", signal.SIGKILL, {}, {}, _each("1")),
    **_signals(
        "kill_all", signal.SIGKILL, {}, {}, dict.fromkeys(("mid-epoch", "evaluation", "checkpoint", "target"), "all")
    ),
}
for _moment in ("start", "mid-epoch", "evaluation", "checkpoint"):
    ROWS[f"kill_launcher_{_moment}".replace("-", "_")] = Row(
        "SIGKILL of the launcher",
        _moment,
        functools.partial(acts.launcher_killed, _moment, 0),
        "refused",
        "another process is training in",
    )
ROWS |= {
    "sigterm_imports": Row(
        "SIGTERM to every process", "start", functools.partial(acts.cold_start, signal.SIGTERM, "all"), "resumed"
    ),
    "kill_imports": Row(
        "SIGKILL of both ranks", "start", functools.partial(acts.cold_start, signal.SIGKILL, "ranks"), "resumed"
    ),
    "sigusr1_mid_epoch": Row(
        "SIGUSR1 to rank 1",
        "mid-epoch",
        functools.partial(acts.signalled, signal.SIGUSR1, "1", "mid-epoch", 1),
        "resumed",
        SAVED.replace("TERM", "USR1"),
    ),
    "sigterm_launcher_mid_epoch": Row(
        "SIGTERM to the launcher",
        "mid-epoch",
        functools.partial(acts.signalled, signal.SIGTERM, "launcher", "mid-epoch", 0),
        "resumed",
        SAVED,
    ),
    "sigterm_one_process": Row(
        "SIGTERM, one rank without a launcher",
        "mid-epoch",
        functools.partial(acts.signalled, signal.SIGTERM, "0", "mid-epoch", 0),
        "resumed",
        SAVED,
        ranks=1,
    ),
    "kill_one_process": Row(
        "SIGKILL, one rank without a launcher",
        "checkpoint",
        functools.partial(acts.signalled, signal.SIGKILL, "0", "checkpoint", 0),
        "resumed",
        ranks=1,
    ),
    "sigterm_twice": Row(
        "two signals: SIGTERM twice",
        "mid-epoch",
        functools.partial(acts.signalled, signal.SIGTERM, "0", "mid-epoch", 0, then=(signal.SIGTERM,)),
        "resumed",
        SAVED,
    ),
    "sigterm_sigint": Row(
        "two signals: SIGTERM, then Ctrl-C",
        "evaluation",
        functools.partial(acts.signalled, signal.SIGTERM, "all", "evaluation", 0, then=(signal.SIGINT,)),
        "resumed",
    ),
    "sigterm_sigkill": Row(
        "two signals: SIGTERM, then SIGKILL, to rank 0",
        "checkpoint",
        functools.partial(acts.signalled, signal.SIGTERM, "0", "checkpoint", 0, then=(signal.SIGKILL,)),
        "resumed",
    ),
    "kill_worker_mid_epoch": Row(
        "SIGKILL of a loader worker",
        "mid-epoch",
        functools.partial(acts.worker_killed, "mid-epoch"),
        "resumed",
        "DataLoader worker",
    ),
    "kill_worker_data": Row(
        "SIGKILL of a loader worker",
        "data",
        functools.partial(acts.worker_killed, "data"),
        "resumed",
        "DataLoader worker",
    ),
    "kill_worker_evaluation": Row(
        "SIGKILL of a loader worker",
        "evaluation",
        functools.partial(acts.worker_killed, "evaluation"),
        "resumed",
        "DataLoader worker",
    ),
    "oom_mid_epoch": Row(
        "out of memory: the kernel kills rank 1 (cgroup)",
        "mid-epoch",
        functools.partial(acts.killed_by_the_kernel, "mid-epoch", "1"),
        "resumed",
        "Another rank has ended without a word",
    ),
    "oom_evaluation": Row(
        "out of memory: the kernel kills rank 0 (cgroup)",
        "evaluation",
        functools.partial(acts.killed_by_the_kernel, "evaluation", "0"),
        "resumed",
    ),
    "oom_checkpoint": Row(
        "out of memory: the kernel kills rank 0 (cgroup)",
        "checkpoint",
        functools.partial(acts.killed_by_the_kernel, "checkpoint", "0"),
        "resumed",
    ),
    "no_memory_mid_epoch": Row(
        "out of memory: an allocation of rank 1 fails (RLIMIT_AS)",
        "mid-epoch",
        functools.partial(acts.no_address_space, "mid-epoch", "1"),
        "resumed",
    ),
    **{
        f"disk_full_{moment}".replace("-", "_"): Row(
            "disk full", moment, functools.partial(acts.disk_full, moment), "resumed", "cannot be written"
        )
        for moment in ("start", "first-step", "mid-epoch", "evaluation", "checkpoint", "target")
    },
    "store_away_start": Row(
        "store away", "start", functools.partial(acts.store_away_for_good, "start"), "refused", r"127\.0\.0\.1"
    ),
    "store_away": Row(f"store away for {AWAY_SEC:.0f} s", "fetch", acts.store_away, "went on", end_sec=None),
    "store_away_for_good": Row(
        "store away for longer than data.patience_sec",
        "fetch",
        functools.partial(acts.store_away_for_good, "fetch"),
        "resumed",
        r"data\.patience_sec=8",
    ),
    "store_slow": Row("store slow", "fetch", acts.store_slow, "went on", end_sec=None),
    "store_wrong_bytes": Row(
        "wrong bytes from the store for a while",
        "fetch",
        functools.partial(acts.store_wrong_bytes, True),
        "went on",
        "is damaged",
        end_sec=None,
    ),
    "store_wrong_for_good": Row(
        "wrong bytes from the store for good",
        "fetch",
        functools.partial(acts.store_wrong_bytes, False),
        "resumed",
        "is damaged: .* tries",
    ),
    "nan_first_step": Row(
        "loss not a number, on rank 1 alone",
        "first-step",
        functools.partial(acts.not_a_number, 1),
        "resumed",
        "not finite|nan",
    ),
    "nan_mid_epoch": Row(
        "loss not a number, on rank 1 alone",
        "mid-epoch",
        functools.partial(acts.not_a_number, 3),
        "resumed",
        "not finite|nan",
    ),
    "slow_mid_epoch": Row(
        f"rank 1 stopped for {SLOW_SEC:.0f} s",
        "mid-epoch",
        functools.partial(acts.slowed, "mid-epoch", "1"),
        "went on",
        end_sec=None,
    ),
    "slow_evaluation": Row(
        f"rank 1 stopped for {SLOW_SEC:.0f} s",
        "evaluation",
        functools.partial(acts.slowed, "evaluation", "1"),
        "went on",
        end_sec=None,
    ),
    "stopped_mid_epoch": Row(
        f"rank 1 stopped for good (SIGSTOP; health.stall_sec={STALL_SEC:g})",
        "mid-epoch",
        functools.partial(acts.stopped_for_good, "mid-epoch"),
        "resumed",
        r"nothing heard of rank 1 .* It is stopped, dead or cut off",
        end_sec=STOPPED_SEC,
    ),
    "clock_back_mid_epoch": Row(
        "clock set back by an hour",
        "mid-epoch",
        functools.partial(acts.clock_back, "mid-epoch", None),
        "went on",
        end_sec=None,
    ),
    "clock_back_evaluation": Row(
        "clock set back by an hour",
        "evaluation",
        functools.partial(acts.clock_back, "evaluation", None),
        "went on",
        end_sec=None,
    ),
    "clock_back_and_killed": Row(
        "clock set back by an hour, then SIGKILL of rank 0",
        "mid-epoch",
        functools.partial(acts.clock_back, "mid-epoch", signal.SIGKILL),
        "resumed",
    ),
    "twice_start": Row(
        "the same run name twice at once",
        "start",
        functools.partial(acts.same_name_twice, "start", 0),
        "refused",
        "another process is training in",
    ),
    "twice_mid_epoch": Row(
        "the same run name twice at once",
        "mid-epoch",
        functools.partial(acts.same_name_twice, "mid-epoch", 0),
        "refused",
        "another process is training in",
    ),
    "later_version": Row(
        "checkpoint of a version to come", "start", acts.other_schema, "refused", "has schema 2; this version reads 1"
    ),
}
