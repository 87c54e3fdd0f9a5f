"""prepare.laion: tables, hosts and folders as people have them: each of these cases was a fault once."""

from __future__ import annotations

import hashlib

import pytest
from internet import internet
from test_laion import QUICK, arrow, call, folder, left, parquet, write

from prepare.laion import command, images
from prepare.laion.config import LaionConfig, MetadataConfig, check

__all__ = ["folder"]


def test_names_of_columns_that_img2dataset_has_too(folder):
    """Lowercase `url` and `caption`, as COYO and CC12M have them, and columns with names of img2dataset's own."""
    with internet(folder) as hosts:
        urls = [f"{hosts.address}/picture/{number}" for number in range(3)]
        more = {name: ["x"] * 3 for name in ("key", "key_of_table", "status", "sha256", "URL", "json", "jpg")}
        table = arrow.table({"url": urls, "caption": ["a", "b", "c"], "width": [64] * 3, "height": [64] * 3, **more})
        names = [*table.column_names[:-1], "json"]  # and one of them twice
        parquet.write_table(table.rename_columns(names), folder / "metadata/a.parquet")
        assert call("filter", f"folder={folder}", "filter.min_side_px=10", "filter.unique=url") == 0
        assert call("images", f"folder={folder}", *QUICK, "workers=1") == 0
    statuses = parquet.read_table(folder / "tars/00000.parquet").to_pydict()
    assert statuses["url"] == urls and statuses["caption"] == ["a", "b", "c"] and statuses["status"] == ["success"] * 3
    assert statuses["key_of_table"] == statuses["key_of_table_"] == statuses["status_of_table"] == ["x"] * 3


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_texts_of_each_type_and_texts_that_are_no_utf8(folder, kind):
    content = [b"a", b"\xff\xfe", None, b"\xff\xfe"]
    with internet(folder) as hosts:
        urls = arrow.array([f"{hosts.address}/picture/{number}" for number in range(4)])
        texts = arrow.Array.from_buffers(arrow.string(), 4, arrow.array(content).buffers())
        if kind == "dictionary":
            urls, texts = urls.dictionary_encode(), texts.dictionary_encode()
        elif kind != "string":
            urls = urls.cast(getattr(arrow, kind)())
            texts = texts if kind == "string_view" else texts.cast(getattr(arrow, kind)())
        write(folder, "a", URL=urls, TEXT=texts)
        assert call("filter", f"folder={folder}", "filter.unique=TEXT") == 0
        assert call("images", f"folder={folder}", *QUICK, "workers=1") == 0
    statuses = parquet.read_table(folder / "tars/00000.parquet").to_pydict()
    assert statuses["caption"] == ["a", "\ufffd\ufffd", None] and statuses["status"] == ["success"] * 3


@pytest.mark.parametrize("kind", ["halffloat", "float32", "uint8", "dictionary"])
def test_numbers_of_each_type_are_compared(folder, kind):
    values = arrow.array([1, 3, None], arrow.float32())
    values = values.dictionary_encode() if kind == "dictionary" else values.cast(kind)
    write(folder, "a", URL=["u", "v", "w"], TEXT=["a"] * 3, similarity=values, WIDTH=values, HEIGHT=values)
    assert call("filter", f"folder={folder}", "filter.min_similarity=2", "filter.min_side_px=2") == 0
    assert [row["URL"] for row in left(folder)] == ["v"]


def test_columns_that_are_there_twice_are_refused(folder, capsys):
    names, columns = ["URL", "URL", "TEXT", "x", "x"], [arrow.array(["u"])] * 5
    parquet.write_table(arrow.Table.from_arrays(columns, names=names), folder / "metadata/a.parquet")
    assert call("filter", f"folder={folder}", "filter.unique=x") == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "has no column for url, or more than one: " in first and "has no column for unique, " in second


def test_parts_that_are_not_there_are_refused(folder, capsys):
    write(folder, "a.parquet", URL=["u"], TEXT=["a"])
    assert call("filter", f"folder={folder}") == 0
    assert capsys.readouterr().out.startswith("filter: 1 rows, 1 left")
    (folder / "metadata/b.parquet").symlink_to(folder / "nothing")
    assert call("filter", f"folder={folder}") == 2
    assert "b.parquet" in capsys.readouterr().err


def test_metadata_that_are_removed_in_part_leave_the_filtered_rows_whole(folder, capsys):
    """The parts are those of the plan: not what is left of the metadata, nor what was finished before a kill."""
    for name in "abc":
        write(folder, name, URL=[f"http://127.0.0.1:1/{name}"] * 2, TEXT=["a"] * 2)
    assert call("filter", f"folder={folder}") == 0
    (folder / "metadata/a.parquet").unlink()
    assert command.of_filter(LaionConfig(folder=str(folder))).rows == 6
    for path in (folder / "metadata").iterdir():
        path.unlink()
    (folder / "filtered/b.json").unlink()
    assert call("images", f"folder={folder}", "workers=1") == 2
    assert "filtered: 1 of 3 parts are missing. " in capsys.readouterr().err


