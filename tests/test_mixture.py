"""Several stages in one order of samples: streaming's own semantics, refused weights, counts and losses in the record."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from streaming import MDSWriter

from callbacks.losses import StreamLosses
from data import DataConfig, build_data
from families import load_family
from mds.dataset import array_encoding, read_dataset, write_metadata
from mds.fetch import HASH
from mds.mixture import StreamConfig, count_epoch_samples

FAMILY = load_family("sd2", "tiny", "stock")
SIZE = (64, 64)


def write(out: Path, num: int, **more: str) -> str:
    """A dataset whose moments and tokens are those of its own numbers, with further columns."""
    columns = {name: array_encoding(c.stored_dtype, c.shape) for name, c in FAMILY.columns("moments", SIZE).items()}
    with MDSWriter(out=str(out), columns={**columns, "caption": "str", "key": "str", **more}, hashes=[HASH]) as writer:
        for number in range(num):
            row = {"moments": np.full((8, 8, 8), number / num, np.float16), "tokens": np.full(77, num, np.uint16)}
            writer.write(
                {**row, "caption": "own", "key": str(number), **{name: [f"a dog {number}", 3] for name in more}}
            )
    write_metadata(out, "moments", {})
    return str(out)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> tuple[str, str]:
    """Two datasets without a common sample."""
    folder = tmp_path_factory.mktemp("two")
    return write(folder / "first", 192), write(folder / "second", 64)


def loader_of(streams, workers=0, batch=8):
    config, cpu = DataConfig(stage="moments", streams=streams, workers=workers), torch.device("cpu")
    return build_data(config, FAMILY, size=SIZE, device_batch_size=batch, device=cpu, seed=3).dataloader


def test_a_mixed_loader_goes_on_within_an_epoch_with_any_number_of_workers(two):
    streams = [StreamConfig(each, proportion=0.5) for each in two]
    whole, resumed = loader_of(streams), loader_of(streams, workers=2)
    assert count_epoch_samples(streams, [192, 64]) == sum(whole.dataset.chosen) == 256
    first, second = list(whole), list(whole)
    assert torch.cat([batch["stream"] for batch in first]).bincount().tolist() == [128, 128]
    resumed.resume(epoch=0, batch_in_epoch=13, global_batch_size=8)
    for expected in (first[13:], second):
        found = list(resumed)
        assert len(found) == len(expected) > 0
        assert all(torch.equal(a[name], b[name]) for a, b in zip(found, expected, strict=True) for name in b)
    whole.close(), resumed.close()


def test_streams_that_cannot_be_mixed_are_refused(two, tmp_path):
    first, second = two
    total, cache = sum(read_dataset(location).num_samples for location in (first, second)), str(tmp_path / "cache")
    none = "data.streams[1]: none of its 64 samples would be in an epoch. Give it more."
    for one, two_, problem in (
        ({}, {"remote": first, "local": cache}, f"data.streams[1].remote: {first} is the dataset of data.st"),
        ({"local": cache}, {"local": cache}, f"data.streams[1].local: {cache} is that of data.s"),
        ({}, {"repeat": 0.001}, none),
        # Rounded, 0.6 is one of 64 samples, but streaming's division leaves it to whichever stream is drawn.
        ({"proportion": 1 - 0.6 / total}, {"proportion": 0.6 / total}, none),
        ({"choose": 20}, {"choose": 20}, "global_batch_size: 64 is more than the 40"),
        ({}, {"remote": f"{second}x"}, f"data.streams[1].remote: no folder {second}x."),
        ({}, {}, None),
    ):
        streams = [StreamConfig(**{"remote": first, **one}), StreamConfig(**{"remote": second, **two_})]
        problems = DataConfig(stage="moments", streams=streams).problems(64, {})
        assert [": ".join(each).startswith(problem or "-") for each in problems] == [True] * bool(problem), problems


def test_losses_are_summed_by_stream_also_before_a_batch():
    losses = StreamLosses(["a", "b"], torch.device("cpu"))
    losses.settle()
    assert losses.line() == {"a": {"samples": 0, "loss": None}, "b": {"samples": 0, "loss": None}}
    losses.add(torch.tensor([1.0, 2.0, 4.0]), {"stream": torch.tensor([0, 1, 1])})
    losses.settle()
    assert losses.line() == {"a": {"samples": 1, "loss": 1.0}, "b": {"samples": 2, "loss": 3.0}}
