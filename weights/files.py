"""Open a published weights file without running any code from it: safetensors, or a file of torch.save.

Names and shapes cost no memory: tensors are mapped from the file, and their bytes are read where they are used. Only a file
older than torch 1.6 is read whole.

A checkpoint of 2022 holds a trainer's objects next to its tensors. `torch.load(weights_only=True)` refuses names that it does
not know, so each of them is registered as an empty stand-in for that one call: nothing is imported, and nothing is run.
"""

from __future__ import annotations

import json
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WEIGHT_SUFFIXES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".npz")
"""Of files that are taken for weights, or statistics, by their names alone."""

TypeAndShape = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape of a tensor."""


class WeightsError(ValueError):
    """This file cannot be read; the message is for the user."""


@dataclass(frozen=True)
class WeightsFile:
    """An open weights file."""

    path: Path
    tensors: Mapping[str, Tensor] = field(repr=False)
    """Every tensor's name -> the tensor on the CPU, with type, shape and strides as stored, in the file's order."""

    @cached_property
    def entries(self) -> Mapping[str, TypeAndShape]:
        """Every tensor's name -> type and shape."""
        return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()}

    def tensor(self, name: str) -> Tensor:
        """Return one tensor; its bytes are mapped from the file: copy it before you change it."""
        return self.tensors[name]


def printable(name: str) -> str:
    """Return a name from a file, safe for a terminal: one line, no control characters, at most 120 letters."""
    plain = name if name.isprintable() else ascii(name)[1:-1]
    return plain if len(plain) <= 120 else f"{plain[:117]}..."


def open_weights(path: Path) -> WeightsFile:
    """Open a weights file of safetensors or torch.save. Content decides, not the suffix.

    The tensors come from the dictionary under "state_dict" if there is one, else from the file's dictionary. Trainer
    objects pickled next to them are skipped.

    Raises:
        ValueError: the file does not exist, has another format, is damaged or holds no tensors. Nothing else is raised.
    """
    try:
        return WeightsFile(path, _read(path))
    except WeightsError:
        raise
    except Exception as error:  # a garbled pickle can fail in any way
        advice = "Known: safetensors and files of torch.save. It may be damaged: fetch it again"
        raise WeightsError(f"{path}: cannot be read as a weights file ({_reason(error)}). {advice}.") from error


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise WeightsError(f"{path}: there is no such file. Give a weights file (.safetensors, .ckpt, .pt, .bin).")
    with open(path, "rb") as file:
        head = file.read(512)
    if head.startswith(b"PK\x03\x04"):
        return _state_dict(path, _load_zip(path))
    if head[8:9] == b"{":
        return _load_safetensors(path)
    if head.isascii() and b"\0" not in head:  # a git-LFS pointer, or a server's page
        begin = printable(" ".join(head.decode().split())[:40])
        raise WeightsError(
            f"{path}: is text, not weights: it begins '{begin}'. Fetch the file itself (or run: git lfs pull)."
        )
    if path.suffix == ".safetensors" and head[:1] != b"\x80":
        return _load_safetensors(path)
    return _state_dict(path, _load(path, mmap=False))


def _reason(error: Exception) -> str:
    """Return the first line of an error; of torch's long ones, the name that it does not read or the last sentence."""
    if named := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return f"it names {printable(named[1])}, which is neither a tensor nor a plain value"
    lines = re.sub(r"(?s).*WeightsUnpickler error: ", "", str(error)).strip().splitlines()
    return f"{type(error).__name__}: {printable(lines[0])}" if lines else type(error).__name__


# --- several files ---


def choose_weight_files(names: Collection[str], stems: tuple[str, str]) -> list[str]:
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


def open_sharded_weights(index: Path) -> WeightsFile:
    """Open weights that lie in several files, of which an index names each tensor's (`weight_map`).

    Raises:
        ValueError: the index is unreadable, a file is missing or damaged, or they do not agree.
    """
    try:
        table = json.loads(index.read_bytes())["weight_map"]
        assert all(isinstance(text, str) and Path(text).name == text for text in table.values())
    except Exception as error:  # a garbled file can fail in any way
        text = "is no index of weights (JSON with weight_map: tensor -> file). Fetch it again"
        raise WeightsError(f"{index}: {text}.") from error
    parts = {name: open_weights(index.with_name(name)).tensors for name in sorted(set(table.values()))}
    stored = {(tensor, name) for name, part in parts.items() for tensor in part}
    if wrong := sorted(stored ^ set(table.items())):
        tensor, name = wrong[0]
        text = f"{len(wrong)} tensors are not in the file that it names, the first is '{printable(tensor)}' ({name})"
        raise WeightsError(f"{index}: {text}. Fetch the files again, all of one revision.")
    return WeightsFile(index, {tensor: parts[name][tensor] for tensor, name in table.items()})


# --- one file ---


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import safe_open

    with safe_open(path, framework="pt", device="cpu") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    if not tensors:
        raise WeightsError(f"{path}: holds no tensors. Give a file that does.")
    return tensors


def check_zip_records(path: Path, archive: zipfile.ZipFile) -> None:
    """Raise ValueError if a record of a zip file of torch.save may be longer than the file is."""
    for record in archive.infolist():
        if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
            sizes = f"{record.compress_size:,} bytes for {record.file_size:,}"
            advice = "torch.save compresses none: save it again with torch.save, or fetch another file"
            raise WeightsError(f"{path}: its record {printable(record.filename)} is compressed, {sizes}. {advice}.")


class _Inert:
    """Stands in for any class or function that a pickle names: can be made and called, and keeps nothing."""

    def __init__(self, *args: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _InertDict:
    """Stands in for a class of dictionaries, which are filled: torch's unpickler fills OrderedDict alone."""

    def __new__(cls, *args: Any) -> Any:
        return OrderedDict()


def _load_zip(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        if any(name.endswith("/constants.pkl") for name in archive.namelist()):
            raise WeightsError(f"{path}: is a TorchScript program, not weights. Save the state_dict of what it holds.")
        check_zip_records(path, archive)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    stand_ins = [(_InertDict if name.lower().endswith("dict") else _Inert, name) for name in names]
    with torch.serialization.safe_globals(stand_ins):  # type: ignore[arg-type]
        return _load(path, mmap=True)


def _load(path: Path, *, mmap: bool) -> Any:
    with warnings.catch_warnings(action="ignore"):  # of old formats, and of programs, which are refused
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def _state_dict(path: Path, content: Any) -> dict[str, Tensor]:
    """Return the tensors in a file's dictionary."""
    if not isinstance(content, dict):
        kind = "an object with its own code" if isinstance(content, _Inert) else f"a {type(content).__name__}"
        raise WeightsError(f"{path}: holds {kind}, no dictionary of tensors. Save the model's state_dict.")
    inner = content.get("state_dict")
    table = inner if isinstance(inner, dict) else content
    tensors = {name: value.detach() for name, value in table.items() if _is_plain(name, value)}
    if not tensors:
        keys = ", ".join(printable(str(key)) for key in list(table)[:10]) or "none"
        where = " under state_dict" if table is inner else ""
        advice = 'Save the dictionary of tensors itself, or under "state_dict"'
        raise WeightsError(f"{path}: holds no tensors by name: its keys{where} are {keys}. {advice}.")
    return tensors


def _is_plain(name: Any, value: Any) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
