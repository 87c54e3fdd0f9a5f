"""prepare/parts.py and places.py: work stopped anywhere resumes to the same bytes, and is not a stage until it is done."""

from __future__ import annotations

import contextlib
import errno
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
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import sample_files, started, tree, write_tar
from streaming import MDSWriter, StreamingDataset
from test_prepare import split_pace

from cli.errors import Failed, Refused
from prepare import parts, places, shards
from prepare.sources import known_by
from stages.dataset import read_stage

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
    assert shards.main([str(source), str(out), "shard_size=4kb", "workers=1"]) == 0
    return tree(out)


def command(source, out, *words: str) -> list[str]:
    return [str(source), str(out), "shard_size=4kb", "workers=1", *words]


def in_child(function: Callable[[], int]) -> int:
    """Run in a process of its own; its exit code, or minus the signal that ended it."""
    child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(function()))
    child.start()
    child.join(LIMIT_SEC)
    assert child.exitcode is not None, "hangs"
    return child.exitcode


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- stopped and started again ---


def test_the_tree_has_the_parts_in_order_and_nothing_unfinished(unbroken):
    index = json.loads(unbroken["index.json"])
    names = [shard["raw_data"]["basename"] for shard in index["shards"]]
    assert names == sorted(names) and names[0] == "part-00000/shard.00000.mds" and len(names) > 4
    assert set(unbroken) - set(names) == {
        *(f"part-0000{n}/part.json" for n in range(3)),
        *("plan.json", "skipped.jsonl", "keys.u64", "index.json", "dataset.json"),
    }
    counts = json.loads(unbroken["part-00001/part.json"])["account"]
    assert counts["read"] == counts["written"] + sum(counts["skipped"].values()) == 6


def test_killed_before_and_after_every_file_it_leaves_no_stage_and_goes_on_to_the_same_bytes(
    source, unbroken, tmp_path
):
    num_files = len(unbroken)
    # What lies there after a file is what lies there before the next one.
    for nth, when in [*((nth, "before") for nth in range(num_files)), (num_files - 1, "after")]:
        out = tmp_path / f"{nth}{when}"

        def killed(out=out, nth=nth, when=when) -> int:
            put, calls = places.Folder.put, itertools.count()

            def dying_put(self, name, file):
                is_last = next(calls) == nth
                if is_last and when == "before":
                    die()
                put(self, name, file)
                if is_last:
                    die()

            places.Folder.put = dying_put
            return shards.main(command(source, out))

        assert in_child(killed) == -signal.SIGKILL
        is_whole = (nth, when) == (num_files - 1, "after")
        if is_whole:
            read_stage(str(out))
        else:
            with pytest.raises(ValueError):
                read_stage(str(out))
        done = {path.parent: path.stat().st_mtime_ns for path in out.glob("*/part.json")}
        shard_times = {path: path.stat().st_mtime_ns for part in done for path in part.iterdir()}
        assert shards.main(command(source, out)) == 0
        assert tree(out) == unbroken
        assert not (out / places.WORK).exists()
        assert {path: path.stat().st_mtime_ns for path in shard_times} == shard_times, "a done part was made again"


@pytest.mark.parametrize("nth", [0, 1, 3])
def test_killed_in_the_middle_of_a_shard_what_was_begun_is_cleared_away(source, unbroken, tmp_path, nth):
    def killed() -> int:
        flush, calls = MDSWriter.flush_shard, itertools.count()

        def dying_flush(self):
            flush(self)
            if next(calls) == nth:
                last = self.shards[-1]["raw_data"]["basename"]
                os.truncate(Path(self.local, last), 100)
                die()

        MDSWriter.flush_shard = dying_flush
        return shards.main(command(source, tmp_path / "out"))

    assert in_child(killed) == -signal.SIGKILL
    assert (tmp_path / "out" / places.WORK).is_dir()
    (tmp_path / "out" / places.WORK / "tmpabc").mkdir()  # another killed writer's
    assert shards.main(command(source, tmp_path / "out")) == 0
    assert tree(tmp_path / "out") == unbroken and not (tmp_path / "out" / places.WORK).exists()


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


def test_started_again_a_finished_stage_says_so_and_stays_as_it_is(source, unbroken, tmp_path, capsys):
    out = tmp_path / "out"
    assert shards.main(command(source, out)) == 0
    counts, pace = split_pace(capsys.readouterr().out.splitlines()[-1])
    assert pace  # of what this start has made; the next one makes nothing
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*.*")}
    assert shards.main(command(source, out)) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{out}: 3 of 3 parts are done already, nothing is left to make",
        counts,
    ]
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.*")} == times and tree(out) == unbroken


