"""The stage `images`: the images of the filtered rows, in tars as img2dataset writes them, a row group in each.

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
import io
import ipaddress
import json
import os
import re
import socket
import tarfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from PIL import ExifTags, Image

from common.errors import Failed, Refused
from common.private_api import require_private_api
from mds.images import SampleError, color_conversion, decode_image, open_image
from prepare import tables
from prepare.addresses import Folder
from prepare.arguments import RESUME_HINT
from prepare.laion.config import TARS, LaionConfig
from prepare.laion.filter import RunOnEngine, filtered_parts, find_columns, import_optional, open_table
from prepare.parts import Plan, begin_dataset
from prepare.sources import identify_file

MADE_BY = "prepare.laion images"
RESERVED = ("key", "caption", "url", "width", "height", "original_width", "original_height", "status", "error_message")
RESERVED += ("exif", "md5", "sha256", "sha512")  # img2dataset's own columns
OPT_OUTS = ["noai", "noimageai", "noindex", "noimageindex", "none"]  # of X-Robots-Tag; `none`: noindex, nofollow
MAX_REASON = 60


@dataclass(frozen=True)
class RowGroup:
    """A row group of a filtered file."""

    path: Path
    group: int
    num_rows: int


def find_row_groups(config: LaionConfig) -> tuple[list[RowGroup], list[dict[str, Any]]]:
    """Return the row groups of all filtered files, and what identifies the files. Raises Refused: they are not there."""
    parts, inputs = [], []
    for path in filtered_parts(config):
        with _open_table(path) as table:
            groups = [table.metadata.row_group(number).num_rows for number in range(table.metadata.num_row_groups)]
        parts += [RowGroup(path, number, num_rows) for number, num_rows in enumerate(groups)]
        inputs.append({**identify_file(path), "rows": groups})
    if not parts:
        raise Refused("filter: no row is left. Loosen its conditions.")
    return parts, inputs


def _open_table(path: Path) -> Any:
    try:
        return open_table(path, "Remove its folder, and run: python -m prepare.laion filter")
    except ValueError as error:
        raise Failed(str(error)) from error


def tar_stem(number: int) -> str:
    """Return the name of a part, as img2dataset gives it to a shard."""
    return f"{number:05d}"


def download_all(config: LaionConfig, run: RunOnEngine) -> None:
    """Make the dataset, or what is missing of it."""
    import_img2dataset("downloader")
    address, (parts, inputs) = Folder(str(config.subfolder(TARS))), find_row_groups(config)
    changes_nothing = ("threads", "min_success")  # of the bytes of a tar
    keys = {key: value for key, value in asdict(config.images).items() if key not in changes_nothing}
    with address.lock_for_writing():
        begin_dataset(address, Plan(MADE_BY, "tars", {}, 0, {"images": keys}, inputs))
        existing_files = address.list_files()
        todo = [number for number in range(len(parts)) if f"{tar_stem(number)}.json" not in existing_files]
        run(functools.partial(download_part, address, parts, config), todo, [part.num_rows for part in parts], "images")
        address.clear_scratch()


def download_part(address: Folder, parts: Sequence[RowGroup], config: LaionConfig, number: int) -> int:
    """Download the images of one part; return how many rows it has.

    Raises:
        Failed: too few arrived for it to be the hosts' fault.
    """
    part, name = parts[number], tar_stem(number)
    with address.scratch_folder() as folder:
        rows = folder / "rows.feather"
        downloader = build_downloader(config, folder, write_rows(part, config, rows))
        most_bytes, most_sec = config.images.most_mib * 2**20, float(config.images.most_sec)
        install_bounded_opener(most_bytes, most_sec, allow_private=config.images.allow_private)
        downloader.download_shard((number, str(rows)))
        statuses = import_optional("pyarrow.parquet").read_table(folder / f"{name}.parquet").sort_by("key")
        if len(statuses) < part.num_rows:  # img2dataset prints an error of its writer, and continues
            text = f"images: {part.num_rows - len(statuses):,} rows of {name}.tar could not be written"
            raise Failed(f"{text}. Look for room at {address.location}. {RESUME_HINT}.")
        num_arrived, left_out = count_statuses(statuses)
        if num_arrived < int(config.images.min_success * part.num_rows):  # a few rows may well be all of dead hosts
            why = ", ".join(f"{text}: {num:,}" for text, num in left_out.most_common(3))
            text = f"images: of {part.num_rows:,} rows of {part.path.name} {num_arrived:,} arrived ({why})"
            raise Failed(f"{text}. Look at the network; images.min_success=0 takes it as it is. {RESUME_HINT}.")
        sort_tar(folder / f"{name}.tar", folder / "sorted" / f"{name}.tar")
        table = folder / "sorted" / f"{name}.parquet"
        import_optional("pyarrow.parquet").write_table(statuses, table, compression="zstd")
        account = {"rows": part.num_rows, "kept": num_arrived, "left_out": dict(left_out.most_common())}
        address.put(f"{name}.tar", folder / "sorted" / f"{name}.tar")
        address.put(f"{name}.parquet", table)
    address.put_bytes(f"{name}.json", (json.dumps(account, indent=1) + "\n").encode())
    return part.num_rows


def write_rows(part: RowGroup, config: LaionConfig, path: Path) -> list[str]:
    """Write a part's rows as img2dataset reads them, `url` and `caption` last; return its columns."""
    arrow = import_optional("pyarrow")
    with _open_table(part.path) as table:
        columns_by_role = find_columns(table.schema_arrow, config.filter, str(part.path))
        rows = table.read_row_group(part.group)
    new_names = {columns_by_role["url"]: "url", columns_by_role["caption"]: "caption"}
    names: list[str] = []
    for name in rows.column_names:
        names.append(new_names.get(name) or (f"{name}_of_table" if name in RESERVED else name))
        while names.count(names[-1]) > 1:
            names[-1] += "_"
    columns = {name: _to_plain_column(column, name) for name, column in zip(names, rows.columns, strict=True)}
    ordered = [*(name for name in names if name not in ("url", "caption")), "caption", "url"]
    rows = arrow.table({name: columns[name] for name in ordered})
    with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_file(file, rows.schema) as writer:
        writer.write_table(rows)
    return ordered


