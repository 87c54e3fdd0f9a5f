"""Make numbered parts on workers: on processes of this machine (engine=local), or on a Ray cluster (engine=ray).

    keys.opened(start, workers)      a context: its engine has run(numbers), which yields (number, result) as parts get done

`start` is called once in each worker, and returns `make`; make(number) makes a part. Both come to the workers of a cluster
by pickle. A part appears whole or not at all (prepare/parts.py), so it does no harm that one is begun twice.

A cluster is prepare/cluster.py's. Folders and weights have to lie at the same path on all of its nodes; what is at s3:// does
not matter to it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cli.command_line import Problem
from cli.errors import Failed
from prepare.cluster import Cluster, connected
from prepare.parts import GO_ON

Make = Callable[[Any], Any]
Start = Callable[[], Make]


@dataclass(frozen=True)
class EngineKeys:
    """The keys of the commands that can be spread over a cluster."""

    engine: Literal["local", "ray"] = "local"
    """Who makes the parts: this machine, or a Ray cluster."""
    ray: str = "auto"
    """Address of a Ray cluster's head, HOST:PORT. auto: RAY_ADDRESS, or the cluster of this machine."""

    @contextlib.contextmanager
    def opened(self, start: Start, workers: int | None = None) -> Iterator[Engine]:
        """Yield an engine; at the end its workers are gone.

        Args:
            start: called once in each worker; for engine=ray it has to be picklable.
            workers: at most. None: all cores of this machine or of the cluster.

        Raises:
            Refused: there is no such cluster, or Ray is not installed.
        """
        if self.engine == "local":
            engine = Local(start, workers or len(os.sched_getaffinity(0)))
            with contextlib.closing(engine):
                yield engine
            return
        with connected(self.ray) as ray, contextlib.closing(Cluster(ray, start, workers)) as engine:
            yield engine


def check_keys(keys: EngineKeys) -> list[Problem]:
    """Return what is wrong with the keys themselves."""
    if keys.ray == "auto":
        return []
    if keys.engine == "local":
        return [Problem(f"ray: {keys.ray} is given, but engine is local. Give engine=ray, or leave it out.", ("ray",))]
    host, _, port = keys.ray.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 2**16:
        possible = "auto, or HOST:PORT of the head, as `ray start --head` prints it"
        todo = "The command has to run on a node of the cluster"
        return [Problem(f"ray: {keys.ray} is no address. Possible: {possible}. {todo}.", ("ray",))]
    return []


# ---------------------------------------------------------------------------------------------------------------------
# Processes of this machine
# ---------------------------------------------------------------------------------------------------------------------


class Local:
    """Processes that end with this one; or this one itself, where one worker is enough."""

    def __init__(self, start: Start, workers: int):
        self._start, self._workers = start, workers
        self._make: Make | None = None
        self._running: Generator[tuple[Any, Any]] | None = None

    def run(self, numbers: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield (number, what make(number) has returned) in the order in which they get done.

        Raises:
            Failed, Refused, OSError: as `make` or `start` raised it.
            Failed: a worker was killed, again and again where the engine is a cluster's.
        """
        self._running = self._run(numbers)
        return self._running

    def close(self) -> None:
        """End the workers."""
        if self._running is not None:
            self._running.close()

    def _run(self, numbers: Sequence[Any]) -> Generator[tuple[Any, Any]]:
        workers = min(self._workers, len(numbers))
        if workers <= 1:
            for number in numbers:
                self._make = self._make or self._start()
                yield number, self._make(number)
            return
        fork = multiprocessing.get_context("fork")  # `_end_with_parent` needs fork, and so nothing has to be pickled
        begun = (os.getpid(), self._start)
        with concurrent.futures.ProcessPoolExecutor(workers, fork, _begin, begun) as pool:
            futures = {pool.submit(_make_here, number): number for number in numbers}
            try:
                for future in concurrent.futures.as_completed(futures):
                    yield futures[future], future.result()
            except concurrent.futures.BrokenExecutor as error:
                text = "workers: one was killed, perhaps for want of memory"
                raise Failed(f"{text}. {GO_ON}; workers=1 takes least.") from error
            except BaseException as error:
                if not isinstance(error, Exception | GeneratorExit):  # interrupted: what they are at is made again
                    for worker in multiprocessing.active_children():
                        worker.kill()
                pool.shutdown(wait=True, cancel_futures=True)
                raise


Engine = Local | Cluster
"""Makes parts, see `EngineKeys.opened`."""

_started: list[Any] = []
"""In a worker process of `Local`: start, and then make."""


def _begin(parent: int, start: Start) -> None:
    _started[:] = [start]
    _end_with_parent(parent)


def _make_here(number: Any) -> Any:
    if len(_started) == 1:
        _started.append(_started[0]())
    return _started[1](number)


def _end_with_parent(parent: int) -> None:
    """End this worker soon after its parent was killed; otherwise it would wait for the pool's queue forever."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
