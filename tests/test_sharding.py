"""Weights that are shared out over ranks train, are saved and go on as whole ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run, started

import benchmark
from checkpointing import sharded
from checkpointing.files import FULL, WEIGHTS, find_damage, find_newest, list_checkpoints, read_checkpoint, read_outline
from config import flatten
from families.encoders import ModelConfig
from run_folder.files import evaluations_of
from training import sharding
from training.config import RunConfig
from training.initial_weights import load

TOLERANCE = 1e-6
NAME = "shard-00002-model-00001-of-00001.safetensors"
# The rate of Stable Diffusion. AdamW's first step moves each weight by it, whatever its gradient; where that is as small as
# eps, the order in which ranks are added moves the weight too. With the usual 1e-8 one weight was 2e-6 apart on four ranks.
KEYS = ["optimizer.lr=1e-4", "optimizer.eps=1e-6", "ema.enabled=true"]
KEYS += ["save.every_images=8", "save.keep=99", "save.snapshot_every_images=16"]


@pytest.fixture(scope="module")
def words_of(miniature):
    return lambda folder, name, *more: miniature.small(folder, name, *KEYS, *more)


def trained(num: int, words: list[str], *, code: int = 0, script: str = "benchmark.py") -> str:
    """Train on so many ranks; return what was said."""
    done = run("composer", "-n", str(num), script, *words, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def content_of(folder: Path) -> dict[str, Any]:
    """The content of a run's newest checkpoint with whole tensors."""
    path = list_checkpoints(folder / "checkpoints", FULL)[0]
    content = read_outline(path)
    return sharded.fill_outline(path, content, ("model", "ema", "optimizer")) if path.is_dir() else content


def distance(one: Path, other: Path) -> float:
    """The greatest difference between the tensors of two runs' checkpoints: weights, EMA weights, moments."""
    of_one, of_other = (
        dict(sharded.flatten_tensors({key: content[key] for key in ("model", "ema")}, lambda tensor: True))
        | dict(sharded.flatten_tensors({"state": content["optimizer"]["state"]}, lambda tensor: True))
        for content in (content_of(folder) for folder in (one, other))
    )
    assert of_one.keys() == of_other.keys() and len(of_one) > 100
    return max(float((of_one[name] - of_other[name]).abs().max()) for name in of_one)


