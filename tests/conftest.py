"""Fixtures and helpers: small real images in img2dataset's layout, a dataset of them, and commands with a time limit."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import json
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

# Before torch is loaded, here and in every command: beside one busy process on two cores a run in two threads was 40 times
# slower (each of its many small operations waits for the thread that waits for a core), in one thread not at all.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the real hub; tests/hub_server.py is another one

import numpy as np
import pytest
import warm_processes
from PIL import Image
from tqdm import tqdm

pytest_plugins = ("miniature", "hub_server")

ROOT = Path(__file__).resolve().parent.parent

TINY_RUN = ["model.preset=tiny", "image_size=64", "global_batch_size=8", "max_duration=4ba"]
TINY_RUN += ["measure.window_batches=2", "measure.warmup_batches=2", "loggers.progress_bar=false"]


def with_frames(family: str, size: tuple[int, int], variant: str = "stock") -> tuple[int, ...]:
    """Return a size of a family's pictures: of videos with three latent frames."""
    from families import load_family

    found = load_family(family, "tiny", variant)
    return size if found.num_frames is None else (*size, 1 + 2 * found.frames_per_latent)


def picture(number: int, size: tuple[int, int] = (80, 96), kind: str = "JPEG", mode: str = "RGB") -> bytes:
    """A gradient with a block of one colour: not noise, so that resizing and compression mean something."""
    width, height = size
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    pixels = np.stack([x, y, np.full_like(x, 37 * number % 256)], axis=-1).astype(np.uint8)
    pixels[: height // 3, : width // 3] = (number * 53 % 256, number * 101 % 256, 200)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, kind)
    return file.getvalue()


def sample_files(number: int, size: tuple[int, int] = (80, 96)) -> dict[str, bytes]:
    """The three files of one sample, by suffix."""
    metadata = {"url": f"https://example.invalid/{number}.jpg", "SAMPLE_ID": number}
    return {
        "jpg": picture(number, size),
        "txt": f"picture number {number}".encode(),
        "json": json.dumps(metadata).encode(),
    }


def write_tar(path: Path, samples: Mapping[str, Mapping[str, bytes]]) -> Path:
    """Write key -> suffix -> bytes as img2dataset does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key, files in samples.items():
            for suffix, content in files.items():
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


def in_child(function: Callable[[], int], limit_sec: float = 120.0) -> int:
    """Run in a forked process; return its exit code, or minus the signal that ended it."""

    def work() -> None:
        tqdm.set_lock(threading.RLock())  # tqdm's own is shared with this process: a killed child may hold it for good
        os._exit(function())

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(limit_sec)
    assert child.exitcode is not None, "hangs"
    return child.exitcode


def tree(folder: Path) -> dict[str, bytes]:
    """All files under a folder, hidden ones included: path in it -> content."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextlib.contextmanager
def started(*command: str, output: int = subprocess.DEVNULL, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A command in the project's root with this interpreter's programs first on the PATH, in a session of its own.

    Python's programs and Composer's launcher start warm, see tests/warm_processes.py.
    Whatever becomes of the test, nothing is left of it: neither a launcher's ranks nor their loader workers.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **variables}
    streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
    kind = warm_processes.Process if warm_processes.can_start(command) else subprocess.Popen
    with kind(command, cwd=ROOT, env=environment, text=True, start_new_session=True, **streams) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def run(*command: str, timeout: int = 500, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, see `started`."""
    with started(*command, output=subprocess.PIPE, **variables) as process:
        printed, said = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(command, process.returncode, printed, said)


IN_PART_1 = """
    adamw_kernel adopt bench_data bench_predecessor bench_scale benchmark buckets cache_space canonical_nodes checkpoints
    damaged_run_folder data encoders end_to_end eval_images evaluation export families faults flux_encodings hub
    interrupted_evaluation latents lora_runs masking metric_names miniature mixture mlperf_log moments order page parts
    profile reader reader_waits refused_starts resume sample_randomness sampling sharding shards shared_cache sources
    stop_signals tables third_party_weights validation video_dataset video_latents yamls
"""
PART_1 = set(IN_PART_1.split())
"""Tests that read datasets are in one half: those that compare with plain streaming share its shared memory. Some others
are there for balance."""

SLOW_IN_PART_2 = {"evaluation", "hub", "interrupted_evaluation", "validation", "yamls"}
"""Those of them whose slow tests are in the other half where that has shared memory of its own: so both take equally long."""


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "one half of the tests: `make test` runs both at once; those that read datasets are all in the first"
    parser.addoption("--part", choices=("1", "2"), help=text)
    parser.addoption("--apart", action="store_true", help="the second half has its own /dev/shm and temporary folder")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if part := config.getoption("--part"):
        moved = SLOW_IN_PART_2 if config.getoption("--apart") else set()

        def part_of(item: pytest.Item) -> str:
            name = item.path.stem.removeprefix("test_")
            return "2" if name not in PART_1 or (name in moved and item.get_closest_marker("slow")) else "1"

        others = [item for item in items if part_of(item) != part]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what is imported by now from the garbage collector, which took an eighth of the tests' time to look at it."""
    files = {item.module for item in session.items if isinstance(item, pytest.Function)}
    if any(vars(file).get("run") is run or vars(file).get("started") is started for file in files):
        warm_processes.begin()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def cache_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests share what they keep, and read nothing that their user has kept."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def made_up_cost() -> Iterator[None]:
    """Give every step in this process a made-up cost: tracing a network takes seconds for each set of keys."""
    if "training.builders" not in sys.modules:
        yield
        return
    import training.builders
    from training.memory import Cost

    cost = Cost(
        trained_parameters=10**6,
        frozen_parameters=10**6,
        flops_per_image=1e9,
        activation_gib_per_image=1e-3,
        activation_gib_once=0.0,
        frozen_gib=0.01,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.builders, "traced_cost", lambda *given, **ways: cost)
        yield


@pytest.fixture
def traced_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the estimate: the network is traced."""
    import training.builders
    from training.memory import measure_cost

    monkeypatch.setattr(training.builders, "traced_cost", functools.cache(measure_cost))


@pytest.fixture
def same_number_of_threads() -> Iterator[None]:
    """For tests that call a command which sets torch's threads for its whole process."""
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def nothing_stays_hidden() -> Iterator[None]:
    """Forget what stood behind `${...}` in a test: a process keeps it to its end, and the next test may say the same path."""
    yield
    if masking := sys.modules.get("common.masking"):
        masking._values.clear()


@pytest.fixture(scope="module", autouse=True)
def no_shared_memory_is_left_open() -> Iterator[None]:
    """Close what plain streaming keeps open to the end of a process: six files for each dataset, and there are hundreds."""
    yield
    memory = sys.modules.get("streaming.base.shared.memory")
    for each in gc.get_objects() if memory else ():
        if type(each) is memory.SharedMemory:
            with contextlib.suppress(BufferError, FileNotFoundError):  # still in use; or another process's, and gone
                each.cleanup()
                atexit.unregister(each.cleanup)
    gc.collect()
    gc.freeze()  # as above, what a file has left


@pytest.fixture(scope="session")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tars of 24 images each, of mixed sizes."""
    folder = tmp_path_factory.mktemp("tars")
    sizes = [(80, 96), (128, 64), (64, 64), (200, 150)]
    for tar in range(2):
        numbers = range(24 * tar, 24 * (tar + 1))
        write_tar(folder / f"{tar:05d}.tar", {f"{n:09d}": sample_files(n, sizes[n % 4]) for n in numbers})
    return folder


@pytest.fixture(scope="session")
def stage(tars: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset `images` of `tars`."""
    from prepare import shards

    out = tmp_path_factory.mktemp("stage") / "images"
    assert shards.main([str(tars), str(out), "shard_size=32kb"]) == 0
    return out


@pytest.fixture(scope="session")
def store() -> Iterator[tuple[Any, dict[str, str]]]:
    """An S3 server on loopback (moto's) with a bucket `easel`: a client of it, and the variables that lead to it."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url, keys = f"http://{host}:{port}", {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)
    client.create_bucket(Bucket="easel")
    variables = {"S3_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"}
    yield client, variables | {name.upper(): value for name, value in keys.items()}
    server.stop()


@pytest.fixture
def in_store(store, monkeypatch) -> Callable[[Path, str], str]:
    """Puts the files of a folder into the store, and returns their address."""
    client, variables = store
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def put(folder: Path, prefix: str) -> str:
        for name, content in tree(folder).items():
            client.put_object(Bucket="easel", Key=f"{prefix}/{name}", Body=content)
        return f"s3://easel/{prefix}"

    return put


@pytest.fixture
def indexes_fetched(caplog) -> Callable[[], list[str]]:
    """Returns the paths of each index.json that the store was asked for since the last call."""
    caplog.set_level(logging.INFO, logger="werkzeug")

    def fetched() -> list[str]:
        found = [said[1] for text in caplog.messages if (said := re.search(r'"GET (\S+/index\.json) ', text))]
        caplog.clear()
        return found

    return fetched
