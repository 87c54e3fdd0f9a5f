"""bench/scale.py: a made-up stage that a run reads, what its readers measure, the record and its table; no speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import scale
from mds.dataset import read_dataset
from mds.fetch import file_digest
from reports import tables

SHARDS, SAMPLES = 64, 16


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict:
    """What a reader is given of a small stage."""
    folder = tmp_path_factory.mktemp("scale")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale, "LINKS", 40)
        sizes = scale.make_stage(folder, SHARDS, SAMPLES)
    return {**sizes, "stage": str(folder / "stage"), "workers": 0, "import_cpu_sec": 0.0}


def test_a_made_up_stage_is_one_with_right_digests_and_few_files_of_its_own(made):
    stage = read_dataset(made["stage"])
    assert stage.num_samples == SHARDS * SAMPLES and len(stage.shards) == SHARDS == made["num_shards"]
    files = [shard["raw_data"] for shard in stage.shards]
    for file in files[:2] + files[-2:]:
        path = Path(stage.location, file["basename"])
        assert file_digest(path) == file["hashes"]["xxh64"]
        assert path.stat().st_size == file["bytes"] == made["shard_bytes"]
    assert len({Path(stage.location, file["basename"]).stat().st_ino for file in files}) == 2
    assert made["index_bytes"] == Path(stage.location, "index.json").stat().st_size


# --- its table ---


def record_of(*sizes: int) -> dict:
    """A record in which a start takes 2 s, and 1 s more for ten million samples."""
    config = {"samples_a_shard": 1000, "ranks": 2, "workers": 2, "rounds": 1}
    figures = [{"samples": n, "start_all_sec": 2 + n / 1e7} for n in sizes]
    return {"config": config, "load_average_before": 1.0, "load_average_after": 1.5, "sizes": figures}


def test_the_table_extrapolates_along_the_line_through_two_large_sizes_far_apart():
    table = tables.table_of_scale(record_of(10_000_000, 100_000_000))
    assert table.head[3:] == ("400,000,000, by arithmetic",)
    assert table.rows == [("start: all, s", "3.00", "12.00", "42.00")]
    assert tables.table_of_scale(record_of(10_000_000, 20_000_000)).rows == [("start: all, s", "3.00", "4.00")]
