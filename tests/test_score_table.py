"""evaluation/score_table.py and plots.py: a table comes back to the last digit, whole or not at all; pictures are drawn."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
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
    path, other = tmp_path / "eval.csv", {**ROW, "further": 1.5, "model": 'a, "b"'}
    write_rows(path, [ROW, other])
    first, second = read_rows(path)
    assert first == {**ROW, "clip_x100": None} and second == {**other, "clip_x100": None}
    assert path.read_text().startswith("model,snapshot,batch,images,seconds,weights,guidance,fid,clip,clip_x100,")
    assert [p.name for p in tmp_path.iterdir()] == ["eval.csv"]
    write_rows(path, [{key: value for key, value in ROW.items() if key != "eval_precision"}])
    assert read_rows(path) == [first], "an older table, which does not say it"


def test_no_file_is_an_empty_table_and_another_file_is_refused(tmp_path):
    assert read_rows(tmp_path / "eval.csv") == []
    (tmp_path / "eval.csv").write_text("fid,clip\n90.0,0.15\n")
    with pytest.raises(
        ValueError, match="eval.csv is no table of scores: no column model, .* or give another out=FOLDER"
    ):
        read_rows(tmp_path / "eval.csv")


def test_what_is_no_whole_table_is_refused_with_its_line_and_a_cut_row_is_not_taken_for_another(tmp_path):
    path, ways = tmp_path / "eval.csv", "Mend it or move it away, or give another out=FOLDER."
    write_rows(path, [ROW, {**ROW, "fid": 20.0}])
    whole = path.read_text()
    header = whole.splitlines()[0]
    third = whole.splitlines()[2]

    def refused(content: str | bytes) -> str:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ValueError) as caught:
            read_rows(path)
        return str(caught.value).replace(str(path), "eval.csv")

    cells = len(header.split(","))
    again = "Remove that line: its score is then made again."
    cut = "does not end: it may be cut off. Remove it, or end it if it is whole."
    assert (
        refused(whole.rpartition(",")[0] + "\n")
        == f"eval.csv: line 3 has {cells - 1} cells, its header {cells}. {again}"
    )
    assert refused(whole[:-1]) == f"eval.csv: line 3 {cut}"
    assert refused(whole[: whole.index(third) + 20]) == f"eval.csv: line 3 {cut}"
    assert refused(whole.replace(",20.0,", ",ninety,")) == (
        "eval.csv: line 3, column fid: 'ninety' is no value. Mend it, or remove that line."
    )
    assert refused(whole.encode("utf-16")) == f"eval.csv: line 1 is not UTF-8 text. {ways}"
    assert refused(whole + '"') == f"eval.csv: line 4 cannot be read: unexpected end of data. {ways}"
    assert refused("") == f"eval.csv is no table of scores: no column {', '.join(NEEDED)} in its first line. {ways}"
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match="eval.csv cannot be read: Is a directory. Mend it or move it away"):
        read_rows(path)


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
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_rows(path, [ROW, {**ROW, "fid": {1, 2}}])
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


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


def test_a_folder_of_images_in_the_table_of_a_run_is_left_out_of_the_pictures_and_comes_back_as_it_was(
    tmp_path, capsys
):
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
    said = f"eval: {tmp_path}/one/eval.png is drawn without imgs, where images is missing. The table has all.\n"
    assert capsys.readouterr().err == said

    path, known = tmp_path / "eval.csv", {"model": "imgs", "images_in_folder": 18}
    write_rows(path, [*of_run, of_images])
    rows = read_rows(path)
    assert rows == [*of_run, of_images]
    draw(rows, tmp_path / "both", EvalCommand())
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == ["eval.png", "guidance.png"]
    assert "guidance.png is drawn without imgs, where guidance or fid or clip is missing." in capsys.readouterr().err
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
