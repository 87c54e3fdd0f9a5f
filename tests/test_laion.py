"""prepare.laion: its filter against pandas, its duplicates against a set, its downloads from a small local internet."""

from __future__ import annotations

import io
import random
import re
import shutil
import tarfile
from pathlib import Path

import pandas
import pytest
import torch
from conftest import tree
from local_internet import GOOD, internet, write_table
from test_image_formats import big_png, rgba_png

from common.errors import Failed
from mds.images import decode_image
from prepare.laion import __main__
from prepare.laion.config import LaionConfig
from prepare.laion.images import bound_resizer

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("img2dataset")


def call(*words: str) -> int:
    return __main__.main(list(words))


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


def test_the_filter_is_that_of_pandas(folder):
    """Conditions one by one on a DataFrame, duplicates by drop_duplicates over all parts."""
    parts = [random_table(part, 300) for part in range(3)]
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
    account = __main__.filter_account(LaionConfig(folder=str(folder)))
    assert account.rows == 900 and account.kept == len(frame) == 900 - sum(account.left_out.values())
    for file in (parquet.ParquetFile(path).metadata for path in (folder / "filtered").glob("*.parquet")):
        lengths = [file.row_group(n).num_rows for n in range(file.num_row_groups)]
        assert set(lengths[:-1]) <= {7} and max(lengths, default=7) <= 7


def test_only_a_row_with_the_value_of_a_kept_row_is_a_duplicate(folder):
    columns = {"hash": [5, 5, None, None, 6, 6], "LICENSE": ["by", "by", "by", "by", None, "by"]}
    write(folder, "a", URL=[f"u{n}" for n in range(6)], TEXT=["a"] * 6, **columns)
    write(folder, "b", URL=["v"], TEXT=["a"], hash=[7], LICENSE=[None])
    assert call("filter", f"folder={folder}", "filter.unique=hash", "filter.licenses=by") == 0
    assert [row["URL"] for row in left(folder)] == ["u0", "u2", "u3", "u5"]


@pytest.mark.parametrize(
    ("columns", "key", "message"),
    [
        ({"LINK": ["u"]}, None, r"^filter: .*/a.parquet has no column for url, .*: url or image_url. It has "),
        ({"URL": [1], "TEXT": ["a"]}, None, "^filter: URL of .*/a.parquet is int64. Possible for url: texts. "),
        ({"URL": ["u"], "TEXT": ["a"]}, "licenses=by", "^filter: .* has no column for license, .* It has URL, TEXT.$"),
    ],
)
def test_columns_that_are_missing_or_of_another_type_are_named(folder, capsys, columns, key, message):
    write(folder, "a", **columns)
    assert call("filter", f"folder={folder}", *([f"filter.{key}"] if key else [])) == 2
    assert re.search(message, capsys.readouterr().err)


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


def test_without_rows_a_stage_is_refused_with_the_reason(folder, capsys):
    assert call("filter", f"folder={folder}") == 2
    assert capsys.readouterr().err.startswith(f"folder: no *.parquet in {folder}/metadata.")
    write(folder, "a", URL=[None], TEXT=["a"])
    assert call("filter", f"folder={folder}") == 1
    assert call("images", f"folder={folder}") == 2
    assert "filter: no row is left. Loosen its conditions." in capsys.readouterr().err
    assert call("filter", f"folder={folder}", "filter.rows_per_tar=5") == 2
    assert "filter.rows_per_tar was 10000, is 5" in capsys.readouterr().err


# --- the keys ---


# --- the download ---

QUICK = ["images.timeout_sec=5", "images.most_sec=2", "images.most_mib=1", "images.threads=16"]
QUICK += ["images.allow_private=true"]  # the hosts of these tests are on this machine


