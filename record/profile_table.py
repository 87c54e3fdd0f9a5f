"""Where the time of recorded steps goes, by kind of work: read from a trace that torch.profiler has written.

    events = json.load(gzip.open("trace.json.gz"))["traceEvents"]
    print(text(tabulate(events)))

What is counted lies between the beginning of the first recorded step and the end of the last. On a GPU it is the device's
own time: each kernel, copy and fill of memory. On a CPU it is the time of each operator without that of the operators inside
it. At each moment one piece of work counts: where several run at once, on other streams or threads, the one that began
first, and a copy or a communication only where nothing else runs, since otherwise it costs nothing. What no piece covers is
idle, so that the kinds add up to the whole.

Kernels are told by their names, and those whose names say nothing (elementwise, reduce) by the operator that launched them.
On a CPU attention in its plain form is attention forward and matrix product backward: autograd keeps no trace of its origin.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cli.table import as_table

SCHEMA = 1
KINDS = (
    "convolution",
    "matrix_product",
    "attention",
    "norm",
    "optimizer",  # with the norm and clipping of gradients and the average of the weights
    "pointwise",  # and reductions
    "copy",  # changes of layout and of number type included
    "communication",
    "other",
    "idle",
)
NUM_TOP = 30
STEP = "ProfilerStep#"
ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}

# The first that is found in a kernel's name, in lower case, decides.
KERNELS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("communication", r"nccl|rccl"),
        ("copy", r"nchwtonhwc|nhwctonchw|transpose|memcpy|memset|copy_kernel|copy_device|catarraybatchedcopy"),
        ("optimizer", r"multi_tensor_apply|adam|foreach"),
        ("attention", r"sdpa|fmha|flash|attention|attn|softmax|bwd_kernel_d|bwd_preprocess"),
        (
            "norm",
            r"(group|layer|batch|rms)_?norm|rowwisemoments|gammabeta|welford|fusedparams|internalgradients|bn_[fb]w",
        ),
        ("convolution", r"conv|implicit_gemm|igemm_|fprop|dgrad|wgrad|winograd|scudnn|fft2d"),
        ("matrix_product", r"gemm|cijk_|nvjet|gemv|cublas|cutlass|splitk|matmul|dot_kernel"),
        ("pointwise", r"elementwise|reduce|distribution|index|gather|scatter|upsample|fill|arange|cub::"),
    )
)
TRITON = re.compile(r"triton_(\w+?)_(?:fused_)?(\w+)")  # torch.compile's: kind of loop, and the operators in it
TRITON_COPY = re.compile(r"(_*(clone|copy|to_copy|permute|transpose|view|t|\d+))+")

OPERATORS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (
            "optimizer",
            r"_fused_adam|_foreach|^optimizer[.]update$",
        ),  # not Optimizer.step: Composer computes the loss and its gradients in it
        ("communication", r"c10d::|nccl:|gloo:"),
        ("attention", r"scaled_dot_product|scaleddotproduct|attention|softmax"),
        ("convolution", r"conv"),
        ("norm", r"(group|layer|batch|rms)_?norm"),
        ("matrix_product", r"(^|::)(add)?(b?addb?)?(mm|bmm|mv|matmul|linear|dot|einsum)(backward\d)?$|_scaled_mm"),
    )
)
COPIES = {"copy_", "_to_copy", "to", "contiguous", "clone", "cat", "stack"}
# They move no number: time of the framework itself.
BOOKKEEPING = re.compile(
    r"empty|view|as_strided|expand|resize|transpose|permute|reshape|detach|alias|squeeze|select|slice|chunk|split|narrow|"
    r"resolve|result_type|set_|^t$|autograd|backward\d|record"
)


@dataclass(frozen=True)
class Piece:
    """A stretch of work, microseconds."""

    name: str
    kind: str
    start: float
    end: float
    in_background: bool = False
    is_first: bool = True  # of an operator's stretches; they count as one call


# --- what kind ---


def kind_of_kernel(name: str, launched_by: Sequence[str] = ()) -> str:
    """Return the kind of a kernel.

    Args:
        name: as the profiler has it.
        launched_by: the operator that launched it and those around that, the outermost first.
    """
    lower, around = name.lower(), _kind_around(launched_by)
    if found := TRITON.search(lower):
        kind = _kind_of_triton(*found.groups())
    else:
        kind = next((kind for kind, pattern in KERNELS if pattern.search(lower)), "other")
    is_unspecific = kind in ("pointwise", "other") or (around == "optimizer" and kind != "communication")
    return around or kind if is_unspecific else kind


def _kind_of_triton(loop: str, operators: str) -> str:
    if loop in ("tem", "mm", "convolution2d"):  # a template; the others are fused loops and reductions
        return (
            "convolution"
            if "conv" in loop + operators
            else "attention"
            if "attention" in operators
            else "matrix_product"
        )
    if TRITON_COPY.fullmatch(operators):
        return "copy"
    # A loop that names a convolution adds its bias, or what else was fused.
    return next((k for k in ("optimizer", "attention", "norm") if dict(KERNELS)[k].search(operators)), "pointwise")


def kind_of_operator(name: str, around: Sequence[str] = ()) -> str:
    """Return the kind of an operator on a CPU; `around` are those that it runs in, the outermost first."""
    short = name.rpartition("::")[2].lower()
    outer = _kind_around([*around, name])
    if short in COPIES and outer != "optimizer":
        return "copy"
    return outer or ("other" if BOOKKEEPING.search(name.lower().removeprefix("aten::")) else "pointwise")


def _kind_around(operators: Iterable[str]) -> str | None:
    """Return the kind of the outermost operator that has one: a product inside a convolution is part of it."""
    for name in operators:
        for kind, pattern in OPERATORS:
            if pattern.search(name.lower()):
                return kind
    return None


# --- pieces ---


def pieces_of(events: Iterable[Mapping[str, Any]]) -> list[Piece]:
    """Return the device's work where the trace has any, else the CPU's."""
    whole = [event for event in events if event.get("ph") == "X"]
    around = _around(whole)
    on_device = [event for event in whole if event.get("cat") in ON_DEVICE]
    if not on_device:
        return [piece for thread in _threads(whole) for piece in _own_stretches(thread)]
    found = []
    for event in on_device:
        kind = kind_of_kernel(event["name"], around.get(event.get("args", {}).get("External id"), ()))
        in_background = event["cat"] != "kernel" or kind == "communication"
        kind = kind if event["cat"] == "kernel" else "copy"
        found.append(Piece(event["name"], kind, event["ts"], event["ts"] + event["dur"], in_background))
    return found


def _threads(events: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return the operators and named ranges of each thread, an outer one before those in it."""
    threads = defaultdict(list)
    for event in events:
        if event.get("cat") in ("cpu_op", "user_annotation") and not event["name"].startswith(STEP):
            threads[event["pid"], event["tid"]].append(event)
    return [sorted(thread, key=lambda e: (e["ts"], -e["dur"])) for thread in threads.values()]


