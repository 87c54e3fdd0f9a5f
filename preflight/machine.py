"""Checks of a machine before a run: memory, shared memory, ports, variables. They change nothing.

Each check returns its findings; `python -m prepare.doctor` prints them. Memory in GiB (2**30 bytes).
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cli.memory import host_bytes
from config import count
from stages import batch_memory, shared_memory
from stages.shared_memory import LOCK_FILE

OK, WARNING, ERROR = "OK", "warning", "error"

WORKER_GIB = 0.3  # private memory of a loader worker of SD2: 230 MiB at 64 px and 8 images, 287 at 512 px and 32 (seen)
ORDER = "an epoch's order"  # a kind of memory
FEWER_SAMPLES = "read fewer samples in an epoch: data.streams=[{remote: ..., choose: N}]"
FILES_OF_A_TRAINER, FILES_A_WORKER = 256, 32  # 49 were open with two workers, plus one per tensor in transfer


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's output: `level` is OK, warning or error; `check` is the check's name."""

    level: str
    check: str
    text: str


@dataclass(frozen=True)
class OrderNeed:
    """What the order of an epoch takes on this machine (stages/shuffling.py)."""

    samples: int
    shared_gib: float
    """Of /dev/shm, while an epoch begins."""
    gib: float
    """Of its memory, at most: the next epoch's, made ahead, included."""


# --- memory of the host ---


def host_memory(gib_by_kind: Mapping[str, float]) -> list[Finding]:
    """Compare the estimated host memory of this machine's processes with what is available.

    Args:
        gib_by_kind: purpose -> GiB, over all ranks of this machine.
    """
    total, free = _host_gib()
    need = sum(gib_by_kind.values())
    parts = ", ".join(f"{kind} {gib:.1f}" for kind, gib in gib_by_kind.items() if gib >= 0.05)
    given = f"about {need:.1f} GiB beside the step" + (f" ({parts})" if parts else "")
    there = f"this machine has {total:.1f}, {free:.1f} of it free now"
    if need > total:
        way = FEWER_SAMPLES if gib_by_kind.get(ORDER, 0.0) > need / 2 else "fewer ranks here"
        return [Finding(ERROR, "host memory", f"{given}; {there}. Lower data.workers, or {way}.")]
    if need > free:
        return [Finding(WARNING, "host memory", f"{given}; {there}. End what takes it, or lower data.workers.")]
    return [Finding(OK, "host memory", f"{given}; {there}")]


def _host_gib() -> tuple[float, float]:
    """Return (total, free now), GiB."""
    total, free = host_bytes()
    return total / 2**30, free / 2**30


def batches_on_their_way(workers: int) -> int:
    """Return the number of one rank's batches in shared memory at once: what each worker keeps, and two in use."""
    return batch_memory.KEPT * workers + 2 if workers else 0


def shared_memory_room(batch_gib: float, num_batches: int, order: OrderNeed | None = None) -> list[Finding]:
    """Check the size of /dev/shm, where workers pass batches on, and an epoch's order lies at its start; Docker: 64 MB.

    Args:
        batch_gib: size of one rank's batch.
        num_batches: over all ranks of this machine, see `batches_on_their_way`.
        order: what the order of an epoch takes.
    """
    folder, name = shared_memory.SEGMENTS, "/dev/shm"
    if not folder.is_dir():
        return [
            Finding(ERROR, name, f"{folder} is not there: loader workers and streaming need it. Mount a tmpfs there.")
        ]
    if not os.access(folder, os.W_OK):
        return [
            Finding(ERROR, name, f"{folder} cannot be written: streaming needs it. Mount it writable for this user.")
        ]
    room = os.statvfs(folder)
    size, free = room.f_blocks * room.f_frsize / 2**30, room.f_bavail * room.f_frsize / 2**30
    of_batches, of_order = batch_gib * num_batches, order.shared_gib if order else 0.0
    need = of_batches + of_order
    if need > free:
        free += sum(map(_held_bytes, shared_memory.dead_segments().values())) / 2**30  # the run removes them
    parts = [f"{num_batches} batches of {batch_gib:.3g} GiB"] if num_batches else []
    parts += [f"the order of {order.samples:,} samples ({of_order:.3g} GiB)"] if order and of_order > need / 100 else []
    given = f"{' and '.join(parts) or 'no batches'}: {need:.3g} GiB there; {size:.3g} GiB, {free:.3g} free"
    way = "lower data.workers" if of_batches >= of_order else FEWER_SAMPLES
    more = f"Enlarge it (docker run --shm-size=16g or --ipc=host, mount -o remount,size=16g /dev/shm), or {way}"
    if need > free:
        ends = "A worker would die of a bus error" if of_batches >= of_order else "The run would end at its first batch"
        return [Finding(ERROR, name, f"{given}. {ends}. {more}.")]
    if need > 0.5 * free:
        return [Finding(WARNING, name, f"{given}: little more than that. {more}.")]
    return [Finding(OK, name, given)]


