"""prepare/doctor.py and preflight/checks.py: faults planted one at a time, each named by its check and by no other."""

from __future__ import annotations

import collections
import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import socket
import tempfile
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import tree
from filelock import FileLock

from common import host_memory
from common.command_line import parse_command_line
from config import load
from mds.dataset import write_metadata
from mds.stores import explain_store_error
from preflight import checks
from preflight.checks import ERROR, OK, WARNING
from prepare.doctor import main
from training import memory
from training.config import ALIASES, RunConfig

GIB = 2**30

# Slow: each of some sixty faults is a whole examination.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(60, func_only=True)]

CHECKS = {
    *("versions", "variables", "devices", "store", "config", "weights", "/dev/shm", "memory", "host memory"),
    *("schedule", "disk", "run"),
}


@pytest.fixture(autouse=True)
def a_machine_of_our_own(tmp_path, monkeypatch):
    """Temporary files and shared memory in the test's folder; no variable of a launcher, a store or a network."""
    for name in [*os.environ]:
        if name.startswith(("AWS_", "S3_", "MASTER_", "NCCL_", "GLOO_", *checks.CHANGES)):
            monkeypatch.delenv(name)
    for folder in ("tmp", "shm"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(checks, "SHARED_MEMORY", tmp_path / "shm")


@pytest.fixture
def healthy(stage, tmp_path):
    """The words of a run that nothing is wrong with; a later word replaces an earlier one."""
    words = ["model.preset=tiny", "model.weights=random", "image_size=64", "global_batch_size=8", "max_duration=4ba"]
    words += [f"data.remote={shutil.copytree(stage, tmp_path / 'stage')}", f"data.local={tmp_path / 'local'}"]
    words += ["data.workers=2", f"run_folder={tmp_path / 'runs'}", "run_name=one", "measure.warmup_batches=1"]
    return [*words, "save.every_images=16", "save.snapshot_every_images=32"]


@pytest.fixture
def examine(healthy, capsys):
    """Run the doctor on the healthy run with further words: exit code, and check -> [(level, text)]."""

    def run(*words: str):
        code = main([*healthy, *words])
        found, lines = collections.defaultdict(list), capsys.readouterr().out.splitlines()
        for line in lines[:-1]:
            if not line.startswith("---"):
                found[line[8:20].strip()].append((line[:8].strip(), line[20:]))
        levels = [level for findings in found.values() for level, _ in findings]
        counts = [levels.count(level) for level in (ERROR, WARNING, OK)]
        assert lines[-1] == "{} errors, {} warnings, {} OK".format(*counts)
        assert set(found) == CHECKS
        return code, dict(found)

    return run


@pytest.fixture
def only_error(examine):
    """Run the doctor, and return the text of the one error, which belongs to this check."""

    def run(check: str, *words: str) -> str:
        code, found = examine(*words)
        errors = [(name, text) for name, findings in found.items() for level, text in findings if level == ERROR]
        assert [name for name, _ in errors] == [check], errors
        assert code == 1
        return errors[0][1]

    return run


def test_a_healthy_run_has_no_error_and_no_file_is_left(examine, tmp_path):
    def paths() -> list[Path]:  # W&B's own stay until the process ends
        return [path for path in sorted(tmp_path.rglob("*")) if "wandb" not in path.name]

    before = tree(tmp_path), paths()
    code, found = examine()
    assert code == 0 and {level for findings in found.values() for level, _ in findings} == {OK}, found
    assert (tree(tmp_path), paths()) == before
    text = {check: findings[0][1] for check, findings in found.items()}
    assert "images, 48 samples in " in text["store"]
    assert text["schedule"] == "4 batches, 32 images, 0.667 times the dataset's 48 samples; warm-up 0 batches"
    assert text["run"] == f"{tmp_path}/runs/one is new"
    code, found = examine("data.synthetic=true")
    assert code == 0 and found["store"] == [(OK, "none: data.synthetic=true")]


def test_a_command_line_that_cannot_be_read_is_another_exit_code(healthy, capsys):
    assert main([*healthy, "optimiser.lr=1", "seed=many"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and "unknown key 'optimiser.lr'" in told.err and "seed is 'many'" in told.err
    assert main(["--print_config"]) == 2 and "--print_config is for benchmark.py" in capsys.readouterr().err
    assert main(["--help"]) == 0


# --- the machine ---


def with_version(monkeypatch, package: str, version: str) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == package else real(name))


def test_a_package_outside_of_its_bounds_is_found_with_the_reason_of_the_bound(only_error, examine, monkeypatch):
    with_version(monkeypatch, "filelock", "3.20.0")
    text = (
        "filelock 3.20.0 is not filelock<5,>=4: 3.x hangs where 4.x raises when a lock is inherited over fork. Install"
    )
    assert only_error("versions").startswith(text)
    monkeypatch.undo()
    with_version(monkeypatch, "wandb", "0.18.7")  # counts if it is used
    assert [level for level, _ in examine()[1]["versions"]] == [OK]
    text = only_error("versions", "loggers.wandb.project=p", "loggers.wandb.mode=offline")
    assert text.startswith("wandb 0.18.7 is not wandb>=0.31: ")


def test_the_set_whose_torch_is_installed_is_compared_and_a_newer_torch_is_a_warning(monkeypatch):
    newest = {name: str(bound.specifier)[2:] for name, (bound, _) in checks._bounds("requirements/newest.txt").items()}
    here, real = {}, importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: here.get(name) or real(name))
    check = checks.Check("versions", lambda _: checks.check_versions(wandb=False))
    for changed, expected in (
        ({}, [OK]),
        ({"torch": "2.11.0"}, [WARNING]),
        (newest, [OK]),
        ({"torch": "2.15.1", "torchvision": "0.25.0"}, [WARNING, ERROR]),
    ):
        here |= changed
        assert [found.level for found in checks.findings_of(check, None)] == expected, changed


def test_a_package_that_is_not_there_and_another_python_are_found(only_error, monkeypatch):
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "diffusers":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert only_error("versions").startswith("diffusers is not installed.")
    monkeypatch.setattr(importlib.metadata, "version", real)
    monkeypatch.setattr(checks, "FIRST_PYTHON", (3, 99))
    assert only_error("versions").endswith(". Possible: 3.99 to 3.13. Use one of them.")


def gpus(monkeypatch, num: int, used: int = 0) -> None:
    gib = 2**30
    monkeypatch.setattr(checks.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(checks.torch.cuda, "device_count", lambda: num)
    monkeypatch.setattr(
        checks.torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name="N", total_memory=80 * gib)
    )
    monkeypatch.setattr(checks.torch.cuda, "mem_get_info", lambda index: ((80 - used) * gib, 80 * gib))
    monkeypatch.setattr(checks.torch.cuda, "memory_reserved", lambda index: 0)
    monkeypatch.setattr(checks.torch.cuda, "get_arch_list", lambda: ["sm_90"])
    monkeypatch.setattr(checks.torch, "ones", lambda *shape, device: checks.torch.zeros(*shape))


def test_gpus_that_idle_or_are_busy_are_a_warning_and_one_that_does_not_compute_an_error(monkeypatch):
    def first(ranks: int) -> tuple[str, str]:
        found = next(checks.check_devices(ranks))
        return found.level, found.text

    def broken(*shape, device):
        raise RuntimeError("CUDA error: no kernel image is available\nsecond line")

    gpus(monkeypatch, 2)
    assert first(2)[0] == OK
    level, text = first(1)
    assert level == WARNING and "composer -n 2 takes all" in text
    gpus(monkeypatch, 1, used=30)
    assert first(1) == (WARNING, "GPU 0 has 30 of 80 GiB in use. Another run? nvidia-smi")
    monkeypatch.setattr(checks.torch, "ones", broken)
    level, text = first(1)
    assert level == ERROR and "GPU 0 cannot be used: CUDA error: no kernel image is available. " in text
    assert text.endswith(f"torch {torch.__version__} has code for sm_90. Check nvidia-smi.")


def test_a_small_shared_memory_is_found_with_what_the_batches_need(only_error, examine, monkeypatch, tmp_path):
    real = os.statvfs
    small = SimpleNamespace(f_frsize=4096, f_blocks=16384, f_bavail=100, f_files=0, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda path: small if str(path) == f"{tmp_path}/shm" else real(path))
    text = only_error("/dev/shm")
    assert text.startswith(
        "8 batches of 9.61e-05 GiB: 0.000769 GiB there; 0.0625 GiB, 0.000381 free. A worker would die"
    )
    mlperf = ["model.variant=mlperf", "optimizer.lr=1e-4", "schedule.warmup_batches=0"]
    assert only_error("/dev/shm", *mlperf).startswith("8 batches of 0.000371 GiB: ")  # its images travel in float32
    small.f_bavail = 230
    assert next(checks.compare_shared_memory(9.61e-5, 6)).level == WARNING
    monkeypatch.setattr(checks, "SHARED_MEMORY", tmp_path / "none")
    assert examine("data.workers=0")[1]["/dev/shm"] == [(OK, "not used: data.workers=0")]
    assert only_error("/dev/shm").startswith(f"{tmp_path}/none is missing or cannot be written: ")


def test_an_order_too_large_for_the_machines_memory_is_found(only_error, examine, monkeypatch, tmp_path):
    """It takes 4 bytes a sample, three times: this rank's, what its workers share, and their parts of that."""

    def of(samples: int) -> list[str]:
        stream = f"data.streams=[{{remote: {tmp_path}/stage, choose: {samples}}}]"
        return ["data.remote=null", "data.local=null", stream]

    monkeypatch.setattr(checks, "read_host_bytes", lambda: (4 * GIB, 3 * GIB))
    [(level, text)] = examine(*of(100_000_000))[1]["host memory"]
    assert level == OK and text.startswith("about 1.8 GiB besides the step (2 workers 0.6, an epoch's order 1.2); this")
    assert only_error("host memory", *of(500_000_000)).startswith("about 6.3 GiB besides the step (2 workers 0.6, an ")


def test_too_little_memory_of_device_or_host_is_found(only_error, examine, monkeypatch):
    monkeypatch.setattr(checks, "read_host_bytes", lambda: (GIB / 2, GIB / 4))
    text = "about 0.6 GiB besides the step (2 workers 0.6); this machine has 0.5, 0.2 of it free now. Lower data.workers, or"
    assert only_error("host memory").startswith(text)
    monkeypatch.setattr(checks, "read_host_bytes", lambda: (8 * GIB, GIB / 4))
    assert examine()[1]["host memory"][0][0] == WARNING
    monkeypatch.setattr(memory, "available_gib", lambda: (0.01, "this machine (free now)"))
    text = only_error("memory")
    assert text.startswith("8 images a pass need about 0.0 GiB") and "Ways out: gradient_checkpointing=1, " in text


def test_the_limit_of_a_container_counts_as_the_machines_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    whole = host_memory.read_host_bytes()[0]
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory.read_host_bytes()[0] == whole
    (tmp_path / "memory.max").write_text(f"{2**28}\n")
    (tmp_path / "memory.current").write_text(f"{2**27}\n")
    assert host_memory.read_host_bytes() == (2**28, 2**27)
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {2**25}\nactive_file {2**25}\nshmem 7\n")
    assert host_memory.read_host_bytes() == (2**28, 3 * 2**26)  # the kernel gives copies of files away


def test_variables_that_change_numbers_or_speed_are_a_warning(examine, monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    level, text = examine()[1]["variables"][0]
    assert level == WARNING and text.startswith("NVIDIA_TF32_OVERRIDE=1 decides about TF32, whatever `precision` says.")


# --- the configuration ---


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["device_train_microbatch_size=3"], "global_batch_size: 8 is not a multiple of 1 ranks x 3 microbatch = 3."),
        (["model.weights=TMP/none"], "model.weights: TMP/none: there is no such file or folder."),
        (["model.weights=null"], "model.weights: not given. Real data need encoders, and the preset tiny has none"),
        (
            ["global_batch_size=64", "device_train_microbatch_size=8"],
            "global_batch_size: 64 is more than the 48 samples",
        ),
        (["data.cache_limit=1kb"], "data.cache_limit: 1kb holds fewer than 4 of the largest shard"),
        (["run_folder=/proc/runs"], "run_folder: /proc/runs cannot be written: /proc: "),
        (["run_name=notes"], "run_name: TMP/runs/notes exists and is not a run (it has no config.yaml)"),
    ],
)
def test_an_impossible_key_is_an_error_of_the_keys(only_error, tmp_path, words, text):
    (tmp_path / "runs/notes").mkdir(parents=True)
    (tmp_path / "runs/notes/notes.txt").touch()
    found = only_error("config", *(word.replace("TMP", str(tmp_path)) for word in words))
    assert found.startswith(text.replace("TMP", str(tmp_path)))


