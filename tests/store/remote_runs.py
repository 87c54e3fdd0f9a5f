"""More runs that go into an object store and come back: by hand, `make test-store`. CI's are in tests/test_remote_*.py."""

# ruff: noqa: F811  # fixtures of other files are imported under their names

from __future__ import annotations

import shutil
import signal

import pytest
from test_checkpoint_uploads import bucket, main, numbers, put, read, refused, words_of  # noqa: F401
from test_checkpoints import stopped_in_batch_five
from test_remote_faults import REMOTE, s3, train_lose_and_go_on  # noqa: F401

from checkpointing.files import FULL, list_checkpoints

pytestmark = pytest.mark.timeout(500, func_only=True)


def test_damaged_files_of_the_store_are_named_and_are_no_new_beginning(words_of, bucket, tmp_path, capsys):
    address, client = bucket
    assert main(*words_of(tmp_path, "a", "max_duration=5ba")) == 0
    checkpoints = list_checkpoints(tmp_path / "a" / "checkpoints", FULL)
    shutil.rmtree(tmp_path / "a")
    key = f"{address.removeprefix('s3://easel/')}/a/metrics.jsonl"
    whole = client.get_object(Bucket="easel", Key=key)
    content, metadata = whole["Body"].read(), whole["Metadata"]
    client.put_object(Bucket="easel", Key=key, Body=b"{}", Metadata=metadata)
    assert f"save.remote: {address}/a/metrics.jsonl is damaged: " in refused(capsys, *words_of(tmp_path, "a"))
    client.put_object(Bucket="easel", Key=key, Body=content, Metadata=metadata)
    for path in checkpoints:
        put(client, f"{address}/a", f"checkpoints/{path.name}", b"")
    assert f"every one of the 2 full checkpoints in {address}/a is damaged. " in refused(
        capsys, *words_of(tmp_path, "a")
    )
    assert not (tmp_path / "a").exists()


def test_a_start_elsewhere_stops_the_one_before(words_of, bucket, tmp_path, capsys, monkeypatch):
    """The second machine has taken the run over: the first may not write over what it has."""
    address, client = bucket
    from callbacks.run_record import RunRecord

    before = RunRecord.after_train_batch

    def after_train_batch(self, state, logger):
        before(self, state, logger)
        if state.timestamp.batch.value == 4:
            put(client, f"{address}/a", "starts.jsonl", b'{"start": 2}\n')

    monkeypatch.setattr(RunRecord, "after_train_batch", after_train_batch)
    assert main(*words_of(tmp_path, "a", "max_duration=24ba", "save.every_images=8")) == 1
    said = capsys.readouterr().err
    assert f"save.remote: another start of this run writes into {address}/a. " in said and "Traceback" not in said
    assert read(client, f"{address}/a", "starts.jsonl") == b'{"start": 2}\n'


def test_a_signal_saves_and_uploads_within_the_grace(words_of, s3, tmp_path, capsys, monkeypatch):
    words = words_of(tmp_path, "a", f"save.remote={REMOTE}", "max_duration=10ba")
    assert stopped_in_batch_five(monkeypatch, signal.SIGTERM, *words) == 143
    [path] = [path for path in list_checkpoints(tmp_path / "a" / "checkpoints", FULL) if "0005-" in path.name]
    assert f"SIGTERM: stopped after batch 5; saved {path}, in {REMOTE} too. " in capsys.readouterr().err
    assert numbers(REMOTE, "a", FULL)[0] == 5


def test_killed_and_its_folder_gone_two_ranks_with_parts_of_the_weights_go_on_from_the_store(words_of, s3, tmp_path):
    train_lose_and_go_on(words_of, tmp_path, "2", "sharding=full")
