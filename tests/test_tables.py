"""prepare/tables.py and hub_datasets.py with pyarrow and `datasets`, which `make test-tables` has next to the environment."""

from __future__ import annotations

import datetime
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import picture, tree
from test_shards import SIZES, rows, skipped
from test_sources import make, write_pictures

from prepare import addresses, shards, tables

HAS = {name: importlib.util.find_spec(name) is not None for name in ("pyarrow", "datasets")}
if HAS["pyarrow"]:
    import pyarrow
    import pyarrow.parquet
with_pyarrow = pytest.mark.skipif(not HAS["pyarrow"], reason="pyarrow: make test-tables has it")
with_datasets = pytest.mark.skipif(not HAS["datasets"], reason="datasets: make test-tables has it")


def images(count: int, first: int = 0) -> list[bytes]:
    return [picture(n, SIZES[n % 4]) for n in range(first, first + count)]


def write_parquet(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=3)
    return path


def as_hugging_face(files: list[bytes | None], paths: list[str | None]) -> Any:
    pairs = [{"bytes": content, "path": path} for content, path in zip(files, paths, strict=True)]
    return pyarrow.array(pairs, pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]))


@pytest.fixture
def hub_folder(tmp_path: Path) -> Path:
    """A dataset in the form of one on the hub: two files of a split, one of another."""
    for split, number, count in (("train", 0, 4), ("train", 1, 3), ("test", 0, 2)):
        files = as_hugging_face(images(count, 4 * number), [f"{n}.jpg" for n in range(count)])
        name = f"{split}-{number:05d}-of-{2 if split == 'train' else 1:05d}.parquet"
        text = [f"{split} {number} {n}" for n in range(count)]
        write_parquet(tmp_path / "hub" / "data" / name, image=files, text=text, label=list(range(count)))
    return tmp_path / "hub"


