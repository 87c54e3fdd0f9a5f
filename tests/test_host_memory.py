"""cli/host_memory.py: a tensor that follows a freed one gets its pages; a CPU's command sees to it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from conftest import ROOT

from training import device

COUNT = """
import resource
import torch
from cli.host_memory import keep_freed_memory

def pages():  # that ten tensors of 40 MiB, one after the other, get from the kernel
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(40 * 2**20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before, kept = pages(), keep_freed_memory()
pages()
print(before, kept, pages())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_memory_is_given_to_the_next_tensor_without_new_pages():
    """In a process of its own: this one would keep its memory from here on."""
    done = subprocess.run([sys.executable, "-c", COUNT], cwd=ROOT, capture_output=True, text=True, timeout=60)
    before, kept, after = done.stdout.split()
    assert int(before) > 1000 and kept == "True" and int(after) < 100, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU's command")
def test_a_command_on_a_cpu_keeps_its_memory(monkeypatch, same_number_of_threads):
    asked: list[bool] = []
    monkeypatch.setattr(device, "keep_freed_memory", lambda: asked.append(True))
    device.build_device("fp32")
    assert asked == [True]
