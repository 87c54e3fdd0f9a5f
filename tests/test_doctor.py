"""prepare/doctor.py and preflight/checks.py: faults planted one at a time, each named by its check and by no other."""

from __future__ import annotations

import collections
import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from botocore.exceptions import ClientError
from conftest import tree
from filelock import FileLock

from checkpointing.files import FULL, file_stem, write_checkpoint
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

# Slow: each fault is a whole examination.
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


@pytest.mark.parametrize(
    ("words", "check", "level", "text"),
    [
        ("model.weights=null", "config", ERROR, "model.weights: not given. Real data need encoders"),
        ("global_batch_size=64", "config", ERROR, "global_batch_size: 64 is more than the 48 samples"),
        ("run_name=notes", "config", ERROR, "run_name: TMP/runs/notes exists and is not a run (it has no config.yaml)"),
        ("mlperf.enabled=true mlperf.division=closed", "config", ERROR, "mlperf.division: closed, but train_samples"),
        ("data.remote=TMP/no", "store", ERROR, "data.remote: no folder "),
        ("schedule.warmup_batches=5", "schedule", ERROR, "the warm-up of 5 batches is longer than the run (4 batches"),
        ("schedule.warmup_batches=5 data.synthetic=true", "schedule", WARNING, "the warm-up of 5 batches is longer "),
        ("measure.warmup_batches=4", "schedule", WARNING, "measure.warmup_batches: 4 of 4 batches: no speed is "),
        ("save.every_images=33", "schedule", WARNING, "save.every_images: 33 is more than the run (4 batches, 32"),
        ("save.every_images=0", "schedule", WARNING, "save.every_images: 0: a stopped run starts over."),
    ],
)
def test_a_fault_in_the_words_is_found_by_its_check_alone(examine, tmp_path, words, check, level, text):
    (tmp_path / "runs/notes").mkdir(parents=True)
    (tmp_path / "runs/notes/notes.txt").touch()
    code, found = examine(*words.replace("TMP", str(tmp_path)).split())
    assert code == (level == ERROR) and [name for name in found if found[name][0][0] == ERROR] == [check] * code
    wanted = text.replace("TMP", str(tmp_path))
    assert any(each[0] == level and each[1].startswith(wanted) for each in found[check]), found[check]


# --- the machine ---


@pytest.fixture
def versions(monkeypatch) -> dict[str, str | None]:
    """Package -> the version that it is to have; None: it is not installed."""
    changed, real = {}, importlib.metadata.version

    def version(name: str) -> str:
        if (found := changed.get(name, real)) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name) if found is real else found

    monkeypatch.setattr(importlib.metadata, "version", version)
    return changed


@pytest.mark.long
def test_a_package_outside_of_its_bounds_is_found_with_the_reason_of_the_bound(only_error, examine, versions):
    versions["filelock"] = "3.20.0"
    assert only_error("versions").startswith("filelock 3.20.0 is not filelock<5,>=4: 3.x hangs where 4.x raises ")
    del versions["filelock"]
    versions["wandb"] = "0.18.7"  # counts if it is used
    assert [level for level, _ in examine()[1]["versions"]] == [OK]
    text = only_error("versions", "loggers.wandb.project=p", "loggers.wandb.mode=offline")
    assert text.startswith("wandb 0.18.7 is not wandb>=0.31: ")


