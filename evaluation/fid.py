"""Frechet inception distance from running sums: the memory does not grow with the number of images.

    sums = FeatureSums(2048)
    for ...: sums.update(extractor(images), ids)
    distance = frechet_distance(sums.compute(), read_statistics("val2014_30k_stats.npz", 2048))

Heusel et al. 2017 (arXiv:1706.08500), equation 6: d^2 = |m_a - m_b|^2 + tr(A + B - 2 (A B)^(1/2)) for two Gaussians with
means m and covariances A, B of an image network's features. Statistics files have pytorch-fid's format: an .npz with `mu`
and `sigma`.

Kernel inception distance is not offered: from sums alone, its cubic kernel needs third moments, D^3 numbers (69 GB at
D = 2048).

Shapes: B batch, D features, e.g. 2048.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cli.files import whole
from evaluation.numerics import Extractor, Float64Sums, require_finite

BLOCK = 256  # columns multiplied at once; 128 to 512 are fast on a CPU
FLOAT32_ROUNDING = 1e-5  # relative to the largest value: error allowed in a covariance computed in float32
MAX_NPZ_BYTES = 2**28  # of 2,048 features it is 2**25
AGAIN = "Make the file again: python -m prepare.fid_statistics."


class Statistics(NamedTuple):
    """Mean and covariance of features. Not a dataclass: torchmetrics refuses a frozen one as a metric's value."""

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


def write_statistics(path: str | Path, statistics: Statistics, facts: Mapping[str, str | int | float]) -> None:
    """Write a file of statistics, whole or not at all. An existing file is replaced.

    Args:
        path: no suffix is added.
        facts: further single values, e.g. the image network's name, fingerprint and resize.

    Raises:
        ValueError: the statistics are invalid and could not be read again.
        OSError: the file cannot be written.
    """
    mean, covariance, num_images = statistics
    assert not {"mu", "sigma", "num_images"} & set(facts), f"facts say {', '.join(facts)}"
    if problem := _problem(mean, covariance, None):
        raise ValueError(f"{path}: is not written: {problem}")
    count = {} if num_images is None else {"num_images": num_images}
    path = Path(path).expanduser()
    with whole(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, allow_pickle=False, mu=mean, sigma=covariance, **count, **facts)


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with zipfile.ZipFile(path) as archive:  # numpy reads what a compressed record gives, however much that is
            if (size := sum(record.file_size for record in archive.infolist())) > MAX_NPZ_BYTES:
                raise ValueError(f"it holds {size:,} bytes; at most {MAX_NPZ_BYTES:,} are read")
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
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

    Features are not centred, so the ranks' sums can simply be added at the end. In float64, cancellation costs the
    covariance about log10(mean^2 / variance) of 16 digits: one digit for Inception's features. Only the blocks on and
    above the diagonal are computed, half of the work.

    Args:
        num_features: D.
    """

    higher_is_better = False
    n: Tensor
    sum: Tensor
    outer: Tensor

    def __init__(self, num_features: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.add_state("n", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("sum", torch.zeros(num_features, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("outer", torch.zeros(num_features, num_features, dtype=torch.float64), dist_reduce_fx="sum")

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
    own = {"extractor": extractor.name, "fingerprint": extractor.fingerprint, "resize": extractor.resize}
    for key, ours in own.items():
        if made.get(key, ours) != ours:
            text = f"{path} was made with the {key} {made[key]}, this evaluation has {ours}"
            raise ValueError(f"eval.statistics: {text}. Make it again, or use eval.inception and eval.resize as then.")
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
        given = f"FID: statistics of {len(a.mean)} and of {len(b.mean)} features"
        raise ValueError(f"{given}. Possible: of the same image network. Make both with one.")
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
        given = f"FID: a covariance has the eigenvalue {values[0]:.6g}, the largest is {values[-1]:.6g}"
        raise ValueError(f"{given}. A covariance has none below 0. Make these statistics again.")
    is_kept = values > values[-1] * len(values) * torch.finfo(values.dtype).eps  # the rest is rounding error
    return vectors[:, is_kept] * values[is_kept].sqrt()
