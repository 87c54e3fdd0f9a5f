"""Open a published weights file without running any code from it: safetensors, or any of torch's formats.

A checkpoint of 2022 is a pickle, and a pickle is a program: it names functions and calls them. Our unpickler offers no
functions to call. We do not use `torch.load`, not even with this unpickler: it hands a TorchScript archive to a
compiler, unpacks a tar file to disk, and may write a .patch file for a pickled module. It also reads all tensors of a
file older than torch 1.6 to give one shape. So we read the two layouts ourselves:

    zip     NAME/data.pkl       the pickle; a storage is a persistent id ("storage", type, key, location, elements)
            NAME/data/KEY       the bytes of a storage
    legacy  five pickles: magic number, protocol, system, the object, the storages' keys in order; then for each key
            the number of elements as int64, and the bytes. The id has a sixth entry: (view's key, offset, elements).

(torch/serialization.py, `_save` and `_legacy_save`.) torch.save compresses no record of a zip file, and one that is
compressed is refused: a few bytes of it may stand for gigabytes. Names and shapes cost no memory; a tensor's bytes are read
on request. All numbers are little-endian.
"""

from __future__ import annotations

import io
import json
import re
import struct
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weights.restricted_pickle import Inert, RestrictedUnpickler, Stored

SUFFIXES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".npz")
"""Of files that are taken for weights, or statistics, by their names alone."""

