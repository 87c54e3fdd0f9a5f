"""prepare.laion: its filter against pandas, its duplicates against a set, its downloads from a small local internet."""

from __future__ import annotations

import io
import random
import tarfile
from pathlib import Path

import pytest
import torch
from conftest import tree
from internet import GOOD, internet, write_table
from test_image_files import big_png, rgba_png

from cli.errors import Failed
from prepare.laion import command
from prepare.laion.config import LaionConfig, MetadataConfig, check
from prepare.laion.images import bounded
from stages.images import decode_image

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("img2dataset")


def call(*words: str) -> int:
    return command.main(list(words))


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "metadata").mkdir()
    return tmp_path


def write(folder: Path, name: str, **columns) -> None:
    parquet.write_table(arrow.table(columns), folder / "metadata" / f"{name}.parquet", row_group_size=5)


def left(folder: Path) -> list[dict]:
    files = sorted((folder / "filtered").glob("*.parquet"))
    return [row for file in files for row in parquet.read_table(file).to_pylist()]


# --- the filter ---


def random_table(seed: int, num: int) -> dict[str, list]:
    draw = random.Random(seed)

    def some(*values):
        return [draw.choice(values) for _ in range(num)]

    return {
        "URL": [draw.choice([None, "", "http://a/1", "http://a/2", f"http://a/{n}"]) for n in range(num)],
        "TEXT": some("a", None, "b"),
        "WIDTH": some(0, 100, 512, 1024, None),
        "HEIGHT": some(100, 512, 700),
        "LICENSE": some("?", None, "by", "by-nc"),
        "NSFW": some("UNLIKELY", "NSFW", None),
        "LANGUAGE": some("en", "fr", None),
        "similarity": some(0.1, 0.3, 0.5, float("nan"), None),
        "punsafe": some(0.0, 0.5, 0.9),
    }


@pytest.mark.parametrize("seed", range(5))
def test_the_filter_is_that_of_pandas(folder, seed):
    """Conditions one by one on a DataFrame, duplicates by drop_duplicates over all parts."""
    import pandas

    parts = [random_table(10 * seed + part, 300) for part in range(3)]
    for number, part in enumerate(parts):
        write(folder, f"part-{number}", **part)
    keys = ["licenses=not ?", "nsfw=UNLIKELY", "languages=en,fr", "min_side_px=512", "max_aspect=1.5"]
    keys += ["min_similarity=0.3", "max_unsafe=0.6", "unique=url", "rows_per_tar=7"]
    assert call("filter", f"folder={folder}", *(f"filter.{key}" for key in keys)) == 0

    frame = pandas.concat([pandas.DataFrame(part) for part in parts], ignore_index=True)
    frame = frame[frame.URL.notna() & (frame.URL != "")]
    frame = frame[(frame.LICENSE != "?") & frame.NSFW.isin(["UNLIKELY"]) & frame.LANGUAGE.isin(["en", "fr"])]
    small, large = frame[["WIDTH", "HEIGHT"]].min(axis=1, skipna=False), frame[["WIDTH", "HEIGHT"]].max(axis=1)
    frame = frame[(small >= 512) & (large <= 1.5 * small) & (frame.similarity >= 0.3) & (frame.punsafe <= 0.6)]
    frame = frame.drop_duplicates("URL")
    assert 0 < len(frame) < 300
    assert [(row["URL"], row["TEXT"], row["similarity"]) for row in left(folder)] == [
        (row.URL, row.TEXT if isinstance(row.TEXT, str) else None, row.similarity) for row in frame.itertuples()
    ]
    found = command.of_filter(LaionConfig(folder=str(folder)))
    assert found.rows == 900 and found.kept == len(frame) and found.rows - found.kept == sum(found.left_out.values())
    groups = [parquet.ParquetFile(file).metadata for file in sorted((folder / "filtered").glob("*.parquet"))]
    lengths = [[of.row_group(n).num_rows for n in range(of.num_row_groups)] for of in groups]
    assert all(set(length[:-1]) <= {7} and 0 < length[-1] <= 7 for length in lengths if length)


def test_a_value_of_another_kind_has_its_digest_and_a_missing_one_is_never_a_duplicate(folder):
    write(folder, "a", URL=["u1", "u2", "u3", "u4"], TEXT=["a"] * 4, hash=[5, 5, None, None])
    assert call("filter", f"folder={folder}", "filter.unique=hash") == 0
    assert [row["URL"] for row in left(folder)] == ["u1", "u3", "u4"]


