"""The table: fault x moment, what is done, and what has to come of it.

Each row is a function of a row under way (actions.py). It returns a verdict, whose outcome has to be the row's:

    resumed    the run ended; the same command again ended as the unbroken run
    went on    the run did not end, and ended as the unbroken run
    refused    a start was refused with a message that says why; what was there is as it was
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tests.faults import actions
from tests.faults.actions import AWAY_SEC, SLOW_SEC, STALL_SEC, STOPPED_SEC
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


def _row(
    fault: str,
    moment: str,
    outcome: Outcome,
    act: Callable[..., Verdict],
    *args: Any,
    said: str | None = None,
    ranks: int = 2,
    end_sec: float | None = END_SEC,
    **named: Any,
) -> Row:
    """Return a row whose action has these arguments before the row under way; a run that goes on has no limit to its end."""
    action = functools.partial(act, *args, **named) if args else act
    return Row(fault, moment, action, outcome, said, ranks, None if outcome == "went on" else end_sec)


def _signals(name: str, number: int, to: dict[str, str], said: str | None = None) -> dict[str, Row]:
    """Return the rows of one signal. `to`: moment -> whom; rank 1 halts where it is hit, or waits for data, else rank 0."""
    rows = {}
    for moment, whom in to.items():
        halted = 1 if (whom == "1" and moment != "checkpoint") or moment == "data" else 0
        act = functools.partial(actions.signalled, number, whom, moment, halted)
        outcome: Outcome = "went on" if said and moment == "target" else "resumed"
        fault = f"{signal.Signals(number).name} to {NAMES[whom]}"
        message = said if moment in IN_FIT else None
        rows[f"{name}_{moment}".replace("-", "_")] = Row(fault, moment, act, outcome, message)
    return rows


NAMES = {"0": "rank 0", "1": "rank 1", "all": "every process", "launcher": "the launcher"}
EIGHT = ("start", "first-step", "mid-epoch", "evaluation", "checkpoint", "target", "after", "data")
IN_FIT = ("first-step", "mid-epoch", "evaluation", "checkpoint", "data")
SAVED = r"SIGTERM: stopped after batch \d+; .* The same command resumes it\."
SAVED_BY_INT = SAVED.replace(
    "TERM", "(INT|TERM)"
)  # one after the other: the launcher's SIGTERM may arrive before SIGINT
TAKEN, LOST, NAN = "another process is training in", "DataLoader worker", "not finite|nan"
TERM, INT, KILL, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGUSR1
OOM, TWICE, FOR = "out of memory: the kernel kills rank", "the same run name twice at once", f"for {SLOW_SEC:.0f} s"

ROWS: dict[str, Row] = {
    **_signals("sigterm", TERM, dict(zip(EIGHT, ("1", "0", "1", "0", "all", "0", "0", "0"), strict=True)), SAVED),
    **_signals("sigint", INT, dict.fromkeys(EIGHT, "all"), SAVED_BY_INT),
    **_signals("kill_rank_0", KILL, dict.fromkeys(EIGHT, "0")),
    **_signals("kill_rank_1", KILL, dict.fromkeys(EIGHT, "1")),
    **_signals("kill_all", KILL, dict.fromkeys(("mid-epoch", "evaluation", "checkpoint", "target"), "all")),
    **{
        f"kill_launcher_{moment}".replace("-", "_"): _row(
            "SIGKILL of the launcher", moment, "refused", actions.launcher_killed, moment, 0, said=TAKEN
        )
        for moment in ("start", "mid-epoch", "evaluation", "checkpoint")
    },
    "sigterm_imports": _row("SIGTERM to every process", "start", "resumed", actions.cold_start, TERM, "all"),
    "kill_imports": _row("SIGKILL of both ranks", "start", "resumed", actions.cold_start, KILL, "ranks"),
}


def _signalled(name: str, fault: str, moment: str, number: int, to: str, halted: int = 0, **more: Any) -> None:
    ROWS[name] = _row(fault, moment, "resumed", actions.signalled, number, to, moment, halted, **more)


_signalled("sigusr1_mid_epoch", "SIGUSR1 to rank 1", "mid-epoch", USR1, "1", 1, said=SAVED.replace("TERM", "USR1"))
_signalled("sigterm_launcher_mid_epoch", "SIGTERM to the launcher", "mid-epoch", TERM, "launcher", said=SAVED)
_signalled("sigterm_one_process", "SIGTERM, one rank without a launcher", "mid-epoch", TERM, "0", said=SAVED, ranks=1)
_signalled("kill_one_process", "SIGKILL, one rank without a launcher", "checkpoint", KILL, "0", ranks=1)
_signalled("sigterm_twice", "two signals: SIGTERM twice", "mid-epoch", TERM, "0", said=SAVED, then=(TERM,))
_signalled("sigterm_sigint", "two signals: SIGTERM, then Ctrl-C", "evaluation", TERM, "all", then=(INT,))
_signalled("sigterm_sigkill", "two signals: SIGTERM, then SIGKILL, to rank 0", "checkpoint", TERM, "0", then=(KILL,))
for _moment in ("mid-epoch", "data", "evaluation"):
    ROWS[f"kill_worker_{_moment}".replace("-", "_")] = _row(
        "SIGKILL of a loader worker", _moment, "resumed", actions.worker_killed, _moment, said=LOST
    )
for _moment, _rank, _said in (
    ("mid-epoch", "1", "Another rank has ended without a word"),
    ("evaluation", "0", None),
    ("checkpoint", "0", None),
):
    ROWS[f"oom_{_moment}".replace("-", "_")] = _row(
        f"{OOM} {_rank} (cgroup)", _moment, "resumed", actions.killed_by_the_kernel, _moment, _rank, said=_said
    )
ROWS["no_memory_mid_epoch"] = _row(
    "out of memory: an allocation of rank 1 fails (RLIMIT_AS)",
    "mid-epoch",
    "resumed",
    actions.no_address_space,
    "mid-epoch",
    "1",
)
for _moment in ("start", "first-step", "mid-epoch", "evaluation", "checkpoint", "target"):
    ROWS[f"disk_full_{_moment}".replace("-", "_")] = _row(
        "disk full", _moment, "resumed", actions.disk_full, _moment, said="cannot be written"
    )
ROWS |= {
    "store_away_start": _row(
        "store away", "start", "refused", actions.store_away_for_good, "start", said=r"127\.0\.0\.1"
    ),
    "store_away": _row(f"store away for {AWAY_SEC:.0f} s", "fetch", "went on", actions.store_away),
    "store_away_for_good": _row(
        "store away for longer than data.patience_sec",
        "fetch",
        "resumed",
        actions.store_away_for_good,
        "fetch",
        said=r"data\.patience_sec=8",
    ),
    "store_slow": _row("store slow", "fetch", "went on", actions.store_slow),
    "store_wrong_bytes": _row(
        "wrong bytes from the store for a while", "fetch", "went on", actions.store_wrong_bytes, True, said="is damaged"
    ),
    "store_wrong_for_good": _row(
        "wrong bytes from the store for good",
        "fetch",
        "resumed",
        actions.store_wrong_bytes,
        False,
        said="is damaged: .* tries",
    ),
}
for _moment, _batch in (("first-step", 1), ("mid-epoch", 3)):
    ROWS[f"nan_{_moment}".replace("-", "_")] = _row(
        "loss not a number, on rank 1 alone", _moment, "resumed", actions.not_a_number, _batch, said=NAN
    )
for _moment in ("mid-epoch", "evaluation"):
    ROWS[f"slow_{_moment}".replace("-", "_")] = _row(
        f"rank 1 stopped {FOR}", _moment, "went on", actions.slowed, _moment, "1"
    )
ROWS["stopped_mid_epoch"] = _row(
    f"rank 1 stopped for good (SIGSTOP; health.stall_sec={STALL_SEC:g})",
    "mid-epoch",
    "resumed",
    actions.stopped_for_good,
    "mid-epoch",
    said=r"nothing heard of rank 1 .* It is stopped, dead or cut off",
    end_sec=STOPPED_SEC,
)
for _name, _fault, _moment, _number in (
    ("clock_back_mid_epoch", "clock set back by an hour", "mid-epoch", None),
    ("clock_back_evaluation", "clock set back by an hour", "evaluation", None),
    ("clock_back_and_killed", "clock set back by an hour, then SIGKILL of rank 0", "mid-epoch", KILL),
):
    _outcome: Outcome = "resumed" if _number else "went on"
    ROWS[_name] = _row(_fault, _moment, _outcome, actions.clock_back, _moment, _number)
for _moment in ("start", "mid-epoch"):
    ROWS[f"twice_{_moment}".replace("-", "_")] = _row(
        TWICE, _moment, "refused", actions.same_name_twice, _moment, 0, said=TAKEN
    )
ROWS["later_version"] = _row(
    "checkpoint of a version to come",
    "start",
    "refused",
    actions.other_schema,
    said="has schema 2; this version reads 1",
)
