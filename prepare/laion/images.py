"""The stage `images`: the pictures of the filtered rows, in tars as img2dataset writes them, a row group in each.

    FOLDER/tars/plan.json        the rows and the settings; another command's are refused
    FOLDER/tars/00012.tar        KEY.jpg, KEY.txt, KEY.json of each row that arrived, in the order of the rows
    FOLDER/tars/00012.parquet    each row with its status and, where it did not arrive, why
    FOLDER/tars/00012.json       last: how many arrived, and why others did not

img2dataset's own class downloads a part. Its command is not used: it loses the shards that failed on a cluster without a
word, and writes a tar in the order in which hosts answer. Here a tar depends on what hosts send alone.
"""

from __future__ import annotations

import functools
import io
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import ExifTags, Image

from cli.errors import Failed, Refused
from prepare import tables
from prepare.laion import hosts
from prepare.laion.config import TARS, LaionConfig
from prepare.laion.filter import Run, filtered_parts, find_columns, needed, open_table
from prepare.parts import GO_ON, Plan, begin
from prepare.places import Folder
from prepare.sources import known_by
from stages.image_files import SampleError, conversion_of, open_image
from stages.images import decode_image

MADE_BY = "prepare.laion images"
RESERVED = ("key", "caption", "url", "width", "height", "original_width", "original_height", "status", "error_message")
RESERVED += ("exif", "md5", "sha256", "sha512")  # img2dataset's own columns
OPT_OUTS = ["noai", "noimageai", "noindex", "noimageindex", "none"]  # of X-Robots-Tag; `none`: noindex, nofollow
MAX_REASON = 60


@dataclass(frozen=True)
class Part:
    """A row group of a filtered file."""

    path: Path
    group: int
    num_rows: int


def find_parts(config: LaionConfig) -> tuple[list[Part], list[dict[str, Any]]]:
    """Return the row groups of all filtered files, and what identifies the files. Raises Refused: they are not there."""
    parts, inputs = [], []
    for path in filtered_parts(config):
        with _opened(path) as table:
            groups = [table.metadata.row_group(number).num_rows for number in range(table.metadata.num_row_groups)]
        parts += [Part(path, number, num_rows) for number, num_rows in enumerate(groups)]
        inputs.append({**known_by(path), "rows": groups})
    if not parts:
        raise Refused("filter: no row is left. Loosen its conditions.")
    return parts, inputs


def _opened(path: Path) -> Any:
    try:
        return open_table(path, "Remove its folder, and run: python -m prepare.laion filter")
    except ValueError as error:
        raise Failed(str(error)) from error


def name_of(number: int) -> str:
    """Return the name of a part, as img2dataset gives it to a shard."""
    return f"{number:05d}"


def bring_all(config: LaionConfig, run: Run) -> None:
    """Make the stage, or what is missing of it."""
    img2dataset("downloader")
    place, (parts, inputs) = Folder(str(config.inside(TARS))), find_parts(config)
    changes_nothing = ("threads", "min_success")  # of the bytes of a tar
    keys = {key: value for key, value in asdict(config.images).items() if key not in changes_nothing}
    with place.only_writer():
        begin(place, Plan(MADE_BY, "tars", {}, 0, {"images": keys}, inputs))
        there = place.names()
        todo = [number for number in range(len(parts)) if f"{name_of(number)}.json" not in there]
        run(functools.partial(bring_part, place, parts, config), todo, [part.num_rows for part in parts], "images")
        place.clear_scratch()


