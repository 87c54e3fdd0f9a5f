"""A published weights file, opened without running any code from it: safetensors, and torch's formats of all years.

A checkpoint of 2022 is a pickle, and a pickle is a program: it names functions and calls them. Here it is read by an
unpickler in whose world there is nothing to call. `torch.load` is not used, not even with a pickle module of our own:
it hands a TorchScript archive to a compiler, unpacks a tar file to disk, and may write a .patch file for a pickled
module; and before torch 1.6's format it reads all tensors to tell one's shape. So the two layouts are read here:

    zip     NAME/data.pkl       the pickle; a storage is a persistent id ("storage", type, key, location, elements)
            NAME/data/KEY       the bytes of a storage
    legacy  five pickles: magic number, protocol, system, the object, the storages' keys in order; then for each key
            the number of elements as int64, and the bytes. The id has a sixth entry: (view's key, offset, elements).

(torch/serialization.py, `_save` and `_legacy_save`.) Names and shapes cost no memory; a tensor's bytes are read when it is
asked for. All of it little-endian.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

Form = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape of a tensor."""

LEGACY_MAGIC, LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
LEGACY_HEAD = LEGACY_MAGIC.to_bytes(10, "little")  # stands so in a pickle
MAX_PICKLE_BYTES = 2**30  # SD2's is 0.2 MB: what claims more is no table of tensors

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
STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class Refused(ValueError):
    """A file that is not read; the message is for the user."""


@dataclass(frozen=True)
class WeightsFile:
    """An open weights file."""

    path: Path
    forms: Mapping[str, Form]
    """Every tensor's name -> type and shape, in the file's order."""
    read: Callable[[str], Tensor] = field(repr=False)

    def tensor(self, name: str) -> Tensor:
        """Read one tensor: on the CPU, type, shape and strides as stored. Raises ValueError: its bytes cannot be read."""
        assert name in self.forms, name
        try:
            return self.read(name)
        except Refused:
            raise
        except Exception as error:
            raise Refused(
                f"{self.path}: tensor '{name}' cannot be read ({_reason(error)}). Fetch the file again."
            ) from error


def open_weights(path: Path) -> WeightsFile:
    """Open a weights file: safetensors, torch's zip format, or torch's format before 1.6. Content decides, not the suffix.

    The tensors are those of the dictionary under "state_dict" where there is one, else those of the file's dictionary.
    Trainer objects pickled beside them are passed over.

    Raises:
        ValueError: there is no such file, it is of another format, damaged, or holds no tensors; nothing else is raised.
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
    forms = {name: (SAFETENSORS_TYPES[kind], tuple(shape)) for name, (kind, shape) in stated.items()}
    return WeightsFile(path, forms, file.get_tensor)


# --- torch's formats: a pickle in which storages are named ---


class _Inert:
    """Stands for whatever a pickle names and we do not know: can be made, called, filled; does and keeps nothing."""

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> _Inert:
        return object.__new__(_Inert)  # `cls` may be an instance: what stood for a class may have come out of a call

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> _Inert:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, *args: Any) -> None:
        pass

    extend = add = update = append


@dataclass(frozen=True)
class _Storage:
    """A run of elements in the storage `key`."""

    dtype: torch.dtype
    key: str
    start: int
    size: int


@dataclass(frozen=True)
class _Stored:
    """A tensor by its place; the numbers are the file's own and not yet believed."""

    storage: _Storage
    offset: Any
    shape: Any
    stride: Any

    @property
    def span(self) -> int:
        """Elements from its first to its last, both included; 0 where it has none."""
        return (
            0 if 0 in self.shape else 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        )

    def fault(self) -> str | None:
        """Say what is wrong with it, or None."""
        if not all(isinstance(value, tuple | list) for value in (self.shape, self.stride)):
            return "has no shape"
        numbers = [self.offset, *self.shape, *self.stride]
        if len(self.shape) != len(self.stride) or any(type(n) is not int or not 0 <= n < 2**62 for n in numbers):
            return f"has the impossible shape {self.shape}, strides {self.stride}, offset {self.offset}"
        if self.offset + self.span > self.storage.size:
            return (
                f"of shape {tuple(self.shape)} needs {self.offset + self.span} elements of {self.storage.size} stored"
            )
        return None


def _rebuild_tensor(storage: Any = None, offset: Any = 0, shape: Any = (), stride: Any = (), *rest: Any) -> Any:
    """Of `_rebuild_tensor_v2`'s further arguments only the last, a conjugate or negative bit, would change values."""
    plain = isinstance(storage, _Storage) and not (len(rest) > 2 and rest[2])
    return _Stored(storage, offset, shape, stride) if plain else _Inert()


def _rebuild_parameter(data: Any = None, *rest: Any) -> Any:
    return data if isinstance(data, _Stored) else _Inert()


def _rebuild_with_attributes(rebuild: Any = None, kind: Any = None, arguments: Any = (), *rest: Any) -> Any:
    known = rebuild is _rebuild_tensor or rebuild is _rebuild_parameter
    return rebuild(*arguments) if known and type(arguments) is tuple else _Inert()


KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): dict,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_with_attributes,
}
"""All that a pickle can call; none of it is torch's, and none looks at more than its arguments."""