def test_only_checks_that_depend_on_an_error_are_skipped(examine):
    code, found = examine("image_size=63")
    errors = [check for check, findings in found.items() if findings[0][0] == ERROR]
    assert code == 1 and errors == ["config"] and found["config"][0][1].startswith("image_size: ")
    assert found["memory"][0] == (WARNING, "not checked: it depends on an error above. Fix that first.")
    assert examine("model.weights=null")[1]["memory"][0][0] == OK  # weights change nothing of what a step takes


# --- the data ---


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def first_shard(folder: Path) -> Path:
    return folder / json.loads((folder / "index.json").read_bytes())["shards"][0]["raw_data"]["basename"]


def test_a_dataset_without_a_shard_or_without_a_folder_is_found(examine, tmp_path):
    (path := first_shard(tmp_path / "stage")).unlink()
    missing = f"{path} is missing or no file, index.json"
    for words, text in (([], missing), ([f"data.remote={tmp_path}/no"], "no folder ")):
        code, found = examine(*words)
        assert code == 1 and found["store"][0][1].startswith(f"data.remote: {text}")
        assert found["schedule"][0][0] != ERROR


def test_a_dataset_of_another_run_is_found(only_error, examine, tmp_path):
    code, found = examine("mlperf.enabled=true", "mlperf.division=closed")
    text = f"mlperf.division: closed, but train_samples: 48 at {tmp_path / 'stage'}; the benchmark: 6,513,144. Give the"
    assert code == 1 and any(told.startswith(text) for level, told in found["config"] if level == ERROR)
    for facts, text in (
        (
            {"family": "sd2", "image_size": [32, 32]},
            "image_size: [64, 64], but the images at TMP/stage were made for [32",
        ),
        (
            {"variant": "mlperf", "resize": "bicubic, float32"},
            "model.variant: its images are resized by 'bicubic, uint8'",
        ),
    ):
        write_metadata(tmp_path / "stage", "images", facts)
        assert only_error("config").startswith(text.replace("TMP", str(tmp_path)))
    write_metadata(tmp_path / "stage", "images", {})
    (tmp_path / "local").mkdir()
    raw = {"basename": "shard.00000.mds", "bytes": 5, "hashes": {"xxh64": "0" * 16}}
    (tmp_path / "local/index.json").write_text(json.dumps({"shards": [{"raw_data": raw}]}))
    text = f"data.local: {tmp_path}/local holds shards of another stage than {tmp_path}/stage. Give another folder"
    assert only_error("config").startswith(text)


