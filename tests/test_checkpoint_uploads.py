"""Runs whose checkpoints go into an object store, and that resume from it: checkpointing/uploads.py and downloads.py.

The store is moto's. A real one that goes away, and runs that are killed, are in tests/test_remote_faults.py.
"""

from __future__ import annotations

import shutil
import uuid

import pytest
from test_checkpoints import newest, same_training, summary_of

import benchmark
from checkpointing.files import FULL, WEIGHTS, list_checkpoints
from checkpointing.store import RunStore, checkpoints_in
from run_folder.files import read_lines

pytestmark = pytest.mark.timeout(120, func_only=True)


def main(*words: str) -> int:
    return benchmark.main(list(words))


@pytest.fixture
def bucket(store, monkeypatch):
    """Address of a prefix of its own in moto's bucket, and a client."""
    client, variables = store
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return f"s3://easel/{uuid.uuid4().hex[:8]}", client


EVERY_THREE = ["save.every_images=24", "save.snapshot_every_images=32", "ema.decay=null", "ema.half_life=40sp"]


@pytest.fixture
def words_of(miniature, bucket):
    """Words of a run of ten batches of 8, a checkpoint each third and a snapshot each fourth, that goes into the store."""
    own = [*EVERY_THREE, "max_duration=10ba", f"save.remote={bucket[0]}", "save.patience_sec=20"]
    return lambda folder, name, *more: miniature.small(folder, name, *own, *more)


@pytest.fixture(scope="module")
def whole(miniature, tmp_path_factory):
    """The unbroken run, without a store."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(*miniature.small(folder, "whole", *EVERY_THREE, "max_duration=10ba")) == 0
    return folder


def stored(address: str, name: str) -> dict[str, int]:
    return RunStore(address, name, attempts=3).listed()


def numbers(address: str, name: str, kind: str) -> list[int]:
    return [one.number for one in checkpoints_in(stored(address, name))[0] if one.kind == kind]


def put(client, address: str, name: str, content: bytes) -> None:
    client.put_object(Bucket="easel", Key=f"{address.removeprefix('s3://easel/')}/{name}", Body=content)


def read(client, address: str, name: str) -> bytes:
    return client.get_object(Bucket="easel", Key=f"{address.removeprefix('s3://easel/')}/{name}")["Body"].read()


def refused(capsys, *words: str) -> str:
    capsys.readouterr()
    assert main(*words) == 2
    return capsys.readouterr().err


# --- to the store, and back ---


@pytest.mark.slow
@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_run_on_an_empty_disk_resumes_from_the_store_to_the_last_bit(
    words_of, bucket, whole, tmp_path, capsys, is_damaged
):
    """From the newest checkpoint, or where that one is damaged from the one before."""
    address, client = bucket
    assert main(*words_of(tmp_path, "a", "max_duration=5ba")) == 0
    path = list_checkpoints(tmp_path / "a" / "checkpoints", FULL)[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= is_damaged
    put(client, f"{address}/a", f"checkpoints/{path.name}", bytes(content))
    shutil.rmtree(tmp_path / "a")
    capsys.readouterr()
    assert main(*words_of(tmp_path, "a")) == 0
    output = capsys.readouterr().err
    reason = "its bytes do not have the digest in its name"
    problem = f"save.remote: {address}/a/checkpoints/{path.name} is damaged ({reason}); set aside there.\n"
    assert (problem in output) == (f"checkpoints/{path.name}.damaged" in stored(address, "a")) == is_damaged
    batch = 3 if is_damaged else 5
    path = f"{tmp_path}/a/checkpoints/full-ba00000000000{batch}-"
    assert f"resumes from batch {batch}, {8 * batch} images ({path}" in output
    assert same_training(newest(tmp_path, "a"), newest(whole, "whole"))
    assert summary_of(tmp_path / "a")["starts"] == 2 and summary_of(tmp_path / "a")["history_lost"] == []
    assert [line["batch"] for line in read_lines(tmp_path / "a" / "metrics.jsonl")] == [2, 4, 6, 8, 10]
    assert numbers(address, "a", FULL) == [10, 9] and numbers(address, "a", WEIGHTS) == [64, 32]
    # A snapshot of the first machine is in the store alone: it is not needed here, and not removed there.
    snapshots = [path.name[10:22] for path in list_checkpoints(tmp_path / "a" / "checkpoints", WEIGHTS)]
    assert snapshots == (["000000000064", "000000000032"] if is_damaged else ["000000000064"])


# --- a folder and a store that differ ---


@pytest.mark.long
def test_a_folder_that_is_older_than_the_store_is_updated_and_its_old_record_is_kept(words_of, whole, tmp_path, capsys):
    assert main(*words_of(tmp_path, "a", "max_duration=3ba")) == 0
    shutil.copytree(tmp_path / "a", tmp_path / "old" / "a")
    assert main(*words_of(tmp_path, "a", "max_duration=6ba")) == 0
    capsys.readouterr()
    assert main(*words_of(tmp_path / "old", "a")) == 0
    assert "resumes from batch 6, 48 images" in capsys.readouterr().err
    assert same_training(newest(tmp_path / "old", "a"), newest(whole, "whole"))
    [replaced] = (tmp_path / "old" / "a" / "replaced").iterdir()
    assert [line["batch"] for line in read_lines(replaced / "metrics.jsonl")] == [2, 3]
    assert [line["batch"] for line in read_lines(tmp_path / "old" / "a" / "starts.jsonl")] == [0, 3, 6]


@pytest.mark.long
def test_two_runs_of_one_name_are_refused(words_of, bucket, tmp_path, capsys):
    address, _ = bucket
    assert main(*words_of(tmp_path, "a", "max_duration=3ba")) == 0
    assert main(*words_of(tmp_path / "other", "a", "max_duration=3ba", "save.remote=null")) == 0
    one, two = (read_lines(folder / "a" / "starts.jsonl")[0]["run_id"] for folder in (tmp_path, tmp_path / "other"))
    problem = f"save.remote: {tmp_path}/other/a is the run {two}, {address}/a has another one of this name, {one}. "
    for duration in ("3ba", "5ba"):  # finished there, and not
        output = refused(capsys, *words_of(tmp_path / "other", "a", f"max_duration={duration}"))
        assert output.splitlines()[-1].startswith(problem)


# --- refused at the start ---


def test_missing_credentials_and_a_dead_store_are_refused_before_anything_is_built(
    words_of, bucket, tmp_path, capsys, monkeypatch
):
    address, _ = bucket
    with monkeypatch.context() as patch:
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.delenv("AWS_SECRET_ACCESS_KEY")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        output = refused(capsys, *words_of(tmp_path, "a")).splitlines()[-1]
        assert output.startswith(f"save.remote: {address}/a cannot be written: there are no credentials here. Set ")
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    capsys.readouterr()
    assert main(*words_of(tmp_path, "a")) == 1  # not 2: a job is started again, and the store may be there by then
    output = capsys.readouterr().err.splitlines()[-1]
    assert output.startswith(f"save.remote: {address}/a cannot be written: nothing listens at http://127.0.0.1:9. ")
    assert main(*words_of(tmp_path, "a", f"data.remote={address}/stage", "save.remote=null")) == 1
    assert "/stage cannot be read: nothing listens at http://127.0.0.1:9. " in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "a").exists()