def _to_plain_column(column: Any, name: str) -> Any:
    """Return a column as JSON has it: numbers and truth values as they are, all else as texts."""
    arrow, kind = import_optional("pyarrow"), column.type
    if arrow.types.is_integer(kind) or arrow.types.is_floating(kind) or arrow.types.is_boolean(kind):
        return column
    lost = Counter[str]()
    values = [None if value is None else str(value) for value in tables.values_of(column, name, lost)]
    tables.log_lost(lost, "metadata")
    plain = (
        None if text is None else text.encode(errors="surrogateescape").decode(errors="replace") for text in values
    )
    return arrow.array(list(plain), arrow.string())


def import_img2dataset(name: str) -> Any:
    """Return a module of it. Raises Refused: it is not installed."""
    os.environ.setdefault(
        "NO_ALBUMENTATIONS_UPDATE", "1"
    )  # which it imports, and which asks PyPI for its newest version
    return import_optional(f"img2dataset.{name}")


def build_downloader(config: LaionConfig, folder: Path, columns: Sequence[str]) -> Any:
    """Return img2dataset's Downloader, which writes one tar into a folder."""
    images = config.images
    downloader, resizer, writer = map(import_img2dataset, ("downloader", "resizer", "writer"))
    return downloader.Downloader(
        sample_writer_class=writer.WebDatasetSampleWriter,
        resizer=bound_resizer(resizer.Resizer)(
            image_size=images.image_size,
            resize_mode=images.resize_mode,
            resize_only_if_bigger=True,
            encode_quality=images.encode_quality,
            skip_reencode=images.skip_reencode,
        ),
        thread_count=min(images.threads, config.filter.rows_per_tar),
        save_caption=True,
        extract_exif=images.exif,
        output_folder=str(folder),
        column_list=list(columns),
        timeout=images.timeout_sec,
        number_sample_per_shard=config.filter.rows_per_tar,  # how many digits of a key are the row's
        oom_shard_count=5,
        compute_hash="sha256",
        verify_hash_type=None,
        encode_format="jpg",
        retries=images.retries,
        user_agent_token="img2dataset",
        disallowed_header_directives=OPT_OUTS,
    )


def count_statuses(statuses: Any) -> tuple[int, Counter[str]]:
    """Return how many rows arrived, and how many others there are of each reason."""
    pairs = zip(statuses.column("status").to_pylist(), statuses.column("error_message").to_pylist(), strict=True)
    reasons = Counter("success" if status == "success" else normalize_reason(message) for status, message in pairs)
    return reasons.pop("success", 0), reasons


def normalize_reason(message: str | None) -> str:
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


def bound_resizer(resizer: Any) -> Any:
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
            is_readable = is_jpeg and is_upright and (keeps_bytes or color_conversion(image) is None)
    except SampleError:
        raise
    except Exception as error:  # the decoders raise OSError, SyntaxError, ValueError, struct.error and more
        raise SampleError("truncated or damaged image") from error
    if is_readable:
        return content
    file = io.BytesIO()
    Image.fromarray(decode_image(content).permute(1, 2, 0).numpy()).save(file, "BMP")
    return file.getvalue()


# --- which hosts are asked for an image ---
#
# A table of URLs is anybody's: it may name a router, a machine of this network or a cloud's metadata service, also by a
# redirect, by a name that resolves to it, or as `http://2130706433/`. So each address is checked just before a socket
# connects.
#
# `install()` gives urllib, with which img2dataset downloads, an opener that knows http and https alone, asks public
# hosts alone, and leaves an answer that is longer than `most_bytes` or takes longer than `most_sec`.

