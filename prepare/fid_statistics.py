"""Make the reference statistics for FID: mean and covariance of an image network's features over a folder of images.

    python -m prepare.fid_statistics FOLDER OUT.npz inception=/weights/pt_inception-2015-12-05-6726825d.pth
    python -m prepare.fid_statistics val2014_30k val2014_30k_stats.npz inception=/weights/pt_inception.pth batch_size=50
    python -m prepare.fid_statistics pictures trial.npz inception=random image_size=64 overwrite=true

FOLDER: all images (png, jpg, webp, avif, bmp, tif, gif) directly in it. OUT.npz has mu and sigma, as pytorch-fid writes
them, the number of images, and how they were made; eval.statistics=OUT.npz reads it. image_size=N resizes images to N x N px
first, by PIL's bicubic and without keeping the aspect ratio, as MLPerf's script for COCO does. (That script then saves JPEGs.
To get the same statistics, give the folder that it wrote, without image_size.)

engine=ray spreads the images over a Ray cluster (docs/clusters.md), whose nodes all have FOLDER at its path. The images are
cut where batches end, and the features are summed here in the order of the images: the same sums, to the last bit, where
the workers compute the features to the last bit as this process does: on the same kind of device, with one thread.

Keys: inception (pytorch-fid's weights file, or random for a trial), resize (bilinear299, as MLPerf's reference; bicubic256,
as NVIDIA's submissions; must equal the evaluation's), image_size, batch_size (50), workers (decoding threads, 4),
overwrite (false).
Files of FOLDER that are no images are named in OUT.skipped.jsonl; so are all images that are unreadable.
Exit code: 0 if OUT was written, 1 if an image is unreadable or the work failed, 2 if it could not start.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tqdm import tqdm

from cli.command import command, start
from cli.command_line import Problem
from cli.errors import ConfigError, Failed, Refused
from cli.files import open_regular
from cli.limits import limited
from cli.log import log
from evaluation.fid import FeatureSums, Statistics, covariance_warning, write_statistics
from evaluation.image_folder import UNREADABLE, image_batches, list_images, read_image
from evaluation.inception import NEED, load_inception
from evaluation.numerics import Extractor
from preflight.limits import unwritable
from prepare.counts import SKIPPED_FILE, Ledger
from prepare.engines import ActorKeys, check_actor_keys
from prepare.words import read_words
from stages.image_files import open_image
from weights import hub
from weights.hub_names import parse
from zoo.spec import MAX_SIDE_PX

BATCHES_PER_PART = 20  # 1,000 images of 2,048 features are 8 MB


@dataclass(frozen=True)
class FidStatisticsConfig(ActorKeys):
    """The keys of this command."""

    inception: str | None = None
    """Weights of the image network: pt_inception-2015-12-05-6726825d.pth, its name on the hub, or `random`."""
    resize: Literal["bilinear299", "bicubic256"] = "bilinear299"
    """How images are resized for that network; must equal eval.resize."""
    image_size: int | None = limited(None, 1, MAX_SIDE_PX)
    """Side in pixels to which images are resized first. null: no resize."""
    batch_size: int = limited(50, 1, 2**16)
    """Images per pass."""
    workers: int = limited(4, 1, 512)
    """Decoding threads."""
    overwrite: bool = False
    """Replace an existing OUT."""


def check(config: FidStatisticsConfig) -> list[Problem]:
    """Return every problem that can be found before anything is read."""
    found = check_actor_keys(config, "prepare.fid_statistics")
    if config.inception is None:
        ways = "Give the path of pt_inception-2015-12-05-6726825d.pth, or random for a trial"
        found.append(Problem(f"inception: not given. {ways}.", ("inception",)))
    return found


def out_problem(out: str, overwrite: bool) -> str | None:
    """Say why OUT cannot be written, or None."""
    path = Path(out)
    if path.suffix != ".npz":
        return f"OUT: {out} does not end in .npz. Give a name that does."
    if path.is_dir() or (path.exists() and not overwrite):
        return f"OUT: {out} exists. Give another name, remove it, or say overwrite=true."
    if not path.absolute().parent.is_dir():
        return f"OUT: there is no folder {path.parent}. Make it first."
    text = unwritable(path.absolute().parent)
    return f"OUT: {text}" if text else None


def measure(paths: Sequence[Path], extractor: Extractor, config: FidStatisticsConfig) -> Statistics:
    """Return the statistics of images. Raises ValueError: one is unreadable, or there are fewer than two."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sums, extractor = FeatureSums(extractor.num_features).to(device), extractor.to(device)
    with tqdm(total=len(paths), unit=" images", desc="features") as progress:
        for names, images in image_batches(paths, config.batch_size, config.image_size, config.workers):
            sums.update(extractor(images.to(device) / 255), [path.name for path in names])
            progress.update(len(names))
    return sums.compute()


