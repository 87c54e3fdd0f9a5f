"""mds/reader.py: batches of a dataset, and the reader's messages."""

from __future__ import annotations

import contextlib
import errno
import itertools
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from streaming.base.hashing import get_hash
from test_cache_space import COLUMNS, write_stage

from mds import fetch, reader
from mds.cache import PREPARING, REMOTE
from mds.dataset import read_dataset
from mds.fetch import FetchCancelled, RetryingStream, StreamFailure
from mds.moments import MomentsDataset

BATCHES = 9


@pytest.fixture(scope="module")
def moments(tmp_path_factory):
    """47 rows in 16 shards."""
    return write_stage(tmp_path_factory.mktemp("moments") / "stage", 47)


@pytest.fixture
def copy(moments, tmp_path):
    return shutil.copytree(moments, tmp_path / "stage")


@pytest.fixture
def quick_retries(monkeypatch):
    monkeypatch.setattr(fetch, "RETRY_WAITS_SEC", (0.01, 0.01))


def stream_of(location, *, remote=None, index_sha256=None, **arguments) -> MomentsDataset:
    stream = RetryingStream(remote=remote and str(remote), local=str(location), index_sha256=index_sha256)
    return MomentsDataset(columns=[COLUMNS], streams=[stream], batch_size=5, **arguments)


def moments_of(batches) -> list[torch.Tensor]:
    return [batch["moments"] for batch in batches]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return len(one) == len(two) > 0 and all(map(torch.equal, one, two))


def sizes_of(stage: Path) -> tuple[int, list[int]]:
    """Return the bytes of the index and of each shard."""
    return (stage / "index.json").stat().st_size, [path.stat().st_size for path in sorted(stage.glob("shard.*.mds"))]


def read_all(location, **arguments) -> list[dict]:
    """Read an epoch, as a run that ends after it."""
    with contextlib.closing(stream_of(location, **arguments)) as dataset:
        return list(dataset)


def test_store_connections_are_closed_before_workers_can_inherit_them(moments, in_store, tmp_path):
    """A forked worker would share the parent's socket: wrong data from a healthy store."""
    stream = RetryingStream(remote=in_store(moments, "connections"), local=str(tmp_path / "cache"))
    stream.fetch_index()
    assert stream.client._client is not None
    with contextlib.closing(MomentsDataset(columns=[COLUMNS], streams=[stream], batch_size=5)) as dataset:
        assert dataset.streams == [stream] and stream.client._client is None


def test_a_shard_that_another_process_gave_up_is_fetched_by_the_next_reader(moments, tmp_path):
    """The reader waited forever: nobody else asks for it again."""
    dataset = stream_of(tmp_path, remote=moments)
    dataset.cache.states[2] = PREPARING
    batches = iter(dataset)
    first = next(batches)
    threading.Timer(0.3, dataset.cache.states.__setitem__, (2, REMOTE)).start()
    assert same(moments_of([first, *batches]), moments_of(stream_of(moments)))


def test_a_cache_that_fits_its_limit_is_read_again_without_fetching(moments, tmp_path, monkeypatch):
    """A shard that was there counted twice, and was removed just before it was opened."""
    index, shards = sizes_of(moments)
    limit, fetched = sum(shards) + index + 100, []
    with each_download(monkeypatch, fetched.append, tmp_path):
        for _ in range(2):
            assert len(read_all(tmp_path, remote=moments, cache_limit=limit)) == BATCHES
    assert sorted(fetched) == [f"shard.{number:05d}.mds" for number in range(15)]  # the last has no whole batch


def flip(data: bytes) -> bytes:
    return data[:-9] + b"\7" + data[-8:]


