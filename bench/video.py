"""How fast one loader process delivers clips of films, against PyAV that decodes the same frames and does nothing else.

    python -m bench.video                                     # a table, and reports/results/video_speed.json
    python -m bench.video num_clips=4 rounds=1 results=/tmp/video.json

    ours       the stage `videos` through data.build_data with one loader process: seek, decode, RGB, resize, crop, tokenise
    decoder    PyAV in this process, one thread: from the key frame before a clip to its last frame, and no pixel is touched
    rgb        the same, and the clip's frames as RGB arrays of the film's own size
    whole      PyAV decodes each film to its end, as a reader without seeking has to

A clip lies in the middle of its film, so all decode the same frames. A turn is an epoch: clips/s, of ours from the arrival of
the first batch to that of the last, and processor time a clip. The films are rendered and coded by x264, with a key frame
each second.
Exit code: 0 when the record was written, 2 when the command cannot be read.
"""

from __future__ import annotations

import functools
import io
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from streaming import MDSWriter

from bench.command import keep, read_keys, threads
from bench.contest import Figures, take_turns
from bench.micro_data import SEED, samples_per_sec, words
from cli.command import command
from cli.limits import ImageSize, limited
from data import DataConfig, build_data
from stages.dataset import write_facts
from stages.fetch import HASH
from stages.videos import clip_times, inspect_film
from zoo import load_family

SCHEMA = 1
COLUMNS = {"mp4": "bytes", "caption": "str", "key": "str", "width": "int", "height": "int"}
COLUMNS |= {"num_frames": "int", "fps": "float64"}
BATCH, FRAMES, RATE = 2, 17, 16.0
FILM_FRAMES, FILM_RATE, NUM_FILMS = 120, 24, 4
CASES: dict[str, tuple[ImageSize, ImageSize]] = {
    "480": ((854, 480), (416, 240)),
    "1080": ((1920, 1080), (768, 512)),
}
"""Name -> (width, height) of the films, and of the clips, px."""
CONTESTANTS = ("ours", "decoder", "rgb", "whole")


@dataclass(frozen=True)
class VideoBenchConfig:
    """The keys of this command."""

    num_clips: int = limited(16, 2 * BATCH)
    """Clips of an epoch."""
    rounds: int = limited(5, 1)
    """Turns of each contestant."""
    results: str = "reports/results/video_speed.json"
    """File of the record; an earlier one is replaced."""
    work: str | None = None
    """Folder for temporary files. null: the system's."""


def film(number: int, size: ImageSize) -> bytes:
    """Render a film: waves that move, about as hard to decode as smooth parts of a photographed one."""
    import av

    file, (width, height) = io.BytesIO(), size
    x, y = np.meshgrid(np.linspace(0, 9, width, dtype=np.float32), np.linspace(0, 9, height, dtype=np.float32))
    with av.open(file, "w", format="mp4") as container:
        track = container.add_stream("libx264", rate=FILM_RATE, options={"preset": "veryfast"})
        track.width, track.height, track.pix_fmt, track.gop_size = width, height, "yuv420p", FILM_RATE
        for at in range(FILM_FRAMES):
            moved = 0.1 * at + number
            waves = [np.sin(x * (1 + number % 5) + y + moved), np.cos(y * 3 - moved), np.sin(x * y / 3 + moved)]
            pixels = (127.5 + 127.5 * np.stack(waves, axis=-1)).astype(np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="yuv420p", threads=1)
            frame.pts, frame.time_base = at, Fraction(1, FILM_RATE)
            container.mux(track.encode(frame))
        container.mux(track.encode(None))
    return file.getvalue()


def write_films(folder: Path, size: ImageSize, num_clips: int) -> list[bytes]:
    """Write a stage of a few films, each several times; return the film of each sample."""
    films = [film(number, size) for number in range(NUM_FILMS)]
    with MDSWriter(out=str(folder), columns=COLUMNS, hashes=[HASH], size_limit="64mb") as writer:
        for number in range(num_clips):
            content = films[number % NUM_FILMS]
            row = {"mp4": content, **vars(inspect_film(content)), **words(number)}
            writer.write(row)
    write_facts(folder, "videos", {})
    return [films[number % NUM_FILMS] for number in range(num_clips)]


