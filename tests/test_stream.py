"""stages/stream.py: batches of a stage, and the reader's messages."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from streaming import MDSWriter, StreamingDataset
from streaming.base.hashing import get_hash
from torch.utils.data import DataLoader

from stages import fetch, stores, stream
from stages.dataset import read_stage, write_facts
from stages.fetch import FetchCancelled, RetryingStream, StreamFailure
from stages.machine import FAILED, ShardState
from stages.moments import MomentsStream
from stages.shard_file import DAMAGED, ShardError
from stages.stream import BatchStream


def test_store_connections_are_closed_before_workers_can_inherit_them(stage, monkeypatch):
    """A forked worker would share the parent's socket: wrong data from a healthy store."""
    closed = []
    from streaming.base.storage.download import LocalDownloader

    monkeypatch.setattr(LocalDownloader, "clean_up", lambda self: closed.append(self))
    dataset = BatchStream(streams=[RetryingStream(local=str(stage))], batch_size=4)
    assert [stream._downloader for stream in dataset.streams] == closed[-1:]


# --- moments in batches ---

COLUMNS = {"moments": ((8, 4, 4), "float16", "float16"), "tokens": ((77,), "uint16", "int64")}


def moments_row(number: int) -> dict:
    values = np.random.default_rng(number)
    return {
        "moments": values.normal(size=(8, 4, 4)).astype(np.float16),
        "tokens": values.integers(0, 49408, 77).astype(np.uint16),
        "caption": "ä" * (number % 5),  # rows of several lengths, an empty column among them
        "key": f"{number:03d}",
        "metadata": {"number": number},
    }


@pytest.fixture(scope="module")
def moments(tmp_path_factory):
    """47 rows in several shards, with columns of fixed and of varying size around one another."""
    out = tmp_path_factory.mktemp("moments") / "stage"
    columns = {"moments": "ndarray:float16:8,4,4", "tokens": "ndarray:uint16:77", "caption": "str", "key": "str"}
    with MDSWriter(out=str(out), columns={**columns, "metadata": "json"}, hashes=["xxh64"], size_limit=4096) as writer:
        for number in range(47):
            writer.write(moments_row(number))
    write_facts(out, "moments", {})
    return out


def hash_of(path: Path) -> str:
    return get_hash("xxh64", path.read_bytes())


def stream_of(location, *, remote=None, index_sha256=None, **arguments) -> MomentsStream:
    stream = RetryingStream(remote=remote, local=str(location), index_sha256=index_sha256)
    return MomentsStream(columns=[COLUMNS], streams=[stream], batch_size=5, **arguments)


def test_a_batch_of_moments_holds_the_rows_that_plain_streaming_reads(moments):
    batch = stream_of(moments).read_batch([40, 3, 3, 46, 0])
    plain = StreamingDataset(local=str(moments), batch_size=1)
    assert batch["moments"].dtype == torch.float16 and batch["tokens"].dtype == torch.int64
    for place, number in enumerate([40, 3, 3, 46, 0]):
        assert np.array_equal(batch["moments"][place].numpy(), plain[number]["moments"])
        assert np.array_equal(batch["tokens"][place].numpy(), plain[number]["tokens"])
        assert np.array_equal(batch["moments"][place].numpy(), moments_row(number)["moments"])


def test_an_iteration_gives_whole_batches_in_the_order_of_plain_streaming(moments):
    arguments = {"shuffle": True, "shuffle_seed": 3, "num_canonical_nodes": 1}
    plain = StreamingDataset(local=str(moments), batch_size=5, **arguments)
    expected = [row["moments"] for row in plain]
    found = [row for batch in stream_of(moments, **arguments) for row in batch["moments"].numpy()]
    assert len(found) == 45 and all(np.array_equal(*pair) for pair in zip(found, expected, strict=False))


def test_it_resumes_within_an_epoch_at_the_next_batch(moments):
    arguments = {"shuffle": True, "shuffle_seed": 3, "num_canonical_nodes": 1}
    whole = stream_of(moments, **arguments)
    epochs = [[batch["moments"] for batch in whole] for _ in range(3)]
    resumed = stream_of(moments, **arguments)
    resumed.resume(epoch=1, samples=15)
    rest, after = [batch["moments"] for batch in resumed], [batch["moments"] for batch in resumed]
    assert len(rest) == 6 and all(torch.equal(*pair) for pair in zip(rest, epochs[1][3:], strict=True))
    assert all(torch.equal(*pair) for pair in zip(after, epochs[2], strict=True))


