"""Samples a second of one loader process: ours, plain streaming's, and WebDataset's, on the same samples.

`moments`, at 512 px. All deliver batches of 64: moments (64, 8, 64, 64) and, the first two, tokens int64 (64, 77).

    moments              this library's stage through data.build_data; float16
    moments_plain        the same shards through StreamingDataset and torch's DataLoader, a collate that stacks; float16
    moments_webdataset   KEY.npy (1, 8, 64, 64) float32 and KEY.txt in tars, as the MLPerf reference has them, decoded and
                         stacked; captions stay text, so that it has no tokenising to do; not shuffled

`images`, at 512 px. All decode JPEGs, resize, crop and tokenise; batches of 16: images (16, 3, 512, 512), tokens.

    images               this library's stage through data.build_data; uint8
    images_plain         the same shards and the same functions, sample by sample in __getitem__; uint8
    images_webdataset    KEY.jpg and KEY.txt in tars; PIL, then torchvision's Resize, CenterCrop and ToTensor; float32

A turn is an epoch: samples over the seconds from the arrival of its first batch to that of its last, in the training process.
So neither the start of the worker (it stays alive) nor the start of an epoch counts, and nothing is done with a batch. Every
worker has one torch thread, DataLoader's default of two batches ahead, and files that lie in the page cache.
"""

from __future__ import annotations

import contextlib
import functools
import io
import tarfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from streaming import MDSWriter, StreamingDataset
from torch import Tensor
from torch.utils.data import DataLoader

from bench.contest import Figures, take_turns
from data import DataConfig, build_data
from stages.dataset import write_facts
from stages.fetch import HASH
from stages.images import decode_image, resize_and_crop
from zoo import load_family
from zoo.spec import Column, Family

SIZE = (512, 512)
MOMENTS_BATCH, IMAGES_BATCH = 64, 16
NUM_TARS = 8
SEED = 17
PICTURE_SIZES = ((512, 640), (640, 512), (768, 576), (600, 800))  # px; not square, the short side 512 and more


def build_family() -> Family:
    """Return the family that the stages are made for; its networks are not built."""
    return load_family("sd2", "tiny", "stock")


# --- what is read ---


def write_moments(folder: Path, num_samples: int) -> None:
    """Write random moments as a stage in folder/stage and, the same numbers, as tars in folder/tars."""
    columns = build_family().columns("moments", SIZE)
    encodings = {name: f"ndarray:{c.stored}:{','.join(map(str, c.shape))}" for name, c in columns.items()}
    random, shape = np.random.default_rng(SEED), columns["moments"].shape

    def samples() -> Iterable[tuple[dict[str, Any], dict[str, bytes]]]:
        for number in range(num_samples):
            moments = random.standard_normal(shape, np.float32).astype(np.float16)
            row = {"moments": moments, "tokens": _random_tokens(random, columns["tokens"])}
            yield {**row, **words(number)}, {"npy": npy(moments[None].astype(np.float32)), **_txt(number)}

    _write(folder, "moments", {**encodings, "caption": "str", "key": "str"}, samples())


def write_images(folder: Path, num_images: int) -> None:
    """Write rendered JPEGs as a stage in folder/stage and, the same bytes, as tars in folder/tars."""
    columns = {"jpg": "bytes", "caption": "str", "key": "str", "width": "int", "height": "int"}

    def samples() -> Iterable[tuple[dict[str, Any], dict[str, bytes]]]:
        for number in range(num_images):
            size = PICTURE_SIZES[number % len(PICTURE_SIZES)]
            row = {"jpg": picture(number, size), "width": size[0], "height": size[1]}
            yield {**row, **words(number)}, {"jpg": row["jpg"], **_txt(number)}

    _write(folder, "images", columns, samples())


def _random_tokens(random: np.random.Generator, column: Column) -> np.ndarray:
    return random.integers(0, column.below, column.shape, dtype=column.stored)


def words(number: int) -> dict[str, str]:
    """Return the caption and the key of a sample."""
    return {"caption": f"picture number {number} of a gradient with a block of one colour", "key": f"{number:09d}"}


def _txt(number: int) -> dict[str, bytes]:
    return {"txt": words(number)["caption"].encode()}


def npy(values: np.ndarray) -> bytes:
    """Return an array as a .npy file has it."""
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def picture(number: int, size: tuple[int, int]) -> bytes:
    """Render a JPEG: waves and a block of one colour, about as hard to decode as a photograph's smooth parts."""
    width, height = size
    x, y = np.meshgrid(np.linspace(0, 9, width), np.linspace(0, 9, height))
    waves = [np.sin(x * (1 + number % 5) + y), np.cos(y * (1 + number % 3)), np.sin(x * y / 3 + number)]
    pixels = (127.5 + 127.5 * np.stack(waves, axis=-1)).astype(np.uint8)
    pixels[: height // 3, : width // 3] = (number * 53 % 256, number * 101 % 256, 200)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def _write(
    folder: Path,
    stage: str,
    columns: Mapping[str, str],
    samples: Iterable[tuple[dict[str, Any], dict[str, bytes]]],
) -> None:
    """Write each sample twice: its row into shards, its files by suffix into one of the tars."""
    (folder / "tars").mkdir(parents=True)
    shards = MDSWriter(out=str(folder / "stage"), columns=dict(columns), hashes=[HASH], size_limit="64mb")
    with contextlib.ExitStack() as open_files:
        writer = open_files.enter_context(shards)
        tars = [
            open_files.enter_context(tarfile.open(folder / "tars" / f"{number:05d}.tar", "w"))
            for number in range(NUM_TARS)
        ]
        for number, (row, files) in enumerate(samples):
            writer.write(row)
            for suffix, content in files.items():
                member = tarfile.TarInfo(f"{row['key']}.{suffix}")
                member.size = len(content)
                tars[number % NUM_TARS].addfile(member, io.BytesIO(content))
    write_facts(folder / "stage", stage, {})


