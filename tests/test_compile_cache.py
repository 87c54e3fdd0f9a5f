"""training/compile_cache.py: libraries of a real compiler that a killed process has left cut off in inductor's cache."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, tree
from filelock import FileLock

from training.compile_cache import remove_unfinished_libraries


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_a_library_that_was_cut_off_is_removed_and_a_whole_one_stays(cache, capsys):
    source, whole = cache / "aa" / "key.main.cpp", cache / "aa" / "key.main.so"
    source.parent.mkdir()
    source.write_text('extern "C" int one() { return 1; }\n')
    subprocess.run(["g++", "-shared", "-fPIC", "-o", whole, source], check=True)
    content = whole.read_bytes()
    (cache / "aa" / "key.py").touch()  # no library
    remove_unfinished_libraries()
    assert ctypes.CDLL(str(whole)).one() == 1 and capsys.readouterr().err == ""
    for number, size in enumerate((0, 10, 64, len(content) // 2, len(content) - 1)):
        cut = cache / "bb" / f"cut{number}.main.so"
        cut.parent.mkdir(exist_ok=True)
        cut.write_bytes(content[:size])
        remove_unfinished_libraries()
        said = f"compile: {cut} was cut off when an earlier process was killed. It is removed, and compiled again.\n"
        assert not cut.exists() and capsys.readouterr().err == said
    zeros = cache / "bb" / "zeros.so"  # as a linker begins that maps its output
    zeros.write_bytes(b"\0" * len(content))
    remove_unfinished_libraries()
    assert not zeros.exists() and whole.read_bytes() == content and source.exists()


def test_a_library_that_another_process_builds_now_is_left_to_it(cache, capsys):
    (cache / "locks").mkdir()
    half = cache / "key.main.so"
    half.write_bytes(b"\x7fELF")
    with FileLock(cache / "locks" / "key.lock"):  # as _worker_compile_cpp holds it while g++ runs
        remove_unfinished_libraries()
    assert half.exists() and capsys.readouterr().err == ""
    remove_unfinished_libraries()
    assert not half.exists()


def test_without_a_cache_there_is_nothing_to_do(cache, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache / "none"))
    remove_unfinished_libraries()
    assert tree(cache) == {}


COMPILE = """
import torch
from torch import nn
from training import speed
class Denoiser(nn.Module):  # dynamo passes over torch's own modules
    def forward(self, x):
        return x.sin() * 2
model = type("Model", (), {"denoiser": Denoiser(), "frozen": {}, "replays_graphs": False})
speed.denoiser_parts = lambda denoiser, how: [denoiser]
speed.compile_networks(model, speed.SpeedKeys(compile="whole"))
print(model.denoiser(torch.ones(1, 8)).shape)
"""


@pytest.mark.slow
@pytest.mark.timeout(600, func_only=True)
def test_inductor_compiles_again_what_was_cut_off(cache):
    def compiled() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", COMPILE], cwd=ROOT, capture_output=True, text=True, timeout=500)

    assert compiled().stdout == "torch.Size([1, 8])\n"
    libraries = sorted(cache.rglob("*.so"))
    assert libraries
    for path in libraries:
        path.write_bytes(path.read_bytes()[:100])
    again = compiled()
    assert again.stdout == "torch.Size([1, 8])\n"
    removed = [line.split(" ")[1] for line in again.stderr.splitlines() if line.startswith("compile: ")]
    assert sorted(removed) == list(map(str, libraries))