@pytest.mark.timeout(60, func_only=True)
def test_a_damaged_shard_of_the_cache_or_one_that_left_it_is_fetched_again(moments, tmp_path, capsys):
    """Streaming itself only checks that a cached file exists."""
    dataset = stream_of(tmp_path, remote=moments)
    whole = moments_of(dataset)
    for path in tmp_path.glob("shard.*.mds"):
        path.unlink()
    assert same(moments_of(dataset), whole)
    dataset.close()
    shards = sorted(tmp_path.glob("shard.*.mds"))
    for shard, damage in zip(shards[1:], (flip, lambda data: data[:-100], lambda data: b""), strict=False):
        shard.write_bytes(damage(shard.read_bytes()))
    assert same(moments_of(read_all(tmp_path, remote=moments)), whole)
    lines = sorted(line for line in capsys.readouterr().err.splitlines() if "fetched again" in line)
    assert len(lines) == 3 and lines[0].startswith(f"data: {shards[1]} is damaged: its xxh64 is ")
    assert all(shard.read_bytes() == (moments / shard.name).read_bytes() for shard in shards)


def test_a_damaged_or_missing_shard_is_named_with_both_digests(copy, tmp_path, quick_retries):
    """Fetched, it stops the run, and each further batch says the same; one that is read in place is not touched."""
    shard = copy / "shard.00001.mds"
    good, content = get_hash("xxh64", shard.read_bytes()), flip(shard.read_bytes())
    shard.write_bytes(content)
    text = f"data: {shard} is damaged: its xxh64 is {get_hash('xxh64', content)}, that of the dataset is {good}"
    batches = list(itertools.islice(stream_of(tmp_path / "cache", remote=copy), 20))
    failure = f"{text}, in 3 tries. Rebuild the dataset, or copy it again."
    assert batches[-3:] == [{"failure": [failure]}] * 3
    with pytest.raises(StreamFailure, match=f"^{text}"):
        stream_of(copy).read_batch([3])
    assert shard.read_bytes() == content
    shard.unlink()
    with pytest.raises(StreamFailure, match=f"^data: {shard} is missing"):
        stream_of(copy).read_batch([3])


@pytest.mark.parametrize("content", ['{"shards": [', None])
def test_a_broken_index_is_fetched_again_and_files_of_killed_fetches_are_removed(moments, tmp_path, content):
    unfinished = ["shard.00000.mds.6eF9bC12", "shard.00001.mds.tmp", "index.json.tmp", "index.json.tmp.00ff00ff"]
    for name in [*unfinished, "notes.tmp", "shard.00000.mds.backup"]:
        (tmp_path / name).touch()
    if content is not None:
        (tmp_path / "index.json").write_text(content)
    dataset = stream_of(tmp_path, remote=f"{moments}/", index_sha256=read_dataset(str(moments)).index_sha256)
    assert dataset.streams[0].remote == str(moments)  # without the slash
    assert (tmp_path / "index.json").read_bytes() == (moments / "index.json").read_bytes()
    names = {".cache_state", ".in_use", "index.json", "notes.tmp", "shard.00000.mds.backup"}
    assert {path.name for path in tmp_path.iterdir()} == names


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

    def fetch(self, local: Path, patience_sec: float = 60.0, is_wanted=lambda: True) -> None:
        options = {"patience_sec": patience_sec, "is_wanted": is_wanted}
        fetch.download_with_retries(self, self.clean_up, "s3://b/x.mds", local, **options)


def test_an_unreachable_store_is_waited_for_and_logged(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fetch, "LOG_INTERVAL_SEC", 0.3)
    away = Away(2, ConnectionResetError("broken"))
    away.fetch(tmp_path / "x.mds")
    assert away.closed == 2  # a connection that failed is not used again
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(line.startswith("data: ") and "waiting for s3://b/x.mds (" in line for line in lines)
    assert lines[-1].endswith("for 60 s at most")


