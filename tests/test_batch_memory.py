"""stages/batch_memory.py: a worker uses memory again only when its batch has been copied, and no batch is lost by that."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from conftest import picture
from streaming import MDSWriter

from data import DataConfig, build_data
from stages import batch_memory
from stages.batch_memory import KEPT, RECEIPT, BatchMemory
from stages.dataset import write_facts
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
