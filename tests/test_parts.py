"""prepare/parts.py and addresses.py: work stopped anywhere resumes to the same bytes, and is no dataset until done."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from conftest import in_child, sample_files, started, tree, write_tar

from common.errors import Failed, Refused
from mds.dataset import read_dataset
from prepare import addresses, parts, shards

LIMIT_SEC = 60


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Three tars: 9 samples, 6 of which one is broken, none."""
    folder = tmp_path_factory.mktemp("source")
    write_tar(folder / "0.tar", {f"a{n}": sample_files(n) for n in range(9)})
    write_tar(folder / "1.tar", {f"b{n}": sample_files(n) for n in range(5)} | {"bad": {"jpg": b"", "txt": b"x"}})
    write_tar(folder / "2.tar", {})
    return folder


@pytest.fixture(scope="module")
def unbroken(source, tmp_path_factory) -> dict[str, bytes]:
    """The tree that one undisturbed command makes."""
    out = tmp_path_factory.mktemp("unbroken") / "out"
    assert shards.main(command(source, out)) == 0
    made = tree(out)
    names = [shard["raw_data"]["basename"] for shard in json.loads(made["index.json"])["shards"]]
    assert names == sorted(names) and names[0] == "part-00000/shard.00000.mds" and len(names) > 3
    others = {"plan.json", "skipped.jsonl", "keys.u64", "index.json", "dataset.json"}
    assert set(made) - set(names) == others | {f"part-0000{n}/part.json" for n in range(3)}
    return made


def die_after(owner: type, name: str, nth: int, before: bool) -> None:
    """In a child: make the nth call of a method its last one; SIGKILL comes before it, or after it."""
    method, calls = getattr(owner, name), itertools.count()

    def dying(*arguments):
        is_last = next(calls) == nth
        if not (is_last and before):
            method(*arguments)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, dying)


def command(source, out, *words: str) -> list[str]:
    return [str(source), str(out), "shard_size=6kb", "workers=1", *words]


# --- stopped and started again ---


def test_killed_between_any_two_files_it_leaves_no_dataset_and_resumes_to_the_same_bytes(source, unbroken, tmp_path):
    num_files = len(unbroken)
    # The state after a file is the state before the next one.
    numbers = sorted({*range(0, num_files, 4), *range(num_files - 3, num_files)})
    for nth, is_before in [*((nth, True) for nth in numbers), (num_files - 1, False)]:
        out = tmp_path / f"{nth}{is_before}"

        def killed(out=out, nth=nth, is_before=is_before) -> int:
            die_after(addresses.Folder, "put", nth, is_before)
            return shards.main(command(source, out))

        assert in_child(killed) == -signal.SIGKILL
        with pytest.raises(ValueError) if is_before else contextlib.nullcontext():
            read_dataset(str(out))
        parts_done = [path.parent for path in out.glob("*/part.json")]
        times = {path: path.stat().st_mtime_ns for part in parts_done for path in part.iterdir()}
        assert shards.main(command(source, out)) == 0
        assert tree(out) == unbroken and not (out / addresses.WORK).exists()
        assert {path: path.stat().st_mtime_ns for path in times} == times, "a done part was made again"


@pytest.mark.slow
@pytest.mark.timeout(120, func_only=True)
def test_a_killed_command_takes_its_workers_with_it_and_can_be_started_again_at_once(tmp_path):
    source = tmp_path / "in"
    for tar in range(6):
        write_tar(source / f"{tar}.tar", {f"{tar}-{n}": sample_files(n, (700, 700)) for n in range(60)})
    words = [str(source), str(tmp_path / "out"), "workers=2"]
    with started(sys.executable, "-m", "prepare.shards", *words) as process:
        while not list((tmp_path / "out").glob("*/part.json")):
            time.sleep(0.01)
        process.kill()
        process.wait()
        assert not (tmp_path / "out" / "dataset.json").exists()
        assert shards.main(words) == 0
    assert shards.main([str(source), str(tmp_path / "again")]) == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "again")


def test_another_plan_for_the_same_folder_is_refused_with_what_differs(source, tmp_path, capsys):
    out = tmp_path / "out"
    assert shards.main(command(source, out)) == 0

    def refusal(*words: object) -> str:
        before = tree(out)
        capsys.readouterr()
        assert shards.main([str(word) for word in words]) == 2 and tree(out) == before
        return capsys.readouterr().err

    assert refusal(source, out, "shard_size=5kb") == (
        f"OUT: {out} holds the finished work of another command: shard_size was 6144, is 5120. Give another OUT, or remove "
        "this one.\n"
    )
    assert "command: it had 3 parts, now 1. " in refusal(source / "0.tar", out, "shard_size=6kb")
    other = shutil.copytree(source, tmp_path / "other")
    write_tar(other / "1.tar", {"a": sample_files(1)})
    (out / "dataset.json").unlink()
    assert "unfinished work of another command: part-00001.bytes was " in refusal(*command(other, out))


