"""prepare/engines.py, cluster.py: parts made by processes of this machine, and by a Ray cluster whose nodes and workers die.

What needs Ray runs where it is installed: `make test-cluster`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import sample_files, tree, write_tar
from test_parts import bucket, objects  # noqa: F401  bucket is a fixture

from common.errors import Failed, Refused
from prepare import addresses, engines, shards
from prepare.engines import EngineKeys

os.environ.update(engines.RAY_VARIABLES)  # before Ray is loaded

pytestmark = [pytest.mark.usefixtures("same_number_of_threads"), pytest.mark.timeout(300, func_only=True)]

LOCAL = EngineKeys()


# --- this machine ---


def squares(marks: Path) -> Callable[[int], int]:
    (marks / f"{os.getpid()}").touch()
    return lambda number: number**2


@pytest.mark.parametrize("workers", [1, 3])
def test_processes_make_every_number_once_and_each_starts_once(tmp_path, workers):
    with LOCAL.open_engine(functools.partial(squares, tmp_path), workers) as engine:
        assert sorted(engine.run(range(20))) == [(number, number**2) for number in range(20)]
        assert list(engine.run([])) == []
    pids = {int(path.name) for path in tmp_path.iterdir()}
    assert pids == {os.getpid()} if workers == 1 else 1 <= len(pids) <= workers and os.getpid() not in pids


def failing(number: int) -> int:
    if number == 3:
        raise Failed("SOURCE: the disk is gone.")
    if number == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([1, 2, 3], "SOURCE: the disk is gone."),
        ([4, 5], "workers: one was killed, perhaps for want of memory. Finished work is "),
    ],
)
def test_what_ends_a_process_is_told_as_it_is(numbers, text):
    with pytest.raises(Failed, match=f"^{text}"), LOCAL.open_engine(lambda: failing, 2) as engine:
        list(engine.run(numbers))


def test_a_ray_cluster_is_refused_where_the_engine_is_local(tars, tmp_path, capsys):
    assert shards.main([str(tars), str(tmp_path / "out"), "ray=10.0.0.1:6379"]) == 2
    message = "ray: 10.0.0.1:6379 is given, but engine is local. Give engine=ray, or leave it out."
    assert capsys.readouterr().err.startswith(message) and not (tmp_path / "out").exists()


# --- a cluster ---


@contextlib.contextmanager
def nodes_of_ray(count: int) -> Iterator[SimpleNamespace]:
    """A cluster of Ray's own utilities: a head that makes nothing, and so many nodes with one core."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
        try:
            for _ in range(count):
                made.add_node(num_cpus=1, **small)
            yield SimpleNamespace(
                address=made.address,
                words=["engine=ray", f"ray={made.address}"],
                keys=EngineKeys("ray", made.address),
                add=lambda **more: made.add_node(**{"num_cpus": 1, **small, **more}),
                remove=functools.partial(made.remove_node, allow_graceful=False),
            )
        finally:
            ray.shutdown()
            made.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[SimpleNamespace]:
    """A cluster with one node."""
    ray = pytest.importorskip("ray")
    with nodes_of_ray(1) as made:
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # its functions are not on the nodes
        yield made