# ---------------------------------------------------------------------------------------------------------------------
# On a cluster
# ---------------------------------------------------------------------------------------------------------------------


def cut(paths: Sequence[Path], config: FidStatisticsConfig) -> list[slice]:
    """Cut images into parts that end where one process's batches end.

    Args:
        paths: whose headers are read, unless image_size says their size. An unreadable one is told when its part is made.
    """
    parts, first, begun, num_batches = [], 0, 0, 0
    with ThreadPoolExecutor(config.workers) as pool:
        sizes = pool.map(_size_of, paths) if config.image_size is None else itertools.repeat(None)
        last = None
        for number, size in zip(range(len(paths)), sizes, strict=False):
            if number > begun and (number - begun == config.batch_size or size != last):
                begun, num_batches = number, num_batches + 1
                if num_batches == BATCHES_PER_PART:
                    parts.append(slice(first, number))
                    first, num_batches = number, 0
            last = size
    return [*parts, slice(first, len(paths))]


def _size_of(path: Path) -> tuple[int, int] | None:
    try:
        with open_regular(path, None) as file, open_image(file) as image:
            return image.size
    except Exception:  # the decoders raise a dozen classes
        return None


class Features:
    """A worker's image network: it makes the features of a part of the images.

    Args:
        paths: of all images.
        fingerprint: of the network that the command has.

    Raises:
        Refused: the worker has another network, or none.
    """

    def __init__(self, paths: Sequence[Path], parts: Sequence[slice], config: FidStatisticsConfig, fingerprint: str):
        self._paths, self._parts, self._config = paths, parts, config
        self._runs_on = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            self._extractor = build_extractor(config).to(self._runs_on)
        except ValueError as error:
            raise Refused(f"inception: {str(error).removeprefix('inception: ')}") from error
        if self._extractor.fingerprint != fingerprint:
            raise Refused(f"inception: {config.inception} holds other weights on another node. Copy it anew.")

    def __call__(self, number: int) -> list[np.ndarray]:  # -> (B, D) float32 for each batch
        """Return the features of a part's batches. Raises Failed: an image is unreadable."""
        paths, config = self._paths[self._parts[number]], self._config
        try:
            return [
                self._extractor(images.to(self._runs_on) / 255).cpu().numpy()
                for _, images in image_batches(paths, config.batch_size, config.image_size, config.workers)
            ]
        except ValueError as error:
            raise Failed(str(error)) from error


def measure_on_cluster(paths: Sequence[Path], extractor: Extractor, config: FidStatisticsConfig) -> Statistics:
    """Return the statistics of images, as `measure` does; a cluster computes the features."""
    sums = FeatureSums(extractor.num_features).to("cuda" if torch.cuda.is_available() else "cpu")
    paths, parts, names = [path.absolute() for path in paths], cut(paths, config), iter(paths)
    start, early = functools.partial(Features, paths, parts, config, extractor.fingerprint), {}
    with (
        config.opened(start, config.actors, gpu=config.gpus) as engine,
        tqdm(total=len(paths), unit=" images", desc="features") as progress,
    ):
        results = engine.run(range(len(parts)))
        for number in range(len(parts)):
            while number not in early:
                done, batches = next(results)
                early[done] = batches
            for features in early.pop(number):
                sums.update(torch.tensor(features), [path.name for path in itertools.islice(names, len(features))])
                progress.update(len(features))
    return sums.compute()


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------


