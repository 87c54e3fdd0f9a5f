"""mds/loader.py: a worker uses memory again only when its batch has been copied, and no batch is lost by that."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from streaming import MDSWriter

from data import DataConfig, build_data
from families import load_family
from mds import loader as mds_loader
from mds.dataset import array_encoding, write_metadata
from mds.fetch import HASH
from mds.loader import MAX_BUFFERS, RECEIPT, BatchMemory

CPU, FAMILY = torch.device("cpu"), load_family("sd2", "tiny", "stock")


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
        assert len({each.untyped_storage().data_ptr() for each in batch.values()}) == 1 and entry == {
            RECEIPT: (3, number)
        }
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


def test_batches_with_stored_text_are_the_same_with_and_without_workers(tmp_path):
    """Each is nobody's memory but its own, and every one is collected."""
    keys = dict(stage="moments", local=str(tmp_path), text="stored")
    columns = DataConfig(**keys).columns(FAMILY, (64, 64))
    encodings = {name: array_encoding(column.stored_dtype, column.shape) for name, column in columns.items()}
    encodings |= {"tokens": array_encoding("uint16", (77,)), "caption": "str"}
    with MDSWriter(out=str(tmp_path), columns=encodings, hashes=[HASH]) as writer:
        for number in range(40):
            values = np.random.default_rng(number)
            row = {n: values.normal(size=column.shape).astype(column.stored_dtype) for n, column in columns.items()}
            writer.write({**row, "tokens": np.zeros(77, np.uint16), "caption": f"{number}"})
    write_metadata(tmp_path, "moments", {})
    epochs = []
    for workers in (0, 2):
        config = DataConfig(**keys, workers=workers)
        loader = build_data(config, FAMILY, size=(64, 64), device_batch_size=2, device=CPU, seed=1).dataloader
        epochs.append([batch for _ in range(2) for batch in loader])
        assert int(loader.dataset.memory.collected.sum()) == (40 if workers else 0)
        loader.close()
    assert len({float(batch["text"].double().sum()) for batch in epochs[0]}) > 30
    assert not any(column.is_shared() for batch in epochs[1] for column in batch.values())
    torch.testing.assert_close(epochs[1], epochs[0], rtol=0, atol=0)
