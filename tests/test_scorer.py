"""evaluation/scorer.py and eval.py without a network: valid configurations, when a target is met, what is scored."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
import torch
from composer import ComposerModel, Trainer
from conftest import TINY_RUN
from test_benchmark import refused
from torch.utils.data import DataLoader, TensorDataset

from callbacks.periodic import EveryNImages
from callbacks.quality_target import target_outcome
from callbacks.sample_grid import make_grid
from checkpointing.content import Progress
from common.command_line import parse_command_line
from common.errors import ConfigError
from config import load
from evaluation.scorer import EvalConfig, TargetConfig, rounded_up
from evaluation.scores import score_to_target
from training.config import RunConfig, resolve
from training.start import check_evaluations

WHOLE = {"partial": False, "fid": 80.0, "clip": 0.2}


@pytest.mark.parametrize(
    ("target", "score", "met"),
    [
        (TargetConfig(90.0, 0.15), WHOLE, True),
        (TargetConfig(80.0, 0.2), WHOLE, True),  # at the target is met
        (TargetConfig(79.9, 0.15), WHOLE, False),
        (TargetConfig(90.0, 0.21), WHOLE, False),
        (TargetConfig(90.0, None), {**WHOLE, "clip": None}, True),
        (TargetConfig(90.0, 0.15), {**WHOLE, "clip": None}, False),
        (TargetConfig(90.0, 0.15), {**WHOLE, "partial": True}, False),
        (TargetConfig(), WHOLE, False),
    ],
)
def test_a_target_is_met_by_both_figures_of_a_whole_score(target, score, met):
    assert target.is_met(score) is met


def test_the_cadence_is_the_rules():
    """CEIL(512000 / GBS) x GBS, mlcommons/training_policies; checkpoints follow it where nothing else is given."""
    for batch, images in ((384, 512_256), (512, 512_000), (2048, 512_000), (600_000, 600_000)):
        assert rounded_up(512_000, batch) == images
    run = resolved("eval.when=after", "global_batch_size=384", "data.remote=x", "ema.enabled=true")
    assert (run.eval.every_images, run.eval.weights) == (512_256, "ema")
    assert (run.save.every_images, run.save.snapshot_every_images) == (512_256, 512_256)
    assert resolved("eval.when=off").eval == EvalConfig(sampler="ddim")  # YAML's `off` is a truth value


@pytest.mark.parametrize(
    ("passing", "begin", "scored"),
    [
        ((3, 4), 0, [0, 1, 2, 3]),  # in order, to the first that passes
        ((3, 4), 3, [3, 2]),  # the hint was the first to pass: the one before it is wanted
        ((1, 2, 3, 4), 3, [3, 2, 1, 0]),  # backwards to one that does not
        ((0, 1, 2, 3, 4), 0, [0]),
        ((), 2, [2, 3, 4]),
    ],
)
def test_the_first_that_passes_and_the_one_before_it_are_scored(passing, begin, scored):
    snapshots = [lambda n=n: {"n": n} for n in range(5)]
    assert [row["n"] for row in score_to_target(snapshots, begin, lambda row: row["n"] in passing)] == scored


def test_the_result_of_a_run_is_the_first_score_that_met_the_target_or_the_last():
    lines = [{"images": n, "seconds": n / 2, "seconds_with_eval": n, "fid": 100.0 - n, "clip": None} for n in (8, 16)]
    seconds = {"seconds_to_target": 4.0, "seconds_to_target_with_eval": 8}
    reached = {"target": "reached", "images_to_target": 8, **seconds, "fid": 92.0, "clip": None}
    assert target_outcome(lines, lines[0]) == reached
    missed = {"target": "missed", "images_to_target": None, "fid": 84.0}
    assert missed.items() <= target_outcome(lines, None).items() and target_outcome([], None)["fid"] is None


def test_a_grid_has_each_image_at_its_place():
    images = [torch.full((3, 4, 6), n, dtype=torch.uint8) for n in range(5)]
    grid = make_grid(images)  # three columns, two rows
    assert grid.shape == (3, 2 * 4 + 2, 3 * 6 + 2 * 2)
    assert [int(grid[0, 6 * (n // 3), 8 * (n % 3)]) for n in range(6)] == [0, 1, 2, 3, 4, 255]


def resolved(*words: str) -> RunConfig:
    return resolve(load(RunConfig, parse_command_line(words, {}), check=lambda config: []))


def begins(lines: list[str], texts: list[str]) -> bool:
    return len(lines) == len(texts) and all(map(str.startswith, lines, texts))


IN_TRAINING = "eval.when=in_training"
FILES = "eval.prompts=/no/prompts eval.statistics=/no/statistics eval.inception=/no/inception eval.clip=/no/clip"


@pytest.mark.parametrize(
    ("wrong", "texts"),
    [
        (
            f"{IN_TRAINING} eval.guidance=[1,2] eval.inception=random eval.weights=ema eval.image_size=60 target.clip=0.1",
            [
                *("eval.prompts", "eval.statistics", "target.clip", "eval.weights", "eval.guidance", "eval.image_size"),
                "eval.every_images: 512,000, but max_duration=4ba is 32: nothing would be evaluated.",
            ],
        ),
        ("target.fid=90", ["target.fid: given, but nothing is evaluated."]),
        (
            f"{FILES} {IN_TRAINING} eval.every_images=8",
            [f"eval.{key}: no file /no/{key}." for key in ("prompts", "statistics", "inception", "clip")],
        ),
        # Scored on another machine, later: only there the files have to be.
        (
            f"{FILES} eval.when=after eval.every_images=8 save.snapshot_every_images=16",
            ["save.snapshot_every_images: 16, but eval.when=after scores snapshots every 8 images."],
        ),
    ],
)
def test_every_problem_of_an_evaluation_is_named_at_once(capsys, tmp_path, wrong, texts):
    assert begins(refused(capsys, *TINY_RUN, "--use_synth_data", f"run_folder={tmp_path}", *wrong.split()), texts)


class Mean(ComposerModel):
    """As little of a model as can be trained."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, batch):
        return batch[0] * self.weight

    def loss(self, outputs, batch):
        return outputs.square().mean()


