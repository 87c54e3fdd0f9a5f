"""A folder of files as sources: cut into parts of some samples, by the names of its files in order.

The files of a key lie in one part, and a part depends on the folder alone, not on the number of workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from prepare.changes import known_by_files
from prepare.samples import VIDEO_SUFFIXES, Sample, Taken
from prepare.sources import MOMENTS_SUFFIX, Ignore, Source, read_source
from stages.image_files import IMAGE_SUFFIXES

SAMPLES_PER_PART = 1000
BYTES_PER_PART = 2**30  # of videos fewer are a part
SUFFIXES = (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES, MOMENTS_SUFFIX)
"""Of the file that makes a sample."""


@dataclass(frozen=True)
class FolderPart(Source):
    """Some files of a folder.

    sizes: bytes of each file, by name.
    """

    path: Path
    name: str
    sizes: Mapping[str, int]

    def known_by(self) -> dict[str, Any]:
        return {"name": self.name, **known_by_files(self.path.name, self.sizes)}

    def read(self, taken: Taken | None, folder: Path, ignore: Ignore) -> Iterator[Sample]:
        return read_source(self.path, ignore, taken, list(self.sizes))


def cut_folder(path: Path) -> list[Source]:
    """Cut a folder into parts. Raises OSError: it cannot be read."""
    entries = (file for file in path.iterdir() if not file.is_dir())  # a link to itself is neither
    sizes = {file.name: file.stat().st_size if file.is_file() else 0 for file in entries}
    parts: list[dict[str, int]] = [{}]
    num_samples = num_bytes = 0
    names = sorted(sizes, key=lambda name: (PurePosixPath(name).stem, name))
    for _, of_key in itertools.groupby(names, lambda name: PurePosixPath(name).stem):
        files = {name: sizes[name] for name in of_key}
        # A part begins with a sample, so that there is none without: other files belong to the part before.
        is_sample = any(PurePosixPath(name).suffix[1:].lower() in SUFFIXES for name in files)
        if is_sample and (num_samples == SAMPLES_PER_PART or (num_samples and num_bytes >= BYTES_PER_PART)):
            parts.append({})
            num_samples = num_bytes = 0
        parts[-1] |= files
        num_samples += is_sample
        num_bytes += sum(files.values())
    many = f", part {{}} of {len(parts)}" if len(parts) > 1 else ""
    return [FolderPart(path, path.name + many.format(number), part) for number, part in enumerate(parts, 1)]