def test_another_plan_for_the_same_place_is_refused_with_what_differs(source, tmp_path, capsys):
    out = tmp_path / "out"
    assert shards.main(command(source, out)) == 0
    capsys.readouterr()
    give = "Give another OUT, or remove this one.\n"

    def refusal(*words: str) -> str:
        before = tree(out)
        assert shards.main(list(words)) == 2 and tree(out) == before
        return capsys.readouterr().err

    assert refusal(str(source), str(out), "shard_size=5kb") == (
        f"OUT: {out} holds the finished work of another command: shard_size was 4096, is 5120. {give}"
    )
    assert refusal(str(source / "0.tar"), str(out), "shard_size=4kb") == (
        f"OUT: {out} holds the finished work of another command: parts were 3, are 1. {give}"
    )
    other = shutil.copytree(source, tmp_path / "other")
    was = known_by(source / "1.tar")
    now = known_by(write_tar(other / "1.tar", {"a": sample_files(1)}))
    (out / "dataset.json").unlink()
    assert refusal(*command(other, out)) == (
        f"OUT: {out} holds the unfinished work of another command: part-00001.bytes was {was['bytes']}, "
        f'is {now["bytes"]}; part-00001.digest was "{was["digest"]}", is "{now["digest"]}". {give}'
    )
    (out / "plan.json").write_text("[")
    assert refusal(*command(source, out)) == (
        f"OUT: {out} holds the unfinished work of another command: its plan.json is of another kind. {give}"
    )
    assert not (out / places.WORK).exists()


# --- more than one at once ---


def test_a_second_command_for_the_same_place_is_refused(source, unbroken, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(places, "LOCK_WAIT_SEC", 0.1)
    with places.Folder(str(out)).only_writer():
        assert in_child(lambda: shards.main(command(source, out))) == 2
    text = "is being written by another command on this machine. Let that one end, or stop it."
    with (
        places.Folder(str(out)).only_writer(),
        pytest.raises(Refused) as error,
        places.Folder(str(out)).only_writer(),
    ):
        pass
    assert str(error.value) == f"OUT: {out} {text}"
    assert shards.main(command(source, out)) == 0 and tree(out) == unbroken


def plan_of(num_parts: int) -> parts.Plan:
    inputs = [{"name": f"in{number}"} for number in range(num_parts)]
    return parts.Plan("test", "images", {"key": "str"}, 1 << 20, {"image_size": 8}, inputs)


def fill(number: int, part: parts.Part) -> None:
    for sample in range(number):
        part.read()
        part.write({"key": f"{number}-{sample}"})


def test_a_part_that_another_process_is_making_is_waited_for_and_not_made_twice(tmp_path):
    place, plan = places.Folder(str(tmp_path / "out")), plan_of(2)
    parts.begin(place, plan)
    child = multiprocessing.get_context("fork").Process(
        target=lambda: parts.make_part(place, plan, 1, lambda number, part: (time.sleep(1), fill(number, part)))
    )
    child.start()
    while not (place.scratch / "part-00001.lock").exists():
        assert child.is_alive()
        time.sleep(0.01)
    time.sleep(0.1)
    counts = parts.make_part(place, plan, 1, lambda number, part: pytest.fail("made twice"))
    child.join(LIMIT_SEC)
    assert counts.written == 1


def test_waiting_for_other_ranks_ends_with_the_names_of_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(places.Folder, "poll_sec", 0.01)
    place, plan = places.Folder(str(tmp_path / "out")), plan_of(9)
    parts.begin(place, plan)
    with pytest.raises(Failed) as error:
        parts.wait_for_plan(place, plan_of(8), patience_sec=0.1)
    assert str(error.value) == (
        f"OUT: {place.address}: rank 0 wrote no plan.json for this command. What is done stays; the same command resumes "
        f"from there."
    )
    parts.make_part(place, plan, 3, fill)
    with pytest.raises(Failed) as error:
        parts.wait_for_parts(place, 9, patience_sec=0.1)
    assert str(error.value) == (
        f"OUT: {place.address}: no other rank finished a part for 0 minutes; 8 are missing: part-00000, part-00001, "
        f"part-00002, part-00004, part-00005, .... Start the command again: it resumes from what is done."
    )
    for number in range(9):
        parts.make_part(place, plan, number, fill)
    parts.wait_for_parts(place, 9, patience_sec=0.1)
    assert parts.finish(place, plan).written == sum(range(9))


def test_a_part_of_another_plan_is_not_taken_for_ones_own(tmp_path):
    place, plan = places.Folder(str(tmp_path / "out")), plan_of(1)
    parts.make_part(place, plan_of(2), 0, fill)
    with pytest.raises(Failed, match="part-00000 was made by another command at the same time. Remove OUT.$"):
        parts.finish(place, plan)


# --- places ---


def test_a_full_disk_keeps_what_is_done(source, unbroken, tmp_path, capsys, monkeypatch):
    out, replace = tmp_path / "out", Path.replace

    def full(self, target):
        if "part-00001" in str(target):
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        assert shards.main(command(source, out)) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"OUT: {out} cannot be written: [Errno 28] No space left on device: '{out}/part-00001/shard.00000.mds'. What is "
        f"done stays; the same command resumes from there."
    )
    assert (out / "part-00000" / "part.json").is_file() and not (out / "dataset.json").exists()
    assert shards.main(command(source, out)) == 0 and tree(out) == unbroken