def test_evaluations_are_in_no_clock_that_a_checkpoint_keeps():
    """So that `seconds` stay right through a stop, a start without evaluation, and one with it again."""
    lines: list[dict] = []
    evaluation = EveryNImages(
        lambda: time.sleep(1.0),
        lambda where, found, logger: lines.append(where),
        every_images=2,
        average=None,
        clock=contextlib.nullcontext,
        is_done=lambda batch: any(line["batch"] == batch for line in lines),
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    data = DataLoader(TensorDataset(torch.zeros(6, 1)), batch_size=2)
    ways = dict(max_duration="4ba", callbacks=[evaluation], progress_bar=False, device="cpu")
    trainer = Trainer(model=Mean(), train_dataloader=data, optimizers=optimizer, **ways)
    began = time.monotonic()
    trainer.fit()
    took_sec = time.monotonic() - began
    assert [line["batch"] for line in lines] == [1, 2, 3, 4]
    assert 0.0 < lines[0]["seconds"] < lines[-1]["seconds"] < took_sec - 4 * 1.0 + 0.5  # all but the evaluations
    assert Progress.of(trainer.state).seconds == pytest.approx(lines[-1]["seconds"])


def test_an_evaluation_has_to_be_like_the_last_one_before_the_start(tmp_path):
    same = {"clip_fingerprint": "ab", "eval_precision": "fp32", "eval_weights": "ema"}
    line = {"evaluation": True, "seconds": 1.0, "eval_sec": 1.0, **same}
    lines = [{**line, "batch": n, "images": 8 * n, "guidance": 2.0 + n} for n in (1, 2, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    like = {**same, "guidance": 4.0, "eval_batch_size": 4}
    check_evaluations(tmp_path, 2, like)
    with pytest.raises(ConfigError) as caught:
        check_evaluations(tmp_path, 2, {**like, "guidance": 3.0, "clip_fingerprint": None, "eval_precision": "fp16"})
    was = f"but {tmp_path} was evaluated with"
    texts = [
        f"eval.guidance: guidance 3.0, {was} 4.0 at",
        f"eval.clip: clip_fingerprint None, {was} ab at 16 images. A ",
    ]
    texts.append(f"eval.precision: eval_precision fp16, {was} fp32 at 16 images")
    assert begins(sorted(caught.value.problems), sorted(texts))
