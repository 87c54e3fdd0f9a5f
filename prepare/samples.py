"""One sample of any source, and which of its parts are the image or the video, the captions and the key.

A sample's parts have names: of a tar or a folder of files the suffixes, of a table the columns. `json:caption` is the field
`caption` of the part `json`. Names that the user does not give are found where they are usual, see `USUAL_*`.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

from mds.images import IMAGE_SUFFIXES, SampleError, clean_caption

VIDEO_SUFFIXES = ("mp4", "webm", "mov", "mkv", "m4v")
FILES = ("image_path", "file_name", "filename", "filepath", "file", "path")
USUAL_OF = {
    "image": ("image", *IMAGE_SUFFIXES, "img", *FILES),
    "video": ("video", *VIDEO_SUFFIXES, "video_path", *FILES[1:]),
}
USUAL_CAPTIONS = ("txt", "caption", "captions", "text", "prompt", "top_caption")
USUAL_KEYS = ("key", "__key__", "id", "uid")
USUAL_JSON = ("json", "metadata")  # parts whose fields are looked through where no part is a caption
USUAL_URLS = ("url", "image_url")
FIELD_HINTS = {
    "image": "Give image=NAME; a CSV file has to begin with a line of names.",
    "video": "Give video=NAME; a CSV file has to begin with a line of names.",
    "caption": "Give caption=NAME, several with commas between, or json:FIELD.",
}
URL = ("http://", "https://")


class SourceError(ValueError):
    """A source itself is bad; the message is the reason, in a few words.

    lost: samples that the source says it has, and that were not read for it; 0 where it does not say.
    """

    def __init__(self, reason: str, lost: int = 0):
        super().__init__(reason)
        self.lost = lost


CONSTANT = "constant:"
"""Begins the name of a caption that is no part of the samples: the rest of the name is the caption of all."""


@dataclass(frozen=True)
class RequestedFields:
    """Names as the user gave them; None: to be found."""

    image: str | None = None
    """Or the video."""
    captions: tuple[str, ...] | None = None
    key: str | None = None


@dataclass(frozen=True)
class SampleFields:
    """Names of the parts that are read; the default is img2dataset's layout, where the key is the file's name."""

    image: str = "image"
    captions: tuple[str, ...] = ("txt",)
    key: str | None = None
    has_several_captions: bool = False
    """Whether a sample may have several captions; the dataset then has all of them in a column `captions`."""
    kind: Literal["image", "video"] = "image"

    def __str__(self) -> str:
        key = self.key or "the names and rows of files"
        return f"{self.kind} from {self.image}, caption from {', '.join(self.captions)}, key from {key}"

    @property
    def names(self) -> tuple[str, ...]:
        """Return all that is read for the dataset's own columns."""
        captions = [name for name in self.captions if not name.startswith(CONSTANT)]
        return (self.image, *captions, *([] if self.key is None else [self.key]))

    @property
    def facts(self) -> dict[str, Any]:
        """Return it for the plan; empty for img2dataset's layout, whose plan has never said it."""
        if self == SampleFields():
            return {}
        return {"taken": {self.kind: self.image, "captions": list(self.captions), "key": self.key}}


@dataclass
class Sample:
    """The files of one key, as bytes by name; see `column_of`.

    problem: why it cannot be used, whatever its files are.
    """

    key: str
    files: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None

    def has(self, name: str) -> bool:
        try:
            return self.part(name) is not None
        except SampleError:
            return False

    def part(self, name: str) -> Any:
        """Return a part, or the field of one; None: there is none. Raises SampleError: it is not JSON."""
        if name.startswith(CONSTANT):
            return name.removeprefix(CONSTANT)
        if name in self.files or ":" not in name:
            return self.files.get(name)
        outer, *fields = name.split(":")
        value = self.files.get(outer)
        if isinstance(value, bytes | str):
            value = parse_json(value, outer)
        for inner in fields:
            value = value.get(inner) if isinstance(value, dict) else None
        return value

    def image(self, fields: SampleFields) -> bytes:
        """Return the image file's bytes, or the video's. Raises SampleError."""
        return _as_bytes(self.part(fields.image), fields.kind)

    def metadata(self, fields: SampleFields) -> Any:
        """Return the image's metadata, as JSON values. Raises SampleError."""
        return parse_json(self.files.get("json", b"{}"), "metadata")


@dataclass
class TableRow(Sample):
    """A row of a table: its values by column.

    read_file: returns the bytes of the file at a path that a row names; raises SampleError.
    """

    read_file: Callable[[str], bytes] | None = None

    def image(self, fields: SampleFields) -> bytes:
        """Return the image's bytes: from the row, or from the file that it names. Raises SampleError."""
        image = self.part(fields.image)
        if isinstance(image, dict) and {"bytes", "path"} & image.keys():  # as Hugging Face stores images
            image = image.get("path") if image.get("bytes") is None else image["bytes"]
        if not isinstance(image, str):
            return _as_bytes(image, fields.kind)
        if not image.strip():
            raise SampleError(f"missing {fields.kind}")
        if image.startswith(URL):
            raise SampleError(f"{fields.kind} is a URL")
        assert self.read_file is not None
        try:
            return self.read_file(image)
        except SampleError as error:
            raise SampleError(str(error).replace("image", fields.kind)) from error

    def metadata(self, fields: SampleFields) -> dict[str, Any]:
        """Return the other columns, without bytes."""
        return {
            name: as_json(value)
            for name, value in self.files.items()
            if name not in fields.names and not has_bytes(value)
        }


