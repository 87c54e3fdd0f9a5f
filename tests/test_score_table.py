"""evaluation/score_table.py and plots.py: a table comes back to the last digit, whole or not at all; pictures are drawn."""

from __future__ import annotations

import csv
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT
from matplotlib.axes import Axes
from PIL import Image

from eval import EvalCommand, Table, draw
from evaluation.plots import draw_guidance, draw_over_images, lines_of
from evaluation.score_table import NEEDED, add_row, read_rows, write_rows

ROW = {
    "model": "7",
    "snapshot": "weights-im000000000024-00.pt",
    "images": 24,
    "seconds": 0.1 + 0.2,
    "weights": "ema",
    "guidance": 8.0,
    "fid": 30.10814616097288,
    "clip": None,
    "eval_image_size": [64, 64],
    "partial": False,
    "prompts_sha256": "1234",
    "num_images": 18,
    "eval_precision": "fp32",
}


def test_a_table_comes_back_as_it_was_written(tmp_path):
    path, other = tmp_path / "eval.jsonl", {**ROW, "further": 1.5, "model": 'a, "b"'}
    write_rows(path, [ROW, other])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["eval.csv", "eval.jsonl"]
    assert all(json.loads(line).keys() >= {*NEEDED} for line in path.read_text().splitlines())
    table = (tmp_path / "eval.csv").read_text()
    assert table.startswith("model,snapshot,batch,images,seconds,weights,guidance,fid,clip,clip_x100,")
    expected = [{**ROW, "clip_x100": None}, {**other, "clip_x100": None}]
    assert read_rows(path) == expected
    path.unlink()
    assert read_rows(path) == []


def test_a_committed_table_is_written_again_digit_by_digit(tmp_path):
    old = ROOT / "reports/results/shapes/guidance/eval.csv"
    write_rows(tmp_path / "eval.jsonl", read_rows(old.with_suffix(".jsonl")))
    with open(old, newline="") as before, open(tmp_path / "eval.csv", newline="") as after:
        for one, other in zip(csv.DictReader(before), csv.DictReader(after), strict=True):
            assert one == other


def test_lines_that_are_no_rows_are_refused_by_their_number(tmp_path):
    path = tmp_path / "eval.jsonl"
    write_rows(path, [ROW, {**ROW, "fid": 20.0}])
    whole = path.read_bytes()

    def refused(content: bytes) -> str:
        path.write_bytes(content)
        with pytest.raises(ValueError) as caught:
            read_rows(path)
        return str(caught.value).replace(str(path), "eval.jsonl")

    no_row = "eval.jsonl: line {} is not a row of scores: '{}'. Remove that line: its score is then made again."
    assert refused(whole[:-2]) == no_row.format(2, whole.split(b"\n")[1][:40].decode())
    assert refused(b"[1]\n" + whole) == no_row.format(1, "[1]")
    assert refused(b"[" * 50_000) == no_row.format(1, "[" * 40)
    assert "line 2 is not a row" in refused(whole.replace(b'"fid": 20.0, ', b""))
    assert refused(whole + b"\xff").startswith("eval.jsonl cannot be read: 'utf-8' codec can't decode byte 0xff")
    path.write_bytes(b"")  # its only line was removed
    assert read_rows(path) == []
    path.write_bytes(whole[:-1])  # whole but for its last end of line
    assert len(read_rows(path)) == 2


def test_a_figure_that_is_no_number_is_none_and_the_table_can_be_read(tmp_path):
    write_rows(tmp_path / "eval.jsonl", [{**ROW, "fid": float("nan")}])
    assert read_rows(tmp_path / "eval.jsonl")[0]["fid"] is None and "NaN" not in (tmp_path / "eval.jsonl").read_text()


def test_two_commands_that_write_one_table_keep_each_others_rows_and_no_row_twice(tmp_path):
    one, two = Table(tmp_path / "out" / "eval.csv"), Table(tmp_path / "out" / "eval.csv")  # each has read it before
    known = {key: ROW[key] for key in ("model", "snapshot", "guidance")}
    rest = {key: value for key, value in ROW.items() if key not in known}
    for table, guidance in ((one, 1.0), (two, 2.0), (one, 3.0), (two, 3.0)):
        table.get({**known, "guidance": guidance}, lambda: rest)
    assert [row["guidance"] for row in read_rows(one.path)] == [1.0, 2.0, 3.0]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: add_row(one.path, {**ROW, "guidance": float(n)}, ["guidance"]), range(2, 12)))
    assert sorted(row["guidance"] for row in read_rows(one.path)) == [float(n) for n in range(1, 12)]


def test_a_writer_that_fails_leaves_the_table_before_it(tmp_path):
    path = tmp_path / "eval.csv"
    write_rows(path, [ROW])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(TypeError):
        write_rows(path, [ROW, {**ROW, "fid": {1, 2}}])
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before and len(before) == 2


