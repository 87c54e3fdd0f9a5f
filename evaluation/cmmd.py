"""CMMD: how far generated images are from reference images, by CLIP embeddings and without Gaussians.

    encoder = load_encoder("clip-vit-large-patch14-336/model.safetensors").to(device)
    embeddings = Embeddings(encoder.num_features).to(device)
    for ...: embeddings.update(encoder(images), ids)
    distance = maximum_mean_discrepancy(embeddings.rows, read_reference("val2014_30k_stats.npz", encoder))

Jayasumana et al. 2024 (arXiv:2401.09603): the squared maximum mean discrepancy of two sets of embeddings, times 1000, under
the kernel k(x, y) = exp(-|x - y|^2 / (2 sigma^2)), sigma = 10. As in the authors' code the estimator is the biased one with
the least variance (Gretton et al. 2012, equation 5), the network is OpenAI's CLIP ViT-L/14 at 336 px, and embeddings have
length 1. Then all kernel values lie within 0.02 of 1, so the kernel is computed in float64, in blocks.

Shapes: B batch, H W height and width in px, N M images, E features, 768 for ViT-L/14.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from common import dist
from evaluation.fid import AGAIN, read_embeddings, read_facts
from evaluation.scoring_networks import ScoringNetwork, require_finite
from weights.files import WeightsFile, open_weights
from weights.hub import RequiredFiles
from weights.hub_names import resolve_weights_path
from weights.ldm_names import POSITION_IDS
from weights.published import RANDOM, RANDOM_SEED, copy_weights, file_digest
from weights.tensors import fingerprint

SIGMA, SCALE = 10.0, 1000.0
BLOCK = 2048  # images whose kernel is computed at once: 32 MiB of float64
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # of CLIP's training images
PUBLISHED = "clip-vit-large-patch14-336"
ARCHITECTURE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "projection_dim": 768,
}
"""transformers' CLIPVisionConfig of the published network."""
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "projection_dim": 16,
}
"""The same of the random network."""
PARTS = ("vision_model.", "visual_projection.")
"""What the names of its tensors begin with; the file also has the text tower."""
REQUIRED_FILES = RequiredFiles(
    single_file_names=("model.safetensors", "pytorch_model.bin"), instead="leave eval.cmmd out"
)
THREADS = 8  # PIL releases the GIL while it resizes