def _as_bytes(image: Any, kind: str) -> bytes:
    if image is None:
        raise SampleError(f"missing {kind}")
    if not isinstance(image, bytes):
        raise SampleError(f"{kind} is neither a file's bytes nor a path")
    return image


def parse_json(text: bytes | str, what: str) -> Any:
    """Return a JSON text's value. Raises SampleError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SampleError(f"{what} is not JSON") from error


def has_bytes(value: Any) -> bool:
    """True for bytes and for what contains some: an image, say; JSON has none."""
    if isinstance(value, dict):
        return any(map(has_bytes, value.values()))
    return isinstance(value, bytes) or (isinstance(value, list) and bool(value) and has_bytes(value[0]))


def as_json(value: Any) -> Any:
    """Return a table's value as JSON has it: nan is null, a date or a decimal number is its text."""
    if isinstance(value, dict):
        return {str(name): as_json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    return str(value).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


# ---------------------------------------------------------------------------------------------------------------------
# Keys and captions
# ---------------------------------------------------------------------------------------------------------------------


def check_key(key: str) -> None:
    """Raise SampleError if the key cannot be stored, or is a path that leads out of its source."""
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise SampleError("key is not UTF-8") from error
    path = PurePosixPath(key)
    if path.is_absolute() or ".." in path.parts:
        raise SampleError("key leads out of its source")


def read_captions(sample: Sample, fields: SampleFields) -> list[str]:
    """Return the sample's captions, at least one; of several the missing and empty ones are left out.

    Raises:
        SampleError: there is none, or one is not UTF-8, not text or too long.
    """
    values: list[Any] = []
    for name in fields.captions:
        value = sample.part(name)
        values += value if isinstance(value, list | tuple) else [value]
    texts = [_as_text(value) for value in values if value is not None]
    if not texts:
        raise SampleError("missing caption")
    return [clean_caption(text) for text in texts if text.strip()] or [clean_caption(texts[0])]


def _as_text(value: Any) -> str:
    if not isinstance(value, bytes | str):
        raise SampleError("caption is not text")
    try:
        return value.decode() if isinstance(value, bytes) else value.encode().decode()
    except UnicodeError as error:
        raise SampleError("caption is not UTF-8") from error


# ---------------------------------------------------------------------------------------------------------------------
# Which parts are read
# ---------------------------------------------------------------------------------------------------------------------


def column_of(suffix: str) -> str:
    """Name a file's part: image of .jpg and .image.jpg, left of .left.png, video of .mp4, caption of .caption.txt."""
    head, _, last = suffix.lower().rpartition(".")
    if last in IMAGE_SUFFIXES:
        return head or "image"
    if last in VIDEO_SUFFIXES:
        return head or "video"
    return head if head and last == "txt" else suffix.lower()


def choose_fields(
    samples: Sequence[Sample], requested: RequestedFields, where: str, kind: Literal["image", "video"] = "image"
) -> SampleFields:
    """Return which parts are read, from the first samples of a source.

    Raises:
        ValueError: names that are asked for, or an image and captions, are not among them; a problem a line.
    """
    names = list(dict.fromkeys(name for sample in samples for name in sample.files))
    is_table = isinstance(samples[0], TableRow)
    is_classic = (
        not is_table and not (requested.image or requested.captions) and {*names} <= {kind, "txt", "json", "npy"}
    )
    has, problems = f"It has {', '.join(names[:20]) or 'nothing'}{', ...' if len(names) > 20 else ''}.", []

    def resolve_name(key: str, name: str) -> str:
        """Return a name that is asked for, as the samples have it."""
        if name.startswith(CONSTANT):
            return name
        for possible_name in (name, name if is_table else column_of(name)):
            if possible_name in names or any(sample.has(possible_name) for sample in samples):
                return possible_name
        problems.append(f"{key}: {where} has no {name}. {has}")
        return name

    image = resolve_name(kind, requested.image) if requested.image else usual_name(names, USUAL_OF[kind])
    urls = [sample.part(image) for sample in samples if sample.has(image)] if image else []
    if (urls and all(isinstance(value, str) and value.startswith(URL) for value in urls)) or (
        image is None and usual_name(names, USUAL_URLS)
    ):
        todo = "Download them by img2dataset, or video2dataset, and give its tars"
        problems.append(f"{kind}: {where} holds URLs, and nothing is downloaded here. {todo}.")
    elif image is None and not is_classic:
        problems.append(f"{kind}: {where} has none of {', '.join(USUAL_OF[kind])}. {has} {FIELD_HINTS[kind]}")
    if requested.captions:
        captions = tuple(resolve_name("caption", name) for name in requested.captions)
    else:
        first = usual_name(names, USUAL_CAPTIONS) or _usual_json_field(samples)
        if first is None and not is_classic:
            problems.append(f"caption: {where} has none of {', '.join(USUAL_CAPTIONS)}. {has} {FIELD_HINTS['caption']}")
        captions = (first or "txt",)
    key = resolve_name("key", requested.key) if requested.key else usual_name(names, USUAL_KEYS) if is_table else None
    if problems:
        raise ValueError("\n".join(problems))
    lists = (sample.part(captions[0]) for sample in samples if sample.has(captions[0]))
    is_several = len(captions) > 1 or any(isinstance(value, list) for value in lists)
    return SampleFields(image or kind, captions, key, is_several, kind)


def usual_name(names: Iterable[str], possible: Sequence[str]) -> str | None:
    """Return the first of the possible names that is there, in any case."""
    by_lower = {name.lower(): name for name in reversed(list(names))}
    return next((by_lower[name] for name in possible if name in by_lower), None)


def _usual_json_field(samples: Sequence[Sample]) -> str | None:
    """Return a field that is a caption by its name, as json:caption."""
    for sample in samples:
        for outer in (name for name in USUAL_JSON if sample.has(name)):
            with contextlib.suppress(SampleError):
                value = sample.part(outer)
                fields = parse_json(value, outer) if isinstance(value, bytes | str) else value
                filled_fields = [name for name in fields if fields[name]] if isinstance(fields, dict) else []
                field_name = usual_name(filled_fields, USUAL_CAPTIONS)
                if field_name:
                    return f"{outer}:{field_name}"
    return None


# --- which samples are left out of a dataset although they could be used ---
#
# Size and aspect are those of the image, and, where the metadata has them (`original_width`, `original_height`, as
# img2dataset writes them), those that it had before it was resized too. The similarity of image and caption stands in
# the metadata under the name that its set gave it; it is never computed here.

# Of LAION, of COYO, of DataComp.
USUAL_SIMILARITIES = ("similarity", "clip_similarity_vitl14", "clip_similarity_vitb32")
USUAL_SIMILARITIES += ("clip_l14_similarity_score", "clip_b32_similarity_score")


class LeftOut(SampleError):
    """A sample that could be used, and is not wanted."""


@dataclass(frozen=True)
class Filters:
    """The wanted samples; None: any."""

    min_side_px: int | None = None
    max_aspect: float | None = None
    min_similarity: float | None = None
    similarity: str | None = None
    """Field of the metadata; None: the first usual one."""

    @property
    def names(self) -> tuple[str, ...]:
        """Fields of the metadata that may have the similarity."""
        return (self.similarity,) if self.similarity else USUAL_SIMILARITIES

    @property
    def facts(self) -> dict[str, Any]:
        """Return it for the plan; empty where anything is wanted."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return {"filters": given} if given else {}

    def check(self, width: int, height: int, metadata: Any) -> None:
        """Raise LeftOut if an image of this size, px, and with this metadata is not wanted."""
        known = metadata if isinstance(metadata, Mapping) else {}
        before = [parse_number(known.get(name)) for name in ("original_width", "original_height")]
        sizes = [(width, height), *([tuple(before)] if all(side and side > 0 for side in before) else [])]
        if self.min_side_px is not None and min(map(min, sizes)) < self.min_side_px:
            raise LeftOut(f"side below {self.min_side_px} px")
        if self.max_aspect is not None and max(max(size) / min(size) for size in sizes) > self.max_aspect:
            raise LeftOut(f"aspect above {self.max_aspect:g}")
        if self.min_similarity is not None:
            numbers = [number for name in self.names if (number := parse_number(known.get(name))) is not None]
            if not numbers:
                raise LeftOut("no similarity in the metadata")
            if not numbers[0] >= self.min_similarity:
                raise LeftOut(f"similarity below {self.min_similarity:g}")

    def check_names(self, metadata: Sequence[Any], where: str) -> None:
        """Raise ValueError if a similarity is wanted, and none of the first samples' metadata has one."""
        known = {name for of_sample in metadata if isinstance(of_sample, Mapping) for name in of_sample}
        if self.min_similarity is not None and not known & {*self.names}:
            fields = f"The metadata of {where} has {', '.join(sorted(known)[:20]) or 'nothing'}"
            raise ValueError(
                f"min_similarity: no {' or '.join(self.names)}. {fields}. Give similarity=NAME, or leave min_similarity out."
            )


def parse_number(value: Any) -> float | None:
    """Return a number, also one in a text, as CSV files have them; None: it is none, or nan."""
    try:
        number = math.nan if isinstance(value, bool) or value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
