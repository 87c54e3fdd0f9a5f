"""More runs that go into an object store and come back: by hand, `make test-store`. CI's are in tests/test_remote_*.py."""

# ruff: noqa: F811  # fixtures of other files are imported under their names

from __future__ import annotations

import json
import shutil
import signal

import pytest
from test_checkpoint_uploads import bucket, main, numbers, put, read, refused, stored, whole, words_of  # noqa: F401
from test_checkpoints import stopped_in_batch_five
from test_remote_faults import REMOTE, s3, train_lose_and_go_on  # noqa: F401

from checkpointing.files import FULL, WEIGHTS, list_checkpoints

pytestmark = pytest.mark.timeout(500, func_only=True)


def test_snapshots_come_too_where_they_are_to_be_scored_here(words_of, tmp_path):
    after = ["eval.when=after", "eval.every_images=32", "save.snapshot_every_images=null"]
    assert main(*words_of(tmp_path, "a", *after, "max_duration=5ba")) == 0
    shutil.rmtree(tmp_path / "a")
    assert main(*words_of(tmp_path, "a", *after)) == 0
    assert [int(path.name[10:22]) for path in list_checkpoints(tmp_path / "a" / "checkpoints", WEIGHTS)] == [64, 32]


def test_a_store_with_damaged_checkpoints_alone_is_no_new_beginning(words_of, bucket, tmp_path, capsys):
    address, client = bucket
    assert main(*words_of(tmp_path, "a", "max_duration=5ba")) == 0
    for path in list_checkpoints(tmp_path / "a" / "checkpoints", FULL):
        put(client, f"{address}/a", f"checkpoints/{path.name}", b"")
    shutil.rmtree(tmp_path / "a")
    assert refused(capsys, *words_of(tmp_path, "a")).endswith(
        f"save.remote: every one of the 2 full checkpoints in {address}/a is damaged. Bring back a copy, or take another "
        "run_name to begin anew.\n"
    )
    assert not (tmp_path / "a").exists()


def test_a_damaged_record_is_named_and_nothing_is_left(words_of, bucket, tmp_path, capsys):
    address, client = bucket
    assert main(*words_of(tmp_path, "a", "max_duration=5ba")) == 0
    key = f"{address.removeprefix('s3://easel/')}/a/metrics.jsonl"
    metadata = client.head_object(Bucket="easel", Key=key)["Metadata"]
    client.put_object(Bucket="easel", Key=key, Body=b"{}", Metadata=metadata)
    shutil.rmtree(tmp_path / "a")
    assert refused(capsys, *words_of(tmp_path, "a")).endswith(
        f"save.remote: {address}/a/metrics.jsonl is damaged: its bytes are not those that were put. Bring back a copy, or "
        "remove it: what it said is then lost.\n"
    )
    assert not (tmp_path / "a").exists()


def test_damaged_checkpoints_of_this_machine_are_no_end_where_the_store_has_whole_ones(words_of, tmp_path, capsys):
    assert main(*words_of(tmp_path, "a", "max_duration=5ba")) == 0
    for path in list_checkpoints(tmp_path / "a" / "checkpoints", FULL):
        path.write_bytes(b"")
    capsys.readouterr()
    assert main(*words_of(tmp_path, "a")) == 0
    assert "resumes from batch 5, 40 images" in capsys.readouterr().err


def test_a_folder_that_is_newer_than_the_store_stays_and_the_store_is_brought_to_it(words_of, bucket, tmp_path, capsys):
    address, _ = bucket
    assert main(*words_of(tmp_path, "a", "max_duration=3ba")) == 0
    assert main(*words_of(tmp_path, "a", "max_duration=6ba", "save.remote=null")) == 0
    capsys.readouterr()
    assert main(*words_of(tmp_path, "a", "max_duration=8ba")) == 0
    said = capsys.readouterr().err
    assert "resumes from batch 6, 48 images" in said and "fetched" not in said
    assert numbers(address, "a", FULL) == [8, 6] and numbers(address, "a", WEIGHTS) == [64, 32]


def test_a_start_elsewhere_stops_the_one_before_and_its_files_stay_whole(
    words_of, bucket, tmp_path, capsys, monkeypatch
):
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
    assert (
        f"save.remote: another start of this run writes into {address}/a. This one stops: what it has since then is in "
        f"{tmp_path}/a.\n"
    ) in said and "Traceback" not in said
    assert read(client, f"{address}/a", "starts.jsonl") == b'{"start": 2}\n'


def test_a_signal_saves_and_uploads_within_the_grace(words_of, s3, tmp_path, capsys, monkeypatch):
    words = words_of(tmp_path, "a", f"save.remote={REMOTE}", "max_duration=10ba")
    assert stopped_in_batch_five(monkeypatch, signal.SIGTERM, *words) == 143
    [path] = [path for path in list_checkpoints(tmp_path / "a" / "checkpoints", FULL) if "0005-" in path.name]
    assert capsys.readouterr().err.endswith(
        f"SIGTERM: stopped after batch 5; saved {path}, in {REMOTE} too. The same command resumes it.\n"
    )
    assert numbers(REMOTE, "a", FULL)[0] == 5


def test_killed_and_its_folder_gone_two_ranks_with_parts_of_the_weights_go_on_from_the_store(words_of, s3, tmp_path):
    train_lose_and_go_on(words_of, tmp_path, "2", "sharding=full")


def test_the_mlperf_log_goes_on_too_with_one_beginning(miniature, bucket, tmp_path):
    more = ["mlperf.enabled=true", "eval.when=after", "eval.every_images=24", f"save.remote={bucket[0]}"]
    more += ["save.snapshot_every_images=null", "target.fid=1", "target.clip=0.99"]
    words = [word for word in miniature.small(tmp_path, "a") if word != "mlperf.enabled=false"]
    assert main(*words, *more, "max_duration=5ba") == 0
    shutil.rmtree(tmp_path / "a")
    assert main(*words, *more, "max_duration=10ba") == 0
    events = [
        json.loads(line.split(":::MLLOG ")[1])["key"] for line in (tmp_path / "a/mlperf.log").read_text().splitlines()
    ]
    assert [events.count(key) for key in ("run_start", "restart", "run_stop")] == [1, 1, 0]