@pytest.mark.timeout(240, func_only=True)
def test_images_are_downloaded_from_faulty_hosts_and_each_row_has_its_reason(folder):
    with internet() as hosts:
        write_table(folder / "metadata", hosts, 2, 60)
        conditions = ["licenses=not ?", "min_side_px=32", "unique=url", "rows_per_tar=30"]
        keys = [f"folder={folder}", *(f"filter.{condition}" for condition in conditions)]
        assert call("filter", *keys) == 0
        assert call("images", *keys, *QUICK, "workers=2") == 0
        files = tree(folder / "tars")
        shutil.rmtree(folder / "tars")
        assert call("images", *keys, *QUICK, "workers=1") == 0
    assert tree(folder / "tars") == files
    wanted = [row["URL"] for row in left(folder)]
    account = __main__.images_account(LaionConfig(folder=str(folder)))
    good = tuple(hosts.url(f"{kind}/") for kind in GOOD)
    assert account.kept == sum(url.startswith(good) for url in wanted) > 30 and account.rows == len(wanted)
    reasons = {"HTTP Error 404", "HTTP Error 403", "Connection refused", "not an image", "took more than 2 s"}
    reasons |= {"more than 1 MiB", "unknown url type: file", "IncompleteRead", "image of zero bytes"}
    assert account.left_out.keys() == {*reasons, "Use of image disallowed by X-Robots-Tag directive"}
    with tarfile.open(folder / "tars/00000.tar") as tar:
        names = tar.getnames()
    assert names == sorted(names) and len(names) % 3 == 0


def test_a_header_is_read_before_opencv_decodes_and_transparency_has_the_levels_of_its_bits(tmp_path):
    resizer = pytest.importorskip("img2dataset.resizer")
    keys = dict(image_size=64, resize_mode="no", resize_only_if_bigger=True, skip_reencode=True)
    resize = bound_resizer(resizer.Resizer)(**keys)
    assert resize(io.BytesIO(big_png())) == (None, None, None, None, None, "too many pixels")
    # Half transparent. Of 16 bits OpenCV returns all, which img2dataset takes for 8: it would store (0, 255, 255).
    wide = rgba_png(16, (0, 32_768, 65_535, 32_768))
    for content in (wide, rgba_png(8, (0, 128, 255, 128))):
        made, *sizes, error = resize(io.BytesIO(content))
        assert error is None and sizes == [16, 16, 16, 16]
        assert (decode_image(made)[:, 8, 8].int() - torch.tensor([127, 191, 255])).abs().max() <= 3


# --- the account ---


def test_the_accounts_balance_and_need_no_metadata_once_they_are_filtered(folder, capsys):
    with pytest.raises(Failed, match="^account: filter: 1 of 11 rows are unaccounted for.$"):
        __main__.check_accounts([__main__.Account("filter", 11, 7, {"duplicate": 3})])
    counted = __main__.Account("filter", 10, 7, {"duplicate": 3})
    with pytest.raises(Failed, match="^account: filter left 7 rows, images read 6. They are of different commands: "):
        __main__.check_accounts([counted, __main__.Account("images", 6, 6, {})])
    write(folder, "a", URL=["u", "u"], TEXT=["a", "b"])
    assert call("filter", f"folder={folder}", "filter.unique=url") == 0
    (folder / "metadata/a.parquet").unlink()
    capsys.readouterr()
    assert call("account", f"folder={folder}") == 0
    _, second, *_, last = capsys.readouterr().out.splitlines()
    assert second == "filter: 2 rows, 1 left, 0.00 GiB; left out: duplicate 1"
    assert last == "all 2 rows are accounted for: 1 are left after filter"


# --- the metadata ---


def test_parts_are_fetched_once_and_opened(folder, capsys):
    with internet() as hosts:
        write_table(folder / "files", hosts, 2, 10)
        paths = sorted((folder / "files").glob("*.parquet"))
        keys = [f"metadata.urls={hosts.url('files/part-{part:05d}.parquet')}", "metadata.num_parts=2"]
        assert call("metadata", f"folder={folder}", *keys) == 0
        assert all((folder / "metadata" / path.name).read_bytes() == path.read_bytes() for path in paths)
        num_asked = len(hosts.asked)
        assert call("metadata", f"folder={folder}", *keys) == 0 and len(hosts.asked) == num_asked
        hosts.put("files/part-00001.parquet", b"PAR1, and no more")
        assert call("metadata", f"folder={folder / 'other'}", *keys) == 1
        assert "part-00001.parquet" in capsys.readouterr().err
