"""What is drawn when a sample is read: mirrored or not, where it is cut, which of its captions, when a clip begins.

The numbers are a hash of (seed, epoch, sample number) alone. So a run reads the same on any number of ranks and loader
workers, and after a resume within an epoch; a sample that replaces a broken one has its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from cli.limits import ImageSize


@dataclass(frozen=True)
class Draw:
    """Independent numbers, uniform in [0, 1), of one reading of a sample."""

    flip: float
    caption: float
    left: float
    top: float

    @property
    def is_flipped(self) -> bool:
        return self.flip < 0.5

    def one_of(self, captions: Sequence[str]) -> str:
        """Return a caption; each is equally likely."""
        return captions[int(self.caption * len(captions))]

    def offset(self, room: ImageSize) -> tuple[int, int]:
        """Return (left, top) of a crop in whole pixels, each from 0 to `room`; all places are equally likely."""
        return int(self.left * (room[0] + 1)), int(self.top * (room[1] + 1))


def draw_of(seed: int, epoch: int, sample_id: int) -> Draw:
    """Return the numbers of a sample's reading in an epoch; `sample_id`: its number among all of the run."""
    digest = hashlib.blake2b(f"{seed} {epoch} {sample_id}".encode(), digest_size=32).digest()
    words = (int.from_bytes(digest[at : at + 8], "big") for at in range(0, 32, 8))
    return Draw(*((word >> 11) / 2**53 for word in words))  # 53 bits: all of a float's, and never 1


def place_of(seed: int, epoch: int, sample_id: int) -> float:
    """Return where in its film a sample's clip lies, from 0, at its beginning, to 1; of a hash of its own."""
    digest = hashlib.blake2b(f"{seed} {epoch} {sample_id}".encode(), digest_size=8, person=b"clip").digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53
