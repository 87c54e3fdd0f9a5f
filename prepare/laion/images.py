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
import http.client
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cli.errors import Failed, Refused
from prepare.laion import bounded
from prepare.laion.config import TARS, ImagesConfig, LaionConfig
from prepare.laion.filter import Run, filtered_parts, open_table, values_of
from prepare.laion.resizer import bounded as bounded_resizer
from prepare.laion.rows import find_columns, has_texts, needed
from prepare.parts import GO_ON, Plan, begin
from prepare.places import Folder
from prepare.sources import known_by

MADE_BY = "prepare.laion images"
RESERVED = ("key", "caption", "url", "width", "height", "original_width", "original_height", "status", "error_message")
RESERVED += ("exif", "md5", "sha256", "sha512")  # img2dataset's own columns
MAX_REASONS, MAX_REASON = 30, 80
OTHERS = "another reason"


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


def settings_of(config: ImagesConfig) -> dict[str, Any]:
    """Return what the bytes of a tar depend on."""
    left_out = ("threads", "min_success")
    return {key: value for key, value in asdict(config).items() if key not in left_out}


def bring_all(config: LaionConfig, run: Run) -> dict[str, Any]:
    """Make the stage, or what is missing of it; return its account."""
    needed("pyarrow")
    img2dataset("downloader")
    place, (parts, inputs) = Folder(str(config.inside(TARS))), find_parts(config)
    names = [name_of(number) for number in range(len(parts))]
    with place.only_writer():
        begin(place, Plan(MADE_BY, "tars", {}, 0, {"images": settings_of(config.images)}, inputs))
        there = place.names()
        todo = [number for number, name in enumerate(names) if f"{name}.json" not in there]
        run(functools.partial(bring_part, place, parts, config), todo, [part.num_rows for part in parts], "images")
        account = account_of(place, names)
        place.clear_scratch()
    return account


def account_of(place: Folder, names: Sequence[str]) -> dict[str, Any]:
    """Return rows, pictures that arrived, and why others did not, of all parts."""
    left_out: Counter[str] = Counter()
    rows = kept = num_bytes = 0
    for name in names:
        of_part = json.loads(place.read(f"{name}.json"))
        rows, kept, num_bytes = rows + of_part["rows"], kept + of_part["kept"], num_bytes + of_part["bytes"]
        left_out.update(of_part["left_out"])
    return {"rows": rows, "kept": kept, "bytes": num_bytes, "left_out": dict(common(left_out).most_common())}


def bring_part(place: Folder, parts: Sequence[Part], config: LaionConfig, number: int) -> int:
    """Download the pictures of one part; return how many rows it has.

    Raises:
        Failed: too few arrived for it to be the hosts' fault.
    """
    part, name = parts[number], name_of(number)
    with place.scratch_folder() as folder:
        rows, columns = folder / "rows.feather", write_rows(part, config, folder / "rows.feather")
        downloader = downloader_for(config, folder, columns)
        most_bytes, most_sec = config.images.most_mib * 2**20, float(config.images.most_sec)
        bounded.install(most_bytes, most_sec, allow_private=config.images.allow_private)
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
        account = {"rows": part.num_rows, "kept": kept, "bytes": (folder / "sorted" / f"{name}.tar").stat().st_size}
        place.put(f"{name}.tar", folder / "sorted" / f"{name}.tar")
        place.put(f"{name}.parquet", table)
    content = {**account, "left_out": dict(left_out.most_common())}
    place.put_bytes(f"{name}.json", (json.dumps(content, indent=1) + "\n").encode())
    return part.num_rows