Entry = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape of a tensor."""

LEGACY_MAGIC, LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
LEGACY_HEAD = LEGACY_MAGIC.to_bytes(10, "little")  # its bytes in a pickle
MAX_PICKLE_BYTES = 2**26  # SD2's has 0.2 MB; anything larger is not a table of tensors

SAFETENSORS_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Refused(ValueError):
    """This file cannot be read; the message is for the user."""


@dataclass(frozen=True)
class WeightsFile:
    """An open weights file."""

    path: Path
    entries: Mapping[str, Entry]
    """Every tensor's name -> type and shape, in the file's order."""
    read: Callable[[str], Tensor] = field(repr=False)

    def tensor(self, name: str) -> Tensor:
        """Read one tensor to the CPU, with type, shape and strides as stored. Raises ValueError: its bytes are unreadable."""
        assert name in self.entries, name
        try:
            return self.read(name)
        except Refused:
            raise
        except Exception as error:
            raise Refused(
                f"{self.path}: tensor '{shown(name)}' cannot be read ({_reason(error)}). Fetch the file again."
            ) from error


def shown(name: str) -> str:
    """Return a name from a file, safe for a terminal: one line, no control characters, at most 120 letters."""
    plain = name if name.isprintable() else ascii(name)[1:-1]
    return plain if len(plain) <= 120 else f"{plain[:117]}..."


def open_weights(path: Path) -> WeightsFile:
    """Open a weights file: safetensors, torch's zip format, or torch's format before 1.6. Content decides, not the suffix.

    The tensors come from the dictionary under "state_dict" if there is one, else from the file's dictionary. Trainer
    objects pickled beside them are skipped.

    Raises:
        ValueError: the file does not exist, has another format, is damaged or holds no tensors. Nothing else is raised.
    """
    try:
        return _open(path)
    except Refused:
        raise
    except Exception as error:  # a garbled pickle can fail in any way
        raise Refused(
            f"{path}: cannot be read as a weights file ({_reason(error)}). Known: safetensors and files of torch.save. "
            "It may be damaged: fetch it again."
        ) from error


def _open(path: Path) -> WeightsFile:
    if not path.exists():
        raise Refused(
            f"{path}: there is no such file. Give the path of a weights file (.safetensors, .ckpt, .pt, .bin)."
        )
    if not path.is_file():
        raise Refused(
            f"{path}: is {'a folder' if path.is_dir() else 'no regular file'}. Give the path of a weights file."
        )
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(512)
    if size == 0:
        raise Refused(f"{path}: is empty (0 bytes). Fetch it again.")
    if head.startswith(b"version https://git-lfs"):
        raise Refused(f"{path}: is a git-LFS pointer of {size} bytes, not the file itself. Run: git lfs pull.")
    if head.startswith(b"PK\x03\x04"):
        return _open_zip(path, size)
    is_legacy = LEGACY_HEAD in head[:32]
    if not is_legacy and (head[8:9] == b"{" or (path.suffix == ".safetensors" and not _is_text(head))):
        return _open_safetensors(path, size)
    return _open_legacy(path, size, head)


# --- several files ---


def weight_files(names: Collection[str], stems: tuple[str, str]) -> list[str]:
    """Return the files of a network's folder that have its weights: one, or an index and its parts; [] for none.

    All bits before half of them, safetensors before a pickle, one file before several.

    Args:
        names: of the files in the folder.
        stems: of the .safetensors and of the .bin file, e.g. ("model", "pytorch_model").
    """
    for half in ("", ".fp16"):
        for stem, suffix in zip(stems, (".safetensors", ".bin"), strict=True):
            if f"{stem}{half}{suffix}" in names:
                return [f"{stem}{half}{suffix}"]
            indices = (f"{stem}{suffix}.index{half}.json", f"{stem}{half}{suffix}.index.json")
            index = next((name for name in indices if name in names), None)
            numbers, kind = r"-(\d{5})-of-(\d{5})", re.escape(half)
            part = re.compile(rf"{stem}({kind}{numbers}|{numbers}{kind}){re.escape(suffix)}")
            parts = sorted(name for name in names if part.fullmatch(name))
            if index is not None and parts and len(parts) == int(re.findall(r"-of-(\d+)", parts[0])[0]):
                return [index, *parts]
    return []


def open_sharded(index: Path) -> WeightsFile:
    """Open weights that lie in several files, of which an index names each tensor's (`weight_map`).

    Raises:
        ValueError: the index is unreadable, a file is missing or damaged, or they do not agree.
    """
    try:
        table = json.loads(index.read_bytes())["weight_map"]
        assert all(isinstance(text, str) and Path(text).name == text for text in table.values())
    except Exception as error:  # a garbled file can fail in any way
        raise Refused(
            f"{index}: is no index of weights (JSON with weight_map: tensor -> file). Fetch it again."
        ) from error
    absent = sorted(name for name in set(table.values()) if not index.with_name(name).exists())
    if absent:
        raise Refused(
            f"{index}: of its {len(set(table.values()))} files there is no {', '.join(absent[:3])}. Fetch it."
        )
    parts = {name: open_weights(index.with_name(name)) for name in sorted(set(table.values()))}
    found = {(tensor, name) for name, part in parts.items() for tensor in part.entries}
    if wrong := sorted(found ^ set(table.items())):
        tensor, name = wrong[0]
        given = f"{len(wrong)} tensors are not in the file that it names, the first is '{shown(tensor)}' ({name})"
        raise Refused(f"{index}: {given}. Fetch the files again, all of one revision.")
    entries = {tensor: parts[name].entries[tensor] for tensor, name in table.items()}
    return WeightsFile(index, entries, lambda tensor: parts[table[tensor]].tensor(tensor))


# --- safetensors ---


def _open_safetensors(path: Path, size: int) -> WeightsFile:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="pt", device="cpu")
        views = {name: file.get_slice(name) for name in list(file.keys())}
        stated = {name: (view.get_dtype(), view.get_shape()) for name, view in views.items()}
    except SafetensorError as error:
        raise Refused(
            f"{path}: is cut short or damaged: no whole safetensors file in its {size:,} bytes ({_reason(error)}). "
            "Fetch it again."
        ) from error
    unknown = [f"{name} ({kind})" for name, (kind, _) in stated.items() if kind not in SAFETENSORS_TYPES]
    if unknown:
        raise Refused(
            f"{path}: {len(unknown)} tensors have a type that is not read here, the first is {unknown[0]}. "
            f"Known: {', '.join(SAFETENSORS_TYPES)}."
        )
    if not stated:
        raise Refused(f"{path}: holds no tensors. Give a file that does.")
    entries = {name: (SAFETENSORS_TYPES[kind], tuple(shape)) for name, (kind, shape) in stated.items()}
    return WeightsFile(path, entries, file.get_tensor)


# --- torch's formats: a pickle that refers to storages by key ---


def check_records(path: Path, archive: zipfile.ZipFile) -> None:
    """Raise ValueError if a record of a zip file of torch.save may be longer than the file is."""
    for record in archive.infolist():
        if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
            raise Refused(
                f"{path}: its record {shown(record.filename)} is compressed, {record.compress_size:,} bytes for "
                f"{record.file_size:,}. torch.save compresses none: save it again with torch.save, or fetch another file."
            )


def _open_zip(path: Path, size: int) -> WeightsFile:
    try:
        archive = zipfile.ZipFile(path)  # stays open as long as the WeightsFile
    except zipfile.BadZipFile as error:
        raise Refused(
            f"{path}: is cut short or damaged: its {size:,} bytes begin as a zip file and have no directory at the end. "
            "Fetch it again."
        ) from error
    names = archive.namelist()
    tables = [name for name in names if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(tables) != 1:
        some = ", ".join(names[:3]) or "nothing"
        raise Refused(
            f"{path}: is a zip file that torch.save did not write (it holds {some}). Give the weights file in it."
        )
    root = tables[0].removesuffix("data.pkl")
    if f"{root}constants.pkl" in names:
        raise Refused(f"{path}: is a TorchScript program, not weights. Save the state_dict of what it holds.")
    check_records(path, archive)
    if f"{root}byteorder" in names and archive.open(f"{root}byteorder").read(7) != b"little":
        raise Refused(
            f"{path}: was written on a big-endian machine, which is not read here. Save it again on this one."
        )
    if archive.getinfo(tables[0]).file_size > MAX_PICKLE_BYTES:
        raise Refused(
            f"{path}: its data.pkl claims to be over 64 MiB; a table of tensors is not. Fetch the file again."
        )
    content = RestrictedUnpickler(io.BytesIO(archive.read(tables[0]))).load()

    def read(key: str, start: int, size: int) -> bytes:
        with archive.open(f"{root}data/{key}") as record:
            record.seek(start)
            return record.read(size)

    sizes = {info.filename.removeprefix(f"{root}data/"): info.file_size for info in archive.infolist()}
    return _weights(path, content, sizes, read)


def _open_legacy(path: Path, size: int, head: bytes) -> WeightsFile:
    with open(path, "rb") as file:
        try:
            magic = RestrictedUnpickler(file).load()
        except Exception:  # not a pickle: the next line reports what it is
            magic = None
        if magic is None or magic != LEGACY_MAGIC:
            raise Refused(_not_weights(path, size, head, is_pickle=magic is not None))
        protocol, system = RestrictedUnpickler(file).load(), RestrictedUnpickler(file).load()
        if protocol != LEGACY_PROTOCOL or not isinstance(system, dict) or system.get("little_endian") is not True:
            raise Refused(
                f"{path}: was written by a torch or a machine that is not read here. Save it again with this one."
            )
        unpickler = RestrictedUnpickler(file)
        content = unpickler.load()
        starts: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for key in RestrictedUnpickler(file).load():
            count = file.read(8)
            if len(count) < 8:
                break  # tensors beyond the end are reported below
            starts[key] = file.tell()
            sizes[key] = struct.unpack("<q", count)[0] * unpickler.roots[key].dtype.itemsize
            if sizes[key] < 0 or starts[key] + sizes[key] > size:
                sizes[key] = size - starts[key]
            file.seek(starts[key] + sizes[key])

    def read(key: str, start: int, size: int) -> bytes:
        with open(path, "rb") as file:
            file.seek(starts[key] + start)
            return file.read(size)

    return _weights(path, content, sizes, read)


def _weights(path: Path, content: Any, sizes: Mapping[str, int], read: Callable[[str, int, int], bytes]) -> WeightsFile:
    """Find the tensors in the pickle's content and check that the file has their bytes. `sizes`: bytes of each storage."""
    tensors = _find_tensors(path, content)
    faults = [f"'{shown(name)}' {fault}" for name, stored in tensors.items() if (fault := stored.fault())]
    if faults:
        raise Refused(f"{path}: is damaged: {len(faults)} tensors cannot be, the first: {faults[0]}. Fetch it again.")
    short = [
        name
        for name, stored in tensors.items()
        if (stored.storage.start + stored.storage.size) * stored.storage.dtype.itemsize
        > sizes.get(stored.storage.key, -1)
    ]
    if short:
        raise Refused(
            f"{path}: is cut short or damaged: the bytes of {len(short)} of {len(tensors)} tensors are not all there, "
            f"the first is '{shown(short[0])}'. Fetch it again."
        )

    def tensor(name: str) -> Tensor:
        stored = tensors[name]
        dtype, span = stored.storage.dtype, stored.span
        if span == 0:
            return torch.empty(stored.shape, dtype=dtype)
        start = (stored.storage.start + stored.offset) * dtype.itemsize
        data = bytearray(read(stored.storage.key, start, span * dtype.itemsize))
        return torch.frombuffer(data, dtype=dtype, count=span).as_strided(stored.shape, stored.stride)

    return WeightsFile(path, {name: (s.storage.dtype, tuple(s.shape)) for name, s in tensors.items()}, tensor)


