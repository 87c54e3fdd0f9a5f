"""The keys of prepare.laion: one YAML for all of its stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from common.command_line import Problem
from common.value_types import limited, prose
from prepare.engines import EngineKeys, check_engine_keys

METADATA, FILTERED, TARS = "metadata", "filtered", "tars"


@dataclass(frozen=True)
class MetadataConfig:
    """Where the tables of URLs come from."""

    urls: str | None = prose(None, "an address with {part}, such as https://host/part-{part:05d}.parquet")
    """Address of each part, with {part} for its number. null: the parts lie in FOLDER/metadata already."""
    num_parts: int = limited(32, 1, 100_000)
    """Number of parts."""
    at_once: int = limited(4, 1, 64)
    """Downloads at once."""


@dataclass(frozen=True)
class FilterConfig:
    """Which rows are wanted. A column that is not named is found by its usual names."""

    url: str | None = None
    """Column with the URL. null: URL, url, image_url."""
    caption: str | None = None
    """Column with the caption. null: TEXT, caption, text, TOP_CAPTION."""
    licenses: str | None = prose(None, "names with commas, or all but some: not ?")
    """Licenses that are wanted, with commas; `not` before them: all but these. `not ?` is the reference's. null: any."""
    nsfw: str | None = prose(None, "names with commas, or all but some: not NSFW")
    """Values of NSFW that are wanted, in the same form. null: any."""
    languages: str | None = prose(None, "names with commas, or all but some: not nolang")
    """Values of LANGUAGE that are wanted, in the same form. null: any."""
    min_side_px: int | None = limited(None, 1, 16384)
    """Least shorter side, as the table has it."""
    max_aspect: float | None = limited(None, 1, 1000)
    """Most that the longer side is of the shorter one."""
    min_similarity: float | None = limited(None, -1, 100)
    """Least similarity of image and caption."""
    max_unsafe: float | None = limited(None, 0, 1)
    """Most of `punsafe`, the probability that an image is unsafe."""
    max_watermark: float | None = limited(None, 0, 1)
    """Most of `pwatermark`, the probability that an image has a watermark."""
    unique: str | None = None
    """Of rows with the same value in this column the first alone is wanted; url: that of the URLs. null: all."""
    rows_per_tar: int = limited(10_000, 1, 10**6)
    """Rows of a part of `images`, which becomes one tar."""


@dataclass(frozen=True)
class ImagesConfig:
    """How images are downloaded: img2dataset's own names, where it has them."""

    threads: int = limited(64, 1, 1024)
    """Downloads at once, of each process."""
    timeout_sec: int = limited(10, 1, 600)
    """Longest silence of a host."""
    most_sec: int = limited(60, 1, 3600)
    """Longest time for one image."""
    most_mib: int = limited(64, 1, 255)
    """Largest file; a longer one is left before its end."""
    retries: int = limited(0, 0, 20)
    """Further tries for each image."""
    allow_private: bool = False
    """Ask hosts at private, loopback, link-local and other addresses that are not public too."""
    resize_mode: Literal["no", "keep_ratio", "center_crop", "border", "keep_ratio_largest"] = "no"
    """How img2dataset resizes, to image_size."""
    image_size: int = limited(512, 1, 16384)
    """Pixels, where resize_mode is not `no`. Smaller images are not enlarged."""
    skip_reencode: bool = True
    """Keep a JPEG's own bytes if it is not resized. false: as the reference, write each again."""
    encode_quality: int = limited(95, 1, 100)
    """Quality of the JPEGs that are written."""
    exif: bool = False
    """Keep what the camera wrote in the metadata."""
    min_success: float = limited(0.05, 0, 1)
    """Least fraction of a part's rows, rounded down, that has to arrive. Below it the network is at fault, and the part is
    not kept."""


@dataclass(frozen=True)
class LaionConfig(EngineKeys):
    """All stages, in their order. `engine` and `ray` are those of images."""

    folder: str | None = None
    """Folder of the metadata, the filtered rows and the tars. With engine=ray all nodes have to see it."""
    workers: int | None = limited(None, 1, 100_000)
    """Processes of filter and images. null: one for each core that is there."""
    metadata: MetadataConfig = field(default_factory=MetadataConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)
    images: ImagesConfig = field(default_factory=ImagesConfig)

    def subfolder(self, name: str) -> Path:
        """Return a subfolder of `folder`."""
        assert self.folder is not None
        return Path(self.folder, name)


def check(config: LaionConfig) -> list[Problem]:
    """Return every problem that can be found before anything is read."""
    problems = check_engine_keys(config)
    if config.folder is None:
        problems.append(Problem("folder: not given. Give the folder of the metadata, rows and tars.", ("folder",)))
    try:
        is_numbered = (urls := config.metadata.urls) is None or urls.format(part=0) != urls.format(part=1)
    except (ValueError, LookupError, AttributeError, TypeError):
        is_numbered = False
    if not is_numbered:
        text = f"metadata.urls: {config.metadata.urls} is no address of parts. Write {{part}} or {{part:05d}} in it."
        problems.append(Problem(text, ("metadata.urls",)))
    return problems