def decode(data: bytes, times_sec: Sequence[float], how: str) -> int:
    """Decode a clip's frames by PyAV alone; return how many frames were decoded.

    Args:
        times_sec: of the clip's frames.
        how: decoder, rgb or whole; see the head of this file.
    """
    import av

    num, wanted = 0, {math.floor(time_sec * FILM_RATE + 1e-6) for time_sec in times_sec}
    with av.open(io.BytesIO(data)) as container:
        track = container.streams.video[0]
        track.codec_context.thread_count, track.codec_context.thread_type = 1, "NONE"
        if how != "whole":
            container.seek(int(times_sec[0] / float(track.time_base)), stream=track)
        for frame in container.decode(track):
            num, number = num + 1, round(frame.time * FILM_RATE)
            if how == "rgb" and number in wanted:
                frame.reformat(format="rgb24", threads=1).to_ndarray()
            if how != "whole" and number >= max(wanted):
                break
    return num


def measure_case(name: str, config: VideoBenchConfig, folder: Path) -> dict[str, Any]:
    """Return the figures of a case."""
    size, (width, height) = CASES[name]
    films = write_films(folder, size, config.num_clips)
    section = DataConfig(stage="videos", local=str(folder), workers=1, shuffle=False, fps=RATE)
    family = load_family("wan", "tiny", "t2v")
    loader: Any = build_data(
        section,
        family,
        size=(width, height, FRAMES),
        device_batch_size=BATCH,
        device=torch.device("cpu"),
        seed=SEED,
    ).dataloader
    times_sec = clip_times(FILM_FRAMES, FILM_RATE, frames=FRAMES, rate=RATE, place=0.5)
    figures, cpu_ms = Figures(), {who: [] for who in CONTESTANTS}

    def turn_of_ours() -> float:
        began_sec = _workers_sec()
        rate = samples_per_sec(loader, "videos")
        cpu_ms["ours"].append(1e3 * (_workers_sec() - began_sec) / len(films))
        return rate

    def turn(who: str) -> float:
        began_sec, began_cpu_sec = time.perf_counter(), time.process_time()
        for data in films:
            decode(data, times_sec, who)
        cpu_ms[who].append(1e3 * (time.process_time() - began_cpu_sec) / len(films))
        return len(films) / (time.perf_counter() - began_sec)

    turns: dict[str, Callable[[], float]] = {who: functools.partial(turn, who) for who in CONTESTANTS[1:]}
    for who, rates in take_turns({"ours": turn_of_ours, **turns}, config.rounds).items():
        figures.add(f"{who}_clips_per_sec", rates)
        figures.add(f"{who}_cpu_ms_a_clip", cpu_ms[who][1:])  # the first was for warming up
    loader.close()
    for who in CONTESTANTS[1:]:
        figures.ratio(f"ours_of_{who}", "ours_clips_per_sec", f"{who}_clips_per_sec")
        figures.ratio(f"ours_cpu_of_{who}", f"{who}_cpu_ms_a_clip", "ours_cpu_ms_a_clip")
    decoded = {who: decode(films[0], times_sec, who) for who in ("decoder", "whole")}
    sizes = {"case": name, "film_size": list(size), "clip_size": [width, height, FRAMES], "decoded_frames": decoded}
    return {**sizes, **figures.flat, "by_round": figures.by_round}


def _workers_sec() -> float:
    """Return the processor time of the loader process, which lives."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    config = read_keys(VideoBenchConfig, argv)
    if config is None:
        return 0

    def cases() -> dict[str, Any]:
        with threads(1), tempfile.TemporaryDirectory(dir=config.work, prefix="video-") as folder:
            return {"cases": [measure_case(name, config, Path(folder, name)) for name in CASES]}

    keep(config.results, SCHEMA, "video", config, cases)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
