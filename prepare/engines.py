"""Make numbered parts on workers: on processes of this machine (engine=local), or on a Ray cluster (engine=ray).

    keys.open_engine(start, workers)    a context: its engine has run(numbers), which yields (number, result) of each part

`start` is called once in each worker, and returns `make`; make(number) makes a part. Both come to the workers of a cluster
by pickle. A part appears whole or not at all (prepare/parts.py), so it does no harm that one is begun twice.

Folders and weights have to lie at the same path on all nodes of a cluster; s3:// works from every node. A worker of a cluster
is an actor with one CPU, which makes one part at a time. When it dies, Ray starts it again where there is room, and tries its
part again. Each actor that waits for room is demand that an autoscaler sees. Workers run this checkout: Ray copies it to the
nodes, whose environment has to be the same. The variables of stores go to them as stored data, and into no log.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from common.command_line import Problem
from common.errors import ROOT, ConfigError, Failed, Refused
from common.log import log
from prepare.arguments import RESUME_HINT
from prepare.parts import part_name

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
    def open_engine(self, start: Start, workers: int | None = None) -> Iterator[Engine]:
        """Yield an engine; at the end its workers are gone.

        Args:
            start: called once in each worker; for engine=ray it has to be picklable.
            workers: at most. None: all cores of this machine or of the cluster.

        Raises:
            Refused: there is no such cluster, or Ray is not installed.
        """
        if self.engine == "local":
            engine = LocalEngine(start, workers or len(os.sched_getaffinity(0)))
            with contextlib.closing(engine):
                yield engine
            return
        with connect_to_ray(self.ray) as ray, contextlib.closing(RayEngine(ray, start, workers)) as engine:
            yield engine


def check_engine_keys(keys: EngineKeys) -> list[Problem]:
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


class LocalEngine:
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
        with concurrent.futures.ProcessPoolExecutor(workers, fork, _init_worker, begun) as pool:
            futures = {pool.submit(_make_in_worker, number): number for number in numbers}
            try:
                for future in concurrent.futures.as_completed(futures):
                    yield futures[future], future.result()
            except concurrent.futures.BrokenExecutor as error:
                text = "workers: one was killed, perhaps for want of memory"
                raise Failed(f"{text}. {RESUME_HINT}; workers=1 takes least.") from error
            except BaseException as error:
                if not isinstance(error, Exception | GeneratorExit):  # interrupted: what they are at is made again
                    for worker in multiprocessing.active_children():
                        worker.kill()
                pool.shutdown(wait=True, cancel_futures=True)
                raise


_worker_state: list[Any] = []
"""In a worker process of `LocalEngine`: start, and then make."""


def _init_worker(parent: int, start: Start) -> None:
    _worker_state[:] = [start]
    _end_with_parent(parent)


def _make_in_worker(number: Any) -> Any:
    if len(_worker_state) == 1:
        _worker_state.append(_worker_state[0]())
    return _worker_state[1](number)


def _end_with_parent(parent: int) -> None:
    """End this worker soon after its parent was killed; otherwise it would wait for the pool's queue forever."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ---------------------------------------------------------------------------------------------------------------------
# A Ray cluster
# ---------------------------------------------------------------------------------------------------------------------

CONNECT_SEC = 5.0  # for a process to listen at the head's port
SILENCE_SEC, LOG_AGAIN_SEC = 60.0, 300.0  # until it is logged that no worker has started, and logged again
MAX_RETRIES = 5  # of a part whose worker died, after the first: more such deaths have a reason that stays
NOT_SHIPPED = ["/bench", "/reports/results", "/reports/predecessor", "__pycache__"]
STORE_PREFIXES = (
    "AWS_",
    "S3_",
    "GCS_",
    "GOOGLE_APPLICATION_",
    "AZURE_",
    "ALIPAN_",
    "COMPOSER_SFTP_",
    "MOSAICML_STREAMING_",
    "HF_",
)
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
"""Variables that workers need for stores and the hub: what their names begin with, and names in both cases."""
RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "^",
}
"""Set before Ray is loaded: it reports no usage statistics, and prints nothing here of its nodes and their logs."""


