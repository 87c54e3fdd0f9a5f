"""Files of a run's folder, and of the reports' command lines, that are pipes, devices or too long: said, never waited for."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from browser_pages import copy_run

import export
from cli.files import open_regular, read_json, read_regular
from evaluation.prompts import read_prompts
from evaluation.score_table import read_rows
from prepare import coco
from record.config_file import CONFIG, LATER, masked_text, read_config
from record.files import ALL, check_record, evaluations_of, lost_history, read_summary
from record.films import read_mp4
from record.history import grid_bytes, is_run, read_history
from record.mlperf_events import events_to_fault, read_events
from record.standing import signature
from reports.page_samples import samples_of

pytestmark = pytest.mark.timeout(120)


def link_to_zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_long(path: Path) -> None:
    """Without a byte of it on the disk."""
    path.touch()
    os.truncate(path, 2**41)


ODD: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (os.mkfifo, "it is no regular file"),
    "device": (link_to_zero, "it is no regular file"),
    "long": (make_long, "it has 2,199,023,255,552 bytes; at most 268,435,456 are read"),
}


@pytest.mark.parametrize("what", ODD)
def test_what_is_no_file_of_some_size_is_refused_before_it_is_read(what, tmp_path):
    make, why = ODD[what]
    make(tmp_path / "a.json")
    for read in (open_regular, read_regular, read_json):
        with pytest.raises(OSError, match=why) as caught:
            read(tmp_path / "a.json")
        assert caught.value.filename == str(tmp_path / "a.json") and caught.value.strerror == why
    (tmp_path / "deep.json").write_text("[" * 10**5)
    with pytest.raises(ValueError, match="nested too deep"):
        read_json(tmp_path / "deep.json")
    (tmp_path / "link").symlink_to("deep.json")
    assert read_regular(tmp_path / "link") == b"[" * 10**5
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)


READERS: list[Callable[[Path], object]] = [
    read_history,
    read_config,
    masked_text,
    check_record,
    read_summary,
    evaluations_of,
    signature,
    export._commit_of,
    export.caption_of,
    lambda folder: lost_history(folder, None),
    lambda folder: read_rows(folder / "eval.jsonl"),
    lambda folder: read_events(folder / "mlperf.log"),
    lambda folder: events_to_fault(folder / "mlperf.log"),
    lambda folder: is_run(folder) and samples_of(read_history(folder), 10**6),
    lambda folder: [grid_bytes(path) for path in (folder / "samples").glob("*.png")],
    lambda folder: [read_mp4(path) for path in (folder / "samples").glob("*.mp4")],
]
"""All that reads a run's folder: each returns, or says why not."""


@pytest.mark.parametrize("what", ODD)
def test_no_reader_of_a_runs_folder_waits_for_a_pipe_or_reads_a_device(what, tmp_path):
    make, _ = ODD[what]
    run = copy_run(tmp_path)
    (run / "samples").mkdir(exist_ok=True)
    for name in (*ALL, LATER, "samples/captions.txt", "samples/im000000000064.png", "samples/im000000000064.mp4"):
        path, kept = run / name, tmp_path / "kept"
        if is_there := path.exists():
            shutil.move(path, kept)
        make(path)
        for read in READERS:
            try:
                read(run)
            except (ValueError, OSError) as error:
                assert name.rpartition("/")[2] in str(error) or name == CONFIG, (name, error)
        path.unlink()
        if is_there:
            shutil.move(kept, path)
    assert not read_history(run).missing


@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("reports.study", ["a.json"]),
        ("reports.study", ["record.json", "b.md"]),
        ("reports.latency", ["a.json"]),
        ("reports.tables", ["a.json"]),
        ("reports.scaling", ["a.json"]),
        ("reports.compare", ["a.json", "b.json"]),
        ("reports.mlperf", ["a.json", "out"]),
        ("reports.page", ["a.json"]),
        ("reports.samples", ["a.png", "a.txt", "out.png"]),
        ("evaluation.plots", ["a.json", "out.png"]),
        ("evaluation.plots", ["a.jsonl", "out.png"]),
        ("bench.ladder", ["a.yaml"]),
        ("sweep", ["a.yaml"]),
        ("benchmark", ["a.yaml"]),
    ],
)
def test_a_command_of_such_a_file_is_refused(what, name, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for suffix in ("json", "jsonl", "png", "txt", "html", "yaml"):
        ODD[what][0](Path(f"a.{suffix}"))
    for path in ("b.json", "b.md"):
        ODD[what][0](Path(path))
    results = Path(__file__).resolve().parent.parent / "reports/results"
    shutil.copyfile(results / "shapes_precision.json", "record.json")
    shutil.copyfile(results / "shapes/seed17.json", "scores.json")
    assert importlib.import_module(name).main(words) == 2
    said = capsys.readouterr().err
    assert said and "Traceback" not in said
    assert not Path("out.png").exists()


@pytest.mark.parametrize("what", ODD)
def test_prompts_and_captions_are_files(what, tmp_path):
    for name, read in {"a.tsv": lambda path: read_prompts(str(path)), "a.json": coco.read_annotations}.items():
        path = tmp_path / name
        ODD[what][0](path)
        with pytest.raises(ValueError, match=f"{name}.* cannot be read: it "):
            read(path)
