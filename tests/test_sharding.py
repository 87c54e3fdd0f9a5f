"""Weights that are shared out over ranks train, are saved and go on as whole ones."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run, started

import benchmark
from record import checkpoint_folders
from record.checkpoint_files import FULL, WEIGHTS, fault, find_newest, listed, outline, read
from record.files import evaluations_of
from training import sharding
from training.run_config import RunConfig
from training.warm_start import load

TOLERANCE = 1e-6
# The rate of Stable Diffusion: AdamW's first step moves each weight by it, whatever its gradient, so that where a gradient is
# of the size of eps (1e-8) its last digits are a part of the rate.
KEYS = ["optimizer.lr=1e-4", "ema.enabled=true", "save.every_images=8", "save.keep=99", "save.snapshot_every_images=16"]


@pytest.fixture(scope="module")
def words_of(miniature):
    def words(folder: Path, name: str, *more: str) -> list[str]:
        return miniature.small(folder, name, *KEYS, *more)

    return words


def trained(num: int, words: list[str], *, code: int = 0, script: str = "benchmark.py") -> str:
    """Train on so many ranks; return what was said."""
    done = run("composer", "-n", str(num), script, *words, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def content_of(folder: Path, place: int = 0) -> dict[str, Any]:
    """The content of a run's checkpoint with whole tensors, by its place from the newest on."""
    path = listed(folder / "checkpoints", FULL)[place]
    content = outline(path)
    return checkpoint_folders.filled(path, content, ("model", "ema", "optimizer")) if path.is_dir() else content


def tensors_of(content: dict[str, Any]) -> dict[str, torch.Tensor]:
    sections = {key: content[key] for key in ("model", "ema", "optimizer")}
    sections["optimizer"] = {"state": sections["optimizer"]["state"]}
    return dict(checkpoint_folders.flattened(sections, lambda tensor: True))


def distance(one: Path, other: Path, place: int = 0) -> float:
    """The greatest difference between the tensors of two runs' checkpoints: weights, EMA weights, moments."""
    of_one, of_other = tensors_of(content_of(one, place)), tensors_of(content_of(other, place))
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


@pytest.mark.timeout(400, func_only=True)
def test_shared_weights_are_trained_as_whole_ones(runs):
    """Weights, EMA weights and moments after clipped steps, and the losses, against DDP's."""
    assert distance(runs / "full", runs / "ddp") < TOLERANCE
    assert losses_of(runs / "full") == pytest.approx(losses_of(runs / "ddp"), abs=TOLERANCE)
    path = listed(runs / "full" / "checkpoints", FULL)[0]
    assert {file.name for file in path.iterdir()} == {
        "files.json",
        "run.pt",
        "shard-00001-model-00001-of-00001.safetensors",
        "shard-00002-model-00001-of-00001.safetensors",
    }
    sizes = [file.stat().st_size for file in path.glob("*.safetensors")]
    assert min(sizes) > 0.4 * sum(sizes)  # each rank wrote its part


def test_a_snapshot_of_shared_weights_is_one_file_as_always(runs):
    names = [[path.name[:22] for path in listed(runs / name / "checkpoints", WEIGHTS)] for name in ("full", "ddp")]
    assert names[0] == names[1] == ["weights-im000000000032", "weights-im000000000016"]
    of_full, of_ddp = (read(listed(runs / name / "checkpoints", WEIGHTS)[0]) for name in ("full", "ddp"))
    for key, one, other in (("model", of_full["model"], of_ddp["model"]), ("ema", of_full["ema"], of_ddp["ema"])):
        one, other = (tensors["weights"] if key == "ema" else tensors for tensors in (one, other))
        assert one.keys() == other.keys()
        assert all(torch.allclose(one[name], other[name], atol=TOLERANCE, rtol=0.0) for name in one)


@pytest.mark.slow
@pytest.mark.timeout(500, func_only=True)
def test_every_familys_gradients_are_those_of_the_whole_network(tmp_path):
    """Also recomputed, compiled block by block, and in bfloat16, where the last digits of a sum differ."""
    trained(2, [str(tmp_path / "out.json"), "full"], script="tests/sharded_ranks.py")
    found = json.loads((tmp_path / "out.json").read_text())
    assert {name.split()[0] for name in found} == {"sd2", "sdxl", "flux", "shapes", "mochi", "hunyuan_video", "wan"}
    for name, value in found.items():
        assert value < (0.02 if name.endswith("bf16") else TOLERANCE), (name, value)


# --- checkpoints ---


@pytest.mark.timeout(400, func_only=True)
@pytest.mark.parametrize(
    ("begun", "num", "more", "is_same"),
    [
        ("full", 2, ["sharding=full"], True),
        ("ddp", 2, ["sharding=full"], False),
        ("full", 2, ["sharding=off"], False),
    ],
    ids=["shared goes on as shared", "whole goes on as shared", "shared goes on as whole"],
)
def test_a_run_goes_on(runs, words_of, tmp_path, begun, num, more, is_same):
    """From its third batch, in the middle of an epoch: bit for bit as it was begun, else within rounding."""
    shutil.copytree(runs / begun, tmp_path / "a")
    for path in [*listed(tmp_path / "a" / "checkpoints", FULL)[:2], tmp_path / "a" / "summary.json"]:
        checkpoint_folders.remove(path)
    said = trained(num, words_of(tmp_path, "a", *more))
    assert "resumes from batch 2, 16 images" in said
    apart = distance(tmp_path / "a", runs / begun)
    assert apart == 0.0 if is_same else apart < TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(500, func_only=True)
