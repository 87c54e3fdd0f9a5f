"""Count the places where the host would wait for a GPU, in a run on a CPU, and say whose code they are in.

    with HostWaits() as waits: ...
    waits.of("ours"), waits.of("composer")        # {"function of file.py: what": how often}

These count as a wait: a value read by Python (`_local_scalar_dense`: item, bool, float, int; tolist, numpy, a copy to the
CPU), a shape that depends on values (nonzero, a mask as index, ...), and an upload (a tensor created on the host for the
device). On a CPU a copy to the device does nothing, so it is detected by the call. `x.cpu().item()` is one wait.

A wait belongs to the innermost caller in Composer or in this project. So a wait in diffusers under our call is ours.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import composer
import torch
from composer import Callback, Logger, State
from conftest import ROOT
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

SCALAR, FETCH, UPLOAD = "read as a number", "copied to the host", "made on the host"
SHAPE = "shape or truth of values"
DISPATCHED = {"_local_scalar_dense": SCALAR} | dict.fromkeys(
    ("nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave.Tensor"),
    SHAPE,
)
FROM_PYTHON = {"tensor", "as_tensor", "from_numpy", "scalar_tensor", "new_tensor"}
FACTORIES = {"zeros", "ones", "full", "empty", "arange", "linspace", "eye", "rand", "randn", "randint", "randperm"}
CALLED = dict.fromkeys(("cpu", "tolist", "numpy", "__array__"), FETCH)
COMPOSER = Path(composer.__file__).parent


def place() -> tuple[str, str]:
    """Return whose line runs, and its function and file."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(COMPOSER):
            return "composer", f"{frame.f_code.co_name} of {path.name}"
        if path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "tests"):
            return "ours", f"{frame.f_code.co_name} of {path.name}"
        frame = frame.f_back
    return "nobody's", "?"


class HostWaits:
    """Counts while it is entered."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str, str]] = Counter()
        self._modes = (_Dispatched(self), _Called(self))

    def note(self, what: str) -> None:
        self.found[(*place(), what)] += 1

    def of(self, whose: str) -> dict[str, int]:
        """Return the waits of "ours" or "composer": place and kind -> how often."""
        counts = {(where, what): num for (who, where, what), num in self.found.items() if who == whose}
        for where in {where for where, _ in counts}:
            counts[where, SCALAR] = counts.get((where, SCALAR), 0) - counts.get((where, FETCH), 0)
        return {f"{where}: {what}": num for (where, what), num in sorted(counts.items()) if num > 0}

    def __enter__(self) -> HostWaits:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _Dispatched(TorchDispatchMode):
    """What the operators themselves do, also inside torch's own code."""

    def __init__(self, waits: HostWaits):
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        what = DISPATCHED.get(name) or DISPATCHED.get(f"{name}.{func._overloadname}")
        if name in ("index", "index_put", "index_put_") and any(
            each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        ):
            what = SHAPE
        if what is not None:
            self.waits.note(what)
        return func(*args, **(kwargs or {}))


class _Called(TorchFunctionMode):
    """What Python asks for."""

    def __init__(self, waits: HostWaits):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in CALLED:
            self.waits.note(CALLED[name])
        elif name == "to" and args[1:2] == ("cpu",):
            self.waits.note(FETCH)
        elif name in FROM_PYTHON or (name in FACTORIES and kwargs.get("device") is None):
            self.waits.note(UPLOAD)
        return func(*args, **kwargs)


class GpuWaits:
    """The same on a GPU: what torch.cuda.set_sync_debug_mode warns of."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str, str]] = Counter()

    def of(self, whose: str) -> dict[str, int]:
        """Return the waits of "ours" or "composer": place -> how often."""
        return {where: num for (who, where, _), num in sorted(self.found.items()) if who == whose}

    def __enter__(self) -> GpuWaits:
        self._catching = warnings.catch_warnings()
        self._catching.__enter__()
        warnings.simplefilter("always")

        def show(message: Any, *_: Any, **__: Any) -> None:
            if "synchronizing" in str(message):
                self.found[(*place(), "")] += 1

        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self._catching.__exit__(*error)


class Watch(Callback):
    """Has a counter entered from the start of the first of some batches to the start of the one after the last.

    What stands between two steps is in it: the way to the next batch too may wait for the device.
    """

    def __init__(self, waits: HostWaits | GpuWaits, batches: range):
        self.waits, self.batches, self.is_in = waits, batches, False

    def batch_start(self, state: State, logger: Logger) -> None:
        wanted = state.timestamp.batch.value in self.batches
        if wanted and not self.is_in:
            self.waits.__enter__()
        elif self.is_in and not wanted:
            self.waits.__exit__(None, None, None)
        self.is_in = wanted


def watched(trainer: type, waits: HostWaits | GpuWaits, batches: range) -> Any:
    """Return what makes a Trainer whose steps in `batches`, each to the start of the next, are counted."""

    def make(*, callbacks: list[Callback], **arguments: Any) -> Any:
        return trainer(callbacks=[Watch(waits, batches), *callbacks], **arguments)

    return make
