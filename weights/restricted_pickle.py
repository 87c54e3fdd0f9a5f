"""A restricted unpickler: it makes plain values, tensors' places, and inert objects for all other names.

Ours, not torch.load(weights_only=True): that one refuses published checkpoints that hold a trainer's own objects too.
"""

from __future__ import annotations

import pickle
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO, Any

import torch

from cli.private_api import require_private_api

PLAIN = {str, int, float, bool, bytes, type(None)}
"""Types allowed as a dictionary's keys; no containers."""
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
OF_UNPICKLER = ("dispatch", "stack", "append", "pop_mark")
require_private_api(pickle, "_Unpickler", *(f"_Unpickler.{name}" for name in OF_UNPICKLER), why="opcodes are taken out")


class Inert:
    """Replaces every unknown class or function of a pickle: can be made, called and filled; does and keeps nothing."""

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        return object.__new__(Inert)  # `cls` may be an instance: a call may have returned it in place of a class

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Inert:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, *args: Any) -> None:
        pass

    extend = add = update = append


@dataclass(frozen=True)
class Storage:
    """A run of elements in the storage `key`."""

    dtype: torch.dtype
    key: str
    start: int
    size: int


@dataclass(frozen=True)
class Stored:
    """A tensor's place. The numbers come from the file and are not yet checked."""

    storage: Storage
    offset: Any
    shape: Any
    stride: Any

    @property
    def span(self) -> int:
        """Elements from its first to its last, both included; 0 if it is empty."""
        return (
            0 if 0 in self.shape else 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        )

    def fault(self) -> str | None:
        """Say what is wrong with it, or None."""
        if not all(isinstance(value, tuple | list) for value in (self.shape, self.stride)):
            return "has no shape"
        numbers = [self.offset, *self.shape, *self.stride]
        if len(self.shape) != len(self.stride) or any(type(n) is not int or not 0 <= n < 2**62 for n in numbers):
            said = [reprlib.repr(value) for value in (self.shape, self.stride, self.offset)]
            return "has the impossible shape {}, strides {}, offset {}".format(*said)
        if self.offset + self.span > self.storage.size:
            return (
                f"of shape {tuple(self.shape)} needs {self.offset + self.span} elements of {self.storage.size} stored"
            )
        return None


def _new_dict(pairs: Any = (), *rest: Any) -> dict[Any, Any]:
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
    ):
        return {}
    return {key: value for key, value in pairs if type(key) in PLAIN}


def _rebuild_tensor(storage: Any = None, offset: Any = 0, shape: Any = (), stride: Any = (), *rest: Any) -> Any:
    """Of `_rebuild_tensor_v2`'s other arguments, only the last (a conjugate or negative bit) would change values."""
    plain = isinstance(storage, Storage) and not (len(rest) > 2 and rest[2])
    return Stored(storage, offset, shape, stride) if plain else Inert()


def _rebuild_parameter(data: Any = None, *rest: Any) -> Any:
    return data if isinstance(data, Stored) else Inert()


def _rebuild_with_attributes(rebuild: Any = None, kind: Any = None, arguments: Any = (), *rest: Any) -> Any:
    known = rebuild is _rebuild_tensor or rebuild is _rebuild_parameter
    return rebuild(*arguments) if known and type(arguments) is tuple else Inert()


KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _new_dict,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_with_attributes,
}
"""Everything that a pickle can call. None of these functions is torch's, and none reads anything but its arguments."""


class RestrictedUnpickler(pickle._Unpickler):
    """An unpickler that makes only plain values, calls only `KNOWN`, and replaces all other names by inert objects.

    It imports nothing. It extends Python's unpickler, not the one in C, because there every opcode can be replaced:

    - BUILD can set attributes of any reachable object, even a function's defaults. Here the state is dropped.
    - EXT1, EXT2 and EXT4 read copyreg's process-wide cache without asking `find_class`. Here they are unknown.
    - BYTEARRAY8 allocates the size that the file states before it reads. Here it returns bytes.
    - Dictionaries and sets hash their keys. Tuples nested twice in each other would take forever, and a million levels
      would crash the process. Here a key that is not a plain value is skipped.
    """

    dispatch = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if bytes([code]) not in (pickle.EXT1, pickle.EXT2, pickle.EXT4)
    }

    def __init__(self, file: IO[bytes]):
        # Text written by Python 2 may be raw bytes (numpy scalars); it must not fail
        super().__init__(file, encoding="utf-8", errors="surrogateescape")
        self.roots: dict[str, Storage] = {}

    def _drop_state(self) -> None:
        self.stack.pop()

    def _set_items(self) -> None:
        items = self.pop_mark()
        self._set(zip(items[::2], items[1::2], strict=False))

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([(key, value)])

    def _set(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        for key, value in pairs:
            if type(key) in PLAIN:
                self.stack[-1][key] = value

    def _make_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set(zip(items[::2], items[1::2], strict=False))

    def _add_items(self) -> None:
        items = self.pop_mark()
        self.stack[-1].update([item for item in items if type(item) in PLAIN])

    def _make_frozenset(self) -> None:
        self.append(frozenset(item for item in self.pop_mark() if type(item) in PLAIN))

    dispatch[pickle.BUILD[0]] = _drop_state
    dispatch[pickle.SETITEM[0]] = _set_item
    dispatch[pickle.SETITEMS[0]] = _set_items
    dispatch[pickle.DICT[0]] = _make_dict
    dispatch[pickle.ADDITEMS[0]] = _add_items
    dispatch[pickle.FROZENSET[0]] = _make_frozenset
    dispatch[pickle.BYTEARRAY8[0]] = dispatch[pickle.BINBYTES8[0]]

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.cuda", "torch.storage") and name in STORAGES:
            return STORAGES[name]
        return KNOWN.get((module, name), Inert)

    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is not tuple or len(pid) < 5 or pid[0] != "storage" or not isinstance(pid[1], torch.dtype):
            return Inert()  # a module's source, or a type of storage that holds no weights
        _, dtype, key, _, size, *view = pid
        if type(key) is not str or type(size) is not int or size < 0:
            raise pickle.UnpicklingError(f"a storage with key {reprlib.repr(key)} and {reprlib.repr(size)} elements")
        self.roots[key] = Storage(dtype, key, 0, size)
        if not view or view[0] is None:
            return self.roots[key]
        _, start, view_size = view[0]
        if any(type(n) is not int or n < 0 for n in (start, view_size)) or start + view_size > size:
            raise pickle.UnpicklingError(f"a view of {reprlib.repr(view_size)} elements in a storage of {size}")
        return Storage(dtype, key, start, view_size)
