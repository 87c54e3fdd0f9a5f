"""How fast one loader process delivers stored samples at 512 px: ours, and what others use for it.

    python -m bench.data                                        # -> runs/bench/data.json
    python -m bench.data parts=moments num_samples=256 rounds=1 results=/tmp/data.json

Three parts, each with contestants that alternate on the same samples:

    moments    batches of 64, (64, 8, 64, 64)
        ours         the dataset `moments` through data.build_data; float16
        plain        the same shards through StreamingDataset and torch's DataLoader; float16
        webdataset   KEY.npy (1, 8, 64, 64) float32 and KEY.txt in a tar, as the MLPerf reference has them; not tokenized
    images     batches of 16, (16, 3, 512, 512), from JPEGs, with tokens
        ours         the dataset `images` through data.build_data; uint8
        plain        the same shards and functions, sample by sample in __getitem__; uint8
        webdataset   KEY.jpg and KEY.txt in a tar; PIL, then torchvision's Resize, CenterCrop and ToTensor; float32
    streams    one stage of moments; two of half the size

A turn is an epoch: samples over the seconds from its first batch to its last, so neither the worker's start nor an epoch's
counts. `cpu_us_a_sample` is the processor time of the loader process. All files are in the page cache.
Exit code: 0, or 2 if the command cannot be read.
"""

from __future__ import annotations

import functools
import io
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image
from streaming import MDSWriter, StreamingDataset
from torch import Tensor
from torch.utils.data import DataLoader

from bench.command import Figures, measure_and_record, take_turns, threads
from common.command import command
from common.command_line import Problem
from common.value_types import ImageSize, limited
from data import DataConfig, build_data
from families import load_family
from families.spec import Family
from mds.dataset import array_encoding, write_metadata
from mds.fetch import HASH
from mds.images import decode_image, resize_and_crop
from mds.mixture import StreamConfig
from mds.order import BLOCK_SIZE

SIZE = (512, 512)
MOMENTS_BATCH, IMAGES_BATCH = 64, 16
SEED = 17
ORIGINAL_SIZES = ((512, 640), (640, 512), (768, 576), (600, 800))  # px; not square, the short side at least 512
IMAGE_COLUMNS = {"jpg": "bytes", "caption": "str", "key": "str", "width": "int", "height": "int"}

Batch = Mapping[str, Any]


@dataclass(frozen=True)
class DataBenchConfig:
    """The keys of this command."""

    parts: str = "moments,images,streams"
    """What is measured, with commas between: moments, images, streams."""
    num_samples: int = limited(4096, 4 * MOMENTS_BATCH)
    """Samples of moments: 64 KiB each, twice that in the tar."""
    num_images: int = limited(256, 4 * IMAGES_BATCH)
    """JPEGs."""
    rounds: int = limited(5, 1)
    """Turns of each contestant."""
    results: str = "runs/bench/data.json"
    """File of the record; an earlier one is replaced."""
    work: str | None = None
    """Folder for temporary files, on the disk to be measured. null: the system's."""

    @property
    def names(self) -> list[str]:
        """The parts."""
        return [name.strip() for name in self.parts.split(",")]


def check(config: DataBenchConfig) -> list[Problem]:
    """Return every problem of the keys."""
    unknown = ", ".join(repr(name) for name in config.names if name not in PARTS)
    return [Problem(f"parts: unknown {unknown}. Known: {', '.join(PARTS)}.", ("parts",))] if unknown else []


def build_family() -> Family:
    """Return the family that the datasets are made for; its networks are not built."""
    return load_family("sd2", "tiny", "stock")


# --- what is read ---


def words(number: int) -> dict[str, str]:
    """Return the caption and the key of a sample."""
    return {"caption": f"image number {number} of a gradient with a block of one color", "key": f"{number:09d}"}


