"""data.py: pixels against PIL, the batch contract, the order of samples, and unusable samples."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import picture, sample_files
from streaming import MDSWriter, StreamingDataset

from data import DataConfig, SyntheticBatches, build_data
from families import load_family
from families.spec import Column
from mds.dataset import write_metadata
from mds.fetch import HASH, StreamFailure
from prepare.moment_rows import mds_columns
from prepare.shards import COLUMNS

FAMILY = load_family("sd2", "tiny", "stock")
CPU = torch.device("cpu")


@pytest.fixture
def loader_of():
    """Build loaders that are closed when the test ends."""
    with contextlib.ExitStack() as loaders:

        def build(local, *, batch: int = 8, seed: int = 1, family=FAMILY, **config):
            section = DataConfig(local=str(local), **{"workers": 0, **config})
            given = dict(size=(64, 64), device_batch_size=batch, device=CPU, seed=seed)
            return loaders.enter_context(contextlib.closing(build_data(section, family, **given).dataloader))

        yield build


# --- batches ---


def check_contract(batch, columns, num: int) -> None:
    assert set(batch) == set(columns)
    for name, column in columns.items():
        assert batch[name].shape == (num, *column.shape) and batch[name].dtype == column.dtype


@pytest.mark.parametrize(("variant", "workers"), [("stock", 2), ("mlperf", 0)])
def test_streamed_batches_keep_the_contract_of_the_family(stage, loader_of, workers, variant):
    family = load_family("sd2", "tiny", variant)
    loader = loader_of(stage, batch=10, workers=workers, family=family)
    batches = list(loader)
    assert len(batches) == len(loader) == 48 // 10
    for batch in batches:
        check_contract(batch, family.columns("images", (64, 64)), 10)


def fingerprints(loader) -> list[list[int]]:
    return [[int(image.long().sum()) for image in batch["images"]] for batch in loader]


def test_the_order_of_an_epoch_depends_on_the_seed_and_not_on_workers_or_a_resume(stage, loader_of):
    whole, resumed = loader_of(stage), loader_of(stage, workers=2)
    first, second = fingerprints(whole), fingerprints(whole)
    assert len({value for batch in first for value in batch}) == 48
    assert sorted(sum(first, [])) == sorted(sum(second, [])) and first != second
    resumed.resume(epoch=0, batch_in_epoch=4, global_batch_size=8)
    assert fingerprints(resumed) == first[4:] and fingerprints(resumed) == second
    assert fingerprints(loader_of(stage, workers=2)) == first != fingerprints(loader_of(stage, seed=2))


@pytest.mark.timeout(60, func_only=True)
def test_workers_end_in_the_middle_of_an_epoch(stage, loader_of):
    """Their streams have threads that would wait for a reader forever."""
    loader = loader_of(stage, batch=1, workers=2)
    assert next(iter(loader))["images"].shape == (1, 3, 64, 64)
    workers = loader._iterator._workers
    loader.close()
    assert [worker.is_alive() for worker in workers] == [False, False]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_ends_early_is_an_error(stage, loader_of, workers):
    """Whatever ended it: nothing may be trained on less than an epoch."""
    loader = loader_of(stage, workers=workers)
    loader.epoch_batches = 9
    with pytest.raises(StreamFailure, match="^data: the epoch ended after 6 of 9 batches, without an error"):
        list(loader)


@pytest.mark.parametrize("stage_name", ["images", "moments"])
def test_synthetic_batches_keep_the_contract_and_are_drawn_once_by_their_seed(stage_name):
    section = DataConfig(stage=stage_name, synthetic=True)
    batches = build_data(section, FAMILY, size=(64, 64), device_batch_size=4, device=CPU, seed=1).dataloader
    one, two = next(iter(batches)), next(iter(batches))
    columns = FAMILY.columns(stage_name, (64, 64))
    check_contract(one, columns, 4)
    assert all(one[name] is two[name] for name in columns)
    for name in (name for name, column in columns.items() if column.below is not None):
        assert int(one[name].min()) >= 0 and int(one[name].max()) < columns[name].below
    assert one["tokens"].unique().numel() > 100
    same, other = (SyntheticBatches({"x": Column((3,), torch.float16)}, 2, CPU, seed).batch["x"] for seed in (1, 2))
    assert not torch.equal(same, other)


# --- samples that cannot be used ---


def stage_with(tmp_path, broken: dict[str, dict[str, bytes]]):
    """A dataset with broken samples in it, as other tools write them: prepare.shards would have left them out."""
    out = tmp_path / "broken"
    with MDSWriter(out=str(out), columns=COLUMNS, hashes=[HASH]) as writer:
        for number in range(16):
            files = sample_files(number)
            row = {"jpg": files["jpg"], "caption": files["txt"].decode(), "key": f"{number:03d}", "metadata": {}}
            writer.write({**row, "width": 1, "height": 1, **broken.get(f"{number:03d}", {})})
    write_metadata(out, "images", {})
    return out


BROKEN = {
    "003": {"jpg": b""},
    "004": {"jpg": b"html"},
    "009": {"jpg": picture(0, (200, 200))[:1500]},
    "015": {"caption": " "},
}


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_samples_are_named_and_replaced_so_that_every_batch_is_full(tmp_path, loader_of, workers):
    out = stage_with(tmp_path, BROKEN)
    loader = loader_of(out, batch=4, workers=workers)
    assert [len(batch["images"]) for batch in loader] == [4, 4, 4, 4]
    reasons = ("image of zero bytes", "not an image", "truncated or damaged image", "empty caption")
    bad = {int(key): (key, reason) for key, reason in zip(BROKEN, reasons, strict=True)}
    assert loader.bad_samples == bad
    list(loader)  # the next epoch reads the same four again
    assert loader.bad_samples == bad
    with pytest.raises(ValueError) as error:
        list(loader_of(out, batch=16, max_bad_samples=3, shuffle=False))
    assert str(error.value) == (
        "data.max_bad_samples: 4 samples cannot be used, 3 are allowed. First: 003: image of zero bytes; 004: not an "
        "image; 009: truncated or damaged image; 015: empty caption. Raise data.max_bad_samples, or rebuild the dataset "
        "without them."
    )


def moments_stage_with(out, broken: dict[int, float]):
    """Moments of 24 samples in two shards; `broken`: number -> a value of its that no encoder writes."""
    random, columns = np.random.default_rng(0), mds_columns(FAMILY, (64, 64), text={}, metadata=False)
    with MDSWriter(out=str(out), columns=columns, hashes=[HASH], size_limit=1 << 14) as writer:
        for number in range(24):
            moments = random.normal(size=(8, 8, 8)).astype(np.float16)
            moments[number % 8, 3, number % 5] = broken.get(number, 65504.0)
            row = {"moments": moments, "tokens": np.full(77, number, np.uint16)}
            writer.write({**row, "caption": "x", "key": f"{number:03d}"})
    write_metadata(out, "moments", {})
    return out


@pytest.mark.parametrize("workers", [0, 2])
def test_moments_that_are_not_finite_are_named_and_replaced_like_any_broken_sample(tmp_path, loader_of, workers):
    out = moments_stage_with(tmp_path / "out", {4: np.inf, 5: -np.inf, 15: np.nan, 23: -np.nan})
    last = sum(StreamingDataset(local=str(out), batch_size=1).samples_per_shard[:-1])
    options = dict(stage="moments", shuffle=False, batch=6)
    loader = loader_of(out, workers=workers, **options)
    batches = list(loader)
    assert int(loader.dataset.memory.collected.sum()) == (4 if workers else 0)
    assert all(set(batch) == {"moments", "tokens"} and batch["moments"].isfinite().all() for batch in batches)
    numbers = [int(row[0]) for batch in batches for row in batch["tokens"]]
    assert numbers == [{4: 6, 5: 6, 15: 16, 23: last}.get(number, number) for number in range(24)]
    assert loader.bad_samples == {number: (f"{number:03d}", "moments are not finite") for number in (4, 5, 15, 23)}
    with pytest.raises(
        ValueError, match="^data.max_bad_samples: 2 samples cannot be used, 1 are allowed. First: 004: "
    ):
        list(loader_of(out, max_bad_samples=1, **options))


@pytest.mark.parametrize(("kind", "reason"), [("images", "image of zero bytes"), ("moments", "moments are not finite")])
def test_a_shard_without_a_good_sample_stops_the_run(tmp_path, loader_of, kind, reason):
    if kind == "moments":
        out = moments_stage_with(tmp_path / "out", dict.fromkeys(range(24), np.nan))
    else:
        out = stage_with(tmp_path, {f"{number:03d}": {"jpg": b""} for number in range(16)})
    with pytest.raises((ValueError, StreamFailure)) as error:
        list(loader_of(out, stage=kind, shuffle=False))
    assert str(error.value).startswith(f"data: no sample of shard 0 can be used (000: {reason}; 001: {reason}; 002: ")


# --- the section's own checks ---


def problems_of(**section) -> list[str]:
    return [f"{key}: {text}" for key, text in DataConfig(**section).problems(8, {})]


def test_an_address_without_a_folder_gets_a_separate_one(monkeypatch, tmp_path):
    """The predecessor's command gives no --local."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = DataConfig(remote="s3://bucket/laion/mds").local
    assert Path(folder).parent == tmp_path / "easel" / "datasets" and Path(folder).name.startswith("mds-")
    assert DataConfig(remote="s3://bucket/laion/mds/").local == folder != DataConfig(remote="s3://other/mds").local
    assert DataConfig(remote="/a/folder").local is DataConfig(remote="s3://b/c", synthetic=True).local is None
    folders = {DataConfig(remote=f"sftp://user:{password}@host/x").local for password in ("one", "two")}
    assert len(folders) == 1 and not any("one" in path or "two" in path for path in folders)


