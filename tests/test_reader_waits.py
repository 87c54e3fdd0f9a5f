"""mds/loader.py: a wait lasts as long as data arrives, and ends when none does, or at a call; memory is used again."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from mds import loader as mds_loader
from mds.fetch import StreamFailure
from mds.loader import END, MAX_BUFFERS, RECEIPT, BatchMemory, count_files_and_bytes, wait_for_batch


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
    text = r"^data: no batch for \d s, and nothing of the dataset has arrived for \d s: "
    with pytest.raises(StreamFailure, match=text):
        wait_for_batch(batches, lambda: (1, 5), 0.5, nothing)


def test_an_error_of_the_reader_is_raised_as_it_is():
    class Broken(Slow):
        def __getitem__(self, number: int) -> int:
            raise (RuntimeError("broken") if number else ValueError("data: no sample of shard 0 can be used. Make it."))

    batches = iter(DataLoader(Broken(), batch_size=None, sampler=[1]))
    with pytest.raises(RuntimeError, match="broken"):
        wait_for_batch(batches, lambda: (0, 0), None, nothing)
    with pytest.raises(StreamFailure, match="^data: no sample of shard 0 can be used. Make it.$"):  # without its trace
        wait_for_batch(iter(DataLoader(Broken(), num_workers=1, timeout=1)), lambda: (0, 0), 60, nothing)


@pytest.mark.timeout(30, func_only=True)
@pytest.mark.parametrize("workers", [1, 0])
def test_a_signal_ends_a_wait(batches, workers):
    """Without workers the batch is read in a thread, while the main one waits in slices; the next starts where it ended."""

    def stop() -> None:
        raise SystemExit(143)

    limit = 60 if workers else None
    batches = batches if workers else iter(DataLoader(Slow(), batch_size=None))
    assert wait_for_batch(batches, lambda: (1, 5), limit, nothing) == 0
    with pytest.raises(SystemExit):
        wait_for_batch(batches, lambda: (1, 5), limit, stop)
    if not workers:
        batches, waited = iter(DataLoader(Slow(), batch_size=None)), []
        found = [wait_for_batch(batches, lambda: (1, 5), None, lambda: waited.append(1)) for _ in range(4)]
        assert found == [0, 1, 2, END] and len(waited) >= 5


def test_unfinished_files_count_as_arrived(tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "shard.00000.mds.1a2b3c4d").write_bytes(b"123")
    (tmp_path / "index.json").write_bytes(b"4567")
    assert count_files_and_bytes([str(tmp_path)]) == (2, 7)


# --- memory: used again only when its batch has been copied ---


@pytest.fixture
def worker(monkeypatch):
    """This process, as if it were loader worker 3."""
    monkeypatch.setattr(mds_loader, "get_worker_info", lambda: SimpleNamespace(id=3))


def test_memory_is_reused_when_its_batch_is_collected_and_not_before(worker):
    memory, taken = BatchMemory(), []
    for number in range(1, MAX_BUFFERS + 3):  # nothing is collected: two more than are kept
        rows, entry = memory.allocate((4, 5), torch.uint8)
        taken.append((rows.fill_(number), entry))
        assert rows.is_shared() and entry == {RECEIPT: (3, number)}
    pointers = {rows.data_ptr() for rows, _ in taken}
    assert len(pointers) == MAX_BUFFERS + 2
    batch = {"images": taken[0][0], **taken[0][1]}
    memory.release(batch)
    again, entry = memory.allocate((2, 5), torch.float16)  # a batch of another shape and type, and as many bytes
    assert again.data_ptr() == taken[0][0].data_ptr() and entry == {RECEIPT: (3, MAX_BUFFERS + 3)}
    again.fill_(-1.0)
    assert batch.keys() == {"images"} and batch["images"].eq(1).all() and not batch["images"].is_shared()
    assert memory.allocate((4, 5), torch.uint8)[0].data_ptr() not in pointers  # 2 is not collected
    memory.release({"images": taken[1][0], **taken[1][1]})
    assert memory.allocate((4096,), torch.float32)[0].data_ptr() not in pointers  # too small
    assert all(rows.eq(number).all() for number, (rows, _) in enumerate(taken[1:], 2))


def test_columns_are_cut_from_one_piece_and_come_back_by_themselves(worker):
    memory, taken = BatchMemory(), []
    columns = {"moments": ((3, 5), torch.float16), "tokens": ((3, 7), torch.int64), "none": ((0, 2), torch.float32)}
    for number in range(1, MAX_BUFFERS + 1):
        batch, entry = memory.allocate_columns(columns)
        assert {name: (tuple(each.shape), each.dtype) for name, each in batch.items()} == columns
        assert len({each.untyped_storage().data_ptr() for each in batch.values()}) == 1
        assert entry == {RECEIPT: (3, number)}
        assert all(each.is_contiguous() and each.is_shared() for each in batch.values())
        assert [each.storage_offset() * each.itemsize for each in batch.values()] == [0, 64, 64 + 192]
        batch["moments"].fill_(number), batch["tokens"].fill_(-number)
        taken.append({**batch, **entry})
    for number, batch in enumerate(taken, 1):
        memory.release(batch)
        assert batch["moments"].eq(number).all() and batch["tokens"].eq(-number).all() and RECEIPT not in batch
        memory.allocate_columns(columns)[0]["tokens"].fill_(99)  # what was collected is nobody's memory but its own
    assert all(batch["tokens"].eq(-number).all() for number, batch in enumerate(taken, 1))


def test_a_worker_that_comes_after_another_waits_for_its_own_batches(worker):
    memory = BatchMemory()
    memory.collected[3] = 57  # by an earlier one
    first, entry = memory.allocate((4,), torch.uint8)
    assert entry == {RECEIPT: (3, 58)} and memory.allocate((4,), torch.uint8)[0].data_ptr() != first.data_ptr()
