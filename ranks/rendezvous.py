"""The ranks' rendezvous: how they find one another at the start, and what is reported if one of them is missing.

torch's own rendezvous waits in C++ code for as long as any collective may take, and ends in a trace. Here rank 0 opens the
same store, each rank writes its name into it, and every wait has an end that says who is missing. What one rank finds wrong
is sent to all, and they end with one exit code: 2 for what a user can correct, 1 for a missing rank.

    MASTER_ADDR, MASTER_PORT     where rank 0's store is; each rank's launcher sets them, with RANK and WORLD_SIZE
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed
from torch.distributed import DistNetworkError, PrefixStore, TCPStore

from common import dist, interrupts
from common.errors import ConfigError, Failed
from common.log import EVERY_RANK, log

if TYPE_CHECKING:
    from composer.devices import Device

INIT_TIMEOUT_SEC = 600.0  # for a machine that is late: its container may have to be fetched
ANSWER_SEC = 60.0  # of a store that has taken a connection: many thousand ranks may come to it at once
CONNECT_SEC = 5.0
LOG_INTERVAL_SEC = 30.0
POLL_SEC = 0.5
STAY_SEC = 4 * POLL_SEC  # of a rank that leaves: the store must be there until the others have read why
RETRY_SEC = 2.0  # between two tries to reach rank 0
MAX_NAMED = 8  # ranks in a message

_hosts: list[str] = []
_own_store: list[TCPStore] = []
"""Rank 0's store, which lives as long as the process."""


def rank_hosts() -> list[str]:
    """Return the name of each rank's machine, by rank."""
    return _hosts or [socket.gethostname()] * dist.get_world_size()


def format_ranks(ranks: list[int]) -> str:
    """Return ranks with their machines, as a message has them."""
    some = [f"{rank} ({rank_hosts()[rank]})" for rank in ranks[:MAX_NAMED]]
    more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(some)}{more}"


def init_process_group(
    device: Device, timeout_sec: float, limit_sec: float = INIT_TIMEOUT_SEC, *, key: str | None = None
) -> None:
    """Connect to the other ranks. Until all are there SIGTERM and SIGINT end this one at once: nothing is to be saved.

    Args:
        timeout_sec: of every collective of the run.
        limit_sec: of the wait for the others.
        key: the configuration key that sets `limit_sec`, for messages.

    Raises:
        ConfigError: the store's address is not valid, or the ranks' settings do not match.
        Failed: a rank is missing.
    """
    if dist.get_world_size() > 1 and not torch.distributed.is_initialized():
        with interrupts.end_at_once():
            more = f", or raise {key}" if key else ""
            store = _open_store(limit_sec, more)
            _check_in(store, limit_sec, more)
            store.set_timeout(datetime.timedelta(seconds=timeout_sec))
            with _explain_gloo_errors(), _hide_gloo_lines():
                torch.distributed.init_process_group(
                    device.dist_backend,
                    store=store,
                    rank=dist.get_global_rank(),
                    world_size=dist.get_world_size(),
                    timeout=datetime.timedelta(seconds=timeout_sec),
                )
    with _hide_gloo_lines():
        dist.initialize_dist(device, timeout=timeout_sec)  # of one rank; of several it compares the backend
    warnings.filterwarnings("ignore", "barrier.*device under current context")  # which is the rank's: set before


def new_cpu_group() -> torch.distributed.ProcessGroup:
    """Return a group of all ranks whose collectives run on the CPU, so that they do not wait for a device."""
    with _hide_gloo_lines():
        return torch.distributed.new_group(backend="gloo")


@contextlib.contextmanager
def _hide_gloo_lines() -> Iterator[None]:
    """Hide `[Gloo] Rank 0 is connected to ...`, which gloo prints on stdout, where the result belongs."""
    sys.stdout.flush()
    stdout, devnull = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(devnull)


@contextlib.contextmanager
def _explain_gloo_errors() -> Iterator[None]:
    """Say what gloo means where two machines cannot reach each other by the names that they have for themselves."""
    try:
        yield
    except RuntimeError as error:
        if "connectFullMesh" not in str(error):
            raise
        problem = f"GLOO_SOCKET_IFNAME: {socket.gethostname()} cannot connect to the other ranks through gloo"
        why = "It takes the network that the machine's own name leads to, e.g. 127.0.0.1"
        raise Failed(f"{problem}. {why}. Name the network that joins the machines: GLOO_SOCKET_IFNAME=eth0.") from error