def bring_part(place: Folder, parts: Sequence[Part], config: LaionConfig, number: int) -> int:
    """Download the pictures of one part; return how many rows it has.

    Raises:
        Failed: too few arrived for it to be the hosts' fault.
    """
    part, name = parts[number], name_of(number)
    with place.scratch_folder() as folder:
        rows = folder / "rows.feather"
        downloader = downloader_for(config, folder, write_rows(part, config, rows))
        most_bytes, most_sec = config.images.most_mib * 2**20, float(config.images.most_sec)
        hosts.install(most_bytes, most_sec, allow_private=config.images.allow_private)
        downloader.download_shard((number, str(rows)))
        statuses = needed("pyarrow.parquet").read_table(folder / f"{name}.parquet").sort_by("key")
        if len(statuses) < part.num_rows:  # img2dataset prints an error of its writer, and goes on
            text = f"images: {part.num_rows - len(statuses):,} rows of {name}.tar could not be written"
            raise Failed(f"{text}. Look for room at {place.address}. {GO_ON}.")
        kept, left_out = counts_of(statuses)
        if kept < int(config.images.min_success * part.num_rows):  # a few rows may well be all of dead hosts
            why = ", ".join(f"{text}: {num:,}" for text, num in left_out.most_common(3))
            text = f"images: of {part.num_rows:,} rows of {part.path.name} {kept:,} arrived ({why})"
            raise Failed(f"{text}. Look at the network; images.min_success=0 takes it as it is. {GO_ON}.")
        sort_tar(folder / f"{name}.tar", folder / "sorted" / f"{name}.tar")
        table = folder / "sorted" / f"{name}.parquet"
        needed("pyarrow.parquet").write_table(statuses, table, compression="zstd")
        account = {"rows": part.num_rows, "kept": kept, "left_out": dict(left_out.most_common())}
        place.put(f"{name}.tar", folder / "sorted" / f"{name}.tar")
        place.put(f"{name}.parquet", table)
    place.put_bytes(f"{name}.json", (json.dumps(account, indent=1) + "\n").encode())
    return part.num_rows


def write_rows(part: Part, config: LaionConfig, path: Path) -> list[str]:
    """Write a part's rows as img2dataset reads them, `url` and `caption` last; return its columns."""
    arrow = needed("pyarrow")
    with _opened(part.path) as table:
        found = find_columns(table.schema_arrow, config.filter, str(part.path))
        rows = table.read_row_group(part.group)
    own = {found["url"]: "url", found["caption"]: "caption"}
    names: list[str] = []
    for name in rows.column_names:
        names.append(own.get(name) or (f"{name}_of_table" if name in RESERVED else name))
        while names.count(names[-1]) > 1:
            names[-1] += "_"
    columns = {name: _as_plain(column, name) for name, column in zip(names, rows.columns, strict=True)}
    ordered = [*(name for name in names if name not in ("url", "caption")), "caption", "url"]
    rows = arrow.table({name: columns[name] for name in ordered})
    with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_file(file, rows.schema) as writer:
        writer.write_table(rows)
    return ordered


def _as_plain(column: Any, name: str) -> Any:
    """Return a column as JSON has it: numbers and truth values as they are, all else as texts."""
    arrow, kind = needed("pyarrow"), column.type
    if arrow.types.is_integer(kind) or arrow.types.is_floating(kind) or arrow.types.is_boolean(kind):
        return column
    lost = Counter[str]()
    values = [None if value is None else str(value) for value in tables.values_of(column, name, lost)]
    tables.log_lost(lost, "metadata")
    plain = (
        None if text is None else text.encode(errors="surrogateescape").decode(errors="replace") for text in values
    )
    return arrow.array(list(plain), arrow.string())


def img2dataset(name: str) -> Any:
    """Return a module of it. Raises Refused: it is not installed."""
    os.environ.setdefault(
        "NO_ALBUMENTATIONS_UPDATE", "1"
    )  # which it imports, and which asks PyPI for its newest version
    return needed(f"img2dataset.{name}")


def downloader_for(way: LaionConfig, folder: Path, columns: Sequence[str]) -> Any:
    """Return img2dataset's Downloader, which writes one tar into a folder."""
    config = way.images
    downloader, resizer, writer = map(img2dataset, ("downloader", "resizer", "writer"))
    return downloader.Downloader(
        sample_writer_class=writer.WebDatasetSampleWriter,
        resizer=bounded(resizer.Resizer)(
            image_size=config.image_size,
            resize_mode=config.resize_mode,
            resize_only_if_bigger=True,
            encode_quality=config.encode_quality,
            skip_reencode=config.skip_reencode,
        ),
        thread_count=min(config.threads, way.filter.rows_per_tar),
        save_caption=True,
        extract_exif=config.exif,
        output_folder=str(folder),
        column_list=list(columns),
        timeout=config.timeout_sec,
        number_sample_per_shard=way.filter.rows_per_tar,  # how many digits of a key are the row's
        oom_shard_count=5,
        compute_hash="sha256",
        verify_hash_type=None,
        encode_format="jpg",
        retries=config.retries,
        user_agent_token="img2dataset",
        disallowed_header_directives=OPT_OUTS,
    )


