"""A Ray cluster as an engine: workers that make numbered parts, started anew by Ray when they or their nodes die.

A worker is an actor with a CPU; it makes one part at a time. When it dies, Ray starts
it anew where there is room, and tries its part again. Each actor that waits for room is demand that an autoscaler sees.

The workers run this checkout: Ray copies it to the nodes, whose environment has to be the same. The variables of stores go
to them as stored data, and into no table and no log.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from cli.errors import ROOT, ConfigError, Failed, Refused
from cli.log import log
from prepare.names import GO_ON, part_name

FIND_SEC = 5.0  # for a process to listen at the head's port
SILENCE_SEC, AGAIN_SEC = 60.0, 300.0  # until it is told that no worker has started, and told again
TRIES = 5  # of a part whose worker died, after the first: more such deaths have a reason that stays
NOT_SHIPPED = ["/bench", "/reports/results", "/reports/predecessor", "__pycache__"]
STORES = (
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
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
"""Variables that workers need for stores and the hub: what their names begin with, and names in both cases."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "^",
}
"""Before Ray is loaded: it tells nobody outside of its use, and prints nothing here of its nodes and their logs."""


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """Yield the module `ray`, connected to a cluster whose workers can import this project.

    Where this process is connected already, it stays so, and its workers have to find the project themselves.

    Raises:
        Refused: Ray is not installed, or there is no cluster at this address.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ModuleNotFoundError as error:
        text = "engine: ray is not installed, which spreads work over machines"
        raise Refused(f"{text}. Run: pip install --no-deps -r requirements/prepare.lock") from error
    if ray.is_initialized():
        yield ray
        return
    _find(address)
    rooms = [f"!/{path.parent.name}{what}" for path in ROOT.glob("*/__init__.py") for what in ("", "/**")]
    # As .gitignore has it: of the root, whose own name is a dot, only its modules and rooms.
    excludes = ["/??*", "/[!.]", "!/*.py", *sorted(rooms), *NOT_SHIPPED]
    environment = {"working_dir": str(ROOT), "excludes": excludes}
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if in_main else None
    try:
        ray.init(address, runtime_env=environment, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # ConnectionError, RuntimeError, ValueError and Ray's own, by the kind of what is wrong
        _refuse(address, _first_line(error), error)
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)  # Ray puts its own in the place
    try:
        yield ray
    finally:
        ray.shutdown()


def _find(address: str) -> None:
    """Refuse an address where no process listens: Ray itself would try for minutes, and then end the process."""
    given = os.environ.get("RAY_ADDRESS") or address if address == "auto" else address
    host, _, port = given.rpartition(":")
    if host and "/" not in given and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=FIND_SEC).close()
        except OSError as error:
            _refuse(given, f"{type(error).__name__}: {error}", error)


def _refuse(address: str, why: str, error: Exception) -> NoReturn:
    todo = "Start one with `ray start --head`, on further nodes `ray start --address=HOST:PORT`, or give its address"
    raise Refused(f"ray: no cluster at {address} ({why.rstrip('.')}). {todo}.") from error


class Worker:
    """Makes parts in a process of a cluster, one after the other."""

    def __init__(self) -> None:
        self._make: Callable[[Any], Any] | None = None

    def node(self) -> str:
        """Return the address of the node that this runs on."""
        import ray

        return str(ray.util.get_node_ip_address())

    def make(self, given: list[Any], number: Any) -> Any:
        """Make a part; an error is returned, with its traceback as a note: RuntimeError for any but our own and OSError.

        Args:
            given: one reference, to start, the variables of stores, and the folder in which the command runs.
        """
        import ray

        try:
            if self._make is None:
                start, variables, folder = ray.get(given[0])
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
            returned = kind(f"{text} [{_name_of(number)}, node {self.node()}]")
            returned.add_note(traceback.format_exc())
            return returned


class Cluster:
    """Actors of a Ray cluster; an `Engine`, see prepare/engines.py.

    Args:
        ray: the module, connected.
        start, workers: see `EngineKeys.opened`.
    """

    def __init__(self, ray: Any, start: Callable[[], Any], workers: int | None):
        self._ray = ray
        self._workers = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        variables = {
            name: value for name, value in os.environ.items() if name.startswith(STORES) or name.upper() in PROXIES
        }
        # Stored, not an argument: those stand in the cluster's tables as they are.
        self._given = [ray.put((start, variables, str(Path.cwd())))]
        self._actor = ray.remote(Worker).options(num_cpus=1, max_restarts=-1, scheduling_strategy="SPREAD")
        self._idle: list[Any] = []
        self._busy: dict[Any, tuple[Any, Any]] = {}
        """What is waited for -> its actor, and the number of its part; `_STARTS`: that it runs."""

    def run(self, numbers: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        queue, todo, deaths, tell_at = deque(numbers), len(numbers), Counter[Any](), 0.0
        for _ in range(min(self._workers, todo) - len(self._idle) - len(self._busy)):
            self._wait_for(self._actor.remote())
        while todo:
            while queue and self._idle:
                actor, number = self._idle.pop(), queue.popleft()
                self._busy[actor.make.remote(self._given, number)] = actor, number
            if not queue:
                self._let_go()
            done, _ = self._ray.wait([*self._busy], num_returns=1, timeout=SILENCE_SEC)
            none_runs = not done and all(number is _STARTS for _, number in self._busy.values())
            if none_runs and time.monotonic() > tell_at:
                self._tell_of_waiting()
                tell_at = time.monotonic() + AGAIN_SEC
            for ref in done:
                actor, number = self._busy.pop(ref)
                try:
                    result = self._ray.get(ref)
                except self._ray.exceptions.RayError as error:
                    if number is _STARTS:
                        need = "The nodes need this one's environment"
                        raise Failed(f"ray: no worker can start: {_first_line(error)}. {need}. {GO_ON}.") from error
                    deaths[number] += 1
                    self._tell_of_death(number, deaths[number], error)
                    queue.appendleft(number)
                    self._wait_for(actor)
                    continue
                self._idle.append(actor)
                if isinstance(result, Exception):
                    raise result
                if number is not _STARTS:
                    todo -= 1
                    yield number, result

    def _wait_for(self, actor: Any) -> None:
        """Wait until an actor runs; where it died, until Ray has started it anew."""
        self._busy[actor.node.options(max_task_retries=-1).remote()] = actor, _STARTS

    def _tell_of_death(self, number: Any, deaths: int, error: Exception) -> None:
        """Say that a worker died. Raises Failed: at the same part as others before it."""
        what = f"ray: {_name_of(number)}: its worker"
        if deaths > TRIES:
            raise Failed(f"{what} died, {deaths} times: {_first_line(error)}. Ray's logs say more. {GO_ON}.") from error
        log.warning(f"{what} or its node died ({type(error).__name__}). It is tried again.")

    def _let_go(self) -> None:
        """End workers that still start, when no part is left for them. One that dies now leaves its part to an idle one."""
        for ref in [ref for ref, (_, number) in self._busy.items() if number is _STARTS]:
            self._ray.kill(self._busy.pop(ref)[0])

    def _tell_of_waiting(self) -> None:
        has, free = (of.get("CPU", 0) for of in (self._ray.cluster_resources(), self._ray.available_resources()))
        todo = "It waits; add a node with `ray start --address=HOST:PORT`, or end what holds them"
        log.warning(f"ray: no worker has started yet. Each needs a CPU; of {has:g} {free:g} are free. {todo}.")

    def close(self) -> None:
        for actor in [*(actor for actor, _ in self._busy.values()), *self._idle]:
            with contextlib.suppress(Exception):  # the cluster itself may be gone
                self._ray.kill(actor)
        self._busy.clear()
        self._idle.clear()


_STARTS = object()


def _name_of(number: Any) -> str:
    return part_name(number) if isinstance(number, int) else str(number)


def _first_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}".rstrip(".")
