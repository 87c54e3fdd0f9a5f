"""Files that a folder should have, by name, size and digest; and which of them are there.

    FOLDER/NAME             a file that is whole: it takes its name last (prepare/transfer.py)
    FOLDER/.digests         which of them were compared, with what, and their size and time then; a JSON line each

A digest is compared once: a file whose size and time are those of that comparison is not read again. So a list of 800 GB
takes a moment. Where no digest is published, the size alone is compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from urllib.parse import quote, urlsplit

from cli.files import write_whole
from cli.limits import shown
from prepare.places import WORK
from stages.fetch import file_digest

DIGITS = {"sha256": 64, "sha1": 40, "sha512": 128, "md5": 32, "xxh3_64": 16, "git": 40}
"""Kind of a digest -> hexadecimal digits of it; git's is its SHA-1 of a file."""
DIGESTS_FILE = ".digests"
MAX_NAME_BYTES = 180  # of a part's name in `.work`, with what is added to it: Linux takes 255


@dataclass(frozen=True)
class Wanted:
    """One file that a folder should have.

    name: its path in the folder, with slashes.
    urls: where it is, the first one that gives it counts: http://, https:// or file://.
    bytes: its size; None: not known.
    digest: KIND:DIGITS, the kind one of DIGITS; None: not published.
    token: name of the environment variable with a token for the host of the first URL, and for that one alone.
    """

    name: str
    urls: tuple[str, ...]
    bytes: int | None = None
    digest: str | None = None
    token: str | None = None


def wanted_problem(wanted: Wanted) -> str | None:
    """Say what is wrong with an entry, which may come from a list on the web; or None."""
    name, parts = wanted.name, wanted.name.split("/")
    if not name.isprintable() or "\\" in name or any(part in ("", ".", "..") for part in parts):
        return f"{shown(name)}: is no path inside a folder. Possible: NAME, or FOLDER/NAME."
    if parts[0] in (WORK, DIGESTS_FILE) or len(quote(name, safe="")) > MAX_NAME_BYTES:
        return f"{shown(name)}: is a name that cannot be taken. Possible: another of up to {MAX_NAME_BYTES} bytes."
    if not wanted.urls or not all(map(is_address, wanted.urls)):
        return f"{name}: its addresses are {list(wanted.urls)}. Possible: http://, https:// and file://."
    if wanted.bytes is not None and wanted.bytes < 0:
        return f"{name}: its size is {wanted.bytes}. Possible: 0 or more bytes."
    kind, _, digits = (wanted.digest or "").partition(":")
    if wanted.digest is not None and not re.fullmatch(rf"[0-9a-f]{{{DIGITS.get(kind, 0)}}}", digits or "-"):
        possible = ", ".join(f"{name} with {number} digits" for name, number in DIGITS.items())
        return f"{name}: its digest is {shown(wanted.digest)}. Possible: KIND:DIGITS, {possible}."
    return None


def is_address(url: str) -> bool:
    """True for an address that a file may be fetched from: http://, https:// or file://."""
    try:
        parts = urlsplit(url)
        has_host = parts.hostname is not None and parts.port != 0  # a port that is no number raises
    except ValueError:
        return False
    return "://" in url and (parts.scheme == "file" or (parts.scheme in ("http", "https") and has_host))


def check_wanted(wanted: Sequence[Wanted]) -> None:
    """Raise ValueError, a problem a line, if an entry is no good, or one folder cannot have both of two."""
    problems = [text for one in wanted if (text := wanted_problem(one))]
    names = Counter(one.name for one in wanted)
    problems += [f"{name}: is wanted twice. Leave one out." for name, count in names.items() if count > 1]
    problems += [f"{name}: is a folder of other files too. Leave it out." for name in folders_of(names) & names.keys()]
    if problems:
        raise ValueError("\n".join(problems))


def folders_of(names: Iterable[str]) -> set[str]:
    """Return the folders in which files of these names lie."""
    return {str(folder) for name in names for folder in PurePosixPath(name).parents}


@dataclass(frozen=True)
class Seen:
    """What is there of a wanted file.

    state: `there`: of the right size, and of the right digest where that was compared; `unread`: of the right size, but
        its digest was never compared; `wrong`: of another size or digest; `missing`.
    text: more of it, for a list.
    """

    state: Literal["there", "unread", "wrong", "missing"]
    text: str


class Memory:
    """The digests that were compared in a folder. Several threads may use it.

    Args:
        folder: with the files; it need not be there.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._lock = threading.Lock()
        self._lines: dict[str, dict[str, Any]] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a damaged memory is none
            for line in (folder / DIGESTS_FILE).read_text().splitlines():
                content = json.loads(line)
                self._lines[content["name"]] = content

    def knows(self, wanted: Wanted) -> bool:
        """True if the file was compared with this digest, and has had the same size and time since."""
        line = self._lines.get(wanted.name)
        return line is not None and line == self._line(wanted)

    def wanted(self) -> list[Wanted]:
        """Return the files whose digests were compared, without addresses."""
        return [Wanted(name, (), line["bytes"], line["digest"]) for name, line in sorted(self._lines.items())]

    def keep(self, *wanted: Wanted, path: Path | None = None) -> None:
        """Note that files have their digests, which were just compared. Raises OSError.

        Args:
            path: of a single file that has not got its name yet, and keeps its time when it gets it.
        """
        with self._lock:
            self._lines |= {one.name: self._line(one, path) for one in wanted}
            text = "".join(json.dumps(line) + "\n" for _, line in sorted(self._lines.items()))
            write_whole(self.folder / DIGESTS_FILE, text)

    def _line(self, wanted: Wanted, path: Path | None = None) -> dict[str, Any]:
        facts = (path or self.folder / wanted.name).stat()
        return {"name": wanted.name, "bytes": facts.st_size, "mtime_ns": facts.st_mtime_ns, "digest": wanted.digest}

    def look(self, wanted: Wanted, read: bool = False, again: bool = False) -> Seen:
        """Look at a wanted file.

        Args:
            read: compare the digest of one that was never compared.
            again: compare it in any case.

        Raises:
            OSError: it cannot be read.
        """
        path = self.folder / wanted.name
        if not path.is_file():
            return Seen("wrong", "is no file") if path.exists() else Seen("missing", "missing")
        size = path.stat().st_size
        if wanted.bytes is not None and size != wanted.bytes:
            return Seen("wrong", f"has {size:,} bytes, {wanted.bytes:,} are wanted")
        if wanted.digest is None:
            compared = "nothing is compared" if wanted.bytes is None else "size alone is compared"
            return Seen("there", f"there; digest not published: {compared}")
        if not again and self.knows(wanted):
            return Seen("there", "there, digest compared")
        if not (read or again):
            return Seen("unread", "there, digest not compared yet")
        if text := wrong_digest(path, wanted.digest):
            return Seen("wrong", text)
        with contextlib.suppress(OSError):  # the folder may be read-only
            self.keep(wanted)
        return Seen("there", "there, digest compared")


def wrong_digest(path: Path, digest: str) -> str | None:
    """Compare a file with a digest, KIND:DIGITS; say both where they differ. Raises OSError."""
    kind, _, wanted = digest.partition(":")
    found = file_digest(path, kind) if kind != "git" else _git_digest(path)
    return None if found == wanted else f"its {kind} is {found}, {wanted} is wanted"


def _git_digest(path: Path) -> str:
    content = path.read_bytes()  # of small files alone: the hub has SHA-256 of the others
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
