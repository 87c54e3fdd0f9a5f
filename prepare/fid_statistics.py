"""Make the reference for FID and CMMD: mean and covariance of an image network's features, and embeddings, of a folder.

    python -m prepare.fid_statistics FOLDER OUT.npz inception=/weights/pt_inception-2015-12-05-6726825d.pth
    python -m prepare.fid_statistics val2014_30k val2014_30k_stats.npz inception=/weights/pt_inception.pth batch_size=50
    python -m prepare.fid_statistics val2014_30k both.npz inception=... cmmd=openai/clip-vit-large-patch14-336
    python -m prepare.fid_statistics photos trial.npz inception=random image_size=64 overwrite=true

FOLDER: all images (png, jpg, webp, avif, bmp, tif, gif) directly in it. OUT.npz has mu and sigma, as pytorch-fid writes
them, the number of images, and how they were made; eval.statistics=OUT.npz reads it. image_size=N resizes images to N x N px
first, by PIL's bicubic and without keeping the aspect ratio, as MLPerf's script for COCO does. (That script then saves JPEGs.
To get the same statistics, give the folder that it wrote, without image_size.)

Keys: inception (pytorch-fid's weights file, or random for a trial), cmmd (eval.cmmd's encoder: OUT.npz then also has each
image's embedding, 3 kB), resize (bilinear299, as MLPerf's reference; bicubic256, as NVIDIA's submissions; must equal the
evaluation's), image_size, batch_size (50), workers (decoding threads, 4), overwrite (false).
Exit code: 0 if OUT was written, 1 if an image is unreadable or the work failed, 2 if it could not start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tqdm import tqdm

from common.command import command, start
from common.command_line import Problem
from common.errors import ConfigError, Failed
from common.files import write_problem
from common.log import log
from common.value_types import limited
from evaluation.cmmd import Embeddings, ImageEncoder, load_encoder
from evaluation.fid import FeatureSums, Statistics, covariance_warning, load_inception, write_statistics
from evaluation.image_folder import image_batches, list_images
from evaluation.scorer import REQUIRED_FILES
from evaluation.scoring_networks import Extractor
from families.spec import MAX_SIDE_PX
from prepare.arguments import parse_arguments
from weights import hub
from weights.hub_names import parse_hub_name


@dataclass(frozen=True)
class FidStatisticsConfig:
    """The keys of this command."""

    inception: str | None = None
    """Weights of the image network: pt_inception-2015-12-05-6726825d.pth, its name on the hub, or `random`."""
    resize: Literal["bilinear299", "bicubic256"] = "bilinear299"
    """How images are resized for that network; must equal eval.resize."""
    cmmd: str | None = None
    """CMMD's image encoder, as eval.cmmd. null: the file is for FID alone."""
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
    if config.inception is not None:
        return []
    todo = "Give the path of pt_inception-2015-12-05-6726825d.pth, or random for a trial"
    return [Problem(f"inception: not given. {todo}.", ("inception",))]


def out_problem(out: str, overwrite: bool) -> str | None:
    """Say why OUT cannot be written, or None."""
    path = Path(out)
    if path.suffix != ".npz":
        return f"OUT: {out} does not end in .npz. Give a name that does."
    if path.is_dir() or (path.exists() and not overwrite):
        return f"OUT: {out} exists. Give another name, remove it, or set overwrite=true."
    if not path.absolute().parent.is_dir():
        return f"OUT: there is no folder {path.parent}. Make it first."
    text = write_problem(path.absolute().parent)
    return f"OUT: {text}" if text else None


def measure(
    paths: Sequence[Path], extractor: Extractor, encoder: ImageEncoder | None, config: FidStatisticsConfig
) -> tuple[Statistics, np.ndarray | None]:
    """Return the statistics of images, and their embeddings if there is an encoder, (N, E) float32.

    Raises:
        ValueError: an image is unreadable, or there are fewer than two.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sums, extractor = FeatureSums(extractor.num_features).to(device), extractor.to(device)
    embeddings = None if encoder is None else Embeddings(encoder.to(device).num_features)
    with tqdm(total=len(paths), unit=" images", desc="features") as progress:
        for names, images in image_batches(paths, config.batch_size, config.image_size, config.workers):
            images, ids = images.to(device) / 255, [path.name for path in names]
            sums.update(extractor(images), ids)
            if encoder is not None and embeddings is not None:
                embeddings.update(encoder(images), ids)
            progress.update(len(names))
    return sums.compute(), None if embeddings is None else embeddings.rows.numpy()


def build_networks(config: FidStatisticsConfig, problems: list[str]) -> tuple[Extractor | None, ImageEncoder | None]:
    """Return the image network and the encoder; add to `problems` why one is not there."""
    weights = {key: value for key in ("inception", "cmmd") if (value := getattr(config, key)) is not None}
    builds = {"inception": lambda path: load_inception(path, config.resize), "cmmd": load_encoder}
    networks: dict[str, Any] = {}
    for key, path in weights.items():
        try:
            names = {key: (path, REQUIRED_FILES[key])} if parse_hub_name(path) else {}
            networks[key] = builds[key](hub.fetch_all(names).get(key, path))
        except ValueError as error:
            problems.append(f"{key}: {str(error).removeprefix(f'{key}: ')}")
    return networks.get("inception"), networks.get("cmmd")


@command(keys=FidStatisticsConfig)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    paths, config, problems = parse_arguments(argv, FidStatisticsConfig, check)
    image_paths = []
    if config is None:
        return 0
    if len(paths) != 2:
        problems.append(
            "command line: FOLDER and OUT.npz have to be given. python -m prepare.fid_statistics --help says more."
        )
    else:
        try:
            image_paths = list_images(paths[0])
        except ValueError as error:
            problems.append(f"FOLDER: {error}")
        problem = out_problem(paths[1], config.overwrite)
        problems += [problem] if problem else []
    extractor, encoder = (None, None) if problems else build_networks(config, problems)
    if problems or extractor is None:
        raise ConfigError(problems)
    return _write_out(image_paths, Path(paths[1]), extractor, encoder, config)


def _write_out(
    paths: Sequence[Path], out: Path, extractor: Extractor, encoder: ImageEncoder | None, config: FidStatisticsConfig
) -> int:
    if text := covariance_warning(len(paths), extractor.num_features):
        log.warning(f"FOLDER: {text}")
    facts = {"extractor": extractor.name, "fingerprint": extractor.fingerprint, "resize": extractor.resize}
    if config.image_size is not None:
        facts["image_size"] = config.image_size
    if encoder is not None:
        facts |= {"cmmd_model": encoder.name, "cmmd_fingerprint": encoder.fingerprint}
    try:
        statistics, embeddings = measure(paths, extractor, encoder, config)
        write_statistics(out, statistics, facts, embeddings)
    except ValueError as error:
        raise Failed(str(error)) from error
    except OSError as error:
        raise Failed(f"OUT: {out} cannot be written: {error}.") from error
    other_names = sorted(
        {path.name for path in paths[0].parent.iterdir() if not path.is_dir()} - {path.name for path in paths}
    )
    more = (
        f"; files that are no images by their suffixes: {len(other_names):,}, e.g. {other_names[0]}"
        if other_names
        else ""
    )
    print(f"statistics of {len(paths):,} images, {extractor.num_features:,} features of {extractor.name}: {out}{more}")
    return 0


if __name__ == "__main__":
    start(main)
