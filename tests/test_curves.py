"""curves.py: a table of scores comes back to the last digit, whole or not at all; pictures are drawn of it."""

from __future__ import annotations

import pytest
from PIL import Image

from curves import draw_guidance, draw_over_images, read_rows, write_rows

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
}


def test_a_table_comes_back_as_it_was_written(tmp_path):
    path, other = tmp_path / "eval.csv", {**ROW, "further": 1.5, "model": 'a, "b"'}
    write_rows(path, [ROW, other])
    first, second = read_rows(path)
    assert {key: first[key] for key in ROW} == ROW and first["further"] is None
    assert {key: second[key] for key in other} == other
    assert path.read_text().startswith("model,snapshot,batch,images,seconds,weights,guidance,fid,clip,clip_x100,")
    assert [p.name for p in tmp_path.iterdir()] == ["eval.csv"]


def test_no_file_is_an_empty_table_and_another_file_is_refused(tmp_path):
    assert read_rows(tmp_path / "eval.csv") == []
    (tmp_path / "eval.csv").write_text("fid,clip\nninety,0.15\n")
    with pytest.raises(ValueError, match="eval.csv is no table of scores: .* Move it away, or give another out=PATH"):
        read_rows(tmp_path / "eval.csv")


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
