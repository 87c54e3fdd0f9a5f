"""How fast one loader process delivers stored moments: ours, WebDataset, plain files; and what their number type costs.

    python -m bench.data                                        # one table, and reports/results/data_speed.json
    python -m bench.data num_samples=256 num_images=32 rounds=1 paced_batches=4 results=/tmp/data.json

The same samples, moments of 512-pixel images, (8, 64, 64) each, in four layouts:

    ours          the stage `moments`: float16 and tokens in MDS shards with digests
    webdataset    KEY.npy (1, 8, 64, 64) float32, KEY.txt and img2dataset's KEY.json in tars, as the MLPerf reference has them
    webdataset16  the same in float16: what of the difference is the number type
    files         KEY.npy float32 and KEY.txt, each a file of its own, in a torch Dataset

and of the first of them the stage `images` (JPEGs: decoded, resized, tokenised). Batches of 64 moments or 16 images. Each is
read in the training process (`in_process`) and by one loader process (`worker`), in turns (bench/contest.py); a turn is an
epoch, from the arrival of its first batch to that of its last. Captions of WebDataset and of files stay text, so that they
have no tokenising to do, and their order is that of the files. All lie in the page cache.

`paced`: the part of its time that a training process waits for batches from one loader process when it takes as long for each
as a GPU at 200 images/s: it sleeps, so that nothing but the handing over of a batch is left to wait for. On a GPU a thread of
torch's DataLoader does that ahead of time (pin_memory), here nobody does.

`cpu`: processor time of the loader process a sample, an epoch's beginning included: beside busy neighbours a rate says how
much of a core there was, this changes less. `node` is arithmetic from it: how many of 16 cores the loader processes of 8
such GPUs keep busy. `reading` and the ratios over `preadv`: bench/data_reading.py.
Exit code: 0 when the record was written, 2 when the command cannot be read.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import io
import json
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from torch.utils.data import DataLoader, Dataset

from bench.command import ends, head, read_keys, threads, write_record
from bench.contest import Figures, rounded, take_turns
from bench.data_reading import READERS, measure_reading
from bench.micro_data import (
    IMAGES_BATCH,
    MOMENTS_BATCH,
    NUM_TARS,
    npy,
    our_loader,
    samples_per_sec,
    stack_npy,
    webdataset_loader,
    words,
    write_images,
    write_moments,
)
from cli.command import command
from cli.command_line import Problem
from cli.limits import limited
from cli.table import as_table
from config import as_written

SCHEMA = 1
LAYOUTS = ("ours", "webdataset", "webdataset16", "files", "images")
BATCHES = {name: IMAGES_BATCH if name == "images" else MOMENTS_BATCH for name in LAYOUTS}
ENDS = ("", "_min", "_max")  # of a key: median, least, greatest
PLACES = {"in_process": 0, "worker": 1}  # -> loader processes
GPU_IMAGES_PER_SEC, GPUS, CORES = 200.0, 8, 16  # of a node


@dataclass(frozen=True)
class DataBenchConfig:
    """The keys of this command."""

    num_samples: int = limited(4096, 2 * MOMENTS_BATCH)
    """Samples of moments: 64 KiB each in the stage, twice that in float32."""
    num_images: int = limited(128, 2 * IMAGES_BATCH)
    """Samples that are also read as JPEGs."""
    rounds: int = limited(5, 1)
    """Turns of each contestant."""
    paced_batches: int = limited(10, 1)
    """Batches of 64 that the sleeping training process takes in a turn; 0.32 s each."""
    results: str = "reports/results/data_speed.json"
    """File of the record; an earlier one is replaced."""
    work: str | None = None
    """Folder for temporary files. null: the system's."""


def check(config: DataBenchConfig) -> list[Problem]:
    """Return every problem of the keys."""
    if config.num_samples // MOMENTS_BATCH <= config.paced_batches:
        least_samples = MOMENTS_BATCH * (config.paced_batches + 1)
        given = f"{config.paced_batches}, but {config.num_samples} samples are too few for them and the first batch"
        text = f"paced_batches: {given}. Lower it, or give num_samples={least_samples}."
        return [Problem(text, ("paced_batches", "num_samples"))]
    return []


# --- the layouts ---