def stale_segments(locals_: Sequence[str]) -> list[Finding]:
    """Look for shared memory left by streaming runs that have ended; removes nothing.

    Args:
        locals_: the folders of this run's shards; two runs may not share one.
    """
    for local in locals_:
        if shared_memory.is_held(Path(local, LOCK_FILE)):
            text = f"data.local: {local} is in use by another run here"
            return [Finding(ERROR, "segments", f"{text}. Wait for it, or give another data.local.")]
    dead = shared_memory.dead_segments()
    if not dead:
        num = len(shared_memory.by_number(shared_memory.SEGMENTS))
        alive = f"{num} in use by other runs or programs" if num else "none in shared memory"
        return [Finding(OK, "segments", alive)]
    held_mib = sum(map(_held_bytes, dead.values())) / 2**20
    named = ", ".join(sorted(dead)[:3]) + (f" and {len(dead) - 3} more" if len(dead) > 3 else "")
    left = f"{named} ({held_mib:.1f} MiB) are left in shared memory by runs that are gone"
    return [Finding(WARNING, "segments", f"{left}. The next run on streamed data removes them.")]


def _held_bytes(segments: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in segments if path.exists())


def open_files(workers: int) -> list[Finding]:
    """Compare the limit of open files with the number that a trainer and its workers need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = FILES_OF_A_TRAINER + FILES_A_WORKER * workers
    given = f"{need} may be open at once with {count(workers, 'worker')}, the limit is {soft}"
    if soft == resource.RLIM_INFINITY or need <= soft:
        return [Finding(OK, "open files", given)]
    todo = f"ulimit -n {max(need, 4096) if hard in (resource.RLIM_INFINITY, -1) else min(hard, max(need, 4096))}"
    return [Finding(ERROR, "open files", f"{given}. Raise it before the start ({todo}), or lower data.workers.")]


# --- between ranks and machines ---


def rendezvous(num_ranks: int) -> list[Finding]:
    """Check MASTER_ADDR and MASTER_PORT: the name has to resolve, and on node 0 the port has to be free."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host is None or port is None:
        if num_ranks > 1 and (host or port):
            missing = "MASTER_ADDR" if host is None else "MASTER_PORT"
            return [Finding(ERROR, "port", f"{missing} is not set, the other is. Set both, or let composer -n do it.")]
        return [Finding(OK, "port", "MASTER_ADDR and MASTER_PORT are not set: composer -n sets them")]
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        return [Finding(ERROR, "port", f"MASTER_PORT={port} is not a port. Possible: 1 to 65535; above 1023 is usual.")]
    try:
        family, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        text = f"MASTER_ADDR={host} does not resolve: {reason}. Give the name or address of the machine of rank 0."
        return [Finding(ERROR, "port", text)]
    where = f"MASTER_ADDR={host} is {address[0]}"
    if _node() != 0:
        return [Finding(OK, "port", f"{where}; that port {port} answers is known when node 0 runs")]
    try:
        _bind(family, (address[0], 0))
    except OSError:
        text = f"{where}, no address of this machine, which is node 0. Give this one's, or set NODE_RANK."
        return [Finding(ERROR, "port", text)]
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return [Finding(OK, "port", f"{where}; the launcher holds port {port}")]
    try:
        _bind(family, ("", int(port)))
    except OSError as error:
        reason = "in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
        text = f"MASTER_PORT={port} cannot be taken here: {reason}. Give another one (composer --master_port)."
        return [Finding(ERROR, "port", text)]
    return [Finding(OK, "port", f"{where}, port {port} is free")]


