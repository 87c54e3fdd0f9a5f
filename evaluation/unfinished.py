"""An evaluation that is not whole yet: how far each rank is, and its sums on the disk, so that a killed one goes on.

    FOLDER/part-OF-000000000003-DIGEST.pt     of rank 3; OF: which evaluation it is, DIGEST: of the file's bytes

A part is taken for the evaluation alone that it was made in: the same weights, settings, prompts and number of ranks. Sums
are float64 and go on in the order in which they were begun: the figures are the unbroken evaluation's, bit for bit on a CPU.
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
"""Of the folder, in a run's or in that of the table of scores."""


class Parts:
    """The files, one a rank.

    Args:
        folder: of the files; there from the first to the last of them.
        is_alone: no other command keeps parts there, so that those of other evaluations may go.
    """

    def __init__(self, folder: Path, *, is_alone: bool):
        self.folder, self.is_alone = folder, is_alone

    def find(self, of: str, rank: int) -> tuple[Path, dict[str, Any]] | None:
        """Return a rank's part and what it holds, or None. What is damaged or another evaluation's is set aside, and said.

        Args:
            of: everything that says which evaluation this is.
        """
        name = stem(_kind(of), rank)
        for left in self.folder.glob(f".{name}.*.tmp"):
            left.unlink(missing_ok=True)  # of a killed writer
        for path in self.folder.glob(f"{name}-*.pt"):
            with contextlib.suppress(
                FileNotFoundError
            ):  # another command, of the same evaluation, has just got further
                content: Mapping[str, Any] = {}
                with contextlib.suppress(ConfigError):
                    content = read(path) if is_whole(path) else {}
                if content.get("of") == of:
                    return path, dict(content)
                set_aside(path)
        return None

    def keep(self, of: str, rank: int, content: Mapping[str, Any]) -> None:
        """Write a rank's part in the place of the one before. Raises OSError: it cannot be written."""
        write(self.folder, stem(_kind(of), rank), {"schema": SCHEMA, "of": of, **content})

    def of_others(self, of: str) -> list[Path]:
        """Return the parts of other evaluations."""
        return [path for path in self.folder.glob(f"{PART}*.pt") if not path.name.startswith(_kind(of))]

    def remove(self, of: str) -> None:
        """Remove the parts of an evaluation whose score is written, and all others where nobody else has any."""
        for path in self.folder.glob(f"{PART}*.pt" if self.is_alone else f"{_kind(of)}*.pt"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not there, or not empty
            self.folder.rmdir()


def _kind(of: str) -> str:
    return f"{PART}{xxhash.xxh3_64_hexdigest(of)}-"


def set_aside(path: Path) -> None:
    """Rename a part that cannot be used, and say so."""
    path.replace(path.with_name(path.name + ".damaged"))
    log.warning(f"eval: {path} is damaged, or of another evaluation; set aside.", extra=EVERY_RANK)


class Work:
    """How far this rank is with an evaluation; it begins where its part ends.

    Args:
        parts: None: nothing is kept.
        of: which evaluation it is; the same on all ranks.
        meter: with nothing measured; has the part's sums then.
        num_images, num_chunks: of this rank: its prompts, and the batches that they make.
        num_samples: images of the first prompts that are wanted for the grid.
        began: time.monotonic() at the start.

    Attributes:
        num_done: chunks; samples: caption and image of this rank's first prompts.
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
        """Of this evaluation; those of earlier starts count as far as their parts go."""
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
            log.info(f"eval: goes on: {done:,} of {num:,} images were scored by an earlier start.")
        if self.rank == 0 and (others := parts.of_others(self.of)):
            what = f"{len(others)} parts of other evaluations (weights, settings, prompts or ranks) are not used"
            use = "they go with this one" if parts.is_alone else "remove them if nobody goes on"
            log.info(f"eval: {parts.folder}: {what}; {use}.")

    def _over_ranks(self) -> tuple[int, int]:
        """Return how many images are done, and how many there are."""
        own = min(self.num_images, self.num_done * self.batch_size), self.num_images
        done, num = zip(*dist.all_gather_object(own), strict=True)
        return sum(done), sum(num)

    def add(self, captions: Sequence[str], images: Tensor) -> None:
        """Note a chunk that the meter has been given, and keep a part where it is time for one.

        Args:
            images: uint8 (N, 3, H, W) on the CPU, those of `num_wanted`.
        """
        self.num_done += 1
        self.samples += zip(captions, images, strict=True)
        if time.monotonic() - self.kept_at >= EVERY_SEC:
            self._keep()

    @property
    def num_wanted(self) -> int:
        """Images that the grid still wants."""
        return self.num_samples - len(self.samples)

    def _keep(self) -> None:
        """Write what has been measured: the last batch may still wait for the GPU, and is left out then."""
        if self.parts is None:
            return
        num_done = self.num_done - self.meter.is_waiting
        samples = self.samples[: num_done * self.batch_size]
        content = {"chunks": num_done, "seconds": self.seconds, "samples": samples, "sums": self.meter.sums()}
        try:
            self.parts.keep(self.of, self.rank, content)
        except (OSError, RuntimeError) as error:
            given = f"{self.parts.folder}: cannot be written ({error})"
            log.warning(f"eval: {given}; a killed evaluation would go on from before.", extra=EVERY_RANK)
        self.kept_at = time.monotonic()

    def leave(self) -> None:
        """Keep all that is scored by now, and say how much that is; all ranks call it."""
        self.meter.measure_given()
        self._keep()
        done, num = self._over_ranks()
        where = "nothing of it is kept" if self.parts is None else f"kept in {self.parts.folder}"
        log.info(f"eval: left at a signal: {done:,} of {num:,} images were scored; {where}.")

    def forget(self) -> None:
        """Remove the parts: the score is written."""
        if self.parts is not None and self.rank == 0:
            self.parts.remove(self.of)
