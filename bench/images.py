"""How fast one loader process delivers pictures at 512 px, and what of its time goes where; all from the same JPEGs.

    python -m bench.images                                     # two tables, and reports/results/images_speed.json
    python -m bench.images num_images=64 rounds=1 results=/tmp/images.json

    ours          the stage `images` through data.build_data; uint8
    before        the same reader with what it did until JPEGs went through torchvision: PIL, four copies a picture, a stack
    predecessor   the same shards as mosaicml/diffusion-benchmark reads them: PIL, torchvision's Resize to a square and
                  ToTensor, sample by sample in a StreamingDataset, torch's DataLoader and collate; float32
    webdataset    tars of the same files: PIL, then torchvision's Resize, CenterCrop, ToTensor; float32 (bench/micro_data.py)

All tokenise the captions by the same tokenizer. A turn is an epoch of batches of 16: images/s from the arrival of the first
batch to that of the last, and processor time of the loader process an image, the epoch's beginning included. Beside busy
neighbours the first says how much of a core there was, the second changes less. The parts are functions of ours in this
process; what the loader process takes beyond their sum, `rest`, is reading, and handing the batch over in shared memory.
Exit code: 0 when the record was written, 2 when the command cannot be read.
"""

from __future__ import annotations

import functools
import io
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image, ImageOps
from streaming import StreamingDataset
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import transforms

from bench.command import ends, head, read_keys, threads, write_record
from bench.contest import Figures, rounded, take_turns
from bench.micro_data import (
    IMAGES_BATCH,
    PICTURE_SIZES,
    SEED,
    SIZE,
    build_family,
    our_loader,
    picture,
    samples_per_sec,
    webdataset_loader,
    words,
    write_images,
)
from cli.command import command
from cli.limits import limited
from cli.table import as_table
from config import as_written
from data import StreamingLAIONDataset
from stages.images import decode_image, resize_and_crop

SCHEMA = 1
OTHERS = ("before", "predecessor", "webdataset")
PARTS = ("decode", "resize", "batch", "tokenise")
ENDS = ("", "_min", "_max")


@dataclass(frozen=True)
class ImagesBenchConfig:
    """The keys of this command."""

    num_images: int = limited(256, 2 * IMAGES_BATCH)
    """Pictures of an epoch."""
    rounds: int = limited(7, 1)
    """Turns of each contestant."""
    results: str = "reports/results/images_speed.json"
    """File of the record; an earlier one is replaced."""
    work: str | None = None
    """Folder for temporary files. null: the system's."""


# --- who reads ---


def decode_by_pil(data: bytes) -> Tensor:  # -> uint8 (3, h, w)
    """Decode as `decode_image` did."""
    image = Image.open(io.BytesIO(data), formats=("JPEG", "PNG", "WEBP"))
    image.load()
    return torch.from_numpy(np.array(ImageOps.exif_transpose(image).convert("RGB"))).permute(2, 0, 1)


class PilImages(StreamingLAIONDataset):
    """The stage `images` as it was read before."""

    def read_batch(self, sample_ids: Sequence[int]) -> dict[str, Any]:
        """Decode, resize, stack and tokenise."""
        samples = [self[sample_id] for sample_id in sample_ids]
        images = [resize_and_crop(decode_by_pil(sample["jpg"]), SIZE) for sample in samples]
        return {"images": torch.stack(images), **self.tokenize([sample["caption"] for sample in samples]), "bad": []}


class PredecessorImages(StreamingDataset):
    """The stage `images` by the predecessor's transforms."""

    @functools.cached_property
    def transform(self) -> Callable[[Image.Image], Tensor]:
        """PIL image -> float32 (3, H, W)."""
        return transforms.Compose([transforms.Resize(SIZE[::-1]), transforms.ToTensor()])

    def __getitem__(self, at: Any) -> Any:
        sample = super().__getitem__(at)
        image = self.transform(Image.open(io.BytesIO(sample["jpg"])).convert("RGB"))
        return {"images": image, "tokens": build_family().tokenize([sample["caption"]])["tokens"][0]}


def loaders(folder: Path) -> dict[str, Iterable[Mapping[str, Any]]]:
    """Name -> loader of what `write_images` has written, with one process each."""
    before: Any = our_loader(folder, "images", IMAGES_BATCH)
    before.dataset.__class__ = PilImages  # all else is the same: the stream, its threads, the loader
    dataset = PredecessorImages(
        local=str(folder / "stage"), batch_size=IMAGES_BATCH, num_canonical_nodes=1, shuffle=True, shuffle_seed=SEED
    )
    return {
        "ours": our_loader(folder, "images", IMAGES_BATCH),
        "before": before,
        "predecessor": DataLoader(dataset, IMAGES_BATCH, num_workers=1, persistent_workers=True, drop_last=True),
        "webdataset": webdataset_loader(folder, "images", IMAGES_BATCH),
    }