# --- who reads ---


def our_loader(folder: Path, stage: str, batch_size: int, workers: int = 1) -> Iterable[dict[str, Tensor]]:
    """This library's batches."""
    config = DataConfig(stage=stage, local=str(folder / "stage"), workers=workers)
    family, device = build_family(), torch.device("cpu")
    return build_data(config, family, size=SIZE, device_batch_size=batch_size, device=device, seed=SEED).dataloader


class PlainImages(StreamingDataset):
    """The stage `images` as users of streaming read it: one sample at a time, by the functions that we use too."""

    def __getitem__(self, at: Any) -> Any:
        sample = super().__getitem__(at)
        tokens = build_family().tokenize([sample["caption"]])["tokens"][0]
        return {"images": resize_and_crop(decode_image(sample["jpg"]), SIZE), "tokens": tokens}


def stack_moments(samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Collate rows of the stage `moments`."""
    moments = torch.from_numpy(np.stack([sample["moments"] for sample in samples]))
    tokens = torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))
    return {"moments": moments, "tokens": tokens}


def stack_images(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Collate decoded images and their tokens."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in ("images", "tokens")}


def plain_loader(folder: Path, stage: str, batch_size: int) -> Iterable[dict[str, Tensor]]:
    """Plain streaming: the same order of samples as ours, torch's DataLoader, a collate."""
    kind, collate = (StreamingDataset, stack_moments) if stage == "moments" else (PlainImages, stack_images)
    dataset = kind(
        local=str(folder / "stage"),
        batch_size=batch_size,
        predownload=8 * batch_size,
        num_canonical_nodes=1,
        shuffle=True,
        shuffle_algo="py1e",
        shuffle_seed=SEED,
    )
    return DataLoader(dataset, batch_size, num_workers=1, persistent_workers=True, drop_last=True, collate_fn=collate)


def webdataset_loader(folder: Path, stage: str, batch_size: int, workers: int = 1) -> Iterable[dict[str, Any]]:
    """WebDataset: the pipeline of its documentation."""
    import webdataset

    tars = webdataset.WebDataset(sorted(map(str, (folder / "tars").glob("*.tar"))), shardshuffle=False)
    if stage == "moments":
        samples = (
            tars.decode(only=["npy", "txt"])
            .to_tuple("npy", "txt")
            .batched(batch_size, partial=False, collation_fn=stack_npy)
        )
    else:
        decode = functools.partial(_decode_jpg, transform=_usual_transform(), tokenize=build_family().tokenize)
        samples = tars.decode("pil").map(decode).batched(batch_size, partial=False, collation_fn=stack_images)
    return webdataset.WebLoader(samples, batch_size=None, num_workers=workers, persistent_workers=workers > 0)


def stack_npy(samples: Sequence[tuple[np.ndarray, str]]) -> dict[str, Any]:  # (1, 8, 64, 64) -> (B, 8, 64, 64)
    """Collate arrays of .npy files and their captions."""
    moments = np.concatenate([moments for moments, _ in samples])
    return {"moments": torch.from_numpy(moments), "captions": [caption for _, caption in samples]}


def _usual_transform() -> Callable[[Image.Image], Tensor]:
    from torchvision import transforms

    resize = transforms.Resize(SIZE[0], transforms.InterpolationMode.BICUBIC)
    return transforms.Compose([resize, transforms.CenterCrop(SIZE[0]), transforms.ToTensor()])


def _decode_jpg(sample: Mapping[str, Any], transform: Callable, tokenize: Callable) -> dict[str, Tensor]:
    return {"images": transform(sample["jpg"].convert("RGB")), "tokens": tokenize([sample["txt"]])["tokens"][0]}


# --- how fast ---


def samples_per_sec(loader: Iterable[Mapping[str, Any]], column: str) -> float:
    """Run an epoch; see the head of this file for what counts."""
    arrivals, sizes = [], []
    for batch in loader:
        arrivals.append(time.perf_counter())
        sizes.append(len(batch[column]))
    return sum(sizes[1:]) / (arrivals[-1] - arrivals[0])


def loaders(folder: Path, stage: str) -> dict[str, Iterable[dict[str, Any]]]:
    """Name -> loader of what `write_moments` or `write_images` has written."""
    batch_size = MOMENTS_BATCH if stage == "moments" else IMAGES_BATCH
    found = {
        stage: our_loader(folder, stage, batch_size),
        f"{stage}_plain": plain_loader(folder, stage, batch_size),
    }
    return found | {f"{stage}_webdataset": webdataset_loader(folder, stage, batch_size)}


def measure_data(stage: str, folder: Path, num_samples: int, rounds: int) -> Figures:
    """Measure all contestants of a stage, `moments` or `images`."""
    write = write_moments if stage == "moments" else write_images
    write(folder, num_samples)
    contestants, figures = loaders(folder, stage), Figures()
    figures.flat = {f"{stage}_num_samples": num_samples}
    turns = {n: functools.partial(samples_per_sec, loader, stage) for n, loader in contestants.items()}
    for name, values in take_turns(turns, rounds).items():
        figures.add(f"{name}_samples_per_sec", values)
    for other, name in (("plain", "plain_streaming"), ("webdataset", "webdataset")):
        over, under = f"{stage}_samples_per_sec", f"{stage}_{other}_samples_per_sec"
        figures.ratio(f"{stage}_speedup_vs_{name}", over, under)
    return figures
