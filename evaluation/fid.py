"""Frechet inception distance from running sums: the memory does not grow with the number of images.

    extractor = load_inception("pt_inception-2015-12-05-6726825d.pth").to(device)
    sums = FeatureSums(2048)
    for ...: sums.update(extractor(images), ids)
    distance = frechet_distance(sums.compute(), read_statistics("val2014_30k_stats.npz", 2048))

Heusel et al. 2017 (arXiv:1706.08500), equation 6: d^2 = |m_a - m_b|^2 + tr(A + B - 2 (A B)^(1/2)) for two Gaussians with
means m and covariances A, B of an image network's features. Statistics files have pytorch-fid's format: an .npz with `mu`
and `sigma`.

Kernel inception distance is not offered: from sums alone, its cubic kernel needs third moments, D^3 numbers (69 GB at
D = 2048).

Shapes: B batch, H W height and width in px, D features, 2048 for Inception.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from common.files import atomic_path
from evaluation.scoring_networks import Extractor, Float64Sums, is_shapes_reader, load_shapes_reader, require_finite
from weights.files import open_weights
from weights.hub import RequiredFiles
from weights.hub_names import resolve_weights_path
from weights.published import RANDOM, RANDOM_SEED, copy_weights, file_digest
from weights.tensors import fingerprint

BLOCK = 256  # columns multiplied at once; 128 to 512 are fast on a CPU
FLOAT32_ROUNDING = 1e-5  # relative to the largest value: error allowed in a covariance computed in float32
MAX_NPZ_BYTES = 2**28  # of 2,048 features it is 2**25
EMBEDDINGS, MAX_EMBEDDINGS_BYTES = "cmmd_embeddings", 2**30  # of 30,000 images 2**26.5
AGAIN = "Make the file again: python -m prepare.fid_statistics."


class Statistics(NamedTuple):
    """Mean and covariance of features."""

    mean: np.ndarray
    """(D,) float64."""
    covariance: np.ndarray
    """(D, D) float64, unbiased, symmetric."""
    num_images: int | None = None
    """Number of images they come from; None if the file does not say."""


# --- files ---


def read_statistics(path: str | Path, num_features: int | None = None) -> Statistics:
    """Read a file of statistics: `mu`, `sigma`, and `num_images` if present.

    Args:
        path: an .npz as written by `write_statistics` or pytorch-fid; pickled content is refused.
        num_features: number of features of the image network; None: any.

    Raises:
        ValueError: no such file, no .npz, other keys or shapes, invalid values, or another number of features.
    """
    arrays = _read_npz(Path(path).expanduser())
    count, problem = arrays.get("num_images"), None
    if "mu" not in arrays or "sigma" not in arrays:
        problem = f"its arrays are {', '.join(arrays) or 'none'}. Statistics are mu and sigma. {AGAIN}"
    elif count is not None and (count.ndim or count.dtype.kind not in "iu"):
        problem = f"num_images is {count.dtype} {count.shape}. Possible: one whole number. {AGAIN}"
    else:
        problem = _problem(arrays["mu"], arrays["sigma"], num_features)
    if problem:
        raise ValueError(f"{path}: {problem}")
    mean, covariance = (arrays[name].astype(np.float64) for name in ("mu", "sigma"))
    return Statistics(mean, (covariance + covariance.T) / 2, None if count is None else int(count))


def read_facts(path: str | Path) -> dict[str, Any]:
    """Read a file's facts about its statistics, e.g. {"extractor": "inception-2015-12-05"}; pytorch-fid's files have none.

    Raises:
        ValueError: no such file, or no .npz.
    """
    return {name: array.item() for name, array in _read_npz(Path(path).expanduser()).items() if array.ndim == 0}


def read_embeddings(path: str | Path, num_features: int) -> np.ndarray:
    """Read the embeddings for CMMD in a file of statistics, (N, num_features) float32.

    Raises:
        ValueError: no such file, no embeddings, or invalid ones.
    """
    rows = _read_npz(Path(path).expanduser(), embeddings=True).get(EMBEDDINGS, np.zeros(0))
    if rows.dtype != np.float32 or rows.ndim != 2 or rows.shape[1] != num_features or not np.isfinite(rows).all():
        possible = f"Possible: finite float32 (N, {num_features})"
        raise ValueError(f"{path}: {EMBEDDINGS} is {rows.dtype} {rows.shape}, or not finite. {possible}. {AGAIN}")
    return rows


def write_statistics(
    path: str | Path,
    statistics: Statistics,
    facts: Mapping[str, str | int | float],
    embeddings: np.ndarray | None = None,
) -> None:
    """Write a file of statistics, whole or not at all. An existing file is replaced.

    Args:
        path: no suffix is added.
        facts: further single values, e.g. the image network's name, fingerprint and resize.
        embeddings: of the same images for CMMD, (N, E) float32.

    Raises:
        ValueError: the statistics are invalid and could not be read again.
        OSError: the file cannot be written.
    """
    mean, covariance, num_images = statistics
    assert not {"mu", "sigma", "num_images"} & set(facts), f"facts say {', '.join(facts)}"
    if problem := _problem(mean, covariance, None):
        raise ValueError(f"{path}: is not written: {problem}")
    more: dict[str, Any] = {} if num_images is None else {"num_images": num_images}
    more |= {} if embeddings is None else {EMBEDDINGS: embeddings}
    path = Path(path).expanduser()
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, allow_pickle=False, mu=mean, sigma=covariance, **more, **facts)


def _read_npz(path: Path, *, embeddings: bool = False) -> dict[str, np.ndarray]:
    """Return the arrays of a file: either the embeddings alone, or all others."""
    most = MAX_EMBEDDINGS_BYTES if embeddings else MAX_NPZ_BYTES
    try:
        with zipfile.ZipFile(path) as archive:  # numpy reads what a compressed record gives, however much that is
            sizes = {record.filename.removesuffix(".npy"): record.file_size for record in archive.infolist()}
            if (size := sum(size for name, size in sizes.items() if (name == EMBEDDINGS) == embeddings)) > most:
                raise ValueError(f"it holds {size:,} bytes; at most {most:,} are read")
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files if (name == EMBEDDINGS) == embeddings}
    except Exception as error:  # numpy raises a dozen classes of errors for a foreign file
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
        known = "Possible: an .npz with mu and sigma that numpy.savez wrote, nothing pickled in it"
        raise ValueError(f"{path}: cannot be read as an .npz ({reason}). {known}. {AGAIN}") from error


def _problem(mean: np.ndarray, covariance: np.ndarray, num_features: int | None) -> str | None:
    """Say why these are not a mean and a covariance, or None."""
    sizes = f"mu is {mean.dtype} {mean.shape}, sigma is {covariance.dtype} {covariance.shape}"
    kinds = {mean.dtype.kind, covariance.dtype.kind}
    if mean.ndim != 1 or not mean.size or covariance.shape != 2 * mean.shape or kinds != {"f"}:
        return f"{sizes}. Possible: real numbers (D,) and (D, D). {AGAIN}"
    if num_features not in (None, len(mean)):
        return f"{sizes}. The image network gives {num_features} features. Give the statistics of the same network."
    for name, array in (("mu", mean), ("sigma", covariance)):
        if count := array.size - np.count_nonzero(np.isfinite(array)):
            return f"{name} has {count:,} values that are NaN or infinite. Possible: finite ones. {AGAIN}"
    apart, largest = np.abs(covariance - covariance.T).max(), np.abs(covariance).max()
    if apart > FLOAT32_ROUNDING * largest:
        return f"sigma and its transpose differ by {apart:.6g}. A covariance is symmetric. {AGAIN}"
    return None


# --- sums ---


class FeatureSums(Float64Sums):
    """Number, sum and sum of outer products of features, added up over batches and ranks.

    Features are not centered, so the ranks' sums can simply be added at the end. In float64, cancellation costs the
    covariance about log10(mean^2 / variance) of 16 digits: one digit for Inception's features. Only the blocks on and
    above the diagonal are computed, half of the work.

    Args:
        num_features: D.
    """

    n: Tensor
    sum: Tensor
    outer: Tensor

    def __init__(self, num_features: int):
        super().__init__(n=(), sum=(num_features,), outer=(num_features, num_features))

    def update(self, features: Tensor, ids: Sequence[int | str] | Tensor | None = None) -> None:
        """Add a batch.

        Args:
            features: (B, D)
            ids: prompt ids, for the message.

        Raises:
            ValueError: a feature is NaN or infinite; nothing is added.
        """
        assert features.shape[1:] == self.sum.shape, f"{tuple(features.shape)} features, {len(self.sum)} were expected"
        require_finite(features, "FID", ids)
        features = features.to(self.sum.device, torch.float64)
        self.n += len(features)
        self.sum += features.sum(dim=0)
        for i in range(0, len(self.sum), BLOCK):
            self.outer[i : i + BLOCK, i:].addmm_(features[:, i : i + BLOCK].T, features[:, i:])

    def compute(self) -> Statistics:
        """Return mean and unbiased covariance. Raises ValueError: fewer than two images."""
        n = int(self.n)
        if n < 2:
            raise ValueError(f"FID: {n} images were given. A covariance needs 2 at least. Generate more.")
        scatter = (self.outer - torch.outer(self.sum, self.sum) / n).triu()
        covariance = (scatter + scatter.triu(1).T) / (n - 1)
        return Statistics((self.sum / n).cpu().numpy(), covariance.cpu().numpy(), n)


def covariance_warning(num_images: int | None, num_features: int) -> str | None:
    """Return the warning that there are too few images for a covariance of full rank, or None."""
    if num_images is None or num_images > num_features:
        return None
    rank = f"the covariance is singular (rank {num_images - 1:,} at most) and FID comes out too high"
    way = f"Compare with figures of as many images only, or take many more than {num_features:,}"
    return f"{num_images:,} images for {num_features:,} features: {rank}. {way}."


# --- distance ---


def reference_for(path: str | Path, extractor: Extractor) -> Statistics:
    """Read reference statistics, and check that they were made with this image network.

    Args:
        extractor: its name, fingerprint and resize have to equal those in the file.

    Raises:
        ValueError: see `read_statistics`; a matrix that is not a covariance; or another network, fingerprint or resize.
    """
    statistics, made = read_statistics(path, extractor.num_features), read_facts(path)
    try:
        _factor(statistics.covariance)
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).removeprefix('FID: ')}") from error
    of_extractor = {"extractor": extractor.name, "fingerprint": extractor.fingerprint, "resize": extractor.resize}
    for key, ours in of_extractor.items():
        if made.get(key, ours) != ours:
            text = f"{path} was made with the {key} {made[key]}, this evaluation has {ours}"
            raise ValueError(f"eval.statistics: {text}. Make it again, or use that eval.inception and eval.resize.")
    return statistics


def frechet_distance(a: Statistics, b: Statistics) -> float:
    """Return the FID: the squared Frechet distance of two Gaussians (equation 6).

    With A = F F^T and B = G G^T, A B has the non-zero eigenvalues of (F^T G)(F^T G)^T. So the trace of its square root is
    the sum of the singular values of F^T G. This avoids three problems. Nothing is squared, so no rounding error of 1e-16
    grows to 1e-8 in a root. Only symmetric matrices are factored. And a singular covariance (fewer images than features)
    needs no epsilon on its diagonal: its factor just has fewer columns.

    Raises:
        ValueError: different numbers of features, a matrix that is not a covariance, or values too large for the distance.
    """
    if a.mean.shape != b.mean.shape:
        text = f"FID: statistics of {len(a.mean)} and of {len(b.mean)} features"
        raise ValueError(f"{text}. Possible: of the same image network. Make both with one.")
    difference = a.mean - b.mean
    product = _factor(a.covariance).T @ _factor(b.covariance)  # (rank of A, rank of B)
    overlap = torch.linalg.svdvals(product).sum().item() if product.isfinite().all() else math.inf
    with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity are refused below
        squared = difference @ difference + np.trace(a.covariance) + np.trace(b.covariance) - 2 * overlap
    if not math.isfinite(squared):
        means = " and ".join(f"{np.abs(part.mean).max():.6g}" for part in (a, b))
        raise ValueError(f"FID: the distance is {squared}; the means go up to {means}. Make these statistics again.")
    return max(float(squared), 0.0)


def _factor(covariance: np.ndarray) -> Tensor:  # (D, D) -> (D, rank)
    """Return F with F F^T = covariance: by Cholesky if it has full rank, else from its eigenvectors."""
    matrix = torch.from_numpy(covariance)
    lower, failed = torch.linalg.cholesky_ex(matrix)
    if not failed:
        return lower
    values, vectors = torch.linalg.eigh(matrix)  # in ascending order
    if values[0] < -FLOAT32_ROUNDING * values[-1].abs():
        text = f"FID: a covariance has the eigenvalue {values[0]:.6g}, the largest is {values[-1]:.6g}"
        raise ValueError(f"{text}. A covariance has none below 0. Make these statistics again.")
    is_significant = values > values[-1] * len(values) * torch.finfo(values.dtype).eps  # the rest is rounding error
    return vectors[:, is_significant] * values[is_significant].sqrt()


# --- the image network of FID ---
#
# Two ways of resizing an image to the network's 299 x 299 px are in use. They give different scores:
#
#     bilinear299   MLPerf's reference: the decoder's float32 output, bilinear without antialias
#     bicubic256    NVIDIA's submissions: rounded to 8 bits, then PIL's bicubic to 256 x 256 px; then as above

Resize = Literal["bilinear299", "bicubic256"]

PUBLISHED = "inception-2015-12-05"
PUBLISHED_FILE = "pt_inception-2015-12-05-6726825d.pth"  # of pytorch-fid's release fid_weights, 92 MB
PUBLISHED_SHA1 = "bd836944fd6db519dfd8d924aa457f5b3c8357ff"
# No repository on the hub is pytorch-fid's own; a copy is known by the first digits of its SHA-256, which its name has.
REQUIRED_FILES = RequiredFiles(
    single_file_names=(PUBLISHED_FILE,), instead="leave eval.inception and eval.statistics out"
)
NUM_CLASSES, NUM_FEATURES = 1008, 2048
SIDE_PX, FIRST_SIDE_PX = 299, 256


class Inception(Extractor):
    """FID's Inception up to its last average pool. Made by `load_inception`."""

    def __init__(self, network: nn.Module, name: str, fingerprint: str, resize: Resize):
        super().__init__(network, name, fingerprint, NUM_FEATURES)
        self.resize = resize

    def __call__(self, images: Tensor) -> Tensor:  # (B, 3, H, W) in [0, 1] -> (B, 2048)
        """Return the features in float32 or float16, as `precision` says. An outer autocast has no effect."""
        assert images.ndim == 4 and images.shape[1] == 3, f"{tuple(images.shape)} is not (B, 3, H, W)"
        with self.computing():
            if self.resize == "bicubic256":
                images = pil_bicubic(images, FIRST_SIDE_PX)
            images = images.to(self.device, torch.float16 if self.precision == "fp16" else torch.float32)
            images = F.interpolate(images, (SIDE_PX, SIDE_PX), mode="bilinear", align_corners=False, antialias=False)
            return self.network(2 * images - 1)