def _node() -> int:
    """Return this machine's node rank."""
    for variable in ("NODE_RANK", "GROUP_RANK"):
        if os.environ.get(variable, "").isdecimal():
            return int(os.environ[variable])
    rank, local_rank = (os.environ.get(variable, "0") for variable in ("RANK", "LOCAL_RANK"))
    return 0 if rank == local_rank else 1


def _bind(family: int, address: tuple[str, int]) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ports of ended connections count as free
        server.bind(address)


# --- variables ---

SHOWN = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "S3_ENDPOINT_URL")
SHOWN_BEGINNINGS = ("NCCL_", "TORCH_NCCL_", "GLOO_", "MASTER_")
CHANGES = {  # name -> its effect on a run if it is not 0
    "NVIDIA_TF32_OVERRIDE": "decides about TF32, whatever `precision` says",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "turns TF32 on, whatever `precision` says",
    "CUDA_LAUNCH_BLOCKING": "makes every kernel wait: for debugging, not for measuring speed",
    "NCCL_P2P_DISABLE": "keeps a machine's GPUs from communicating directly: slow",
    "NCCL_SHM_DISABLE": "keeps ranks from sharing memory: slow",
    "NCCL_IB_DISABLE": "keeps machines from using InfiniBand: slow",
    "TORCH_NCCL_BLOCKING_WAIT": "makes the host wait for every collective: slow",
}
CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


def variables(remotes: Sequence[str]) -> list[Finding]:
    """Report environment variables that affect a run; values of credentials are not shown.

    Args:
        remotes: places of the stages.
    """
    found = []
    for name, what in CHANGES.items():
        if os.environ.get(name, "0") not in ("", "0"):
            text = f"{name}={os.environ[name]} {what}. Take it out of the environment, unless that is meant."
            found.append(Finding(WARNING, "variables", text))
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        found += _interface_problem(name)
    in_s3 = [remote for remote in remotes if urlsplit(remote).scheme == "s3"]
    if in_s3 and not _has_credentials():
        text = f"no AWS credentials here for {', '.join(in_s3)}: only a role of the machine would do"
        text += ". Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE."
        found.append(Finding(WARNING, "variables", text))
    shown = {n: v for n, v in sorted(os.environ.items()) if n in SHOWN or n.startswith(SHOWN_BEGINNINGS)}
    listed = ", ".join(f"{name}={value.rpartition('@')[2]}" for name, value in shown.items())
    return found or [Finding(OK, "variables", listed or "none of those that change a run")]


def _interface_problem(name: str) -> list[Finding]:
    """Check that a network interface exists; else the first collective hangs or fails (NCCL: a list of prefixes)."""
    given = os.environ.get(name, "")
    there = [interface for _, interface in socket.if_nameindex()]
    if not given or given.startswith("^"):
        return []
    exact = name.startswith("GLOO") or given.startswith("=")
    for wanted in given.removeprefix("=").split(","):
        if any(has == wanted if exact else has.startswith(wanted) for has in there):
            return []
    text = f"{name}={given} names no network interface of this machine. There are: {', '.join(there)}. Use one, or unset it."
    return [Finding(ERROR, "variables", text)]


def _has_credentials() -> bool:
    if any(os.environ.get(name) for name in CREDENTIALS):
        return True
    files = (os.environ.get("AWS_SHARED_CREDENTIALS_FILE"), os.environ.get("AWS_CONFIG_FILE"))
    return any(Path(f).expanduser().is_file() for f in (*files, "~/.aws/credentials", "~/.aws/config") if f)


def free_gib(folder: Path) -> tuple[float, int | None]:
    """Return the free space on the disk that a folder is or would be on: GiB, and number of files (None: no limit)."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    room = os.statvfs(there)
    return shutil.disk_usage(there).free / 2**30, room.f_favail if room.f_files else None
