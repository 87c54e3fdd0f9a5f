"""prepare.laion: tables, hosts and folders as people have them: each of these cases was a fault once."""

from __future__ import annotations

import shutil

import pytest
from local_internet import internet
from test_laion import QUICK, call, folder, write

from prepare.laion import images

__all__ = ["folder"]


def test_a_few_dead_hosts_are_accepted_and_a_part_without_any_image_only_by_a_key(folder, capsys):
    """The last tar of a part may have one row; else the stage could never be finished."""
    with internet() as hosts:
        urls = [hosts.url(f"picture/{number}") for number in range(3)]
        write(folder, "a", URL=[*urls, "http://127.0.0.1:1/x"], TEXT=["a"] * 4)
        keys = [f"folder={folder}", "filter.rows_per_tar=3", *QUICK, "workers=1"]
        assert call("filter", *keys) == call("images", *keys) == 0
    assert "images: 4 rows, 3 left, 0.00 GiB; left out: Connection refused 1\n" in capsys.readouterr().out
    (folder / "dead" / "metadata").mkdir(parents=True)
    write(folder / "dead", "a", URL=[f"http://127.0.0.1:1/{number}" for number in range(30)], TEXT=["a"] * 30)
    keys = [f"folder={folder}/dead", *QUICK, "workers=1"]
    assert call("filter", f"folder={folder}/dead") == 0 and call("images", *keys) == 1
    assert "of 30 rows of a.parquet 0 arrived (Connection refused: 30). Look at the network" in capsys.readouterr().err
    assert call("images", *keys, "images.min_success=0") == 1


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("HTTP Error 404: \x1b[31mWe lost number 7", "HTTP Error 404"),
        ("'ascii' codec can't encode characters in position 13-15: no", "codec can't encode characters in : no"),
        ("IncompleteRead(17 bytes read, 100 more expected)", "IncompleteRead"),
        ("<urlopen error \x1b[2Jno>", "[2Jno"),
    ],
)
def test_a_reason_has_nothing_of_its_row_or_of_a_hosts_own_text(message, reason):
    assert images.normalize_reason(message) == reason


def test_hosts_of_a_private_network_are_not_asked_unless_a_key_allows_it(folder, capsys):
    with internet() as hosts:
        names = enumerate(["127.1", "localhost", "2130706433"])
        write(folder, "a", URL=[f"http://{host}:{hosts.port}/picture/{n}" for n, host in names], TEXT=["a"] * 3)
        assert call("filter", f"folder={folder}") == 0
        words, key = [f"folder={folder}", "images.min_success=0", "workers=1"], "images.allow_private"
        assert call("images", *words) == 1 and hosts.asked == []
        assert "images: 3 rows, 0 left, 0.00 GiB; left out: not a public address 3\n" in capsys.readouterr().out
        shutil.rmtree(folder / "tars")
        assert call("images", *words, f"{key}=true") == 0 and len(hosts.asked) == 3


def test_damaged_files_of_a_stage_are_named(folder, capsys):
    write(folder, "a", URL=["http://127.0.0.1:1/x"], TEXT=["a"])
    assert call("filter", f"folder={folder}") == 0
    whole = (folder / "filtered/a.parquet").read_bytes()
    (folder / "filtered/a.parquet").write_bytes(whole[:50])
    assert call("images", f"folder={folder}", "workers=1") == 1
    assert "a.parquet: cannot be read as Parquet" in capsys.readouterr().err
    (folder / "filtered/a.parquet").write_bytes(whole)
    (folder / "filtered/a.json").write_bytes(b"{")
    assert call("account", f"folder={folder}") == 1
    assert "account: filter: a file of it is damaged: JSONDecodeError: " in capsys.readouterr().err
