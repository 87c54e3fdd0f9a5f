"""weights/files.py: files of torch and safetensors are read correctly; functions named in a file are never called."""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import io
import itertools
import os
import pickle
import re
import sys
import tarfile
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import save_file

from checkpointing import files
from common.errors import ConfigError
from weights.files import open_weights

FORMATS = {"zip": True, "legacy": False}
DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]


def save(content, path, zipped: bool = True):
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    return path


def some_tensors() -> dict[str, torch.Tensor]:
    base = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    tensors = {f"as.{dtype}": (base * 9).to(getattr(torch, dtype)) for dtype in DTYPES}
    tensors |= {"transposed": base.T, "a view": base[2:4, 1:5], "shares its storage": base[1]}
    tensors |= {"parameter": torch.nn.Parameter(base.clone()), "with attributes": torch.ones(2)}
    tensors["with attributes"].note = tensors["parameter"].note = "x"
    return {**tensors, "scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "spread": torch.ones(1).expand(3, 2)}


def assert_same(file, expected):
    assert {name: (t.dtype, tuple(t.shape)) for name, t in expected.items()} == dict(file.entries)
    for name, tensor in expected.items():
        read = file.tensor(name)
        assert read.dtype == tensor.dtype and read.device.type == "cpu" and not read.requires_grad
        assert torch.equal(read, tensor.detach()), name


@pytest.mark.parametrize("zipped", FORMATS.values(), ids=FORMATS)
def test_what_torch_saves_is_read_as_it_was_in_both_formats(tmp_path, zipped):
    """A state_dict is taken where there is one, with all that an ordered dict carries."""
    tensors = some_tensors()
    assert_same(open_weights(save(tensors, tmp_path / "w.safetensors", zipped)), tensors)  # whatever the suffix
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    content = {"epoch": 3, "beside": torch.zeros(1), "state_dict": module.state_dict(), "optimizer_states": [{}]}
    assert_same(open_weights(save(content, tmp_path / "w.ckpt", zipped)), module.state_dict())


def test_safetensors_are_read_as_they_were_whatever_the_suffix(tmp_path):
    tensors = {name: t for name, t in some_tensors().items() if name.startswith("as.") or name in ("scalar", "empty")}
    for name in ("w.safetensors", "w.ckpt", "blob"):
        save_file(tensors, tmp_path / name)
        assert_same(open_weights(tmp_path / name), tensors)


# --- what is read ---


def test_opening_reads_no_tensor(tmp_path):
    """Sixteen MiB in each format that is mapped: opened in a fraction of that memory."""
    tensors = {"big": torch.ones(2**22)}
    save(tensors, tmp_path / "w.pt")
    save_file(tensors, tmp_path / "w.safetensors")
    for name in ("w.pt", "w.safetensors"):
        before = resident_bytes()
        file = open_weights(tmp_path / name)
        assert file.entries == {"big": (torch.float32, (2**22,))} and resident_bytes() - before < 2**23
        assert torch.equal(file.tensor("big"), tensors["big"])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def lightning_like() -> types.ModuleType:
    """A module that is there when a trainer pickles its objects, and gone when they are read."""
    module = types.ModuleType("gone_lightning")
    source = """
class Callback:
    def __init__(self): self.best, self.path = 0.5, 'x'
class WithState(Callback):
    def __getstate__(self): return ({'a': 1}, {'b': 2})
    def __setstate__(self, state): raise SystemError('code of the file ran')
class AttributeDict(dict): pass
class Kind(__import__('enum').Enum): FIT = 'fit'
"""
    exec(source, module.__dict__)
    return module


def test_tensors_beside_pickled_trainer_objects_are_read_though_their_classes_are_gone(tmp_path, monkeypatch):
    module = lightning_like()
    monkeypatch.setitem(sys.modules, "gone_lightning", module)
    objects = [module.Callback(), module.WithState(), module.AttributeDict(a=1), module.Kind.FIT, tmp_path]
    objects += [np.float64(2.0), np.arange(3), {1, 2}, b"bytes", collections.defaultdict(list, a=[1]), range(3)]
    objects += [collections.Counter("aab"), torch.Size([2]), torch.float16, argparse.Namespace(a=1), slice(1, 2)]
    content = {"callbacks": {module.Callback: objects}, "hyper_parameters": objects}
    path = save({**content, "state_dict": {"a": torch.arange(4.0)}}, tmp_path / "w.ckpt")
    monkeypatch.delitem(sys.modules, "gone_lightning")
    registered = set(torch.serialization.get_safe_globals())  # torch gives them in any order
    assert_same(open_weights(path), {"a": torch.arange(4.0)})
    assert "gone_lightning" not in sys.modules and set(torch.serialization.get_safe_globals()) == registered


# --- what is not run ---


class Calls:
    """Pickles as a call of `function` with `arguments`, and a state."""

    def __init__(self, function, *arguments, state=None):
        self.parts = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self):
        return self.parts

    def __call__(self):
        raise AssertionError("only so that it may stand in a function's place")


