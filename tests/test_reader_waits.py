"""mds/loader.py: a wait for a batch lasts as long as data arrives, and ends when none does, or at a call."""

from __future__ import annotations

import itertools
import time

import pytest
from test_cache_space import COLUMNS, write_stage
from torch.utils.data import DataLoader, Dataset

from mds import loader as mds_loader
from mds.fetch import RetryingStream, StreamFailure
from mds.loader import END, count_files_and_bytes, wait_for_batch
from mds.moments import MomentsDataset


class Slow(Dataset):
    """Its second item comes late."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> int:
        time.sleep(1.5 if number == 1 else 0.0)
        return number


@pytest.fixture
def batches(monkeypatch):
    monkeypatch.setattr(mds_loader, "SLICE_SEC", 0.1)
    monkeypatch.setattr(mds_loader, "ARRIVAL_CHECK_SEC", 0.1)
    monkeypatch.setattr(mds_loader, "LOG_INTERVAL_SEC", 0.5)
    loader = DataLoader(Slow(), batch_size=None, num_workers=1, timeout=0.1, persistent_workers=True)
    yield iter(loader)
    loader._iterator._shutdown_workers()


def nothing() -> None:
    pass


def test_a_slow_store_is_waited_for_as_long_as_something_arrives(batches, capsys):
    bytes_here = itertools.count()
    found = [wait_for_batch(batches, lambda: (1, next(bytes_here)), 0.5, nothing) for _ in range(4)]
    assert found == [0, 1, 2, END]
    assert "s: waiting for a batch (" in capsys.readouterr().err


def test_a_wait_in_which_nothing_arrives_ends_with_its_seconds(batches):
    assert wait_for_batch(batches, lambda: (1, 5), 0.5, nothing) == 0
    with pytest.raises(
        StreamFailure, match=r"^data: no batch for \d s, and nothing of the dataset has arrived for \d s: "
    ):
        wait_for_batch(batches, lambda: (1, 5), 0.5, nothing)


def test_looks_at_a_large_cache_take_a_small_part_of_a_wait(batches):
    """A walk over 100,000 files takes two seconds, and one followed the other: the first batch of a store came later."""
    looks = []

    def walk() -> tuple[int, int]:
        time.sleep(0.3)
        looks.append(time.monotonic())
        return 1, len(looks)

    assert [wait_for_batch(batches, walk, 60, nothing) for _ in range(2)] == [0, 1]
    assert len(looks) <= 2


def test_an_error_of_the_reader_is_raised_as_it_is():
    class Broken(Slow):
        def __getitem__(self, number: int) -> int:
            raise (RuntimeError("broken") if number else ValueError("data: no sample of shard 0 can be used. Make it."))

    batches = iter(DataLoader(Broken(), batch_size=None, sampler=[1]))
    with pytest.raises(RuntimeError, match="broken"):
        wait_for_batch(batches, lambda: (0, 0), None, nothing)
    with pytest.raises(StreamFailure, match="^data: no sample of shard 0 can be used. Make it.$"):  # without its trace
        wait_for_batch(iter(DataLoader(Broken(), num_workers=1, timeout=1)), lambda: (0, 0), 60, nothing)


def test_a_look_is_taken_before_a_wait_counts_as_one_for_nothing(batches):
    def walk() -> tuple[int, float]:
        time.sleep(0.1)  # the next one is a second later
        return 1, time.monotonic()

    assert [wait_for_batch(batches, walk, 0.4, nothing) for _ in range(3)] == [0, 1, 2]


@pytest.mark.timeout(30, func_only=True)
def test_a_signal_ends_a_wait(batches):
    def stop() -> None:
        raise SystemExit(143)

    assert wait_for_batch(batches, lambda: (1, 5), 60, nothing) == 0
    with pytest.raises(SystemExit):
        wait_for_batch(batches, lambda: (1, 5), 60, stop)


def test_a_signal_ends_a_wait_without_workers_too(monkeypatch):
    """The batch is read in a thread, while the main one waits in slices; the next starts where it ended."""
    monkeypatch.setattr(mds_loader, "SLICE_SEC", 0.1)
    batches, waited = iter(DataLoader(Slow(), batch_size=None)), []
    found = [wait_for_batch(batches, lambda: (1, 5), None, lambda: waited.append(1)) for _ in range(4)]
    assert found == [0, 1, 2, END] and len(waited) >= 5

    def stop() -> None:
        raise SystemExit(143)

    batches = iter(DataLoader(Slow(), batch_size=None))
    assert wait_for_batch(batches, lambda: (1, 5), None, stop) == 0
    with pytest.raises(SystemExit):
        wait_for_batch(batches, lambda: (1, 5), None, stop)


def test_unfinished_files_count(tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "shard.00000.mds.1a2b3c4d").write_bytes(b"123")
    (tmp_path / "index.json").write_bytes(b"4567")
    assert count_files_and_bytes([str(tmp_path)]) == (2, 7)


def test_only_folders_that_shards_arrive_in_are_looked_at(tmp_path, monkeypatch):
    """A stage of 400,000 shards that is read in place was walked over in each wait."""
    looked = []
    monkeypatch.setattr(mds_loader, "SLICE_SEC", 0.02)
    monkeypatch.setattr(mds_loader, "count_files_and_bytes", lambda folders: looked.append(folders) or (0, 0))
    ours, in_place, cache = write_stage(tmp_path / "a", 12), write_stage(tmp_path / "b", 12), str(tmp_path / "cache")
    streams = [RetryingStream(remote=str(ours), local=cache), RetryingStream(local=str(in_place))]
    stream = MomentsDataset(columns=[COLUMNS] * 2, streams=streams, batch_size=24, num_canonical_nodes=1)
    read = stream.read_batch
    monkeypatch.setattr(stream, "read_batch", lambda ids: time.sleep(0.2) or read(ids))
    assert len(list(mds_loader.Loader(stream, epoch_batches=1, max_bad_samples=0))) == 1 and looked == [[cache]]
    stream.close()
