"""COCO's images, read from the zip or a folder, and written at one size: as files, or as tars for prepare.shards.

PIL decodes, resizes and encodes without Python's lock, so that threads are enough, and a killed command leaves none behind.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image
from tqdm import tqdm

from cli.errors import Failed, Refused
from cli.files import is_bounded, open_regular, to_disk, whole, write_whole
from prepare.counts import SKIPPED_FILE, Ledger
from prepare.names import GO_ON
from stages.image_files import open_image
from stages.moments import TIMESTEP

if TYPE_CHECKING:
    from pandas import DataFrame

SAMPLES_PER_TAR = 1000
MAX_BYTES = 2**26  # of an image's file; COCO's largest has less than one MiB
NAMED = 5
FETCH = "Give COCO's whole val2014.zip, or a folder with all of its images"


def image_name(image_id: int, suffix: str = "jpg") -> str:
    """Return the name of an image's file: of COCO's own, and with another suffix of ours."""
    return f"COCO_val2014_{image_id:012}.{suffix}"


class Pictures:
    """Images by name, in a zip or a folder. Several threads may read.

    Raises:
        Refused: it is no whole zip, or no folder.
    """

    def __init__(self, path: Path):
        self.path = path
        self._zip: zipfile.ZipFile | None = None
        if path.is_dir():
            inner = path / "val2014"
            folder = inner if inner.is_dir() else path
            self._members: dict[str, Any] = {entry.name: Path(entry.path) for entry in os.scandir(folder)}
            return
        try:
            open_regular(path, None).close()
            self._zip = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            why = getattr(error, "strerror", None) or f"it is no whole zip: {error}"
            raise Refused(f"images: {path} cannot be read: {why}. {FETCH}.") from error
        self._members = {Path(member.filename).name: member for member in self._zip.infolist() if not member.is_dir()}

    def check(self, names: Iterable[str]) -> None:
        """Raise Refused if an image is not there."""
        if missing := sorted(set(names) - self._members.keys()):
            raise Refused(f"images: {self.path} lacks {len(missing):,} of the images: {_some(missing)}. {FETCH}.")

    def read(self, name: str) -> bytes:
        """Return an image's file. Raises OSError, ValueError, zipfile.BadZipFile, zlib.error: it is damaged."""
        member = self._members[name]
        size = member.stat().st_size if self._zip is None else member.file_size
        if size > MAX_BYTES:
            raise ValueError(f"has {size:,} bytes; at most {MAX_BYTES:,} are read")
        if self._zip is not None and not is_bounded(member):
            raise ValueError("is packed in another way than stored or deflated")
        return member.read_bytes() if self._zip is None else self._zip.read(member)