def write_zip(path, data: bytes):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {"data.pkl": data, "version": b"3\n", "byteorder": b"little"}.items():
            archive.writestr(f"archive/{name}", content)
    return path


def attacks(mark: str) -> dict[str, object]:
    """Objects whose unpickling by Python's own unpickler makes the file `mark`."""
    touch, command = f"open({mark!r}, 'w').close()", f"touch {mark}"
    inner = io.BytesIO()
    torch.save(Calls(os.system, command), inner, _use_new_zipfile_serialization=False)
    return {
        "os.system": Calls(os.system, command),
        "eval": Calls(eval, touch),
        "getattr": Calls(Calls(getattr, Calls(__import__, "os"), "system"), command),
        "partial": Calls(Calls(functools.partial, os.system), command),
        "partial state": Calls(Calls(functools.partial, len, state=(os.system, (command,), {}, None))),
        "load from bytes": Calls(torch.storage._load_from_bytes, inner.getvalue()),
        "pickle.loads": Calls(pickle.loads, pickle.dumps(Calls(os.system, command))),
        "open": Calls(open, mark, "w"),
        "map": Calls(list, Calls(map, os.system, [command])),
        "type with a method": Calls(Calls(type, "X", (), {"__init__": Calls(eval, f"lambda self: {touch}")})),
    }


@pytest.mark.parametrize("name", attacks("x"))
def test_what_a_file_says_to_call_is_not_called(tmp_path, name):
    """Next to tensors, in the place of one, of a name, and of the whole: it is passed over, or the file is refused."""
    mark = tmp_path / "it_ran"
    attack, tensor = attacks(str(mark))[name], torch.arange(3)
    with contextlib.suppress(Exception):
        pickle.loads(pickle.dumps(attack))
    assert mark.exists()  # it is an attack on Python's own unpickler
    mark.unlink()
    contents = ({"beside": attack, "a": tensor}, {attack: 1, "a": tensor}, {"state_dict": attack}, [attack], attack)
    for content, zipped in itertools.product(contents, FORMATS.values()):
        path = save(content, tmp_path / "w.ckpt", zipped)
        try:
            assert_same(open_weights(path), {"a": tensor})
        except ValueError as error:
            assert str(error).startswith(f"{path}: ") and "\n" not in str(error) and len(str(error)) < 500
        assert not mark.exists()


