"""Which captions of COCO 2014 MLPerf's benchmarks take, and the table of them.

The rule, of both benchmarks: all captions in the order of captions_val2014.json, line feeds taken out (nothing in their
place) and blanks at both ends stripped; shuffled by pandas' sample(frac=1, random_state=2023); of each image the first one;
of these the first N; sorted by id; written by pandas' to_csv with tabs. N is 30,000 for Stable Diffusion v2 and 29,696 for
FLUX.1, which gives row n of the sorted table the timestep n mod 8 in a column of its own.

Sources: mlcommons/training, stable_diffusion/scripts/datasets/coco-split-resize.py and coco-2014-validation-split-resize.sh;
mlcommons/training at 1c759d08, text_to_image/README.md, which names the script of its reference, a fork of
pytorch/torchtitan: experiments/flux/scripts/coco_to_webdataset.py at bdd19fed.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.errors import Refused
from cli.files import MOST_BYTES, is_bounded, open_regular, read_regular
from stages.moments import NUM_TIMESTEPS, TIMESTEP

if TYPE_CHECKING:
    from pandas import DataFrame

SEED = 2023
CAPTIONS = "captions_val2014.json"
COLUMNS = {"image_id": int, "id": int, "caption": str}
WANTED = f"Give annotations_trainval2014.zip, or its {CAPTIONS}"


def image_name(image_id: int, suffix: str = "jpg") -> str:
    """Return the name of an image's file: of COCO's own, and with another suffix of ours."""
    return f"COCO_val2014_{image_id:012}.{suffix}"


def read_annotations(path: Path) -> list[dict[str, Any]]:
    """Return the captions of captions_val2014.json, or of that file in COCO's zip, with all of their fields.

    Raises:
        Refused: it cannot be read, or is not COCO's captions; says what it is instead.
    """
    content, where = _content(path)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Refused(f"{where} is not JSON: {str(error)[:80]}. {WANTED}.") from error
    captions = found.get("annotations") if isinstance(found, dict) else None
    if not isinstance(captions, list) or not captions or not all(isinstance(one, dict) for one in captions):
        raise Refused(f"{where} has no list `annotations` of objects. {WANTED}.")
    _check(captions, where)
    return captions


def _content(path: Path) -> tuple[bytes, str]:
    """Return the bytes of a file of captions, or of the one in a zip; and its name for messages. Raises Refused."""
    where = f"annotations: {path}"
    try:
        open_regular(path, None).close()
        if not zipfile.is_zipfile(path):
            if path.suffix == ".zip" and path.is_file():
                raise zipfile.BadZipFile("it is no whole zip")
            return read_regular(path), where
        with zipfile.ZipFile(path) as file:
            names = file.namelist()
            member = next((name for name in names if Path(name).name == CAPTIONS), None)
            if member is not None:
                if file.getinfo(member).file_size > MOST_BYTES or not is_bounded(file.getinfo(member)):
                    raise zipfile.BadZipFile(f"{member} is packed in an odd way, or above {MOST_BYTES:,} bytes")
                return file.read(member), f"{where}, {member}"
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error) as error:  # of odd zips, too
        why = getattr(error, "strerror", None) or str(error)
        raise Refused(f"{where} cannot be read: {why}. {WANTED}.") from error
    raise Refused(f"{where} has no {CAPTIONS}. It has {_some(names)}. {WANTED}.")


def _check(captions: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raise Refused at the first caption that is not one of COCO's, and at an id that is there twice."""
    seen: set[int] = set()
    for number, one in enumerate(captions):
        if missing := [name for name in COLUMNS if name not in one]:
            what = "These are objects in images, not captions. " if "category_id" in one else ""
            given = f"{where}: annotation {number:,} has no {', '.join(missing)}. It has {_some(list(one))}"
            raise Refused(f"{given}. {what}{WANTED}.")
        for name, kind in COLUMNS.items():
            if type(one[name]) is not kind or (kind is int and not 0 <= one[name] < 10**12):
                possible = "a text" if kind is str else "a whole number from 0 to 10**12"
                given = f"{where}: annotation {number:,} has {name} {str(one[name])[:40]!r}"
                raise Refused(f"{given}. Possible: {possible}. {WANTED}.")
        try:
            one["caption"].encode()
        except UnicodeEncodeError as error:
            raise Refused(f"{where}: the caption with id {one['id']} is half a letter of UTF-16. {WANTED}.") from error
        if one["id"] in seen:
            raise Refused(f"{where}: two captions have the id {one['id']}. {WANTED}.")
        seen.add(one["id"])


def choose(captions: Sequence[Mapping[str, Any]], num_images: int, *, timesteps: bool) -> DataFrame:
    """Return the rule's captions as a table, sorted by id; see the head of this file.

    Args:
        captions: of `read_annotations`.
        num_images: how many images, each with one caption.
        timesteps: give each row its timestep, 0 to 7.

    Raises:
        Refused: there are captions of fewer images; or one that is taken has a carriage return, which ends a row.
    """
    import numpy as np
    from pandas import DataFrame

    table = DataFrame(captions)
    table["caption"] = table["caption"].map(lambda text: text.replace("\n", "").strip())
    table = table.sample(frac=1, random_state=SEED).drop_duplicates(subset=["image_id"], keep="first")
    if len(table) < num_images:
        given = f"num_images: {num_images:,}, but annotations has captions of {len(table):,} images"
        raise Refused(f"{given}. Possible: 1 to {len(table):,}. Give fewer, or COCO's own {CAPTIONS}.")
    table = table.iloc[:num_images].sort_values(by=["id"])
    if broken := [number for number, text in zip(table["id"], table["caption"], strict=True) if "\r" in text]:
        given = f"annotations: the caption with id {broken[0]} has a carriage return, which would end its row"
        raise Refused(f"{given}. {WANTED}.")
    return table.assign(**{TIMESTEP: np.arange(num_images) % NUM_TIMESTEPS}) if timesteps else table


def as_tsv(table: DataFrame) -> bytes:
    """Return a table as the reference writes it: with a header, tabs between, quotation marks where a text needs them."""
    return table.to_csv(sep="\t", index=False, lineterminator="\n").encode()


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8:,} more" if len(names) > 8 else "") or "nothing"
