"""The networks and sums of one evaluation: images in, metrics out.

    meter = Meter(inception=..., statistics=..., clip=...)
    with meter.on(device):
        for ...: meter.add(images, numbers, captions)
        figures = meter.figures()      # {"num_images": ..., "fid": ..., "clip": ..., "clip_x100": ...}

Shapes: B batch, H W height and width in px.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer.utils import dist
from torch import Tensor
from torchmetrics import Metric

from cli.files import read_regular
from cli.log import log
from cli.private_api import require_private_api
from evaluation.clip_score import ClipPair, CLIPScore, load_clip, times_100
from evaluation.fid import FeatureSums, Statistics, covariance_warning, frechet_distance, read_facts, reference_for
from evaluation.inception import Resize, load_inception
from evaluation.numerics import Extractor, Precision, require_finite
from evaluation.shapes import ShapesPair
from weights.tensors import tensor_specs

QUEUE_SEC = 3.0  # covers the host's work between two batches

require_private_api(
    Metric, "_reductions", "_update_count", why="the sums of an evaluation are kept, and added up over ranks"
)


class Meter:
    """The networks and sums of one evaluation.

    Args:
        inception, statistics: for FID: weights of the image network, and the reference statistics; or neither.
        resize: how images are resized for that network.
        clip: weights of the CLIP pair; None: no CLIP score.
        precision: of the networks; fp16: as MLPerf's reference, which also rounds images, cosines and means to float16.

    Raises:
        ValueError: a file is unreadable or is the wrong one.
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
        self.extractor: Extractor | None = None
        self.reference: Statistics | None = None
        self.pair: ClipPair | ShapesPair | None = None
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
                "statistics_sha256": hashlib.sha256(read_regular(Path(statistics).expanduser())).hexdigest(),
            }
        if clip is not None:
            self.pair = load_clip(clip)
            self.pair.precision = precision
            self.facts |= {"clip_model": self.pair.name, "clip_fingerprint": self.pair.fingerprint}
        self.reset()

    def say_what_is_short(self, num_images: int) -> None:
        """Warn, on one rank, of settings that make scores hard to compare."""
        if self.extractor is not None and (text := covariance_warning(num_images, self.extractor.num_features)):
            log.info(f"eval: {text}")
        if self.extractor is not None and self.extractor.resize == "bicubic256" and not self._says_resize:
            asked = (
                "Give those of images that were resized to 256 pixels too (prepare.fid_statistics resize=bicubic256)"
            )
            log.info(f"eval.statistics: does not say its resize, and eval.resize=bicubic256. {asked}.")
        named = (("inception", self.extractor), ("clip", self.pair))
        for key in (key for key, part in named if part is not None and "random" in part.name):
            log.info(f"eval.{key}: random weights: what is scored with them compares with nothing else.")

    def reset(self) -> None:
        """Begin a new evaluation."""
        own = {"sync_on_compute": False}  # `figures` adds up the sums once, and rank 0 alone computes
        self.features = None if self.extractor is None else FeatureSums(self.extractor.num_features, **own)
        self.cosines = None if self.pair is None else CLIPScore(in_half=self.in_half, **own)

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Keep the networks on a device during an evaluation only: training needs the memory."""
        parts = [part for part in (self.extractor, self.pair, *self.metrics.values()) if part is not None]
        try:
            for part in parts:
                part.to(device)
            yield
        finally:
            for part in parts:
                part.to(torch.device("cpu"))
            if device.type == "cuda":
                torch.cuda.empty_cache()

    @torch.no_grad()
    def add(self, images: Tensor, numbers: Sequence[int], captions: Sequence[str]) -> None:
        """Measure a batch.

        Args:
            images: (B, 3, H, W) float32 in [0, 1].
            numbers, captions: of the first images; the others are padding, so that every pass has the same shape.

        Raises:
            ValueError: non-finite values; names their prompts.
        """
        num = len(numbers)
        require_finite(images[:num], "images", numbers)
        images = images.half() if self.in_half else images.float()
        if self.features is not None and self.extractor is not None:
            self.features.update(self.extractor(images)[:num], numbers)
        if self.cosines is not None and self.pair is not None:
            self.cosines.update(self.pair.encode_images(images)[:num], self.pair.encode_texts(captions), numbers)

    @property
    def metrics(self) -> dict[str, Metric]:
        """The sums of what is measured: features, cosines, or both."""
        both = {"features": self.features, "cosines": self.cosines}
        return {name: metric for name, metric in both.items() if metric is not None}

    def sums(self) -> dict[str, dict[str, Tensor]]:
        """Return this rank's sums so far, copied to the CPU: metric -> state -> tensor."""
        return {
            name: {state: getattr(metric, state).detach().cpu().clone() for state in metric._reductions}
            for name, metric in self.metrics.items()
        }

    def go_on_from(self, sums: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Resume from saved sums; nothing may be measured yet. Raises ValueError: they are of other metrics."""
        own, given = ({n: tensor_specs(states) for n, states in each.items()} for each in (self.sums(), sums))
        if own != given:
            raise ValueError(f"sums: {given}, not {own}")
        for name, states in sums.items():
            metric = self.metrics[name]
            for state, value in states.items():
                getattr(metric, state).copy_(value)
            metric._update_count = 1  # else torchmetrics warns that nothing was measured

    def figures(self) -> dict[str, Any]:
        """Add up the ranks' sums and return the metrics, which rank 0 computes for all."""
        for metric in self.metrics.values():
            _add_up(metric)
        found: list[dict[str, Any]] = [{"num_images": 0, "fid": None, "clip": None, "clip_x100": None}]
        if dist.get_global_rank() == 0:
            if self.features is not None and self.reference is not None:
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
    """Limits the GPU's queue of sampling steps to a few seconds, because a stop has to wait for the queue.

    Without it the host would queue a whole batch of images (15 s on an H200) behind the one before.
    """

    def __init__(self) -> None:
        self._steps: deque[torch.cuda.Event] = deque()
        self._num_ahead = 2  # until the time of a step is known

    def step(self) -> None:
        """Record that a step was queued; wait if there are too many."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._steps.append(event)
        while len(self._steps) > self._num_ahead:
            first = self._steps.popleft()
            self._steps[0].synchronize()
            took_sec = first.elapsed_time(self._steps[0]) / 1000
            self._num_ahead = max(2, int(QUEUE_SEC / max(took_sec, 1e-3)))


def _add_up(metric: Metric) -> None:
    """Sum a metric's states over the ranks in place; torchmetrics itself would gather all states on every rank first."""
    for name in metric._reductions:
        dist.all_reduce(getattr(metric, name), reduce_operation="SUM")