KILLED = """
import sys
sys.path.insert(0, "tests")
from test_stream import stream_of
dataset = stream_of(sys.argv[1], remote=sys.argv[2])
print(dataset._shm_prefix_int, flush=True)
sys.stdin.read()
"""


def test_a_run_that_is_killed_before_its_first_batch_leaves_its_folder_to_the_next_one(moments, tmp_path):
    """With all its processes, so that none removes its shared memory; whoever may look at which other processes."""
    command = [sys.executable, "-c", KILLED, str(tmp_path / "cache"), str(moments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes) as killed:
        number = int(killed.stdout.readline())
        os.killpg(killed.pid, signal.SIGKILL)
    segments = sorted(Path("/dev/shm").glob(f"{number:06d}_*"))
    assert Path(f"/dev/shm/{number:06d}_locals") in segments
    dataset = stream_of(tmp_path / "cache", remote=str(moments))
    assert len(dataset.read_batch([0])["moments"]) == 1
    again = set(segments) if dataset._shm_prefix_int == number else set()
    assert {path for path in segments if path.exists()} == again


@pytest.mark.parametrize("by_a_link", [False, True], ids=["", "by a link"])
def test_another_process_has_the_cache_folder_also_after_its_first_batch(moments, tmp_path, by_a_link):
    """Streaming itself lets a second run in as soon as the first has read something."""
    cache, link = tmp_path / "cache", tmp_path / "link"
    cache.mkdir()
    link.symlink_to(cache)
    hold = "import sys, filelock, time; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print(1, flush=True)"
    hold += "; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", hold, str(cache / ".in_use")], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"1\n"
        with pytest.raises(StreamFailure) as error:
            stream_of(link if by_a_link else cache, remote=str(moments))
        other.kill()
    assert str(error.value) == (
        f"data.local: {cache} is in use by another run on this machine. Give each run a folder of its own, or wait for the "
        "other one."
    )
    assert len(stream_of(cache, remote=str(moments)).read_batch([0])["moments"]) == 1  # it has been let go


def test_an_address_may_end_in_a_slash(moments, tmp_path):
    assert stream_of(tmp_path / "cache", remote=f"{moments}/").streams[0].remote == str(moments)


@pytest.mark.parametrize("what", ["shard.00003.mds", "index.json"])
def test_a_folder_where_the_stage_has_a_file_is_named_at_once(moments, tmp_path, what):
    cache = tmp_path / "cache"
    (cache / what).mkdir(parents=True)
    said = f"^data: {cache}/{what} is not a file, but the stage has one of that name. Remove it.$"
    with pytest.raises(StreamFailure, match=said):
        stream_of(cache, remote=str(moments)).read_batch(range(47))


@pytest.mark.timeout(60, func_only=True)
def test_what_this_machines_disk_says_is_not_waited_for(tmp_path):
    """It named the store, and was tried for ten minutes."""
    (tmp_path / "part-00005").touch()
    local = tmp_path / "part-00005" / "shard.00001.mds"
    with pytest.raises(StreamFailure) as error:
        fetch.fetch(
            lambda timeout: local.parent.mkdir(parents=True),
            lambda: None,
            "s3://bucket/part-00005/shard.00001.mds",
            local,
            patience_sec=600,
            is_wanted=lambda: True,
        )
    assert str(error.value) == (
        f"data.local: {local.parent}: File exists, while shard.00001.mds was written. Make room, or give another folder "
        "or data.cache_limit."
    )


@pytest.mark.timeout(60, func_only=True)
def test_a_disk_that_is_full_is_not_waited_for_where_shards_are_copied_from_a_folder(tmp_path):
    """shutil.copy names the file that it reads."""
    full = OSError(errno.ENOSPC, "No space left on device", "/data/stage/x.mds", None, str(tmp_path / "x.mds.tmp"))
    with pytest.raises(StreamFailure) as error:
        fetched(Away(9, full), tmp_path / "x.mds")
    assert str(error.value).startswith(f"data.local: {tmp_path}/x.mds: No space left on device, while x.mds was ")


