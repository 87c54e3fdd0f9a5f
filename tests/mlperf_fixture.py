"""Logs made by the callback from published curves of MLPerf's reference: FIXTURES, not results of any run.

No network is trained. The callback is called as by the trainer, with an artificial clock and the reference's own FID and
CLIP score at each point, up to the first that passes. An event `fixture` marks every such log.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT
from omegaconf import OmegaConf

import benchmark
from callbacks.mlperf_log import MLPerfConfig, MLPerfLog
from common.command_line import parse_command_line
from common.errors import ConfigError
from config import load
from families import mlperf
from families.mlperf import FLUX, SD
from preflight.config_checks import quick_problems

FIXTURE = "written from the published curves of MLPerf's reference: not a result"
BEGAN = 1_700_000_000.0
LR_PER_IMAGE = 1.25e-7
IMAGES_PER_SEC = 1000.0

Point = Mapping[str, Any]


@functools.cache
def curves(global_batch_size: int) -> list[list[Point]]:
    """The reference's runs at a global batch, each a list of images, fid and clip."""
    found: dict[str, list[Point]] = {}
    with open(ROOT / "reports/mlperf_reference_runs.csv", newline="") as file:
        for row in csv.DictReader(file):
            if int(row["global_batch_size"]) == global_batch_size:
                point = {"images": int(row["images"]), "fid": float(row["fid"]), "clip": float(row["clip"])}
                found.setdefault(row["run"], []).append({**point, "eval_sec": 100.0})
    return list(found.values())


def passes(point: Point) -> bool:
    if "val_loss" in point:
        return point["val_loss"] <= FLUX.target["val_loss"]
    return point["fid"] <= mlperf.TARGET_FID and point["clip"] >= mlperf.TARGET_CLIP


def header(global_batch_size: int, seed: int, **changes: Any) -> dict[str, Any]:
    """What the benchmark's closed division has between init_start and init_stop."""
    head = {"seed": seed, "fixture": FIXTURE, "train_samples": 6_513_144, "eval_samples": 30_000}
    head |= {"gradient_accumulation_steps": 1, "global_batch_size": global_batch_size, "opt_name": "adamw"}
    adamw = {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8, "weight_decay": 0.01}
    return {
        **head,
        **{f"opt_adamw_{key}": value for key, value in adamw.items()},
        "opt_base_learning_rate": LR_PER_IMAGE * global_batch_size,
        "opt_learning_rate_warmup_steps": 1000,
        **changes,
    }


class Drive:
    """A run without a network: the callback, its clock, and the events of the trainer."""

    def __init__(
        self,
        folder: Path,
        config: MLPerfConfig | None = None,
        constants: Mapping[str, Any] | None = None,
        **changes: Any,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.time, self.evaluations = BEGAN + 60.0, []
        given = {"benchmark": SD.name, "every_images": SD.every_images, "in_training": True, **changes}
        self.log = MLPerfLog(
            folder,
            config or closed(),
            constants or header(512, 1),
            evaluations=lambda: self.evaluations,
            began=BEGAN,
            now=lambda: self.time,
            **given,
        )
        self.state = SimpleNamespace(
            timestamp=SimpleNamespace(sample=SimpleNamespace(value=0)),
            optimizers=[SimpleNamespace(param_groups=[{"lr": 1e-4}])],
            total_loss_dict={"loss/train/total": 0.5},
        )

    def start(self, images: int = 0, evaluations: Sequence[Point] = ()) -> Drive:
        """Begin, from a checkpoint at so many images where the record has these evaluations."""
        self.evaluations += evaluations
        self.state.timestamp.sample.value = images
        self.log.fit_start(self.state, None)
        return self

    def train(self, images: int) -> Drive:
        """To so many images, in one batch."""
        self.log.batch_start(self.state, None)
        self.time += (images - self.state.timestamp.sample.value) / IMAGES_PER_SEC
        self.state.timestamp.sample.value = images
        self.log.after_train_batch(self.state, None)
        self.state.optimizers[0].param_groups[0]["lr"] /= 2  # the schedule's step: the next batch's
        self.log.batch_end(self.state, None)
        return self

    def reach(self, *points: Point) -> Drive:
        """Train to each point, and evaluate there."""
        for point in points:
            self.train(point["images"])
            self.time += point["eval_sec"]
            self.evaluations.append(point)
            self.log.batch_checkpoint(self.state, None)
        return self

    def end(self) -> Drive:
        self.log.fit_end(self.state, None)
        reached = next(filter(passes, self.evaluations), None)
        self.log.stop(reached, self.state.timestamp.sample.value)
        return self

    def whole(self, points: Sequence[Point]) -> Drive:
        """A run to the first point that passes."""
        num = next((number for number, point in enumerate(points, 1) if passes(point)), len(points))
        return self.start().reach(*points[:num]).end()


def config_of(*words: str | Path) -> benchmark.RunConfig:
    """Return the configuration of a command line, unchecked."""
    return load(benchmark.RunConfig, parse_command_line([*map(str, words)], {}), check=lambda config: [])


def problems_of(*words: str) -> list[str]:
    """Return every problem of a run that is refused, but for memory, which takes seconds to estimate."""
    with pytest.raises(ConfigError) as refusal:
        load(benchmark.RunConfig, parse_command_line(words, {}), check=lambda run: quick_problems(run, []))
    return refusal.value.problems


def closed(ruleset: str = "5.0.0", **changes: Any) -> MLPerfConfig:
    given = {"division": "closed", "org": "Fixture", "platform": "no_machine", **changes}
    return MLPerfConfig(enabled=True, ruleset=ruleset, **given)


def write_run(folder: Path, points: Sequence[Point], *, seed: int, global_batch_size=512, **changes: Any) -> Path:
    """A whole run record of a fixture: its log, and the files that a report reads."""
    config = changes.pop("config", closed())
    drive = Drive(folder, config, header(global_batch_size, seed, **changes)).whole(points)
    record(folder, drive.evaluations, seed=seed, global_batch_size=global_batch_size, config=config)
    return folder


def record(
    folder: Path, points: Sequence[Point], *, seed: int, global_batch_size: int, config: MLPerfConfig, **more: Any
) -> None:
    """The files of a run that a report reads: config.yaml, metrics.jsonl, starts.jsonl, environment.json, summary.json."""
    given = {"run_name": folder.name, "seed": seed, "global_batch_size": global_batch_size}
    given |= {
        "mlperf": dataclasses.asdict(config),
        "target": {"fid": mlperf.TARGET_FID, "clip": mlperf.TARGET_CLIP},
        **more,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(given)))
    lines = [{"evaluation": True, "partial": False, "num_images": 30_000, **point} for point in points]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "starts.jsonl").write_text(json.dumps({"start": 1, "batch": 0}) + "\n")
    machine = {"schema": 1, "commit": "0", "device": "no machine", "num_devices": 8}
    machine |= {"torch_version": "2.7.0", "platform": "Linux x86_64"}
    (folder / "environment.json").write_text(json.dumps(machine))
    outcome = "reached" if any(map(passes, points)) else "missed"
    (folder / "summary.json").write_text(json.dumps({**machine, "target": outcome, "images_per_sec": 1000.0}))