def write_layouts(folder: Path, num_samples: int, num_images: int) -> dict[str, float]:
    """Write the same samples in every layout, each in a folder of its name; return layout -> bytes a sample."""
    write_moments(folder / "ours", num_samples)  # its own tars lack the JSON, and go
    for tar in (folder / "ours" / "tars").iterdir():
        tar.unlink()
    write_images(folder / "images", num_images)
    stage = our_loader(folder / "ours", "moments", MOMENTS_BATCH, workers=0).dataset
    samples = (stage.get_item(number)["moments"][None] for number in range(num_samples))  # (1, 8, 64, 64) float16
    (folder / "files").mkdir()
    with contextlib.ExitStack() as open_files:
        tars = {
            name: [open_files.enter_context(tarfile.open(path, "w")) for path in _tar_paths(folder / name / "tars")]
            for name in ("webdataset", "webdataset16")
        }
        for number, moments in enumerate(samples):
            wide, caption = npy(moments.astype(np.float32)), words(number)["caption"]
            for name, array in (("webdataset", wide), ("webdataset16", npy(moments))):
                files = {"npy": array, "txt": caption.encode(), "json": _metadata(number)}
                _add(tars[name][number % NUM_TARS], words(number)["key"], files)
            key = folder / "files" / words(number)["key"]
            key.with_suffix(".npy").write_bytes(wide)
            key.with_suffix(".txt").write_text(caption)
    numbers = {name: num_images if name == "images" else num_samples for name in LAYOUTS}
    places = {"ours": "ours/stage", "images": "images/stage"}
    return {name: _num_bytes(folder / places.get(name, name)) / numbers[name] for name in LAYOUTS}


def _tar_paths(folder: Path) -> list[Path]:
    folder.mkdir(parents=True)
    return [folder / f"{number:05d}.tar" for number in range(NUM_TARS)]


def _add(tar: tarfile.TarFile, key: str, files: Mapping[str, bytes]) -> None:
    for suffix, content in files.items():
        member = tarfile.TarInfo(f"{key}.{suffix}")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))


def _metadata(number: int) -> bytes:
    """Return a sample's JSON with the keys of img2dataset's."""
    size = {"width": 512, "height": 512, "original_width": 1024, "original_height": 768}
    facts = {"url": f"https://example.invalid/{number}.jpg", "status": "success", "error_message": None, "exif": "{}"}
    return json.dumps({**words(number), **facts, **size, "sha256": f"{number:064x}"}).encode()


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# --- who reads ---


class Files(Dataset):
    """KEY.npy and KEY.txt of a folder, as users of torch read them."""

    def __init__(self, folder: Path):
        self.arrays = sorted(folder.glob("*.npy"))

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, number: int) -> tuple[np.ndarray, str]:
        path = self.arrays[number]
        return np.load(path), path.with_suffix(".txt").read_text()


def loaders(folder: Path, workers: int) -> dict[str, Iterable[Mapping[str, Any]]]:
    """Layout -> loader of what `write_layouts` has written."""
    files = DataLoader(
        Files(folder / "files"),
        MOMENTS_BATCH,
        num_workers=workers,
        persistent_workers=workers > 0,
        drop_last=True,
        collate_fn=stack_npy,
    )
    return {
        "ours": our_loader(folder / "ours", "moments", MOMENTS_BATCH, workers),
        "webdataset": webdataset_loader(folder / "webdataset", "moments", MOMENTS_BATCH, workers),
        "webdataset16": webdataset_loader(folder / "webdataset16", "moments", MOMENTS_BATCH, workers),
        "files": files,
        "images": our_loader(folder / "images", "images", IMAGES_BATCH, workers),
    }


def paced_wait(loader: Iterable[Any], num_batches: int) -> float:
    """Take batches as a GPU at 200 images/s would; return the fraction of the time after the first one that is waiting."""
    batches, step_sec, waited_sec = iter(loader), MOMENTS_BATCH / GPU_IMAGES_PER_SEC, 0.0
    next(batches)
    for _ in range(num_batches):
        time.sleep(step_sec)
        began = time.perf_counter()
        next(batches)
        waited_sec += time.perf_counter() - began
    return waited_sec / (waited_sec + num_batches * step_sec)


# --- the record ---


