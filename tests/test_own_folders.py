"""Two machines, each with a run folder of its own, and a store that has what a start needs: training/shared_folder.py."""

from __future__ import annotations

import pytest
from machines import machines, said_by, words_of
from test_checkpoints import newest, same_training
from test_remote_checkpoints import bucket, numbers, read, stored  # noqa: F401

from record.checkpoint_files import FULL, listed
from record.files import METRICS, read_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500, func_only=True)]


def test_machines_with_a_folder_each_go_on_from_the_store_and_from_rank_0(bucket, tmp_path):  # noqa: F811
    address, client = bucket
    own = ["run_folder=runs", "global_batch_size=8", "save.every_images=24", "save.keep=4"]
    words = words_of(tmp_path, "a", *own, f"save.remote={address}", "save.patience_sec=60")

    def go(name: str, duration: str) -> str:
        """Both machines, each in its folder; what they have said."""
        folders = [tmp_path / name / str(rank) for rank in (0, 1)]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        commands = [["tests/in_folder.py", str(folder), *words, f"max_duration={duration}"] for folder in folders]
        with machines(*commands) as ranks:
            said = "".join(said_by(*ranks))
        assert [rank.returncode for rank in ranks] == [0, 0], said
        return said

    go("whole", "6ba")
    end = newest(tmp_path / "whole/0/runs", "a")
    assert numbers(address, "a", FULL) == [6, 3] and not list((tmp_path / "whole/1/runs/a").glob("checkpoints/*"))

    # Lost: both disks, and what was written last.
    for name in stored(address, "a"):
        if name == "summary.json" or "full-ba000000000006" in name:
            client.delete_object(Bucket="easel", Key=f"{address.removeprefix('s3://easel/')}/a/{name}")
    said = go("again", "6ba")
    assert "run_folder: " in said and "are sent there" in said and "resumes from batch 3, " in said
    assert same_training(newest(tmp_path / "again/0/runs", "a"), end)
    assert [line["batch"] for line in read_lines(tmp_path / "again/0/runs/a" / METRICS)] == list(range(1, 7))

    # The same machines once more: the copy that was sent before goes, the record is rank 0's.
    assert "resumes from batch 6, " in go("again", "7ba")
    copies = listed(tmp_path / "again/1/runs/a/checkpoints", FULL)
    assert [path.name for path in copies] == [listed(tmp_path / "again/0/runs/a/checkpoints", FULL)[1].name]