class _Unpickler(pickle._Unpickler):
    """Reads a pickle whose world is closed: plain values, `KNOWN`, and inert objects for everything else it names.

    Nothing is imported. The one in Python, not the one in C, because there every opcode can be taken away:

    - BUILD sets attributes of any object in reach, a function's defaults among them: here the state is dropped.
    - EXT1, EXT2 and EXT4 fetch from copyreg's process-wide cache without asking `find_class`: here they are unknown.
    - BYTEARRAY8 allocates what it is told before it reads: here it gives bytes.
    """

    dispatch = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if bytes([code]) not in (pickle.EXT1, pickle.EXT2, pickle.EXT4)
    }

    def __init__(self, file: IO[bytes]):
        # Text that a Python 2 wrote may be raw bytes (numpy scalars): no reason to fail
        super().__init__(file, encoding="utf-8", errors="surrogateescape")
        self.roots: dict[str, _Storage] = {}

    def _drop_state(self) -> None:
        self.stack.pop()

    dispatch[pickle.BUILD[0]] = _drop_state
    dispatch[pickle.BYTEARRAY8[0]] = dispatch[pickle.BINBYTES8[0]]

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.cuda", "torch.storage") and name in STORAGES:
            return STORAGES[name]
        return KNOWN.get((module, name), _Inert)

    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is not tuple or len(pid) < 5 or pid[0] != "storage" or not isinstance(pid[1], torch.dtype):
            return _Inert()  # a module's source, a storage of a kind that holds no weights
        _, dtype, key, _, size, *view = pid
        if type(key) is not str or type(size) is not int or size < 0:
            raise pickle.UnpicklingError(f"a storage with key {key!r} and {size!r} elements")
        self.roots[key] = _Storage(dtype, key, 0, size)
        if not view or view[0] is None:
            return self.roots[key]
        _, start, view_size = view[0]
        if any(type(n) is not int or n < 0 for n in (start, view_size)) or start + view_size > size:
            raise pickle.UnpicklingError(f"a view of {view_size!r} elements at {start!r} in a storage of {size}")
        return _Storage(dtype, key, start, view_size)


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
    if f"{root}byteorder" in names and archive.read(f"{root}byteorder") != b"little":
        raise Refused(
            f"{path}: was written on a big-endian machine, which is not read here. Save it again on this one."
        )
    if archive.getinfo(tables[0]).file_size > MAX_PICKLE_BYTES:
        raise Refused(f"{path}: its data.pkl claims to be over 1 GiB; a table of tensors is not. Fetch the file again.")
    content = _Unpickler(io.BytesIO(archive.read(tables[0]))).load()

    def read(key: str, start: int, size: int) -> bytes:
        with archive.open(f"{root}data/{key}") as record:
            record.seek(start)
            return record.read(size)

    sizes = {info.filename.removeprefix(f"{root}data/"): info.file_size for info in archive.infolist()}
    return _weights(path, content, sizes, read)


def _open_legacy(path: Path, size: int, head: bytes) -> WeightsFile:
    with open(path, "rb") as file:
        try:
            magic = _Unpickler(file).load()
        except Exception:  # it is no pickle: what it is, the next line says
            magic = None
        if magic is None or magic != LEGACY_MAGIC:
            raise Refused(_not_weights(path, size, head, is_pickle=magic is not None))
        protocol, system = _Unpickler(file).load(), _Unpickler(file).load()
        if protocol != LEGACY_PROTOCOL or not isinstance(system, dict) or system.get("little_endian") is not True:
            raise Refused(
                f"{path}: was written by a torch or a machine that is not read here. Save it again with this one."
            )
        unpickler = _Unpickler(file)
        content = unpickler.load()
        starts: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for key in _Unpickler(file).load():
            count = file.read(8)
            if len(count) < 8:
                break  # the tensors that lie behind the end are named below
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
    """Find the tensors in what the pickle held, and see that their bytes are there. `sizes`: bytes of each storage."""
    tensors = _find_tensors(path, content)
    faults = [f"'{name}' {fault}" for name, stored in tensors.items() if (fault := stored.fault())]
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
            f"the first is '{short[0]}'. Fetch it again."
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


def _find_tensors(path: Path, content: Any) -> dict[str, _Stored]:
    if not isinstance(content, dict):
        foreign = content is _Inert or isinstance(content, _Inert)
        kind = "an object with code of its own" if foreign else f"a {type(content).__name__}"
        kind = "one tensor" if isinstance(content, _Stored) else kind
        raise Refused(f"{path}: holds {kind}, no dictionary of tensors. Save the model's state_dict.")
    inner = content.get("state_dict")
    table = inner if isinstance(inner, dict) else content
    tensors = {name: value for name, value in table.items() if isinstance(name, str) and isinstance(value, _Stored)}
    if not tensors:
        keys = ", ".join(" ".join(str(key).split())[:60] for key in list(table)[:10]) or "none"
        where = " under state_dict" if table is inner else ""
        raise Refused(
            f"{path}: holds no tensors{' there' if where else ''} by name: its keys{where} are {keys}. "
            'Save the dictionary of tensors itself, or under "state_dict".'
        )
    return tensors


# --- what else a file may be ---


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
        f"{path}: is no weights file ({size:,} bytes that begin {head[:8].hex()}). "
        "Known: safetensors and files of torch.save. It may be damaged: fetch it again."
    )


def _reason(error: Exception) -> str:
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0][:200]}" if said else type(error).__name__