def _around(events: Iterable[Mapping[str, Any]]) -> dict[Any, tuple[str, ...]]:
    """Return for each operator, by the id that its kernels carry, its name after those around it."""
    found = {}
    for thread in _threads(events):
        stack: list[Mapping[str, Any]] = []
        for event in thread:
            while stack and event["ts"] >= stack[-1]["ts"] + stack[-1]["dur"]:
                stack.pop()
            stack.append(event)
            found[event.get("args", {}).get("External id")] = tuple(each["name"] for each in stack)
    return found


def _own_stretches(thread: Sequence[Mapping[str, Any]]) -> Iterable[Piece]:
    """Yield the stretches in which an operator runs and none of those inside it; named ranges are no work."""
    stack: list[dict[str, Any]] = []  # event, where its next stretch begins, whether one was given

    def give(top: dict[str, Any], end: float) -> Iterable[Piece]:
        event = top["event"]
        if event["cat"] == "cpu_op" and end > top["at"]:
            kind = kind_of_operator(event["name"], [each["event"]["name"] for each in stack[:-1]])
            yield Piece(event["name"], kind, top["at"], end, kind == "communication", not top["given"])
            top["given"] = True

    def close(until: float) -> Iterable[Piece]:
        while stack and stack[-1]["end"] <= until:
            yield from give(stack[-1], stack[-1]["end"])
            ended = stack.pop()["end"]
            if stack:
                stack[-1]["at"] = max(stack[-1]["at"], ended)

    for event in thread:
        yield from close(event["ts"])
        if stack:
            yield from give(stack[-1], event["ts"])
        stack.append({"event": event, "at": event["ts"], "end": event["ts"] + event["dur"], "given": False})
    yield from close(float("inf"))


