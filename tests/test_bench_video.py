"""bench/video.py: PyAV alone decodes the frames of our clips and no others, and the record has every contestant."""

from __future__ import annotations

import json

import pytest

from bench import video
from stages.videos import clip_times, read_frames


def test_pyav_alone_decodes_from_the_key_frame_before_a_clip_to_its_last_frame():
    data = video.film(0, (64, 48))
    times = clip_times(video.FILM_FRAMES, video.FILM_RATE, frames=video.FRAMES, rate=video.RATE, place=0.5)
    last = int(times[-1] * video.FILM_RATE + 1e-6)
    key_frame = int(times[0]) * video.FILM_RATE
    for how in ("decoder", "rgb"):
        assert video.decode(data, times, how) == last - key_frame + 1
    assert video.decode(data, times, "whole") == video.FILM_FRAMES
    assert len(read_frames(data, times, lambda frame: frame.shape)) == video.FRAMES


@pytest.mark.slow
@pytest.mark.timeout(200, func_only=True)
def test_the_record_has_every_contestant_and_its_speeds(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "CASES", {"small": ((64, 48), (48, 32))})
    results = tmp_path / "video.json"
    assert video.main(["num_clips=4", "rounds=2", f"results={results}", f"work={tmp_path}"]) == 0
    record = json.loads(results.read_text())
    [case] = record["cases"]
    for who in video.CONTESTANTS:
        assert case[f"{who}_clips_per_sec"] > 0 and case[f"{who}_cpu_ms_a_clip"] > 0
        assert len(case["by_round"][f"{who}_clips_per_sec"]) == 2
    assert case["decoded_frames"]["decoder"] < case["decoded_frames"]["whole"] == video.FILM_FRAMES
    assert list(tmp_path.iterdir()) == [results]
