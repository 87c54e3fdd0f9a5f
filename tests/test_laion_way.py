"""prepare.laion all: from a small local internet into an object store, killed and continued, on one and on two nodes."""

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
from internet import internet, write_table

from tests.store.server import BUCKET, Store

pytest.importorskip("img2dataset")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900, func_only=True)]

LIMIT_SEC = 400
YAML = """
workers: 2
ranks: 2
metadata: {{urls: "{address}/files/part-{{part:05d}}.parquet", num_parts: 2}}
filter: {{licenses: not ?, min_side_px: 32, unique: url, rows_per_tar: 20}}
images: {{threads: 8, timeout_sec: 5, most_sec: 1, most_mib: 1, allow_private: true}}
shards: {{shard_size: 16kb}}
latents: {{image_size: 64, shard_size: 64kb, model: {{preset: tiny, weights: random}}}}
"""


@pytest.fixture
def way(tmp_path) -> Iterator[SimpleNamespace]:
    """Starts the command with a name of its own, and says what it has made."""
    store = Store(tmp_path / "server")
    variables = {**store.environment(), "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "CUDA_VISIBLE_DEVICES": ""}
    with contextlib.closing(store), internet(tmp_path / "files") as hosts:
        store.start()
        client = store.client
        write_table(tmp_path / "files", hosts.address, 2, 90)
        yaml = tmp_path / "way.yaml"
        yaml.write_text(YAML.format(address=hosts.address))

        def words(name: str, *more: str) -> list[str]:
            places = [f"{stage}_at=s3://easel/{name}/{stage}" for stage in ("images", "moments")]
            return ["python", "-m", "prepare.laion", "all", str(yaml), f"folder={tmp_path / name}", *places, *more]

        def objects(name: str) -> dict[str, str]:
            listed = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{name}/").get("Contents", [])
            return {one["Key"].removeprefix(f"{name}/"): one["ETag"] for one in listed}

        def files(name: str) -> dict[str, bytes]:
            return {path: content for path, content in tree(tmp_path / name).items() if "/.work/" not in path}

        def made(name: str) -> int:
            """How many files and objects there are; os.walk bears that others go meanwhile."""
            walked = os.walk(tmp_path / name)
            return sum(len(names) for place, _, names in walked if ".work" not in place) + len(objects(name))

        yield SimpleNamespace(words=words, objects=objects, files=files, made=made, variables=variables)


def same_but_for_addresses(files: dict[str, bytes]) -> dict[str, bytes]:
    """Plans and tables name nothing but what is the same in each run, but for what fetching remembers of times."""
    return {path: content for path, content in files.items() if not path.startswith("metadata/.")}


@pytest.fixture
def unbroken(way) -> SimpleNamespace:
    done = run(*way.words("unbroken"), timeout=LIMIT_SEC, **way.variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return SimpleNamespace(said=done.stdout, objects=way.objects("unbroken"), files=way.files("unbroken"))


def check_same(way: SimpleNamespace, unbroken: SimpleNamespace, name: str) -> None:
    assert way.objects(name) == unbroken.objects
    assert same_but_for_addresses(way.files(name)) == same_but_for_addresses(unbroken.files)


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


def test_killed_three_times_it_ends_with_the_same_shards_and_a_run_trains_from_them(way, unbroken, tmp_path):
    total = len(unbroken.files) + len(unbroken.objects)
    draw = random.Random(os.environ.get("EASEL_SEED", "27"))
    for num in sorted(draw.sample(range(1, total - 2), 3)):
        with killed_at(way, "killed", num) as goes_on:
            assert goes_on, num
    done = run(*way.words("killed"), timeout=LIMIT_SEC, **way.variables)
    assert done.returncode == 0, done.stdout + done.stderr
    check_same(way, unbroken, "killed")
    assert done.stdout.splitlines()[-1] == unbroken.said.splitlines()[-1]
    assert unbroken.said.splitlines()[-1].startswith("all 180 rows are accounted for: ")
    keys = ["model.preset=tiny", "model.weights=random", "image_size=64", "max_duration=2ba"]
    keys += ["global_batch_size=8", "device_train_microbatch_size=4"]
    keys += ["data.stage=moments", "data.remote=s3://easel/killed/moments", f"data.local={tmp_path / 'local'}"]
    keys += [f"run_folder={tmp_path / 'runs'}", "run_name=a"]
    trained = run("composer", "-n", "2", "benchmark.py", *keys, timeout=LIMIT_SEC, **way.variables)
    assert trained.returncode == 0 and "images_per_sec=" in trained.stdout, trained.stderr


def test_through_two_nodes_of_which_one_dies_it_ends_with_the_same_shards(way, unbroken):
    pytest.importorskip("ray")
    from test_engines import two_nodes

    total = len(unbroken.files) + len(unbroken.objects)
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
    check_same(way, unbroken, "nodes")
