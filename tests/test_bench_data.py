"""bench/data.py: layouts of the same samples, the arithmetic of a node; no speed."""

from __future__ import annotations

import gc
import io
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import tarfile
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import run

from bench import data as bench_data
from bench import data_reading
from bench import store as bench_store
from bench.micro_data import MOMENTS_BATCH, our_loader

WARM = SimpleNamespace(run=lambda command, timeout, **ways: run(*command, timeout=timeout))
"""In place of a module's `subprocess`: programs of the project start warm."""


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    return folder, bench_data.write_layouts(folder, 128, 32)


def test_every_layout_delivers_the_same_moments(layouts):
    folder, _ = layouts
    found = {}
    for name, loader in bench_data.loaders(folder, 1).items():
        if name != "images":
            batches = list(loader)
            assert [tuple(batch["moments"].shape) for batch in batches] == [(MOMENTS_BATCH, 8, 64, 64)] * 2
            found[name] = Counter(float(each.double().sum()) for batch in batches for each in batch["moments"])
    assert len(found["ours"]) == 128
    assert all(values == found["ours"] for values in found.values())


def test_tars_are_laid_out_as_the_mlperf_reference_has_them(layouts):
    folder, sizes = layouts
    with tarfile.open(folder / "webdataset" / "tars" / "00003.tar") as tar:
        names = tar.getnames()
        array = np.load(io.BytesIO(tar.extractfile(names[0]).read()))
        assert json.load(tar.extractfile(names[2]))["key"] == "000000003"
    assert names[:3] == ["000000003.npy", "000000003.txt", "000000003.json"]
    assert array.shape == (1, 8, 64, 64) and array.dtype == np.float32
    assert 2 * 65536 < sizes["files"] < sizes["webdataset"] and sizes["ours"] < 0.51 * sizes["webdataset"]


def test_batches_read_row_by_row_and_by_preadv_are_ours(layouts):
    stream = our_loader(layouts[0] / "ours", "moments", MOMENTS_BATCH, workers=0).dataset
    edges, batches = data_reading.edges_of(stream), np.array([[0, 1, 2, 3], [127, 3, 64, 3]])
    ours, rows = stream.read_batch(batches[1]), data_reading.by_row(stream, edges, batches[1])
    assert {name: values.dtype for name, values in rows.items()} == {"moments": torch.float16, "tokens": torch.int64}
    assert all(torch.equal(ours[name], rows[name]) for name in rows)
    with open(layouts[0] / "ours" / "stage" / "shard.00000.mds", "rb") as file:
        buffer = data_reading.preadv(stream, [file.fileno()], edges, batches)
    assert len(stream.shards) == 1
    assert all(ours["moments"][place].numpy().tobytes() in buffer[place].tobytes() for place in range(4))


def test_cores_of_a_node_are_its_images_times_the_processor_time_of_each():
    assert bench_data.cores_of_a_node(625.0) == 1.0 and bench_data.cores_of_a_node(2500.0) == 4.0


@pytest.mark.slow
@pytest.mark.timeout(200, func_only=True)
def test_processor_time_is_that_of_who_works():
    def burn(seconds: float) -> None:
        until = time.process_time() + seconds
        while time.process_time() < until:
            pass

    own = bench_data.cpu_sec(of_workers=False)
    burn(0.1)
    assert bench_data.cpu_sec(of_workers=False) - own >= 0.1

    gc.collect()  # loader processes of other tests would end in the meantime
    workers = bench_data.cpu_sec(of_workers=True)
    child = multiprocessing.get_context("fork").Process(target=lambda: (burn(0.2), time.sleep(60)), daemon=True)
    child.start()
    until = time.monotonic() + 30
    while bench_data.cpu_sec(of_workers=True) - workers < 0.15 and time.monotonic() < until:
        time.sleep(0.05)
    assert bench_data.cpu_sec(of_workers=True) - workers >= 0.15
    child.kill()
    child.join()