# --- stores ---


@pytest.fixture
def bucket(store, stage, in_store):
    """The stage in a store; returns its address, and the server's."""
    return in_store(stage, "doctor"), store[1]["S3_ENDPOINT_URL"]


@pytest.fixture
def only_store(only_error):
    """Run the doctor, and return the text of the store's error, the only one."""
    return lambda *words: only_error("store", *words)


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("s3://easel/nothing/here", "nothing lies under s3://easel/nothing/here; bucket 'easel' is there. Check the"),
        ("s3://absent-bucket/stage", "there is no bucket 'absent-bucket' at STORE (NoSuchBucket). Check the name, "),
        (
            "s3://easel",
            "doctor/dataset.json lies there, but not all that a stage has (index.json, dataset.json, shards).",
        ),
    ],
)
def test_a_missing_object_bucket_or_prefix_is_named(examine, only_store, bucket, address, told):
    text = only_store(f"data.remote={address}")
    assert text.startswith(f"data.remote: {address} cannot be read: {told.replace('STORE', bucket[1])}")
    code, found = examine(f"data.remote={bucket[0]}")
    assert code == 0 and found["store"][0][1].startswith("s3://easel/doctor: images, 48 samples in ")


@pytest.mark.parametrize(
    ("endpoint", "told"),
    [
        (
            "http://127.0.0.1:CLOSED",
            "nothing listens at http://127.0.0.1:CLOSED. Check the port in S3_ENDPOINT_URL, and",
        ),
        (
            "http://store.invalid:9000",
            "the name store.invalid does not resolve. Check S3_ENDPOINT_URL for a typing error",
        ),
        ("https://127.0.0.1:OPEN", "TLS failed with https://127.0.0.1:OPEN (SSLError: "),
    ],
)
def test_an_unreachable_store_is_reported_with_the_reason(only_store, bucket, monkeypatch, endpoint, told):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        for word, port in {"CLOSED": str(unused.getsockname()[1]), "OPEN": bucket[1].rpartition(":")[2]}.items():
            endpoint, told = endpoint.replace(word, port), told.replace(word, port)
        monkeypatch.setenv("S3_ENDPOINT_URL", endpoint)
        text = only_store(f"data.remote={bucket[0]}")
    assert text.startswith(f"data.remote: s3://easel/doctor cannot be read: {told}")