def load_inception(weights: str | Path, resize: Resize = "bilinear299") -> Extractor:
    """Build Inception, or the miniature's image network (which does not resize), on the CPU.

    Args:
        weights: path of pytorch-fid's file, or its name on the hub where it was fetched, checked by its SHA-1; "random",
            for tests and trials (scaled so that signals keep their size through the layers, otherwise meaningless); or the
            miniature's reader (`ReaderFeatures`).

    Raises:
        ValueError: no such file, another file, or an unknown `resize`.
    """
    if resize not in get_args(Resize):
        raise ValueError(f"resize: '{resize}' is not known. Possible: {', '.join(get_args(Resize))}.")
    if str(weights) == RANDOM:
        network = _random_network()
        network.fc = nn.Identity()
        return Inception(network, "random-inception", fingerprint(network), resize)
    path = resolve_weights_path(weights)
    file = open_weights(path)
    if is_shapes_reader(file):
        return load_shapes_reader(file)
    digest = file_digest(path, "sha1")
    if digest != PUBLISHED_SHA1:
        text = f"{path}: its SHA-1 is {digest}, that of {PUBLISHED_FILE} is {PUBLISHED_SHA1}"
        todo = "FID is defined by that file alone: fetch it again: python -m prepare.downloads inception"
        raise ValueError(f"{text}. {todo}.")
    network = _build()
    copy_weights(network, file, "FID's Inception")
    network.fc = nn.Identity()
    return Inception(network, PUBLISHED, digest, resize)


