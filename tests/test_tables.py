"""prepare/tables.py and hub_datasets.py with pyarrow and `datasets`, which `make test-tables` has beside the environment."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import importlib.util
import itertools
import json
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from conftest import picture, sample_files, tree, write_tar
from test_prepare import rows, skipped
from test_prepare_parts import die, in_child
from test_sources import bucket, facts, make, put, write_csv, write_pictures  # noqa: F401

from prepare import hub_datasets, places, shards, tables
from stages.images import SampleError

HAS = {name: importlib.util.find_spec(name) is not None for name in ("pyarrow", "datasets")}
with_pyarrow = pytest.mark.skipif(not HAS["pyarrow"], reason="pyarrow: make test-tables has it")
with_datasets = pytest.mark.skipif(not HAS["datasets"], reason="datasets: make test-tables has it")
SIZES = [(80, 96), (128, 64), (64, 64), (200, 150)]


def images(count: int, first: int = 0) -> list[bytes]:
    return [picture(n, SIZES[n % 4]) for n in range(first, first + count)]


def write_parquet(path: Path, **columns: Any) -> Path:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=3)
    return path


def as_hugging_face(files: list[bytes | None], paths: list[str | None]) -> Any:
    import pyarrow

    pairs = [{"bytes": content, "path": path} for content, path in zip(files, paths, strict=True)]
    return pyarrow.array(pairs, pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]))


@pytest.fixture
def hub_folder(tmp_path: Path) -> Path:
    """A data set in the form of one on the hub: two files of a split, one of another."""
    for split, number, count in (("train", 0, 4), ("train", 1, 3), ("test", 0, 2)):
        files = as_hugging_face(images(count, 4 * number), [f"{n}.jpg" for n in range(count)])
        name = f"{split}-{number:05d}-of-{2 if split == 'train' else 1:05d}.parquet"
        text = [f"{split} {number} {n}" for n in range(count)]
        write_parquet(tmp_path / "hub" / "data" / name, image=files, text=text, label=list(range(count)))
    return tmp_path / "hub"


@pytest.mark.parametrize("module", ["pyarrow", "datasets"])
def test_a_library_that_is_missing_is_named_with_how_to_install_it(tmp_path, capsys, monkeypatch, module):
    (tmp_path / "t.parquet").touch()
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    given = tmp_path / "t.parquet" if module == "pyarrow" else "owner/name"
    assert make(given, tmp_path / "out") == 2
    what = "" if module == "pyarrow" else "owner/name: no such file or folder here. To look for it on the hub: "
    assert capsys.readouterr().err == (
        f"SOURCE: {what}{module} is not installed, which reads Parquet and Arrow files and Hugging Face data sets. Run: pip "
        f"install --no-deps -r requirements/tables.lock\n"
    )


@with_pyarrow
def test_parquet_gives_the_bytes_captions_and_metadata_of_its_rows(tmp_path, capsys):
    import datetime

    day = datetime.date(2024, 2, 3)
    files = [*images(4), None, b"?"]
    columns = {
        "TEXT": [f"number {n}" for n in range(6)],
        "id": list(range(10, 16)),
        "day": [day] * 6,
        "other": [b"x"] * 6,
    }
    path = write_parquet(tmp_path / "t.parquet", jpg=files, **columns, score=[0.5] * 5 + [float("nan")])
    assert make(path, tmp_path / "out") == 0
    found = rows(tmp_path / "out")
    assert [row["jpg"] for row in found] == files[:4] and [row["key"] for row in found] == ["10", "11", "12", "13"]
    assert found[0]["caption"] == "number 0" and found[0]["metadata"] == {"day": "2024-02-03", "score": 0.5}
    assert skipped(tmp_path / "out" / "skipped.jsonl") == [
        ("t.parquet", "14", "missing image"),
        ("t.parquet", "15", "not an image"),
    ]
    assert capsys.readouterr().out.startswith("taken: image from jpg, caption from TEXT, key from id\n")


@with_pyarrow
def test_every_file_of_a_folder_is_a_part_and_a_broken_one_is_counted(tmp_path, capsys):
    folder = tmp_path / "in"
    for number in range(3):
        write_parquet(folder / f"{number}.parquet", image=images(5, 5 * number), text=["x"] * 5)
    write_parquet(folder / "3.parquet", image=[], text=[])
    write_parquet(folder / "4.parquet", image=images(1), words=["x"])
    whole = (folder / "1.parquet").read_bytes()
    (folder / "1.parquet").write_bytes(whole[: len(whole) // 2])
    (folder / "5.parquet").write_bytes(b"")
    assert make(folder, tmp_path / "out") == 1
    assert [row["jpg"] for row in rows(tmp_path / "out")] == [*images(5), *images(5, 10)]
    assert [entry for entry in skipped(tmp_path / "out" / "skipped.jsonl") if entry[1] is None] == [
        ("1.parquet", None, "cannot be read to its end"),
        ("3.parquet", None, "has no sample"),
        ("4.parquet", None, "no column text"),
        ("5.parquet", None, "cannot be read to its end"),
    ]
    assert make(folder / "4.parquet", tmp_path / "none", "caption=text") == 2
    assert capsys.readouterr().err.splitlines()[-1] == "caption: 4.parquet has no text. It has image, words."


@with_pyarrow
def test_a_page_that_is_damaged_ends_its_file_and_is_counted(tmp_path, capsys):
    files = images(40)
    path = write_parquet(tmp_path / "t.parquet", image=files, text=["x"] * 40)
    data = bytearray(path.read_bytes())
    at = data.index(files[35])
    data[at - 4 : at] = b"\xff\xff\xff\x7f"  # the length of that image
    path.write_bytes(data)
    assert make(path, tmp_path / "out") == 1
    assert [row["jpg"] for row in rows(tmp_path / "out")] == files[: 2 * tables.ROWS_AT_ONCE]
    assert skipped(tmp_path / "out" / "skipped.jsonl") == [("t.parquet", None, "cannot be read to its end")]
    lost = len(files) - 2 * tables.ROWS_AT_ONCE
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(
        f"found 40 samples, wrote {40 - lost}, skipped 0, failed {lost} (cannot be read to its end: {lost}); "
    )


def column_with(values: list[bytes], kind: Any) -> Any:
    """An array of texts that nobody has checked to be UTF-8, as writers of Parquet leave it."""
    import pyarrow

    return pyarrow.Array.from_buffers(kind, len(values), pyarrow.array(values, pyarrow.binary()).buffers())


@with_pyarrow
def test_a_cell_that_is_no_text_or_no_date_costs_its_row_or_is_null_and_no_other_row(tmp_path, capsys):
    import pyarrow

    texts = [f"caption {n}".encode() for n in range(40)]
    texts[20] = b"na\xefve"
    captions = column_with(texts, pyarrow.string())
    times = pyarrow.array([1] * 30 + [10**12] * 2 + [None] * 8, pyarrow.timestamp("s"))
    path = write_parquet(tmp_path / "t.parquet", image=images(40), caption=captions, when=times)
    assert make(path, tmp_path / "out") == 0
    assert skipped(tmp_path / "out" / "skipped.jsonl") == [("t.parquet", "t/00000020", "caption is not UTF-8")]
    found = rows(tmp_path / "out")
    assert [row["caption"] for row in found] == [f"caption {n}" for n in range(40) if n != 20]
    assert [row["metadata"]["when"] for row in found[28:32]] == ["1970-01-01 00:00:01", None, None, None]
    assert (
        "2 values of when have no Python value, such as a time out of range. They are null." in capsys.readouterr().err
    )


@with_pyarrow
def test_a_time_out_of_range_in_a_table_of_urls_is_null_too(capsys):
    import pyarrow

    from prepare.laion.images import _as_plain

    times = pyarrow.chunked_array([pyarrow.array([1, 10**12], pyarrow.timestamp("s"))])
    assert _as_plain(times, "when").to_pylist() == ["1970-01-01 00:00:01", None]
    assert capsys.readouterr().err.startswith("metadata: 1 values of when have no Python value")


@with_datasets
def test_a_cell_of_a_data_set_that_is_no_text_costs_its_row_alone(hub_folder, tmp_path):
    import pyarrow

    text = column_with([b"a", b"na\xefve", b"c", b"d"], pyarrow.string())
    files = as_hugging_face(images(4), [None] * 4)
    for path in (hub_folder / "data").iterdir():
        path.unlink()
    write_parquet(hub_folder / "data" / "train-00000-of-00001.parquet", image=files, text=text)
    hub_datasets.stream.cache_clear()
    assert make(hub_folder, tmp_path / "out", "split=train") == 0
    assert [row["caption"] for row in rows(tmp_path / "out")] == ["a", "c", "d"]
    assert [entry[2] for entry in skipped(tmp_path / "out" / "skipped.jsonl")] == ["caption is not UTF-8"]


@with_pyarrow
def test_killed_between_parquet_files_the_same_command_makes_the_same_bytes(tmp_path):
    for number in range(3):
        write_parquet(tmp_path / "in" / f"{number}.parquet", image=images(3, 3 * number), text=["x"] * 3)
    assert make(tmp_path / "in", tmp_path / "whole") == 0

    def killed() -> int:
        put_file, calls = places.Folder.put, itertools.count()

        def dying_put(self, name, file):
            put_file(self, name, file)
            if next(calls) == 3:
                die()

        places.Folder.put = dying_put
        return make(tmp_path / "in", tmp_path / "out")

    assert in_child(killed) == -signal.SIGKILL
    assert shards.main([str(tmp_path / "in"), str(tmp_path / "out"), "workers=2"]) == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@with_pyarrow
def test_images_as_hugging_face_stores_them_may_be_bytes_or_a_path_beside_the_file(tmp_path):
    [path] = write_pictures(tmp_path, 1)
    files = as_hugging_face([picture(5), None, None, None], ["a.jpg", path, None, "img/none.jpg"])
    captions = [[f"a{n}", f"b{n}"] for n in range(4)]
    assert make(write_parquet(tmp_path / "t.parquet", image=files, caption=captions), tmp_path / "out") == 0
    assert [(row["jpg"], row["captions"]) for row in rows(tmp_path / "out")] == [
        (picture(5), ["a0", "b0"]),
        (picture(0, SIZES[0]), ["a1", "b1"]),
    ]
    assert [entry[1:] for entry in skipped(tmp_path / "out" / "skipped.jsonl")] == [
        ("t/00000002", "missing image"),
        ("t/00000003", "no such image file"),
    ]


@with_pyarrow
def test_arrow_streams_and_feather_give_the_rows_of_parquet(tmp_path):
    import pyarrow

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
def test_parquet_in_a_store_gives_what_it_gives_on_disk_and_names_images_beside_it(bucket, tmp_path):  # noqa: F811
    paths = write_pictures(tmp_path / "in", 2)
    write_parquet(tmp_path / "in" / "data" / "0.parquet", image=images(4), text=["x"] * 4)
    write_parquet(tmp_path / "in" / "data" / "1.parquet", image=images(2, 4), text=["x"] * 2)
    write_parquet(tmp_path / "in" / "paths.parquet", file_name=paths, text=["x"] * 2)
    address = put(bucket, tmp_path / "in")
    assert make(f"{address}/data", tmp_path / "out") == make(tmp_path / "in" / "data", tmp_path / "disk") == 0
    assert rows(tmp_path / "out") == rows(tmp_path / "disk") and len(rows(tmp_path / "out")) == 6
    assert not (tmp_path / "out" / places.WORK).exists()
    assert make(f"{address}/paths.parquet", tmp_path / "paths") == 0
    assert [row["jpg"] for row in rows(tmp_path / "paths")] == images(2)


@with_pyarrow
def test_img2datasets_parquet_beside_its_tars_is_not_taken_for_images(tmp_path):
    write_tar(tmp_path / "in" / "00000.tar", {"a": sample_files(0)})
    write_parquet(tmp_path / "in" / "00000.parquet", url=["https://example.invalid/a.jpg"], caption=["x"])
    assert make(tmp_path / "in", tmp_path / "out") == 0 and [row["key"] for row in rows(tmp_path / "out")] == ["a"]


# --- Hugging Face data sets ---


@with_datasets
def test_a_split_is_read_by_datasets_file_by_file_with_the_images_own_bytes(hub_folder, tmp_path, capsys):
    assert make(hub_folder, tmp_path / "out", "split=train") == 0
    found = rows(tmp_path / "out")
    assert [row["jpg"] for row in found] == images(7)
    assert [row["caption"] for row in found] == [f"train 0 {n}" for n in range(4)] + [f"train 1 {n}" for n in range(3)]
    assert found[4]["key"] == "train-00001/00000000" and found[4]["metadata"] == {"label": 0}
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())["parts"]
    assert [part["name"] for part in plan] == [f"hub default train, file {n} of 2" for n in (1, 2)]
    assert shards.main([str(hub_folder), str(tmp_path / "two"), "split=train", "workers=2"]) == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "two")
    write_parquet(
        hub_folder / "data" / "train-00001-of-00002.parquet", image=as_hugging_face([None], ["x"]), text=["x"]
    )
    hub_datasets.stream.cache_clear()
    assert make(hub_folder, tmp_path / "out", "split=train") == 2
    assert "holds the finished work of another command: part-00000.digest was " in capsys.readouterr().err


@with_datasets
def test_a_folder_of_images_is_read_by_datasets_too(tmp_path):
    folder = tmp_path / "in" / "train"
    folder.mkdir(parents=True)
    for number in range(3):
        (folder / f"{number}.jpg").write_bytes(images(3)[number])
    write_csv(folder / "metadata.csv", ["file_name", "text"], [[f"{n}.jpg", f"number {n}"] for n in range(3)])
    assert make(tmp_path / "in", tmp_path / "out", "split=train") == 0
    assert [(row["jpg"], row["caption"]) for row in rows(tmp_path / "out")] == [
        (images(3)[n], f"number {n}") for n in range(3)
    ]


@with_datasets
def test_a_data_set_that_was_saved_is_read_without_its_library(hub_folder, tmp_path, capsys, monkeypatch):
    import datasets

    files = {
        name: str(hub_folder / "data" / f"{name}-00000-of-0000{n}.parquet") for name, n in (("train", 2), ("test", 1))
    }
    saved = datasets.DatasetDict(
        {name: datasets.Dataset.from_parquet(file, cache_dir=str(tmp_path / "cache")) for name, file in files.items()}
    )
    saved.save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / "train" / "cache-0.arrow").write_bytes(b"of a map")
    monkeypatch.setitem(sys.modules, "datasets", None)
    capsys.readouterr()
    assert make(tmp_path / "saved", tmp_path / "out") == 2
    assert capsys.readouterr().err == (
        f"SOURCE: {tmp_path}/saved holds several splits, by the names of its files: test, train. Give the files, or the "
        f"folder, of one; or split=NAME with the folder.\n"
    )
    assert make(tmp_path / "saved", tmp_path / "out", "split=train") == 0
    assert [row["jpg"] for row in rows(tmp_path / "out")] == images(4)


@with_datasets
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{hub}", "split=none"], "split: is none. {hub} has: train, test. Give split=NAME."),
        (["{hub}", "split=train", "config=en"], "config: is en. {hub} has: default. Give config=NAME."),
        (["{hub}", "revision=main"], "revision: {hub} is a folder, which has none. Leave it out."),
        (
            ["{hub}"],
            "SOURCE: {hub} holds several splits, by the names of its files: test, train. Give the files, or the folder, of "
            "one; or split=NAME with the folder.",
        ),
        (
            ["{hub}", "split=train", "caption=words"],
            "caption: hub default train, file 1 of 2 has no words. It has image, text, label.",
        ),
    ],
)
def test_a_data_set_that_is_not_there_as_asked_says_what_there_is(hub_folder, tmp_path, capsys, words, message):
    assert make(*(word.format(hub=hub_folder) for word in words[:1]), tmp_path / "out", *words[1:]) == 2
    assert capsys.readouterr().err == message.format(hub=hub_folder) + "\n"


# --- a hub on loopback ---

COMMIT = "a" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """What the hub's API says of one data set, me/pictures, from a folder. Real clients ask it."""

    protocol_version = "HTTP/1.1"
    root: Path
    is_away: set[str]

    def log_message(self, *said: Any) -> None:
        pass

    def answer(self, code: int, body: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def entry(self, path: Path) -> dict[str, Any]:
        name = path.relative_to(self.root).as_posix()
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": "1" * 40, "size": 0}
        oid = hashlib.sha1(path.read_bytes()).hexdigest()
        return {"type": "file", "path": name, "oid": oid, "size": path.stat().st_size}

    def do_GET(self) -> None:
        path, api = unquote(self.path).partition("?")[0], "/api/datasets/me/pictures"
        tree_of = re.fullmatch(rf"{api}/tree/{COMMIT}/?(.*)", path)
        if "/resolve/" in path and "gated" in self.is_away:
            return self.answer(403, b"{}", X_Error_Code="GatedRepo")
        file_of = re.fullmatch(rf"/datasets/me/pictures/resolve/{COMMIT}/(.*)", path)
        if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            names = [{"rfilename": p.relative_to(self.root).as_posix()} for p in self.root.rglob("*") if p.is_file()]
            return self.answer(200, json.dumps({"id": "me/pictures", "sha": COMMIT, "siblings": names}).encode())
        if path == "/api/datasets":
            return self.answer(200, json.dumps([{"id": "me/pictures"}, {"id": "me/words"}]).encode())
        if tree_of and (self.root / tree_of[1]).is_dir():
            return self.answer(
                200, json.dumps([self.entry(p) for p in sorted((self.root / tree_of[1]).iterdir())]).encode()
            )
        if file_of and (self.root / file_of[1]).is_file() and file_of[1] not in self.is_away:
            content = (self.root / file_of[1]).read_bytes()
            known = {"ETag": f'"{len(content)}"', "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
            if found := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                first, last = int(found[1]), min(int(found[2] or len(content)), len(content) - 1)
                of = f"bytes {first}-{last}/{len(content)}"
                return self.answer(206, content[first : last + 1], Content_Range=of, **known)
            return self.answer(200, content, **known)
        code = (
            "RevisionNotFound" if path.startswith(f"{api}/revision") else "EntryNotFound" if file_of else "RepoNotFound"
        )
        return self.answer(404, b"{}", X_Error_Code=code)

    do_HEAD = do_GET


@contextlib.contextmanager
def hub_of(folder: Path) -> Iterator[tuple[str, set[str]]]:
    """Serve a folder as the data set me/pictures: the hub's address, and names of files that it cannot give."""
    handler = type("HubOfFolder", (Hub,), {"root": folder, "is_away": set()})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler.is_away
        server.shutdown()


def online(monkeypatch) -> None:
    """Take out what conftest.py has said, so that nobody asks the real hub: here it is another one."""
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(hub_folder, tmp_path, monkeypatch) -> Iterator[set[str]]:
    """The hub of this process, which has `hub_folder` as me/pictures: names of files that it cannot give."""
    import datasets
    from huggingface_hub import constants

    with hub_of(hub_folder) as (address, is_away):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        online(monkeypatch)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", template.replace("https://huggingface.co", address)
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home"))
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", address)
        hub_datasets.stream.cache_clear()
        yield is_away
        hub_datasets.stream.cache_clear()


@with_datasets
def test_a_data_set_on_the_hub_is_streamed_from_a_commit_that_the_plan_keeps(hub, tmp_path, capsys):
    hub.add("data/train-00001-of-00002.parquet")
    assert make("hf://datasets/me/pictures", tmp_path / "out") == 1
    assert "SOURCE: me/pictures default train, file 2 of 2 cannot be read: " in capsys.readouterr().err
    assert not (tmp_path / "out" / "dataset.json").exists()
    hub.clear()
    hub_datasets.stream.cache_clear()
    assert make("me/pictures", tmp_path / "out", f"revision={COMMIT}", "split=train") == 0
    assert "1 of 2 parts are done already, the work continues" in capsys.readouterr().out
    assert [row["jpg"] for row in rows(tmp_path / "out")] == images(7)
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())["parts"]
    assert plan == [{"name": f"me/pictures default train, file {n} of 2", "revision": COMMIT} for n in (1, 2)]
    assert shards.main(["me/pictures@main", str(tmp_path / "two"), "workers=2"]) == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "two")