def losses_of(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(words_of, tmp_path_factory) -> Path:
    """The same run of four batches on two ranks: whole weights, and shared ones."""
    folder = tmp_path_factory.mktemp("sharding")
    trained(2, words_of(folder, "ddp"))
    trained(2, words_of(folder, "full", "sharding=full"))
    return folder


# --- training ---


@pytest.mark.long
@pytest.mark.timeout(400, func_only=True)
def test_shared_weights_are_trained_as_whole_ones(runs):
    """Weights, EMA weights and moments after clipped steps, and the losses, against DDP's."""
    assert distance(runs / "full", runs / "ddp") < TOLERANCE
    assert losses_of(runs / "full") == pytest.approx(losses_of(runs / "ddp"), abs=TOLERANCE)
    path = list_checkpoints(runs / "full" / "checkpoints", FULL)[0]
    assert {file.name for file in path.iterdir()} == {"files.json", "run.pt", NAME, NAME.replace("00002", "00001")}
    sizes = [file.stat().st_size for file in path.glob("*.safetensors")]
    assert min(sizes) > 0.4 * sum(sizes)  # each rank wrote its part


@pytest.mark.long
def test_a_snapshot_of_shared_weights_is_one_file_as_always(runs):
    of_full, of_ddp = (list_checkpoints(runs / name / "checkpoints", WEIGHTS) for name in ("full", "ddp"))
    assert [path.name[:22] for path in of_full] == ["weights-im000000000032", "weights-im000000000016"]
    one, other = (read_checkpoint(paths[0]) for paths in (of_full, of_ddp))
    for section in (lambda content: content["model"], lambda content: content["ema"]["weights"]):
        torch.testing.assert_close(section(one), section(other), atol=TOLERANCE, rtol=0.0)


@pytest.mark.long
@pytest.mark.timeout(500, func_only=True)
def test_every_familys_gradients_are_those_of_the_whole_network(tmp_path):
    """Also recomputed, compiled block by block, and in bfloat16, where the last digits of a sum differ."""
    trained(2, [str(tmp_path / "out.json"), "full"], script="tests/sharded_ranks.py")
    result = json.loads((tmp_path / "out.json").read_text())
    assert {name.split()[0] for name in result} == {"sd2", "sdxl", "flux", "shapes", "mochi", "hunyuan_video", "wan"}
    for name, value in result.items():
        assert value < (0.02 if name.endswith("bf16") else TOLERANCE), (name, value)


# --- checkpoints ---


@pytest.mark.slow
@pytest.mark.timeout(400, func_only=True)
@pytest.mark.parametrize(
    ("begun", "num", "how"),
    [("ddp", 2, "full"), pytest.param("full", 2, "off", marks=pytest.mark.long), ("full", 1, "full")],
)
def test_a_run_resumes_with_either_sharding(runs, words_of, tmp_path, begun, num, how):
    """In the middle of an epoch. As it was begun, bit for bit: see below. One rank has nobody to share with."""
    shutil.copytree(runs / begun, tmp_path / "a")
    for path in [*list_checkpoints(tmp_path / "a" / "checkpoints", FULL)[:2], tmp_path / "a" / "summary.json"]:
        sharded.remove_checkpoint(path)
    output = trained(num, words_of(tmp_path, "a", f"sharding={how}"))
    assert "resumes from batch 2, 16 images" in output
    if num == 1:
        assert list_checkpoints(tmp_path / "a" / "checkpoints", FULL)[0].is_file()
        return
    assert distance(tmp_path / "a", runs / begun) < TOLERANCE


@pytest.mark.long
@pytest.mark.timeout(400, func_only=True)
def test_bfloat16_weights_and_moments_go_on_bit_for_bit_in_parts(words_of, tmp_path):
    """Each part is rounded by random numbers of its own: after two steps more the run is the unbroken one."""
    keys = ["sharding=full", "precision=bf16_params", "optimizer.states=bf16"]
    trained(2, words_of(tmp_path, "whole", *keys))
    trained(2, words_of(tmp_path, "part", *keys, "max_duration=2ba"))
    trained(2, words_of(tmp_path, "part", *keys))
    assert distance(tmp_path / "part", tmp_path / "whole") == 0.0
    tensors = content_of(tmp_path / "whole")["model"]
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


@pytest.fixture
def parts(runs, tmp_path) -> Path:
    """A copy of the shared run's checkpoints: the newest one, of batch 4, and the one before."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for path in list_checkpoints(runs / "full" / "checkpoints", FULL)[:2]:
        shutil.copytree(path, folder / path.name)
    return folder


CHANGED = "is cut, changed, or of another save"
DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    f"its {NAME} is missing": lambda new, old: (new / NAME).unlink(),
    f"its {NAME} {CHANGED}": lambda new, old: shutil.copy(old / NAME, new),  # of the same size
    "its files.json is missing": lambda new, old: (new / "files.json").unlink(),
    f"its files.json {CHANGED}": lambda new, old: shutil.copy(old / "files.json", new),
}
"""Reason -> what is done to a checkpoint, which has one before it."""


@pytest.mark.long
@pytest.mark.parametrize("reason", DAMAGES)
def test_a_damaged_part_is_named_and_the_checkpoint_before_is_taken(parts, capsys, reason):
    newest, before = list_checkpoints(parts, FULL)
    copy = shutil.copytree(newest, parts.parent / newest.name)
    (parts / ".full-ba000000000009.tmp").mkdir()  # what a killed save has left
    DAMAGES[reason](newest, before)
    assert find_damage(newest) == reason
    assert find_newest(parts) == before
    assert f"checkpoints: {newest} is damaged ({reason}); set aside.\n" in capsys.readouterr().err
    assert {path.name for path in parts.iterdir()} == {before.name, f"{newest.name}.damaged"}
    shutil.copytree(copy, newest)
    assert find_newest(parts) == newest
    (newest / NAME).unlink()
    assert find_newest(parts) == before, "a restored copy that is damaged too is set aside again"


@pytest.mark.long
@pytest.mark.timeout(300, func_only=True)
def test_a_rank_that_dies_while_all_write_leaves_no_checkpoint_and_the_run_goes_on(runs, words_of, tmp_path):
    """Rank 1 is killed as soon as it begins to write its part of the second checkpoint."""
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    with started("composer", "-n", "2", str(script), *words_of(tmp_path, "a", "sharding=full")) as process:
        assert process.wait(timeout=200) != 0
    folder = tmp_path / "a" / "checkpoints"
    assert [path.name[:19] for path in list_checkpoints(folder, FULL)] == ["full-ba000000000001"]
    trained(2, words_of(tmp_path, "a", "sharding=full"))
    assert distance(tmp_path / "a", runs / "full") == 0.0


DIES = """import os, signal, sys
from common import dist
from torch.distributed.checkpoint import HuggingFaceStorageWriter
import benchmark
whole, calls = HuggingFaceStorageWriter.write_data, []
def write_data(self, plan, planner):
    calls.append(plan)
    if dist.get_global_rank() == 1 and len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(self, plan, planner)
HuggingFaceStorageWriter.write_data = write_data
sys.exit(benchmark.main(sys.argv[1:]))
"""


@pytest.mark.long
def test_training_begins_with_the_weights_of_a_checkpoint_in_parts(runs):
    """model.denoiser names the run; export and eval.py read it the same way."""
    from test_families import tiny

    model = tiny("shapes", "stock")
    path = list_checkpoints(runs / "full" / "checkpoints", FULL)[0]
    assert load(model, str(path)) == [f"begins with {path} (batch 4, 32 images)"]
    wanted = content_of(runs / "full")["model"]
    assert all(torch.equal(t, wanted[f"denoiser.{name}"]) for name, t in model.denoiser.state_dict().items())


# --- between batches ---


@pytest.mark.long
@pytest.mark.timeout(400, func_only=True)
def test_evaluation_validation_and_grids_are_those_of_whole_weights(words_of, miniature, tmp_path):
    """31 prompts on two ranks in passes of 16: one rank has less to do. Scores are compared; images to a grey level."""
    more = ["eval.when=in_training", "eval.every_images=16", "eval.num_prompts=17", "eval.batch_size=8"]
    more += ["samples.every_images=16", "eval.samples=3", "max_duration=4ba"]
    for name, how in (("ddp", "off"), ("full", "full")):
        trained(2, words_of(tmp_path, name, *more, f"sharding={how}"))
    lines = [evaluations_of(tmp_path / name) for name in ("ddp", "full")]
    assert len(lines[0]) == len(lines[1]) == 2
    for one, other in zip(*lines, strict=True):
        assert one["fid"] == pytest.approx(other["fid"], rel=1e-4)
        assert one["clip"] == pytest.approx(other["clip"], abs=1e-5)
    names = [sorted(path.name for path in (tmp_path / name / "samples").iterdir()) for name in ("ddp", "full")]
    assert names[0] == names[1] and len(names[0]) == 4


# --- bad input ---


@pytest.mark.slow
def test_what_contradicts_sharding_is_refused_by_name(words_of, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sharding.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(sharding.dist, "get_local_world_size", lambda: 2)
    for setting in ("optimizer.states=8bit", "lora.rank=4", "channels_last=true", "compile=whole", "ema.device=cpu"):
        assert benchmark.main(words_of(tmp_path, "a", "sharding=full", setting)) == 2
        assert f"{setting.replace('=', ': ')}, but sharding=full: " in capsys.readouterr().err


@pytest.mark.parametrize(("num", "of_machine", "how"), [(64, 8, "full"), (128, 64, "hybrid")])
def test_more_ranks_than_blocks_are_refused(monkeypatch, num, of_machine, how):
    monkeypatch.setattr(sharding.dist, "get_world_size", lambda: num)
    monkeypatch.setattr(sharding.dist, "get_local_world_size", lambda: of_machine)
    model = ModelConfig(family="sd2", preset="tiny")
    [(key, text)] = sharding.problems(flatten(RunConfig(sharding=how, model=model)), model)
    assert key == "sharding" and 4 < sharding.num_blocks(model) < 64
    assert text.startswith(f"{how} over 64 ranks, but the denoiser has {sharding.num_blocks(model)} blocks: ")


@pytest.mark.long
@pytest.mark.timeout(400, func_only=True)
def test_hybrid_on_two_machines_trains_as_whole_weights_on_four_ranks(words_of, tmp_path):
    """Two launchers of two ranks each, as on two machines: each has a copy of its own. It goes on from parts of four."""
    synthetic = ["data.synthetic=true", "data.remote=null"]
    trained(4, words_of(tmp_path, "ddp", *synthetic))
    port, words = 29517, words_of(tmp_path, "hybrid", *synthetic, "sharding=hybrid")
    trained(4, [*words, "max_duration=2ba", "sharding=full"])
    options = ["--world_size", "4", "--nproc", "2", "--master_addr", "127.0.0.1", "--master_port", str(port)]

    def command(node: int) -> list[str]:
        return ["composer", *options, "--base_rank", str(2 * node), "--node_rank", str(node), "benchmark.py", *words]

    with started(*command(1)) as other:
        done = run(*command(0), timeout=300)
        assert done.returncode == 0 and other.wait(timeout=60) == 0, done.stdout + done.stderr
    assert distance(tmp_path / "hybrid", tmp_path / "ddp") < TOLERANCE