def take_stock(paths: Sequence[Path], config: FidStatisticsConfig, *, read: bool) -> Ledger:
    """Return what a folder has: its images, those that are unreadable if they are read, and its files that are none."""
    folder = paths[0].parent
    ledger = Ledger(folder.name)
    ledger.counts.read = len(paths)
    with ThreadPoolExecutor(config.workers) as pool:
        for path, problem in zip(paths, pool.map(_problem_of, paths) if read else itertools.repeat(None), strict=False):
            if problem is None:
                ledger.counts.written += 1
            else:
                ledger.skip(path.name, problem)
    images = {path.name for path in paths}
    for name in sorted(entry.name for entry in os.scandir(folder) if entry.name not in images and not entry.is_dir()):
        ledger.ignore(name, "is no image by its suffix")
    return ledger


def _problem_of(path: Path) -> str | None:
    try:
        read_image(path)
    except ValueError as error:
        return str(error).removeprefix(f"{path}: ").partition(". Possible")[0]
    return None


def build_extractor(config: FidStatisticsConfig) -> Extractor:
    """Return the image network. Raises ValueError: its weights are not there, or none."""
    assert config.inception is not None
    names = {"inception": (config.inception, NEED)} if parse(config.inception) else {}
    weights = hub.fetch_all(names).get("inception", config.inception)
    return load_inception(weights, config.resize)


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    places, config, problems = read_words(argv, FidStatisticsConfig, check)
    paths, extractor = [], None
    if config is None:
        return 0
    if len(places) != 2:
        problems.append(
            "command line: FOLDER and OUT.npz have to be given. python -m prepare.fid_statistics --help says more."
        )
    else:
        try:
            paths = list_images(places[0])
        except ValueError as error:
            problems.append(f"FOLDER: {error}")
        problem = out_problem(places[1], config.overwrite)
        problems += [problem] if problem else []
    if not problems:
        try:
            extractor = build_extractor(config)
        except ValueError as error:
            problems.append(f"inception: {str(error).removeprefix('inception: ')}")
    if problems:
        raise ConfigError(problems)
    return _make(paths, Path(places[1]), extractor, config)


def _make(paths: Sequence[Path], out: Path, extractor: Extractor, config: FidStatisticsConfig) -> int:
    skipped = out.with_suffix(f".{SKIPPED_FILE}")
    if text := covariance_warning(len(paths), extractor.num_features):
        log.warning(f"FOLDER: {text}")
    facts = {"extractor": extractor.name, "fingerprint": extractor.fingerprint, "resize": extractor.resize}
    if config.image_size is not None:
        facts["image_size"] = config.image_size
    try:
        try:
            statistics = (measure if config.engine == "local" else measure_on_cluster)(paths, extractor, config)
        except Refused:
            raise
        except ValueError as error:
            if isinstance(error, Failed) and UNREADABLE not in str(error):  # of a cluster
                raise
            ledger = take_stock(paths, config, read=True)
            ledger.write(skipped)
            counts = ledger.counts
            more = f" {counts.skipped.total():,} of {counts.found:,} images cannot be read; reasons: {skipped}."
            raise Failed(f"{error}{more if counts.skipped else ''}") from error
        ledger = take_stock(paths, config, read=False)
        ledger.write(skipped)
        write_statistics(out, statistics, facts)
    except (Failed, Refused):
        raise
    except OSError as error:
        raise Failed(f"OUT: {out} cannot be written: {error}.") from error
    print(f"statistics of {len(paths):,} images, {extractor.num_features:,} features of {extractor.name}: {out}")
    if ledger.lines:
        print(f"{ledger.counts}; reasons: {skipped}")
    return 0


if __name__ == "__main__":
    from prepare.fid_statistics import main as named  # workers of a cluster know the classes by this module's name

    start(named)
