"""Every YAML resolves and keeps its header's contract. tests/test_launch.py has mcloud.yaml and the files of launch/."""

from __future__ import annotations

import functools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from omegaconf import OmegaConf
from test_published_weights import tiny_networks, whole_ldm_file, write

import benchmark
from bench.ladder import read_ladder
from common.command_line import leaves, parse_command_line
from config import flatten, load
from evaluation.scorer import TargetConfig
from families import FAMILIES, load_family
from families.mlperf import SD
from preflight import checks
from prepare import latents, shapes, shards
from prepare.laion.config import LaionConfig
from prepare.laion.config import check as check_way
from sweeps.plan import as_word, read_sweep
from training.optimizer import ScheduleConfig, lr_multiplier

pytestmark = pytest.mark.timeout(120, func_only=True)

RUNS = sorted((ROOT / "yamls").glob("*.yaml"))
LADDERS = sorted((ROOT / "yamls" / "ladders").glob("*.yaml"))
SWEEPS = sorted((ROOT / "yamls" / "sweeps").glob("*.yaml"))
WAYS = sorted((ROOT / "yamls" / "prepare").glob("*.yaml"))
HEADER = ("# What: ", "# Hardware: ", "# Expected: ", "# Command: ")


SMALL = ["model.preset=tiny", "image_size=64", "global_batch_size=8", "device_train_microbatch_size=4"]
SMALL += ["attention=auto", "cudnn_benchmark=false"]  # which want a GPU


def read(words: list[str]) -> benchmark.RunConfig:
    return load(benchmark.RunConfig, parse_command_line(words, benchmark.ALIASES), check=lambda config: [])


@functools.cache
def defaults() -> dict[str, Any]:
    return flatten(benchmark.RunConfig())


def keys_of(words: list[str]) -> dict[str, Any]:
    """The keys of a command as they are written: `read` takes half a second."""
    line = parse_command_line(words, benchmark.ALIASES)
    parts = [OmegaConf.to_container(OmegaConf.load(line.yaml)), *({at.key: at.value} for at in line.assignments)]
    return {**defaults(), **{key: value for part in parts for key, value in leaves(part)}}


def commands(path: Path) -> list[list[str]]:
    """The commands of a file's header, as words after `benchmark.py`."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("# ") and " benchmark.py " in line]
    words = [shlex.split(line.split(": ", 1)[1]) for line in lines]
    return [line[line.index("benchmark.py") + 1 :] for line in words]


def films_beside(stage) -> Path:
    """A small stage of films, made once."""
    made = Path(stage).with_name("films")
    if not made.exists():
        assert shapes.main([f"{made}-tars", "world=moving", "num_images=16"]) == 0
        assert shards.main([f"{made}-tars", str(made)]) == 0
    return made


def resolve(words: list[str], stage) -> benchmark.RunConfig:
    """Read a command of `composer benchmark.py` as the program does; data and weights are swapped for the tests' own."""
    keys = keys_of(words)
    family, variant = keys["model.family"], keys["model.variant"]
    kind = load_family(family, "tiny", variant).media
    stage = stage if kind == "images" else films_beside(stage)
    if not keys["data.synthetic"]:
        words = [*words, f"data.remote={stage}", "data.local=null", f"data.stage={kind}", "data.text=encoded"]
    words = [*words, *SMALL, "model.weights=random", "model.denoiser=null", "cuda_graphs=false", "precision=null"]
    words += ["eval.every_images=8", "save.snapshot_every_images=8"]  # the batch is another one
    if family == "shapes":  # small as it is, and methods need its blocks
        words.append(f"model.preset={keys['model.preset']}")
    if keys["validation.remote"]:  # its files have to be there, and those of an evaluation
        words += [f"validation.remote={stage}", "validation.local=null", "validation.every_images=8"]
    if keys["eval.when"] == "in_training" or keys["samples.every_images"]:
        prompts, statistics = Path(stage).with_name("prompts.tsv"), Path(stage).with_name("reference.npz")
        prompts.write_text("image_id\tid\tcaption\n1\t1\ta red square\n")
        statistics.touch()
        words += [f"eval.prompts={prompts}", f"eval.statistics={statistics}"]
        words += [f"samples.prompts={prompts}", "samples.every_images=8"] if keys["samples.every_images"] else []
    if keys["lora.rank"]:  # which needs a base
        base = Path(stage).with_name(f"{family}-base")
        load_family(family, "tiny", variant).build_denoiser().save_pretrained(base)
        words.append(f"model.denoiser={base}")
    return load(benchmark.RunConfig, parse_command_line(words, benchmark.ALIASES), check=benchmark.check)