def _build() -> nn.Module:
    """Build the network with its classifier; the caller loads the weights.

    It is torchvision's Inception3 with other average pools in three kinds of blocks, as in
    pytorch_fid.inception.fid_inception_v3. That function cannot be called because it downloads weights.
    """
    from pytorch_fid.inception import FIDInceptionA, FIDInceptionC, FIDInceptionE_1, FIDInceptionE_2
    from torchvision.models import inception as parts

    blocks = [parts.BasicConv2d, FIDInceptionA, parts.InceptionB, FIDInceptionC, parts.InceptionD, FIDInceptionE_1]
    blocks += [parts.InceptionAux]
    network = parts.Inception3(num_classes=NUM_CLASSES, aux_logits=False, init_weights=False, inception_blocks=blocks)
    network.Mixed_7c = FIDInceptionE_2(network.fc.in_features)
    return network


def _random_network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(RANDOM_SEED)
        network = _build()
        for module in network.modules():
            if isinstance(module, nn.Conv2d):  # torch's own initialization halves the signal at each of 20 layers
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return network


def pil_bicubic(images: Tensor, side_px: int) -> Tensor:  # [0, 1] (B, 3, H, W) -> [0, 1] (B, 3, side, side), on the CPU
    """Convert images to 8 bits, as `to_pil_image` does, and resize each by PIL's bicubic; the aspect ratio is not kept."""
    pixels = (images * 255).to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    resized = [Image.fromarray(one).resize((side_px, side_px), Image.Resampling.BICUBIC) for one in pixels]
    return torch.from_numpy(np.stack([np.asarray(one) for one in resized])).permute(0, 3, 1, 2) / 255