# --- the record ---


def measure(config: ImagesBenchConfig, folder: Path) -> dict[str, Any]:
    """Return the record: what was measured, flat, with every value under `by_round`."""
    write_images(folder, config.num_images)
    contestants, figures = loaders(folder), Figures()
    cpu_us: dict[str, list[float]] = {name: [] for name in contestants}
    num_images = config.num_images // IMAGES_BATCH * IMAGES_BATCH

    def turn(name: str) -> float:
        began_sec = _workers_sec()
        rate = samples_per_sec(contestants[name], "images")
        cpu_us[name].append(1e6 * (_workers_sec() - began_sec) / num_images)
        return rate

    turns = {name: functools.partial(turn, name) for name in contestants}
    for name, rates in take_turns(turns, config.rounds).items():
        figures.add(f"{name}_images_per_sec", rates)
        figures.add(f"{name}_cpu_us_an_image", cpu_us[name][1:])  # the first was for warming up
    for other in contestants.keys() - {"ours"}:
        figures.ratio(f"speedup_vs_{other}", "ours_images_per_sec", f"{other}_images_per_sec")
        figures.ratio(f"cpu_speedup_vs_{other}", f"{other}_cpu_us_an_image", "ours_cpu_us_an_image")
    for name, values in measure_parts(config.rounds).items():
        figures.add(f"{name}_cpu_us", values)
    rest = figures.flat["ours_cpu_us_an_image"] - sum(figures.flat[f"{part}_cpu_us"] for part in PARTS)
    return {**figures.flat, "rest_cpu_us": rounded(rest), "by_round": figures.by_round}


def _workers_sec() -> float:
    """Return the processor time of the loader processes, which live: threads that ended with an epoch included."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


def measure_parts(rounds: int) -> dict[str, list[float]]:
    """Measure processor time an image, us, of what our loader process calls, and of PIL's decoding, in turns."""
    files = [picture(number, PICTURE_SIZES[number % len(PICTURE_SIZES)]) for number in range(IMAGES_BATCH)]
    decoded = [decode_image(file) for file in files]
    resized = [resize_and_crop(image, SIZE) for image in decoded]
    batch = torch.empty(IMAGES_BATCH, *SIZE[::-1], 3, dtype=torch.uint8).permute(0, 3, 1, 2)
    captions, tokenize = [words(number)["caption"] for number in range(IMAGES_BATCH)], build_family().tokenize
    work: dict[str, Callable[[], Any]] = {
        "decode": lambda: [decode_image(file) for file in files],
        "pil_decode": lambda: [decode_by_pil(file) for file in files],
        "resize": lambda: [resize_and_crop(image, SIZE) for image in decoded],
        "batch": lambda: [row.copy_(image) for row, image in zip(batch, resized, strict=True)],
        "stack": lambda: torch.stack(resized),
        "tokenise": lambda: tokenize(captions),
    }

    def turn(name: str) -> float:
        began_sec = time.process_time()
        for _ in range(4):
            work[name]()
        return 1e6 * (time.process_time() - began_sec) / (4 * IMAGES_BATCH)

    return take_turns({name: functools.partial(turn, name) for name in work}, rounds)


def lines(record: Mapping[str, Any]) -> Iterable[str]:
    """Yield a table of who reads, then one of where our time goes."""
    rows = []
    for name in (name for name in ("ours", *OTHERS) if f"{name}_images_per_sec" in record):
        cells = [name, *(f"{record[f'{name}_{key}']:,.0f}" for key in ("images_per_sec", "cpu_us_an_image"))]
        for ratio in ("speedup", "cpu_speedup"):
            values = [record.get(f"{ratio}_vs_{name}{end}") for end in ENDS]
            cells.append(None if None in values else "{:.2f} ({:.2f} to {:.2f})".format(*values))
        rows.append(cells)
    yield as_table(("", "images/s", "processor us", "ours over it", "by processor time"), rows, "lrrrr")
    parts = [(part, f"{record[f'{part}_cpu_us']:,.0f}") for part in (*PARTS, "rest")]
    yield as_table(("part", "processor us an image"), parts, "lr")


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    config = read_keys(ImagesBenchConfig, argv)
    if config is None:
        return 0
    begin = {**head(SCHEMA), "measured": "images_speed"}
    began = time.monotonic()
    with threads(1), tempfile.TemporaryDirectory(dir=config.work, prefix="images-") as folder:
        measured = measure(config, Path(folder))
    record = {**begin, "config": as_written(config), **ends(began), **measured}
    write_record(config.results, record)
    print("\n".join(lines(record)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