# --- the store ---


def _open_store(limit_sec: float, more: str) -> TCPStore:
    """Open rank 0's store, or connect to it."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        problem = f"MASTER_ADDR and MASTER_PORT: '{host}' and '{port}'"
        advice = "composer --master_addr HOST --master_port PORT sets both"
        raise ConfigError(
            [f"{problem}, for {dist.get_world_size()} ranks. A name and a port from 1 to 65535; {advice}."]
        )
    # torchrun's agent has the store, and stays with it when its ranks are started again.
    if dist.get_global_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        _check_port(int(port))
        limit, num = datetime.timedelta(seconds=limit_sec), dist.get_world_size()
        _own_store.append(TCPStore("127.0.0.1", int(port), num, is_master=True, wait_for_workers=False, timeout=limit))
        if _is_here(host):
            return _own_store[-1]
        # Otherwise MASTER_ADDR leads to this machine by a network (NAT), or to another rank 0, which reports the duplicate.
    _wait_for_store(host, int(port), limit_sec, more)
    return _connect(host, int(port), limit_sec)


def _is_here(host: str) -> bool:
    """True where a name leads to an address of this machine."""
    try:
        socket.create_server((socket.gethostbyname(host), 0)).close()
    except OSError:
        return False
    return True


def _connect(host: str, port: int, limit_sec: float) -> TCPStore:
    """Connect to rank 0's store, in a thread: torch waits without an end for one that listens and says nothing."""
    answer_sec = min(limit_sec, ANSWER_SEC)
    built: list[TCPStore | RuntimeError] = []

    def build() -> None:
        limit = datetime.timedelta(seconds=answer_sec)
        try:
            built.append(TCPStore(host, port, dist.get_world_size(), wait_for_workers=False, timeout=limit))
        except RuntimeError as error:
            built.append(error)

    thread = threading.Thread(target=build, daemon=True)
    thread.start()
    thread.join(answer_sec)
    result = built[0] if built else f"no answer for {answer_sec:g} s"
    if isinstance(result, TCPStore):
        result.set_timeout(datetime.timedelta(seconds=limit_sec))
        return result
    reason = str(result).splitlines()[0]  # what follows are frames of C++
    problem = f"MASTER_PORT: what answers at {host}:{port} is not rank 0 ({reason}), as {_describe_rank()} sees it"
    why = "Something else holds the port there, or rank 0 has just ended"
    raise Failed(f"{problem}. {why}. Start all machines again, with another port.")


