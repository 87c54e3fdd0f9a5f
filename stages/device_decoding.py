"""Pictures decoded on a device, in the training process: `data.decode=device`.

    loader worker      reads a sample, checks its header, draws caption, crop and mirror image, tokenises; hands over
                       the file's own bytes, or the pixels of what only the CPU decodes as PIL does    read_batch
    training process   decodes the JPEGs of a batch in one call of torchvision's decode_jpeg (nvJPEG on a GPU), then
                       turns, scales, cuts and mirrors them by the rules of stages/images.py           DeviceDecoder

Which samples a batch has is found out as on the CPU. What the device refuses is read again and decoded on the CPU; if that
refuses it too, the sample is bad, and the next good one of its shard takes its place, as ever. So the samples, the draws and
those that are bad depend neither on the device nor on where a run went on. One case differs: a damaged file that nvJPEG
takes, although the CPU would refuse it, is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torchvision
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

from cli.limits import ImageSize
from cli.log import EVERY_RANK, log
from stages.batch_memory import BatchMemory
from stages.draws import Draw
from stages.fetch import StreamFailure
from stages.images import (
    JpegHeader,
    covering_size,
    crop_room,
    header_of_jpeg,
    is_long,
    resize_and_crop,
    resize_name,
    shown_part,
    size_of,
    upright,
)
from stages.stream import Bad, Used

MOST_SHRUNK = 32  # fold: at some 45 torch's bicubic kernel refuses, for want of a GPU's shared memory
MOST_PIXELS = 1 << 28  # of pictures that lie decoded on the device at once: 768 MiB
UNDECODED, CONTENT = "undecoded", "content"  # of a batch: a note, and its bytes, uint8 (N,)


def problems(stage: str, resize: str | None) -> list[tuple[str, str]]:
    """(key, message) where pictures cannot be decoded on this machine's devices.

    Args:
        stage: images or moments.
        resize: how the run's variant resizes; see `stages.images.resize_name`.
    """
    instead = "Use data.decode=cpu."
    if stage != "images":
        text = f"a stage of {stage} has no pictures to decode. Leave it out."
    elif resize == resize_name(torch.float32):
        text = f"model.variant=mlperf resizes in float32, to the bit as its reference does on a CPU. {instead}"
    elif not torch.cuda.is_available():
        text = f"there is no CUDA device here. {instead}"
    elif not has_nvjpeg():
        build = f"Install its build for CUDA (torch is {torch.__version__})"
        text = f"torchvision {torchvision.__version__} was built without nvJPEG. {build}, or use data.decode=cpu."
    else:
        return []
    return [("data.decode", f"device, but {text}")]


def has_nvjpeg() -> bool:
    """True if torchvision was built with nvJPEG. Without it, its operator says so before it looks at what it is given."""
    try:
        torch.ops.image.decode_jpegs_cuda([], ImageReadMode.RGB.value, torch.device("cpu"))
    except AttributeError:  # it has no such operator
        return False
    except RuntimeError as error:  # of nvJPEG's: this is no CUDA device
        return "nvJPEG support" not in str(error)
    return True


class Source(Protocol):
    """The stream of pictures: data.StreamingLAIONDataset."""

    epoch: int
    crop: str
    flip: bool
    memory: BatchMemory

    def look(self, sample_id: int) -> tuple[bytes, str, ImageSize, Draw]:
        """Return a sample's file, its caption, the size of its image in a batch, and what is drawn for it."""
        ...

    def first_good(self, sample_id: int, use: Callable[[int], Used]) -> tuple[Used, list[Bad]]:
        """Return what `use` makes of the sample, or of the next of its shard that it can use, and those passed over."""
        ...

    def use(self, sample_id: int) -> dict[str, Any]:
        """Return a sample's image (3, H, W), decoded on the CPU, its caption and its sizes. Raises SampleError."""
        ...

    def read_sample(self, sample_id: int) -> dict[str, Any]:
        """Return a sample as it is read on the CPU, or the next good one of its shard, and the bad ones."""
        ...

    def columns_of(self, samples: Sequence[Mapping[str, Any]]) -> Mapping[str, Tensor]:
        """Return the columns of a batch beside its images."""
        ...


