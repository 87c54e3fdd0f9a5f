"""prepare.laion all: from a small local internet to tars, killed and continued, on one and on two nodes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from conftest import run, started, tree
from local_internet import internet, write_table

pytest.importorskip("img2dataset")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900, func_only=True)]

LIMIT_SEC = 400
YAML = """
workers: 2
metadata: {{urls: "{address}/files/part-{{part:05d}}.parquet", num_parts: 2}}
filter: {{licenses: not ?, min_side_px: 32, unique: url, rows_per_tar: 20}}
images: {{threads: 8, timeout_sec: 5, most_sec: 1, most_mib: 1, allow_private: true}}
"""


@pytest.fixture
def way(tmp_path) -> Iterator[SimpleNamespace]:
    """Starts the command in a folder by name, and lists what it has made."""
    variables = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "CUDA_VISIBLE_DEVICES": ""}
    with internet(tmp_path / "files") as hosts:
        write_table(tmp_path / "files", hosts.address, 2, 90)
        yaml = tmp_path / "way.yaml"
        yaml.write_text(YAML.format(address=hosts.address))

        def words(name: str, *more: str) -> list[str]:
            return ["python", "-m", "prepare.laion", "all", str(yaml), f"folder={tmp_path / name}", *more]

        def files(name: str) -> dict[str, bytes]:
            return {path: content for path, content in tree(tmp_path / name).items() if "/.work/" not in path}

        def made(name: str) -> int:
            """The number of files; os.walk accepts files that disappear."""
            walked = os.walk(tmp_path / name)
            return sum(len(names) for place, _, names in walked if ".work" not in place)

        yield SimpleNamespace(words=words, files=files, made=made, variables=variables)


@pytest.fixture
def unbroken(way) -> SimpleNamespace:
    done = run(*way.words("unbroken"), timeout=LIMIT_SEC, **way.variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return SimpleNamespace(said=done.stdout, files=way.files("unbroken"))


@contextlib.contextmanager
def killed_at(way: SimpleNamespace, name: str, num: int, *more: str) -> Iterator[bool]:
    """Start the command, and kill it alone when it has made so many things; yield whether it still went on then."""
    with started(*way.words(name, *more), **way.variables) as process:
        until = time.monotonic() + LIMIT_SEC
        while way.made(name) < num and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        goes_on = process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        time.sleep(2)  # its children end with it, before the test's own end would end them
        yield goes_on


def test_killed_three_times_it_ends_with_the_same_tars(way, unbroken):
    total = len(unbroken.files)
    draw = random.Random(os.environ.get("EASEL_SEED", "27"))
    for num in sorted(draw.sample(range(1, total - 2), 3)):
        with killed_at(way, "killed", num) as goes_on:
            assert goes_on, num
    done = run(*way.words("killed"), timeout=LIMIT_SEC, **way.variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert way.files("killed") == unbroken.files
    assert done.stdout.splitlines()[-1] == unbroken.said.splitlines()[-1]
    assert unbroken.said.splitlines()[-1].startswith("all 180 rows are accounted for: ")


def test_through_two_nodes_of_which_one_dies_it_ends_with_the_same_tars(way, unbroken):
    pytest.importorskip("ray")
    from test_engines import two_nodes

    total = len(unbroken.files)
    with two_nodes(way.variables) as cluster:
        more = ["engine=ray", f"ray={cluster.address}"]
        with started(*way.words("nodes", *more), output=subprocess.PIPE, **way.variables) as process:
            until = time.monotonic() + LIMIT_SEC
            while way.made("nodes") < total // 2 and process.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            assert process.poll() is None
            cluster.lose_one()
            printed, said = process.communicate(timeout=LIMIT_SEC)
            assert process.returncode == 0, printed + said
    assert way.files("nodes") == unbroken.files
