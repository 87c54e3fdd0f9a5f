"""Prompts -> images, a pass at a time, on all ranks: for scores, for grids, and for people who look."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from composer.utils import dist
from torch import Tensor

from cli.limits import ImageSize
from cli.ranks import Hearing, Signalled
from evaluation.meter import Pace
from evaluation.prompts import Prompt
from zoo.sampling import prompt_noise, shard

if TYPE_CHECKING:
    from model import LatentDiffusion

T = TypeVar("T")


class Heard(Exception):
    """A signal arrived while a batch was generated."""


def generate(
    model: LatentDiffusion,
    chunk: Sequence[Prompt],
    batch_size: int,
    size: ImageSize,
    seed: int | Sequence[int],
    ways: Mapping[str, Any],
    hearing: Hearing,
) -> Tensor:
    """Return the images of a chunk and, in the rest of the batch, of its last prompt: so every pass has one shape.

    `seed`: of the noise, or one for each prompt. Raises Heard: a rank has received a signal.
    """
    padded = list(zip(chunk, [seed] * len(chunk) if isinstance(seed, int) else seed, strict=True))
    padded, shape = padded + padded[-1:] * (batch_size - len(chunk)), model.family.latent_shape(size)
    text = model.family.tokenize([prompt.caption for prompt, _ in padded])
    noise = torch.cat([prompt_noise(own, [prompt.number], shape) for prompt, own in padded])
    if model.device.type == "cuda":
        # Only pinned memory is copied without the host waiting for the batch before.
        text, noise = {name: tokens.pin_memory() for name, tokens in text.items()}, noise.pin_memory()
    pace = Pace() if model.device.type == "cuda" else None

    def listen(step: int, num_steps: int) -> None:
        if pace is not None:
            pace.step()
        if hearing.heard():
            raise Heard

    return model.generate(text, noise, **ways, progress=listen)


def drawn(
    model: LatentDiffusion,
    prompts: Sequence[Prompt],
    batch_size: int,
    size: ImageSize,
    seed: int,
    ways: Mapping[str, Any],
    signal: Callable[[], int],
    num_done: int = 0,
) -> Iterator[tuple[Sequence[Prompt], Tensor]]:
    """Yield this rank's chunks of the prompts, which are strided over the ranks, with their images. All ranks call it.

    Args:
        ways: sampler, steps and guidance.
        signal: returns the signal that this rank has received, 0: none.
        num_done: chunks of this rank that are left out, because they were drawn before.

    Raises:
        Signalled: a rank has received a signal; what was yielded is done.
    """
    mine = [prompts[place] for place in shard(len(prompts), dist.get_global_rank(), dist.get_world_size())]
    chunks = list(chunks_of(mine, batch_size))[num_done:]
    hearing = Hearing(signal, len(chunks), in_step=model.in_step)
    with contextlib.suppress(Heard):
        for chunk in hearing.pieces(chunks):
            images = generate(model, chunk or prompts[:1], batch_size, size, seed, ways, hearing)
            if chunk is not None:  # None: other ranks in step are not through
                yield chunk, images
                hearing.done()
    if number := hearing.agreed():
        raise Signalled(number)


def gathered(mine: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return all ranks' captions and images in the order of the prompts, which are strided over the ranks.

    A rank that is alone asks nobody: Gloo copies so much in a thread of its own, with OpenMP threads of its own. These share
    the cores with ours from then on: with two threads on two cores each later step of a run took twice as long.
    """
    if dist.get_world_size() == 1:
        return mine
    of_ranks = dist.all_gather_object(mine)
    longest = max(map(len, of_ranks), default=0)
    return [part[place] for place in range(longest) for part in of_ranks if place < len(part)]


def as_bytes(images: Tensor) -> Tensor:
    """# (B, 3, H, W) float in [0, 1] -> uint8 on the CPU, rounded."""
    return (images.float().clamp(0.0, 1.0) * 255.0).round().to(torch.uint8).cpu()


def chunks_of(prompts: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield the prompts in order, so many at a time."""
    for begin in range(0, len(prompts), size):
        yield prompts[begin : begin + size]
