"""weights/files.py: files of torch and safetensors are read correctly; functions named in a file are never called."""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import pickle
import re
import struct
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import save_file

from cli.errors import ConfigError
from record import checkpoint_files
from weights.files import LEGACY_MAGIC, open_weights
from weights.restricted_pickle import RestrictedUnpickler

FORMATS = {"zip": True, "legacy": False}
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def save(content, path, zipped: bool = True, protocol: int = 2):
    torch.save(content, path, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    return path


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(6, 8, generator=generator)
    tensors = {f"as.{dtype}": (base * 9).to(dtype) for dtype in DTYPES}
    return {
        **tensors,
        "transposed": base.T,
        "a view": base[2:4, 1:5],
        "shares its storage": base[1],
        "parameter": torch.nn.Parameter(base.clone()),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "spread": torch.ones(1).expand(3, 2),
    }


def assert_same(file, expected):
    assert {name: (t.dtype, tuple(t.shape)) for name, t in expected.items()} == dict(file.entries)
    for name, tensor in expected.items():
        read = file.tensor(name)
        assert read.dtype == tensor.dtype and read.device.type == "cpu" and not read.requires_grad
        assert torch.equal(read, tensor.detach()), name


# --- what is read ---


@pytest.mark.parametrize("zipped", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("protocol", range(1, 6))
def test_what_torch_saves_is_read_as_it_was_in_both_formats_and_every_pickle_protocol(tmp_path, zipped, protocol):
    tensors = some_tensors()
    assert_same(open_weights(save(tensors, tmp_path / "w.pt", zipped, protocol)), tensors)


def test_safetensors_are_read_as_they_were_whatever_the_suffix(tmp_path):
    tensors = {name: t for name, t in some_tensors().items() if name.startswith("as.") or name in ("scalar", "empty")}
    for name in ("w.safetensors", "w.ckpt", "blob"):
        save_file(tensors, tmp_path / name)
        assert_same(open_weights(tmp_path / name), tensors)


@pytest.mark.parametrize("zipped", FORMATS.values(), ids=FORMATS)
def test_content_decides_not_the_suffix(tmp_path, zipped):
    path = save({"a": torch.arange(3)}, tmp_path / "w.safetensors", zipped)
    assert open_weights(path).tensor("a").tolist() == [0, 1, 2]


@pytest.mark.parametrize("zipped", FORMATS.values(), ids=FORMATS)
def test_the_state_dict_is_taken_where_there_is_one_with_all_that_an_ordered_dict_carries(tmp_path, zipped):
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    content = {"epoch": 3, "beside": torch.zeros(1), "state_dict": module.state_dict(), "optimizer_states": [{}]}
    assert_same(open_weights(save(content, tmp_path / "w.ckpt", zipped)), module.state_dict())


def test_a_parameter_with_attributes_is_a_tensor_like_others(tmp_path):
    with_attributes, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(3))
    with_attributes.note, parameter.note = "x", "y"
    expected = {"tensor": with_attributes, "parameter": parameter}
    assert_same(open_weights(save(expected, tmp_path / "w.pt")), expected)


def test_opening_reads_no_tensor(tmp_path):
    """A gibibyte of float32 that is a hole on the disk: opened in the memory of its name."""
    path = tmp_path / "w.pt"
    header = io.BytesIO()
    torch.save({"big": torch.zeros(4)}, header, _use_new_zipfile_serialization=False)
    content = header.getvalue()
    count = b"J" + struct.pack("<i", 2**28)
    head = content[: -8 - 16].replace(b"K\x04Nt", count + b"Nt").replace(b"K\x04\x85", count + b"\x85")
    with open(path, "wb") as file:
        file.write(head + struct.pack("<q", 2**28))
        file.truncate(file.tell() + 2**30)
    assert open_weights(path).entries == {"big": (torch.float32, (2**28,))}


def lightning_like() -> types.ModuleType:
    """A module that is there when a trainer pickles its objects, and gone when they are read."""
    module = types.ModuleType("gone_lightning")
    source = """
import enum
class Callback:
    def __init__(self): self.best, self.path = 0.5, 'x'
class WithState(Callback):
    def __getstate__(self): return ({'a': 1}, {'b': 2})
    def __setstate__(self, state): raise SystemError('code of the file ran')
class Slots:
    __slots__ = ('a',)
    def __init__(self): self.a = [1]
class Reduced:
    def __reduce__(self): return (Callback, (), {'s': 1}, iter([1, 2]), iter([('k', 'v')]))
class Params(dict): pass
class Many(list): pass
class Named:
    def __new__(cls, *, key): return super().__new__(cls)
    def __getnewargs_ex__(self): return (), {'key': 1}
class Kind(enum.Enum):
    FIT = 'fit'
"""
    exec(source, module.__dict__)
    return module


@pytest.mark.parametrize("zipped", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("protocol", range(2, 6))
def test_tensors_beside_pickled_trainer_objects_are_read_though_their_classes_are_gone(
    tmp_path, monkeypatch, zipped, protocol
):
    module = lightning_like()
    monkeypatch.setitem(sys.modules, "gone_lightning", module)
    objects = [
        module.Callback(),
        module.WithState(),
        module.Slots(),
        module.Params(a=1),
        module.Many([1, 2]),
        module.Kind.FIT,
    ]
    objects += [
        module.Reduced(),
        module.Named(key=1),
        argparse.Namespace(a=1),
        np.float64(2.0),
        np.arange(3),
        {1, 2},
        b"bytes",
    ]
    objects += [
        collections.defaultdict(list, a=[1]),
        collections.Counter("aab"),
        torch.Size([2]),
        torch.float16,
        complex(1, 2),
    ]
    objects += [slice(1, 2), range(3), tmp_path, frozenset("a"), torch.nn.Linear(2, 2), torch.device("cpu"), Ellipsis]
    content = {
        "callbacks": {module.Callback: objects},
        "hyper_parameters": objects,
        "state_dict": {"a": torch.arange(4.0)},
    }
    path = save(content, tmp_path / "w.ckpt", zipped, protocol)
    monkeypatch.delitem(sys.modules, "gone_lightning")
    assert_same(open_weights(path), {"a": torch.arange(4.0)})
    assert "gone_lightning" not in sys.modules


# --- what is not run ---


class Calls:
    """Pickles as a call of `function` with `arguments`, and a state."""

    def __init__(self, function, *arguments, state=None):
        self.parts = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self):
        return self.parts

    def __call__(self):
        raise AssertionError("only so that it may stand in a function's place")


def write_zip(path, data: bytes, storages: dict[str, bytes] | None = None):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        for key, content in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", content)
    return path


def attacks(mark: str) -> dict[str, object]:
    """Objects whose unpickling by Python's own unpickler makes the file `mark`."""
    import builtins
    import functools
    import os
    import runpy
    import subprocess
    import timeit

    touch = f"open({mark!r}, 'w').close()"
    inner = io.BytesIO()
    torch.save(Calls(os.system, f"touch {mark}"), inner, _use_new_zipfile_serialization=False)
    return {
        "os.system": Calls(os.system, f"touch {mark}"),
        "eval": Calls(builtins.eval, touch),
        "exec": Calls(builtins.exec, touch),
        "getattr": Calls(Calls(getattr, Calls(__import__, "os"), "system"), f"touch {mark}"),
        "partial": Calls(Calls(functools.partial, os.system), f"touch {mark}"),
        "partial state": Calls(Calls(functools.partial, len, state=(os.system, (f"touch {mark}",), {}, None))),
        "load from bytes": Calls(torch.storage._load_from_bytes, inner.getvalue()),
        "pickle.loads": Calls(pickle.loads, pickle.dumps(Calls(os.system, f"touch {mark}"))),
        "subprocess": Calls(subprocess.call, ["touch", mark]),
        "timeit": Calls(timeit.timeit, touch, "pass", timeit.default_timer, 1),
        "runpy": Calls(runpy._run_code, touch, {}),
        "open": Calls(open, mark, "w"),
        "map": Calls(list, Calls(map, os.system, [f"touch {mark}"])),
        "type with a method": Calls(Calls(type, "X", (), {"__init__": Calls(eval, f"lambda self: {touch}")})),
    }


@pytest.mark.parametrize("name", attacks("x"))
@pytest.mark.parametrize("zipped", FORMATS.values(), ids=FORMATS)
def test_what_a_file_says_to_call_is_not_called(tmp_path, name, zipped):
    mark = tmp_path / "it_ran"
    attack = attacks(str(mark))[name]
    with contextlib.suppress(Exception):
        pickle.loads(pickle.dumps(attack))
    assert mark.exists()  # it is an attack on Python's own unpickler
    mark.unlink()
    for protocol in range(6):
        path = save({"beside": attack, "a": torch.arange(3)}, tmp_path / "w.ckpt", zipped, protocol)
        if protocol == 0:  # in which torch's ids of storages have no meaning, to torch either
            with pytest.raises(ValueError, match="w.ckpt: (holds no tensors by name|cannot be read as)"):
                open_weights(path)
        else:
            assert_same(open_weights(path), {"a": torch.arange(3)})
        assert not mark.exists()


@pytest.mark.parametrize("name", ["os.system", "eval", "getattr", "load from bytes"])
def test_an_attack_in_the_place_of_a_tensor_a_name_or_the_whole_is_refused_or_passed_over(tmp_path, name):
    mark = tmp_path / "it_ran"
    attack = attacks(str(mark))[name]
    for content in (attack, {"a": attack}, [attack], {"state_dict": attack}):
        with pytest.raises(ValueError, match="holds"):
            open_weights(save(content, tmp_path / "w.ckpt"))
    assert_same(open_weights(save({attack: 1, "a": torch.ones(1)}, tmp_path / "w.ckpt")), {"a": torch.ones(1)})
    legacy = tmp_path / "old.pt"
    legacy.write_bytes(pickle.dumps(LEGACY_MAGIC) + pickle.dumps(1001) + pickle.dumps(attack))
    with pytest.raises(ValueError, match=f"^{legacy}: "):  # each of the five pickles of the old format is read so
        open_weights(legacy)
    legacy.write_bytes(pickle.dumps(attack))
    with pytest.raises(ValueError, match=f"^{legacy}: is a pickle without tensors of torch's."):
        open_weights(legacy)
    assert not mark.exists()


def opcodes(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


HAND_MADE = {
    "a dotted name": lambda mark: opcodes(text("os"), text("path.os.system"), b"\x93", text(f"touch {mark}"), b"\x85R"),
    "a name with Storage": lambda mark: opcodes(text("os"), text("system.Storage"), b"\x93", text(f"touch {mark}"), b"\x85R"),
    "through an allowed module": lambda mark: opcodes(
        text("collections"), text("_sys.modules"), b"\x93", text("os"), b"\x86R", text(f"touch {mark}"), b"\x85R"
    ),
    "INST": lambda mark: b"(S'touch " + str(mark).encode() + b"'\nios\nsystem\n.",
    "OBJ": lambda mark: b"(cos\nsystem\nS'touch " + str(mark).encode() + b"'\no.",
    "NEWOBJ": lambda mark: opcodes(b"cos\nsystem\n", text(f"touch {mark}"), b"\x85\x81"),
    "NEWOBJ_EX": lambda mark: opcodes(b"cos\nsystem\n", text(f"touch {mark}"), b"\x85}\x92"),
    "NEWOBJ of what a call gave": lambda mark: opcodes(b"cos\nsystem\n)R", text(f"touch {mark}"), b"\x85\x81"),
    "Python 2's names": lambda mark: b"c__builtin__\neval\n(S'open(\"" + str(mark).encode() + b"\", \"w\")'\ntR.",
    "a rebuild function's defaults": lambda mark: opcodes(
        b"ctorch._utils\n_rebuild_tensor_v2\nN}", text("__defaults__"), b"(cos\nsystem\nt", b"s\x86b"
    ),
    "a rebuild function in a rebuild function": lambda mark: opcodes(
        b"ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\nN(", text(f"touch {mark}"), b"tNtR"
    ),
    "state of the dictionary's class": lambda mark: opcodes(
        b"ccollections\nOrderedDict\n}", text("update"), b"cos\nsystem\nsb"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HAND_MADE)
def test_hand_made_opcodes_run_nothing_and_change_nothing(tmp_path, name):
    from weights import restricted_pickle

    mark = tmp_path / "it_ran"
    before = [vars(known).copy() for known in restricted_pickle.KNOWN.values()]
    defaults = restricted_pickle._rebuild_tensor.__defaults__
    with pytest.raises(ValueError, match="w.ckpt: "):
        open_weights(write_zip(tmp_path / "w.ckpt", HAND_MADE[name](mark)))
    assert not mark.exists()
    assert [vars(known) for known in restricted_pickle.KNOWN.values()] == before
    assert restricted_pickle._rebuild_tensor.__defaults__ == defaults


PAIRS = b"".join(b"2\x86" for _ in range(60))  # (x, x) of (x, x) ...: 2**60 leaves
DEEP = b"\x85" * 400_000  # ((((...)))): hashing half as many uses up a stack of 8 MiB


@pytest.mark.parametrize(
    ("nested", "around"),
    [
        (PAIRS, (b"}", b"K\x02s.")),  # a key, by SETITEM
        (DEEP, (b"}", b"K\x02s.")),
        (PAIRS, (b"}(", b"K\x02u.")),  # by SETITEMS
        (PAIRS, (b"(", b"K\x02d.")),  # by DICT
        (PAIRS, (b"\x8f(", b"\x90.")),  # in a set
        (PAIRS, (b"(", b"\x91.")),  # in a frozenset
        (PAIRS, (b"ccollections\nOrderedDict\n(((", b"K\x02ttt\x85R.")),  # by the dictionary's constructor
    ],
    ids=["item", "item, deep", "items", "dict", "set", "frozenset", "ordered"],
)
@pytest.mark.timeout(30)
def test_what_is_nested_is_never_hashed(tmp_path, nested, around):
    data = b"\x80\x04" + around[0] + b"K\x01" + nested + around[1]
    with pytest.raises(ValueError, match="w.ckpt: "):
        open_weights(write_zip(tmp_path / "w.ckpt", data))


@pytest.mark.parametrize("place", ["shape", "key", "size"])
@pytest.mark.timeout(30)
def test_what_is_nested_is_not_printed_in_full(tmp_path, place):
    nested = b"K\x01" + PAIRS
    key, size = (nested, b"K\x04") if place == "key" else (b"\x8c\x010", nested if place == "size" else b"K\x04")
    storage = b"(\x8c\x07storagectorch\nFloatStorage\n" + key + b"\x8c\x03cpu" + size + b"tQ"
    shape = nested + b"\x85" if place == "shape" else b"K\x04\x85"
    rebuilt = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00" + shape + b"K\x01\x85\x89}tR"
    data = b"\x80\x04}\x8c\x01a" + rebuilt + b"s."
    with pytest.raises(ValueError, match="w.ckpt: ") as error:
        open_weights(write_zip(tmp_path / "w.ckpt", data))
    assert len(str(error.value)) < 1000


def test_names_come_to_the_terminal_on_one_line_and_cut(tmp_path):
    torch.save({"a\x1b[31m\nb": 1, "c" * 10_000: 2}, tmp_path / "w.ckpt")
    with pytest.raises(ValueError) as error:
        open_weights(tmp_path / "w.ckpt")
    assert r"a\x1b[31m\nb" in str(error.value) and "\x1b" not in str(error.value) and len(str(error.value)) < 500


def test_extension_codes_are_not_looked_up(tmp_path):
    """The cache of copyreg would answer without asking which class may be found."""
    import copyreg
    import os

    mark = tmp_path / "it_ran"
    copyreg.add_extension("posix", "system", 0x7F)
    try:
        data = opcodes(b"\x82\x7f", text(f"touch {mark}"), b"\x85R")
        copyreg._extension_cache[0x7F] = os.system
        with pytest.raises(
            ValueError, match="w.ckpt: cannot be read as a weights file .KeyError: 130.*fetch it again.$"
        ):
            open_weights(write_zip(tmp_path / "w.ckpt", data))
    finally:
        copyreg.remove_extension("posix", "system", 0x7F)
        copyreg._extension_cache.pop(0x7F, None)
    assert not mark.exists()


def test_no_name_in_a_pickle_is_imported(tmp_path, monkeypatch):
    (tmp_path / "payload_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    data = opcodes(b"cpayload_module\nx\n)R")
    with pytest.raises(ValueError, match="holds an object with code of its own"):
        open_weights(write_zip(tmp_path / "w.ckpt", data))
    assert "payload_module" not in sys.modules


def test_only_what_rebuilds_tensors_is_found():
    unpickler = RestrictedUnpickler(io.BytesIO(b""))
    for module, name in (
        ("builtins", "dict"),
        ("torch", "load"),
        ("torch._utils", "_import_dotted_name"),
        ("torch", "Size"),
    ):
        assert unpickler.find_class(module, name).__name__ == "Inert"
    assert unpickler.find_class("collections", "OrderedDict")() == {}
    assert unpickler.find_class("torch", "HalfStorage") is torch.float16
    assert unpickler.find_class("torch", "UntypedStorage").__name__ == "Inert"


def test_a_torchscript_archive_is_refused_and_not_compiled(tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "w.pt")
    with pytest.raises(
        ValueError, match="w.pt: is a TorchScript program, not weights. Save the state_dict of what it holds.$"
    ):
        open_weights(tmp_path / "w.pt")


def test_a_tar_file_is_refused_and_not_unpacked(tmp_path):
    """torch.load would unpack torch 0.1's tar format to disk, where a link in it can lead anywhere."""
    import tarfile

    with tarfile.open(tmp_path / "w.pt", "w") as tar:
        tar.add(__file__, "storages")
    with pytest.raises(ValueError, match="w.pt: is not a weights file .* Known: safetensors and files of torch.save."):
        open_weights(tmp_path / "w.pt")


# --- what is said ---


def refused(path) -> str:
    with pytest.raises(ValueError) as caught:
        open_weights(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{path}: ")


def test_what_is_no_file_is_said(tmp_path):
    expected = "there is no such file. Give the path of a weights file (.safetensors, .ckpt, .pt, .bin)."
    assert refused(tmp_path / "none.ckpt") == expected
    assert refused(tmp_path) == "is a folder. Give the path of a weights file."
    (tmp_path / "e.ckpt").touch()
    assert refused(tmp_path / "e.ckpt") == "is empty (0 bytes). Fetch it again."


@pytest.mark.parametrize("name", ["w.ckpt", "w.safetensors"])
def test_what_a_failed_download_leaves_is_named(tmp_path, name):
    path = tmp_path / name
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5214865159\n")
    assert refused(path) == "is a git-LFS pointer of 72 bytes, not the file itself. Run: git lfs pull."
    path.write_text("<!DOCTYPE html>\n<html><body>Sign in</body></html>")
    assert refused(path) == (
        "is a web page, as a refused download leaves it, not weights: its 49 bytes begin "
        "'<!DOCTYPE html> <html><body>Sign in</bod'. Fetch the file itself."
    )
    path.write_text("Invalid username or password.")
    assert refused(path) == (
        "is a text file, not weights: its 29 bytes begin 'Invalid username or password.'. Fetch the file itself."
    )


def test_a_file_of_another_kind_is_named(tmp_path):
    path = tmp_path / "w.bin"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(64))
    assert refused(path) == (
        "is not a weights file (72 bytes that begin 89504e470d0a1a0a). Known: safetensors and files of torch.save. "
        "It may be damaged: fetch it again."
    )
    path.write_bytes(pickle.dumps({"a": 1}))
    assert refused(path) == "is a pickle without tensors of torch's. Known: safetensors and files of torch.save."
    np.savez(tmp_path / "w.npz", a=np.arange(3), b=np.arange(3))
    assert refused(tmp_path / "w.npz") == (
        "is a zip file that torch.save did not write (it holds a.npy, b.npy). Give the weights file in it."
    )


def test_a_zip_file_cut_short_is_named(tmp_path):
    path = save(some_tensors(), tmp_path / "w.ckpt")
    path.write_bytes(path.read_bytes()[:1500])
    assert refused(path) == (
        "is cut short or damaged: its 1,500 bytes begin as a zip file and have no directory at the end. Fetch it again."
    )


@pytest.mark.parametrize("left", [4, 12, 60, -7])
def test_safetensors_cut_short_are_named(tmp_path, left):
    path = tmp_path / "w.safetensors"
    save_file({"a": torch.arange(9.0), "b": torch.arange(5.0)}, path)
    path.write_bytes(path.read_bytes()[:left])
    said = refused(path)
    assert said.startswith("is cut short or damaged: no whole safetensors file in its ") and said.endswith(
        "Fetch it again."
    )


def test_garbled_safetensors_are_named(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"a": torch.arange(9.0)}, path)
    content = bytearray(path.read_bytes())
    content[8:14] = b"{{{{{{"
    path.write_bytes(content)
    assert refused(path).startswith(
        "is cut short or damaged: no whole safetensors file in its 100 bytes (SafetensorError: "
    )
    path.write_bytes(bytes(range(256)))
    assert refused(path).startswith("is cut short or damaged: no whole safetensors file in its 256 bytes")


def test_the_old_format_cut_short_names_the_first_tensor_that_is_not_there(tmp_path):
    path = save({"a": torch.arange(100.0), "b": torch.arange(100.0)}, tmp_path / "w.pt", zipped=False)
    whole = path.read_bytes()
    end = "tensors are not all there, the first is '{}'. Fetch it again."
    for left in (-4, -400, -404):  # within the second storage and the count before it, whosever it is
        path.write_bytes(whole[:left])
        said = refused(path)
        assert said in [f"is cut short or damaged: the bytes of 1 of 2 {end.format(name)}" for name in "ab"]
    for left in (-412, -814):
        path.write_bytes(whole[:left])
        assert refused(path) == f"is cut short or damaged: the bytes of 2 of 2 {end.format('a')}"
    path.write_bytes(whole[:200])
    assert refused(path) == (
        "cannot be read as a weights file (EOFError). Known: safetensors and files of torch.save. "
        "It may be damaged: fetch it again."
    )


def edited(path, old: bytes, new: bytes):
    """Change a zip file's pickle, with the checksum that fits."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            if name.endswith("data.pkl"):
                assert old in content
                content = content.replace(old, new)
            archive.writestr(name, content)
    return path


def compressed(path: Path, **records: bytes) -> Path:
    """Pack these records of a file of torch.save, new or not."""
    with zipfile.ZipFile(path) as archive:
        root = archive.namelist()[0].partition("/")[0]
        stored = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in stored.items():
            if name.partition("/")[2] not in records:
                archive.writestr(name, content)
        for name, content in records.items():
            archive.writestr(f"{root}/{name}", content, zipfile.ZIP_DEFLATED)
    return path


BOMB = bytes(2**24)
"""It may as well be of gigabytes: 16 MiB are 16 kB in the file."""


@pytest.mark.parametrize("name", ["byteorder", "version", ".format_version", ".data/serialization_id", "data/0"])
def test_a_record_that_inflates_is_refused_before_it_is_read(name, tmp_path):
    """In weights of others, and in a run's checkpoint."""
    weights = compressed(save({"a": torch.arange(5.0)}, tmp_path / "w.ckpt"), **{name: BOMB})
    end = "fetch another file."
    given = rf"its record w/{re.escape(name)} is compressed, 1\d,\d{{3}} bytes for 16,777,216\. torch.save compresses none: "
    said = refused(weights)
    assert re.match(given, said) and said.endswith(end)
    written = checkpoint_files.write(
        tmp_path, checkpoint_files.stem("full-ba", 1), {"schema": 1, "a": torch.arange(5.0)}
    )
    content = compressed(written, **{name: BOMB}).read_bytes()
    path = written.with_name(f"full-ba000000000001-{xxhash.xxh3_128(content).hexdigest()}.pt")
    path.write_bytes(content)
    assert checkpoint_files.is_whole(path)
    with pytest.raises(ConfigError) as caught:
        checkpoint_files.read(path)
    assert f"/{name} is compressed, " in str(caught.value) and str(caught.value).startswith(f"{path}: ")


def test_a_tensor_longer_than_its_storage_is_refused(tmp_path):
    """The shape (5,) becomes (6,): torch would read beyond the end."""
    path = edited(save({"a": torch.arange(5.0)}, tmp_path / "w.ckpt"), b"K\x05\x85", b"K\x06\x85")
    assert refused(path) == (
        "is damaged: 1 tensors cannot be, the first: 'a' of shape (6,) needs 6 elements of 5 stored. Fetch it again."
    )
    both = edited(path, b"K\x05t", b"K\x06t")  # now the storage claims to be as long: its record is not
    assert refused(both) == (
        "is cut short or damaged: the bytes of 1 of 1 tensors are not all there, the first is 'a'. Fetch it again."
    )


@pytest.mark.parametrize("new", [b"J\xff\xff\xff\xff\x85", b"N\x85", b"]\x85"])
def test_an_impossible_shape_is_refused(tmp_path, new):
    path = edited(save({"a": torch.arange(5.0)}, tmp_path / "w.ckpt"), b"K\x05\x85", new)
    assert refused(path).startswith("is damaged: 1 tensors cannot be, the first: 'a' has the impossible shape")


def test_damaged_bytes_are_found_when_a_tensor_is_read(tmp_path):
    path = save({"a": torch.arange(64.0)}, tmp_path / "w.ckpt")
    content = path.read_bytes()
    at = content.index(torch.arange(64.0).numpy().tobytes())
    path.write_bytes(content[:at] + b"\xff" + content[at + 1 :])
    with pytest.raises(
        ValueError, match="w.ckpt: tensor 'a' cannot be read .BadZipFile: Bad CRC-32.* Fetch the file again.$"
    ):
        open_weights(path).tensor("a")


def test_without_tensors_the_keys_are_listed(tmp_path):
    path = tmp_path / "w.ckpt"
    nested = {"model": {"a": torch.ones(1)}, "ema": {"a": torch.ones(1)}, "epoch": 3}
    assert refused(save(nested, path)) == (
        "holds no tensors by name: its keys are model, ema, epoch. Save the dictionary of tensors itself, "
        'or under "state_dict".'
    )
    assert refused(save({"state_dict": {"x": 1}, "a": torch.ones(1)}, path)) == (
        "holds no tensors there by name: its keys under state_dict are x. Save the dictionary of tensors itself, "
        'or under "state_dict".'
    )
    assert (
        refused(save([torch.ones(1)], path)) == "holds a list, no dictionary of tensors. Save the model's state_dict."
    )
    assert (
        refused(save(torch.ones(1), path)) == "holds one tensor, no dictionary of tensors. Save the model's state_dict."
    )
    assert refused(save(torch.nn.Linear(1, 1), path)) == (
        "holds an object with code of its own, no dictionary of tensors. Save the model's state_dict."
    )
    save_file({}, path)
    assert refused(path) == "holds no tensors. Give a file that does."


def test_a_type_that_is_not_read_is_named(tmp_path):
    header = b'{"a":{"dtype":"U64","shape":[1],"data_offsets":[0,8]}}'
    (tmp_path / "w.safetensors").write_bytes(struct.pack("<q", len(header)) + header + bytes(8))
    assert refused(tmp_path / "w.safetensors").startswith(
        "1 tensors have a type that is not read here, the first is a (U64). Known: F64, F32,"
    )


def test_random_damage_is_always_a_sentence(tmp_path):
    """Whatever a byte is changed to: it is read, or refused with a message; nothing else is raised."""
    generator = np.random.default_rng(0)
    tensors = {"a": torch.arange(5.0), "b": torch.ones(2, 3)}
    path = tmp_path / "w"
    wholes = []
    for zipped in FORMATS.values():
        wholes.append(save({"state_dict": tensors, "x": argparse.Namespace(a=1)}, path, zipped).read_bytes())
    save_file(tensors, path)
    wholes.append(path.read_bytes())
    outcomes = collections.Counter()
    for whole in wholes:
        for _ in range(300):
            content = bytearray(whole)
            for at in generator.integers(len(whole), size=3):
                content[at] = generator.integers(256)
            path.write_bytes(content)
            try:
                file = open_weights(path)
                for name in file.entries:
                    file.tensor(name)
                outcomes["read"] += 1
            except ValueError as error:
                assert str(error).startswith(f"{path}: ")
                outcomes["refused"] += 1
    assert min(outcomes["read"], outcomes["refused"]) > 50, outcomes
