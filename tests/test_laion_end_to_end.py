"""prepare.laion all: from a small local internet to tars, killed and continued."""

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


@pytest.fixture(scope="module")
def way(tmp_path_factory) -> Iterator[SimpleNamespace]:
    """Starts the command in a folder by name, and lists what it has made."""
    folder = tmp_path_factory.mktemp("laion")
    variables = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "CUDA_VISIBLE_DEVICES": ""}
    with internet() as hosts:
        write_table(folder / "files", hosts, 2, 90)
        yaml = folder / "way.yaml"
        yaml.write_text(YAML.format(address=hosts.url("")[:-1]))

        def words(name: str, *more: str) -> list[str]:
            return ["python", "-m", "prepare.laion", "all", str(yaml), f"folder={folder / name}", *more]

        def files(name: str) -> dict[str, bytes]:
            return {path: content for path, content in tree(folder / name).items() if "/.work/" not in path}

        @contextlib.contextmanager
        def stopped_at(name: str, num: int, *more: str, **options: int) -> Iterator[subprocess.Popen]:
            """Start the command, and wait until it has made so many files; os.walk accepts files that disappear."""
            with started(*words(name, *more), **options, **variables) as process:
                until = time.monotonic() + LIMIT_SEC
                while process.poll() is None and time.monotonic() < until:
                    walked = os.walk(folder / name)
                    if sum(len(names) for place, _, names in walked if ".work" not in place) >= num:
                        break
                    time.sleep(0.05)
                assert process.poll() is None, num
                yield process

        yield SimpleNamespace(words=words, files=files, stopped_at=stopped_at, variables=variables)


@pytest.fixture(scope="module")
def unbroken(way) -> SimpleNamespace:
    done = run(*way.words("unbroken"), timeout=LIMIT_SEC, **way.variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return SimpleNamespace(said=done.stdout, files=way.files("unbroken"))


def test_killed_three_times_it_ends_with_the_same_tars(way, unbroken):
    draw = random.Random(os.environ.get("EASEL_SEED", "27"))
    for num in sorted(draw.sample(range(1, len(unbroken.files) - 2), 3)):
        with way.stopped_at("killed", num) as process:
            process.send_signal(signal.SIGKILL)
            process.wait(30)
            time.sleep(2)  # its children end with it, before the test's own end would end them
    done = run(*way.words("killed"), timeout=LIMIT_SEC, **way.variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert way.files("killed") == unbroken.files
    assert done.stdout.splitlines()[-1] == unbroken.said.splitlines()[-1]
    assert unbroken.said.splitlines()[-1].startswith("all 180 rows are accounted for: ")
