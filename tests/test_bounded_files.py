"""Files of a run's folder that are pipes, devices or too long: said, never waited for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import export
from common.files import open_regular, read_json, read_regular
from evaluation.table import read_rows
from reports.page_content import samples_of
from run_folder import files
from run_folder.files import read_config
from run_folder.history import grid_bytes, is_run, read_history, signature
from run_folder.mlperf_log import events_to_fault, read_events
from run_folder.sample_videos import read_mp4

pytestmark = pytest.mark.timeout(120)


def make_long(path: Path) -> None:
    """Without a byte of it on the disk."""
    path.touch()
    os.truncate(path, 2**41)


NO_FILE = "it is not a regular file"
ODD: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (os.mkfifo, NO_FILE),
    "device": (lambda path: path.symlink_to("/dev/zero"), NO_FILE),
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
    *(read_history, read_config, signature, export.caption_of),
    *(files.masked_text, files.check_record, files.read_summary, files.evaluations_of),
    lambda folder: files.read_object(folder / "environment.json"),
    lambda folder: files.lost_history(folder, None),
    lambda folder: read_rows(folder / "eval.jsonl"),
    lambda folder: read_events(folder / "mlperf.log"),
    lambda folder: events_to_fault(folder / "mlperf.log"),
    lambda folder: is_run(folder) and samples_of(read_history(folder), 10**6),
    lambda folder: [grid_bytes(path) for path in (folder / "samples").glob("*.png")],
    lambda folder: [read_mp4(path) for path in (folder / "samples").glob("*.mp4")],
]
"""All that reads a run's folder: each returns, or says why not."""