def measure(config: DataBenchConfig, folder: Path) -> dict[str, Any]:
    """Return the record: what was measured, flat, with every value under `by_round`."""
    figures = Figures()
    sizes = write_layouts(folder, config.num_samples, config.num_images)
    figures.flat = {f"{name}_bytes_a_sample": rounded(size) for name, size in sizes.items()}
    figures.flat["bytes_over_webdataset"] = rounded(sizes["ours"] / sizes["webdataset"])
    contestants = {place: loaders(folder, workers) for place, workers in PLACES.items()}
    cpu_us: dict[str, list[float]] = {f"{name}_{place}": [] for place in PLACES for name in LAYOUTS}

    def turn(name: str, place: str) -> float:
        of_workers, began_sec = place == "worker", cpu_sec(of_workers=place == "worker")
        rate = samples_per_sec(contestants[place][name], "images" if name == "images" else "moments")
        num = (config.num_images if name == "images" else config.num_samples) // BATCHES[name] * BATCHES[name]
        cpu_us[f"{name}_{place}"].append(1e6 * (cpu_sec(of_workers=of_workers) - began_sec) / num)
        return rate

    turns: dict[str, Callable[[], float]] = {
        f"{name}_{place}": functools.partial(turn, name, place) for place in PLACES for name in LAYOUTS
    }
    for name, values in take_turns(turns, config.rounds).items():
        figures.add(f"{name}_samples_per_sec", values)
        figures.add(f"{name}_cpu_us_a_sample", cpu_us[name][1:])  # the first was for warming up
    for place in PLACES:
        for name in LAYOUTS[1:]:
            over, under = f"ours_{place}_samples_per_sec", f"{name}_{place}_samples_per_sec"
            figures.ratio(f"speedup_vs_{name}_{place}", over, under)
    paced = {
        name: functools.partial(paced_wait, contestants["worker"][name], config.paced_batches)
        for name in ("ours", "webdataset")
    }
    for name, values in take_turns(paced, config.rounds, warm_up=False).items():
        figures.add(f"paced_data_wait_frac_{name}", values)
    for name in ("ours", "images"):
        for end in ENDS:
            cores = cores_of_a_node(figures.flat[f"{name}_worker_cpu_us_a_sample{end}"])
            figures.flat[f"node_cores_{name}{end}"] = rounded(cores)
    reading = measure_reading(folder / "ours", config.rounds)
    return {**figures.flat, **reading.flat, "by_round": figures.by_round | reading.by_round}


def cores_of_a_node(cpu_us_a_sample: float) -> float:
    """Return how many cores loader processes keep busy for 8 GPUs at 200 images/s each."""
    return GPUS * GPU_IMAGES_PER_SEC * cpu_us_a_sample / 1e6


def cpu_sec(*, of_workers: bool) -> float:
    """Return the processor time of this process, or of its loader processes: those that live."""
    if not of_workers:
        return time.process_time()
    # By whole processes: streaming's threads end with their epoch, and their time with them.
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


def lines(record: Mapping[str, Any]) -> Iterable[str]:
    """Yield a table of the layouts, then the other figures, a line each."""
    rows = []
    for name in LAYOUTS:
        cells = [name, f"{record[f'{name}_bytes_a_sample']:,.0f}"]
        for place in PLACES:
            key = f"speedup_vs_{name}_{place}"
            spread = (
                "{:.3g} ({:.3g} to {:.3g})".format(*(record[f"{key}{end}"] for end in ENDS)) if key in record else None
            )
            cells += [f"{record[f'{name}_{place}_samples_per_sec']:,.0f}", spread]
        rows.append(cells)
    head = ("", "bytes a sample", "in process, samples/s", "ours over it", "one worker", "ours over it")
    yield as_table(head, rows, "lrrrrr")
    for name in ("ours", "webdataset"):
        share, least, most = (record[f"paced_data_wait_frac_{name}{end}"] for end in ENDS)
        yield f"waiting at 200 images/s, one worker, {name}: {share:.3g} of the time ({least:.3g} to {most:.3g})"
    for name in ("ours", "images"):
        cores, least, most = (record[f"node_cores_{name}{end}"] for end in ENDS)
        micros = record[f"{name}_worker_cpu_us_a_sample"]
        busy = (
            f"{cores:.3g} of {CORES} cores ({least:.3g} to {most:.3g}) for {GPUS} GPUs at 200 images/s, by arithmetic"
        )
        yield f"{name}: {micros:.3g} us of processor time a sample, {busy}"
    for key in (*(f"reading_{name}_cpu_us_a_sample" for name in READERS), "read_over_preadv", "epoch_over_preadv"):
        yield "{}: {:.3g} ({:.3g} to {:.3g})".format(key, *(record[f"{key}{end}"] for end in ENDS))


@contextlib.contextmanager
def _temporary_folder(work: str | None) -> Iterator[Path]:
    """A folder that goes when it is left, in an interrupt too: that ends loader processes as well, at which torch raises."""
    folder = tempfile.TemporaryDirectory(dir=work, prefix="data-")
    try:
        yield Path(folder.name)
    finally:
        of_torch = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        folder.cleanup()
        signal.signal(signal.SIGCHLD, of_torch)


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    config = read_keys(DataBenchConfig, argv, check)
    if config is None:
        return 0
    begin = {**head(SCHEMA), "measured": "data_speed", "webdataset_version": importlib.metadata.version("webdataset")}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an interrupt: the temporary folder is removed first
    began = time.monotonic()
    with threads(1), _temporary_folder(config.work) as folder:
        measured = measure(config, folder)
    record = {**begin, "config": as_written(config), **ends(began), **measured}
    write_record(config.results, record)
    print("\n".join(lines(record)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