# --- more than one at once ---


def test_a_second_command_for_the_same_folder_is_refused(source, tmp_path, monkeypatch):
    out = addresses.Folder(str(tmp_path / "out"))
    monkeypatch.setattr(addresses, "LOCK_WAIT_SEC", 0.1)
    with out.lock_for_writing():
        assert in_child(lambda: shards.main(command(source, tmp_path / "out"))) == 2
        with pytest.raises(
            Refused, match=f"^OUT: {tmp_path}/out is being written by another command on this machine. "
        ):
            out.lock_for_writing().__enter__()


def plan_of(num_parts: int) -> parts.Plan:
    inputs = [{"name": f"in{number}"} for number in range(num_parts)]
    return parts.Plan("test", "images", {"key": "str"}, 1 << 20, {"image_size": 8}, inputs)


def fill(number: int, part: parts.Part) -> None:
    for sample in range(number):
        part.read()
        part.write({"key": f"{number}-{sample}"})


def test_waiting_for_other_ranks_ends_with_the_names_of_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(addresses.Folder, "poll_sec", 0.01)
    address, plan = addresses.Folder(str(tmp_path / "out")), plan_of(9)
    parts.begin_dataset(address, plan)
    parts.make_part(address, plan, 3, fill)
    missing = "8 are missing: part-00000, part-00001, part-00002, part-00004, part-00005, .... Start the command again"
    with pytest.raises(Failed, match=f"/out: no other rank finished a part for 0 minutes; {missing}: it resumes "):
        parts.wait_for_parts(address, 9, patience_sec=0.1)
    for number in range(9):
        parts.make_part(address, plan, number, fill)
    parts.wait_for_parts(address, 9, patience_sec=0.1)
    assert parts.finish_dataset(address, plan).written == sum(range(9))


def test_two_processes_make_a_part_once_and_a_part_of_another_plan_is_refused(tmp_path):
    address, plan = addresses.Folder(str(tmp_path / "out")), plan_of(2)
    parts.begin_dataset(address, plan)

    def fill_slowly(number: int, part: parts.Part) -> None:
        time.sleep(0.5)
        fill(number, part)

    child = multiprocessing.get_context("fork").Process(target=lambda: parts.make_part(address, plan, 1, fill_slowly))
    child.start()
    while not (address.scratch / "part-00001.lock").exists():
        assert child.is_alive()
        time.sleep(0.01)
    time.sleep(0.1)
    assert parts.make_part(address, plan, 1, lambda number, part: pytest.fail("made twice")).written == 1
    child.join(LIMIT_SEC)
    parts.make_part(address, plan_of(3), 0, fill)
    with pytest.raises(Failed, match="part-00000 was made by another command at the same time. Remove OUT.$"):
        parts.finish_dataset(address, plan)


# --- places ---


def test_a_quota_reached_in_a_worker_is_a_message_and_not_a_traceback(source, unbroken, tmp_path):
    log = tmp_path / "log"

    def limited() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        with open(log, "w", buffering=1) as file, contextlib.redirect_stderr(file):
            return shards.main([str(source), str(tmp_path / "out"), "shard_size=6kb", "workers=2"])

    assert in_child(limited) == 1
    assert f"OUT: {tmp_path}/out cannot be written: [Errno 27] File too large. Finished work " in log.read_text()
    assert "Traceback" not in log.read_text()
    assert shards.main(command(source, tmp_path / "out")) == 0 and tree(tmp_path / "out") == unbroken


@pytest.fixture
def bucket(store, monkeypatch, tmp_path_factory):
    """A client of the store on loopback; this process is led to it, and keeps its scratch folders among the tests'."""
    client, variables = store
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("scratch")))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return client


def objects(client, prefix: str) -> dict[str, bytes]:
    listed = client.list_objects_v2(Bucket="easel", Prefix=prefix).get("Contents", [])
    bodies = {entry["Key"]: client.get_object(Bucket="easel", Key=entry["Key"])["Body"].read() for entry in listed}
    return {key.removeprefix(prefix): body for key, body in bodies.items()}


def test_a_store_gets_the_same_files_as_a_folder_also_when_stopped(bucket, source, unbroken, monkeypatch):
    out, put, calls = "s3://easel/stopped", addresses.Store.put, itertools.count()

    def stopped(self, name, file):
        if next(calls) == 3:
            raise KeyboardInterrupt
        put(self, name, file)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(addresses.Store, "put", stopped)
        shards.main(command(source, out))
    with pytest.raises(ValueError):
        read_dataset(out)
    assert shards.main([str(source), out, "shard_size=6kb", "workers=2"]) == 0
    assert objects(bucket, "stopped/") == unbroken
    assert not addresses.Store(out).scratch.exists() and read_dataset(out).num_samples == 14