def test_an_earlier_row_that_is_left_out_for_another_reason_makes_no_duplicate(folder):
    write(folder, "a", URL=["u", "u", "u"], TEXT=["a", "b", "c"], LICENSE=["?", "by", "by"])
    assert call("filter", f"folder={folder}", "filter.unique=url", "filter.licenses=not ?") == 0
    assert [row["TEXT"] for row in left(folder)] == ["b"]


@pytest.mark.parametrize(
    ("columns", "keys", "message"),
    [
        (
            {"LINK": ["u"]},
            [],
            r"^filter: .*/a.parquet has no column for url, .*: url or image_url. It has LINK.\nfilter: ",
        ),
        ({"URL": [1], "TEXT": ["a"]}, [], "^filter: URL of .*/a.parquet is int64. Possible for url: texts. "),
        (
            {"URL": ["u"], "TEXT": ["a"]},
            ["licenses=by"],
            "^filter: .* has no column for license, .* It has URL, TEXT.$",
        ),
        ({"URL": ["u"], "TEXT": ["a"]}, ["unique=md5"], "^filter: .* has no column for unique, .* It has URL, TEXT.$"),
        (
            {"URL": ["u"], "TEXT": ["a"], "similarity": ["x"]},
            ["min_similarity=0.3"],
            "^filter: similarity of .* is string. Possible for similarity: numbers. ",
        ),
    ],
)
def test_columns_that_are_not_there_or_are_of_another_type_are_named(folder, capsys, columns, keys, message):
    write(folder, "a", **columns)
    assert call("filter", f"folder={folder}", *(f"filter.{key}" for key in keys)) == 2
    import re

    assert re.search(message, capsys.readouterr().err)


def test_a_part_without_any_value_in_a_column_is_one_of_nulls(folder):
    write(folder, "a", URL=["u"], TEXT=["a"], LICENSE=[None])
    write(folder, "b", URL=["v"], TEXT=["a"], LICENSE=["by"])
    assert call("filter", f"folder={folder}", "filter.licenses=by") == 0
    assert [row["URL"] for row in left(folder)] == ["v"]


def test_a_truncated_part_is_refused_and_one_that_is_damaged_inside_stops_the_stage(folder, capsys):
    write(folder, "a", URL=[f"u{n}" * 50 for n in range(1000)], TEXT=["a"] * 1000)
    path = folder / "metadata/a.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert call("filter", f"folder={folder}") == 2
    assert "a.parquet: cannot be read as Parquet" in capsys.readouterr().err
    path.write_bytes(whole[:3000] + b"\xff" * 300 + whole[3300:])
    assert call("filter", f"folder={folder}") == 1
    assert "a.parquet: damaged after row" in capsys.readouterr().err
    path.write_bytes(whole)
    assert not list((folder / "filtered").glob("*.parquet"))


def test_other_conditions_than_those_that_were_begun_with_are_refused(folder, capsys):
    write(folder, "a", URL=["u"], TEXT=["a"])
    assert call("filter", f"folder={folder}") == 0
    assert call("filter", f"folder={folder}", "filter.rows_per_tar=5") == 2
    assert "filter.rows_per_tar was 10000, is 5" in capsys.readouterr().err


def test_without_rows_the_stage_says_so(folder, capsys):
    assert call("filter", f"folder={folder}") == 2
    assert capsys.readouterr().err.startswith(f"folder: no *.parquet in {folder}/metadata.")
    assert call("images", f"folder={folder}") == 2
    assert "filter: " in capsys.readouterr().err
    write(folder, "a", URL=[None], TEXT=["a"])
    assert call("filter", f"folder={folder}") == 1
    assert call("images", f"folder={folder}") == 2
    assert "filter: no row is left. Loosen its conditions." in capsys.readouterr().err


# --- the keys ---


def test_bad_keys_are_named(capsys):
    assert call("filters") == 2
    assert capsys.readouterr().err.startswith(
        "command line: 'filters' is no stage. Possible: metadata, filter, images, all, account."
    )
    assert call("filter") == 2
    assert capsys.readouterr().err == "folder: not given. Give the folder of the metadata, rows and tars.\n"
    [problem] = check(LaionConfig(folder="a", metadata=MetadataConfig(urls="http://a/part.parquet")))
    assert problem.text.startswith("metadata.urls: http://a/part.parquet is no address of parts. Write {part} or ")


# --- the download ---

QUICK = ["images.timeout_sec=5", "images.most_sec=2", "images.most_mib=1", "images.threads=16"]
QUICK += ["images.allow_private=true"]  # the hosts of these tests are on this machine