# --- a loader worker ---


@dataclass(frozen=True)
class Picture:
    """A sample's picture as it is handed over: a JPEG, or pixels (H, W, 3) that are scaled, cut and mirrored."""

    sample_id: int
    num_bytes: int
    header: JpegHeader | None
    """Of a JPEG."""
    at: tuple[int, int] | None = None
    """(left, top) of the crop, as of `resize_and_crop`."""
    is_flipped: bool = False


@dataclass(frozen=True)
class Undecoded:
    """What a batch's bytes are. torch's loader hands it over, and pins the batch, without looking into it."""

    size: ImageSize
    """(width, height) of the batch's images, px."""
    epoch: int
    pictures: list[Picture]
    bad: list[list[Bad]]
    """Of each picture, the samples that it takes the place of."""


def read_batch(source: Source, sample_ids: Sequence[int], size: ImageSize) -> dict[str, Any]:
    """Return the batch of these samples, undecoded: its bytes in one piece of memory, what they are, the text columns."""

    def use(sample_id: int) -> tuple[Picture, Tensor, Mapping[str, Any]]:
        data, caption, _, draw = source.look(sample_id)
        if (header := header_for_device(data, size)) is None:
            sample = source.use(sample_id)
            content = sample["images"].permute(1, 2, 0).reshape(-1)
            return Picture(sample_id, len(content), None), content, sample
        at = draw.offset(crop_room(header.size, size)) if source.crop == "random" else None
        is_flipped = source.flip and draw.is_flipped
        beside = {"caption": caption, "sizes": shown_part(header.size, size, at, flipped=is_flipped)}
        content = torch.frombuffer(
            bytearray(data), dtype=torch.uint8
        )  # torch warns of memory that it must not write to
        return Picture(sample_id, len(content), header, at, is_flipped), content, beside

    found, bad = zip(*(source.first_good(sample_id, use) for sample_id in sample_ids), strict=True)
    pictures, contents, samples = zip(*found, strict=True)
    memory, receipt = source.memory.take((sum(map(len, contents)),), torch.uint8)
    torch.cat(contents, out=memory)
    note = Undecoded(size, source.epoch, list(pictures), list(bad))
    return {CONTENT: memory, UNDECODED: note, **source.columns_of(samples), **receipt}


def header_for_device(data: bytes, size: ImageSize) -> JpegHeader | None:
    """Return the header of a JPEG that a device decodes and scales to `size`; None: the CPU has to. Raises SampleError."""
    header = header_of_jpeg(data)
    if header is None:
        return None
    covering = covering_size(header.size, size)
    is_shrunk = any(own > MOST_SHRUNK * whole for own, whole in zip(header.size, covering, strict=True))
    return None if is_shrunk or is_long(covering, size) else header


# --- the training process ---


