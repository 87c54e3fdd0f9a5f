"""Prompts -> images, a pass at a time, on all ranks: for scores, for sample grids, and as files for people who look.

`composer eval.py SOURCE images=OUT` writes an image of each caption as a PNG file that says how it was made:

    OUT/00001-17-a-red-circle-3f9c2a1b.png     the caption's number and words, the seed, a digest of all that made the image
    OUT/00001-17-a-red-circle-7b01d5e4.mp4     the same of a family of videos

The noise comes from seed and number, as in an evaluation: a caption has the same image whatever is generated with it. An
image whose file exists is not generated again. Other settings, weights or captions have other names. So the same command
resumes a killed one, and nothing is overwritten.

A PNG has caption, settings and model as JSON in its text `easel`, an MP4 as its comment.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor
from tqdm import tqdm

from common import dist
from common.files import atomic_path
from common.log import progress_interval_sec
from common.value_types import ImageSize, kind_of_path, truncate
from evaluation.prompts import Prompt
from families.sampling import prompt_noise, split_by_rank
from ranks import collectives
from ranks.collectives import SignalExchange, Signalled
from run_folder import sample_videos
from run_folder.environment import commit
from run_folder.history import result_line

if TYPE_CHECKING:
    from model import LatentDiffusion

QUEUE_SEC = 3.0  # covers the host's work between two batches
T = TypeVar("T")


class SignalReceived(Exception):
    """A signal arrived while a batch was generated."""


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


def generate_batch(
    model: LatentDiffusion,
    chunk: Sequence[Prompt],
    batch_size: int,
    size: ImageSize,
    seed: int | Sequence[int],
    sampling: Mapping[str, Any],
    exchange: SignalExchange,
) -> Tensor:
    """Return the images of a chunk and, in the rest of the batch, of its last prompt: so every pass has one shape.

    Args:
        seed: of the noise, or one for each prompt.
        sampling: sampler, steps and guidance.
        exchange: asked after each sampling step whether a rank has received a signal.

    Raises:
        SignalReceived: by some rank.
    """
    padded = list(zip(chunk, [seed] * len(chunk) if isinstance(seed, int) else seed, strict=True))
    padded, shape = padded + padded[-1:] * (batch_size - len(chunk)), model.family.latent_shape(size)
    text = model.family.tokenize([prompt.caption for prompt, _ in padded])
    noise = torch.cat([prompt_noise(of_prompt, [prompt.number], shape) for prompt, of_prompt in padded])
    if model.device.type == "cuda":
        # Only pinned memory is copied without the host waiting for the batch before.
        text, noise = {name: tokens.pin_memory() for name, tokens in text.items()}, noise.pin_memory()
    pace = Pace() if model.device.type == "cuda" else None

    def after_step(step: int, num_steps: int) -> None:
        if pace is not None:
            pace.step()
        if exchange.has_signal():
            raise SignalReceived

    return model.generate(text, noise, **sampling, progress=after_step)


def generate_chunks(
    model: LatentDiffusion,
    prompts: Sequence[Prompt],
    batch_size: int,
    size: ImageSize,
    seed: int,
    sampling: Mapping[str, Any],
    signal: Callable[[], int],
    num_done: int = 0,
) -> Iterator[tuple[Sequence[Prompt], Tensor]]:
    """Yield this rank's chunks of the prompts, which are strided over the ranks, with their images. All ranks call it.

    Args:
        sampling: sampler, steps and guidance.
        signal: returns the signal that this rank has received, 0: none.
        num_done: chunks of this rank that are left out, because they were generated before.

    Raises:
        Signalled: a rank has received a signal; what was yielded is done.
    """
    mine = [prompts[index] for index in split_by_rank(len(prompts), dist.get_global_rank(), dist.get_world_size())]
    chunks = list(chunks_of(mine, batch_size))[num_done:]
    exchange = SignalExchange(signal, len(chunks), in_step=model.in_step)
    with contextlib.suppress(SignalReceived):
        for chunk in exchange.iterate_pieces(chunks):
            images = generate_batch(model, chunk or prompts[:1], batch_size, size, seed, sampling, exchange)
            if chunk is not None:  # None: other ranks in step are not through
                yield chunk, images
                exchange.done()
    if number := exchange.agree_on_signal():
        raise Signalled(number)


def gather_images(mine: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return all ranks' captions and images in the order of the prompts, which are strided over the ranks.

    A single rank skips the gather: Gloo copies so much in a separate thread, with separate OpenMP threads. These share
    the cores with ours from then on: with two threads on two cores each later step of a run took twice as long.
    """
    if dist.get_world_size() == 1:
        return mine
    of_ranks = dist.all_gather_object(mine)
    longest = max(map(len, of_ranks), default=0)
    return [part[index] for index in range(longest) for part in of_ranks if index < len(part)]