@pytest.mark.parametrize("module", ["pyarrow", "datasets"])
def test_a_library_that_is_missing_is_named_with_how_to_install_it(tmp_path, capsys, monkeypatch, module):
    (tmp_path / "t.parquet").touch()
    for name in (module, "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    assert make(tmp_path / "t.parquet" if module == "pyarrow" else "owner/name", tmp_path / "out") == 2
    message = (
        f"{module} is not installed, which reads Parquet and Arrow files and Hugging Face datasets. Run: pip install "
    )
    assert f"{message}--no-deps -r requirements/tables.lock\n" in capsys.readouterr().err


@with_pyarrow
def test_parquet_gives_the_bytes_captions_and_metadata_of_its_rows(tmp_path, capsys):
    files = [*images(4), None, b"?"]
    columns = {"TEXT": [f"number {n}" for n in range(6)], "id": list(range(10, 16)), "other": [b"x"] * 6}
    columns |= {"day": [datetime.date(2024, 2, 3)] * 6, "score": [0.5] * 5 + [float("nan")]}
    assert make(write_parquet(tmp_path / "t.parquet", jpg=files, **columns), tmp_path / "out") == 0
    written = rows(tmp_path / "out")
    assert [(row["jpg"], row["key"]) for row in written] == [(files[n], f"{10 + n}") for n in range(4)]
    assert written[0]["caption"] == "number 0" and written[0]["metadata"] == {"day": "2024-02-03", "score": 0.5}
    reasons = [("t.parquet", "14", "missing image"), ("t.parquet", "15", "not an image")]
    assert skipped(tmp_path / "out" / "skipped.jsonl") == reasons
    assert capsys.readouterr().out.startswith("taken: image from jpg, caption from TEXT, key from id\n")


@with_pyarrow
def test_every_file_of_a_folder_is_a_part_and_a_broken_one_is_counted(tmp_path):
    folder = tmp_path / "in"
    for number in range(3):
        write_parquet(folder / f"{number}.parquet", image=images(5, 5 * number), text=["x"] * 5)
    write_parquet(folder / "3.parquet", image=[], text=[])
    write_parquet(folder / "4.parquet", image=images(1), words=["x"])
    whole = (folder / "1.parquet").read_bytes()
    (folder / "1.parquet").write_bytes(whole[: len(whole) // 2])
    assert make(folder, tmp_path / "out") == 1
    assert [row["jpg"] for row in rows(tmp_path / "out")] == [*images(5), *images(5, 10)]
    reasons = {"1": "cannot be read to its end", "3": "has no sample", "4": "no column text"}
    faults = [entry for entry in skipped(tmp_path / "out" / "skipped.jsonl") if entry[1] is None]
    assert faults == [(f"{name}.parquet", None, reason) for name, reason in reasons.items()]


@with_pyarrow
def test_images_as_hugging_face_stores_them_may_be_bytes_or_a_path_beside_the_file(tmp_path):
    [path] = write_pictures(tmp_path, 1)
    files = as_hugging_face([picture(5), None, None, None], ["a.jpg", path, None, "img/none.jpg"])
    captions = [[f"a{n}", f"b{n}"] for n in range(4)]
    assert make(write_parquet(tmp_path / "t.parquet", image=files, caption=captions), tmp_path / "out") == 0
    written = [(row["jpg"], row["captions"]) for row in rows(tmp_path / "out")]
    assert written == [(picture(5), ["a0", "b0"]), (picture(0, SIZES[0]), ["a1", "b1"])]
    reasons = [("t/00000002", "missing image"), ("t/00000003", "no such image file")]
    assert [entry[1:] for entry in skipped(tmp_path / "out" / "skipped.jsonl")] == reasons


@with_pyarrow
def test_arrow_streams_and_feather_give_the_rows_of_parquet(tmp_path):
    columns = {"image": images(20), "text": [f"number {n}" for n in range(20)], "meta": [{"a": n} for n in range(20)]}
    table = pyarrow.table(columns)
    write_parquet(tmp_path / "t.parquet", **columns)
    for name, new in (("a", pyarrow.ipc.new_stream), ("b", pyarrow.ipc.new_file)):
        (tmp_path / name).mkdir()
        with pyarrow.OSFile(str(tmp_path / name / "t.arrow"), "wb") as file, new(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=18)
    for name in ("t.parquet", "a", "b"):
        assert make(tmp_path / name, tmp_path / f"{name}-out") == 0
    assert rows(tmp_path / "t.parquet-out") == rows(tmp_path / "a-out") == rows(tmp_path / "b-out")
    (tmp_path / "a" / "t.arrow").write_bytes((tmp_path / "a" / "t.arrow").read_bytes()[:20_000])
    assert make(tmp_path / "a", tmp_path / "cut") == 1
    assert skipped(tmp_path / "cut" / "skipped.jsonl") == [("t.arrow", None, "cannot be read to its end")]


@with_pyarrow
def test_parquet_in_a_store_gives_what_it_gives_on_disk_and_names_images_beside_it(in_store, tmp_path):
    paths = write_pictures(tmp_path / "in", 2)
    write_parquet(tmp_path / "in" / "data" / "0.parquet", image=images(4), text=["x"] * 4)
    write_parquet(tmp_path / "in" / "data" / "1.parquet", image=images(2, 4), text=["x"] * 2)
    write_parquet(tmp_path / "in" / "paths.parquet", file_name=paths, text=["x"] * 2)
    address = in_store(tmp_path / "in", "tables")
    assert make(f"{address}/data", tmp_path / "out") == make(tmp_path / "in" / "data", tmp_path / "disk") == 0
    assert rows(tmp_path / "out") == rows(tmp_path / "disk") and len(rows(tmp_path / "out")) == 6
    assert not (tmp_path / "out" / addresses.WORK).exists()
    assert make(f"{address}/paths.parquet", tmp_path / "paths") == 0
    assert [row["jpg"] for row in rows(tmp_path / "paths")] == images(2)


# --- Hugging Face datasets ---


@with_datasets
def test_a_split_is_read_by_datasets_file_by_file_with_the_images_own_bytes(hub_folder, tmp_path):
    assert make(hub_folder, tmp_path / "out", "split=train") == 0
    written = rows(tmp_path / "out")
    captions = [f"train {n // 4} {n % 4}" for n in range(7)]
    assert [row["jpg"] for row in written] == images(7) and [row["caption"] for row in written] == captions
    assert written[4]["key"] == "train-00001/00000000" and written[4]["metadata"] == {"label": 0}
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())["parts"]
    assert [part["name"] for part in plan] == [f"hub default train, file {n} of 2" for n in (1, 2)]
    assert shards.main([str(hub_folder), str(tmp_path / "two"), "split=train", "workers=2"]) == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "two")


# --- a hub on loopback ---


@pytest.fixture
def on_hub(hub, hub_folder, monkeypatch) -> Iterator[str]:
    """The commit of `hub_folder` on the hub of tests/hub_server.py, as me/pictures."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.address)
    tables.open_stream.cache_clear()
    yield hub.add("me/pictures", hub_folder)
    tables.open_stream.cache_clear()


@with_datasets
def test_a_data_set_on_the_hub_is_streamed_from_a_commit_that_the_plan_keeps(hub, on_hub, tmp_path, capsys):
    hub.missing.add("data/train-00001-of-00002.parquet")
    assert make("hf://datasets/me/pictures", tmp_path / "out") == 1
    assert "SOURCE: me/pictures default train, file 2 of 2 cannot be read: " in capsys.readouterr().err
    assert not (tmp_path / "out" / "dataset.json").exists()
    hub.missing.clear()
    tables.open_stream.cache_clear()
    assert make("me/pictures", tmp_path / "out", f"revision={on_hub}", "split=train") == 0
    assert "1 of 2 parts are done already, the work continues" in capsys.readouterr().out
    assert [row["jpg"] for row in rows(tmp_path / "out")] == images(7)
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())["parts"]
    assert plan == [{"name": f"me/pictures default train, file {n} of 2", "revision": on_hub} for n in (1, 2)]
    assert shards.main(["me/pictures@main", str(tmp_path / "two"), "workers=2"]) == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "two")
