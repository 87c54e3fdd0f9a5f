"""evaluation/table.py and plots.py: a table comes back to the last digit, whole or not at all; pictures are drawn."""

from __future__ import annotations

import csv
import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT

from eval import ScoreTable
from evaluation.plots import lines_of
from evaluation.table import NEEDED, add_row, read_rows, write_rows

ROW = {"model": "7", "snapshot": "weights-im000000000024-00.pt", "images": 24, "seconds": 0.1 + 0.2, "weights": "ema"}
ROW |= {"guidance": 8.0, "fid": 30.10814616097288, "clip": None, "eval_image_size": [64, 64], "partial": False}
ROW |= {"prompts_sha256": "1234", "num_images": 18, "eval_precision": "fp32"}


def test_a_table_comes_back_as_it_was_written_and_a_committed_one_digit_by_digit(tmp_path):
    path, other = tmp_path / "eval.jsonl", {**ROW, "further": 1.5, "model": 'a, "b"'}
    write_rows(path, [ROW, other, {**ROW, "fid": float("nan")}])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["eval.csv", "eval.jsonl"]
    assert all(json.loads(line).keys() >= {*NEEDED} for line in path.read_text().splitlines())
    table = (tmp_path / "eval.csv").read_text()
    assert table.startswith("model,snapshot,batch,images,seconds,weights,guidance,fid,clip,clip_x100,")
    expected = [{**row, "clip_x100": None} for row in (ROW, other, {**ROW, "fid": None})]
    assert read_rows(path) == expected and "NaN" not in path.read_text()
    path.unlink()
    assert read_rows(path) == []
    old = ROOT / "reports/results/shapes/guidance/eval.csv"
    write_rows(path, read_rows(old.with_suffix(".jsonl")))
    with open(old, newline="") as before, open(tmp_path / "eval.csv", newline="") as after:
        assert list(csv.DictReader(before)) == list(csv.DictReader(after))


def test_lines_that_are_no_rows_are_refused_by_their_number(tmp_path):
    path = tmp_path / "eval.jsonl"
    write_rows(path, [ROW, {**ROW, "fid": 20.0}])
    whole = path.read_bytes()
    no_row = "eval.jsonl: line {} is not a row of scores: '{}'. Remove that line: its score is then made again."
    for content, text in (
        (whole[:-2], no_row.format(2, whole.split(b"\n")[1][:40].decode())),
        (b"[1]\n" + whole, no_row.format(1, "[1]")),
        (whole.replace(b'"fid": 20.0, ', b""), "eval.jsonl: line 2 is not a row"),
        (whole + b"\xff", "eval.jsonl cannot be read: 'utf-8' codec can't decode byte 0xff"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"^{tmp_path}/{re.escape(text)}"):
            read_rows(path)
    path.write_bytes(b"")  # its only line was removed
    assert read_rows(path) == []
    path.write_bytes(whole[:-1])  # whole but for its last end of line
    assert len(read_rows(path)) == 2


def test_concurrent_writers_of_a_table_keep_each_row_once(tmp_path):
    one, two = (ScoreTable(tmp_path / "out" / "eval.csv") for _ in range(2))  # each has read it before
    known = {key: ROW[key] for key in ("model", "snapshot", "guidance")}
    rest = {key: value for key, value in ROW.items() if key not in known}
    for table, guidance in ((one, 1.0), (two, 2.0), (one, 3.0), (two, 3.0)):
        table.get({**known, "guidance": guidance}, lambda: rest)
    assert [row["guidance"] for row in read_rows(one.path)] == [1.0, 2.0, 3.0]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: add_row(one.path, {**ROW, "guidance": float(n)}, ["guidance"]), range(2, 12)))
    assert sorted(row["guidance"] for row in read_rows(one.path)) == [float(n) for n in range(1, 12)]


def test_a_line_is_one_model_with_one_setting():
    """Two runs of one name are two models; snapshots of one model have a curve over guidance each, and the reverse."""
    runs, points, guidances = ("11aa", "22bb"), (8, 16), (1.0, 3.0)
    rows = [
        {**ROW, "model_id": run, "snapshot": f"weights-im{images}", "images": images, "guidance": guidance}
        for run, images, guidance in itertools.product(runs, points, guidances)
    ]
    over_guidance, over_images = lines_of(rows, "guidance"), lines_of(rows, "snapshot")
    assert [label for label, _ in over_guidance] == [f"7, {run}, {n} images" for run in runs for n in points]
    assert [label for label, _ in over_images] == [f"7, {run}, guidance {g}" for run in runs for g in guidances]
    assert [[row["guidance"] for row in rows] for _, rows in over_guidance] == [[*guidances]] * 4
    assert [[row["images"] for row in rows] for _, rows in over_images] == [[*points]] * 4