@pytest.fixture(autouse=True)
def any_room(monkeypatch):
    """These tests do not depend on the free disk: a small batch has a snapshot to each one."""
    monkeypatch.setattr(checks, "_check_room", lambda needs: iter(()))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_every_run_resolves_and_passes_its_checks(path, stage, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert resolve([f"yamls/{path.name}"], stage).model.family in FAMILIES


@pytest.fixture(scope="module")
def places(stage, tmp_path_factory) -> dict[str, Path]:
    """Small stages of each kind, and a tiny SD2 as an LDM checkpoint that they are made with."""
    folder = tmp_path_factory.mktemp("places")
    weights = Path(write(whole_ldm_file(tiny_networks(seed=5)), folder / "512-base-ema.ckpt"))
    made = {"images": stage, "weights": weights}
    for normalize, variant in (("unit", "mlperf"), ("symmetric", "stock")):  # the variant says how images are resized
        made[normalize] = folder / normalize
        keys = ["model.preset=tiny", f"model.variant={variant}", "image_size=64", f"model.weights={weights}"]
        assert latents.main([str(stage), str(made[normalize]), *keys, f"normalize={normalize}"]) == 0
    return made


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


TRAINED = ("mlperf_256", "mosaicml", "finetune_sd2")
"""Recipes of which each command takes steps; the others have the same keys, are trained whole by the demos (the miniature),
in test_mlperf_flux.py (FLUX.1) or in test_lora_runs.py (fine-tuning of it and of SDXL)."""
RECIPES = [
    pytest.param(words, id=" ".join(words[:1] + words[2:]))
    for path in RUNS
    if path.name.startswith(TRAINED)
    for words in commands(path)
]


@pytest.mark.long
@pytest.mark.parametrize("words", RECIPES)
def test_every_recipe_takes_two_steps(words, places, runs, monkeypatch):
    """The header's own command in the tiny preset, on a CPU: real data, encoders and start from an LDM checkpoint.

    In the order of the files, so that MosaicML's second stage finds the first one's run.
    """
    monkeypatch.chdir(ROOT)
    given = read(words)
    name = given.run_name.replace("NAME", f"{Path(words[0]).stem}-{given.data.stage}")
    remote = places["images"] if given.data.stage == "images" else places[given.data.normalize]
    own = [f"data.remote={remote}", f"model.weights={places['weights']}", f"run_folder={runs}", f"run_name={name}"]
    own += ["max_duration=2ba", "eval.every_images=8", "save.snapshot_every_images=8", "data.workers=0"]
    own += ["measure.warmup_batches=0", "loggers.progress_bar=false"]
    if given.model.denoiser is not None:
        begins = runs / Path(given.model.denoiser).name
        own.append(f"model.denoiser={begins if begins.exists() else places['weights']}")
    assert benchmark.main([*words, *SMALL, "compile=off", *own]) == 0
    summary = json.loads((runs / name / "summary.json").read_text())
    assert summary["batches"] == 2 and summary["variant"] == given.model.variant and summary["loss"] > 0
    lr = given.optimizer.learning_rate(8)
    rates = [json.loads(line)["lr"] for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    warmup = given.schedule.num_warmup_batches(8)
    share = lr_multiplier(1, schedule=ScheduleConfig(name="constant"), warmup_batches=warmup, total_batches=2)
    assert rates[-1] == pytest.approx(share * lr)


MLPERF = [path for path in RUNS if re.fullmatch(r"mlperf_\d+\.yaml", path.name)]  # FLUX.1's are in test_mlperf_flux.py


@pytest.mark.parametrize("path", MLPERF, ids=lambda path: path.name)
def test_the_mlperf_recipes_are_the_benchmark(path):
    """No constant but the free ones differs from the reference's; snapshots lie where the rules want them."""
    config = read([str(path)])
    batch = config.global_batch_size
    assert path.name == f"mlperf_{batch}.yaml" and config.model.variant == "mlperf"
    assert SD.fixed_deviations(flatten(config)) == []
    free = SD.free_deviations(flatten(config))
    assert free == [] if SD.find_point(batch) else len(free) == 1 and "no reference point" in free[0]
    assert (config.eval.when, config.eval.weights, config.target) == ("after", "training", TargetConfig(90.0, 0.15))
    interval = SD.interval(batch)
    assert benchmark.resolve(config).eval.every_images == interval
    assert config.save.snapshot_every_images == config.save.every_images == interval
    assert int(config.max_duration.removesuffix("sp")) % interval == 0
    if point := SD.find_point(batch):
        assert int(config.max_duration.removesuffix("sp")) == point.slowest_images + 2 * interval
        assert f"{point.mean_images:,.0f} images" in path.read_text()


def test_there_is_a_recipe_for_every_global_batch_of_the_reference():
    batches = {64} | {point.global_batch_size for point in SD.list_points()}
    assert {int(path.stem.removeprefix("mlperf_")) for path in MLPERF} == batches == {64, 256, 384, 512, 1024, 2048}


@pytest.mark.parametrize("path", [*RUNS, *LADDERS, *SWEEPS, *WAYS], ids=lambda path: path.name)
def test_every_header_is_a_contract(path):
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert [word for word in HEADER if not any(line.startswith(word) for line in head)] == []
    command = next(line for line in head if line.startswith("# Command: "))
    make = r"make (demo|controls|study)"
    assert path.name in command or re.search(make, command)
    assert path in LADDERS or path in SWEEPS or path in WAYS or path.name.startswith("shapes") or commands(path)


@pytest.mark.parametrize("path", WAYS, ids=lambda path: path.name)
def test_every_way_from_urls_resolves(path):
    config = load(LaionConfig, parse_command_line([str(path)], {}), check=check_way)
    assert config.filter.licenses == ("not ?" if "mlperf" in path.name else None)


@pytest.mark.slow
@pytest.mark.parametrize("path", LADDERS, ids=lambda path: path.name)
def test_every_rung_of_a_ladder_resolves(path, stage, monkeypatch):
    monkeypatch.chdir(ROOT)
    ladder = read_ladder(str(path))
    assert len({rung.name for rung in ladder.rungs}) == len(ladder.rungs)
    for words in {tuple(word for word in (rung.yaml, *rung.keys) if word[:5] != "seed=") for rung in ladder.rungs}:
        config = resolve([*words], stage)
        assert config.data.synthetic == (config.model.family != "shapes")  # the miniature's ladder is about quality


@pytest.mark.slow
@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.name)
def test_every_point_of_a_sweep_resolves_and_its_batch_divides_into_ranks_and_passes(path, stage, monkeypatch):
    monkeypatch.chdir(ROOT)
    sweep = read_sweep([f"yamls/sweeps/{path.name}"])
    seen = {f"seed={seed}" for seed in sweep.axes.get("seed", [])[1:]}
    for values in sweep.points.values():
        own = [f"{key}={as_word(value)}" for key, value in values.items()]
        words = [sweep.command.yaml, *sweep.keys, *own]
        keys = keys_of(words)
        passes = keys["device_train_microbatch_size"] or 1
        assert keys["global_batch_size"] % (sweep.command.ranks * passes) == 0, values
        if not seen.issuperset(own):  # each value once
            seen.update(own)
            small = [word for word in words if not word.startswith("compile=")]  # a check of it looks for a compiler
            assert resolve(small, stage).model.family == keys["model.family"]