def test_paths_that_do_not_fit_together_are_refused(stage, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(stage)
    for fitting in (
        dict(remote=str(stage), local=f"{stage}2", cache_limit="1gb"),
        dict(synthetic=True, remote="nowhere"),
    ):
        assert problems_of(**fitting) == []
    for remote, local, more, problem in (
        (None, None, {}, "data.remote: not given. Give a dataset's folder or s3:// address, or data.synthetic=true."),
        (None, stage, {"stage": "moments"}, "data.stage: the config says 'moments', "),
        (stage, link, {}, f"data.local: {link} is data.remote too. "),
        (link, stage.parent, {}, f"data.local: {stage.parent} has the dataset at {link} inside"),
        (None, stage, {"cache_limit": "1gb"}, "data.cache_limit: 1gb has no effect on a folder that is read in "),
        (stage, "/x/y", {"cache_limit": "10kb"}, "data.cache_limit: 10kb holds fewer than 4 of the largest shard (3"),
    ):
        [text] = problems_of(remote=remote and str(remote), local=local and str(local), **more)
        assert text.startswith(problem), text


def test_a_folder_with_shards_of_another_dataset_is_refused(stage, tmp_path):
    damaged = (stage / "index.json").read_text().replace('"samples": ', '"sumples": ', 1)
    (tmp_path / "index.json").write_text(damaged)  # most shards are still the dataset's
    assert problems_of(remote=str(stage), local=str(tmp_path)) == []
    for hashes in ({"xxh64": "0" * 16}, {"md5": "0" * 32}, {}):  # a third-party dataset may have no digests
        raw = {"basename": "shard.00000.mds", "bytes": 5, "hashes": hashes}
        (tmp_path / "index.json").write_text(json.dumps({"shards": [{"raw_data": raw}]}))
        [text] = problems_of(remote=str(stage), local=str(tmp_path))
        assert text.startswith(f"data.local: {tmp_path} holds shards of another dataset than {stage}. ")


def test_an_index_in_a_store_is_fetched_at_each_start(stage, store, in_store, indexes_fetched, tmp_path):
    config, cache = dict(remote=in_store(stage, "once"), local=str(tmp_path), workers=0), tmp_path / "index.json"
    content = (stage / "index.json").read_bytes()
    for earlier in (None, content, b"[", content[:-1] + b" }"):
        if earlier is not None:
            cache.write_bytes(earlier)
        section = DataConfig(**config)
        assert section.problems(8, {}) == []
        given = dict(device_batch_size=8, device=CPU, seed=1, datasets=section.read())
        build_data(section.with_num_nodes(1), FAMILY, size=(64, 64), **given).dataloader.close()
        assert cache.read_bytes() == content
        assert indexes_fetched() == ["/easel/once/index.json"] * (1 if earlier == content else 2)
    store[0].put_object(Bucket="easel", Key="once/index.json", Body=content + b" ")
    [(key, text)] = DataConfig(**config).problems(8, {})  # though the cache has the right one
    assert key == "data.remote" and "dataset.json was written for " in text
