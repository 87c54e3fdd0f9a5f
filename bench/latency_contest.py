"""One contest of bench.latency: a model in several ways to compute, and diffusers' pipeline over the same networks.

They share a process and its weights, or each has its own (`processes`), set up as the command that it stands for.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from bench.contest import Figures, rounded, take_turns
from bench.latency_makers import (
    WAYS,
    Apart,
    Case,
    Clocked,
    Maker,
    Turn,
    model_of,
    ours,
    precision_problem,
    theirs,
    turn,
    way_problem,
)
from bench.pipeline import twin_of
from cli.limits import shown
from model import AUTOCAST_DTYPES, LatentDiffusion
from record.processes import OUT_OF_MEMORY
from reports.latency import PIPELINE


class Lost(Exception):
    """A contestant that cannot go on; its own exception is the cause."""


class Contest:
    """The contestants of one case, and what becomes of them.

    Attributes:
        status: contestant -> ok, skipped, out_of_memory or failed.
        reasons: contestant -> why it is not ok.
    """

    def __init__(self, case: Case, ways: Sequence[str]):
        self.case = case
        self.status: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.models: dict[str, LatentDiffusion] = {}
        self.makers: dict[str, Maker] = {}
        self.apart: dict[str, Apart] = {}
        self.last: dict[str, Turn] = {}
        self.cpu_sec: dict[str, list[float]] = {}
        self.first_sec: dict[str, float] = {}
        self.shares: dict[str, dict[str, float]] = {}
        for name in (PIPELINE, *ways):
            if text := precision_problem(case.precision) or (
                way_problem(name, case.precision) if name in WAYS else None
            ):
                self.status[name], self.reasons[name] = "skipped", text
            else:
                self.status[name] = "ok"

    def names(self) -> list[str]:
        """Those that are still in it."""
        return [name for name, status in self.status.items() if status == "ok"]

    def measure(self) -> dict[str, Any]:
        """Measure, and return what the record says of this case."""
        load = round(os.getloadavg()[0], 2)
        try:
            figures = self._measured()
        finally:
            for one in self.apart.values():
                one.close()
        return {
            **dataclasses.asdict(self.case),
            "load_average_before": load,
            "status": self.status,
            "reasons": self.reasons,
            **figures.flat,
            "by_round": figures.by_round,
        }

    def _measured(self) -> Figures:
        self._build()
        for name in self.names():
            with self._at_its_own_risk(name):
                self.first_sec[name] = rounded(self._turn(name))
        values: dict[str, list[float]] = {}
        while self.names():
            try:
                self.cpu_sec = {name: [] for name in self.names()}
                values = take_turns(
                    {name: functools.partial(self._turn, name) for name in self.names()},
                    self.case.rounds,
                    warm_up=False,
                )
                break
            except Lost as lost:
                self._lose(str(lost), lost.__cause__)
        for name in self.names():
            if name != PIPELINE:
                with self._at_its_own_risk(name):
                    self.shares[name] = self._shares(name)
        return self._figures(values)

    def _build(self) -> None:
        """Build each contestant: modules of its own, the same tensors wherever types and memory format are the same."""
        if not self.names():
            return
        if self.case.processes:
            self.apart = {name: Apart(self.case, name) for name in self.names()}
            return
        torch._dynamo.reset()
        try:
            model = model_of(self.case)
        except Exception as error:
            for name in self.names():
                self._lose(name, error)
            return
        for name in self.names():
            with self._at_its_own_risk(name):
                if name == PIPELINE:
                    differs = self.case.channels_last or self.case.precision in AUTOCAST_DTYPES
                    self.models[name] = copy.deepcopy(model) if differs else twin_of(model)
                    self.makers[name] = theirs(self.models[name], self.case)
                else:
                    self.models[name] = twin_of(model)
                    self.makers[name] = ours(self.models[name], self.case, name)

    def _turn(self, name: str) -> float:
        try:
            is_apart = name in self.apart
            made = self.apart[name].ask("turn") if is_apart else turn(self.makers[name], self.models[name].device)
        except Exception as error:
            raise Lost(name) from error
        self.last[name] = made
        self.cpu_sec.setdefault(name, []).append(made.cpu_sec)
        return made.seconds

    def _shares(self, name: str) -> dict[str, float]:
        if name in self.apart:
            return self.apart[name].ask("shares")
        return Clocked(self.models[name]).shares(self.makers[name])

    @contextlib.contextmanager
    def _at_its_own_risk(self, name: str) -> Iterator[None]:
        """Do something for one contestant: where it fails, the others go on without it."""
        try:
            yield
        except Lost as lost:
            self._lose(name, lost.__cause__)
        except Exception as error:
            self._lose(name, error)

    def _lose(self, name: str, error: BaseException | None) -> None:
        """Note why a contestant is out, and free what it holds."""
        is_memory = isinstance(error, MemoryError) or any(text in str(error) for text in OUT_OF_MEMORY)
        self.status[name] = "out_of_memory" if is_memory else "failed"
        self.reasons[name] = shown(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", 300)
        if name in self.apart:
            self.apart.pop(name).close()
        for kept in (self.models, self.makers, self.last):
            kept.pop(name, None)
        if error is not None:
            error.__traceback__ = None  # its frames hold tensors
        free()

    def _figures(self, values: dict[str, list[float]]) -> Figures:
        figures = Figures()
        names = self.names()
        for name in names:
            figures.add(f"{name}_sec", values[name])
            figures.add(f"{name}_cpu_sec", self.cpu_sec[name])
            figures.flat[f"{name}_sec_p95"] = rounded(float(np.percentile(values[name], 95)))
            figures.flat[f"{name}_first_sec"] = self.first_sec[name]
            if self.case.processes:
                figures.flat[f"{name}_peak_mem_gib"] = rounded(self.last[name].peak_mem_gib)
        for way in (name for name in names if name != PIPELINE):
            for other in (PIPELINE, "eager"):
                if other in names and other != way:
                    figures.ratio(f"{way}_speedup_vs_{other}", f"{other}_sec", f"{way}_sec")
                    figures.ratio(f"{way}_cpu_speedup_vs_{other}", f"{other}_cpu_sec", f"{way}_cpu_sec")
            figures.flat |= {f"{way}_{part}_frac": share for part, share in self.shares[way].items()}
            images = self.last[way].images
            figures.flat[f"{way}_image_std"] = _finite(images.std())  # the images are not one colour
            if PIPELINE in names:
                difference = np.abs(images - self.last[PIPELINE].images).max()
                figures.flat[f"{way}_max_abs_difference"] = _finite(difference)
        return figures


def _finite(value: np.floating) -> float | None:
    return rounded(float(value)) if np.isfinite(value) else None


def free() -> None:
    """Give back the memory of what is not in use any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