@with_datasets
def test_a_data_set_of_image_files_on_the_hub_gives_their_own_bytes_and_no_other_file(hub, hub_folder, tmp_path):
    for path in (hub_folder / "data").iterdir():
        path.unlink()
    for number in range(3):
        (hub_folder / "data" / f"{number}.jpg").write_bytes(images(3)[number])
    write_csv(hub_folder / "data" / "metadata.csv", ["file_name", "text"], [[f"{n}.jpg", "x"] for n in range(3)])
    hub.add("data/1.jpg")
    assert make("me/pictures", tmp_path / "out") == 0
    assert [row["jpg"] for row in rows(tmp_path / "out")] == [images(3)[0], images(3)[2]]
    assert [entry[1:] for entry in skipped(tmp_path / "out" / "skipped.jsonl")] == [
        ("train-00000/00000001", "no such image file")
    ]
    for path in (str(tmp_path / "hub" / "data" / "0.jpg"), "hf://datasets/me/words@main/0.jpg"):
        with pytest.raises(SampleError, match="path leads out of the data set"):
            hub_datasets.HubFiles("me/pictures")(path)


@with_datasets
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["me/pictuers"],
            "me/pictuers: no such folder here, and not to be read on the hub: ",
        ),
        (
            ["me/unlike"],
            "me/unlike: no such folder here, and not to be read on the hub: ",
        ),
        (
            ["me/pictures", "revision=v2"],
            "me/pictures: no such folder here, and not to be read on the hub: ",
        ),
    ],
)
def test_what_the_hub_has_not_is_said_with_what_it_has(hub, tmp_path, capsys, words, message):
    assert make(words[0], tmp_path / "out", *words[1:]) == 2
    assert capsys.readouterr().err.startswith(f"SOURCE: {message}")


@with_datasets
def test_a_gated_data_set_and_one_that_code_makes_are_refused(hub, hub_folder, tmp_path, capsys):
    hub.add("gated")
    assert make("me/pictures", tmp_path / "out") == 2
    assert capsys.readouterr().err.startswith(
        "SOURCE: me/pictures: no such folder here, and not to be read on the hub: "
    )
    hub.clear()
    (hub_folder / "pictures.py").write_text("raise SystemExit('it ran')")
    assert make("me/pictures", tmp_path / "out") == 2
    assert "give its files, or revision=refs/convert/parquet" in capsys.readouterr().err


@with_datasets
def test_a_hub_that_is_away_is_said_to_be(tmp_path, capsys, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    online(monkeypatch)
    assert make("me/pictures", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert said.startswith("SOURCE: me/pictures: no such folder here, and not to be read on the hub: ConnectError: ")
    assert said.endswith(". Check the network, HF_ENDPOINT and HF_HUB_OFFLINE; or give its files.\n")
