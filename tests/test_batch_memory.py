"""stages/batch_memory.py: a worker uses memory again only when its batch has been copied, and no batch is lost by that."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import picture
from streaming import MDSWriter

from data import DataConfig, build_data
from stages import batch_memory
from stages.batch_memory import KEPT, RECEIPT, BatchMemory
from stages.dataset import array_encoding, write_facts
from stages.fetch import HASH
from zoo import load_family

CPU = torch.device("cpu")


@pytest.fixture
def worker(monkeypatch):
    """This process, as if it were loader worker 3."""
    monkeypatch.setattr(batch_memory, "get_worker_info", lambda: SimpleNamespace(id=3))


def test_outside_of_workers_each_batch_has_memory_of_its_own():
    memory = BatchMemory()
    (one, nothing), (two, _) = memory.take((2, 3), torch.uint8), memory.take((2, 3), torch.uint8)
    assert not nothing and not one.is_shared() and one.data_ptr() != two.data_ptr()


def test_memory_is_used_again_when_its_batch_is_collected_and_not_before(worker):
    memory, taken = BatchMemory(), []
    for number in range(1, KEPT + 3):  # nothing is collected: two more than are kept
        rows, entry = memory.take((4, 5), torch.uint8)
        taken.append((rows.fill_(number), entry))
        assert rows.is_shared() and entry == {RECEIPT: (3, number)}
    assert len({rows.data_ptr() for rows, _ in taken}) == KEPT + 2
    batch = {"images": taken[0][0], **taken[0][1]}
    memory.collect(batch)
    again, entry = memory.take((2, 5), torch.float16)  # a batch of another shape and type, and as many bytes
    assert again.data_ptr() == taken[0][0].data_ptr() and entry == {RECEIPT: (3, KEPT + 3)}
    again.fill_(-1.0)
    assert batch.keys() == {"images"} and batch["images"].eq(1).all() and not batch["images"].is_shared()
    assert memory.take((4, 5), torch.uint8)[0].data_ptr() not in {
        rows.data_ptr() for rows, _ in taken
    }  # 2: not collected
    assert all(rows.eq(number).all() for number, (rows, _) in enumerate(taken[1:], 2))


def test_columns_are_cut_from_one_piece_and_come_back_by_themselves(worker):
    memory, taken = BatchMemory(), []
    columns = {"moments": ((3, 5), torch.float16), "tokens": ((3, 7), torch.int64), "none": ((0, 2), torch.float32)}
    for number in range(1, KEPT + 1):
        batch, entry = memory.take_columns(columns)
        assert {name: (tuple(each.shape), each.dtype) for name, each in batch.items()} == columns
        assert len({each.untyped_storage().data_ptr() for each in batch.values()}) == 1 and entry == {
            RECEIPT: (3, number)
        }
        assert all(each.is_contiguous() and each.is_shared() for each in batch.values())
        assert [each.storage_offset() * each.itemsize for each in batch.values()] == [0, 64, 64 + 192]
        batch["moments"].fill_(number), batch["tokens"].fill_(-number)
        taken.append({**batch, **entry})
    for number, batch in enumerate(taken, 1):
        memory.collect(batch)
        assert batch["moments"].eq(number).all() and batch["tokens"].eq(-number).all() and RECEIPT not in batch
        memory.take_columns(columns)[0]["tokens"].fill_(99)  # what was collected is nobody's memory but its own
    assert all(batch["tokens"].eq(-number).all() for number, batch in enumerate(taken, 1))


def test_a_larger_batch_has_new_memory(worker):
    memory = BatchMemory()
    small, entry = memory.take((4,), torch.uint8)
    memory.collect({"images": small, **entry})
    large, _ = memory.take((4096,), torch.float32)
    assert large.shape == (4096,) and large.data_ptr() != small.data_ptr()


def test_a_worker_that_comes_after_another_waits_for_its_own_batches(worker):
    memory = BatchMemory()
    memory.collected[3] = 57  # by an earlier one
    first, entry = memory.take((4,), torch.uint8)
    assert entry == {RECEIPT: (3, 58)} and memory.take((4,), torch.uint8)[0].data_ptr() != first.data_ptr()


def test_every_batch_of_two_epochs_is_that_of_no_worker_whoever_waits(tmp_path):
    columns = {"jpg": "bytes", "caption": "str", "key": "str", "width": "int", "height": "int"}
    with MDSWriter(out=str(tmp_path), columns=columns, hashes=[HASH]) as writer:
        for number in range(40):
            row = {"jpg": picture(number, (64, 48)), "caption": f"{number}", "key": f"{number}"}
            writer.write({**row, "width": 64, "height": 48})
    write_facts(tmp_path, "images", {})

    def epochs(workers: int) -> list[torch.Tensor]:
        config, family = DataConfig(local=str(tmp_path), workers=workers), load_family("sd2", "tiny", "stock")
        loader = build_data(config, family, size=(48, 48), device_batch_size=1, device=CPU, seed=1).dataloader
        read = [batch["images"] for _ in range(2) for batch in loader]
        last = int(loader.dataset.memory.collected.sum())
        loader.close()
        assert last == (80 if workers else 0) and not any(images.is_shared() for images in read)
        return read

    expected = epochs(0)
    assert len(expected) == 80 and len({int(images.sum()) for images in expected}) > 30
    for workers in (1, 2):
        assert all(torch.equal(a, b) for a, b in zip(epochs(workers), expected, strict=True))


def test_every_batch_of_moments_and_stored_text_is_that_of_no_worker(tmp_path):
    family, keys = load_family("sd2", "tiny", "stock"), dict(stage="moments", local=str(tmp_path), text="stored")
    columns = DataConfig(**keys).columns(family, (64, 64))
    assert columns["text"].stored == "float16"
    encodings = {name: array_encoding(column.stored, column.shape) for name, column in columns.items()}
    tokens = array_encoding("uint16", (77,))
    with MDSWriter(
        out=str(tmp_path), columns={**encodings, "tokens": tokens, "caption": "str"}, hashes=[HASH]
    ) as writer:
        for number in range(40):
            values = np.random.default_rng(number)
            row = {name: values.normal(size=column.shape).astype(column.stored) for name, column in columns.items()}
            writer.write({**row, "tokens": np.zeros(77, np.uint16), "caption": f"{number}"})
    write_facts(tmp_path, "moments", {})

    def epochs(workers: int) -> list[dict[str, torch.Tensor]]:
        config = DataConfig(**keys, workers=workers)
        loader = build_data(config, family, size=(64, 64), device_batch_size=2, device=CPU, seed=1).dataloader
        read = [batch for _ in range(2) for batch in loader]
        assert int(loader.dataset.memory.collected.sum()) == (40 if workers else 0)
        loader.close()
        assert not any(column.is_shared() for batch in read for column in batch.values())
        return read

    expected = epochs(0)
    assert len(expected) == 40 and len({float(batch["text"].double().sum()) for batch in expected}) > 30
    for workers in (1, 2):
        for batch, other in zip(epochs(workers), expected, strict=True):
            assert batch.keys() == other.keys() >= {"moments", "text"}
            assert all(torch.equal(batch[name], other[name]) for name in batch)