def _find_tensors(path: Path, content: Any) -> dict[str, Stored]:
    if not isinstance(content, dict):
        foreign = content is Inert or isinstance(content, Inert)
        kind = "an object with code of its own" if foreign else f"a {type(content).__name__}"
        kind = "one tensor" if isinstance(content, Stored) else kind
        raise Refused(f"{path}: holds {kind}, no dictionary of tensors. Save the model's state_dict.")
    inner = content.get("state_dict")
    table = inner if isinstance(inner, dict) else content
    tensors = {name: value for name, value in table.items() if isinstance(name, str) and isinstance(value, Stored)}
    if not tensors:
        keys = ", ".join(shown(str(key)) for key in list(table)[:10]) or "none"
        where = " under state_dict" if table is inner else ""
        raise Refused(
            f"{path}: holds no tensors{' there' if where else ''} by name: its keys{where} are {keys}. "
            'Save the dictionary of tensors itself, or under "state_dict".'
        )
    return tensors


# --- files that hold no weights ---


def _is_text(head: bytes) -> bool:
    text = head.decode("utf-8", errors="ignore")
    return len(text.encode()) > len(head) - 4 and all(char.isprintable() or char in "\t\r\n" for char in text)


def _not_weights(path: Path, size: int, head: bytes, is_pickle: bool) -> str:
    if is_pickle:
        return f"{path}: is a pickle without tensors of torch's. Known: safetensors and files of torch.save."
    if _is_text(head):
        begin = " ".join(head.decode("utf-8", errors="ignore").split())[:40]
        page = "a web page, as a refused download leaves it," if begin.startswith("<") else "a text file,"
        return f"{path}: is {page} not weights: its {size:,} bytes begin '{begin}'. Fetch the file itself."
    return (
        f"{path}: is not a weights file ({size:,} bytes that begin {head[:8].hex()}). "
        "Known: safetensors and files of torch.save. It may be damaged: fetch it again."
    )


def _reason(error: Exception) -> str:
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0][:200]}" if said else type(error).__name__
