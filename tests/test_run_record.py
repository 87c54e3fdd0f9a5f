"""callbacks/run_record.py: what a killed writer leaves is read, what is broken otherwise is named with its file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from test_benchmark import refused

import benchmark
from callbacks.run_record import (
    RunRecord,
    found_batch_size,
    keep_keys,
    read_config,
    read_lines,
    read_summary,
    run_id_of,
    write_outcome,
)
from config import ConfigError
from resume import evaluations_of

LINES = [
    b'{"batch": 1, "loss": 0.5, "start": 1}\n',
    b'{"batch": 1, "evaluation": true}\n',
    b'{"batch": 2, "loss": 0.4, "start": 1}\n',
]


def record_of(folder: Path) -> RunRecord:
    return RunRecord(
        folder,
        "seed: 1\n",
        {},
        throughput=SimpleNamespace(windows=[]),
        mean_gradient_norm=lambda: None,
        bad_samples=None,
        check_bad_samples=lambda bad: None,
        last_checkpoint=lambda: None,
    )


@pytest.mark.parametrize("end", [b'{"batch": 3, "lo', b"\x00\x00\x00", b'{"a": "\xc3', b"123", b""])
def test_a_last_line_that_a_killed_writer_left_is_cut_off_and_kept_apart(tmp_path, end):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(LINES) + end)
    assert [line["batch"] for line in read_lines(path)] == [1, 1, 2]
    record_of(tmp_path).start(1)
    assert path.read_bytes() == b"".join(LINES[:2])
    assert (tmp_path / "metrics.cut.jsonl").read_bytes() == LINES[2] + (end + b"\n" if end else b"")


@pytest.mark.parametrize("broken", [b'{"batch": 1, "eva\n', b"123\n", b"\n", b"\xff\n"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "starts.jsonl", "bad_samples.jsonl"])
def test_a_broken_line_with_others_after_it_is_refused_and_the_record_stays_as_it_is(tmp_path, name, broken):
    path = tmp_path / name
    path.write_bytes(LINES[0] + broken + LINES[2])
    (tmp_path / "summary.json").write_text("{}")
    before = {at.name: at.read_bytes() for at in tmp_path.iterdir()}
    shown = broken.decode(errors="replace")[:-1]
    with pytest.raises(ConfigError) as caught:
        record_of(tmp_path).start(1)
    assert str(caught.value) == (
        f"{path}: line 2 cannot be read: '{shown}' is no whole JSON object. Mend it, or remove that line: what it said is "
        "then lost, the others stay."
    )
    assert {at.name: at.read_bytes() for at in tmp_path.iterdir()} == before
    reader = {"metrics.jsonl": evaluations_of, "starts.jsonl": run_id_of}.get(name, lambda folder: read_lines(path))
    with pytest.raises(ConfigError, match="line 2 cannot be read"):
        reader(tmp_path)


@pytest.mark.parametrize(("content", "said"), [('{"target": "pen', "Unterminated string"), ("[1]", "it holds a list")])
def test_a_broken_summary_is_named_with_what_to_do(tmp_path, content, said):
    assert read_summary(tmp_path) == {}
    path = tmp_path / "summary.json"
    path.write_text(content)
    for read in (read_summary, lambda folder: write_outcome(folder, {"target": "reached"})):
        with pytest.raises(ConfigError) as caught:
            read(tmp_path)
        text = str(caught.value)
        assert (
            text.startswith(f"{path} is no whole summary: {said}")
            and "goes on from the run's newest checkpoint" in text
        )
    assert path.read_text() == content


@pytest.mark.parametrize("content", ["model: [\n", "eval: {batch_size: 4\n", "- a\n", "eval: ${no}\n"])
def test_a_broken_config_of_a_run_is_named_with_what_to_do(tmp_path, content):
    assert read_config(tmp_path) == {}
    path = tmp_path / "config.yaml"
    path.write_text(content)
    for read in (read_config, found_batch_size, lambda folder: keep_keys(folder, {"eval.batch_size": 4})):
        with pytest.raises(ConfigError) as caught:
            read(tmp_path)
        text = str(caught.value)
        assert text.startswith(f"{path}: ") and "Bring back a copy, or remove it" in text and "\n" not in text
    assert path.read_text() == content


def test_a_run_whose_record_is_broken_is_refused_before_anything_is_built(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "train", lambda config: pytest.fail("it was built"))
    words = ["--use_synth_data", "model.preset=tiny", "image_size=64", f"run_folder={tmp_path}", "run_name=a"]
    words += ["global_batch_size=8", "max_duration=4ba", "loggers.progress_bar=false"]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.yaml").write_text("model: [\n")
    [error] = refused(capsys, *words)
    assert error.startswith(f"{tmp_path}/a/config.yaml: cannot be read as YAML: while parsing a flow node. Bring back")
    (tmp_path / "a" / "config.yaml").write_text("seed: 17\n")
    (tmp_path / "a" / "metrics.jsonl").write_bytes(b"123\n" + LINES[0])
    [error] = refused(capsys, *words)
    assert error.startswith(f"{tmp_path}/a/metrics.jsonl: line 1 cannot be read: '123'")