def npy(values: np.ndarray) -> bytes:
    """Return an array as the content of a .npy file."""
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def render_jpeg(number: int, size: tuple[int, int]) -> bytes:
    """Render waves and a block of one color, about as hard to decode as a photograph's smooth parts."""
    width, height = size
    x, y = np.meshgrid(np.linspace(0, 9, width), np.linspace(0, 9, height))
    waves = [np.sin(x * (1 + number % 5) + y), np.cos(y * (1 + number % 3)), np.sin(x * y / 3 + number)]
    pixels = (127.5 + 127.5 * np.stack(waves, axis=-1)).astype(np.uint8)
    pixels[: height // 3, : width // 3] = (number * 53 % 256, number * 101 % 256, 200)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def write_moments(folder: Path, num_samples: int, *, size: ImageSize = SIZE, tar: bool = False) -> None:
    """Write random moments as a dataset in folder/stage and, if asked for, the same numbers to folder/samples.tar."""
    columns = build_family().columns("moments", size)
    encodings = {name: array_encoding(column.stored_dtype, column.shape) for name, column in columns.items()}
    random, moments, tokens = np.random.default_rng(SEED), columns["moments"], columns["tokens"]
    rows = (
        {
            "moments": random.standard_normal(moments.shape, np.float32).astype(np.float16),
            "tokens": random.integers(0, tokens.below, tokens.shape, tokens.stored_dtype),
            **words(number),
        }
        for number in range(num_samples)
    )
    as_files = (lambda row: {"npy": npy(row["moments"][None].astype(np.float32))}) if tar else None
    _write(folder, "moments", {**encodings, "caption": "str", "key": "str"}, rows, as_files)


def write_images(folder: Path, num_images: int) -> None:
    """Write rendered JPEGs as a dataset in folder/stage, and the same bytes to folder/samples.tar."""
    sizes = [ORIGINAL_SIZES[number % len(ORIGINAL_SIZES)] for number in range(num_images)]
    rows = (
        {"jpg": render_jpeg(number, size), "width": size[0], "height": size[1], **words(number)}
        for number, size in enumerate(sizes)
    )
    _write(folder, "images", IMAGE_COLUMNS, rows, lambda row: {"jpg": row["jpg"]})


def _write(
    folder: Path,
    stage: str,
    columns: Mapping[str, str],
    rows: Iterable[dict[str, Any]],
    as_files: Callable[[dict[str, Any]], dict[str, bytes]] | None,
) -> None:
    """Write each row into shards and, as files by suffix, into a tar."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = MDSWriter(out=str(folder / "stage"), columns=dict(columns), hashes=[HASH], size_limit="64mb")
    with shards as writer, tarfile.open(folder / "samples.tar", "w") as tar:
        for row in rows:
            writer.write(row)
            files = {**as_files(row), "txt": row["caption"].encode()} if as_files else {}
            for suffix, content in files.items():
                member = tarfile.TarInfo(f"{row['key']}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    write_metadata(folder / "stage", stage, {})


# --- who reads ---


def our_loader(config: DataConfig, batch_size: int, size: ImageSize = SIZE) -> Any:
    """Return this library's loader."""
    cpu = torch.device("cpu")
    return build_data(config, build_family(), size=size, device_batch_size=batch_size, device=cpu, seed=SEED).dataloader


class PlainImages(StreamingDataset):
    """The dataset `images` as users of streaming read it: one sample at a time, by the functions that we use too."""

    def __getitem__(self, at: Any) -> Any:
        sample = super().__getitem__(at)
        tokens = build_family().tokenize([sample["caption"]])["tokens"][0]
        return {"images": resize_and_crop(decode_image(sample["jpg"]), SIZE), "tokens": tokens}


def stack_moments(samples: Sequence[Batch]) -> dict[str, Tensor]:
    """Collate rows of the dataset `moments`."""
    moments = torch.from_numpy(np.stack([sample["moments"] for sample in samples]))
    tokens = torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))
    return {"moments": moments, "tokens": tokens}