@pytest.fixture
def guarded(bucket, store):
    """The store as one that asks for credentials; yields those of a user who may do nothing."""
    import boto3

    def require(num_free_requests: str) -> None:
        address, kind = f"{bucket[1]}/moto-api/reset-auth", {"Content-Type": "text/plain"}
        request = urllib.request.Request(address, data=num_free_requests.encode(), method="POST", headers=kind)
        urllib.request.urlopen(request, timeout=30).close()

    iam = boto3.client("iam", endpoint_url=bucket[1])
    iam.create_user(UserName="nobody")
    key = iam.create_access_key(UserName="nobody")["AccessKey"]
    require("0")
    yield key["AccessKeyId"], key["SecretAccessKey"]
    require("inf")
    iam.delete_access_key(UserName="nobody", AccessKeyId=key["AccessKeyId"])
    iam.delete_user(UserName="nobody")


def test_wrong_missing_and_insufficient_credentials_are_distinguished(
    only_store, bucket, guarded, monkeypatch, tmp_path
):
    words = [f"data.remote={bucket[0]}"]
    assert f"{bucket[1]} does not know the access key (InvalidAccessKeyId). Check AWS_ACC" in only_store(*words)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", guarded[0])
    assert "the secret does not belong to the access key (SignatureDoesNotMatch)." in only_store(*words)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", guarded[1])
    text = only_store(*words)
    assert "may not do that there" in text and "s3:GetObject and s3:ListBucket on bucket 'easel'" in text
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, f"{tmp_path}/none")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert "s3://easel/doctor cannot be read: there are no credentials here. Set AWS_ACCESS" in only_store(*words)
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert "The config profile (mine) could not be found. Set AWS_PROFILE to a profile of ~/.aws" in only_store(*words)


