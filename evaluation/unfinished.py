"""An unfinished evaluation: each rank's progress and sums on disk, so that an evaluation can resume after it was killed.

    FOLDER/part-OF-000000000003-DIGEST.pt     of rank 3; OF: which evaluation it is, DIGEST: of the file's bytes

A part is used only by the same evaluation: the same weights, settings, prompts and number of ranks. Sums are float64 and
are continued in the same order, so the metrics equal the uninterrupted evaluation's, bit for bit on a CPU.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash
from composer.utils import dist
from torch import Tensor

from cli.errors import ConfigError
from cli.log import EVERY_RANK, log
from evaluation.meter import Meter
from record.checkpoint_files import PART, SCHEMA, is_whole, read, stem, write

EVERY_SEC = 60.0  # a part has 32 MiB of sums for FID, and the grid's images
NAME = "eval_parts"
"""Name of the parts' folder, in the run's folder or beside the score table."""


class Parts:
    """The files of an unfinished evaluation, one per rank.

    Args:
        folder: of the files; exists as long as there are any.
        is_alone: no other command saves parts there, so parts of other evaluations may be removed.
    """

    def __init__(self, folder: Path, *, is_alone: bool):
        self.folder, self.is_alone = folder, is_alone

    def find(self, of: str, rank: int) -> tuple[Path, dict[str, Any]] | None:
        """Return a rank's part and its content, or None. A part that is damaged or of another evaluation is set aside.

        Args:
            of: the text that identifies this evaluation.
        """
        name = stem(_kind(of), rank)
        for left in self.folder.glob(f".{name}.*.tmp"):
            left.unlink(missing_ok=True)  # left by a killed writer
        for path in self.folder.glob(f"{name}-*.pt"):
            content: Mapping[str, Any] = {}
            with contextlib.suppress(ConfigError):
                content = read(path) if is_whole(path) else {}
            if content.get("of") == of:
                return path, dict(content)
            set_aside(path)
        return None

    def keep(self, of: str, rank: int, content: Mapping[str, Any]) -> None:
        """Write a rank's part and remove its previous one. Raises OSError: it cannot be written."""
        write(self.folder, stem(_kind(of), rank), {"schema": SCHEMA, "of": of, **content})

    def remove(self, of: str) -> None:
        """Remove the parts of an evaluation whose score is written; with `is_alone`, all other parts too."""
        for path in self.folder.glob(f"{PART}*.pt" if self.is_alone else f"{_kind(of)}*.pt"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not there, or not empty
            self.folder.rmdir()


def _kind(of: str) -> str:
    return f"{PART}{xxhash.xxh3_64_hexdigest(of)}-"


def set_aside(path: Path) -> None:
    """Rename an unusable part and log it."""
    path.replace(path.with_name(path.name + ".damaged"))
    log.warning(f"eval: {path} is damaged, or of another evaluation; set aside.", extra=EVERY_RANK)


class Work:
    """This rank's progress in an evaluation; it resumes from its part if there is one.

    Args:
        parts: None: nothing is saved.
        of: identifies the evaluation; the same on all ranks.
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
        of: str,
        meter: Meter,
        *,
        num_images: int,
        batch_size: int,
        num_samples: int,
        began: float,
    ):
        self.parts, self.of, self.meter, self.began = parts, of, meter, began
        self.num_images, self.batch_size, self.num_samples = num_images, batch_size, num_samples
        self.num_done, self.kept_at, self.rank = 0, time.monotonic(), dist.get_global_rank()
        self.samples: list[tuple[str, Tensor]] = []
        if parts is not None:
            self._go_on(parts)

    @property
    def seconds(self) -> float:
        """Duration of this evaluation, including earlier starts as far as their parts were saved."""
        return time.monotonic() - self.began

    def _go_on(self, parts: Parts) -> None:
        if (found := parts.find(self.of, self.rank)) is not None:
            path, part = found
            try:
                chunks, seconds, samples = int(part["chunks"]), float(part["seconds"]), list(part["samples"])
                self.meter.go_on_from(part["sums"])
                self.num_done, self.began, self.samples = chunks, self.began - seconds, samples
            except (KeyError, TypeError, ValueError):
                set_aside(path)
        done, num = self._over_ranks()
        if done:
            log.info(f"eval: resumes: {done:,} of {num:,} images were scored by an earlier start.")

    def _over_ranks(self) -> tuple[int, int]:
        """Return the images done and the total, over all ranks."""
        own = min(self.num_images, self.num_done * self.batch_size), self.num_images
        done, num = zip(*dist.all_gather_object(own), strict=True)
        return sum(done), sum(num)

    def add(self, captions: Sequence[str], images: Tensor) -> None:
        """Count a chunk that was measured, and save a part when one is due.

        Args:
            images: uint8 (N, 3, H, W) on the CPU; the first `num_wanted` of the chunk.
        """
        self.num_done += 1
        self.samples += zip(captions, images, strict=True)
        if time.monotonic() - self.kept_at >= EVERY_SEC:
            self._keep()

    @property
    def num_wanted(self) -> int:
        """Images still missing in the sample grid."""
        return self.num_samples - len(self.samples)

    def _keep(self) -> None:
        """Save the measured batches."""
        if self.parts is None:
            return
        content = {"chunks": self.num_done, "seconds": self.seconds, "samples": self.samples, "sums": self.meter.sums()}
        try:
            self.parts.keep(self.of, self.rank, content)
        except (OSError, RuntimeError) as error:
            given = f"{self.parts.folder}: cannot be written ({error})"
            log.warning(f"eval: {given}; a killed evaluation would resume from an earlier part.", extra=EVERY_RANK)
        self.kept_at = time.monotonic()

    def leave(self) -> None:
        """Save everything scored so far and log how much that is. All ranks call it."""
        self._keep()
        done, num = self._over_ranks()
        where = "nothing of it is saved" if self.parts is None else f"saved in {self.parts.folder}"
        log.info(f"eval: stopped by a signal: {done:,} of {num:,} images were scored; {where}.")

    def forget(self) -> None:
        """Remove the parts: the score is written."""
        if self.parts is not None and self.rank == 0:
            self.parts.remove(self.of)
