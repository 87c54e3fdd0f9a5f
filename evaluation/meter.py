"""Images in, figures out: the networks and the sums of one evaluation.

    meter = Meter(inception=..., statistics=..., clip=...)
    with meter.on(device):
        for ...: meter.add(images, numbers, captions)
        figures = meter.figures()      # {"num_images": ..., "fid": ..., "clip": ..., "clip_x100": ...}

On a GPU a batch is measured while the next one is generated: `add` measures the batch before, on a stream of its own, when
the caller has given the GPU the next one to do. What runs on processor cores (PIL's resizing) and the waits for its results
then need not hold up the GPU (not measured: no GPU was at hand). Nothing is left to a thread: in one the precision that
measuring sets for itself would reach the sampler.

Shapes: B batch, H W height and width in px.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from composer.utils import dist
from torch import Tensor
from torchmetrics import Metric

from cli.log import log
from cli.private_api import require_private_api
from evaluation.clip_score import CLIPScore, load_clip, times_100
from evaluation.fid import FeatureSums, covariance_warning, frechet_distance, read_facts, reference_for
from evaluation.inception import Resize, load_inception
from evaluation.numerics import Precision
from weights.tensors import tensor_specs

QUEUE_SEC = 3.0  # covers what the host does between two batches

require_private_api(
    Metric, "_reductions", "_update_count", why="the sums of an evaluation are kept, and added up over ranks"
)


class Given(NamedTuple):
    """A batch that waits to be measured."""

    images: Tensor
    """(B, 3, H, W) float32 in [0, 1]."""
    numbers: Sequence[int]
    captions: Sequence[str]
    generated: torch.cuda.Event | None
    """None on a CPU: they are there."""


class Meter:
    """The networks and sums of one evaluation.

    Args:
        inception, statistics: of FID: weights of the image network, and what its features are compared with; or neither.
        resize: how images come to that network.
        clip: weights of the CLIP pair; None: no CLIP score.
        precision: of the networks; fp16: as MLPerf's reference, which also rounds images, cosines and means to float16.

    Raises:
        ValueError: a file cannot be read, or is another one than it has to be.
    """

    def __init__(
        self,
        *,
        inception: str | None,
        statistics: str | None,
        resize: Resize,
        clip: str | None,
        precision: Precision = "fp32",
    ):
        self.extractor = self.reference = self.pair = None
        self.in_half = precision == "fp16"
        self.facts: dict[str, Any] = {"eval_precision": precision}
        if inception is not None:
            assert statistics is not None
            self.extractor = load_inception(inception, resize=resize)
            self.extractor.precision = precision
            self.reference = reference_for(statistics, self.extractor)
            self._says_resize = "resize" in read_facts(statistics)
            self.facts |= {
                "inception": self.extractor.name,
                "inception_fingerprint": self.extractor.fingerprint,
                "resize": self.extractor.resize,
                "statistics_sha256": hashlib.sha256(Path(statistics).expanduser().read_bytes()).hexdigest(),
            }
        if clip is not None:
            self.pair = load_clip(clip)
            self.pair.precision = precision
            self.facts |= {"clip_model": self.pair.name, "clip_fingerprint": self.pair.fingerprint}
        self._aside: torch.cuda.Stream | None = None
        self.reset()

    def say_what_is_short(self, num_images: int) -> None:
        """Warn, once for all ranks, of what makes figures that compare with few others."""
        if self.extractor is not None and (text := covariance_warning(num_images, self.extractor.num_features)):
            log.info(f"eval: {text}")
        if self.extractor is not None and self.extractor.resize == "bicubic256" and not self._says_resize:
            asked = (
                "Give those of pictures that were brought to 256 pixels too (prepare.fid_statistics resize=bicubic256)"
            )
            log.info(f"eval.statistics: does not say its resize, and eval.resize=bicubic256. {asked}.")
        named = (("inception", self.extractor), ("clip", self.pair))
        for key in (key for key, part in named if part is not None and "random" in part.name):
            log.info(f"eval.{key}: random weights: what is scored with them compares with nothing else.")

    def reset(self) -> None:
        """Begin a new evaluation."""
        self._given: Given | None = None
        own = {"sync_on_compute": False}  # the sums are added up here, once, and rank 0 alone computes
        self.features = None if self.extractor is None else FeatureSums(self.extractor.num_features, **own)
        self.cosines = None if self.pair is None else CLIPScore(in_half=self.in_half, **own)

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Have the networks on a device for as long as an evaluation takes: training wants the memory back."""
        parts = [part for part in (self.extractor, self.pair, self.features, self.cosines) if part is not None]
        try:
            for part in parts:
                part.to(device)
            self._aside = torch.cuda.Stream(device) if device.type == "cuda" else None
            yield
        finally:
            self._given = self._aside = None
            for part in parts:
                part.to(torch.device("cpu"))
            if device.type == "cuda":
                torch.cuda.empty_cache()

    def add(self, images: Tensor, numbers: Sequence[int], captions: Sequence[str]) -> None:
        """Take a batch, and measure the one before it; `figures` measures the last.

        Args:
            images: (B, 3, H, W) float32 in [0, 1]; on a GPU they may still be in the making.
            numbers, captions: of the first images; the rest only fills the batch, so that every pass has one shape.

        Raises:
            ValueError: names the prompts of what is not finite in the batch before.
        """
        given = Given(images, numbers, captions, None if self._aside is None else torch.cuda.Event())
        if given.generated is not None:
            given.generated.record()
        self.measure_given()
        self._given = given

    @torch.no_grad()
    def measure_given(self) -> None:
        """Measure the batch that waits, where one does. Raises ValueError: names the prompts of what is not finite."""
        given, self._given = self._given, None
        if given is None:
            return
        if given.generated is None:
            self._measure(given)
            return
        # The host waits for these images alone. What is queued behind them runs while they are measured.
        given.generated.synchronize()
        with torch.cuda.stream(self._aside):
            given.images.record_stream(self._aside)
            self._measure(given)
        torch.cuda.current_stream(given.images.device).wait_stream(self._aside)

    def _measure(self, given: Given) -> None:
        images, numbers, captions, _ = given
        num = len(numbers)
        finite = images[:num].flatten(1).isfinite().all(dim=1).tolist()
        if not all(finite):
            broken = [number for number, is_finite in zip(numbers, finite, strict=True) if not is_finite]
            raise ValueError(
                f"images: not finite for the prompts {_some(broken)}. Look at the weights and the precision."
            )
        images = images.half() if self.in_half else images.float()
        if self.features is not None:
            self.features.update(self.extractor(images)[:num], numbers)
        if self.cosines is not None:
            self.cosines.update(self.pair.encode_images(images)[:num], self.pair.encode_texts(captions), numbers)

    @property
    def is_waiting(self) -> bool:
        """True while the last batch that was added is not measured yet."""
        return self._given is not None

    def sums(self) -> dict[str, dict[str, Tensor]]:
        """Return the sums of what has been measured on this rank, on the CPU: metric -> state -> its copy."""
        metrics = {"features": self.features, "cosines": self.cosines}
        return {
            name: {state: getattr(metric, state).detach().cpu().clone() for state in metric._reductions}
            for name, metric in metrics.items()
            if metric is not None
        }

    def go_on_from(self, sums: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take up kept sums, in the place of nothing measured. Raises ValueError: they are of other metrics."""
        own, given = ({n: tensor_specs(states) for n, states in each.items()} for each in (self.sums(), sums))
        if own != given:
            raise ValueError(f"sums: {given}, not {own}")
        for name, states in sums.items():
            metric = {"features": self.features, "cosines": self.cosines}[name]
            for state, value in states.items():
                getattr(metric, state).copy_(value)
            metric._update_count = 1  # else torchmetrics warns that nothing was measured

    def figures(self) -> dict[str, Any]:
        """Add up the ranks' sums and return the figures, which rank 0 computes for all.

        Raises:
            ValueError: as `add`, of the last batch.
        """
        self.measure_given()
        for metric in (self.features, self.cosines):
            if metric is not None:
                _add_up(metric)
        found: list[dict[str, Any]] = [{"num_images": 0, "fid": None, "clip": None, "clip_x100": None}]
        if dist.get_global_rank() == 0:
            if self.features is not None:
                statistics = self.features.compute()
                if self.in_half:  # numpy's mean of float16 is float16, its covariance float64
                    statistics = statistics._replace(mean=statistics.mean.astype(np.float16).astype(np.float64))
                found[0] |= {"fid": frechet_distance(statistics, self.reference), "num_images": statistics.num_images}
            if self.cosines is not None:
                clip = float(self.cosines.compute())
                found[0] |= {"clip": clip, "clip_x100": times_100(clip), "num_images": int(self.cosines.n)}
        dist.broadcast_object_list(found)
        return found[0]


class Pace:
    """Keeps the GPU's queue of sampling steps to some seconds: a stop has to wait for what is queued.

    Without it the host would queue a whole batch of images, a quarter of a minute of an H200, and the one before.
    """

    def __init__(self) -> None:
        self._steps: deque[torch.cuda.Event] = deque()
        self._num_ahead = 2  # until it is known how long one takes

    def step(self) -> None:
        """Note that a step has been queued; wait where that makes too many."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._steps.append(event)
        while len(self._steps) > self._num_ahead:
            first = self._steps.popleft()
            self._steps[0].synchronize()
            took_sec = first.elapsed_time(self._steps[0]) / 1000
            self._num_ahead = max(2, int(QUEUE_SEC / max(took_sec, 1e-3)))


def _add_up(metric: Metric) -> None:
    """Sum a metric's states over the ranks in place: torchmetrics' own way gathers all of them on each first."""
    for name in metric._reductions:
        dist.all_reduce(getattr(metric, name), reduce_operation="SUM")


def _some(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - 5:,} more" if len(numbers) > 5 else ""
    return ", ".join(map(str, numbers[:5])) + more