@pytest.mark.timeout(60, func_only=True)
def test_a_wait_for_a_store_ends(tmp_path, quick_retries):
    message = r"^data: s3://b/x.mds cannot be read: .* Waited for 3 s \(data.patience_sec=2.5\).$"
    with pytest.raises(StreamFailure, match=message):
        Away(99, ConnectionResetError("broken")).fetch(tmp_path / "x.mds", patience_sec=2.5)
    missing = Away(99, FileNotFoundError("no such object"))
    with pytest.raises(StreamFailure, match="^data: s3://b/x.mds cannot be read: "):
        missing.fetch(tmp_path / "x.mds")
    assert missing.left == 99 - 3
    with pytest.raises(FetchCancelled):
        Away(99, ConnectionResetError("broken")).fetch(tmp_path / "x.mds", is_wanted=lambda: False)


NO_SPACE = (errno.ENOSPC, "No space left on device")


@pytest.mark.timeout(60, func_only=True)
@pytest.mark.parametrize("kind", ["of the client", "of a copy"])
def test_an_error_of_this_machines_disk_is_not_retried(tmp_path, kind):
    """It named the store, and was retried for ten minutes; shutil.copy names the file that it reads."""
    error: Exception = OSError(*NO_SPACE, "/data/stage/x.mds", None, str(tmp_path / "x.mds.tmp"))
    if kind == "of the client":
        error = RuntimeError("of the client")
        error.__cause__ = OSError(*NO_SPACE)
    with pytest.raises(StreamFailure) as caught:
        Away(99, error).fetch(tmp_path / "x.mds")
    assert str(caught.value) == (
        f"data.local: {tmp_path}/x.mds: {NO_SPACE[1]}, while x.mds was written. Check its space and permissions, "
        "or set another data.local or data.cache_limit."
    )


def test_a_failure_in_a_fetch_thread_is_that_of_the_iteration(moments, tmp_path, monkeypatch):
    """It would be logged there, and the epoch would end as if it were finished."""
    dataset = stream_of(tmp_path, remote=moments)

    def fail(self, shard):
        raise KeyError("surprise")

    monkeypatch.setattr(fetch.RetryingStream, "prepare_shard", fail)
    assert next(iter(dataset)) == {"failure": ["data: KeyError: 'surprise'"]}


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
    threads = [thread for thread in threading.enumerate() if "_run_fetch_thread" in thread.name]
    return [thread for thread in threads if getattr(getattr(thread, "_target", None), "__self__", None) is dataset]


def settled(is_so, limit_sec: float = 60.0) -> bool:
    """Wait until something is so."""
    deadline = time.monotonic() + limit_sec
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_so()


def test_shards_are_fetched_at_once_and_cancelled_when_an_epoch_ends_early(moments, tmp_path, monkeypatch):
    """Each is between two tries at a store that is away; the rest of the queue is not begun."""
    dataset, tried = stream_of(tmp_path, remote=moments, predownload=40), []

    def be_away(self, remote, local, timeout):
        tried.append(remote)
        raise ConnectionResetError("away")

    monkeypatch.setattr(type(dataset.streams[0].client), "_download_file_impl", be_away)
    reading = threading.Thread(target=lambda: next(iter(dataset)), daemon=True)
    reading.start()
    assert settled(lambda: len(set(tried)) >= reader.FETCHES > 1)
    dataset._epoch_read.end()  # as the next iteration does
    reading.join(60)
    assert not reading.is_alive() and settled(lambda: not fetchers(dataset))
    assert set(dataset.cache.states) == {REMOTE}
    assert len(set(tried)) <= reader.FETCHES + 1 < len(dataset.shards)  # one more: the reader's


def test_a_limit_that_one_shard_does_not_fit_in_is_refused(moments, tmp_path):
    """Of a limit that several jobs keep to: test_shared_cache.py."""
    index, sizes = sizes_of(moments)
    text = f"^data.cache_limit: 900 bytes .*{sizes[0]:,} next to index.json .{index:,} bytes"
    with pytest.raises(StreamFailure, match=text):
        stream_of(tmp_path / "small", remote=moments, cache_limit=900).cache.ensure_shard(0)