def test_a_row_that_only_one_of_both_files_would_have_is_scored_again(tmp_path):
    (tmp_path / "eval.csv").mkdir()
    with pytest.raises(ValueError, match="cannot be written"):
        add_row(tmp_path / "eval.jsonl", ROW, ["model"])
    assert read_rows(tmp_path / "eval.jsonl") == []


def test_the_curves_are_drawn_for_several_models_and_without_one_of_the_figures(tmp_path):
    rows = [
        {**ROW, "model": model, "images": 24 * n, "guidance": float(n), "fid": 90.0 / n, "clip": 0.05 * n}
        for model in ("a", "b")
        for n in (1, 2, 3)
    ]
    draw_guidance(rows, tmp_path / "guidance.png")
    draw_over_images(rows, tmp_path / "eval.png", {"fid": 45.0, "clip": None})
    draw_over_images([{**row, "clip": None} for row in rows], tmp_path / "fid.png")
    widths = [Image.open(tmp_path / name).size[0] for name in ("guidance.png", "eval.png", "fid.png")]
    assert widths[1] == 2 * widths[0] == 2 * widths[2]


def test_what_has_seen_nobody_knows_how_many_images_is_a_line_across_and_comes_back_as_it_was(
    tmp_path, capsys, monkeypatch
):
    drawn: list[tuple[str, list[float]]] = []
    kept = Axes.axhline
    monkeypatch.setattr(Axes, "axhline", lambda self, y, **how: drawn.append((how["label"], y)) or kept(self, y, **how))
    figures = {"fid": 90.0, "clip": 0.1, "clip_x100": 10.0}
    of_run = [{**ROW, **figures, "images": n, "guidance": g} for n in (8, 16) for g in (1.0, 3.0)]
    of_images = {
        "model": "imgs",
        "images_in_folder": 18,
        "eval_precision": "fp32",
        **figures,
        "partial": False,
        "num_images": 18,
    }
    draw([*of_run[::2], of_images], tmp_path / "one", EvalCommand())
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["eval.png"]
    assert capsys.readouterr().err == "" and drawn == [("imgs: 90", 90.0), ("imgs: 0.1", 0.1)]
    draw([of_run[0], of_images], tmp_path / "two", EvalCommand())  # a point and a line
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["eval.png"]
    draw([of_images, {**of_images, "model": "more"}], tmp_path / "none", EvalCommand())
    assert not (tmp_path / "none").exists()

    path, known = tmp_path / "eval.csv", {"model": "imgs", "images_in_folder": 18}
    write_rows(path, [*of_run, of_images])
    rows = read_rows(path)
    assert rows == [*of_run, of_images]
    draw(rows, tmp_path / "both", EvalCommand())
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == ["eval.png", "guidance.png"]
    capsys.readouterr()
    assert lines_of([of_images, *rows], "guidance")[0][0] == "imgs"
    Table(path).get(known, dict)
    assert capsys.readouterr().out == "model=imgs fid=90.0 clip=0.1 clip_x100=10.0 num_images=18 partial=False\n"


def test_a_line_is_one_model_in_one_way():
    """Two runs of one name are two models; snapshots of one model have a curve over guidance each, and the reverse."""
    rows = [
        {**ROW, "model_id": run, "snapshot": f"weights-im{images}", "images": images, "guidance": guidance}
        for run in ("11aa", "22bb")
        for images in (8, 16)
        for guidance in (1.0, 3.0)
    ]
    over_guidance, over_images = lines_of(rows, "guidance"), lines_of(rows, "snapshot")
    assert [label for label, _ in over_guidance] == [
        f"7, {run}, {n} images" for run in ("11aa", "22bb") for n in (8, 16)
    ]
    assert [label for label, _ in over_images] == [
        f"7, {run}, guidance {g}" for run in ("11aa", "22bb") for g in (1.0, 3.0)
    ]
    assert [[row["guidance"] for row in of_line] for _, of_line in over_guidance] == [[1.0, 3.0]] * 4
    assert [[row["images"] for row in of_line] for _, of_line in over_images] == [[8, 16]] * 4
    named = [{**row, "model": row["model_id"]} for row in rows if row["guidance"] == 1.0]
    assert [label for label, _ in lines_of(named, "snapshot")] == ["11aa", "22bb"]


def test_more_lines_than_colours_are_all_drawn(tmp_path):
    rows = [{**ROW, "model": str(n), "images": n + m} for n in range(60) for m in (1, 2)]
    draw_over_images(rows, tmp_path / "eval.png")
    assert len(lines_of(rows, "snapshot")) == 60 and (tmp_path / "eval.png").is_file()
