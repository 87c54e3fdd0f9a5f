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
from tests.faults.actions import SLOW_SEC, STALL_SEC, STOPPED_SEC
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


NAMES = {"0": "rank 0", "1": "rank 1", "all": "every process", "launcher": "the launcher"}
EIGHT = ("start", "first-step", "mid-epoch", "evaluation", "checkpoint", "target", "after", "data")
IN_FIT = ("first-step", "mid-epoch", "evaluation", "checkpoint", "data")
SAVED = r"SIGTERM: stopped after batch \d+; .* The same command resumes it\."
SAVED_BY_INT = SAVED.replace("TERM", "(INT|TERM)")  # in turn: the launcher's SIGTERM may arrive before SIGINT
TAKEN, NAN = "another process is training in", "not finite|nan"
TERM, INT, KILL, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGUSR1

ROWS: dict[str, Row] = {}


def _add(
    name: str,
    fault: str,
    moment: str,
    outcome: Outcome,
    act: Callable[..., Verdict],
    *args: Any,
    said: str | None = None,
    ranks: int = 2,
    end_sec: float | None = END_SEC,
    **named: Any,
) -> None:
    """Add a row whose action has these arguments before the row under way; a run that goes on has no limit to its end."""
    action = functools.partial(act, *args, **named) if args else act
    ROWS[name] = Row(fault, moment, action, outcome, said, ranks, None if outcome == "went on" else end_sec)


def _add_each(
    name: str, fault: str, moments: str, outcome: Outcome, act: Callable[..., Verdict], *args: Any, **more: Any
) -> None:
    """Add a row for each moment, which is the first argument of the action."""
    for moment in moments.split():
        _add(f"{name}_{moment}".replace("-", "_"), fault, moment, outcome, act, moment, *args, **more)


def _add_signals(name: str, number: int, to: dict[str, str], said: str | None = None) -> None:
    """Add the rows of one signal. `to`: moment -> whom; rank 1 halts where it is hit, or waits for data, else rank 0."""
    for moment, whom in to.items():
        halted = 1 if (whom == "1" and moment != "checkpoint") or moment == "data" else 0
        outcome: Outcome = "went on" if said and moment == "target" else "resumed"
        act = functools.partial(actions.signalled, number, whom, moment, halted)
        fault, message = f"{signal.Signals(number).name} to {NAMES[whom]}", said if moment in IN_FIT else None
        ROWS[f"{name}_{moment}".replace("-", "_")] = Row(fault, moment, act, outcome, message)


def _add_signal(name: str, fault: str, moment: str, number: int, to: str, halted: int = 0, **more: Any) -> None:
    _add(name, fault, moment, "resumed", actions.signalled, number, to, moment, halted, **more)


_add_signals("sigterm", TERM, dict(zip(EIGHT, ("1", "0", "1", "0", "all", "0", "0", "0"), strict=True)), SAVED)
_add_signals("sigint", INT, dict.fromkeys(EIGHT, "all"), SAVED_BY_INT)
_add_signals("kill_rank_0", KILL, dict.fromkeys(EIGHT, "0"))
_add_signals("kill_rank_1", KILL, dict.fromkeys(EIGHT, "1"))
_add_signals("kill_all", KILL, dict.fromkeys(("mid-epoch", "evaluation", "checkpoint", "target"), "all"))
FOUR, LAUNCHER = "start mid-epoch evaluation checkpoint", "SIGKILL of the launcher"
_add_each("kill_launcher", LAUNCHER, FOUR, "refused", actions.launcher_killed, 0, said=TAKEN)
_add("sigterm_imports", "SIGTERM to every process", "start", "resumed", actions.cold_start, TERM, "all")
_add("kill_imports", "SIGKILL of both ranks", "start", "resumed", actions.cold_start, KILL, "ranks")
_add_signal("sigusr1_mid_epoch", "SIGUSR1 to rank 1", "mid-epoch", USR1, "1", 1, said=SAVED.replace("TERM", "USR1"))
_add_signal("sigterm_launcher_mid_epoch", "SIGTERM to the launcher", "mid-epoch", TERM, "launcher", said=SAVED)
_add_signal("sigterm_one_process", "SIGTERM, one rank without a launcher", "mid-epoch", TERM, "0", said=SAVED, ranks=1)
_add_signal("kill_one_process", "SIGKILL, one rank without a launcher", "checkpoint", KILL, "0", ranks=1)
_add_signal("sigterm_twice", "two signals: SIGTERM twice", "mid-epoch", TERM, "0", said=SAVED, then=(TERM,))
_add_signal("sigterm_sigint", "two signals: SIGTERM, then Ctrl-C", "evaluation", TERM, "all", then=(INT,))
_add_signal("sigterm_sigkill", "two signals: SIGTERM, then SIGKILL, to rank 0", "checkpoint", TERM, "0", then=(KILL,))

WORKER, LOST, WAITING = "SIGKILL of a loader worker", "DataLoader worker", "mid-epoch data evaluation"
_add_each("kill_worker", WORKER, WAITING, "resumed", actions.worker_killed, said=LOST)
NO_MEMORY = "out of memory: an allocation of rank 1 fails (RLIMIT_AS)"
_add_each("no_memory", NO_MEMORY, "mid-epoch", "resumed", actions.no_address_space, "1")
SIX = "start first-step mid-epoch evaluation checkpoint target"
_add_each("disk_full", "disk full", SIX, "resumed", actions.disk_full, said="cannot be written")

NO_NUMBER = "loss not a number, on rank 1 alone"
_add("nan_first_step", NO_NUMBER, "first-step", "resumed", actions.not_a_number, 1, said=NAN)
_add("nan_mid_epoch", NO_NUMBER, "mid-epoch", "resumed", actions.not_a_number, 3, said=NAN)
_add_each("slow", f"rank 1 stopped for {SLOW_SEC:.0f} s", "mid-epoch evaluation", "went on", actions.slowed, "1")
_add_each(
    "stopped",
    f"rank 1 stopped for good (SIGSTOP; health.stall_sec={STALL_SEC:g})",
    "mid-epoch",
    "resumed",
    actions.stopped_for_good,
    said=r"nothing heard of rank 1 .* It is stopped, dead or cut off",
    end_sec=STOPPED_SEC,
)
TWICE, LATER = "the same run name twice at once", "has schema 2; this version reads 1"
_add_each("twice", TWICE, "start mid-epoch", "refused", actions.same_name_twice, 0, said=TAKEN)
_add("later_version", "checkpoint of a version to come", "start", "refused", actions.other_schema, said=LATER)
