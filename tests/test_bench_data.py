"""bench/command.py, ema.py, data.py, store.py: alternating contestants, the same work for each, records; no speed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from bench import command, data, ema, store

FEW = data.DataBenchConfig(num_samples=256, num_images=64)


# --- turns and figures ---


def test_contestants_alternate_and_each_round_begins_with_another_one():
    order: list[str] = []
    turns = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}
    values = command.take_turns(turns, 3)
    assert "".join(order) == "cab" + "abc" + "bca" + "cab"
    assert values == {"a": [4, 9, 11], "b": [5, 7, 12], "c": [6, 8, 10]}  # the first three were for warming up


# --- the same work ---


def test_every_update_of_sd2s_tensors_moves_its_own_average_only():
    """After an update the weights are as they were: five contestants share them."""
    model = ema.narrow_unet(100_000, torch.device("cpu"))
    before = [p.detach().clone() for p in model.parameters()]
    for update in ema.updates(model).values():
        update()
    assert len(before) == 686
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_all_loaders_of_moments_deliver_the_same_samples(tmp_path):
    moments, tokens = {}, {}
    for name, loader in data.readers("moments", tmp_path, FEW).items():
        batches = list(loader)
        assert [tuple(batch["moments"].shape) for batch in batches] == [(64, 8, 64, 64)] * 4
        moments[name] = Counter(float(m.double().sum()) for batch in batches for m in batch["moments"])
        tokens[name] = [batch.get("tokens") for batch in batches]
    assert len(moments["ours"]) == 256 and moments["ours"] == moments["plain"] == moments["webdataset"]
    for ours, plain in zip(tokens["ours"], tokens["plain"], strict=True):
        assert ours.dtype == torch.int64 and torch.equal(ours, plain)


# --- the commands ---


@pytest.mark.parametrize(
    ("program", "word", "text"),
    [
        (data, "parts=ema,speed", "parts: unknown 'ema', 'speed'. Known: moments, images, streams."),
        (data, "work=/nowhere", "work: no folder /nowhere. Make it, or leave it out."),
        (store, "address=s3://key:SECRET@bucket/x", "has credentials in it. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACC"),
    ],
)
def test_impossible_keys_are_named(program, word, text, capsys):
    assert program.main([word]) == 2
    error = capsys.readouterr().err
    assert text in error and "SECRET@" not in error