def gpus(monkeypatch, num: int, used: int = 0) -> None:
    gpu = SimpleNamespace(name="N", total_memory=80 * GIB)
    values = {"is_available": True, "device_count": num, "get_device_properties": gpu, "memory_reserved": 0}
    values |= {"mem_get_info": ((80 - used) * GIB, 80 * GIB), "get_arch_list": ["sm_90"]}
    for name, value in values.items():
        monkeypatch.setattr(checks.torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(checks.torch, "ones", lambda *shape, device: checks.torch.zeros(*shape))


@pytest.mark.long
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


@pytest.mark.long
def test_a_small_shared_memory_is_found_with_what_the_batches_need(only_error, monkeypatch, tmp_path):
    real = os.statvfs
    small = SimpleNamespace(f_frsize=4096, f_blocks=16384, f_bavail=100, f_files=0, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda path: small if str(path) == f"{tmp_path}/shm" else real(path))
    text = "8 batches of 9.61e-05 GiB: 0.000769 GiB there; 0.0625 GiB, 0.000381 free. A worker would die"
    assert only_error("/dev/shm").startswith(text)


@pytest.mark.long
def test_too_little_memory_of_device_or_host_is_found(only_error, examine, monkeypatch):
    monkeypatch.setattr(checks, "read_host_bytes", lambda: (GIB / 2, GIB / 4))
    text = "about 0.6 GiB besides the step (2 workers 0.6); this machine has 0.5, 0.2 of it free now. Lower data.workers, or"
    assert only_error("host memory").startswith(text)
    monkeypatch.setattr(checks, "read_host_bytes", lambda: (8 * GIB, GIB / 4))
    monkeypatch.setattr(memory, "available_gib", lambda: (0.01, "this machine (free now)"))
    found = examine()[1]
    assert found["host memory"][0][0] == WARNING and found["memory"][0][0] == ERROR
    text = found["memory"][0][1]
    assert text.startswith("8 images a pass need about 0.0 GiB") and "Try: gradient_checkpointing=1, " in text


@pytest.mark.long
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


# --- the data ---


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.long
def test_a_dataset_without_a_shard_or_of_another_run_is_found(only_error, examine, tmp_path):
    write_metadata(tmp_path / "stage", "images", {"family": "sd2", "image_size": [32, 32]})
    text = f"image_size: [64, 64], but the images at {tmp_path}/stage were made for [32"
    assert only_error("config").startswith(text)
    index = json.loads((tmp_path / "stage/index.json").read_bytes())
    (path := tmp_path / "stage" / index["shards"][0]["raw_data"]["basename"]).unlink()
    code, found = examine()
    assert code == 1 and found["store"][0][1].startswith(f"data.remote: {path} is missing or no file, index.json")
    assert found["schedule"][0][0] != ERROR


# --- stores ---


@pytest.fixture
def bucket(store, stage, in_store):
    """The dataset in a store; returns its address, and the server's."""
    return in_store(stage, "doctor"), store[1]["S3_ENDPOINT_URL"]


@pytest.fixture
def store_error(only_error, bucket):
    """Run the doctor, and return why the dataset cannot be read: the only error."""

    def run(address: str = bucket[0]) -> str:
        text, before = only_error("store", f"data.remote={address}"), f"data.remote: {address} cannot be read: "
        assert text.startswith(before)
        return text.removeprefix(before)

    return run


@pytest.mark.long
def test_a_missing_object_bucket_or_prefix_is_named(examine, store_error, bucket):
    code, found = examine(f"data.remote={bucket[0]}")
    assert code == 0 and found["store"][0][1].startswith("s3://easel/doctor: images, 48 samples in ")
    for address, text in (
        ("s3://easel/nothing/here", "nothing lies under s3://easel/nothing/here; bucket 'easel' is there. Check the"),
        ("s3://absent-bucket/stage", f"there is no bucket 'absent-bucket' at {bucket[1]} (NoSuchBucket). Check the "),
        ("s3://easel", " lies there, but not all that a dataset has (index.json, dataset.json, shar"),
    ):
        assert text in store_error(address)


@pytest.mark.long
def test_an_unreachable_store_is_reported_with_the_reason(store_error, bucket, monkeypatch):
    tls = bucket[1].replace("http:", "https:")
    for endpoint, text in (
        ("http://127.0.0.1:1", "nothing listens at http://127.0.0.1:1. Check the port in S3_ENDPOINT_URL, and"),
        (tls, f"TLS failed with {tls} (SSLError: "),
    ):
        monkeypatch.setenv("S3_ENDPOINT_URL", endpoint)
        assert store_error().startswith(text)


@pytest.mark.long
def test_wrong_missing_and_insufficient_credentials_are_distinguished(store_error, monkeypatch, tmp_path):
    for code, text in (
        ("InvalidAccessKeyId", "does not know the access key (InvalidAccessKeyId). Check AWS_ACC"),
        ("SignatureDoesNotMatch", "the secret does not belong to the access key (SignatureDoesNotMatch)."),
        ("AccessDenied", "s3:GetObject and s3:ListBucket on bucket 'easel'"),
    ):
        assert text in explain_store_error(ClientError({"Error": {"Code": code}}, "GetObject"), "s3://easel/doctor")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, f"{tmp_path}/none")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert store_error().startswith("there are no credentials here. Set AWS_ACCESS")


# --- the run ---


@pytest.mark.long
@pytest.mark.usefixtures("traced_cost")
def test_a_disk_without_room_for_checkpoints_snapshots_and_shards_together_is_found(only_error, examine, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    text = only_error("disk", "save.snapshot_every_images=16")
    wanted = r"GiB in data.local and 3 full checkpoints of 0.012 GiB and 2 snapshots of 0.00399 GiB: 0.0439 GiB more; "
    assert re.search(rf"{wanted}\S+ has 0.000977 free. Make room.", text), text
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=46 * 2**20))
    assert examine("save.snapshot_every_images=16")[1]["disk"][0][0] == WARNING


def test_an_earlier_start_is_reported_with_what_is_wrong_with_it(only_error, examine, tmp_path):
    """Another process trains in its folder, it was begun otherwise, or its checkpoints are damaged."""
    folder = tmp_path / "runs/one"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 18\n")
    assert only_error("run").startswith(f"seed: 17, but {folder} was begun with 18. A run resumes as it began:")
    (folder / "config.yaml").write_text("seed: 17\n")
    with FileLock(folder / ".lock"):
        text = f"run_name: another process is training in {folder}. Wait for it, or take another run_name."
        assert only_error("run") == text
    folder /= "checkpoints"
    older, newer = (write_checkpoint(folder, file_stem(FULL, batch), {"batch": batch}) for batch in (1, 2))
    assert examine()[1]["run"] == [(OK, f"{folder.parent} resumes from {newer.name}, which is whole")]
    damage(newer)
    code, found = examine()
    assert code == 0 and found["run"][0][0] == WARNING and found["run"][0][1].endswith(f"resumes from {older.name}.")
    damage(older)
    assert only_error("run").startswith(f"checkpoints: every one of the 2 full checkpoints in {folder} is damaged.")
    assert sorted(folder.iterdir()) == [older, newer]  # nothing was set aside


# --- the command itself ---


@pytest.mark.long
def test_a_check_that_breaks_is_an_error_and_the_others_are_made(only_error, monkeypatch):
    def broken():
        raise KeyError("x")

    monkeypatch.setattr(checks, "check_variables", broken)
    assert only_error("variables") == "the check itself failed: KeyError: 'x'. Report it, with this command line."


@pytest.mark.long
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