def test_a_few_rows_of_dead_hosts_are_no_fault_of_the_network(folder, capsys):
    """The last tar of a part may have one row; else the stage could never be finished."""
    with internet(folder) as hosts:
        urls = [f"{hosts.address}/picture/{number}" for number in range(3)]
        write(folder, "a", URL=[*urls, "http://127.0.0.1:1/x"], TEXT=["a"] * 4)
        keys = [f"folder={folder}", "filter.rows_per_tar=3", *QUICK, "workers=1"]
        assert call("filter", *keys) == 0
        assert call("images", *keys) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "images: 4 rows, 3 left, 0.00 GiB; left out: Connection refused 1"
    )


def test_where_all_hosts_are_dead_a_part_is_not_kept_unless_that_is_wanted(folder, capsys):
    write(folder, "a", URL=[f"http://127.0.0.1:1/{number}" for number in range(30)], TEXT=["a"] * 30)
    assert call("filter", f"folder={folder}") == 0
    assert call("images", f"folder={folder}", *QUICK, "workers=1") == 1
    assert "of 30 rows of a.parquet 0 arrived (Connection refused: 30). Look at the network" in capsys.readouterr().err
    assert not list((folder / "tars").glob("*.tar"))
    assert call("images", f"folder={folder}", *QUICK, "workers=1", "images.min_success=0") == 1
    assert capsys.readouterr().out.startswith("images: 30 rows, 0 left, ")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("HTTP Error 404: \x1b[31mWe lost number 7", "HTTP Error 404"),
        ("HTTP Error 302: Found - Redirection to url 'file:///x' is not allowed", "HTTP Error 302"),
        ("[Errno 111] Connection refused", "Connection refused"),
        (
            "'ascii' codec can't encode characters in position 13-15: ordinal not in range(128)",
            "codec can't encode characters in : ordinal not in range",
        ),
        ("IncompleteRead(17 bytes read, 100 more expected)", "IncompleteRead"),
        ("<urlopen error \x1b[2Jno>", "[2Jno"),
    ],
)
def test_a_reason_has_nothing_of_its_row_or_of_what_a_host_says(message, reason):
    assert images.reason_of(message) == reason


def test_hosts_of_a_private_network_are_not_asked_unless_a_key_allows_it(folder, capsys):
    with internet(folder) as hosts:
        urls = [
            f"http://{host}:{hosts.server_port}/picture/{n}"
            for n, host in enumerate(["127.1", "localhost", "2130706433"])
        ]
        write(folder, "a", URL=urls, TEXT=["a"] * 3)
        assert call("filter", f"folder={folder}") == 0
        refused, given = [f"folder={folder}", "images.min_success=0", "workers=1"], "images.allow_private"
        assert call("images", *refused) == 1 and hosts.asked == 0
        assert "images: 3 rows, 0 left, 0.00 GiB; left out: not a public address 3\n" in capsys.readouterr().out
        assert call("images", *refused, f"{given}=true") == 2
        assert f"{given} was false, is true" in capsys.readouterr().err
        for path in (folder / "tars").iterdir():
            path.unlink() if path.is_file() else None
        assert call("images", *refused, f"{given}=true") == 0 and hosts.asked == 3


def test_pictures_whose_hosts_opt_out_are_left(folder, capsys):
    with internet(folder) as hosts:
        urls = [
            f"{hosts.address}/{kind}/{number}" for number, kind in enumerate(["no_use", "no_use", "picture", "no_use"])
        ]
        write(folder, "a", URL=urls, TEXT=["a"] * 4)
        assert call("filter", f"folder={folder}") == 0 and call("images", f"folder={folder}", *QUICK, "workers=1") == 0
    said = "4 rows, 1 left, 0.00 GiB; left out: Use of image disallowed by X-Robots-Tag directive 3"
    assert said in capsys.readouterr().out


def test_the_account_shows_a_bounded_number_of_reasons():
    found = str(command.Account("images", 100, 0, {f"reason {number}": 2 for number in range(50)}))
    assert found.count(" 2") >= command.MAX_REASONS and found.endswith(
        f", other reasons {100 - 2 * command.MAX_REASONS}"
    )


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


@pytest.mark.parametrize("urls", ["http://a/{part", "http://a/{nope}.parquet", "http://a/{part:zz}.parquet"])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_an_address_that_is_none_of_parts_is_refused(urls, num_parts):
    [problem] = check(LaionConfig(folder="a", metadata=MetadataConfig(urls=urls, num_parts=num_parts)))
    assert problem.text.startswith(f"metadata.urls: {urls} is no address of parts. Write {{part}} or ")


def test_addresses_whose_parts_have_one_name_or_are_on_no_host_are_refused(folder, capsys):
    for urls, said in (
        ("http://a/{part}/data.parquet", "is wanted twice"),
        ("ftp://a/{part}.parquet", "its addresses are "),
    ):
        assert call("metadata", f"folder={folder}", f"metadata.urls={urls}") == 2
        assert said in capsys.readouterr().err


def test_a_disk_that_takes_no_more_ends_with_a_line_and_the_same_command_goes_on(folder, capsys):
    import resource

    write(folder, "a", URL=[hashlib.sha256(b"%d" % number).hexdigest() for number in range(2000)], TEXT=["a"] * 2000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        assert call("filter", f"folder={folder}", "workers=1") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"Look at the disk of {folder}. What is done stays; " in capsys.readouterr().err
    assert call("filter", f"folder={folder}", "workers=1") == 0
    assert len(left(folder)) == 2000