# --- the table ---


def counted(pieces: Sequence[Piece], begin: float, end: float) -> list[float]:
    """Return the time for which each piece counts, such that at each moment one does; see the head of this file."""
    found = [0.0] * len(pieces)
    covered: list[tuple[float, float]] = []  # by the work in front
    for in_background in (False, True):
        order = sorted((p.start, p.end, at) for at, p in enumerate(pieces) if p.in_background == in_background)
        edge, merged = begin, []
        for start, stop, at in order:
            start, stop = max(start, edge), min(stop, end)
            if stop > start:
                found[at] = stop - start - _overlap(covered, start, stop)
                merged.append((start, stop))
                edge = stop
        covered = merged
    return found


def _overlap(covered: Sequence[tuple[float, float]], start: float, stop: float) -> float:
    """Return how much of a stretch is covered; `covered` is in order and without overlaps."""
    total, at = 0.0, max(0, bisect_right(covered, (start, float("inf"))) - 1)
    while at < len(covered) and covered[at][0] < stop:
        total += max(0.0, min(stop, covered[at][1]) - max(start, covered[at][0]))
        at += 1
    return total


def tabulate(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the table of a trace: milliseconds a step by kind, and the kernels or operators that take most.

    Raises:
        ValueError: the trace has no whole step.
    """
    steps = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(STEP)]
    if not steps:
        raise ValueError("the trace has no recorded step")
    begin, end = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
    pieces = pieces_of(events)
    on_gpu = any(event.get("cat") in ON_DEVICE for event in events)
    kinds = {kind: [0.0, 0] for kind in KINDS}
    names: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0])
    for piece, micros in zip(pieces, counted(pieces, begin, end), strict=True):
        for row in (kinds[piece.kind], names[piece.name, piece.kind]):
            row[0] += micros
            row[1] += piece.is_first and begin <= piece.start < end
    kinds["idle"][0] = end - begin - sum(micros for micros, _ in kinds.values())

    def row(micros: float, calls: float) -> dict[str, float]:
        figures = {"ms_per_step": micros / 1000.0 / len(steps), "frac": micros / (end - begin)}
        return {**figures, "calls_per_step": calls / len(steps)}

    top = sorted(names.items(), key=lambda item: -item[1][0])[:NUM_TOP]
    return {
        "schema": SCHEMA,
        "of": "kernels" if on_gpu else "operators",
        "steps": len(steps),
        "step_ms": (end - begin) / 1000.0 / len(steps),
        "kinds": {kind: row(*figures) for kind, figures in kinds.items()},
        "top": [{"name": name, "kind": kind, **row(*figures)} for (name, kind), figures in top],
    }


def text(table: Mapping[str, Any]) -> str:
    """Format a table for reading."""
    title = f"{table['steps']} steps of {table['step_ms']:.3f} ms, time of {table['of']}"
    kinds = [(kind.replace("_", " "), *_cells(row)) for kind, row in table["kinds"].items()]
    top = [(*_cells(row), row["kind"].replace("_", " "), row["name"][:120]) for row in table["top"]]
    head = ("ms/step", "share", "calls")
    of_kinds = as_table(("kind", *head), kinds, "lrrr")
    return f"{title}\n\n{of_kinds}\n\n{as_table((*head, 'kind', table['of'][:-1]), top, 'rrrll')}\n"


def _cells(row: Mapping[str, float]) -> tuple[str, str, str]:
    return f"{row['ms_per_step']:.3f}", f"{row['frac']:.1%}", f"{row['calls_per_step']:.1f}"