def test_an_answer_400_is_tried_once_more_without_credentials_and_no_oftener(tmp_path, monkeypatch):
    """Streaming's own downloader calls itself from within itself, without end."""
    import http.server
    import threading

    asked = []

    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append("Authorization" in self.headers)
            self.send_error(400)

        def log_message(self, *words) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("S3_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    try:
        with pytest.raises(Exception, match="400"):
            stores.download_once("s3://bucket/index.json", str(tmp_path / "index.json"))
    finally:
        server.shutdown()
        server.server_close()
    assert asked in ([True, False], [True, True, False, False])  # botocore asks for the bucket's region, too


def test_a_shard_that_another_process_gave_up_is_fetched_by_who_needs_it(moments, tmp_path):
    """The reader waited for ever: nobody else asks for it again."""
    whole = [batch["moments"] for batch in stream_of(moments)]
    dataset = stream_of(tmp_path / "cache", remote=str(moments))
    dataset._shard_states[2] = ShardState.PREPARING
    batches = iter(dataset)
    found = [next(batches)["moments"]]
    give_up = threading.Timer(0.5, dataset._shard_states.__setitem__, (2, ShardState.REMOTE))
    give_up.start()
    found += [batch["moments"] for batch in batches]
    assert all(torch.equal(*pair) for pair in zip(found, whole, strict=True))


def test_a_cache_that_fits_its_limit_is_read_again_without_fetching(moments, tmp_path, monkeypatch):
    """A shard that was there counted twice, and was removed just before it was opened."""
    cache, shards = tmp_path / "cache", [path.stat().st_size for path in moments.glob("shard.*.mds")]
    limit = sum(shards) + (moments / "index.json").stat().st_size + 100
    assert len(list(stream_of(cache, remote=str(moments), cache_limit=limit))) == 9
    fetched = []
    download = fetch.RetryingStream._download_file
    monkeypatch.setattr(
        fetch.RetryingStream, "_download_file", lambda self, *names: fetched.append(names) or download(self, *names)
    )
    assert len(list(stream_of(cache, remote=str(moments), cache_limit=limit))) == 9
    assert fetched == []


def test_room_is_made_for_no_shard_that_another_thread_has_had_in_the_meantime(moments, tmp_path):
    cache, shards = tmp_path / "cache", [path.stat().st_size for path in moments.glob("shard.*.mds")]
    limit = sum(shards) + (moments / "index.json").stat().st_size + 100
    assert len(list(stream_of(cache, remote=str(moments), cache_limit=limit))) == 9
    dataset = stream_of(cache, remote=str(moments), cache_limit=limit)
    dataset.prepare_shard(0)
    dataset._make_room(0)  # as the other thread does, which saw it missing before
    assert len(list(cache.rglob("shard.*.mds"))) == len(shards)


def test_room_is_made_for_the_wanted_shard_beside_those_of_earlier_runs(moments, tmp_path):
    """One byte is too few for all: the last one goes, and no other."""
    cache, sizes = tmp_path / "cache", {path.name: path.stat().st_size for path in sorted(moments.glob("shard.*.mds"))}
    assert len(list(stream_of(cache, remote=str(moments)))) == 9
    (cache / "shard.00000.mds").unlink()
    dataset = stream_of(cache, remote=str(moments), cache_limit=sum(sizes.values()) - 1)
    dataset._make_room(0)
    assert [path.name for path in sorted(cache.glob("shard.*.mds"))] == list(sizes)[1:-1]


def test_a_shard_that_left_the_cache_is_fetched_again(moments, tmp_path):
    dataset = stream_of(tmp_path / "cache", remote=str(moments))
    one = dataset.read_batch([0, 10, 20, 30, 40])
    for path in (tmp_path / "cache").rglob("shard.*.mds"):
        path.unlink()
    assert torch.equal(dataset.read_batch([0, 10, 20, 30, 40])["moments"], one["moments"])


DAMAGES = {
    "truncated": lambda data: data[:-100],
    "flipped": lambda data: data[:-9] + b"\7" + data[-8:],
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_of_the_cache_is_fetched_again(moments, tmp_path, damage, capsys):
    """Streaming itself looks at the presence of a cached file alone."""
    whole = [batch["moments"] for batch in stream_of(tmp_path / "cache", remote=str(moments))]
    shards = sorted((tmp_path / "cache").glob("shard.*.mds"))
    for shard in shards[1:3]:
        shard.write_bytes(DAMAGES[damage](shard.read_bytes()))
    again = [batch["moments"] for batch in stream_of(tmp_path / "cache", remote=str(moments))]
    assert len(again) == 9 and all(torch.equal(*pair) for pair in zip(again, whole, strict=True))
    said = sorted(line for line in capsys.readouterr().err.splitlines() if "fetched again" in line)
    assert len(said) == 2 and said[0].startswith(f"data: {shards[1]} is damaged: its xxh64 is ")
    assert all(shard.read_bytes() == (moments / shard.name).read_bytes() for shard in shards)


def test_a_shard_that_stays_damaged_stops_the_run_with_both_digests(moments, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "SOON_SEC", (0.01, 0.01))
    copy = shutil.copytree(moments, tmp_path / "stage")
    good = hash_of(copy / "shard.00001.mds")
    (copy / "shard.00001.mds").write_bytes(DAMAGES["flipped"]((copy / "shard.00001.mds").read_bytes()))
    batches = list(itertools.islice(stream_of(tmp_path / "cache", remote=str(copy)), 20))
    assert {tuple(batch) for batch in batches[-3:]} == {("failure",)}  # and whoever asks again hears the same
    [text] = batches[-1]["failure"]
    assert text == (
        f"data: {copy}/shard.00001.mds is damaged: its xxh64 is {hash_of(copy / 'shard.00001.mds')}, that of the stage is "
        f"{good}, in 3 tries. Make the stage again, or copy it anew."
    )


def test_a_shard_that_is_read_in_place_is_compared_and_left_where_it_is(moments, tmp_path):
    copy = shutil.copytree(moments, tmp_path / "stage")
    shard = copy / "shard.00000.mds"
    good = hash_of(shard)
    shard.write_bytes(DAMAGES["truncated"](shard.read_bytes()))
    with pytest.raises(StreamFailure) as error:
        stream_of(copy).read_batch([0])
    assert shard.exists() and str(error.value) == (
        f"data: {shard} is damaged: its xxh64 is {hash_of(shard)}, that of the stage is {good}. Make the stage again, or "
        f"copy it anew."
    )


@pytest.mark.parametrize("content", ["", '{"shards": [', None])
def test_a_broken_index_in_the_cache_is_fetched_again(moments, tmp_path, content):
    cache = tmp_path / "cache"
    cache.mkdir()
    if content is not None:
        (cache / "index.json").write_text(content)
    (cache / "index.json.tmp").write_text("[")
    stream_of(cache, remote=str(moments), index_sha256=read_stage(str(moments)).index_sha256)
    assert (cache / "index.json").read_bytes() == (moments / "index.json").read_bytes()


def test_what_killed_fetches_left_is_removed_and_nothing_else(moments, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    left = ["shard.00000.mds.6eF9bC12", "shard.00001.mds.tmp", "index.json.tmp", "index.json.tmp.00ff00ff"]
    for name in [*left, "notes.tmp", "shard.00000.mds.backup"]:
        (cache / name).touch()
    stream_of(cache, remote=str(moments))
    assert sorted(path.name for path in cache.iterdir()) == [
        ".in_use",
        "index.json",
        "notes.tmp",
        "shard.00000.mds.backup",
    ]


class Away:
    """A store that is away for some tries."""

    def __init__(self, tries: int, error: Exception):
        self.left, self.error, self.closed = tries, error, 0

    def __call__(self, timeout_sec: float) -> None:
        if self.left:
            self.left -= 1
            raise self.error

    def clean_up(self) -> None:
        self.closed += 1


def fetched(away: Away, local: Path, patience_sec: float = 60.0, is_wanted=lambda: True) -> None:
    fetch.fetch(away, away.clean_up, "s3://b/x.mds", local, patience_sec=patience_sec, is_wanted=is_wanted)


def test_a_store_that_is_away_is_waited_for_with_a_line_each_half_minute(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fetch, "SAY_SEC", 0.3)
    away = Away(2, ConnectionResetError("broken"))
    fetched(away, tmp_path / "x.mds")
    assert away.closed == 2  # a connection that failed is not used again
    said = capsys.readouterr().err.splitlines()
    assert said and all(line.startswith("data: ") and "waiting for s3://b/x.mds (" in line for line in said)
    assert said[-1].endswith("for 60 s at most")


@pytest.mark.timeout(60, func_only=True)
def test_patience_ends(tmp_path):
    with pytest.raises(
        StreamFailure, match=r"^data: s3://b/x.mds cannot be read: .* waited for 3 s \(data.patience_sec=2.5\).$"
    ):
        fetched(Away(99, ConnectionResetError("broken")), tmp_path / "x.mds", patience_sec=2.5)


def test_what_a_store_does_not_have_is_asked_for_only_some_times(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "SOON_SEC", (0.01, 0.01, 0.01))
    away = Away(99, FileNotFoundError("no such object"))
    with pytest.raises(StreamFailure, match="^data: s3://b/x.mds cannot be read: "):
        fetched(away, tmp_path / "x.mds")
    assert away.left == 99 - 4


def test_nobody_waits_for_what_is_not_wanted(tmp_path):
    with pytest.raises(fetch.FetchCancelled):
        fetched(Away(99, ConnectionResetError("broken")), tmp_path / "x.mds", is_wanted=lambda: False)


def test_a_full_disk_is_said_and_not_waited_for(tmp_path):
    error = RuntimeError("of the client")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(StreamFailure) as caught:
        fetched(Away(99, error), tmp_path / "x.mds")
    assert str(caught.value).startswith(
        f"data.local: {tmp_path}/x.mds: No space left on device, while x.mds was written"
    )


def test_a_failure_in_a_thread_of_streamings_is_the_iterations(moments, tmp_path, monkeypatch):
    """There it would be logged, and the epoch would end as if it were finished."""
    dataset = stream_of(tmp_path / "cache", remote=str(moments))

    def fail(self, shard):
        raise KeyError("surprise")

    monkeypatch.setattr(fetch.RetryingStream, "prepare_shard", fail)
    assert next(iter(dataset)) == {"failure": ["data: KeyError: 'surprise'"]}


def sources_of(stage: Path) -> list[str]:
    return sorted(path.name for path in stage.glob("shard.*.mds"))


@contextlib.contextmanager
def each_download(monkeypatch, do, cache):
    """Let `do(name)` run before each download of a shard into a folder; threads of an earlier test may still be ending."""
    download = fetch.RetryingStream._download_file
    with monkeypatch.context() as patched:

        def downloaded(self, name, *rest):
            if name.endswith(".mds") and Path(self.local).is_relative_to(cache):
                do(name)
            return download(self, name, *rest)

        patched.setattr(fetch.RetryingStream, "_download_file", downloaded)
        yield


def fetchers(dataset) -> list[threading.Thread]:
    threads = [thread for thread in threading.enumerate() if "_fetch_ahead" in thread.name]
    return [thread for thread in threads if getattr(getattr(thread, "_target", None), "__self__", None) is dataset]


def settled(is_so, limit_sec: float = 60.0) -> bool:
    """Wait until something is so."""
    deadline = time.monotonic() + limit_sec
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_so()


def test_several_shards_are_fetched_at_once(moments, tmp_path, monkeypatch):
    together = threading.Barrier(stream.FETCHES)

    def meet(name):
        if name in sources_of(moments)[1:4]:  # the reader itself may have taken the first one
            together.wait(20)

    with each_download(monkeypatch, meet, tmp_path):
        batches = list(stream_of(tmp_path / "cache", remote=str(moments)))
    assert len(batches) == 9 and "moments" in batches[-1] and not together.broken


@pytest.mark.timeout(90, func_only=True)
def test_shards_that_fail_while_others_are_fetched_are_heard_once(moments, tmp_path, monkeypatch):
    """Of two that fail at once the first one's text is every further batch; nothing is left as being fetched."""
    monkeypatch.setattr(fetch, "SOON_SEC", (0.01,))
    copy, names = shutil.copytree(moments, tmp_path / "stage"), sources_of(moments)
    for name in names[2:4]:
        (copy / name).unlink()
    dataset = stream_of(tmp_path / "cache", remote=str(copy), predownload=40)
    batches = iter(dataset)
    items = [next(batches) for _ in range(12)]
    failures = [item["failure"] for item in items if "failure" in item]
    missing = [f"data: {copy}/{name} cannot be read: " for name in names[2:4]]
    assert len({text for [text] in failures}) == 1 and failures[0][0].startswith(tuple(missing))
    assert settled(lambda: ShardState.PREPARING not in dataset._shard_states.numpy())
    batches.close()
    assert settled(lambda: not fetchers(dataset))


def test_an_epoch_that_ends_early_cancels_all_its_fetches(moments, tmp_path, monkeypatch):
    """Each is between two tries at a store that is away; what is left in the queue is not begun."""
    dataset, tried = stream_of(tmp_path / "cache", remote=str(moments), predownload=40), []

    def be_away(self, remote, local, timeout):
        tried.append(remote)
        raise ConnectionResetError("away")

    monkeypatch.setattr(type(dataset.streams[0]._downloader), "_download_file_impl", be_away)
    reading = threading.Thread(target=lambda: next(iter(dataset)), daemon=True)
    reading.start()
    assert settled(lambda: len(set(tried)) >= stream.FETCHES)
    dataset._epoch_read.end()  # as the next iteration does
    reading.join(60)
    assert not reading.is_alive() and settled(lambda: not fetchers(dataset))
    assert set(dataset._shard_states.numpy()) == {ShardState.REMOTE}
    assert len(set(tried)) <= stream.FETCHES + 1 < dataset.num_shards  # one more: the reader's


def test_a_reader_that_outlives_its_run_does_not_look_for_ever(moments):
    """Another run may take its shared memory; a shard then has no state that any thread would change."""
    dataset = stream_of(moments)
    dataset._shard_states.numpy()[:] = ShardState.INVALID
    with pytest.raises(FetchCancelled, match="shard.00000.mds is of a run that has ended"):
        dataset.open_shard(0)


def test_several_fetches_at_once_stay_within_a_limit_of_three_shards(moments, tmp_path, monkeypatch):
    """What is on its way counts from its first byte on; what comes too early waits, and pushes nothing out unread."""
    cache, largest = tmp_path / "cache", max(path.stat().st_size for path in moments.glob("shard.*.mds"))
    whole = [batch["moments"] for batch in stream_of(moments, shuffle=True, shuffle_seed=3)]
    index = (moments / "index.json").stat().st_size
    dataset = stream_of(
        cache, remote=str(moments), shuffle=True, shuffle_seed=3, cache_limit=4 * largest + index, predownload=40
    )
    dataset.cache_limit, used = 3 * largest + index, []

    def look(name):
        states = dataset._shard_states.numpy()
        held = (states == ShardState.LOCAL) | (states == ShardState.PREPARING)
        used.append(sum(shard.get_max_size() for shard, is_held in zip(dataset.shards, held, strict=True) if is_held))
        time.sleep(0.02)

    with each_download(monkeypatch, look, tmp_path):
        found = [batch["moments"] for batch in dataset]
    assert all(torch.equal(*pair) for pair in zip(found, whole, strict=True))
    assert largest < max(used) <= 3 * largest and dataset.cache_usage <= 3 * largest + index


def test_a_limit_without_room_for_a_shard_beside_the_index_says_so(moments, tmp_path):
    largest = max(path.stat().st_size for path in moments.glob("shard.*.mds"))
    dataset = stream_of(tmp_path / "cache", remote=str(moments), cache_limit=100 * largest)
    dataset.cache_limit, index = 1000, (moments / "index.json").stat().st_size
    wanted = dataset.shards[0].get_max_size()
    with pytest.raises(StreamFailure) as error:
        dataset.open_shard(0)
    given = f"1,000 bytes hold no shard of {wanted:,} beside {index:,} of index.json"
    assert str(error.value) == f"data.cache_limit: {given}. Give a larger one, or null."


def test_two_processes_fetch_no_shard_twice(moments, tmp_path, monkeypatch):
    fetched, names = tmp_path / "fetched", sources_of(moments)

    def note(name):
        with open(fetched, "a") as file:
            file.write(f"{name}\n")
        time.sleep(0.02)

    with each_download(monkeypatch, note, tmp_path):
        loader = DataLoader(
            stream_of(tmp_path / "cache", remote=str(moments), shuffle=True, shuffle_seed=3), None, num_workers=2
        )
        assert sum(len(batch["moments"]) for batch in loader) >= 40
    assert sorted(fetched.read_text().split()) == names


@pytest.mark.parametrize("seed", range(5))
def test_whole_batches_are_the_numbers_in_order_without_gaps(seed):
    random = np.random.default_rng(seed)
    sample_ids = np.where(random.random(203) < 0.3, -1, random.integers(0, 10**12, 203))
    kept = [int(sample_id) for sample_id in sample_ids if sample_id != -1]
    found = list(stream.whole_batches(sample_ids, 7))
    assert [batch.tolist() for batch in found] == [kept[at : at + 7] for at in range(0, len(kept) - 6, 7)]
    assert {batch.dtype for batch in found} == {np.dtype(np.int64)}


@pytest.mark.timeout(60, func_only=True)
def test_a_shard_that_another_process_could_not_have_is_not_waited_for(moments, tmp_path):
    dataset = stream_of(tmp_path / "cache", remote=str(moments))
    dataset._shard_states[2] = FAILED
    *_, last = itertools.islice(dataset, 9)
    assert last == {
        "failure": ["data: shard.00002.mds could not be had by another process of this machine, whose message says why"]
    }


def test_the_reason_is_the_same_whichever_process_is_asked_first(moments, tmp_path, monkeypatch):
    """Of two workers of a rank the one that only heard of it may give the next batch: its message named no cause."""
    dataset = stream_of(tmp_path / "cache", remote=str(moments))

    def fail(self, shard):
        raise StreamFailure("data: the store is away")

    with monkeypatch.context() as patched, pytest.raises(StreamFailure):
        patched.setattr(fetch.RetryingStream, "prepare_shard", fail)
        dataset.prepare_shard(2)
    *_, last = itertools.islice(dataset, 9)
    assert last == {"failure": ["data: the store is away"]}
    assert dataset._reason_file.is_file()
    dataset._reason_file.rename(later := stream_of(moments)._reason_file)  # as if it were of an earlier use of a number
    assert later.is_file() and not stream_of(moments)._reason_file.is_file()
    later.unlink(missing_ok=True)


def test_cache_limit_holds_for_what_earlier_runs_left(moments, tmp_path):
    """Streaming counts, and evicts, only what it knows to be there."""
    cache, num_bytes = tmp_path / "cache", sum(path.stat().st_size for path in moments.glob("shard.*.mds"))
    assert len(list(stream_of(cache, remote=str(moments)))) == 9
    largest = max(path.stat().st_size for path in moments.glob("shard.*.mds"))
    limit = 4 * largest + (moments / "index.json").stat().st_size + 100
    assert limit < num_bytes
    dataset = stream_of(cache, remote=str(moments), cache_limit=limit, predownload=5)

    def used() -> int:
        sizes = []
        for path in cache.glob("*"):
            with contextlib.suppress(FileNotFoundError):  # just put out
                sizes.append(path.stat().st_size)
        return sum(sizes)

    for _ in dataset:
        assert used() <= limit + largest  # one may just be on its way
    # Of two threads that each want a shard, the second may find the room that the first is about to fill (seen once); and
    # after the last shard nothing is put out any more.
    assert used() <= limit + largest < num_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-100], "{shard} is damaged: it ends within row 1. {again}"),
        (
            lambda data: b"\5" + data[1:],
            "{shard} is damaged: it has another number of rows than index.json says. {again}",
        ),
        (lambda data: b"", "{shard} is damaged: it has another number of rows than index.json says. {again}"),
        (lambda data: data[:8], "{shard} is damaged: it has another number of rows than index.json says. {again}"),
    ],
)
def test_a_shard_that_is_damaged_after_it_was_opened_is_named(moments, tmp_path, change, message):
    copy = shutil.copytree(moments, tmp_path / "stage")
    shard = copy / "shard.00000.mds"
    rows = json.loads((copy / "index.json").read_text())["shards"][0]["samples"]
    dataset = stream_of(copy)
    dataset.open_shard(0)
    shard.write_bytes(change(shard.read_bytes()))
    with pytest.raises(ShardError) as error:
        dataset.read_batch(list(range(rows)))
    assert str(error.value) == message.format(shard=shard, again=DAMAGED).replace("row 1.", f"row {rows - 1}.")