def held_start(start: Callable, begun: Path, gate: Path) -> Callable:
    """In a worker: the last file of a part is put when the gate is open, and not before."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    for kind in (addresses.Folder, addresses.Store):

        def held(self, name, file, put=kind.put):
            if name.endswith("/part.json"):
                (begun / f"{name.split('/')[0]} {node} {os.getpid()}").touch()
                while not gate.exists():
                    time.sleep(0.02)
            put(self, name, file)

        kind.put = held
    return start()


@contextlib.contextmanager
def a_node_dies(nodes: SimpleNamespace, folder: Path) -> Iterator[Callable[[], set[str]]]:
    """Kill one of two nodes while each has all but the last file of a part. Yields the parts that were begun on both."""
    begun, gate = folder / "begun", folder / "gate"
    begun.mkdir(parents=True)
    doomed = nodes.add()

    def seen() -> list[list[str]]:
        return [path.name.split() for path in begun.iterdir()]

    def parts_of() -> list[set[str]]:
        return [{part for part, of, _ in seen() if of == node} for node in {node for _, node, _ in seen()}]

    def kill() -> None:
        deadline = time.monotonic() + 200
        while len(parts_of()) < 2 and time.monotonic() < deadline and not gate.exists():
            time.sleep(0.05)
        nodes.remove(doomed)
        pids = {pid for _, node, pid in seen() if node == doomed.node_id}
        while any(Path("/proc", pid).exists() for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)  # a worker outlives its node by a second
        gate.touch()

    ray_engine = engines.RayEngine

    def held(ray, start, *more):
        return ray_engine(ray, functools.partial(held_start, start, begun, gate), *more)

    thread = threading.Thread(target=kill)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "RayEngine", held)
        thread.start()
        try:
            yield lambda: set.intersection(*parts_of())
        finally:
            gate.touch()
            thread.join()
    assert len(parts_of()) == 2, seen()


@pytest.fixture(scope="module")
def many_tars(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tars")
    for tar in range(5):
        write_tar(folder / f"{tar:05d}.tar", {f"{8 * tar + n:09d}": sample_files(8 * tar + n) for n in range(8)})
    (folder / "00003.tar").write_bytes((folder / "00003.tar").read_bytes()[:20_000])
    return folder


def test_short_shards_on_two_nodes_of_which_one_dies_are_those_of_one_machine(nodes, many_tars, tmp_path, capfd):
    assert shards.main([str(many_tars), str(tmp_path / "local"), "workers=1"]) == 1  # a tar is cut off
    capfd.readouterr()
    with a_node_dies(nodes, tmp_path / "held") as made_on_both:
        assert shards.main([str(many_tars), str(tmp_path / "out"), *nodes.words]) == 1
        assert made_on_both()
    assert tree(tmp_path / "out") == tree(tmp_path / "local")
    printed = capfd.readouterr()
    [last] = printed.out.splitlines()
    again = r"ray: part-0000\d: its worker or its node died \(Actor\w+Error\)\. It is tried again\.\n"
    assert last.startswith("found ") and re.search(again, printed.err)
    waiting = r"ray: no worker has started yet[^\r\n]*"  # on a busy machine
    assert "ray" not in re.sub(f"{again}|{waiting}|5 parts", "", printed.err)


def ending(folder: Path) -> Callable[[int], str]:
    """Numbers, and how the making of each ends."""

    def make(number: int) -> str:
        if number == 1 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        errors = {3: Failed("SOURCE: it is gone."), 4: Refused("OUT: no."), 5: PermissionError(13, "denied", "/x")}
        if number in errors:
            raise errors[number]
        return [][0] if number == 6 else f"{number} {os.environ['S3_ENDPOINT_URL']} {Path.cwd()}"

    return make


def test_a_killed_worker_is_tried_again_and_errors_come_back_as_they_are(nodes, tmp_path, monkeypatch):
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setattr(engines, "MAX_RETRIES", 1)
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    with nodes.keys.open_engine(functools.partial(ending, tmp_path)) as engine:
        assert signal.getsignal(signal.SIGTERM) is handler
        assert sorted(engine.run([1, 7])) == [(n, f"{n} http://127.0.0.1:1 {tmp_path}") for n in (1, 7)]
        assert (tmp_path / "killed").exists()
        at = r" \[part-0000{}, node [\d.]+\]"
        for number, kind, text in [
            (3, Failed, r"SOURCE: it is gone\."),
            (4, Refused, r"OUT: no\."),
            (5, OSError, r"\[Errno 13\] denied: '/x'"),
            (6, RuntimeError, "IndexError: list index out of range"),
        ]:
            with pytest.raises(kind, match=rf"^{text}{at.format(number)}(\n|$)") as error:
                list(engine.run([number]))
            assert type(error.value) is kind and (number != 6 or "return [][0]" in error.value.__notes__[0])
        with pytest.raises(Failed, match=r"^ray: part-00002: its worker died, 2 times: .* Finished work is kept; "):
            list(engine.run([2]))


def test_a_cluster_that_is_not_there_is_refused_in_seconds(tars, tmp_path, capsys):
    pytest.importorskip("ray")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and does not listen
        address, started = f"127.0.0.1:{held.getsockname()[1]}", time.monotonic()
        assert shards.main([str(tars), str(tmp_path / "out"), "engine=ray", f"ray={address}"]) == 2
    assert time.monotonic() - started < 60
    message = f"ray: no cluster at {address} (ConnectionRefusedError: [Errno 111] Connection refused). "
    assert capsys.readouterr().err.startswith(message)
    assert not (tmp_path / "out").exists()
