"""reports/compare.py: the rule of the verdict against scipy and drawn pairs, what compares, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from scipy.stats import mannwhitneyu

from reports import compare
from reports.compare import ALIKE, MORE, SPEED, Measurement, left_out, ratio_of, sample_of

RESULTS = ROOT / "reports/results"
EAGER, BLOCKS = (RESULTS / f"sd2_tiny_cpu_compile/{name}.json" for name in ("eager", "blocks"))


# --- the rule ---


@pytest.mark.parametrize(("num", "other"), [(1, 1), (3, 3), (4, 6), (5, 5), (6, 9), (7, 7), (10, 10)])
def test_the_number_left_out_is_that_of_the_exact_rank_test(num, other):
    """Whatever number of pairs is in the wrong order, by scipy's p-value."""

    def p_value(wrong: int) -> float:
        values = []
        for place in range(other):
            below = min(num, wrong)  # so many of the first sample's values lie above this one
            wrong -= below
            values.append(num - 0.5 - below + 1e-3 * place)
        return mannwhitneyu(values, range(num), method="exact").pvalue

    allowed = [wrong for wrong in range(num * other // 2) if p_value(wrong) <= compare.CHANCE]
    assert left_out(num, other) == len(allowed)


@pytest.mark.parametrize(("num", "other"), [(5, 5), (4, 7), (10, 10)])
def test_the_verdict_is_that_of_scipys_exact_test(num, other):
    rng, told = np.random.default_rng(0), 0
    for shift in np.repeat([1.0, 1.05, 1.1, 1.2], 50):
        first, second = rng.lognormal(3.0, 0.05, num), shift * rng.lognormal(3.0, 0.05, other)
        is_told = ratio_of(sample_of([*second], "round"), sample_of([*first], "round")).verdict != ALIKE
        assert is_told == (mannwhitneyu(first, second, method="exact").pvalue <= compare.CHANCE)
        told += is_told
    assert 20 < told < 180  # so both sides were met


def rounds(rng: np.random.Generator, num: int) -> Measurement:
    """Return speeds that vary by 5 %."""
    return sample_of([*(100.0 * np.exp(rng.normal(0.0, 0.05, num)))], "round")


def test_two_starts_of_one_run_get_no_verdict_however_far_their_windows_lie_apart():
    """Two identical runs on a shared machine were 1.645 times apart, with windows of 5 % spread."""
    rng = np.random.default_rng(1)
    one, other = (sample_of([*(factor * np.exp(rng.normal(0.0, 0.05, 150)))], "window") for factor in (1.0, 1.645))
    ratio = ratio_of(other, one)
    assert ratio.verdict == "cannot be told apart from one start each"
    assert (ratio.least, ratio.greatest) == (other.least / one.greatest, other.greatest / one.least)


def test_more_is_better_for_speeds_and_less_for_times():
    faster = ("images_per_sec_per_device", "480: ours_clips_per_sec", "ema_speedup_vs_composer", "download_mb_per_sec")
    slower = ("ema_ms", "480: ours_cpu_ms_a_clip", "verify_sec_per_gb", "ours_worker_cpu_us_a_sample")
    keys = dict.fromkeys(faster, 1) | dict.fromkeys(slower, -1) | dict.fromkeys(["ema_over_flat", "gib"], 0)
    for key, side in keys.items():
        assert compare.better_direction(key) == side
        verdict = compare.verdict_of(key, compare.Ratio(2.0, 1.9, 2.1, True))
        assert verdict == {1: "faster", -1: "slower", 0: MORE}[side]


# --- what compares ---


@pytest.fixture
def record(tmp_path):
    """Write a rung's record with some keys changed, and return its path."""
    numbers = itertools.count()

    def write(name: str = "", of: Path = EAGER, **changed: Any) -> str:
        path = tmp_path / f"{name or f'r{next(numbers)}'}.json"
        path.parent.mkdir(exist_ok=True, parents=True)
        content = {**json.loads(of.read_text()), **changed}
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
        return str(path)

    return write


def run_folder(place: Path, speed: float = 1.0, **changed: Any) -> str:
    """Write a finished run's folder, its windows that many times as fast."""
    shutil.copytree(RESULTS / "shapes_run", place, ignore=shutil.ignore_patterns("samples"))
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    lines = [{**line, "images_per_sec": speed * line["images_per_sec"]} if "lr" in line else line for line in lines]
    (place / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    summary = json.loads((place / "summary.json").read_text())
    speeds = {key: speed * value for key, value in summary.items() if key.startswith("images_per_sec")}
    (place / "summary.json").write_text(json.dumps({**summary, **speeds, **changed}))
    return str(place)


def test_two_rungs_are_set_beside_each_other_with_what_differs(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert compare.main([str(EAGER.relative_to(ROOT)), str(BLOCKS.relative_to(ROOT))]) == 0
    _, _, _, second, *notes = capsys.readouterr().out.splitlines()
    one, other = (json.loads(path.read_text()) for path in (EAGER, BLOCKS))
    ends = [("", ""), ("_min", "_max"), ("_max", "_min")]
    ratio, least, most = (other[f"images_per_sec{a}"] / one[f"images_per_sec{b}"] for a, b in ends)
    assert f"  {ratio:.3f} ({least:.3f} to {most:.3f})  {compare.ONE_START}" in second
    assert notes[0] == "differs, setting: compile off | blocks" and len(notes) == 3


def test_a_runs_folder_has_all_its_windows_and_its_summary_is_the_same_record(tmp_path, capsys):
    slow, fast = run_folder(tmp_path / "a"), run_folder(tmp_path / "b", 4.0)
    table, notes = compare.compare_records([slow, f"{fast}/summary.json"])
    [one, other] = table.rows
    assert (one[0], other[0]) == ("a", "b") and one[3] == other[3] == "159 windows"
    assert other[4].startswith("4.000 (") and other[5] == compare.ONE_START
    assert not any("extreme" in note or "window" in note for note in notes)
    assert notes[0].startswith("nothing that was recorded differs: two starts of the same.")
    found = compare.read_record(slow).figures[SPEED]
    summary = json.loads((tmp_path / "a/summary.json").read_text())
    kept = [summary[f"images_per_sec{end}"] for end in ("", "_min", "_max")]
    assert [found.middle, found.least, found.greatest] == pytest.approx(kept, rel=1e-5)


def test_the_training_has_to_be_the_same_and_across_allows_its_key(record, capsys):
    one = record("a")
    for changed, said in (
        ({"image_size": [64, 64, 9]}, "image_size: [64, 64] in a, [64, 64, 9] in b."),
        ({"ema": ...}, "ema: true in a, not recorded in b."),
        ({"global_batch_size": 16}, "device_batch_size: 8 in a, 16 in b."),
    ):
        other, key = record("b", **changed), said.partition(":")[0]
        with pytest.raises(ValueError) as refused:
            compare.compare_records([one, other])
        end = f" The records measured different work, so they do not compare. Give others, or allow it: across={key}."
        assert str(refused.value) == said + end
        notes = compare.compare_records([one, other], [key])[1]
        assert any(note.startswith(f"allowed by across: {key} ") for note in notes)
    assert compare.main([one, other, "across=compile"]) == 2
    assert capsys.readouterr().err.startswith("across: 'compile' is not a key that has to be the same. Possible: ")


def test_repeated_runs_are_one_value_each(record):
    def five(side: str, least: int) -> str:
        keys = [f"images_per_sec{kind}" for kind in ("", "_min", "_max", "_per_device")]
        made = [{"seed": n, "slowest_rank": n} | dict.fromkeys(keys, least + n) for n in range(5)]
        return ",".join(record(f"{side}{each['seed']}", **each) for each in made)

    sides = [five("a", 100), five("b", 110)]
    table, _ = compare.compare_records(sides)
    assert table.rows[1][0] == "b0, b1, b2, b3, b4" and table.rows[1][3] == "5 runs"
    assert table.rows[1][4:] == ("1.098 (1.058 to 1.140)", "faster")
    few, notes = compare.compare_records([sides[0].rpartition(",")[0], sides[1]])
    assert few.rows[1][5] == ALIKE
    assert "some figures have too few values for a verdict: five of each suffice" in notes
    with pytest.raises(ValueError, match=r"are not repeated runs: compile is 'off' and 'whole'\. Give runs that"):
        compare.compare_records([f"{record('c')},{record('d', compile='whole')}", sides[1]])


# --- bad input ---


FAULTY = {
    "is no whole JSON (JSONDecodeError: Expecting value": "",
    "holds a list. Give a record, which is one object.": "[1]",
    "its status is 'out_of_memory': no speed was measured.": {"status": "out_of_memory"},
    "is of schema 9. Possible: 1.": {"schema": 9},
    "its images_per_sec_per_device is null. Possible: a number above 0.": {"images_per_sec_per_device": None},
    "its images_per_sec_min is nan. Possible: a number above 0.": {"images_per_sec_min": math.nan},
    "it has no images_per_sec_max. Possible: a number above 0.": {"images_per_sec_max": ...},
    "its median 114.31 is not between its extremes 200 and 116.899. Give a record": {"images_per_sec_min": 200.0},
}


def test_a_file_that_is_no_record_or_has_no_figure_is_refused(record, tmp_path, capsys):
    for said, content in FAULTY.items():
        path = str(tmp_path / "bad.json")
        Path(path).write_text(content) if isinstance(content, str) else record("bad", **content)
        assert compare.main([record("good"), path]) == 2
        assert capsys.readouterr().err.startswith(f"{path}: {said}")


def test_missing_unfinished_single_and_repeated_records_are_refused_all_at_once(record, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    folder, one = run_folder(Path("begun")), record("a")
    Path("link.json").symlink_to(one)
    for words in ([one, "link.json"], [folder, f"{folder}/summary.json"]):
        assert compare.main(words) == 2
        assert capsys.readouterr().err == f"{words[1]}: is given twice. Give each record once.\n"
    Path("begun/summary.json").unlink()
    texts = {"none": "no such file or folder.", "empty": "is not a run: it has no config.yaml."}
    texts |= {"begun": "is not finished: it", "c.json": "no such file"}
    assert compare.main(["none", "empty", "begun", "c.json,d.json"]) == 2
    for line, (name, text) in zip(capsys.readouterr().err.splitlines(), texts.items(), strict=True):
        assert line.startswith(f"{name}: {text}")