def test_a_store_that_does_not_answer_is_given_up_after_a_limit(only_store, bucket, monkeypatch):
    slow = next(check for check in checks.CHECKS["data"] if check.name == "store")
    monkeypatch.setitem(checks.CHECKS, "data", [dataclasses.replace(slow, limit_sec=0.5)])
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("S3_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        text = only_store(f"data.remote={bucket[0]}")
    assert text.startswith("s3://easel/doctor did not answer within 0.5 s. Look whether the store, ")


def test_an_error_of_no_known_kind_is_reported_in_its_own_words():
    text = "gs://b/p cannot be read: RuntimeError: out of paper. Check the address and its credentials."
    assert explain_store_error(RuntimeError("out of paper\nsecond line"), "gs://b/p") == text
    wrapped = OSError("cannot be listed")
    wrapped.__cause__ = socket.gaierror(-2, "Name or service not known")
    assert "the name host does not resolve" in explain_store_error(wrapped, "sftp://me@host/p")


# --- the run ---


def test_a_warm_up_that_is_longer_than_the_run_is_found(only_error, examine):
    text = "the warm-up of 5 batches is longer than the run (4 batches, 32 images): the learning rate never reaches its"
    assert only_error("schedule", "schedule.warmup_batches=5").startswith(text)
    code, found = examine("schedule.warmup_batches=5", "data.synthetic=true")
    assert code == 0 and found["schedule"][0][0] == WARNING


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("measure.warmup_batches=4", "measure.warmup_batches: 4 of 4 batches: no speed is measured. Lower it."),
        ("save.every_images=33", "save.every_images: 33 is more than the run (4 batches, 32 images): one checkpoint"),
        ("save.every_images=0", "save.every_images: 0: a stopped run begins anew."),
    ],
)
def test_an_unlikely_value_is_a_warning(examine, word, told):
    code, found = examine(word)
    ((level, text),) = found["schedule"]
    assert code == 0 and level == WARNING and text.startswith(told)


