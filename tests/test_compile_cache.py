"""training/speed.py: libraries of a real compiler that a killed process has left cut off in inductor's cache."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from filelock import FileLock

from training.speed import remove_unfinished_libraries


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_a_library_that_was_cut_off_is_removed_and_a_whole_one_stays(cache, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache / "none"))
        remove_unfinished_libraries()
    source, whole = cache / "key.main.cpp", cache / "key.main.so"
    source.write_text('extern "C" int one() { return 1; }\n')
    subprocess.run(["g++", "-shared", "-fPIC", "-o", whole, source], check=True)
    content = whole.read_bytes()
    (cache / "key.py").touch()  # no library
    zeros = b"\0" * len(content)  # as a linker begins that maps its output
    for cut in (b"", content[:10], content[:64], content[: len(content) // 2], content[:-1], zeros):
        path = cache / "bb" / "cut.main.so"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(cut)
        remove_unfinished_libraries()
        output = f"compile: {path} was cut off when an earlier process was killed. It is removed, and compiled again.\n"
        assert not path.exists() and capsys.readouterr().err == output
    assert ctypes.CDLL(str(whole)).one() == 1 and whole.read_bytes() == content and source.exists()


def test_a_library_that_another_process_builds_now_is_left_to_it(cache, capsys):
    (cache / "locks").mkdir()
    half = cache / "key.main.so"
    half.write_bytes(b"\x7fELF")
    with FileLock(cache / "locks" / "key.lock"):  # as _worker_compile_cpp holds it while g++ runs
        remove_unfinished_libraries()
    assert half.exists() and capsys.readouterr().err == ""
    remove_unfinished_libraries()
    assert not half.exists()


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


@pytest.mark.long
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