@pytest.mark.timeout(240, func_only=True)
def test_pictures_come_from_hosts_with_faults_and_each_row_has_its_reason(folder):
    with internet(folder) as hosts:
        write_table(folder / "metadata", hosts.address, 2, 110)
        keys = [
            f"folder={folder}",
            "filter.licenses=not ?",
            "filter.min_side_px=32",
            "filter.unique=url",
            "filter.rows_per_tar=50",
        ]
        assert call("filter", *keys) == 0
        assert call("images", *keys, *QUICK, "workers=2") == 0
        files = tree(folder / "tars")
        for path in (folder / "tars").iterdir():
            path.unlink() if path.is_file() else None
        assert call("images", *keys, *QUICK, "workers=1") == 0
    assert tree(folder / "tars") == files
    wanted = [row["URL"] for row in left(folder)]
    found = command.of_images(LaionConfig(folder=str(folder)))
    good = tuple(f"{hosts.address}/{kind}/" for kind in GOOD)
    assert found.kept == sum(url.startswith(good) for url in wanted) > 50
    assert found.rows == len(wanted) and found.left_out.keys() == {
        "HTTP Error 404",
        "HTTP Error 403",
        "Connection refused",
        "not an image",
        "took more than 2 s",
        "more than 1 MiB",
        "unknown url type: file",
        "Use of image disallowed by X-Robots-Tag directive",
        "IncompleteRead",
        "image of zero bytes",
    }
    with tarfile.open(folder / "tars/00000.tar") as tar:
        names = tar.getnames()
    assert names == sorted(names) and len(names) % 3 == 0


def test_a_header_is_read_before_opencv_decodes_and_transparency_has_the_levels_of_its_bits(tmp_path):
    resizer = pytest.importorskip("img2dataset.resizer")
    resize = bounded(resizer.Resizer)(image_size=64, resize_mode="no", resize_only_if_bigger=True, skip_reencode=True)
    assert resize(io.BytesIO(big_png())) == (None, None, None, None, None, "too many pixels")
    # Half transparent. Of 16 bits OpenCV returns all, which img2dataset takes for 8: it would store (0, 255, 255).
    wide = rgba_png(16, (0, 32_768, 65_535, 32_768))
    for content in (wide, rgba_png(8, (0, 128, 255, 128))):
        made, *sizes, error = resize(io.BytesIO(content))
        assert error is None and sizes == [16, 16, 16, 16]
        assert (decode_image(made)[:, 8, 8].int() - torch.tensor([127, 191, 255])).abs().max() <= 3


# --- the account ---


def test_a_row_that_no_stage_has_counted_is_an_error_and_so_is_a_stage_of_other_rows():
    of_filter = command.Account("filter", 10, 7, {"duplicate": 3})
    command.check_accounts([of_filter, command.Account("images", 7, 7, {})])
    with pytest.raises(Failed, match="^account: filter: 1 of 11 rows are unaccounted for.$"):
        command.check_accounts([command.Account("filter", 11, 7, {"duplicate": 3})])
    with pytest.raises(Failed, match="^account: filter left 7 rows, images read 6. They are of different commands: "):
        command.check_accounts([of_filter, command.Account("images", 6, 6, {})])


def test_the_account_says_what_is_not_finished_and_needs_no_metadata_once_they_are_filtered(folder, capsys):
    write(folder, "a", URL=["u", "u"], TEXT=["a", "b"])
    assert call("filter", f"folder={folder}", "filter.unique=url") == 0
    (folder / "metadata/a.parquet").unlink()
    capsys.readouterr()
    assert call("account", f"folder={folder}") == 0
    first, second, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("metadata: not finished (metadata: no *.parquet in ")
    assert second == "filter: 2 rows, 1 left, 0.00 GiB; left out: duplicate 1"
    assert last == "all 2 rows are accounted for: 1 are left after filter"


# --- the metadata ---


def test_parts_are_fetched_once_and_opened(folder, capsys):
    (folder / "files").mkdir()
    with internet(folder / "files") as hosts:
        write_table(folder / "files", hosts.address, 2, 10)
        paths = sorted((folder / "files").glob("*.parquet"))
        keys = [f"metadata.urls={hosts.address}/files/part-{{part:05d}}.parquet", "metadata.num_parts=2"]
        assert call("metadata", f"folder={folder}", *keys) == 0
        assert {path.name: path.read_bytes() for path in (folder / "metadata").glob("*.parquet")} == {
            path.name: path.read_bytes() for path in paths
        }
        asked = hosts.asked
        assert call("metadata", f"folder={folder}", *keys) == 0 and hosts.asked == asked
        (folder / "files/part-00001.parquet").write_bytes(b"PAR1, and no more")
        assert call("metadata", f"folder={folder / 'other'}", *keys) == 1
        assert "part-00001.parquet" in capsys.readouterr().err