def _check_port(port: int) -> None:
    """Raise ConfigError where rank 0 cannot open the store's port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))  # does not listen: a rank that connected here would leave the port taken behind it
        except OSError as error:
            problem = f"MASTER_PORT: {port} cannot be opened on {socket.gethostname()} ({error.strerror})"
            todo = "Give a free one, the same on all machines: composer --master_port"
            raise ConfigError([f"{problem}. {todo}."]) from error


def _wait_for_store(host: str, port: int, limit_sec: float, more: str) -> None:
    """Wait for rank 0's store. A name may come up after its machine, as that of a pod does.

    Raises Failed: it has not answered for `limit_sec`.
    """
    began = logged_at = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), timeout=min(CONNECT_SEC, limit_sec)).close()
            return
        except OSError as error:
            now, reason = time.monotonic(), error.strerror or "no answer"
        if now - began > limit_sec:
            problem = f"MASTER_ADDR: nothing answers at {host}:{port} ({reason}) for {limit_sec:g} s"
            problem += f", as {_describe_rank()} sees it"
            advice = "Give all machines the address and port of rank 0's, and each its own composer --node_rank"
            raise Failed(f"{problem}. {advice}; let the port through{more}.")
        if now - logged_at > LOG_INTERVAL_SEC and dist.get_local_rank() == 0:
            logged_at = now
            text = f"{_describe_rank()} waits for rank 0 at {host}:{port} ({reason})"
            log.info(f"ranks: {now - began:.0f} s: {text}", extra=EVERY_RANK)
        time.sleep(RETRY_SEC)


def _describe_rank() -> str:
    return f"rank {dist.get_global_rank()} ({socket.gethostname()})"


# --- the check-in ---


def _check_in(store: TCPStore, limit_sec: float, more: str) -> None:
    """Write this rank's name into the store, and wait for the others'."""
    rank, num = dist.get_global_rank(), dist.get_world_size()
    store_keys = PrefixStore(f"easel/meeting/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    arrivals = store_keys.add(f"came/{rank}", 1)
    if arrivals > 1:
        first = json.loads(store_keys.get(str(rank)))["host"]
        problem = f"RANK: {rank} connected twice, from {first} and from {socket.gethostname()}"
        _end_for_all(store_keys, 2, f"{problem}. Give each machine its own composer --node_rank, from 0 on.")
    here = {"host": socket.gethostname(), "of": num, "local": dist.get_local_world_size()}
    store_keys.set(str(rank), json.dumps(here))
    if rank == 0:
        _hosts[:] = _gather(store_keys, num, limit_sec, more)
        store_keys.set("all", json.dumps(_hosts))
        return
    _compare_sizes(store_keys, json.loads(_wait_for_key(store_keys, "0", limit_sec)), here, rank)
    _hosts[:] = json.loads(_wait_for_key(store_keys, "all", 2 * limit_sec))


def _compare_sizes(
    store_keys: PrefixStore, at_first: Mapping[str, Any], at_other: Mapping[str, Any], other: int
) -> None:
    """Refuse ranks that do not count the same. `other`: the rank that is compared with rank 0."""
    if at_first["of"] != at_other["of"]:
        problem = f"WORLD_SIZE: {at_first['of']} at rank 0 ({at_first['host']}), {at_other['of']} at rank {other}"
        advice = "All machines need the same: composer --world_size, the ranks of all machines together"
        _end_for_all(store_keys, 2, f"{problem} ({at_other['host']}). {advice}.")


def _gather(store_keys: PrefixStore, num: int, limit_sec: float, more: str) -> list[str]:
    """Wait on rank 0 for all ranks, and return their machines. Raises Failed: which have not come."""
    missing, began, logged_at = list(range(num)), time.monotonic(), time.monotonic()
    while missing := [rank for rank in missing if not store_keys.check([str(rank)])]:
        _raise_if_ended(store_keys)
        now = time.monotonic()
        some = ", ".join(map(str, missing[:MAX_NAMED])) + (" and more" if len(missing) > MAX_NAMED else "")
        status = f"{num - len(missing)} of {num} ranks are there; missing: {some}"
        if now - began > limit_sec:
            text = f"ranks: after {limit_sec:g} s {status}. Start every machine with this MASTER_ADDR and MASTER_PORT"
            _end_for_all(store_keys, 1, f"{text}{more}.")
        if now - logged_at > LOG_INTERVAL_SEC:
            logged_at = now
            log.info(f"ranks: {now - began:.0f} s: {status}")
        time.sleep(POLL_SEC)
    ranks_info = [json.loads(store_keys.get(str(rank))) for rank in range(num)]
    for rank, each in enumerate(ranks_info):
        _compare_sizes(store_keys, ranks_info[0], each, rank)
    return [each["host"] for each in ranks_info]


def _wait_for_key(store_keys: PrefixStore, key: str, limit_sec: float) -> bytes:
    """Return what another rank writes. Raises Failed: it did not write in time."""
    began = time.monotonic()
    try:
        while not store_keys.check([key]):
            _raise_if_ended(store_keys)
            if time.monotonic() - began > limit_sec:
                raise Failed(f"ranks: timed out after {limit_sec:g} s waiting for rank 0. Start all machines again.")
            time.sleep(POLL_SEC)
        return store_keys.get(key)
    except DistNetworkError as error:
        raise Failed("ranks: rank 0 has ended before all had come; its own output says why.") from error


def _raise_if_ended(store_keys: PrefixStore) -> None:
    """Raise what another rank has ended for."""
    if store_keys.check(["ended"]):
        code, text = store_keys.get("ended").decode().split(" ", 1)
        time.sleep(STAY_SEC if dist.get_global_rank() == 0 else 0.0)  # the store is rank 0's
        raise ConfigError([text]) if code == "2" else Failed(text)


def _end_for_all(store_keys: PrefixStore, code: int, text: str) -> None:
    """Tell the others why this rank ends, and raise it."""
    store_keys.set("ended", f"{code} {text}")
    time.sleep(STAY_SEC)
    raise ConfigError([text]) if code == 2 else Failed(text)