class DeviceDecoder:
    """Decodes a loader's batches on a device, where they stay.

    On a GPU it has a stream of its own. torchvision writes pictures on another stream at once, into memory of the current
    one; memory that the computation has given back, and may still be reading, would not do.
    """

    def __init__(self, source: Source, device: torch.device):
        self.source, self.device = source, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._has_told = False

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Replace the content of a batch by `images`, uint8 (B, 3, H, W), and `bad`.

        Raises:
            StreamFailure: a shard cannot be read again.
            ValueError: no sample of a shard can be used.
        """
        note, content = batch.pop(UNDECODED), batch.pop(CONTENT)
        with self._on_own_stream():
            images, refused = self._decode_batch(note, content.split([picture.num_bytes for picture in note.pictures]))
        if self.stream is not None:
            computing = torch.cuda.current_stream(self.device)
            computing.wait_stream(self.stream)
            images.record_stream(computing)
        bad = [list(of_one) for of_one in note.bad]
        for number, why in refused.items():
            found = self._read_again(batch, images, number, note)
            bad[number] += found
            if not (found or self._has_told):
                self._has_told = True  # it may be want of memory, for each batch
                given = f"the device has refused a picture ({why}), which the CPU decodes"
                log.info(f"data.decode: {given}. Others like it are not said.", extra=EVERY_RANK)
        return {"images": images, **batch, "bad": [each for of_one in bad for each in of_one]}

    @contextlib.contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        with contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            yield

    def _decode_batch(self, note: Undecoded, contents: Sequence[Tensor]) -> tuple[Tensor, dict[int, str]]:
        """Return images (B, 3, H, W), and which of them are not in there, since the device has refused them, and why."""
        width, height = note.size
        images = torch.empty(len(contents), 3, height, width, dtype=torch.uint8, device=self.device)
        for image, content, picture in zip(images, contents, note.pictures, strict=True):
            if picture.header is None:
                image.copy_(content.view(height, width, 3).permute(2, 0, 1), non_blocking=True)
        refused: dict[int, str] = {}
        for numbers in self._groups(note.pictures):
            refused |= self._decode_group(images, note, {number: contents[number] for number in numbers})
        return images, refused

    def _decode_group(self, images: Tensor, note: Undecoded, files: dict[int, Tensor]) -> dict[int, str]:
        refused = {}
        for number, pixels in zip(files, self._decode(list(files.values())), strict=True):
            picture = note.pictures[number]
            assert picture.header is not None
            if isinstance(pixels, Tensor) and size_of(pixels) == picture.header.stored:
                cut = resize_and_crop(upright(pixels, picture.header.orientation), note.size, at=picture.at)
                images[number].copy_(cut.flip(-1) if picture.is_flipped else cut)
            else:
                refused[number] = pixels if isinstance(pixels, str) else "of another size than its header says"
        return refused

    @staticmethod
    def _groups(pictures: Sequence[Picture]) -> list[list[int]]:
        """Return the numbers of the JPEGs, in groups that have at most MOST_PIXELS, or are a single one: mostly one group."""
        groups: list[list[int]] = []
        room = 0
        for number, picture in enumerate(pictures):
            if picture.header is None:
                continue
            num_pixels = picture.header.stored[0] * picture.header.stored[1]
            if num_pixels > room or not groups:
                groups.append([])
                room = MOST_PIXELS
            groups[-1].append(number)
            room -= num_pixels
        return groups

    def _decode(self, files: list[Tensor]) -> Sequence[Tensor | str]:  # of each uint8 (3, h, w), or why it is refused
        """Decode files in one call, or one by one where that is refused, since it does not say which it was."""
        if self.stream is not None:
            self.stream.synchronize()  # what it still reads must not be written to: see the head of the class
        try:
            return decode_jpeg(files, ImageReadMode.RGB, device=self.device)
        except RuntimeError as error:
            if self.stream is not None:
                torch.cuda.synchronize(self.device)  # the others may still be written
            return [str(error)] if len(files) == 1 else [one for file in files for one in self._decode([file])]

    def _read_again(self, batch: dict[str, Any], images: Tensor, number: int, note: Undecoded) -> list[Bad]:
        """Put a picture as the CPU decodes it, or the one that replaces it, into the batch; return the bad ones."""
        self.source.epoch = note.epoch  # with loader workers this process reads no epoch itself
        try:
            sample = self.source.read_sample(note.pictures[number].sample_id)
        except (RuntimeError, OSError) as error:  # as in a worker: see stages/stream.py
            raise StreamFailure(str(error)) from error
        images[number].copy_(sample["images"])
        for name, column in self.source.columns_of([sample]).items():
            batch[name][number] = column[0]
        return sample["bad"]
