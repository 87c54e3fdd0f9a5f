"""The networks and sums of one evaluation: images in, metrics out.

    meter = Meter(inception=..., statistics=..., clip=..., cmmd=...)
    with meter.on(device):
        for ...: meter.add(images, numbers, captions)
        figures = meter.figures()      # {"num_images": ..., "fid": ..., "clip": ..., "clip_x100": ...}

Shapes: B batch, H W height and width in px.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from checkpointing.files import PART, SCHEMA, file_stem, is_whole, read_checkpoint, write_checkpoint
from common import dist
from common.errors import ConfigError
from common.files import read_regular
from common.log import EVERY_RANK, log
from evaluation.clip_score import ClipPair, CLIPScore, load_clip, times_100
from evaluation.cmmd import Embeddings, ImageEncoder, load_encoder, maximum_mean_discrepancy, read_reference
from evaluation.fid import (
    FeatureSums,
    Resize,
    Statistics,
    covariance_warning,
    frechet_distance,
    load_inception,
    read_facts,
    reference_for,
)
from evaluation.scoring_networks import Extractor, Float64Sums, Precision, ShapesPair, require_finite


class Meter:
    """The networks and sums of one evaluation.

    Args:
        inception, statistics: for FID: weights of the image network, and the reference statistics; or neither.
        cmmd: for CMMD: weights of its image encoder, whose embeddings `statistics` has; None: no CMMD.
        resize: how images are resized for that network.
        clip: weights of the CLIP pair; None: no CLIP score.
        precision: of the networks for FID and CLIP score; fp16: as MLPerf's reference, which also rounds images, cosines and
            means to float16.

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
        cmmd: str | None = None,
        precision: Precision = "fp32",
    ):
        self.extractor: Extractor | None = None
        self.reference: Statistics | None = None
        self.pair: ClipPair | ShapesPair | None = None
        self.encoder: ImageEncoder | None = None
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
            }
        if clip is not None:
            self.pair = load_clip(clip)
            self.pair.precision = precision
            self.facts |= {"clip_model": self.pair.name, "clip_fingerprint": self.pair.fingerprint}
        if cmmd is not None:
            assert statistics is not None
            self.encoder = load_encoder(cmmd)
            self.reference_embeddings = read_reference(statistics, self.encoder)
            self.facts |= {"cmmd_model": self.encoder.name, "cmmd_fingerprint": self.encoder.fingerprint}
        if statistics is not None:
            digest = hashlib.sha256(read_regular(Path(statistics).expanduser())).hexdigest()
            self.facts["statistics_sha256"] = digest
        self.reset()

    def log_warnings(self, num_images: int) -> None:
        """Log, on one rank, settings that make scores hard to compare."""
        if self.extractor is not None and (text := covariance_warning(num_images, self.extractor.num_features)):
            log.info(f"eval: {text}")
        if self.extractor is not None and self.extractor.resize == "bicubic256" and not self._says_resize:
            todo = "Give those of images that were resized to 256 pixels too (prepare.fid_statistics resize=bicubic256)"
            log.info(f"eval.statistics: does not say its resize, and eval.resize=bicubic256. {todo}.")
        named = (("inception", self.extractor), ("clip", self.pair), ("cmmd", self.encoder))
        for key in (key for key, part in named if part is not None and "random" in part.name):
            log.info(f"eval.{key}: random weights: these scores are not comparable with any others.")

    def reset(self) -> None:
        """Begin a new evaluation."""
        self.features = None if self.extractor is None else FeatureSums(self.extractor.num_features)
        self.cosines = None if self.pair is None else CLIPScore(in_half=self.in_half)
        self.embeddings = None if self.encoder is None else Embeddings(self.encoder.num_features)

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Keep the networks on a device during an evaluation only: training needs the memory."""
        networks = (self.extractor, self.pair, self.encoder)
        parts = [part for part in (*networks, *self.metrics.values()) if part is not None]
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
        if self.embeddings is not None and self.encoder is not None:
            self.embeddings.update(self.encoder(images)[:num], numbers)
        images = images.half() if self.in_half else images.float()
        if self.features is not None and self.extractor is not None:
            self.features.update(self.extractor(images)[:num], numbers)
        if self.cosines is not None and self.pair is not None:
            self.cosines.update(self.pair.encode_images(images)[:num], self.pair.encode_texts(captions), numbers)

    @property
    def metrics(self) -> dict[str, Float64Sums | Embeddings]:
        """The sums of what is measured: features and cosines, and embeddings."""
        every = {"features": self.features, "cosines": self.cosines, "embeddings": self.embeddings}
        return {name: metric for name, metric in every.items() if metric is not None}

    def sums(self) -> dict[str, dict[str, Tensor]]:
        """Return this rank's sums so far, copied to the CPU: metric -> state -> tensor."""
        return {
            name: {state: tensor.cpu().clone() for state, tensor in metric.tensors().items()}
            for name, metric in self.metrics.items()
        }

    def restore_sums(self, sums: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Resume from saved sums; nothing may be measured yet. Raises ValueError: they are of other metrics."""
        metrics = self.metrics
        if sums.keys() != metrics.keys() or not all(metrics[name].accepts(states) for name, states in sums.items()):
            raise ValueError(f"sums: of {', '.join(sums)}, not of {', '.join(metrics)} in the same shapes")
        for name, states in sums.items():
            metrics[name].restore(states)

    def figures(self) -> dict[str, Any]:
        """Add up the ranks' sums and return the metrics, which rank 0 computes for all."""
        for metric in self.metrics.values() if dist.get_world_size() > 1 else ():
            metric.add_ranks()
        figures: list[dict[str, Any]] = [{"num_images": 0, "fid": None, "clip": None, "clip_x100": None}]
        if dist.get_global_rank() == 0:
            if self.features is not None and self.reference is not None:
                statistics = self.features.compute()
                if self.in_half:  # numpy's mean of float16 is float16, its covariance float64
                    statistics = statistics._replace(mean=statistics.mean.astype(np.float16).astype(np.float64))
                figures[0] |= {"fid": frechet_distance(statistics, self.reference), "num_images": statistics.num_images}
            if self.cosines is not None:
                clip = float(self.cosines.compute())
                figures[0] |= {"clip": clip, "clip_x100": times_100(clip), "num_images": int(self.cosines.n)}
            if self.embeddings is not None:
                rows = self.embeddings.rows
                distance = maximum_mean_discrepancy(rows, self.reference_embeddings.to(rows.device))
                figures[0] |= {"cmmd": distance, "num_images": len(rows)}
        dist.broadcast_object_list(figures)
        return figures[0]


# --- an unfinished evaluation ---
#
#     FOLDER/part-OF-000000000003-DIGEST.pt     of rank 3; OF: which evaluation it is, DIGEST: of the file's bytes
#
# A part is used only by the same evaluation: the same weights, settings, prompts and number of ranks. Sums are float64
# and are continued in the same order, so the metrics equal the uninterrupted evaluation's, bit for bit on a CPU.

EVERY_SEC = 60.0  # a part has 32 MiB of sums for FID, this rank's embeddings, and the grid's images


class Parts:
    """The files of an unfinished evaluation, one per rank.

    Args:
        folder: of the files; exists as long as there are any.
        is_alone: no other command saves parts there, so parts of other evaluations may be removed.
    """

    def __init__(self, folder: Path, *, is_alone: bool):
        self.folder, self.is_alone = folder, is_alone

    def find(self, identity: str, rank: int) -> tuple[Path, dict[str, Any]] | None:
        """Return a rank's part and its content, or None. A part that is damaged or of another evaluation is set aside.

        Args:
            identity: the text that identifies this evaluation.
        """
        name = file_stem(_kind(identity), rank)
        for left in self.folder.glob(f".{name}.*.tmp"):
            left.unlink(missing_ok=True)  # left by a killed writer
        for path in self.folder.glob(f"{name}-*.pt"):
            content: Mapping[str, Any] = {}
            with contextlib.suppress(ConfigError):
                content = read_checkpoint(path) if is_whole(path) else {}
            if content.get("of") == identity:
                return path, dict(content)
            set_aside(path)
        return None

    def save(self, identity: str, rank: int, content: Mapping[str, Any]) -> None:
        """Write a rank's part and remove its previous one. Raises OSError: it cannot be written."""
        write_checkpoint(self.folder, file_stem(_kind(identity), rank), {"schema": SCHEMA, "of": identity, **content})

    def remove(self, identity: str) -> None:
        """Remove the parts of an evaluation whose score is written; with `is_alone`, all other parts too."""
        for path in self.folder.glob(f"{PART}*.pt" if self.is_alone else f"{_kind(identity)}*.pt"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not there, or not empty
            self.folder.rmdir()


def _kind(identity: str) -> str:
    return f"{PART}{xxhash.xxh3_64_hexdigest(identity)}-"


def set_aside(path: Path) -> None:
    """Rename an unusable part and log it."""
    path.replace(path.with_name(path.name + ".damaged"))
    log.warning(f"eval: {path} is damaged, or of another evaluation; set aside.", extra=EVERY_RANK)


class EvaluationProgress:
    """This rank's progress in an evaluation; it resumes from its part if there is one.

    Args:
        parts: None: nothing is saved.
        identity: identifies the evaluation; the same on all ranks.
        meter: has measured nothing yet; it gets the part's sums.
        num_images, batch_size: this rank's number of prompts, and prompts per chunk.
        num_samples: this rank's number of images in the sample grid.
        began: time.monotonic() at the start.

    Attributes:
        num_done: chunks done; samples: captions and images of this rank's first prompts.
    """

    def __init__(
        self,
        parts: Parts | None,
        identity: str,
        meter: Meter,
        *,
        num_images: int,
        batch_size: int,
        num_samples: int,
        began: float,
    ):
        self.parts, self.identity, self.meter, self.began = parts, identity, meter, began
        self.num_images, self.batch_size, self.num_samples = num_images, batch_size, num_samples
        self.num_done, self.saved_at, self.rank = 0, time.monotonic(), dist.get_global_rank()
        self.samples: list[tuple[str, Tensor]] = []
        if parts is not None:
            self._resume(parts)

    @property
    def seconds(self) -> float:
        """Duration of this evaluation, including earlier starts as far as their parts were saved."""
        return time.monotonic() - self.began

    def _resume(self, parts: Parts) -> None:
        if (saved := parts.find(self.identity, self.rank)) is not None:
            path, part = saved
            try:
                chunks, seconds, samples = int(part["chunks"]), float(part["seconds"]), list(part["samples"])
                self.meter.restore_sums(part["sums"])
                self.num_done, self.began, self.samples = chunks, self.began - seconds, samples
            except (KeyError, TypeError, ValueError):
                set_aside(path)
        done, num = self._over_ranks()
        if done:
            log.info(f"eval: resumes: {done:,} of {num:,} images were scored by an earlier start.")

    def _over_ranks(self) -> tuple[int, int]:
        """Return the images done and the total, over all ranks."""
        of_rank = min(self.num_images, self.num_done * self.batch_size), self.num_images
        done, num = zip(*dist.all_gather_object(of_rank), strict=True)
        return sum(done), sum(num)

    def add(self, captions: Sequence[str], images: Tensor) -> None:
        """Count a chunk that was measured, and save a part when one is due.

        Args:
            images: uint8 (N, 3, H, W) on the CPU; the first `num_wanted` of the chunk.
        """
        self.num_done += 1
        self.samples += zip(captions, images, strict=True)
        if time.monotonic() - self.saved_at >= EVERY_SEC:
            self._save()

    @property
    def num_wanted(self) -> int:
        """Images still missing in the sample grid."""
        return self.num_samples - len(self.samples)

    def _save(self) -> None:
        """Save the measured batches."""
        if self.parts is None:
            return
        content = {"chunks": self.num_done, "seconds": self.seconds, "samples": self.samples, "sums": self.meter.sums()}
        try:
            self.parts.save(self.identity, self.rank, content)
        except (OSError, RuntimeError) as error:
            text = f"{self.parts.folder}: cannot be written ({error})"
            log.warning(f"eval: {text}; a killed evaluation would resume from an earlier part.", extra=EVERY_RANK)
        self.saved_at = time.monotonic()

    def stop(self) -> None:
        """Save everything scored so far and log how much that is. All ranks call it."""
        self._save()
        done, num = self._over_ranks()
        where = "nothing of it is saved" if self.parts is None else f"saved in {self.parts.folder}"
        log.info(f"eval: stopped by a signal: {done:,} of {num:,} images were scored; {where}.")

    def finish(self) -> None:
        """Remove the parts: the score is written."""
        if self.parts is not None and self.rank == 0:
            self.parts.remove(self.identity)
