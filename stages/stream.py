"""A StreamingDataset of a stage that gives whole batches, is safe to fork, and tells of its failures."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from composer.utils import dist
from filelock import FileLock, Timeout
from streaming import StreamingDataset
from streaming.base.dataset import _ShardState

from cli.errors import ConfigError
from cli.masking import printable
from stages.fetch import PATIENCE_SEC, FetchCancelled, RetryingStream, StreamFailure
from stages.images import SampleError
from stages.shard_file import ShardError, ShardFile
from stages.stores import require_private_api

FAILED = 255  # of a shard's states in shared memory, beside streaming's own: it cannot be had
LISTEN_SEC = 1.0
LOCK_FILE = ".in_use"  # in data.local
OWN_FOLDER = "Give each run a folder of its own, or wait for the other one."

Bad = tuple[int, str, str]
"""Of a sample that cannot be used: its number, its key, why."""
Used = TypeVar("Used")

require_private_api(
    StreamingDataset, "_each_sample_id", "_prepare_thread", "_ready_thread", "prepare_shard", "get_item"
)


@dataclass(frozen=True)
class Failure:
    """What an iteration gives instead of the numbers of a batch when there will be none."""

    text: str


def _on_one_rank_of_each_machine(work: Callable[[], None]) -> None:
    """Let one process of each machine do what the others wait for.

    Raises:
        StreamFailure, ConfigError: on all ranks, if it does on one.
    """
    error: StreamFailure | ConfigError | None = None
    if dist.get_local_rank() == 0:
        try:
            work()
        except (StreamFailure, ConfigError) as failure:
            error = failure
        except OSError as failure:
            error = ConfigError([f"data.local: {failure}. Give a folder that this user may write in."])
    said = None if error is None else (isinstance(error, ConfigError), str(error))
    for is_refusal, text in filter(None, dist.all_gather_object(said)):
        raise ConfigError([text]) if is_refusal else StreamFailure(text)


class BatchStream(StreamingDataset):
    """A StreamingDataset that yields whole batches, is safe to fork, and tells of its failures.

    Batches: the items of an iteration are what `read_batch` makes of `batch_size` sample numbers; a rest at the end of an
    epoch that is no whole batch is left out. To be loaded with DataLoader(batch_size=None).

    Fork: streaming's constructor keeps the client that it has fetched `index.json` with. Forked workers would share its
    socket, and their answers would mix: wrong data from a healthy store (seen with streaming 0.13.0).

    Failures: an error in a thread of streaming's is only logged, and the epoch ends as if it were finished, or waits for a
    shard that nobody fetches any more (seen; mosaicml/streaming issues 307, 617). Here the thread's error becomes the item
    {"failure": [text]}, in every process of this machine that waits for the shard, and so does an epoch that owes batches.

    Speed: plain streaming takes a file lock for every sample to ask whether its shard is there, and opens, seeks and reads
    each by itself; that, not the bytes, is what its time goes to.

    Args:
        remote, local: of the stage; remote None: it is read in place.
        patience_sec: how long a store that is away is waited for.
        index_sha256: of index.json as dataset.json has it; None: not compared.
        arguments: further keyword arguments of StreamingDataset.

    Raises:
        StreamFailure: on all ranks, when one of them cannot have the stage's index.
        ConfigError: on all ranks, when `local` cannot be written, or is in use by another run.
    """

    def __init__(
        self,
        *,
        remote: str | None = None,
        local: str,
        patience_sec: float = PATIENCE_SEC,
        index_sha256: str | None = None,
        **arguments: Any,
    ):
        self._failure: str | None = None
        stream = RetryingStream(remote=remote, local=local, patience_sec=patience_sec, index_sha256=index_sha256)
        self._lock = FileLock(Path(local).resolve() / LOCK_FILE, is_singleton=True) if remote is not None else None
        _on_one_rank_of_each_machine(self._take)
        _on_one_rank_of_each_machine(stream.fetch_index)
        try:
            super().__init__(streams=[stream], **arguments)
        except ValueError as error:
            if "Reused local directory" not in str(error):
                raise
            given = f"{local} is in use by another run on this machine, or by shared memory that a run has left"
            raise ConfigError([f"data.local: {given} (then a line above says so). {OWN_FOLDER}"]) from error
        require_private_api(self, "_shard_states", "_shard_access_times", "_cache_filelock_path", "_shm_prefix_int")
        # Beside streaming's own locks of this number; one that is left goes when the number is used again.
        name = f"{self._shm_prefix_int:06d}_reason_{os.getuid()}"
        self._reason_file = Path(self._cache_filelock_path).with_name(name)
        _on_one_rank_of_each_machine(lambda: self._reason_file.unlink(missing_ok=True))
        _on_one_rank_of_each_machine(stream.remove_left_overs)
        stream._downloader.clean_up()
        self.stream = stream

    def _take(self) -> None:
        """Have the cache folder for this run alone, until the process ends or lets it go.

        streaming compares folders too, but no longer once the other run has read its first batch (seen with 0.13.0), and
        not through a link.
        """
        if self._lock is not None:
            Path(self._lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire(timeout=0)
            except Timeout as error:
                folder = Path(self._lock.lock_file).parent
                given = f"{folder} is in use by another run on this machine"
                raise ConfigError([f"data.local: {given}. {OWN_FOLDER}"]) from error

    def let_go(self) -> None:
        """Let another run have the cache folder, once all of this process's streams have let it go."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def read_batch(self, sample_ids: Sequence[int]) -> dict[str, Any]:
        """Return the batch of these samples."""
        raise NotImplementedError

    def first_good(self, sample_id: int, use: Callable[[int], Used]) -> tuple[Used, list[Bad]]:
        """Return what `use` makes of the sample, or of the next of its shard that it can use, and those passed over.

        Args:
            use: takes a sample's number, raises SampleError where that one cannot be used.

        Raises:
            ValueError: no sample of the shard can be used.
        """
        shard_id, offset = self.spanner[sample_id]
        shard_start, shard_samples = sample_id - offset, self.shards[shard_id].samples
        bad: list[Bad] = []
        for step in range(shard_samples):
            candidate = int(shard_start + (offset + step) % shard_samples)
            try:
                return use(candidate), bad
            except SampleError as error:
                bad.append((candidate, str(super().__getitem__(candidate).get("key", candidate)), str(error)))
        named = "; ".join(f"{printable(key)}: {reason}" for _, key, reason in bad[:3])
        raise ValueError(f"data: no sample of shard {shard_id} can be used ({named}, ...). Make the stage again.")

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, Failure):
            return {"failure": [at.text]}
        if not isinstance(at, list):
            return super().__getitem__(at)
        try:
            return self.read_batch(at)
        except (RuntimeError, OSError) as error:  # streaming's own are RuntimeErrors; ours are StreamFailures
            return {"failure": [self._fail(str(error))]}

    # --- one epoch ---

    def _each_sample_id(self, it: Any) -> Iterator[list[int] | Failure]:
        owed, ended = int((it.sample_ids != -1).sum()) // self.batch_size, threading.Event()
        self.stream.is_wanted = lambda: not (ended.is_set() or it.should_exit() or self._event.is_set())
        threading.Thread(target=self._listen, args=(it, ended), daemon=True).start()
        sample_ids, given = super()._each_sample_id(it), 0
        try:
            while len(batch := list(itertools.islice(sample_ids, self.batch_size))) == self.batch_size:
                yield [int(sample_id) for sample_id in batch]
                given += 1
            if given < owed and not (self._failure or it.should_exit()):
                self._fail(f"data: the stream ended after {given} of {owed} batches of this process, without an error")
            while self._failure is not None:  # whoever asks once more hears the same
                yield Failure(self._failure)
        finally:
            ended.set()

    def _fail(self, text: str) -> str:
        """Note the first failure of this process, and end its threads; return the text that counts."""
        self._failure = self._failure or text
        if hasattr(self, "_event"):  # made by an iteration
            self._event.set()
        return self._failure

    def _prepare_thread(self, it: Any) -> None:
        self._until_failure(super()._prepare_thread, it)

    def _ready_thread(self, it: Any) -> None:
        self._until_failure(super()._ready_thread, it)

    def _until_failure(self, work: Callable[[Any], None], it: Any) -> None:
        """Run a thread of streaming's; what ends it would there only be logged, and its end waited for for ever."""
        try:
            work(it)
        except Exception as error:
            if not isinstance(error, FetchCancelled):
                self._fail(str(error) if isinstance(error, StreamFailure) else f"data: {type(error).__name__}: {error}")
            it.on_exit()

    def _listen(self, it: Any, ended: threading.Event) -> None:
        """Hear of a shard that another process of this machine could not have, or has given up: nobody else will fetch it."""
        while not (ended.wait(LISTEN_SEC) or self._event.is_set()):
            if (shard_id := self._given_up(it)) is not None:
                self._until_failure(lambda it, shard_id=shard_id: self.prepare_shard(shard_id, False), it)
            if (failed := np.flatnonzero(self._shard_states.numpy() == FAILED)).size:
                self._fail(self._failed_elsewhere(int(failed[0])))

    def _given_up(self, it: Any) -> int | None:
        """Return the shard that this process waits for and that is not here, though it was prepared before.

        Another process's epoch ended while it fetched it, or it was put out of the cache before it was read.
        """
        at = it.ready_index
        if at >= min(it.prepare_index, it.total) or it.sample_ids[at] == -1:
            return None
        shard_id = int(self.spanner[it.sample_ids[at]][0])
        return shard_id if self._shard_states[shard_id] == _ShardState.REMOTE else None

    def _tell_others(self, text: str) -> None:
        """Leave the reason where every process of this machine finds it: which of them is asked first, nobody knows."""
        with contextlib.suppress(OSError):  # a full disk may be the reason
            self._reason_file.write_text(text)

    def _failed_elsewhere(self, shard_id: int) -> str:
        name = self.shards[shard_id].raw_data.basename
        with contextlib.suppress(OSError):
            if reason := self._reason_file.read_text():
                return reason
        return f"data: {name} could not be had by another process of this machine, whose message says why"

    # --- shards ---

    def get_item(self, sample_id: int, retry: int = 7) -> Any:
        """Return a sample as streaming decodes it, from a shard whose digest this run has compared."""
        self.open_shard(int(self.spanner[sample_id][0]))
        return super().get_item(sample_id, retry)

    def open_shard(self, shard_id: int) -> None:
        """Have a shard compared before it is read; an iteration has seen to that, a reader of single samples has not."""
        if self._shard_states[shard_id] != _ShardState.LOCAL:
            self.prepare_shard(shard_id)

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Have a shard on this machine, its digest compared. Raises StreamFailure: it cannot be had."""
        state = self._shard_states[shard_id]
        if state == _ShardState.LOCAL and not blocking:
            self._shard_access_times[shard_id] = time.time_ns()
            return
        if state == FAILED:
            raise StreamFailure(self._failed_elsewhere(shard_id))
        if self.cache_limit and state == _ShardState.REMOTE:
            self._make_room(shard_id)
        try:
            super().prepare_shard(shard_id, blocking)
        except BaseException as error:
            if not isinstance(error, FetchCancelled):
                self._tell_others(str(error))
            # Left as it is, it would be waited for for ever.
            self._shard_states[shard_id] = _ShardState.REMOTE if isinstance(error, FetchCancelled) else FAILED
            with contextlib.suppress(AttributeError):
                self._cache_filelock.release(force=True)
            raise

    def _make_room(self, wanted_id: int) -> None:
        """Remove files of earlier runs that this one has not opened: streaming counts, and evicts, only what it has.

        The wanted shard's own stays, and so do, for as long as there is room, those with lower numbers: without shuffling
        they are wanted next.
        """
        with FileLock(self._cache_filelock_path):
            if self._shard_states[wanted_id] != _ShardState.REMOTE:
                return  # another thread has begun with it: it would be counted twice
            not_opened = {
                shard_id: path
                for shard_id, (shard, state) in enumerate(zip(self.shards, self._shard_states.numpy(), strict=True))
                if state == _ShardState.REMOTE and (path := Path(shard.dirname, shard.raw_data.basename)).is_file()
            }
            own = not_opened.pop(wanted_id, None)
            num_bytes = self.shards[wanted_id].get_max_size() if own is None else own.stat().st_size
            used = self.cache_usage + sum(path.stat().st_size for path in not_opened.values())
            for path in reversed(not_opened.values()):
                if used + num_bytes <= self.cache_limit:
                    break
                used -= path.stat().st_size
                path.unlink()

    def resume(self, epoch: int, samples: int) -> None:
        """Begin the next iteration at a sample of an epoch, over all ranks; the epochs after it follow from there."""
        self.load_state_dict(
            {
                "epoch": epoch,
                "sample_in_epoch": samples,
                "num_canonical_nodes": self.num_canonical_nodes,
                "shuffle_seed": self.shuffle_seed,
                # The order is that of a first start: benchmark.py lets no number of nodes through that would change it.
                "initial_physical_nodes": None,
            }
        )


class MomentsStream(BatchStream):
    """The stage `moments` in batches: {"moments": float16 (B, 2C, h, w), each text column: int64 (B, L), ..., "bad": [...]}.

    A sample with a value that is not finite is a broken one: in the loss it would look like too high a learning rate.

    Args:
        columns: name -> (shape of one sample, numpy type as stored, numpy type of the batch).
        arguments: keyword arguments of StreamingDataset.
    """

    def __init__(self, *, columns: Mapping[str, tuple[tuple[int, ...], str, str]], **arguments: Any):
        super().__init__(**arguments)
        self.columns = dict(columns)
        self._files: dict[int, ShardFile] = {}

    def read_batch(self, sample_ids: Sequence[int]) -> dict[str, Any]:
        """Fill one array a column, shard by shard, each row at its place in the batch."""
        batch = {n: np.empty((len(sample_ids), *shape), stored) for n, (shape, stored, _) in self.columns.items()}
        places: dict[int, list[tuple[int, int]]] = {}
        bad: list[Bad] = []
        for place, sample_id in enumerate(sample_ids):
            shard_id, row = self.spanner[sample_id]
            places.setdefault(shard_id, []).append((place, row))
        for shard_id, wanted in places.items():
            rows = self._rows(shard_id, [row for _, row in wanted])
            for (place, _), found in zip(wanted, rows, strict=True):
                try:
                    _put(found, batch, place)
                except SampleError:
                    bad += self.first_good(sample_ids[place], functools.partial(self._put_sample, batch, place))[1]
        tensors = {n: torch.from_numpy(batch[n].astype(last, copy=False)) for n, (*_, last) in self.columns.items()}
        return {**tensors, "bad": bad}

    def _put_sample(self, batch: Mapping[str, np.ndarray], place: int, sample_id: int) -> None:
        shard_id, row = self.spanner[sample_id]
        _put(self._rows(shard_id, [row])[0], batch, place)

    def _rows(self, shard_id: int, rows: Sequence[int], retry: int = 7) -> list[dict[str, memoryview]]:
        """Read rows of a shard, fetching it where it is missing or was put out of the cache."""
        for _ in range(1 + retry):
            try:
                self.open_shard(shard_id)
                if shard_id not in self._files:
                    self._files[shard_id] = ShardFile(self.shards[shard_id])
                self._shard_access_times[shard_id] = time.time_ns()
                return self._files[shard_id].read(rows)
            except FileNotFoundError:
                self.prepare_shard(shard_id)
        raise ShardError(f"data: {self.shards[shard_id].raw_data.basename} cannot be kept: a larger data.cache_limit?")


def _put(found: Mapping[str, memoryview], batch: Mapping[str, np.ndarray], place: int) -> None:
    """Copy a row to its place. Raises SampleError: it has a value that is not finite."""
    for name, array in batch.items():
        values = np.frombuffer(found[name], array.dtype)
        if array.dtype.kind == "f" and not _is_finite(values):
            raise SampleError(f"{name} are not finite")
        array[place] = values.reshape(array.shape[1:])


def _is_finite(values: np.ndarray) -> bool:
    if values.dtype != np.float16:
        return bool(np.isfinite(values).all())
    # numpy widens each float16 by itself, which takes longer than reading it: the exponent of inf and nan is all ones.
    return bool((values.view(np.uint16) & 0x7FFF).max(initial=0) < 0x7C00)