def as_bytes(images: Tensor) -> Tensor:
    """# (B, 3, H, W) float in [0, 1] -> uint8 on the CPU, rounded."""
    return (images.float().clamp(0.0, 1.0) * 255.0).round().to(torch.uint8).cpu()


def chunks_of(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield the items in order, so many at a time."""
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]


# --- files of images ---

BATCH_SIZE = 4  # of a pass, however many images: on a CPU another size changes an image by a gray level here and there


def folder_problem(folder: str) -> str | None:
    """Say why images cannot go to a folder, or None."""
    return f"{truncate(folder)} is a file. Give a folder." if kind_of_path(folder) not in (None, "folder") else None


@dataclass(frozen=True)
class ImageRequest:
    """One image to generate, and all that it depends on."""

    prompt: Prompt
    seed: int
    guidance: float
    settings: Mapping[str, Any]

    @property
    def file_name(self) -> str:
        """Number, seed, words of the caption, digest."""
        ending = ".mp4" if len(self.settings["image_size"]) == 3 else ".png"
        number = f"{self.prompt.number:05d}" if 0 <= self.prompt.number < 10**12 else "id"
        plain = unicodedata.normalize("NFKD", self.prompt.caption).encode("ascii", "ignore").decode().lower()
        words = re.sub("[^a-z0-9]+", "-", plain)[:40].strip("-")
        digest = hashlib.blake2b(json.dumps(self.metadata(), sort_keys=True).encode(), digest_size=4).hexdigest()
        return "-".join(part for part in (number, str(self.seed), words, digest) if part) + ending

    def metadata(self) -> dict[str, Any]:
        """Return what the image depends on, for its file's name and metadata."""
        of_prompt = {"prompt": self.prompt.caption, "number": self.prompt.number}
        return {**of_prompt, "seed": self.seed, "guidance": self.guidance, **self.settings}


def save_image(image: Tensor, path: Path, request: ImageRequest, model_metadata: Mapping[str, Any]) -> None:
    """Write an image, (3, H, W) uint8, or a video, (3, F, H, W), whole or not at all.

    Args:
        model_metadata: written with what the image depends on; of a video its `fps` too.
    """
    metadata = {**request.metadata(), **model_metadata}
    if image.ndim == 4:
        sample_videos.write_mp4(path, image, metadata["fps"], json.dumps(metadata))
        return
    info = PngInfo()
    info.add_text("easel", json.dumps(metadata))  # in ASCII: an escape sequence reaches no terminal
    with atomic_path(path) as temporary:
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(temporary, format="PNG", pnginfo=info)


@dataclass(frozen=True)
class ImageFolder:
    """A folder of generated images: of each prompt one for each seed and guidance scale.

    size: of the images, px; settings: of the model (precision, prediction); fps: of videos; batch_size: of a pass; None: 4.
    """

    path: Path
    prompts: Sequence[Prompt]
    seeds: range
    guidances: Sequence[float]
    steps: int
    sampler: str | None
    size: ImageSize
    settings: Mapping[str, Any]
    fps: float | None = None
    batch_size: int | None = None
    show_progress: bool = False

    def write(self, model: LatentDiffusion, description: Mapping[str, Any]) -> None:
        """Generate the images of a model that the folder does not have, and print how many. All ranks call it.

        Args:
            description: what the model is called, its weights and fingerprints.

        Raises:
            Signalled: a rank has received a signal; what is written stays.
        """
        settings: dict[str, Any] = {"steps": self.steps, "sampler": self.sampler, "image_size": list(self.size)}
        settings |= self.settings
        settings |= {key: value for key, value in description.items() if key.endswith("_fingerprint")}
        model_metadata = {key: value for key, value in description.items() if key not in settings}
        model_metadata["commit"] = commit()
        if model.family.media == "videos":
            model_metadata["fps"] = self.fps or model.family.frames_per_sec
        requests = [
            ImageRequest(prompt, seed, guidance, settings)
            for guidance in self.guidances
            for prompt in self.prompts
            for seed in self.seeds
        ]
        missing = collectives.on_rank_zero(lambda: self._missing(requests))
        collectives.on_one_rank_of_each_machine(lambda: self.path.mkdir(parents=True, exist_ok=True))
        self._generate(model, [requests[number] for number in missing], model_metadata)
        if dist.get_global_rank() == 0:
            if on_other_machines := len(self._missing(requests)):
                text = f"images: {on_other_machines:,} of {len(requests):,} are on other machines"
                raise ValueError(f"{text}. Give a folder that all machines have.")
            result = {key: description.get(key) for key in ("model", "images_seen", "weights")}
            result |= {"images": len(requests), "drawn": len(missing), "folder": truncate(str(self.path), 300)}
            print(result_line({key: value for key, value in result.items() if value is not None}), flush=True)

    def _missing(self, requests: Sequence[ImageRequest]) -> list[int]:
        return [number for number, image in enumerate(requests) if not (self.path / image.file_name).is_file()]

    def _generate(
        self, model: LatentDiffusion, missing: Sequence[ImageRequest], model_metadata: Mapping[str, Any]
    ) -> None:
        """Generate and write images, which are shared out over the ranks."""
        batch_size, num_ranks = self.batch_size or BATCH_SIZE, dist.get_world_size()
        mine = [missing[index] for index in split_by_rank(len(missing), dist.get_global_rank(), num_ranks)]
        chunks = [
            chunk
            for guidance in self.guidances
            for chunk in chunks_of([image for image in mine if image.guidance == guidance], batch_size)
        ]
        sampling: dict[str, Any] = {"sampler": self.sampler, "steps": self.steps}
        has_progress_bar = self.show_progress and bool(missing) and dist.get_global_rank() == 0
        bar = tqdm(
            total=len(missing),
            desc="images",
            unit="image",
            file=sys.stderr,
            mininterval=progress_interval_sec(),
            disable=not has_progress_bar,
        )
        with collectives.stop_together() as signal:
            exchange = SignalExchange(signal, len(chunks))
            with contextlib.suppress(SignalReceived), bar:
                for chunk in chunks:
                    prompts, seeds = [image.prompt for image in chunk], [image.seed for image in chunk]
                    sampling["guidance"] = chunk[0].guidance
                    images = generate_batch(model, prompts, batch_size, self.size, seeds, sampling, exchange)
                    for request, image in zip(chunk, images[: len(chunk)], strict=True):
                        if not image.isfinite().all():
                            text = f"images: not finite for caption {request.prompt.number}"
                            raise ValueError(f"{text}. Look at the weights and the precision.")
                        save_image(as_bytes(image), self.path / request.file_name, request, model_metadata)
                    exchange.done()
                    bar.update(min(len(chunk) * num_ranks, len(missing) - bar.n))  # of all ranks
            if number := exchange.agree_on_signal():
                raise Signalled(number)