def test_a_disk_without_room_for_checkpoints_snapshots_and_shards_together_is_found(only_error, examine, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    text = only_error("disk", "save.snapshot_every_images=16")
    wanted = r"GiB in data.local and 3 full checkpoints of 0.012 GiB and 2 snapshots of 0.00399 GiB: 0.0439 GiB more; "
    assert re.search(rf"{wanted}\S+ has 0.000977 free. Make room.", text), text
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=46 * 2**20))
    assert examine("save.snapshot_every_images=16")[1]["disk"][0][0] == WARNING
    assert examine("save.every_images=0", "save.snapshot_every_images=0")[1]["disk"][0][0] == OK


def begin_run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "one"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 17\n")
    return folder


def test_a_run_that_another_process_trains_or_that_was_begun_otherwise_is_found(only_error, examine, tmp_path):
    folder = begin_run(tmp_path)
    with FileLock(folder / ".lock"):
        text = f"run_name: another process is training in {folder}. Wait for it, or take another run_name."
        assert only_error("run") == text
    assert examine()[0] == 0
    (folder / "config.yaml").write_text("seed: 18\n")
    assert only_error("run").startswith(f"seed: 17, but {folder} was begun with 18. A run resumes as it began:")


def test_a_run_whose_checkpoints_are_damaged_is_found(only_error, examine, tmp_path):
    from checkpointing.files import FULL, file_stem, write_checkpoint

    folder = begin_run(tmp_path) / "checkpoints"
    older, newer = (write_checkpoint(folder, file_stem(FULL, batch), {"batch": batch}) for batch in (1, 2))
    assert examine()[1]["run"] == [(OK, f"{folder.parent} resumes from {newer.name}, which is whole")]
    damage(newer)
    code, found = examine()
    assert code == 0 and found["run"][0][0] == WARNING and found["run"][0][1].endswith(f"resumes from {older.name}.")
    damage(older)
    assert only_error("run").startswith(f"checkpoints: every one of the 2 full checkpoints in {folder} is damaged.")
    assert sorted(folder.iterdir()) == [older, newer]  # nothing was set aside


# --- the command itself ---


def test_a_check_that_breaks_is_an_error_and_the_others_are_made(only_error, monkeypatch):
    def broken():
        raise KeyError("x")

    monkeypatch.setattr(checks, "check_variables", broken)
    assert only_error("variables") == "the check itself failed: KeyError: 'x'. Report it, with this command line."


def test_a_start_makes_the_checks_of_the_list_that_are_marked(healthy, monkeypatch):
    """The same text, with its key or its check before it."""
    monkeypatch.setattr(memory, "available_gib", lambda: (0.01, "this machine (free now)"))
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    config = load(RunConfig, parse_command_line([*healthy, "precision=fp16"], ALIASES), check=lambda config: [])
    said = [problem.text.partition(":")[0] for problem in checks.check(config)]
    assert said == ["precision"]  # of which memory and disk depend
    config = dataclasses.replace(config, precision=None)
    assert [problem.text.partition(":")[0] for problem in checks.check(config)] == ["memory", "disk"]
