"""Several stages in one order of samples: streaming's own semantics, refused weights, counts and losses in the record."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from composer.utils import dist
from streaming import MDSWriter, StreamingDataset
from streaming import Stream as PlainStream

import benchmark
from callbacks.losses import StreamLosses
from checkpointing.files import FULL, list_checkpoints
from common.command_line import parse_command_line
from common.errors import ConfigError
from config import load
from data import DataConfig, build_data
from families import load_family
from mds import mixture
from mds.dataset import array_encoding, read_dataset, write_metadata
from mds.fetch import HASH
from mds.mixture import StreamConfig, count_epoch_samples, name_datasets, weight_problems
from prepare import shards
from run_folder.files import read_lines
from training.config import RunConfig

FAMILY = load_family("shapes", "tiny", "stock")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def two(miniature, tmp_path_factory) -> tuple[Path, Path]:
    """Two datasets of moments without a common sample: 192 and 64 images."""
    from prepare import latents, shapes

    folder = tmp_path_factory.mktemp("second")
    tars, images, moments = str(folder / "tars"), str(folder / "images"), folder / "moments"
    assert shapes.main([tars, "num_images=64", "seed=4"]) == 0
    assert shards.main([tars, images, "shard_size=32kb"]) == 0
    assert latents.main([images, str(moments), "model.family=shapes", "image_size=32", "shard_size=32kb"]) == 0
    return miniature.moments, moments


def loader_of(streams, workers=0, batch=8, seed=3):
    config = DataConfig(stage="moments", streams=streams, workers=workers)
    return build_data(config, FAMILY, size=(32, 32), device_batch_size=batch, device=CPU, seed=seed).dataloader


WEIGHTS = {
    "proportion": [{"proportion": 0.25}, {"proportion": 0.75}],
    "repeat and choose": [{"repeat": 0.5}, {"choose": 60}],
    "repeat of one": [{}, {"repeat": 2.0}],
}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_the_mixed_order_is_that_of_plain_streaming(two, weights):
    streams = [StreamConfig(str(at), **weight) for at, weight in zip(two, weights, strict=True)]
    plain = StreamingDataset(
        streams=[PlainStream(local=str(at), **weight) for at, weight in zip(two, weights, strict=True)],
        batch_size=8,
        shuffle=True,
        shuffle_seed=3,
        num_canonical_nodes=1,
        shuffle_block_size=1 << 18,
    )
    expected = [torch.from_numpy(np.stack([row["moments"] for row in plain])) for _ in range(2)]
    own, num = loader_of(streams), plain.epoch_size // 8
    assert count_epoch_samples(streams, [192, 64]) == plain.epoch_size == sum(own.dataset.chosen)
    del plain
    for of_epoch in expected:
        batches = list(own)
        assert len(batches) == num and torch.equal(torch.cat([b["moments"] for b in batches]), of_epoch[: num * 8])
        assert set(torch.cat([batch["stream"] for batch in batches]).tolist()) == {0, 1}
    own.close()


def test_a_mixed_loader_goes_on_within_an_epoch_with_any_number_of_workers(two):
    streams = [StreamConfig(str(two[0]), proportion=0.5), StreamConfig(str(two[1]), proportion=0.5)]
    whole, resumed = loader_of(streams), loader_of(streams, workers=2)
    first, second = list(whole), list(whole)
    resumed.resume(epoch=0, batch_in_epoch=13, global_batch_size=8)
    for expected in (first[13:], second):
        found = list(resumed)
        assert len(found) == len(expected) > 0
        assert all(torch.equal(a[name], b[name]) for a, b in zip(found, expected, strict=True) for name in b)
    whole.close(), resumed.close()


def test_weights_that_do_not_go_together_are_refused():
    def texts(*weights):
        return [": ".join(problem) for problem in weight_problems([StreamConfig("x", **weight) for weight in weights])]

    assert texts({"repeat": 2.0}, {"choose": 5}, {}) == texts({"proportion": 0.25}, {"proportion": 0.75}) == []
    assert texts({"proportion": 0.5, "repeat": 2.0}, {}) == [
        "data.streams[0]: proportion: 0.5, repeat: 2 exclude each other. Give one of them."
    ]
    assert texts({"proportion": 0.5}, {"repeat": 2.0}) == [
        "data.streams[1]: no proportion, but other streams have one. Give it to all of them, or to none."
    ]
    assert texts({"proportion": 0.5}, {"proportion": 0.3}) == [
        "data.streams: the proportions sum to 0.8. Possible: parts of an epoch, which sum to 1. In this ratio: 0.625, 0.375."
    ]


def test_streams_that_cannot_be_mixed_are_refused(two, tmp_path):
    first, second = map(str, two)
    total, cache = sum(read_dataset(location).num_samples for location in (first, second)), str(tmp_path / "cache")
    none = "data.streams[1]: none of its 64 samples would be in an epoch. Give it more."
    # Rounded, 0.6 is one of 64 samples, but streaming's division leaves it to whichever stream is drawn.
    rare = [StreamConfig(first, proportion=1 - 0.6 / total), StreamConfig(second, proportion=0.6 / total)]
    for streams, problem in (
        ([StreamConfig(first), StreamConfig(first, cache)], f"data.streams[1].remote: {first} is the stage of data.st"),
        (
            [StreamConfig(first, cache), StreamConfig(second, cache)],
            f"data.streams[1].local: {cache} is that of data.s",
        ),
        ([StreamConfig(first), StreamConfig(second, repeat=0.001)], none),
        (rare, none),
        (
            [StreamConfig(first, choose=20), StreamConfig(second, choose=20)],
            "global_batch_size: 64 is more than the 40",
        ),
        ([StreamConfig(first), StreamConfig(f"{second}x")], f"data.streams[1].remote: no folder {second}x."),
        ([StreamConfig(first), StreamConfig()], "data.streams: not given. Give a stage's folder or s3:// address, "),
        ([StreamConfig(first), StreamConfig(second)], None),
    ):
        problems = DataConfig(stage="moments", streams=streams).problems(64, {})
        assert [": ".join(each).startswith(problem or "-") for each in problems] == [True] * bool(problem), problems
    [given] = DataConfig(stage="moments", streams=[StreamConfig(first)], remote=second).problems(8, {})
    assert ": ".join(given) == f"data.streams: given beside data.remote={second}. Give one of them."


def test_sums_lie_on_the_models_device_also_before_a_batch():
    """NCCL reduces nothing of the host's; the meta device, like a GPU, is not the host's."""
    losses = StreamLosses(["a", "b"], torch.device("cpu"))
    losses.settle()
    assert losses.line() == {"a": {"samples": 0, "loss": None}, "b": {"samples": 0, "loss": None}}
    losses.add(torch.tensor([1.0, 2.0, 4.0]), {"stream": torch.tensor([0, 1, 1])})
    losses.settle()
    assert losses.line() == {"a": {"samples": 1, "loss": 1.0}, "b": {"samples": 2, "loss": 3.0}}
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda tensor, **_: seen.append(tensor.device.type))
        with pytest.raises(NotImplementedError):  # what is on the meta device has no values to be copied
            StreamLosses(["a"], torch.device("meta")).settle()
    assert seen == ["meta"]


@pytest.mark.usefixtures("quick_estimate")
def test_an_unknown_key_within_streams_is_the_only_error(tmp_path):
    words = [f"data.streams=[{{remote: {tmp_path}, captoin: x}}]", "model.weights=random"]
    with pytest.raises(ConfigError) as error:
        load(RunConfig, parse_command_line(words, {}), check=benchmark.check)
    [text] = [text for text in error.value.problems if text.startswith(("command line", "data"))]
    assert text.startswith("command line: unknown key 'data.streams[0].captoin'. Known: remote, local, ")
    assert name_datasets(["s3://b/laion/moments/", "/data/emoji"]) == ["moments", "emoji"]
    assert name_datasets(["a/moments", "b/moments"]) == ["0-moments", "1-moments"]


@pytest.mark.slow
@pytest.mark.timeout(120, func_only=True)
def test_a_run_of_two_streams_counts_both_and_goes_on_bit_for_bit(miniature, two, tmp_path):
    first, second = two
    mix = f"data.streams=[{{remote: {first}, proportion: 0.5}}, {{remote: {second}, proportion: 0.5}}]"
    own = ["data.remote=null", mix, "max_duration=11ba", "measure.window_batches=4", "save.every_images=24"]
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert benchmark.main(miniature.small(tmp_path, "whole", *own)) == 0
    assert benchmark.main(miniature.small(tmp_path, "part", *own, "max_duration=6ba")) == 0  # within a window
    for path in list_checkpoints(part / "checkpoints", FULL)[:1]:
        path.unlink()  # as if it had been killed after batch 6: it resumes from batch 3
    assert benchmark.main(miniature.small(tmp_path, "part", *own)) == 0
    lines, again = (read_lines(folder / "metrics.jsonl") for folder in (whole, part))
    assert [line["streams"] for line in lines] == [line["streams"] for line in again]
    assert [line["loss"] for line in lines] == [line["loss"] for line in again]
    for begin, line in zip([0, *(line["images"] for line in lines)], lines, strict=False):
        of, num = line["streams"], line["images"] - begin
        assert set(of) == {"0-moments", "1-moments"} and sum(each["samples"] for each in of.values()) == num > 0
        total = sum(each["samples"] * each["loss"] for each in of.values() if each["samples"])
        assert total / num == pytest.approx(line["loss"], rel=1e-5)
    newest = [
        torch.load(list_checkpoints(folder / "checkpoints", FULL)[0], weights_only=False) for folder in (whole, part)
    ]
    assert newest[0]["identity"]["stage"] == [
        json.loads((at / "dataset.json").read_text())["index_sha256"] for at in two
    ]
    for name, value in newest[0]["model"].items():
        assert torch.equal(value, newest[1]["model"][name]), name


def test_a_stream_names_the_column_of_its_captions(tmp_path):
    family, out = load_family("sd2", "tiny", "stock"), str(tmp_path / "a")
    columns = {name: array_encoding(c.stored_dtype, c.shape) for name, c in family.columns("moments", (64, 64)).items()}
    columns |= {"caption": "str", "key": "str", "alt": "json"}
    row = {"moments": np.zeros((8, 8, 8), np.float16), "tokens": np.zeros(77, np.uint16), "caption": "own"}
    with MDSWriter(out=out, columns=columns, hashes=[HASH]) as writer:
        for number in range(8):
            writer.write({**row, "key": str(number), "alt": [f"a dog {number}", 3]})
    write_metadata(tmp_path / "a", "moments", {})
    config = DataConfig(stage="moments", streams=[StreamConfig(out, caption="alt")], workers=0)
    loader = build_data(config, family, size=(64, 64), device_batch_size=8, device=CPU, seed=1).dataloader
    [batch] = list(loader)
    wanted = family.tokenize([f"a dog {number}" for number in range(8)])["tokens"].tolist()
    assert sorted(batch["tokens"].tolist()) == sorted(wanted)
    loader.close()
    possible = "Possible: a column of str or json; it has "
    for column, text, problem in (
        ("alts", "encoded", f"alts, but {out} has no column of that name. {possible}"),
        ("tokens", "encoded", f"tokens is ndarray:uint16:77. {possible}"),
        ("alt", "stored", "alt, but data.text=stored: those are states of the stage's own captions. "),
    ):
        [(key, message)] = mixture.caption_problems("data.streams[0].caption", column, read_dataset(out), text)
        assert key == "data.streams[0].caption" and message.startswith(problem)