def test_waiting_is_the_time_that_a_batch_is_late(monkeypatch):
    now = [0.0]

    def batches():
        while True:
            now[0] += 0.08
            yield None

    monkeypatch.setattr(bench_data.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(bench_data.time, "perf_counter", lambda: now[0])
    assert bench_data.paced_wait(batches(), 5) == pytest.approx(0.08 / (0.08 + 0.32))


# --- the command ---


@pytest.mark.slow
@pytest.mark.timeout(120, func_only=True)
def test_the_record_has_every_figure_and_its_ratios_are_those_of_its_rounds(tmp_path, capsys, monkeypatch):
    results, work = tmp_path / "data.json", tmp_path / "work"
    work.mkdir()
    # so many that a loader process, whose time is counted in hundredths of a second, takes some
    words = ["num_samples=512", "num_images=32", "rounds=2", "paced_batches=1", f"results={results}", f"work={work}"]
    assert bench_data.main(words) == 0
    record, printed = json.loads(results.read_text()), capsys.readouterr().out.splitlines()
    assert list(work.iterdir()) == [] and record["measured"] == "data_speed"
    assert [line.split()[0] for line in printed[1:6]] == list(bench_data.LAYOUTS)
    for place in bench_data.PLACES:
        for name in bench_data.LAYOUTS[1:]:
            ours, other = (record["by_round"][f"{each}_{place}_samples_per_sec"] for each in ("ours", name))
            ratios = [a / b for a, b in zip(ours, other, strict=True)]
            assert record[f"speedup_vs_{name}_{place}"] == pytest.approx(statistics.median(ratios), rel=1e-4)
    for name in data_reading.READERS[:-1]:
        bare, other = (record["by_round"][f"reading_{each}_cpu_us_a_sample"] for each in ("preadv", name))
        ratios = [a / b for a, b in zip(bare, other, strict=True)]
        assert record[f"{name}_over_preadv"] == pytest.approx(statistics.median(ratios), rel=1e-4)
    for key, values in record["by_round"].items():
        assert record[key] == pytest.approx(statistics.median(values), rel=1e-5) and len(values) == 2
    assert record["node_cores_ours"] == pytest.approx(1600e-6 * record["ours_worker_cpu_us_a_sample"], rel=1e-4)
    assert all(
        record[f"{name}_{place}_cpu_us_a_sample_min"] > 0 for name in bench_data.LAYOUTS for place in bench_data.PLACES
    )


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("num_samples=127", "command line: num_samples is 127. Possible: 128 and up."),
        ("rounds=0", "command line: rounds is 0. Possible: 1 and up."),
        (
            "num_samples=640",
            "paced_batches: 10, but 640 samples are too few for them and the first batch. Lower it, or give num_samples=704.",
        ),
        ("results=/proc/x/y.json", "results: /proc/x cannot be written: /proc: "),
        ("results=/tmp", "results: /tmp is a folder. Give a file in it."),
        ("work=/nowhere", "work: no folder /nowhere. Make it, or leave it out."),
    ],
)
def test_impossible_keys_are_named(word, text, capsys):
    assert bench_data.main([word]) == 2
    assert text in capsys.readouterr().err


def test_an_interrupt_that_ends_the_loader_processes_too_leaves_no_folder_behind(tmp_path, monkeypatch):
    """Torch answers the end of a loader process by raising, wherever the program is."""

    def as_torch(*_):
        raise RuntimeError("DataLoader worker exited unexpectedly")

    plain = shutil.rmtree

    def interrupted(*given, **more):
        os.kill(os.getpid(), signal.SIGCHLD)
        return plain(*given, **more)

    earlier = signal.signal(signal.SIGCHLD, as_torch)
    try:
        monkeypatch.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt), bench_data._temporary_folder(str(tmp_path)) as folder:
            (folder / "a").write_text("")
            raise KeyboardInterrupt
        assert signal.getsignal(signal.SIGCHLD) is as_torch
    finally:
        signal.signal(signal.SIGCHLD, earlier)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("/tmp/stage", "/tmp/stage is no address of an S3 store. Write s3://BUCKET/PREFIX."),
        ("sftp://u:SECRET@host/x", "host/x is no address of an S3 store. Write s3://BUCKET/PREFIX."),
        ("s3:///prefix", "s3:///prefix names no bucket. Write s3://BUCKET/PREFIX."),
        (
            "s3://key:SECRET@bucket/x",
            "s3://key:***@bucket/x has credentials in it. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile in "
            "AWS_PROFILE, and leave it out.",
        ),
    ],
)
def test_a_place_in_no_s3_store_or_with_a_password_in_it_is_refused_at_once(capsys, monkeypatch, place, said):
    monkeypatch.setattr(bench_store, "measure", lambda *given: pytest.fail("it was begun"))
    assert bench_store.main([place]) == 2
    assert capsys.readouterr().err.endswith(said + "\n")  # before it, of a password, how it may be given