def write_rows(part: Part, config: LaionConfig, path: Path) -> list[str]:
    """Write a part's rows as img2dataset reads them, `url` and `caption` last; return its columns."""
    arrow = needed("pyarrow")
    with _opened(part.path) as table:
        columns = find_columns(table.schema_arrow, config.filter, str(part.path))
        rows = table.read_row_group(part.group)
    given = {columns.url: "url", columns.caption: "caption"}
    names: list[str] = []
    for name in rows.column_names:
        own = given.get(name) or (f"{name}_of_table" if name in RESERVED else name)
        while own in names:
            own += "_"
        names.append(own)
    rows = rows.rename_columns(names)
    ordered = [name for name in names if name not in ("url", "caption")]
    ordered += ["caption"] * (columns.caption is not None) + ["url"]
    rows = rows.select(ordered)
    for number, field in enumerate(rows.schema):  # JSON has no times and no bytes
        if not _is_plain(rows.column(number)):
            rows = rows.set_column(number, field.name, _as_texts(rows.column(number), field.name))
    with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_file(file, rows.schema) as writer:
        writer.write_table(rows)
    return ordered


def _is_plain(column: Any) -> bool:
    arrow, kind = needed("pyarrow"), column.type
    types = arrow.types
    if types.is_string(kind):
        try:
            column.validate(full=True)
        except arrow.ArrowInvalid:  # bytes that are no UTF-8
            return False
        return True
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def _as_texts(column: Any, name: str) -> Any:
    is_text = has_texts(column.type)
    values = (
        None if value is None else value.decode(errors="replace") if is_text else str(value)
        for value in values_of(column, name)
    )
    return needed("pyarrow").array(list(values), needed("pyarrow").string())


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
        resizer=bounded_resizer(resizer.Resizer)(
            image_size=config.image_size,
            resize_mode=config.resize_mode,
            resize_only_if_bigger=True,
            encode_quality=config.encode_quality,
            skip_reencode=config.skip_reencode,
        ),
        thread_count=min(config.threads, way.filter.rows_per_tar),
        save_caption="caption" in columns,
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
        user_agent_token=None,
        disallowed_header_directives=None,  # prepare/laion/hosts.py reads them
    )


def counts_of(statuses: Any) -> tuple[int, Counter[str]]:
    """Return how many rows arrived, and how many others there are of each reason."""
    kept, left_out = 0, Counter[str]()
    pairs = zip(statuses.column("status").to_pylist(), statuses.column("error_message").to_pylist(), strict=True)
    for status, message in pairs:
        if status == "success":
            kept += 1
        else:
            left_out[reason_of(message)] += 1
    return kept, common(left_out)


def common(left_out: Counter[str]) -> Counter[str]:
    """Return the reasons that are most common, and a last one for all others."""
    others = left_out.pop(OTHERS, 0)
    found = Counter(dict(left_out.most_common(MAX_REASONS)))
    others += left_out.total() - found.total()
    return found + Counter({OTHERS: others})


def reason_of(message: str | None) -> str:
    """Return why a row did not arrive, without what is of this row alone: numbers of bytes, addresses, places in code."""
    text = re.sub(r"^<urlopen error (.*)>$", r"\1", " ".join((message or "no reason").split()))
    if match := re.match(r"HTTP Error (\d{3}):", text):
        return _reason_of_status(int(match[1]), text)
    if text.startswith("OpenCV("):
        return "Image decoding error"
    text = re.sub(r"\[Errno -?\d+\] |\[SSL: \w+\] | \(_ssl\.c:\d+\)|\(\d+ bytes read.*\)", "", text)
    text = re.sub(r"https?://\S+|(?<!\w)'[^']*'|\"[^\"]*\"", "...", text)  # but not the one of `can't`
    text = re.sub(r"position \d+(-\d+)?", "position ...", text)
    return "".join(letter for letter in text if letter.isprintable())[:MAX_REASON]


def _reason_of_status(code: int, text: str) -> str:
    """Return it with the usual words: a host sends what it likes."""
    if 300 <= code < 400:
        return "redirected without an end" if "infinite loop" in text else "redirected to no web address"
    return f"HTTP Error {code}: {http.client.responses.get(code, 'unknown')}"


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