def test_a_quota_in_mid_write_is_a_message_and_not_a_traceback(source, unbroken, tmp_path):
    """In worker processes too: the shards are larger than a file may be."""
    log = tmp_path / "log"

    def limited() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        with open(log, "w", buffering=1) as file, contextlib.redirect_stderr(file):
            return shards.main([str(source), str(tmp_path / "out"), "shard_size=4kb", "workers=2"])

    assert in_child(limited) == 1
    [line] = [line for line in log.read_text().splitlines() if line.startswith("OUT: ")]
    assert line == (
        f"OUT: {tmp_path}/out cannot be written: [Errno 27] File too large. What is done stays; the same command resumes "
        f"from there."
    )
    assert "Traceback" not in log.read_text()
    assert shards.main(command(source, tmp_path / "out")) == 0 and tree(tmp_path / "out") == unbroken


def test_a_link_to_a_folder_is_as_good_as_the_folder(source, unbroken, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert shards.main(command(source, tmp_path / "link")) == 0
    assert tree(tmp_path / "real") == unbroken


def test_a_stage_of_parts_is_read_through_a_cache_with_its_hashes_checked(source, tmp_path):
    assert shards.main(command(source, tmp_path / "out")) == 0
    cache = tmp_path / "cache"
    dataset = StreamingDataset(remote=str(tmp_path / "out"), local=str(cache), batch_size=1, validate_hash="xxh64")
    assert [dataset[i]["key"] for i in range(len(dataset))] == [f"a{n}" for n in range(9)] + [f"b{n}" for n in range(5)]
    shard = Path("part-00001", "shard.00000.mds")
    assert (cache / shard).read_bytes() == (tmp_path / "out" / shard).read_bytes()
    with open(tmp_path / "out" / shard, "r+b") as file:
        file.truncate(50)
    with pytest.raises(ValueError, match=r"out/part-00001/shard\.00000\.mds has 50 bytes, index\.json says"):
        read_stage(str(tmp_path / "out"))


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


def test_a_store_gets_the_same_files_as_a_folder_also_when_stopped(bucket, source, unbroken, tmp_path, monkeypatch):
    out = "s3://easel/stopped"
    put = places.Store.put
    for nth in (0, 3):
        calls = itertools.count()

        def stopped(self, name, file, nth=nth, calls=calls):
            if next(calls) == nth:
                raise KeyboardInterrupt
            put(self, name, file)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(places.Store, "put", stopped)
            shards.main(command(source, out))
        with pytest.raises(ValueError):
            read_stage(out)
    assert shards.main(command(source, out)) == 0
    assert objects(bucket, "stopped/") == unbroken
    assert shards.main([str(source), "s3://easel/workers/", "shard_size=4kb", "workers=2"]) == 0
    assert objects(bucket, "workers/") == unbroken
    assert not places.Store(out).scratch.exists()
    dataset = StreamingDataset(remote=out, local=str(tmp_path / "cache"), batch_size=1, validate_hash="xxh64")
    assert len([dataset[i] for i in range(len(dataset))]) == read_stage(out).num_samples == 14


def test_a_store_that_holds_something_else_or_is_not_there_is_refused(bucket, source, capsys):
    bucket.put_object(Bucket="easel", Key="other/file", Body=b"x")
    assert shards.main(command(source, "s3://easel/other")) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "OUT: s3://easel/other exists and is not empty. Give a new folder, or remove it."
    )
    assert shards.main(command(source, "s3://nobucket/x")) == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("OUT: s3://nobucket/x cannot be written: s3://nobucket/x cannot be listed: ClientError: ")
    )