NOT_PUBLIC = "not a public address"
PROTOCOLS = ipaddress.IPv4Network("192.0.0.0/24")  # RFC 6890; older Pythons know parts of it
UNICAST = ipaddress.IPv6Network("2000::/3")  # all that IANA gives out: iana.org/assignments/ipv6-address-space
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address

WHY = "a host's address is checked where a socket connects to it"
require_private_api(http.client.HTTPConnection, "_create_connection", why=WHY)


def is_public(address: str) -> bool:
    """True for an address of the public internet; one of IPv6 that stands for one of IPv4 counts as that one."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv4Address):
        return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip in PROTOCOLS)
    inner = ipaddress.IPv4Address(int(ip) % 2**32) if ip in NAT64 else ip.ipv4_mapped or ip.sixtofour
    return is_public(str(inner)) if inner else ip in UNICAST and ip.is_global


def public_addresses(host: str, port: int | None) -> list[str]:
    """Return the public addresses of a host. Raises OSError: it has none, or is not known."""
    resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    public = [str(address) for address in dict.fromkeys(entry[4][0] for entry in resolved) if is_public(str(address))]
    if not public:
        raise OSError(NOT_PUBLIC)
    return public


def connect_to_public(host_and_port: tuple[str, int], *options: Any) -> socket.socket:
    """Connect as socket.create_connection does, but to public addresses alone. Raises OSError."""
    *earlier, last = public_addresses(*host_and_port)
    for address in earlier:
        try:
            return socket.create_connection((address, host_and_port[1]), *options)
        except OSError:
            continue
    return socket.create_connection((last, host_and_port[1]), *options)


def check_for_proxy(host: str) -> None:
    """Raise OSError if a host that a proxy would be asked for is not public. Names that it alone can resolve pass."""
    try:
        public_addresses(host, None)
    except socket.gaierror:
        return


class BoundedStream(io.RawIOBase):
    """A host's answer, up to a number of bytes and a time, headers and chunk lengths included."""

    def __init__(self, raw: Any, most_bytes: int, most_sec: float):
        self._raw, self._left, self._most_bytes = raw, most_bytes, most_bytes
        self._until, self._most_sec = time.monotonic() + most_sec, most_sec

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read what has arrived. Raises OSError: it was too much, or took too long."""
        if time.monotonic() > self._until:
            raise TimeoutError(f"took more than {self._most_sec:g} s")
        num = self._raw.readinto(buffer)
        self._left -= num or 0
        if self._left < 0:
            raise OSError(f"more than {self._most_bytes / 2**20:g} MiB")
        return num

    def close(self) -> None:
        self._raw.close()
        super().close()


class BoundedResponse(http.client.HTTPResponse):
    """An answer with an end."""

    most_bytes, most_sec = 2**26, 60.0

    def __init__(self, *arguments: Any, **more: Any):
        super().__init__(*arguments, **more)
        self.fp = io.BufferedReader(BoundedStream(self.fp.detach(), self.most_bytes, self.most_sec))


def install_bounded_opener(most_bytes: int, most_sec: float, *, allow_private: bool = False) -> None:
    """Make it urllib's opener in this process.

    Args:
        most_bytes, most_sec: of one answer.
        allow_private: asks hosts whose addresses are not public too.
    """
    limited = type("LimitedResponse", (BoundedResponse,), {"most_bytes": most_bytes, "most_sec": most_sec})

    def connection(kind: type, request: urllib.request.Request) -> Any:
        """Return what makes a connection. A proxy may be anywhere; whom it is asked for may not."""
        is_proxy = request.host != urllib.request.Request(request.full_url).host
        if is_proxy and not allow_private:
            check_for_proxy(unquote(urlsplit(request.full_url).hostname or ""))
        connect = socket.create_connection if is_proxy or allow_private else connect_to_public
        return functools.partial(_build_connection, kind, limited, connect)

    class Http(urllib.request.HTTPHandler):
        def http_open(self, request: Any) -> Any:
            return self.do_open(connection(http.client.HTTPConnection, request), request)

    class Https(urllib.request.HTTPSHandler):
        def https_open(self, request: Any) -> Any:
            return self.do_open(connection(http.client.HTTPSConnection, request), request)

    opener, known = urllib.request.OpenerDirector(), urllib.request
    others = known.HTTPDefaultErrorHandler, known.HTTPRedirectHandler, known.HTTPErrorProcessor
    for handler in (known.ProxyHandler, known.UnknownHandler, Http, Https, *others):
        opener.add_handler(handler())
    urllib.request.install_opener(opener)


def _build_connection(kind: type, response: type, connect: Any, host: str, **more: Any) -> Any:
    connection = kind(host, **more)
    connection.response_class, connection._create_connection = response, connect
    return connection