def resized(content: bytes, size: int, kind: str) -> bytes:
    """Return an image's file at size x size px, by PIL's bicubic, as the references make it.

    Args:
        kind: JPEG or PNG, with PIL's defaults.

    Raises:
        SampleError: it is not an image, or has too many pixels.
        Exception: whatever PIL raises for a damaged one.
    """
    with open_image(content) as image:
        made = image.resize((size, size), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    made.save(file, kind)
    return file.getvalue()


def write_images(folder: Path, table: DataFrame, pictures: Callable[[], Pictures], size: int, workers: int) -> str:
    """Write each row's image into the folder, those that are not there yet; return what there is, for people.

    Args:
        table: with image_id.
        pictures: opens COCO's own; called only if some are to be made.
        size: side in px.
        workers: threads.

    Raises:
        Refused: COCO's own are not all there.
        Failed: some are unreadable; the others are made.
        OSError: the folder cannot be written.
    """
    names = [image_name(number) for number in table["image_id"]]
    todo = _missing(folder, names)
    if todo:
        source = pictures()
        source.check(todo)

        def make(name: str) -> str | None:
            content, problem = _made(source, name, size, "JPEG")
            if content is not None:
                write_whole(folder / name, content)
            return problem

        with ThreadPoolExecutor(workers) as pool:
            made = tqdm(pool.map(make, todo), total=len(todo), unit=" images", desc="resize")
            problems = {name: problem for name, problem in zip(todo, made, strict=True) if problem}
        to_disk(folder)
        _check_all(problems, source.path.name, folder.parent)
    return f"{len(names):,} of {size} x {size} px in {folder}, {len(todo):,} of them made now"


def write_tars(folder: Path, table: DataFrame, pictures: Callable[[], Pictures], size: int, workers: int) -> str:
    """Write each row's image, caption and facts into tars of 1,000, as the reference of FLUX.1 does; see `write_images`.

    A sample's key is its image_id with twelve digits. Its JSON has id, caption, filename and timestep.
    """
    rows = list(table[["image_id", "caption", TIMESTEP]].itertuples(index=False, name=None))
    firsts = range(0, len(rows), SAMPLES_PER_TAR)
    shards = {f"shard_{n // SAMPLES_PER_TAR:05d}.tar": rows[n : n + SAMPLES_PER_TAR] for n in firsts}
    todo = _missing(folder, list(shards))
    if todo:
        source, problems = pictures(), {}
        source.check(image_name(row[0]) for name in todo for row in shards[name])
        for name in tqdm(todo, unit=" tars", desc="resize"):
            with (
                contextlib.suppress(_Incomplete),
                whole(folder / name) as temporary,
                tarfile.open(temporary, "w") as tar,
            ):
                problems |= (found := _fill(tar, shards[name], source, size, workers))
                if found:
                    raise _Incomplete
        to_disk(folder)
        _check_all(problems, source.path.name, folder.parent)
    return f"{len(rows):,} of {size} x {size} px in {len(shards):,} tars in {folder}, {len(todo):,} of them made now"


class _Incomplete(Exception):
    """A tar lacks samples, and is not kept."""


def _fill(tar: tarfile.TarFile, rows: Sequence[Any], source: Pictures, size: int, workers: int) -> dict[str, str]:
    """Write the samples of one tar, in order; return why images are unreadable, by name."""
    problems = {}
    with ThreadPoolExecutor(workers) as pool:
        made = pool.map(lambda row: _made(source, image_name(row[0]), size, "PNG"), rows)
        for (image_id, caption, timestep), (content, problem) in zip(rows, made, strict=True):
            if content is None:
                problems[image_name(image_id)] = problem or ""
                continue
            key, name = f"{image_id:012}", image_name(image_id, "png")
            facts = {"id": str(image_id), "caption": caption, "filename": name, TIMESTEP: timestep}
            files = {"png": content, "txt": caption.encode(), "json": json.dumps(facts, indent=2).encode()}
            for suffix, text in files.items():
                about = tarfile.TarInfo(f"{key}.{suffix}")
                about.size = len(text)
                tar.addfile(about, io.BytesIO(text))
    return problems


def _made(source: Pictures, name: str, size: int, kind: str) -> tuple[bytes | None, str | None]:
    """Return an image's file at its size, or what is wrong with it."""
    try:
        return resized(source.read(name), size, kind), None
    except Exception as error:  # decoders raise a dozen classes
        return None, f"{type(error).__name__}: {error}"


def _missing(folder: Path, names: Sequence[str]) -> list[str]:
    """Return the names that the folder lacks, in order; remove what a killed command has left half written."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".*.tmp"):
        left.unlink()
    there = {entry.name for entry in os.scandir(folder)}
    return [name for name in names if name not in there]


def _check_all(problems: dict[str, str], source: str, out: Path) -> None:
    """Raise Failed if images are unreadable: name -> why. All are in skipped.jsonl, some in the message."""
    ledger = Ledger(source)
    for name in sorted(problems):
        ledger.skip(name, problems[name])
    ledger.write(out / SKIPPED_FILE)
    if problems:
        named = _some([f"{name} ({problems[name]})" for name in sorted(problems)])
        text = f"images: {len(problems):,} cannot be read: {named}; reasons: {out / SKIPPED_FILE}"
        raise Failed(f"{text}. {FETCH}. {GO_ON}.")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED:,} more" if len(names) > NAMED else "")