def test_four_ranks_go_on_from_a_checkpoint_of_two_as_whole_weights_do(runs, words_of, tmp_path):
    """The random numbers of a step go by rank: four ranks are compared with four."""
    for begun, how in (("full", "full"), ("ddp", "off"), ("full", "off")):
        name = f"{begun}-{how}"
        shutil.copytree(runs / begun, tmp_path / name)
        trained(4, words_of(tmp_path, name, f"sharding={how}", "max_duration=6ba"))
    assert distance(tmp_path / "full-full", tmp_path / "ddp-off") < TOLERANCE
    assert distance(tmp_path / "full-off", tmp_path / "ddp-off") < TOLERANCE
    parts = list(listed(tmp_path / "full-full" / "checkpoints", FULL)[0].glob("*.safetensors"))
    assert len(parts) == 4


@pytest.mark.slow
@pytest.mark.timeout(500, func_only=True)
def test_one_rank_goes_on_from_the_parts_of_two(runs, words_of, tmp_path):
    for begun in ("full", "ddp"):
        shutil.copytree(runs / begun, tmp_path / begun)
        said = trained(1, words_of(tmp_path, begun, "sharding=full", "max_duration=6ba"))
        assert "resumes from batch 4, 32 images" in said
    assert distance(tmp_path / "full", tmp_path / "ddp") < TOLERANCE
    assert listed(tmp_path / "full" / "checkpoints", FULL)[0].is_file()  # nobody to share with


@pytest.mark.slow
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
    for path in listed(runs / "full" / "checkpoints", FULL)[:2]:
        shutil.copytree(path, folder / path.name)
    return folder


def spoilt(path: Path, how: str) -> str:
    """Spoil a checkpoint; return what is to be said of it."""
    name = "shard-00002-model-00001-of-00001.safetensors"
    file, other = path / name, listed(path.parent, FULL)[1]
    if how == "missing":
        file.unlink()
        return f"its {name} is missing"
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-100])
        return f"its {name} is cut, changed, or of another save"
    if how == "changed":
        content = bytearray(file.read_bytes())
        content[-10] ^= 1
        file.write_bytes(content)
        return f"its {name} is cut, changed, or of another save"
    if how == "of another save":
        shutil.copy(other / name, file)
        return f"its {name} is cut, changed, or of another save"
    if how == "one too many":
        shutil.copy(file, path / name.replace("00002", "00003"))
        return "shard-00003-model-00001-of-00001.safetensors is none of its files"
    if how == "no list":
        (path / "files.json").unlink()
        return "its files.json is missing"
    assert how == "list of another save"
    shutil.copy(other / "files.json", path / "files.json")
    return "its files.json is cut, changed, or of another save"


SPOILT = ["missing", "cut", "changed", "of another save", "one too many", "no list", "list of another save"]


@pytest.mark.parametrize("how", SPOILT)
def test_a_part_that_is_not_as_it_was_written_is_named_and_the_checkpoint_before_is_taken(parts, capsys, how):
    newest, before = listed(parts, FULL)
    text = spoilt(newest, how)
    assert fault(newest) == text
    assert find_newest(parts) == before
    assert capsys.readouterr().err == f"checkpoints: {newest} is damaged ({text}); set aside.\n"
    assert sorted(path.name for path in parts.iterdir()) == sorted([before.name, f"{newest.name}.damaged"])


def test_a_copy_that_is_brought_back_and_is_damaged_too_is_set_aside_again(parts):
    newest, before = listed(parts, FULL)
    copy = shutil.copytree(newest, parts.parent / newest.name)
    for _ in range(2):
        spoilt(newest, "cut")
        assert find_newest(parts) == before
        shutil.copytree(copy, newest)
    assert find_newest(parts) == newest


def test_what_a_killed_save_has_left_is_cleared_up(parts):
    (parts / ".full-ba000000000009.tmp").mkdir()
    (parts / ".full-ba000000000009.tmp" / "run.pt").write_bytes(b"half")
    assert find_newest(parts) == listed(parts, FULL)[0]
    assert not list(parts.glob(".*"))


@pytest.mark.slow
@pytest.mark.timeout(300, func_only=True)
def test_a_rank_that_dies_while_all_write_leaves_no_checkpoint_and_the_run_goes_on(runs, words_of, tmp_path):
    """Rank 1 is killed as soon as it begins to write its part of the second checkpoint."""
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    with started("composer", "-n", "2", str(script), *words_of(tmp_path, "a", "sharding=full")) as process:
        assert process.wait(timeout=200) != 0
    folder = tmp_path / "a" / "checkpoints"
    assert [path.name[:19] for path in listed(folder, FULL)] == ["full-ba000000000001"]
    trained(2, words_of(tmp_path, "a", "sharding=full"))
    assert distance(tmp_path / "a", runs / "full") == 0.0


