"""prepare/samples.py, filters.py, find.py, tables.py: other tars, CSV files, JSON lines, stores, and what is left out."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import picture, sample_files, tree, write_tar
from test_shards import SIZES, rows, skipped

from prepare import addresses, shards, sources, tables


def write_pictures(folder: Path, count: int) -> list[str]:
    """Write img/0.jpg and so on; return their paths in the folder."""
    (folder / "img").mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / "img" / f"{number}.jpg").write_bytes(picture(number, SIZES[number % 4]))
    return [f"img/{number}.jpg" for number in range(count)]


def write_csv(path: Path, header: Sequence[str], lines: Iterable[Sequence[Any]], **how: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        csv.writer(file, **how).writerows([header, *lines])
    return path


def write_jsonl(path: Path, lines: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def make(*words: object) -> int:
    return shards.main([*map(str, words), "workers=1"])


def facts(out: Path) -> dict[str, Any]:
    return json.loads((out / "dataset.json").read_text())


# --- tars with other suffixes ---


def test_a_tar_with_other_suffixes_is_read_by_its_usual_names_and_they_are_reported(tmp_path, capsys):
    files = [{"image.jpg": picture(n), "caption": b"a picture", "cls": b"3", "json": b'{"a": 1}'} for n in range(3)]
    files[1]["image.png"] = files[1].pop("image.jpg")
    tar = write_tar(tmp_path / "in.tar", {f"k{n}": each for n, each in enumerate(files)})
    assert make(tar, tmp_path / "out") == 0
    assert [(row["key"], row["jpg"], row["caption"], row["metadata"]) for row in rows(tmp_path / "out")] == [
        (f"k{n}", picture(n), "a picture", {"a": 1}) for n in range(3)
    ]
    assert facts(tmp_path / "out")["taken"] == {"image": "image", "captions": ["caption"], "key": None}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "taken: image from image, caption from caption, key from the names and rows of files"
    assert lines[-1].startswith("found 3 samples, wrote 3, skipped 0; files that were not read: 3, e.g. k0.cls; ")
    assert skipped(tmp_path / "out" / "skipped.jsonl") == []  # each belongs to a sample
    sides = {"left.jpg": picture(0), "right.png": picture(1, kind="PNG"), "txt": b"two", "npy": b"an embedding"}
    assert make(write_tar(tmp_path / "in.tar", {"a": sides}), tmp_path / "right", "image=right.png") == 0
    assert [row["jpg"] for row in rows(tmp_path / "right")] == [sides["right.png"]]


def test_a_caption_may_be_a_field_of_the_json_and_several_are_all_kept(tmp_path):
    words = json.dumps({"caption": "short", "more": {"long": "much longer"}, "key": 7}).encode()
    few = json.dumps({"caption": None, "more": {"long": "long alone"}, "key": 8}).encode()
    samples = {"a": {"jpg": picture(0), "json": words}, "b": {"jpg": picture(1), "json": few}}
    tar = write_tar(tmp_path / "in.tar", samples)
    assert make(tar, tmp_path / "one") == 0
    [row] = rows(tmp_path / "one")
    assert row["caption"] == "short" and "captions" not in row
    assert skipped(tmp_path / "one" / "skipped.jsonl") == [("in.tar", "b", "missing caption")]
    assert make(tar, tmp_path / "two", "caption=json:caption, json:more:long") == 0
    assert [(row["key"], row["caption"], row["captions"]) for row in rows(tmp_path / "two")] == [
        ("a", "short", ["short", "much longer"]),
        ("b", "long alone", ["long alone"]),
    ]


# --- CSV files and JSON lines ---


def test_csv_and_json_lines_give_the_same_samples_from_relative_and_absolute_paths(tmp_path):
    paths = write_pictures(tmp_path, 4)
    files = [*paths[:2], str(tmp_path / paths[2]), "img/../img/3.jpg"]
    header, lines = ["file", "text", "similarity"], [[path, f"number {n}", 0.5] for n, path in enumerate(files)]
    write_csv(tmp_path / "t.csv", header, lines)
    write_jsonl(tmp_path / "t.jsonl", [dict(zip(header, line, strict=True)) for line in lines])
    for kind, similarity in (("csv", "0.5"), ("jsonl", 0.5)):
        assert make(tmp_path / f"t.{kind}", tmp_path / kind) == 0
        written = [(row["key"], row["jpg"], row["caption"], row["metadata"]) for row in rows(tmp_path / kind)]
        expected = [(f"t/{n:08d}", picture(n, SIZES[n]), f"number {n}", {"similarity": similarity}) for n in range(4)]
        assert written == expected


def test_a_table_is_cut_into_parts_of_so_many_rows_at_the_ends_of_records(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ROWS_PER_PART", 3)
    paths, table = write_pictures(tmp_path, 8), tmp_path / "t.csv"
    write_csv(table, ["image", "caption", "id"], [[path, f"line one\nof {n}", n] for n, path in enumerate(paths)])
    table.write_text(table.read_text() + "\n")
    assert make(table, tmp_path / "out") == 0
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())["parts"]
    assert [part["name"] for part in plan] == [f"t.csv, part {n} of 3" for n in (1, 2, 3)]
    assert len({part["digest"] for part in plan}) == 3
    written = [(row["key"], row["caption"]) for row in rows(tmp_path / "out")]
    assert written == [(f"{n}", f"line one\nof {n}") for n in range(8)]
    assert shards.main([str(table), str(tmp_path / "two"), "workers=2"]) == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "two")


def test_broken_rows_are_skipped_with_their_reason_and_the_rest_is_written(tmp_path):
    paths = write_pictures(tmp_path, 3)
    (tmp_path / "img" / "words.jpg").write_text("no image")
    os.mkfifo(tmp_path / "img" / "pipe")
    broken = [
        ("good", {"image": paths[1]}, "duplicate key"),
        ("a", {"image": None}, "missing image"),
        ("b", {"image": "img/none.jpg"}, "no such image file"),
        ("c", {"image": "img/words.jpg"}, "not an image"),
        ("d", {"image": "img/pipe"}, "no such image file"),
        ("e", {"image": 7}, "image is neither a file's bytes nor a path"),
        ("f", {"image": "https://example.invalid/a.jpg"}, "image is a URL"),
        ("g", {"image": "gs://bucket/a.jpg"}, "image is at an address of another kind than s3://"),
        ("h", {"caption": None}, "missing caption"),
        ("i", {"caption": 3}, "caption is not text"),
        ("../j", {}, "key leads out of its source"),
    ]
    good = {"image": paths[0], "caption": "good", "key": "good"}
    lines = [good, *({**good, "key": key, **changes} for key, changes, _ in broken), {**good, "key": None}]
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    text += b'{"image": "img/2.jpg"\n[1]\n\n{"image": "img/2.jpg", "caption": "K\xe4se"}\n'
    (tmp_path / "t.jsonl").write_bytes(text)
    assert make(tmp_path / "t.jsonl", tmp_path / "out") == 0
    assert [row["key"] for row in rows(tmp_path / "out")] == ["good", "t/00000012"]
    assert [entry[1:] for entry in skipped(tmp_path / "out" / "skipped.jsonl")] == [
        *((key, reason) for key, _, reason in broken),
        ("t/00000013", "row is not JSON"),
        ("t/00000014", "row is not a JSON object"),
        ("t/00000015", "row is not UTF-8"),
    ]


def test_broken_rows_of_a_csv_file(tmp_path):
    write_pictures(tmp_path, 2)
    contents = {
        "t": b"img/0.jpg,K\xe4se\nimg/0.jpg,a,b\nimg/0.jpg\n,x\nimg/1.jpg,good\nimg/0.jpg,\n",
        "quote": b'img/1.jpg,good\nimg/0.jpg,"never ends' + b"x\n" * 100_000,
        "open": b'img/0.jpg,one\nimg/0.jpg,"two\nlines"\nimg/0.jpg,"three\nimg/0.jpg,four\n',
        "empty": b"",
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.csv").write_bytes(b"image,caption\n" + content)
    assert make(*(tmp_path / f"{name}.csv" for name in contents), tmp_path / "out") == 1
    assert [row["caption"] for row in rows(tmp_path / "out")] == ["good", "good", "one", "two\nlines"]
    assert skipped(tmp_path / "out" / "skipped.jsonl") == [
        ("t.csv", "t/00000000", "caption is not UTF-8"),
        *(("t.csv", f"t/0000000{n}", "row has another number of columns than the first line") for n in (1, 2)),
        ("t.csv", "t/00000003", "missing image"),
        ("t.csv", "t/00000005", "empty caption"),
        ("quote.csv", None, "cannot be read to its end"),
        ("open.csv", None, "a quote is not closed in its last 2 lines"),
        ("empty.csv", None, "has no sample"),
    ]


ROW = b'{"image": "img/0.jpg", "text": "a", "score": 0.3}\n'


def test_several_captions_of_a_row_are_kept_where_they_are_a_list_or_are_asked_for(tmp_path):
    paths = write_pictures(tmp_path, 3)
    lists = [["a0", "", None, "b0 "], ["a1", "b1"], "alone"]
    lines = [{"image": path, "captions": captions} for path, captions in zip(paths, lists, strict=False)]
    assert make(write_jsonl(tmp_path / "lists.jsonl", lines), tmp_path / "lists") == 0
    assert [row["captions"] for row in rows(tmp_path / "lists")] == [["a0", "b0"], ["a1", "b1"], ["alone"]]
    assert [row["caption"] for row in rows(tmp_path / "lists")] == ["a0", "a1", "alone"]
    write_csv(tmp_path / "t.csv", ["image", "short", "long"], [[paths[0], short, "l"] for short in ("s", "")])
    assert make(tmp_path / "t.csv", tmp_path / "two", "caption=short,long") == 0
    assert [row["captions"] for row in rows(tmp_path / "two")] == [["s", "l"], ["l"]]
    assert facts(tmp_path / "two")["taken"]["captions"] == ["short", "long"]


@pytest.mark.parametrize(
    ("name", "content", "words", "message"),
    [
        ("t.csv", b"img/0.jpg,a\nimg/1.jpg,b\n", "", "image: t.csv has none of image, jpg, jpeg, png, webp, avif, "),
        (
            "t.csv",
            b"picture,words\nimg/0.jpg,a\n",
            "image=pictures",
            "image: t.csv has no pictures. It has picture, words.",
        ),
        ("t.csv", "image,Ü\nimg/0.jpg,a\n".encode("latin-1"), "", "SOURCE: {tmp}/t.csv is not UTF-8 in its first "),
        ("t.json", b"[\n" + ROW + b"]", "", "SOURCE: {tmp}/t.json is one JSON array. Possible: JSON lines, an object "),
        ("t.jsonl", b'{"image": "http://example.invalid/a.jpg", "text": "a"}\n', "", "image: t.jsonl holds URLs, and "),
        ("t.jsonl", ROW, "min_similarity=0.2", "min_similarity: no similarity or clip_similarity_vitl14 or "),
    ],
)
def test_a_table_that_cannot_be_read_as_it_is_asked_for_is_refused(tmp_path, capsys, name, content, words, message):
    (tmp_path / name).write_bytes(content)
    assert make(tmp_path / name, tmp_path / "out", *words.split()) == 2
    assert capsys.readouterr().err.startswith(message.format(tmp=tmp_path))
    assert not (tmp_path / "out").exists()


# --- what is left out ---


def test_size_aspect_and_similarity_leave_samples_out_which_are_counted_by_reason(tmp_path, capsys):
    def sample(size: tuple[int, int], similarity: float | None = 0.3, original: tuple | None = None) -> dict[str, Any]:
        sides = dict(zip(("original_width", "original_height"), original or (), strict=False))
        return {"jpg": picture(0, size), "txt": b"x", "json": json.dumps({"similarity": similarity, **sides}).encode()}

    samples = {
        "good": sample((96, 64), original=(300, 200)),
        "small": sample((63, 64)),
        "enlarged": sample((96, 64), original=(48, 32)),
        "long": sample((129, 64)),
        "cut": sample((64, 64), original=(640, 64)),
        "unlike": sample((64, 64), 0.2999),
        "unknown": sample((64, 64), None),
        "broken": {**sample((64, 64)), "jpg": b"?"},
    }
    keys, out = ["min_side_px=64", "max_aspect=2", "min_similarity=0.3"], tmp_path / "out"
    assert make(write_tar(tmp_path / "in.tar", samples), out, *keys) == 0
    assert [row["key"] for row in rows(out)] == ["good"]
    left_out = {"side below 64 px": 2, "aspect above 2": 2, "similarity below 0.3": 1}
    left_out["no similarity in the metadata"] = 1
    counts = {"read": 8, "written": 1, "skipped": {"not an image": 1}, "left_out": left_out}
    assert counts.items() <= facts(out)["counts"].items()
    assert facts(out)["filters"] == {"min_side_px": 64, "max_aspect": 2.0, "min_similarity": 0.3}
    assert [entry[1] for entry in skipped(out / "skipped.jsonl")] == ["broken"]
    assert "left out 6 (aspect above 2: 2, " in capsys.readouterr().out


# --- in a store ---


def test_tars_and_tables_in_a_store_give_their_samples_and_images_may_be_elsewhere(store, in_store, tmp_path):
    client, _ = store
    for number in range(2):
        write_tar(tmp_path / "tars" / f"{number}.tar", {f"{number}-{n}": sample_files(n) for n in range(3)})
    address = in_store(tmp_path / "tars", "source-tars")
    assert make(address, tmp_path / "all") == make(tmp_path / "tars", tmp_path / "disk") == 0
    assert rows(tmp_path / "all") == rows(tmp_path / "disk") and not (tmp_path / "all" / addresses.WORK).exists()
    assert make(f"{address}/1.tar", tmp_path / "one") == 0 and rows(tmp_path / "one") == rows(tmp_path / "disk")[3:]
    paths = write_pictures(tmp_path / "in", 3)
    client.put_object(Bucket="easel", Key="other/a.jpg", Body=picture(9))
    images = [paths[0], "s3://easel/other/a.jpg", "./img/../img/1.jpg", "img/none.jpg"]
    images += [str(tmp_path / "in" / paths[2]), "../other/a.jpg", "s3://easel/a?b.jpg"]
    write_csv(tmp_path / "in" / "t.csv", ["image", "text"], [[path, "x"] for path in images])
    assert make(f"{in_store(tmp_path / 'in', 'source-csv')}/t.csv", tmp_path / "out") == 0
    assert [row["jpg"] for row in rows(tmp_path / "out")] == [picture(0, SIZES[0]), picture(9), picture(1, SIZES[1])]
    outside = "path leads out of the table's folder in its store"
    reasons = ["no such image file", outside, outside, "image is at an address that cannot be read"]
    assert [entry[2] for entry in skipped(tmp_path / "out" / "skipped.jsonl")] == reasons


def test_an_address_with_nothing_to_read_is_refused_with_the_choices(in_store, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "README").touch()
    address = in_store(tmp_path / "in", "nothing")
    for source, message in {
        address: f"{address}: holds neither tars nor tables. Possible: s3://BUCKET/FILE or a prefix with tars, ",
        f"{address}/none": f"SOURCE: {address}/none: nothing lies there; bucket 'easel' is there. Check the address.",
        "s3://none-such/x": "SOURCE: s3://none-such/x cannot be read: there is no bucket 'none-such' at ",
    }.items():
        assert make(source, tmp_path / "out") == 2
        assert capsys.readouterr().err.startswith(message)


def test_a_store_that_goes_away_is_waited_for_and_no_part_is_made_without_it(in_store, tmp_path, capsys, monkeypatch):
    write_tar(tmp_path / "in" / "0.tar", {"a": sample_files(0)})
    address = in_store(tmp_path / "in", "away")
    listed = sources.list_objects(address)
    monkeypatch.setattr("prepare.find_sources.list_objects", lambda address: listed)
    monkeypatch.setattr(sources, "PATIENCE_SEC", 0.2)
    with monkeypatch.context() as patch:
        patch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
        assert make(f"{address}/0.tar", tmp_path / "out") == 1
    text = capsys.readouterr().err.splitlines()[-1]
    assert text.startswith(
        f"SOURCE: {address}/0.tar cannot be read: nothing listens at http://127.0.0.1:9. Check the port "
    )
    assert re.search(r"Waited for \d+ s. Finished work is kept; the same command resumes from there.$", text)
    assert make(f"{address}/0.tar", tmp_path / "out") == 0 and len(rows(tmp_path / "out")) == 1
