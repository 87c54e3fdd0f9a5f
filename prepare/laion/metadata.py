"""The stage `metadata`: the parts of a table of URLs, fetched and looked at.

    FOLDER/metadata/part-00012.parquet

A part's name is the last one of its address. It is compared with its digest, where there is one; then its head, its foot and
the places of its columns are read, so that a file that was cut off or is something else is noticed at once.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from cli.errors import ConfigError, Failed
from prepare.laion.config import METADATA, LaionConfig, MetadataConfig
from prepare.laion.filter import open_table
from prepare.parts import GO_ON
from prepare.transfer import fetch_all
from prepare.wanted import Wanted, check_wanted

LENGTHS = {32: "md5", 40: "sha1", 64: "sha256"}  # digits of a digest


def wanted_of(config: MetadataConfig) -> list[Wanted]:
    """Return the parts. Raises ConfigError: a part has no digest in the file of digests, or it cannot be read."""
    assert config.urls is not None
    urls = [config.urls.format(part=number) for number in range(config.num_parts)]
    names = [PurePosixPath(urlsplit(url).path).name for url in urls]
    if not names[0].endswith(".parquet"):
        raise ConfigError([f"metadata.urls: {urls[0]} ends in no name of a .parquet file. Check the address."])
    known = read_digests(config.digests) if config.digests else {}
    if missing := [name for name in names if config.digests and name not in known]:
        raise ConfigError([f"metadata.digests: {config.digests} has no line of {', '.join(missing[:3])}."])
    return [Wanted(name, (url,), None, known.get(name)) for name, url in zip(names, urls, strict=True)]


def read_digests(path: str) -> dict[str, str]:
    """Return name -> digest of a file as sha256sum, sha1sum or md5sum write it. Raises ConfigError."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigError([f"metadata.digests: {path} cannot be read: {error}."]) from error
    found = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            match = re.fullmatch(r"([0-9a-fA-F]+) [ *](.+)", line.strip())
            kind = LENGTHS.get(len(match[1])) if match else None
            if match is None or kind is None:
                possible = "`digest  name`, as sha256sum, sha1sum and md5sum write it"
                raise ConfigError([f"metadata.digests: {path}, line {number} is no digest. Possible: {possible}."])
            found[PurePosixPath(match[2]).name] = f"{kind}:{match[1].lower()}"
    return found


def fetch(config: LaionConfig) -> None:
    """Fetch the parts that are missing.

    Raises:
        Refused, Failed: what could not be had, and why.
    """
    if config.metadata.urls is None:
        return
    folder = config.inside(METADATA)
    wanted = wanted_of(config.metadata)
    try:
        check_wanted(wanted)
    except ValueError as error:
        raise ConfigError([f"metadata.urls: {line}" for line in str(error).splitlines()[:3]]) from error
    outcomes = fetch_all(wanted, folder, config.metadata.at_once, word="folder")
    if lost := [one for one in outcomes if one.reason]:
        named = "; ".join(f"{one.name}: {one.reason}" for one in lost[:3])
        raise Failed(f"metadata: {len(lost)} of {len(outcomes)} parts could not be had: {named}. {GO_ON}.")
    for one in outcomes:
        try:
            open_table(folder / one.name).close()
        except ValueError as error:
            raise Failed(f"metadata: {error}.") from error