def opcodes(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


HAND_MADE = {
    "a dotted name": lambda command: opcodes(text("os"), text("path.os.system"), b"\x93", text(command), b"\x85R"),
    "a name with Storage": lambda command: opcodes(text("os"), text("system.Storage"), b"\x93", text(command), b"\x85R"),
    "through an allowed module": lambda command: opcodes(
        text("collections"), text("_sys.modules"), b"\x93", text("os"), b"\x86R", text(command), b"\x85R"
    ),
    "INST": lambda command: b"(S'" + command.encode() + b"'\nios\nsystem\n.",
    "OBJ": lambda command: b"(cos\nsystem\nS'" + command.encode() + b"'\no.",
    "NEWOBJ": lambda command: opcodes(b"cos\nsystem\n", text(command), b"\x85\x81"),
    "NEWOBJ_EX": lambda command: opcodes(b"cos\nsystem\n", text(command), b"\x85}\x92"),
    "NEWOBJ of what a call gave": lambda command: opcodes(b"cos\nsystem\n)R", text(command), b"\x85\x81"),
    "Python 2's names": lambda command: b"c__builtin__\neval\n(S'__import__(\"os\").system(\"%s\")'\ntR." % command.encode(),
    "a rebuild function's defaults": lambda command: opcodes(
        b"ctorch._utils\n_rebuild_tensor_v2\nN}", text("__defaults__"), b"(cos\nsystem\nt", b"s\x86b"
    ),
    "a rebuild function in a rebuild function": lambda command: opcodes(
        b"ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\nN(", text(command), b"tNtR"
    ),
    "state of the dictionary's class": lambda command: opcodes(
        b"ccollections\nOrderedDict\n}", text("update"), b"cos\nsystem\nsb"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HAND_MADE)
def test_hand_made_opcodes_run_nothing_and_change_nothing(tmp_path, name):
    mark = tmp_path / "it_ran"
    defaults = torch._utils._rebuild_tensor_v2.__defaults__
    with pytest.raises(ValueError, match="w.ckpt: "):
        open_weights(write_zip(tmp_path / "w.ckpt", HAND_MADE[name](f"touch {mark}")))
    assert not mark.exists() and torch._utils._rebuild_tensor_v2.__defaults__ == defaults


def test_no_name_in_a_pickle_is_imported_no_program_run_and_no_tar_file_unpacked(tmp_path, monkeypatch):
    """torch.load would unpack torch 0.1's tar format to disk, where a link in it can lead anywhere."""
    (tmp_path / "payload_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    data = opcodes(b"cpayload_module\nx\n)R")
    assert refused(write_zip(tmp_path / "w.ckpt", data)).startswith("holds an object with its own code")
    assert "payload_module" not in sys.modules
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "w.pt")
    assert refused(tmp_path / "w.pt").startswith("is a TorchScript program, not weights. ")
    with tarfile.open(tmp_path / "w.pt", "w") as tar:
        tar.add(__file__, "storages")
    assert "tar format" in unreadable(tmp_path / "w.pt")


# --- what is said ---


def refused(path) -> str:
    with pytest.raises(ValueError) as caught:
        open_weights(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{path}: ")


def unreadable(path) -> str:
    """Return the cause that the message for a file of no known format names."""
    known = "Known: safetensors and files of torch.save. It may be damaged: fetch it again."
    return re.fullmatch(rf"cannot be read as a weights file \((.*)\)\. {re.escape(known)}", refused(path))[1]


def test_a_file_of_another_kind_or_cut_short_is_refused(tmp_path):
    missing = "there is no such file. Give a weights file (.safetensors, .ckpt, .pt, .bin)."
    assert refused(tmp_path / "none.ckpt") == refused(tmp_path) == missing
    path, end = tmp_path / "w.safetensors", "Fetch the file itself (or run: git lfs pull)."
    for content, begin in (
        ("<!DOCTYPE html>\n<html><body>Sign in</body>", "<!DOCTYPE html> <html><body>Sign in</bod"),
        ("", ""),
    ):
        path.write_text(content)
        assert refused(path) == f"is text, not weights: it begins '{begin}'. {end}"
    for content in (b"\x89PNG\r\n\x1a\n" + bytes(64), pickle.dumps({"a": 1})):
        path.write_bytes(content)
        unreadable(path)
    np.savez(tmp_path / "w.npz", a=np.arange(3), b=np.arange(3))
    unreadable(tmp_path / "w.npz")
    for zipped in FORMATS.values():
        whole = save(some_tensors(), path, zipped).read_bytes()
        for left in (-4, 1500, 200):
            path.write_bytes(whole[:left])
            unreadable(path)
    save_file({"a": torch.arange(9.0), "b": torch.arange(5.0)}, path)
    whole = path.read_bytes()
    for content in (*(whole[:left] for left in (4, 12, -7)), whole[:8] + b"{" * 6 + whole[14:], bytes(range(256))):
        path.write_bytes(content)
        assert "SafetensorError: " in unreadable(path)


def repack(path: Path, change) -> Path:
    """Write a zip file's records again as (name in its folder, content) -> (content, compression); None: leave it out."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, *change(name.partition("/")[2], content))
    return path


@pytest.mark.parametrize("name", ["byteorder", "version", ".data/serialization_id", "data/0"])
def test_a_record_that_inflates_is_refused_before_it_is_read(name, tmp_path):
    """In published weights, and in a run's checkpoint. 16 MiB are 16 kB in the file; it could as well be gigabytes."""

    def inflate(path: Path) -> Path:
        packed = (bytes(2**24), zipfile.ZIP_DEFLATED)
        return repack(path, lambda record, content: packed if record == name else (content, zipfile.ZIP_STORED))

    text = refused(inflate(save({"a": torch.arange(5.0)}, tmp_path / "w.ckpt")))
    sizes = r"1\d,\d{3} bytes for 16,777,216\. torch.save compresses none"
    assert re.match(rf"its record w/{re.escape(name)} is compressed, {sizes}", text)
    content = inflate(save({"schema": 1, "a": torch.arange(5.0)}, tmp_path / "c.pt")).read_bytes()
    path = tmp_path / f"full-ba000000000001-{xxhash.xxh3_128(content).hexdigest()}.pt"
    path.write_bytes(content)
    assert files.is_whole(path)
    with pytest.raises(ConfigError, match=rf"^{path}: .*/{re.escape(name)} is compressed, "):
        files.read_checkpoint(path)


@pytest.mark.parametrize("new", [b"K\x06\x85", b"J\xff\xff\xff\xff\x85", b"N\x85", b"]\x85"])
def test_a_shape_that_is_impossible_or_longer_than_its_storage_is_refused(tmp_path, new):
    """The shape (5,) becomes another one: torch would read beyond the end."""

    def change(record: str, content: bytes) -> tuple[bytes]:
        assert record != "data.pkl" or b"K\x05\x85" in content
        return (content.replace(b"K\x05\x85", new) if record == "data.pkl" else content,)

    unreadable(repack(save({"a": torch.arange(5.0)}, tmp_path / "w.ckpt"), change))


def test_random_damage_is_always_a_sentence(tmp_path):
    """Whatever a byte is changed to: it is read, or refused with a message; nothing else is raised."""
    generator, outcomes, path = np.random.default_rng(0), collections.Counter(), tmp_path / "w"
    tensors = {"a": torch.arange(5.0), "b": torch.ones(2, 3)}
    pickled = {"state_dict": tensors, "x": argparse.Namespace(a=1)}
    wholes = [save(pickled, path, zipped).read_bytes() for zipped in FORMATS.values()]
    save_file(tensors, path)
    for whole, _ in itertools.product((*wholes, path.read_bytes()), range(200)):
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
    assert min(outcomes["read"], outcomes["refused"]) > 30, outcomes