def counts_of(statuses: Any) -> tuple[int, Counter[str]]:
    """Return how many rows arrived, and how many others there are of each reason."""
    pairs = zip(statuses.column("status").to_pylist(), statuses.column("error_message").to_pylist(), strict=True)
    reasons = Counter("success" if status == "success" else reason_of(message) for status, message in pairs)
    return reasons.pop("success", 0), reasons


def reason_of(message: str | None) -> str:
    """Return why a row did not arrive, without what is of this row alone, or what a host likes to say."""
    text = re.sub(r"^<urlopen error (.*)>$", r"\1", " ".join((message or "no reason").split()))
    text = re.sub(r"(HTTP Error \d{3}|OpenCV).*", r"\1", text)
    text = re.sub(r"https?://\S+|\[[^]]*\] ?|\([^)]*\)|'[^']*'|\"[^\"]*\"|position \d+(-\d+)?", "", text)
    return "".join(letter for letter in text if letter.isprintable()).strip()[:MAX_REASON]


def sort_tar(path: Path, to: Path) -> None:
    """Write a tar's members by their names, each of the same owner and time: hosts answer in another order each time."""
    to.parent.mkdir()
    with tarfile.open(path) as source, tarfile.open(to, "w", format=tarfile.USTAR_FORMAT) as target:
        for member in sorted(source.getmembers(), key=lambda member: member.name):
            content = source.extractfile(member)
            assert content is not None
            plain = tarfile.TarInfo(member.name)
            plain.size = member.size
            target.addfile(plain, content)
    path.unlink()


# --- what OpenCV gets ---

# img2dataset decodes by OpenCV whatever a host sends, and asks for the size of no header: a PNG of 1.5 MB can claim 14,000 x
# 14,000 px of RGBA in 16 bits, of which OpenCV and the mixing with white make 12 GB. So the header of each file is read
# first, by the one rule of all our readers. What OpenCV decodes in another way than our readers (other kinds of files,
# embedded profiles, EXIF rotation) it gets as pixels.


def bounded(resizer: Any) -> Any:
    """Return a subclass of img2dataset's Resizer. Its objects take an open file; they return a JPEG, or why there is none."""

    class BoundedResizer(resizer):
        def __call__(self, img_stream: io.BytesIO, blurring_bbox_list: Any = None) -> tuple[Any, ...]:
            keeps_bytes = self.skip_reencode and self.resize_mode.name == "no"
            try:
                content = readable_by_opencv(img_stream.getvalue(), keeps_bytes)
            except SampleError as error:
                return None, None, None, None, None, str(error)
            return super().__call__(io.BytesIO(content), blurring_bbox_list)

    return BoundedResizer


def readable_by_opencv(content: bytes, keeps_bytes: bool) -> bytes:
    """Return a JPEG itself where OpenCV decodes it as our readers do, else a BMP of what they see.

    Args:
        keeps_bytes: a JPEG is stored as it is, with its profile and its rotation.

    Raises:
        SampleError: it cannot be used.
    """
    try:
        with open_image(content) as image:
            is_jpeg = image.format in ("JPEG", "MPO")
            is_upright = keeps_bytes or image.getexif().get(ExifTags.Base.Orientation, 1) == 1
            is_kept = is_jpeg and is_upright and (keeps_bytes or conversion_of(image) is None)
    except SampleError:
        raise
    except Exception as error:  # the decoders raise OSError, SyntaxError, ValueError, struct.error and more
        raise SampleError("truncated or damaged image") from error
    if is_kept:
        return content
    file = io.BytesIO()
    Image.fromarray(decode_image(content).permute(1, 2, 0).numpy()).save(file, "BMP")
    return file.getvalue()
