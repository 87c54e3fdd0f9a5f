"""The next epoch's order, made by a process of its own while this epoch is read: `python -m stages.order_ahead` is that one.

A thread would take turns with those that read (Python runs one at a time). The process has a low priority. It writes to
memory without a name (memfd), and ends when the pipe to it does: so nothing is left of it, however the run ends.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stages.shuffling import Array, Epoch, order_of

ROOT = Path(__file__).parents[1]
NICE = 19
LIMIT_SEC = 600.0  # that its end is waited for: 100 million samples take 7 s


class Ahead:
    """An order that is being made."""

    def __init__(self, epoch: Epoch):
        self.epoch = epoch
        self._memory = open(os.memfd_create("order"), "r+b")  # noqa: SIM115 (open until the order is taken)
        self._memory.write(epoch.sizes.tobytes())
        self._memory.seek(0)
        rest = {name: value for name, value in vars(epoch).items() if name != "sizes"}
        command = [sys.executable, "-m", "stages.order_ahead", str(self._memory.fileno()), json.dumps(rest)]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **threads},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(self._memory.fileno(),),
            process_group=0,  # a terminal's Ctrl-C is for the run alone, which may still take the order
        )

    def take(self) -> Array:
        """Wait for the order and return it; see `order_of`. Raises RuntimeError: it was not made, and why."""
        with contextlib.closing(self):
            try:
                self._process.wait(LIMIT_SEC)
            except subprocess.TimeoutExpired as error:
                raise RuntimeError(f"it took more than {LIMIT_SEC:.0f} s") from error
            assert self._process.stderr is not None
            if (code := self._process.returncode) != 0:
                said = self._process.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
                raise RuntimeError(said or f"its process ended with {code}")
            memory = mmap.mmap(self._memory.fileno(), 0, prot=mmap.PROT_READ)
            return np.frombuffer(memory, self.epoch.dtype)

    def close(self) -> None:
        """End the process, and let its memory go."""
        self._process.kill()
        self._process.communicate()
        self._memory.close()


def make(argv: Sequence[str]) -> None:
    """Make an order. `argv`: the number of the open memory, where the shards' sizes are; the rest of the Epoch in JSON."""
    os.nice(NICE)
    with contextlib.suppress(OSError):  # where memory ends, this process goes first
        Path("/proc/self/oom_score_adj").write_text("1000")
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    with open(int(argv[0]), "r+b") as memory:
        epoch = Epoch(sizes=np.frombuffer(memory.read(), np.int64), **json.loads(argv[1]))
        order = order_of(epoch)
        memory.seek(0)
        memory.truncate()
        memory.write(order.data)


def _end_with_the_run() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    make(sys.argv[1:])