@contextlib.contextmanager
def connect_to_ray(address: str) -> Iterator[Any]:
    """Yield the module `ray`, connected to a cluster whose workers can import this project.

    Where this process is connected already, it stays so, and its workers have to find the project themselves.

    Raises:
        Refused: Ray is not installed, or there is no cluster at this address.
    """
    for name, value in RAY_VARIABLES.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ModuleNotFoundError as error:
        text = "engine: ray is not installed, which spreads work over machines"
        raise Refused(f"{text}. Run: pip install --no-deps -r requirements/prepare.lock") from error
    if ray.is_initialized():
        yield ray
        return
    _check_reachable(address)
    folders = [f"!/{path.parent.name}{what}" for path in ROOT.glob("*/__init__.py") for what in ("", "/**")]
    # As .gitignore has it: of the root, whose own name is a dot, only its modules and rooms.
    excludes = ["/??*", "/[!.]", "!/*.py", *sorted(folders), *NOT_SHIPPED]
    environment = {"working_dir": str(ROOT), "excludes": excludes}
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if in_main else None
    try:
        ray.init(address, runtime_env=environment, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # ConnectionError, RuntimeError, ValueError and Ray's own, by the kind of what is wrong
        _refuse(address, _first_line(error), error)
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)  # Ray installs its own
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Refuse an address where no process listens: Ray itself would try for minutes, and then end the process."""
    head_address = os.environ.get("RAY_ADDRESS") or address if address == "auto" else address
    host, _, port = head_address.rpartition(":")
    if host and "/" not in head_address and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_SEC).close()
        except OSError as error:
            _refuse(head_address, f"{type(error).__name__}: {error}", error)


def _refuse(address: str, why: str, error: Exception) -> NoReturn:
    todo = "Start one with `ray start --head`, on further nodes `ray start --address=HOST:PORT`, or give its address"
    raise Refused(f"ray: no cluster at {address} ({why.rstrip('.')}). {todo}.") from error


class RayWorker:
    """Makes parts in a process of a cluster, one after the other."""

    def __init__(self) -> None:
        self._make: Callable[[Any], Any] | None = None

    def node(self) -> str:
        """Return the address of the node that this runs on."""
        import ray

        return str(ray.util.get_node_ip_address())

    def make(self, start_refs: list[Any], number: Any) -> Any:
        """Make a part; an error is returned, with its traceback as a note: RuntimeError for any but our own and OSError.

        Args:
            start_refs: one reference, to start, the variables of stores, and the folder in which the command runs.
        """
        import ray

        try:
            if self._make is None:
                start, variables, folder = ray.get(start_refs[0])
                os.environ.update(variables)
                with contextlib.suppress(OSError):  # relative paths lead where they do for the command
                    os.chdir(folder)
                self._make = start()
            return self._make(number)
        except Exception as error:
            kind, text = type(error), str(error)
            if isinstance(error, ConfigError):
                kind = Refused
            elif isinstance(error, OSError):
                kind = OSError
            elif kind not in (Failed, Refused):
                kind, text = RuntimeError, f"{kind.__name__}: {error}"
            returned = kind(f"{text} [{_format_number(number)}, node {self.node()}]")
            returned.add_note(traceback.format_exc())
            return returned


class RayEngine:
    """Actors of a Ray cluster; an `Engine`, see prepare/engines.py.

    Args:
        ray: the module, connected.
        start, workers: see `EngineKeys.open_engine`.
    """

    def __init__(self, ray: Any, start: Callable[[], Any], workers: int | None):
        self._ray = ray
        self._workers = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        variables = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(STORE_PREFIXES) or name.upper() in PROXY_VARIABLES
        }
        # Stored, not an argument: those stand in the cluster's tables as they are.
        self._given = [ray.put((start, variables, str(Path.cwd())))]
        self._actor = ray.remote(RayWorker).options(num_cpus=1, max_restarts=-1, scheduling_strategy="SPREAD")
        self._idle: list[Any] = []
        self._busy: dict[Any, tuple[Any, Any]] = {}
        """What is waited for -> its actor, and the number of its part; `_STARTING`: that it runs."""

    def run(self, numbers: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        queue, todo, deaths, next_log_at = deque(numbers), len(numbers), Counter[Any](), 0.0
        for _ in range(min(self._workers, todo) - len(self._idle) - len(self._busy)):
            self._wait_for(self._actor.remote())
        while todo:
            while queue and self._idle:
                actor, number = self._idle.pop(), queue.popleft()
                self._busy[actor.make.remote(self._given, number)] = actor, number
            if not queue:
                self._kill_starting()
            done, _ = self._ray.wait([*self._busy], num_returns=1, timeout=SILENCE_SEC)
            none_runs = not done and all(number is _STARTING for _, number in self._busy.values())
            if none_runs and time.monotonic() > next_log_at:
                self._log_waiting()
                next_log_at = time.monotonic() + LOG_AGAIN_SEC
            for ref in done:
                actor, number = self._busy.pop(ref)
                try:
                    result = self._ray.get(ref)
                except self._ray.exceptions.RayError as error:
                    if number is _STARTING:
                        need = "The nodes need this one's environment"
                        raise Failed(
                            f"ray: no worker can start: {_first_line(error)}. {need}. {RESUME_HINT}."
                        ) from error
                    deaths[number] += 1
                    self._handle_death(number, deaths[number], error)
                    queue.appendleft(number)
                    self._wait_for(actor)
                    continue
                self._idle.append(actor)
                if isinstance(result, Exception):
                    raise result
                if number is not _STARTING:
                    todo -= 1
                    yield number, result

    def _wait_for(self, actor: Any) -> None:
        """Wait until an actor runs; where it died, until Ray has started it again."""
        self._busy[actor.node.options(max_task_retries=-1).remote()] = actor, _STARTING

    def _handle_death(self, number: Any, deaths: int, error: Exception) -> None:
        """Say that a worker died. Raises Failed: at the same part as others before it."""
        what = f"ray: {_format_number(number)}: its worker"
        if deaths > MAX_RETRIES:
            raise Failed(
                f"{what} died, {deaths} times: {_first_line(error)}. Ray's logs say more. {RESUME_HINT}."
            ) from error
        log.warning(f"{what} or its node died ({type(error).__name__}). It is tried again.")

    def _kill_starting(self) -> None:
        """End workers that still start, when no part is left for them. One that dies now leaves its part to an idle one."""
        for ref in [ref for ref, (_, number) in self._busy.items() if number is _STARTING]:
            self._ray.kill(self._busy.pop(ref)[0])

    def _log_waiting(self) -> None:
        has, free = (of.get("CPU", 0) for of in (self._ray.cluster_resources(), self._ray.available_resources()))
        todo = "It waits; add a node with `ray start --address=HOST:PORT`, or end what holds them"
        log.warning(f"ray: no worker has started yet. Each needs a CPU; of {has:g} {free:g} are free. {todo}.")

    def close(self) -> None:
        for actor in [*(actor for actor, _ in self._busy.values()), *self._idle]:
            with contextlib.suppress(Exception):  # the cluster itself may be gone
                self._ray.kill(actor)
        self._busy.clear()
        self._idle.clear()


_STARTING = object()


def _format_number(number: Any) -> str:
    return part_name(number) if isinstance(number, int) else str(number)


def _first_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}".rstrip(".")


Engine = LocalEngine | RayEngine
"""Makes parts, see `EngineKeys.open_engine`."""