class ImageEncoder(ScoringNetwork):
    """CLIP's image tower and its projection, always in float32; made by `load_encoder`."""

    def preprocess(self, images: Tensor) -> Tensor:  # [0, 1] (B, 3, H, W) -> (B, 3, 336, 336), on the CPU
        """Round images to 8 bits, crop the middle square, resize it by PIL's bicubic, and normalize it."""
        size_px, (height, width) = self.network.config.image_size, images.shape[2:]
        side_px = min(height, width)
        top, left = (height - side_px) // 2, (width - side_px) // 2
        square = images[:, :, top : top + side_px, left : left + side_px]
        pixels = (square.float() * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()

        def resize(image: np.ndarray) -> np.ndarray:
            return np.asarray(Image.fromarray(image).resize((size_px, size_px), Image.Resampling.BICUBIC))

        with ThreadPoolExecutor(THREADS) as pool:
            resized = torch.from_numpy(np.stack(list(pool.map(resize, pixels)))).permute(0, 3, 1, 2) / 255
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
        return (resized - mean) / std

    def __call__(self, images: Tensor) -> Tensor:
        """Return embeddings of length 1, (B, E) float32; `images`: (B, 3, H, W) in [0, 1]."""
        assert images.ndim == 4 and images.shape[1] == 3, f"{tuple(images.shape)} is not (B, 3, H, W)"
        with self.computing():
            return F.normalize(self.network(self.preprocess(images).to(self.device)).image_embeds, dim=-1)


def load_encoder(weights: str | Path, architecture: Mapping[str, Any] = ARCHITECTURE) -> ImageEncoder:
    """Build the image encoder on the CPU, without any download.

    Args:
        weights: transformers' file of openai/clip-vit-large-patch14-336, or its name on the hub where it was fetched;
            "random", for tests and trials.
        architecture: of the file's network.

    Raises:
        ValueError: no such file, or weights of another architecture.
    """
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    is_random = str(weights) == RANDOM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(RANDOM_SEED)
        network = CLIPVisionModelWithProjection(CLIPVisionConfig(**(TINY if is_random else architecture)))
    num_features = network.config.projection_dim
    if is_random:
        return ImageEncoder(network, "random-CLIP-image-encoder", fingerprint(network), num_features)
    file = open_weights(path := resolve_weights_path(weights))
    tensors = {name: tensor for name, tensor in file.tensors.items() if name.startswith(PARTS)}
    tensors = {name: tensor for name, tensor in tensors.items() if not POSITION_IDS.fullmatch(name)}
    copy_weights(network, WeightsFile(path, tensors), f"CMMD's {PUBLISHED}")
    return ImageEncoder(network, PUBLISHED, file_digest(path, "sha256"), num_features)


class Embeddings:
    """The embeddings of all images so far, with the interface of `Float64Sums`: of this rank, after `add_ranks` of all.

    Args:
        num_features: E.

    Attributes:
        rows: (N, E) float32.
    """

    def __init__(self, num_features: int):
        self.rows = torch.zeros(0, num_features)

    def update(self, embeddings: Tensor, ids: Sequence[int | str] | None = None) -> None:
        """Add a batch, (B, E). Raises ValueError: a value is NaN or infinite; names the prompts of `ids`."""
        require_finite(embeddings, "CMMD", ids)
        self.rows = torch.cat([self.rows, embeddings.to(self.rows)])

    def tensors(self) -> dict[str, Tensor]:
        return {"rows": self.rows}

    def accepts(self, states: Mapping[str, Tensor]) -> bool:
        """Return whether these are embeddings of this network."""
        rows = states.get("rows")
        return rows is not None and rows.dtype == self.rows.dtype and rows.shape[1:] == self.rows.shape[1:]

    def restore(self, states: Mapping[str, Tensor]) -> None:
        self.rows = states["rows"].to(self.rows)

    def to(self, device: torch.device | str) -> Self:
        self.rows = self.rows.to(device)
        return self

    def add_ranks(self) -> None:
        """Replace this rank's embeddings by those of all ranks, in the order of the ranks."""
        self.rows = torch.cat(dist.all_gather_object(self.rows.cpu())).to(self.rows)


def read_reference(path: str | Path, encoder: ImageEncoder) -> Tensor:
    """Read the reference images' embeddings, (M, E) float32, from a file of statistics.

    Raises:
        ValueError: the file has none, or they are of another encoder.
    """
    made = read_facts(path)
    if "cmmd_fingerprint" not in made:
        raise ValueError(f"eval.statistics: {path} has no embeddings for CMMD. {AGAIN[:-1]} cmmd=ENCODER.")
    if made["cmmd_fingerprint"] != encoder.fingerprint:
        text = f"{path} has embeddings of the encoder {made['cmmd_fingerprint']}, this evaluation's is {encoder.fingerprint}"
        raise ValueError(f"eval.statistics: {text}. Make it again, or use the eval.cmmd that it was made with.")
    return torch.from_numpy(read_embeddings(path, encoder.num_features))


def maximum_mean_discrepancy(a: Tensor, b: Tensor) -> float:
    """Return the CMMD of two sets of embeddings, (N, E) and (M, E) on one device; 0: the sets are equal.

    Raises:
        ValueError: a set is empty.
    """
    if not len(a) or not len(b):
        raise ValueError(f"CMMD: {len(a)} and {len(b)} images were given. Each set needs 1 at least.")
    a, b = a.double(), b.double()
    return SCALE * (_mean_kernel(a, a) + _mean_kernel(b, b) - 2 * _mean_kernel(a, b))


def _mean_kernel(a: Tensor, b: Tensor) -> float:
    """Return the mean of k over all pairs of rows."""
    total = torch.zeros((), dtype=torch.float64, device=a.device)
    for rows in a.split(BLOCK):
        for columns in b.split(BLOCK):
            norms = rows.square().sum(dim=1)[:, None] + columns.square().sum(dim=1)
            squared_distances = torch.addmm(norms, rows, columns.T, alpha=-2)
            total += squared_distances.mul_(-1 / (2 * SIGMA**2)).exp_().sum()
    return float(total) / (len(a) * len(b))
