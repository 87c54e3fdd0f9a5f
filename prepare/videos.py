"""A film with its caption as a row of the stage `videos`.

MP4, MOV, WebM or MKV, decoded to its end once as a check (stages/videos.py). The columns are those of `images`, but for

    mp4                  the file's own bytes, whatever its container
    width, height        px, of a frame upright
    num_frames, fps      as they were counted from the first frame to the last
"""

from __future__ import annotations

from typing import Any

from prepare.filters import Filters
from prepare.samples import Sample, Taken, check_key, read_captions
from stages.videos import inspect_film

VIDEO_COLUMNS = {"mp4": "bytes", "caption": "str", "key": "str", "width": "int", "height": "int"}
VIDEO_COLUMNS |= {"num_frames": "int", "fps": "float64", "metadata": "json"}


def video_row(sample: Sample, taken: Taken, filters: Filters) -> dict[str, Any]:
    """Check one sample and return its row. Raises SampleError: it is unusable; LeftOut: not wanted."""
    check_key(sample.key)
    content = sample.image(taken)
    captions, metadata = read_captions(sample, taken), sample.metadata(taken)  # before it is decoded, which takes long
    film = inspect_film(content)
    filters.check(film.width, film.height, metadata)
    row = {"mp4": content, "width": film.width, "height": film.height, "num_frames": film.num_frames, "fps": film.fps}
    row |= {"caption": captions[0], "key": sample.key, "metadata": metadata}
    return row | ({"captions": captions} if taken.several else {})
