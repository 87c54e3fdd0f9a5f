"""MLPerf's preprocessed samples of FLUX.1: prepare.shards makes a dataset of them, and a run reads it without any encoder."""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY_RUN
from test_shards import rows, skipped

import benchmark
from checkpointing.files import FULL, list_checkpoints, read_checkpoint
from data import DataConfig, build_data
from families import load_family
from families.encoders import FrozenEncoders
from families.objectives import ObjectiveConfig
from mds.dataset import read_dataset
from mds.images import SampleError
from mds.moments import read_empty_text
from model import LatentDiffusion
from prepare import shards
from prepare.moment_rows import bfloat16_to_float16
from prepare.samples import Sample, SampleFields, TableRow
from prepare.sources import Source

HAS_PYARROW = importlib.util.find_spec("pyarrow") is not None
SHAPES = {
    "full": {"mean": (16, 32, 32), "logvar": (16, 32, 32), "t5_encodings": (256, 4096), "clip_encodings": (768,)},
    "tiny": {"mean": (16, 8, 8), "logvar": (16, 8, 8), "t5_encodings": (256, 16), "clip_encodings": (8,)},
}


def npy(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def bits_of(values: np.ndarray) -> np.ndarray:  # float32 -> uint16, cut off to bfloat16
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def preprocessed(preset: str, num: int, *, timestep: bool = False) -> list[dict[str, Any]]:
    """Samples as the reference writes them: the bits of bfloat16 in .npy files."""
    random, made = np.random.default_rng(3), []
    for number in range(num):
        arrays = {name: npy(bits_of(random.normal(0, 2, shape))) for name, shape in SHAPES[preset].items()}
        made.append({"__key__": f"{number:05d}", **arrays, **({"timestep": number % 8} if timestep else {})})
    return made


def write_empty(folder: Path, preset: str) -> list[np.ndarray]:
    """Write the empty text's states of T5 and of CLIP."""
    random = np.random.default_rng(4)
    folder.mkdir()
    shapes = [SHAPES[preset][name] for name in ("t5_encodings", "clip_encodings")]
    states = [random.normal(0, 1, (1, *shape)).astype(np.float16) for shape in shapes]
    for name, array in zip(("t5_empty", "clip_empty"), states, strict=True):
        np.save(folder / f"{name}.npy", array)
    return states


@dataclass(frozen=True)
class Rows(Source):
    """Rows in memory, as a table gives them; its files are read in the tests with pyarrow."""

    rows: tuple[dict[str, Any], ...]
    name: str = "rows"

    def identify(self) -> dict[str, Any]:
        return {"name": self.name}

    def read(self, taken: SampleFields | None, folder: Path, ignore: Callable[[str], None]) -> Iterator[Sample]:
        for number, row in enumerate(self.rows):
            files = {name: value for name, value in row.items() if taken is None or name in taken.names}
            yield TableRow(str(row.get("__key__") or f"rows/{number}"), files)


@pytest.fixture
def make_stage(monkeypatch, tmp_path) -> Callable[..., int]:
    """Makes a dataset of rows: prepare.shards, whose source is in memory."""

    def make(samples: list[dict[str, Any]], out: Path, *words: str) -> int:
        monkeypatch.setattr(shards, "find_sources", lambda paths, keys, folder: [Rows(tuple(samples))])
        return shards.main(["rows", str(out), "workers=1", *words])

    return make


def references_batch(samples: list[dict[str, Any]], noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The latents, T5's and CLIP's states that the reference trains on, in float32.

    torchtitan, experiments/flux: flux_dataset.py reads uint16 and views it as bfloat16; train.py draws mean + deviation x
    noise, takes 0.1159 off and multiplies by 0.3611.
    """

    def read(name: str) -> torch.Tensor:
        arrays = [torch.from_numpy(np.load(io.BytesIO(sample[name]))).view(torch.bfloat16) for sample in samples]
        return torch.stack(arrays).float()

    latents = (read("mean") + torch.exp(0.5 * read("logvar")) * noise - 0.1159) * 0.3611
    return latents, read("t5_encodings"), read("clip_encodings")


def a_batch_is_the_references(out: Path, samples: list[dict[str, Any]], empty: list[np.ndarray]) -> None:
    """Read the dataset as a run does, and encode a batch of which one caption is dropped, without an encoder."""
    family, stage, cpu = load_family("flux", "full", "mlperf"), read_dataset(str(out)), torch.device("cpu")
    section = DataConfig(stage="moments", text="stored", remote=str(out), workers=0, shuffle=False)
    options = dict(size=(256, 256), device_batch_size=len(samples), device=cpu, seed=0)
    batch = next(iter(build_data(section, family, **options).dataloader))
    parts = (family, family.build_objective(ObjectiveConfig()), torch.nn.Identity(), FrozenEncoders({}, []))
    keys = dict(size=(256, 256), normalize="symmetric", caption_dropout=0.0, empty_states=read_empty_text(stage))
    model = LatentDiffusion(*parts, **keys).to_device(cpu, "fp32")
    drawn = model.draw({name: batch[name] for name in ("moments", "text", "pooled")}, torch.Generator().manual_seed(1))
    drawn["caption_dropped"] = torch.arange(len(samples)) == 1
    latents, condition = model.encode(drawn)
    latents_of_reference, text, pooled = references_batch(samples, drawn["posterior_noise"])
    text[1], pooled[1] = (torch.from_numpy(states[0].astype(np.float32)) for states in empty)
    # float16 keeps a bfloat16 exactly down to 2**-14 and rounds below that to multiples of 2**-24
    torch.testing.assert_close(condition["text"], text, rtol=0, atol=2**-25)
    torch.testing.assert_close(condition["pooled"], pooled, rtol=0, atol=2**-25)
    torch.testing.assert_close(latents, latents_of_reference, rtol=1e-6, atol=1e-6)
    assert torch.equal(batch["text"][0].float(), text[0].half().float())


def test_a_batch_from_the_stage_is_the_references_on_the_same_bytes(make_stage, tmp_path):
    samples, empty = preprocessed("full", 3), write_empty(tmp_path / "empty", "full")
    assert make_stage(samples, tmp_path / "out", f"empty={tmp_path / 'empty'}") == 0
    a_batch_is_the_references(tmp_path / "out", samples, empty)
    metadata = json.loads((tmp_path / "out" / "dataset.json").read_text())
    expected = {"stage": "moments", "family": "flux", "variant": "mlperf", "image_size": [256, 256], "samples": 3}
    assert expected.items() <= metadata.items()


@pytest.mark.skipif(not HAS_PYARROW, reason="pyarrow: make test-tables has it")
@pytest.mark.parametrize("kind", ["parquet", "save_to_disk"])
def test_tables_as_they_are_published_make_that_stage(tmp_path, kind):
    import pyarrow
    import pyarrow.parquet

    samples, empty = preprocessed("full", 3, timestep=kind != "parquet"), write_empty(tmp_path / "empty", "full")
    table, folder = pyarrow.Table.from_pylist(samples), tmp_path / "in"
    folder.mkdir()
    if kind == "parquet":
        pyarrow.parquet.write_table(table, folder / "data_0_0000.parquet")
    else:  # as `datasets` leaves it, with a cache next to it that is no part of it
        path = str(folder / "data-00000-of-00001.arrow")
        with pyarrow.OSFile(path, "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
        (folder / "cache-1.arrow").write_bytes(b"x")
    assert shards.main([str(folder), str(tmp_path / "out"), f"empty={tmp_path / 'empty'}", "workers=1"]) == 0
    a_batch_is_the_references(tmp_path / "out", samples, empty)
    assert [row.get("timestep") for row in rows(tmp_path / "out")] == ([None] * 3 if kind == "parquet" else [0, 1, 2])


def test_samples_that_cannot_be_kept_are_named_with_their_reason(make_stage, tmp_path, capsys):
    good, shapes = preprocessed("tiny", 10), SHAPES["tiny"]

    def with_value(name: str, value: float) -> dict[str, bytes]:
        values = np.zeros(shapes[name])
        values.flat[-1] = value
        return {name: npy(bits_of(values))}

    broken: list[tuple[dict[str, Any], str]] = [
        (with_value("t5_encodings", 70144.0), "t5_encodings have numbers beyond 65,504, the largest one of float16"),
        (with_value("mean", float("inf")), "mean are not finite"),
        ({"clip_encodings": npy(np.zeros(shapes["clip_encodings"], np.float32))}, "clip_encodings are not uint16"),
        ({"clip_encodings": None}, "missing clip_encodings"),
        ({"__key__": good[0]["__key__"]}, "duplicate key"),
    ]
    samples = [{**sample, **changes} for sample, (changes, _) in zip(good[1:], broken, strict=False)]
    assert make_stage([good[0], *samples, good[-1]], tmp_path / "out") == 0
    assert [row["key"] for row in rows(tmp_path / "out")] == ["00000", "00009"]
    reasons = [reason for _, _, reason in skipped(tmp_path / "out" / "skipped.jsonl")]
    assert reasons == [reason for _, reason in broken]
    assert "empty: not given. A run that drops captions encodes the empty text" in capsys.readouterr().err


def test_every_bfloat16_is_kept_exactly_or_to_float16s_smallest_step_or_refused():
    bits = np.arange(2**16, dtype=np.uint16)
    values = torch.from_numpy(bits.copy()).view(torch.bfloat16).float().numpy()
    held = np.abs(values) <= 65504  # False for nan too
    stored = bfloat16_to_float16(npy(bits[held]), (int(held.sum()),), "x").astype(np.float32)
    normal = np.abs(values[held]) >= 2**-14
    assert np.array_equal(stored[normal], values[held][normal])
    assert np.abs(stored - values[held])[~normal].max() <= 2**-25
    for one in bits[~held][::97]:
        with pytest.raises(SampleError, match="^x (have numbers beyond 65,504|are not finite)"):
            bfloat16_to_float16(npy(np.array([one])), (1,), "x")


# --- runs ---

OF_RUN = ["model.family=flux", "model.variant=mlperf", "data.stage=moments", "data.text=stored", "data.workers=0"]


def run(tmp_path: Path, name: str, *words: str) -> int:
    of_tiny = [word for word in TINY_RUN if not word.startswith(("model.", "image_size", "run_name", "data."))]
    words_of_run = ["model.preset=tiny", *OF_RUN, "image_size=64", "max_duration=2ba", "global_batch_size=4"]
    return benchmark.main([*of_tiny, *words_of_run, f"run_name={name}", f"run_folder={tmp_path}", *words])


@pytest.mark.slow
def test_a_run_from_preprocessed_samples_builds_encoders_only_where_it_samples(
    make_stage, tmp_path, capsys, monkeypatch
):
    """Not even with captions dropped: half of them here.

    Sample images may be asked for later, or no longer: which keys allow that is in resume.MAY_CHANGE.
    """
    write_empty(tmp_path / "empty", "tiny")
    assert make_stage(preprocessed("tiny", 8), tmp_path / "stage", f"empty={tmp_path / 'empty'}") == 0
    (tmp_path / "prompts.txt").write_text("a red square\n")
    words = [f"data.remote={tmp_path / 'stage'}", "objective.caption_dropout=0.5", "model.weights=random"]
    words += ["save.every_images=8"]
    drawn = ["samples.every_images=8", f"samples.prompts={tmp_path / 'prompts.txt'}", "eval.steps=2"]
    for number, more in enumerate(([], drawn, []), 1):
        with monkeypatch.context() as patch:
            if not more:
                patch.setattr("model.build_encoders", lambda *_: pytest.fail("an encoder was built"))
            assert run(tmp_path, "a", *words, *more, f"max_duration={2 * number}ba") == 0, capsys.readouterr().err
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["batches"] == 6
    identity = read_checkpoint(list_checkpoints(tmp_path / "a" / "checkpoints", FULL)[0])["identity"]
    assert {"encoders.vae", "encoders.text", "encoders.t5"} <= identity.keys()
    file = tmp_path / "stage" / "empty_text.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    capsys.readouterr()
    assert run(tmp_path, "c", *words) == 2
    assert capsys.readouterr().err.startswith(f"{file} is damaged: its xxh64 is ")


@pytest.mark.slow
@pytest.mark.usefixtures("traced_cost")
def test_an_encoder_is_built_where_a_run_needs_it(make_stage, tmp_path, capsys):
    """Without the empty text's states captions cannot be dropped; without dropout nothing of it is needed."""

    def refusal(*words: str) -> str:
        capsys.readouterr()
        assert run(tmp_path, "a", f"data.remote={tmp_path / 'stage'}", *words) == 2
        return capsys.readouterr().err

    samples = preprocessed("tiny", 18)
    assert make_stage(samples[:8], tmp_path / "stage") == make_stage(samples[8:], tmp_path / "held_out") == 0
    assert refusal().startswith("model.weights: not given. Real data need encoders, and the preset tiny")
    no_dropout = "objective.caption_dropout=0"
    assert run(tmp_path, "b", f"data.remote={tmp_path / 'stage'}", no_dropout, "--print_config") == 0
    assert " trained, 0 frozen\n" in capsys.readouterr().out
    assert "has text states and no tokens. " in refusal("data.text=encoded", "model.weights=random")
    for name, digest in (("stage", "1" * 32), ("held_out", "2" * 32)):
        metadata = json.loads((tmp_path / name / "dataset.json").read_text())
        metadata["encoders"]["vae"] = digest
        (tmp_path / name / "dataset.json").write_text(json.dumps(metadata))
    text = refusal(f"validation.remote={tmp_path / 'held_out'}", "validation.every_images=8", no_dropout)
    assert f"validation.remote: the vae of {tmp_path / 'held_out'} has the fingerprint {'2' * 32}, that of " in text
