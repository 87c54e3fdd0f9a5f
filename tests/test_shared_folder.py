"""Two machines with separate run folders, and a store that has what a start needs: checkpointing/shared_folder.py."""

from __future__ import annotations

import pytest
from test_checkpoint_uploads import bucket, numbers, read, stored  # noqa: F401
from test_checkpoints import newest, same_training
from two_machines import machines, said_by, words_of

from checkpointing.files import FULL, list_checkpoints
from run_folder.files import METRICS, read_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500, func_only=True)]


@pytest.mark.long
def test_machines_with_a_folder_each_go_on_from_the_store_and_from_rank_0(bucket, tmp_path):  # noqa: F811
    address, client = bucket
    own = ["run_folder=runs", "global_batch_size=8", "save.every_images=24", "save.keep=4"]
    words = words_of(tmp_path, "a", *own, f"save.remote={address}", "save.patience_sec=60")

    def go(first: str, second: str, duration: str, code: int = 0) -> str:
        """Both machines, each in its folder; what they have said."""
        folders = [tmp_path / name for name in (first, second)]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        commands = [["tests/run_in_folder.py", str(folder), *words, f"max_duration={duration}"] for folder in folders]
        with machines(*commands) as ranks:
            output = "".join(said_by(*ranks))
        assert [rank.returncode for rank in ranks] == [code, code], output
        return output

    def remove(*parts: str) -> None:
        for name in stored(address, "a"):
            if any(part in name for part in parts):
                client.delete_object(Bucket="easel", Key=f"{address.removeprefix('s3://easel/')}/a/{name}")

    go("a", "b", "6ba")
    end = newest(tmp_path / "a/runs", "a")
    assert numbers(address, "a", FULL) == [6, 3] and not list((tmp_path / "b/runs/a").glob("checkpoints/*"))

    # Lost: both disks, and what was written last.
    remove("summary.json", "full-ba000000000006")
    output = go("c", "d", "6ba")
    assert "run_folder: " in output and "they fetch the record" in output and "resumes from batch 3, " in output
    assert same_training(newest(tmp_path / "c/runs", "a"), end)
    assert [line["batch"] for line in read_lines(tmp_path / "c/runs/a" / METRICS)] == list(range(1, 7))

    # The same machines once more, and rank 0 is ahead of the store, which gets its checkpoint before the other one asks.
    remove("full-ba000000000006")
    assert "resumes from batch 6, " in go("c", "d", "7ba")
    copies = list_checkpoints(tmp_path / "d/runs/a/checkpoints", FULL)
    assert [path.name for path in copies] == [list_checkpoints(tmp_path / "c/runs/a/checkpoints", FULL)[1].name]
    assert "is finished" in go("c", "d", "7ba")

    # A store that has lost all, and a first machine that has nothing: the other one's copy is not passed over.
    remove("")
    output = go("e", "d", "8ba", code=2)
    assert "full-ba000000000006" in output and " has no checkpoint. Make " in output
    assert newest(tmp_path / "d/runs", "a")["progress"]["batch"] == 6