def stack_images(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Collate decoded images and their tokens."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in ("images", "tokens")}


def stack_npy(samples: Sequence[tuple[np.ndarray, str]]) -> dict[str, Any]:  # (1, 8, 64, 64) -> (B, 8, 64, 64)
    """Collate arrays of .npy files and their captions."""
    moments = np.concatenate([moments for moments, _ in samples])
    return {"moments": torch.from_numpy(moments), "captions": [caption for _, caption in samples]}


def plain_loader(folder: Path, stage: str, batch_size: int) -> Iterable[Batch]:
    """Plain streaming: the same order of samples as ours, torch's DataLoader, a collate."""
    kind, collate = (StreamingDataset, stack_moments) if stage == "moments" else (PlainImages, stack_images)
    dataset = kind(
        local=str(folder / "stage"),
        batch_size=batch_size,
        predownload=8 * batch_size,
        num_canonical_nodes=1,
        shuffle=True,
        shuffle_algo="py1e",
        shuffle_block_size=BLOCK_SIZE,
        shuffle_seed=SEED,
    )
    return DataLoader(dataset, batch_size, num_workers=1, persistent_workers=True, drop_last=True, collate_fn=collate)


def webdataset_loader(folder: Path, stage: str, batch_size: int) -> Iterable[Batch]:
    """WebDataset: the pipeline of its documentation."""
    import webdataset

    tars = webdataset.WebDataset([str(folder / "samples.tar")], shardshuffle=False)
    if stage == "moments":
        samples, collate = tars.decode(only=["npy", "txt"]).to_tuple("npy", "txt"), stack_npy
    else:
        samples, collate = tars.decode("pil").map(functools.partial(_decode_jpg, _usual_transform())), stack_images
    batches = samples.batched(batch_size, partial=False, collation_fn=collate)
    return webdataset.WebLoader(batches, batch_size=None, num_workers=1, persistent_workers=True)


def _usual_transform() -> Callable[[Image.Image], Tensor]:
    from torchvision import transforms

    resize = transforms.Resize(SIZE[0], transforms.InterpolationMode.BICUBIC)
    return transforms.Compose([resize, transforms.CenterCrop(SIZE[0]), transforms.ToTensor()])


def _decode_jpg(transform: Callable, sample: Batch) -> dict[str, Tensor]:
    tokens = build_family().tokenize([sample["txt"]])["tokens"][0]
    return {"images": transform(sample["jpg"].convert("RGB")), "tokens": tokens}


# --- the parts ---


def samples_per_sec(loader: Iterable[Batch]) -> float:
    """Run an epoch; return samples/s from the first batch to the last."""
    times, sizes = [], []
    for batch in loader:
        times.append(time.perf_counter())
        sizes.append(len(next(iter(batch.values()))))
    return sum(sizes[1:]) / (times[-1] - times[0])


def readers(stage: str, folder: Path, config: DataBenchConfig) -> dict[str, Iterable[Batch]]:
    """Write samples of a dataset; return contestant -> loader."""
    batch_size = MOMENTS_BATCH if stage == "moments" else IMAGES_BATCH
    if stage == "moments":
        write_moments(folder, config.num_samples, tar=True)
    else:
        write_images(folder, config.num_images)
    return {
        "ours": our_loader(DataConfig(stage=stage, local=str(folder / "stage"), workers=1), batch_size),
        "plain": plain_loader(folder, stage, batch_size),
        "webdataset": webdataset_loader(folder, stage, batch_size),
    }


def streams(folder: Path, config: DataBenchConfig) -> dict[str, Iterable[Batch]]:
    """Write a dataset, and two of half its size; return contestant -> loader."""
    write_moments(folder / "one", config.num_samples)
    halves = [folder / "half0", folder / "half1"]
    for half in halves:
        write_moments(half, config.num_samples // 2)
    two = [StreamConfig(str(half / "stage")) for half in halves]
    configs = {
        "one": DataConfig(stage="moments", local=str(folder / "one" / "stage"), workers=1),
        "two": DataConfig(stage="moments", streams=two, workers=1),
    }
    return {name: our_loader(each, MOMENTS_BATCH) for name, each in configs.items()}


PARTS: dict[str, Callable[[Path, DataBenchConfig], dict[str, Iterable[Batch]]]] = {
    "moments": functools.partial(readers, "moments"),
    "images": functools.partial(readers, "images"),
    "streams": streams,
}


def measure_part(part: str, folder: Path, config: DataBenchConfig, figures: Figures) -> None:
    """Measure the contestants of a part; the first one is set over the others."""
    loaders = PARTS[part](folder, config)
    num = config.num_images if part == "images" else config.num_samples
    cpu_us: dict[str, list[float]] = {name: [] for name in loaders}
    if part != "streams":
        num_bytes = sum(path.stat().st_size for path in (folder / "stage").glob("*.mds"))
        figures.flat[f"{part}_bytes_a_sample"] = round(num_bytes / num, 1)

    def turn(name: str) -> float:
        began_sec = workers_sec()
        speed = samples_per_sec(loaders[name])
        cpu_us[name].append(1e6 * (workers_sec() - began_sec) / num)
        return speed

    first, *others = loaders
    for name, values in take_turns({name: functools.partial(turn, name) for name in loaders}, config.rounds).items():
        figures.add(f"{part}_{name}_samples_per_sec", values)
        figures.add(f"{part}_{name}_cpu_us_a_sample", cpu_us[name][1:])  # the first was the warm-up
    for name in others:
        key = f"{part}_{first}_over_{name}"
        figures.ratio(key, f"{part}_{first}_samples_per_sec", f"{part}_{name}_samples_per_sec")


def workers_sec() -> float:
    """Return the processor time of the loader processes, including that of threads which ended with an epoch."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


def measure(config: DataBenchConfig) -> dict[str, Any]:
    """Measure the parts and return their figures."""
    figures = Figures()
    with threads(1):
        for part in config.names:
            with tempfile.TemporaryDirectory(dir=config.work, prefix=f"data-{part}-") as folder:
                measure_part(part, Path(folder), config, figures)
    return figures.as_record()


@command(keys=DataBenchConfig, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    return measure_and_record("data", DataBenchConfig, argv, measure, check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
