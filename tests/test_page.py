"""python -m reports.page: what the page of a run says, of several runs, and of records that are broken.

The records are written by the record's own writer; tests that look at the page parse it as a browser does.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from reports import page
from reports.charts import thinned, tick
from reports.formatting import figure, plain, span
from reports.page_content import differing, not_comparable, result_of, results, samples_of
from run_folder.files import append_lines
from run_folder.history import read_history

VOID = {"meta", "input", "img", "br", "hr", "link"}


class Parsed(HTMLParser):
    """A page as its elements: (tag, attributes, text below it), in order; refuses what is not nested well."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open: list[int] = []
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), (tag, attrs)
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        self.handle_data("" if tag in ("script", "style", "text") else " ")
        assert self.elements[self.open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for place in self.open:
            self.elements[place][2].append(data)

    def all(self, tag: str, **attrs: str) -> list[tuple[dict[str, str | None], str]]:
        wanted = attrs.items()
        found = [(own, text) for name, own, text in self.elements if name == tag and wanted <= own.items()]
        return [(own, " ".join("".join(text).split())) for own, text in found]

    def text(self, tag: str, **attrs: str) -> str:
        ((_, text),) = self.all(tag, **attrs)
        return text

    def ids(self) -> list[str]:
        return [own["id"] or "" for _, own, _ in self.elements if "id" in own]


CONFIG = {
    "run_name": "mine",
    "max_duration": "40ba",
    "global_batch_size": 32,
    "image_size": 32,
    "precision": "fp32",
    "seed": 17,
    "model.family": "shapes",
    "model.preset": "full",
    "data.stage": "moments",
    "data.remote": "cache/moments",
    "target.fid": 45.0,
    "target.clip": 0.9,
}
ENVIRONMENT = {"schema": 1, "device": "CPU somewhat", "num_devices": 2, "torch_version": "2.10.0", "commit": "a" * 40}


def window(number: int, **more: Any) -> dict[str, Any]:
    """The line of window `number`, from 0: 10 batches of 32 in 4 s of training, 1 s of waiting."""
    line = {"schema": 1, "start": 1, "start_sec": 5.0 * (number + 1), "batch": 10 * (number + 1)}
    line |= {"images": 320 * (number + 1), "warmup": number == 0, "profiled": False, "unfinished": False}
    line |= {"window_batches": 10, "train_sec": 4.0, "data_wait_sec": 1.0, "eval_sec": 0.0, "other_sec": 0.0}
    line |= {"images_per_sec": 80.0, "images_per_sec_wall": 64.0, "data_wait_frac": 0.2, "peak_mem_gib": 1.5}
    return line | {"loss": 1.0 / (number + 1), "lr": 1e-4, "gradient_norm": 0.5, "bad_samples": 0} | more


def evaluation(images: int, fid: float | None, clip: float | None, **more: Any) -> dict[str, Any]:
    seconds = {"seconds": images / 80, "seconds_with_eval": images / 80 + 10.0, "eval_sec": 10.0}
    where = {"schema": 1, "start": 1, "evaluation": True, "batch": images // 32, "images": images, **seconds}
    return {**where, "fid": fid, "clip": clip, "partial": False, "num_images": 256, **more}


def start(number: int = 1, **more: Any) -> dict[str, Any]:
    where = {"device": "CPU somewhat", "num_devices": 2, "commit": "a" * 40, "how": {"compile": "off"}}
    return {"start": number, "run_id": "abcdef12", "unix_time": 1795377146.6, "batch": 0, **where, **more}


def make(
    folder: Path, lines: list | None = None, *, config: dict | None = None, starts: list | None = None, **summary
) -> Path:
    """Write a run's folder, with a summary where something of it is given."""
    folder.mkdir(parents=True)
    found = {**CONFIG, "run_name": folder.name, **(config or {})}
    (folder / "config.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in found.items()))
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
    append_lines(folder / "starts.jsonl", [start()] if starts is None else starts)
    append_lines(folder / "metrics.jsonl", [window(number) for number in range(4)] if lines is None else lines)
    if summary:
        (folder / "summary.json").write_text(json.dumps({"schema": 1, "trained_parameters": 2_765_540, **summary}))
    return folder


def parsed(*folders: Path) -> Parsed:
    return Parsed(page.html_of([read_history(folder) for folder in folders], now=0.0))


def grid(folder: Path, images: int, side: int = 8, captions: str = "a red circle\n") -> None:
    (folder / "samples").mkdir(exist_ok=True)
    Image.new("RGB", (side, side), (images % 256, 20, 30)).save(folder / f"samples/im{images:012d}.png")
    (folder / "samples/captions.txt").write_text(captions)


# --- numbers and thinning ---


def test_figures_times_and_texts_are_short_and_none_is_made_up():
    for value, text in ((172.963, "173.0"), (51234.5, "51,234"), (0.09174, "0.0917"), (1e-4, "1.000e-4")):
        assert figure(value) == text
    assert [figure(value) for value in (math.nan, None, True, 10**400)] == ["\u2013"] * 4
    shown = span(4.26), span(7265), tick(12800), plain("a\n\tb\x00c")
    assert shown == ("4.3 s", "2 h 1 min", "12.8 k", "a b c")


def test_thinning_keeps_every_extreme_and_the_mean_and_leaves_few_points_as_they_are():
    rng = np.random.default_rng(0)
    x, y = np.arange(100_000.0), rng.normal(size=100_000)
    y[77_777], y[3] = 1e6, -1e6
    thin = thinned("loss", x, y, 400)
    assert (len(thin.x), thin.high.max(), thin.low.min()) == (400, 1e6, -1e6)
    assert thin.high[77_777 // 250] == 1e6  # 250 points a bucket
    np.testing.assert_allclose(thin.y, y.reshape(400, 250).mean(1), rtol=1e-12, atol=1e-6)
    np.testing.assert_allclose(thin.x, x.reshape(400, 250).mean(1))
    few = thinned("loss", np.array([1.0, 2.0, np.nan, 4.0]), np.array([1.0, np.inf, 3.0, 5.0]))
    assert few.x.tolist() == [1.0, 4.0] and few.y.tolist() == [1.0, 5.0] and few.low is None


# --- a run ---


def test_the_result_and_its_target_stand_on_top(tmp_path):
    lines = [*map(window, range(4)), evaluation(640, 60.0, 0.7), evaluation(1280, 40.0, 0.95)]
    run = make(tmp_path / "mine", lines, starts=[start(seconds=40.0)], target="reached", images_per_sec=80.0)
    shown = parsed(run)
    said = "FID 40.00 and CLIP 0.950 after 1,280 images: 16.0 s of training, 26.0 s with evaluation."
    assert shown.text("section", id="result").startswith(f"Target reached {said} {AT_MOST} FID 40.00")
    header = "shapes (full, 2.77 M trained parameters), moments from cache/moments at 32 \u00d7 32 px, global batch"
    assert header in shown.text("header") and shown.text("header").endswith("on 2 \u00d7 CPU somewhat.")


NO_TARGET = {"target.fid": None, "target.clip": None}
AT_MOST = "The target is FID at most 45 and CLIP at least 0.9."


@pytest.mark.parametrize(
    ("summary", "starts", "config", "state", "text"),
    [
        ({"target": "missed"}, None, {}, "missed", f" in 20.0 s. {AT_MOST}"),
        ({"target": "pending"}, None, {}, "pending", " in 20.0 s; composer eval.py "),
        ({"loss": 1.0}, None, NO_TARGET, "finished", " in 20.0 s. No target was set."),
        ({}, [start(seconds=21.0)], {}, "stopped", " in 21.0 s until "),
        ({}, [start(seconds=21.0, failed="RuntimeError"), start(2)], NO_TARGET, "running", " in 21.0 s until "),
    ],
)
def test_a_page_shows_how_its_run_ended(tmp_path, summary, starts, config, state, text):
    run = make(tmp_path / "mine", starts=starts, config=config, **summary)
    result = result_of(read_history(run))
    assert result.state == state and result.text.startswith(f"1,280 images{text}")
    assert parsed(run).all("section", id="result")[0][0]["data-state"] == state


def test_a_failed_run_shows_its_error_on_top_and_at_its_start_whatever_it_had_reached(tmp_path):
    text = "ValueError: <b>it</b> broke\nhere"
    lines = [*map(window, range(4)), evaluation(1280, 40.0, 0.95)]
    shown = parsed(make(tmp_path / "mine", lines, starts=[start(), start(2, seconds=9.0, failed=text)]))
    top = "Failed ValueError: <b>it</b> broke here. It had seen 1,280 images in 29.0 s."
    assert shown.text("section", id="result").startswith(top)
    starts = shown.text("section", id="starts")
    assert "Starts that ended with an error: 1." in starts and " UTC killed 20.0 s " in starts
    assert " UTC failed: ValueError: <b>it</b> broke here 9.0 s " in starts
    assert result_of(read_history(make(tmp_path / "other", lines, starts=[start()]))).state == "reached"


def test_a_partial_score_meets_no_target(tmp_path):
    run = read_history(make(tmp_path / "mine", [*map(window, range(4)), evaluation(1280, 1.0, 1.0, partial=True)]))
    assert result_of(run).state == "running"
    assert "1 evaluations are of some of the prompts only" in parsed(run.folder).text("section", id="starts")


def test_figures_are_those_of_the_record(tmp_path):
    lines = [window(n, loss=3.0 - n) for n in range(3)] + [evaluation(640, 60.5, 0.71), evaluation(960, 50.25, 0.8)]
    shown = parsed(make(tmp_path / "mine", lines))
    table = shown.text("figure", id="plot-fid-over-images").split("Figures")[1]
    assert re.findall(r"[\d.,]+ [\d.]+", table) == ["640 60.5000", "960 50.2500"]
    assert shown.all("svg")[0][0]["aria-label"] == "FID: FID over images seen. Dashed line: target: at most 45."


def test_time_goes_on_over_starts_and_a_resume_is_on_record(tmp_path):
    lines = [window(0), window(1), window(2, start=2, start_sec=8.0), window(3, start=2, start_sec=13.0)]
    run = make(tmp_path / "mine", lines, starts=[start(), start(2, batch=20, seconds=14.0, how={"compile": "whole"})])
    append_lines(run / "metrics.cut.jsonl", [window(2, start_sec=15.0), window(3, start_sec=19.0)])
    history = read_history(run)
    assert history.windows["elapsed_sec"].tolist() == [5.0, 10.0, 27.0, 32.0]  # the first one had come to 19 s
    assert history.seconds == 33.0 and history.device_hours == pytest.approx(33.0 * 2 / 3600)
    text = parsed(run).text("section", id="starts")
    assert "Resumes: 1. 2 windows were trained again or closed again after a resume." in text
    assert "killed 19.0 s" in text and "ended 14.0 s" in text


def test_the_slider_has_an_image_for_each_grid_and_shows_the_last(tmp_path):
    run = make(tmp_path / "mine")
    for images in (0, 320, 640):
        grid(run, images)
    shown = parsed(run)
    images = [own for own, _ in shown.all("img")]
    assert [(own["data-images"], "hidden" in own) for own in images] == [("0", True), ("320", True), ("640", False)]
    slider = shown.all("input", id="samples-slider")[0][0]
    assert (slider["max"], slider["value"], shown.text("output", id="samples-seen")) == ("2", "2", "640")
    with Image.open(io.BytesIO(base64.b64decode(images[2]["src"].partition(";base64,")[2]))) as image:
        assert image.convert("RGB").getpixel((3, 3)) == (640 % 256, 20, 30)


def test_grids_that_are_too_many_or_broken_are_left_out_and_named(tmp_path):
    run = make(tmp_path / "mine")
    for images in range(80):
        grid(run, images)
    (run / "samples/im000000000000.png").write_bytes(b"no image")
    found = samples_of(read_history(run), 10**6)
    said = ["im000000000000.png cannot be read.", "59 of 80 sample grids are shown, evenly over training."]
    assert found.left_out == said
    assert sum(len(grid.address) for grid in samples_of(read_history(run), 1000).grids) <= 1000


# --- the page itself ---


def test_the_page_asks_no_network_and_runs_only_its_own_script(tmp_path):
    run = make(tmp_path / "mine")
    grid(run, 320)
    shown = parsed(run)
    (script,) = ["".join(text) for tag, _, text in shown.elements if tag == "script"]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(own["content"] for own, _ in shown.all("meta") if own.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; img-src data:; ") and f"; script-src 'sha256-{digest}'; " in policy
    for name, value in [item for _, own, _ in shown.elements for item in own.items()]:
        assert not name.startswith("on") and (name not in ("src", "href") or value.startswith(("data:", "#"))), value
    styles = "".join("".join(text) for tag, _, text in shown.elements if tag == "style")
    assert "url(" not in styles and "@import" not in styles


EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)> \x1b[31mred\x1b[0m \u202egnp.exe $x^2$ {{ 7 * 7 }} \"'`"


def test_third_party_texts_are_shown_and_do_nothing_and_an_older_records_password_is_hidden(tmp_path):
    config = {"data.remote": EVIL, "model.family": "</style><b>", "data.local": "sftp://me:hunter2@host/x"}
    config["loggers.wandb.project"] = "${oc.env:SECRET}"
    run = make(tmp_path / "<i>$a_b$ &amp;", config=config, starts=[start(device=EVIL, commit=EVIL, lost=[EVIL])])
    grid(run, 320, captions=f"{EVIL}\n{'x' * 10_000}\n")
    append_lines(run / "bad_samples.jsonl", [{"sample": 3, "key": EVIL, "reason": EVIL}])
    streams = {EVIL: {"samples": 1, "loss": 1.0}, "b": {"samples": 2, "loss": 2.0}}
    append_lines(run / "metrics.jsonl", [window(4, streams=streams)])
    text = page.html_of([read_history(run)])
    assert "hunter2" not in text and "sftp://me:***@host/x" in text and "${oc.env:SECRET}" in text
    shown = Parsed(text)
    assert [len(shown.all(tag)) for tag in ("script", "style", "title", "b", "i")] == [1, 1, 1, 0, 0]
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e]", text)
    samples = shown.text("section", id="samples")
    assert "alert(1)" in samples and "49" not in samples
    assert f"{'x' * 400}\u2026 (10,000 characters)" in samples and "x" * 401 not in text
    assert shown.text("h1") == "<i>$a_b$ &amp;" and "<img src=x onerror" in shown.text("section", id="configuration")
    assert "alert(1)" in shown.text("figure", id="plot-streams")
    both = Parsed(page.html_of([read_history(run), read_history(run)]))
    assert len(both.all("script")) == 1 and "alert(1)" in both.text("section", id="time") + both.text("header")


# --- broken records ---


def lacks(folder: Path) -> list[str]:
    found = parsed(folder).all("section", id="missing")
    return list(read_history(folder).missing) if found else []


def test_what_a_record_lacks_or_cannot_be_read_is_listed(tmp_path):
    assert lacks(make(tmp_path / "whole", target="missed")) == []
    run = make(tmp_path / "mine", [])
    assert lacks(run) == ["metrics.jsonl has no window yet: the run has not come to the end of its first one."]
    lines = '{nothing}\n[1, 2]\n\n"text"\n' + json.dumps(window(2)) + "\n" + json.dumps(window(3))[:50]
    (run / "metrics.jsonl").write_text(lines)
    assert lacks(run) == [
        "The last line of metrics.jsonl is cut off: its writer was stopped in the middle of it.",
        "metrics.jsonl: 3 of its lines cannot be read. They are left out.",
    ]
    assert read_history(run).windows["batch"].tolist() == [30.0]
    for name in ("metrics.jsonl", "environment.json"):
        (run / name).unlink()
    (run / "summary.json").write_text('{"target": ')
    assert lacks(run) == [
        *("There is no metrics.jsonl.", "There is no environment.json."),
        "summary.json cannot be read: it is no whole JSON.",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("value", [None, "text", [], {}, True, -1, 1e308], ids=str)
def test_odd_values_in_a_record_give_a_page(tmp_path, value):
    lines = [dict.fromkeys(window(0), value) | {"batch": 1}]
    lines.append(dict.fromkeys(evaluation(1, 1.0, 1.0), value) | {"evaluation": True})
    lines.append({"validation": True, "val_loss_bins": [value], "val_loss": value, "images": value})
    config = dict.fromkeys([*CONFIG, "cost.per_device_hour", "eval.guidance"], value) | {"model.variant": "mlperf"}
    starts = [dict.fromkeys(start(), value) | {"start": 1}, start(2, lost=value, unix_time=value)]
    run = make(tmp_path / "odd", lines, config=config, starts=starts, target=value, fid=value)
    append_lines(run / "eval.jsonl", [dict.fromkeys(["images", "fid", "clip", "guidance", "steps"], value)] * 2)
    assert parsed(run).text("h1") == "odd"
    assert "Results" in parsed(run, make(tmp_path / "plain")).text("section", id="results")


# --- several runs ---


def test_results_stand_beside_each_other_with_their_ratios(tmp_path):
    one = make(tmp_path / "one", [*map(window, range(4)), evaluation(1280, 40.0, 0.95)])
    two = make(tmp_path / "two", [*(window(n, images_per_sec=160.0) for n in range(4)), evaluation(640, 60.0, 0.5)])
    rows = {row.name: row.cells for row in results([read_history(one), read_history(two)])}
    expected = {
        "result": [("Target reached", None), ("Running", "")],
        "FID": [("40.00", None), ("60.00", "\u00d7 1.50")],
        "images/s": [("80.00", None), ("160.0", "\u00d7 2.00")],
        "images to the target": [("1,280", None), ("\u2013", "")],
    }
    assert expected.items() <= rows.items()
    shown = parsed(one, two)
    assert "FID 40.00 60.00 \u00d7 1.50" in shown.text("section", id="results")
    assert shown.text("h1") == "one and two" and shown.all("section", id="result") == []
    assert all(name in shown.text("figure", id="plot-loss") for name in ("one", "two"))


def test_only_the_keys_that_differ_are_shown(tmp_path):
    two = make(tmp_path / "two", config={"seed": 18, "ema.enabled": True})
    text = parsed(make(tmp_path / "one"), two).text("section", id="differences")
    assert text == "What differs Configuration one two seed 17 18 ema.enabled not there true Environment Nothing."
    assert [row.name for row in differing([{"a": 1, "b": [1]}, {"a": 1, "b": [2]}, {"a": 1, "b": [1]}])] == ["b"]
    assert differing([{"a": None, "b": 1}, {"b": 1}])[0].cells == [("\u2013", None), ("not there", None)]
    assert differing([{"a": 1}, {}, {"a": 1}]) == []  # a run without that file: the page lists it elsewhere


def test_what_cannot_be_compared_is_named(tmp_path):
    how = {"statistics_sha256": "1", "prompts_sha256": "2", "eval_image_size": [32, 32], "guidance": 2.0}
    other = {**how, "statistics_sha256": "9", "eval_image_size": [512, 512], "guidance": 8.0}
    one = make(tmp_path / "one", [window(0), evaluation(640, 60.0, 0.7, **how)])
    config = {"model.family": "sd2", "image_size": 512}
    two = make(tmp_path / "two", [window(0), evaluation(640, 9.0, 0.2, **other)], config=config)
    runs = [read_history(one), read_history(two)]
    assert not_comparable(runs) == [
        "FIDs do not compare: the runs differ in statistics_sha256, eval_image_size.",
        "CLIP scores do not compare: the runs differ in eval_image_size.",
        "Losses do not compare: the runs differ in model.family, image_size.",
        "Images/s do not compare: the runs differ in model.family, image_size.",
        "Scores do not compare: the runs differ in guidance.",
    ]
    assert "FIDs do not compare" in parsed(one, two).text("section", id="results")
    assert not_comparable(runs[:1] * 2) == []


# --- the command ---