DIES = """
import os, signal, sys
from composer.utils import dist
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


@pytest.mark.slow
@pytest.mark.timeout(300, func_only=True)
def test_a_rank_that_finds_no_room_stops_all_with_one_message(words_of, tmp_path):
    script = tmp_path / "full.py"
    script.write_text(
        DIES.replace("os.kill(os.getpid(), signal.SIGKILL)", "raise OSError(28, 'No space left on device')")
    )
    said = trained(2, words_of(tmp_path, "a", "sharding=full"), code=1, script=str(script))
    folder = tmp_path / "a" / "checkpoints"
    assert re.search(r"full-ba000000000002 \(.* GiB\) cannot be written: rank 1: .*No space left on device", said)
    assert [path.name[:19] for path in listed(folder, FULL)] == ["full-ba000000000001"]
    assert not list(folder.glob(".*"))


def test_training_begins_with_the_weights_of_a_checkpoint_in_parts(runs):
    """model.denoiser names the run; export and eval.py read it the same way."""
    from test_families import tiny

    model = tiny("shapes", "stock", (32, 32))
    path = listed(runs / "full" / "checkpoints", FULL)[0]
    assert load(model, str(path)) == [f"begins with {path} (batch 4, 32 images)"]
    wanted = content_of(runs / "full")["model"]
    assert all(torch.equal(t, wanted[f"denoiser.{name}"]) for name, t in model.denoiser.state_dict().items())


# --- between batches ---


@pytest.mark.slow
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


# --- hybrid ---


@pytest.mark.slow
@pytest.mark.timeout(400, func_only=True)
def test_hybrid_on_two_machines_trains_as_whole_weights_on_four_ranks(words_of, tmp_path):
    """Two launchers of two ranks each, as on two machines: each has a copy of its own. It goes on from parts of four."""
    synthetic = ["data.synthetic=true", "data.remote=null"]  # a stream on two machines needs a /dev/shm on each
    trained(4, words_of(tmp_path, "ddp", *synthetic))
    port, words = 29517, words_of(tmp_path, "hybrid", *synthetic, "sharding=hybrid")
    trained(4, [*words, "max_duration=2ba", "sharding=full"])
    ways = ["--world_size", "4", "--nproc", "2", "--master_addr", "127.0.0.1", "--master_port", str(port)]

    def command(node: int) -> list[str]:
        return ["composer", *ways, "--base_rank", str(2 * node), "--node_rank", str(node), "benchmark.py", *words]

    with started(*command(1)) as other:
        done = run(*command(0), timeout=300)
        assert done.returncode == 0 and other.wait(timeout=60) == 0, done.stdout + done.stderr
    assert distance(tmp_path / "hybrid", tmp_path / "ddp") < TOLERANCE


# --- bad input ---


REFUSED = {
    "optimizer.states=8bit": (
        "optimizer.states: 8bit, but sharding=full: its blocks do not end where parts do. Say optimizer.states=bf16."
    ),
    "lora.rank=4": "lora.rank: 4, but sharding=full: an adapter is small. Say sharding=off.",
    "channels_last=true": "channels_last: true, but sharding=full: weights in NHWC cannot be split. Leave it out.",
    "compile=whole": "compile: whole, but sharding=full: one graph cannot gather block by block. Say compile=blocks.",
    "device_train_microbatch_size=auto": (
        "device_train_microbatch_size: auto, but sharding=full: ranks would run out of memory apart. Give a number."
    ),
    "ema.device=cpu": "ema.device: cpu, but sharding=full: the EMA is in parts too. Say ema.device=model.",
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_does_not_go_with_sharding_is_refused_by_name(words_of, tmp_path, monkeypatch, capsys, given):
    monkeypatch.setattr(sharding.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(sharding.dist, "get_local_world_size", lambda: 2)
    assert benchmark.main(words_of(tmp_path, "a", "sharding=full", given)) == 2
    assert REFUSED[given] in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(("num", "of_machine", "how"), [(64, 8, "full"), (128, 64, "hybrid")])
def test_more_ranks_than_blocks_are_refused(monkeypatch, num, of_machine, how):
    monkeypatch.setattr(sharding.dist, "get_world_size", lambda: num)
    monkeypatch.setattr(sharding.dist, "get_local_world_size", lambda: of_machine)
    config = RunConfig(sharding=how)
    config = config.__class__(**{**vars(config), "model": type(config.model)(family="sd2", preset="tiny")})
    [(key, text)] = sharding.problems(config)
    blocks = sharding.num_blocks(config)
    over = num if how == "full" else of_machine
    assert key == "sharding" and 4 < blocks < over
    assert text.startswith(
        f"{how} over {over} ranks, but the denoiser has {blocks} blocks: most ranks would have next to"
    )
    assert text.endswith(f"or {blocks} ranks at most.")
