"""Networks that score images: sums in float64, one fixed precision, finite values only; and the miniature's own two networks.

FID's Inception is in evaluation/fid.py, OpenCLIP's pair in evaluation/clip_score.py. The miniature replaces both:

    eval.inception=families/shapes_weights/reader/model.safetensors      `ReaderFeatures`, for FID
    eval.clip=families/shapes_weights/clip/model.safetensors             `ShapesPair`; text_encoder/ has to be beside clip/

Both are recognized by their tensors' names. Compare scores from these networks only with each other.

Shapes: B batch, D features, H W height and width in px; of the miniature H = W = 32, E = 64 features of either network.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import dist
from common.value_types import join_first
from families.shapes.networks import NUM_FEATURES, SIDE_PX, Reader, build_clip, tokenize
from weights.files import WeightsFile, open_weights
from weights.published import copy_weights, file_digest
from weights.tensors import tensor_specs

Precision = Literal["fp32", "fp16"]
"""fp32: full, whatever the run's precision. fp16: under autocast, as in all validation of MLPerf's reference."""


class ScoringNetwork:
    """A frozen network that scores images, and its device.

    Attributes:
        name: of the network; contains `random` if its weights are random.
        fingerprint: of its weights: of the file, or of the tensors where they are random.
        num_features: of an image.
        precision: of the features; initially fp32.
    """

    def __init__(self, network: nn.Module, name: str, fingerprint: str, num_features: int):
        self.network: Any = network.eval().requires_grad_(False)
        self.name, self.fingerprint, self.num_features = name, fingerprint, num_features
        self.device = torch.device("cpu")
        self.precision: Precision = "fp32"

    def to(self, device: torch.device | str) -> Self:
        self.device = torch.device(device)
        self.network.to(self.device)
        return self

    def computing(self) -> contextlib.AbstractContextManager[None]:
        return computing(self.device, self.precision)


class Extractor(ScoringNetwork):
    """The interface of FID's image network. The miniature has its own instead of Inception.

    Attributes:
        resize: how images are resized for it.
    """

    resize: str

    def __call__(self, images: Tensor) -> Tensor:  # (B, 3, H, W) in [0, 1] -> (B, D)
        raise NotImplementedError


class Float64Sums:
    """Sums over batches and ranks, float64: its attributes of the given shapes, 0 at first."""

    def __init__(self, **shapes: tuple[int, ...]):
        self._names = tuple(shapes)
        for name, shape in shapes.items():
            setattr(self, name, torch.zeros(shape, dtype=torch.float64))

    def tensors(self) -> dict[str, Tensor]:
        """Return name -> sum, without a copy."""
        return {name: getattr(self, name) for name in self._names}

    def accepts(self, states: Mapping[str, Tensor]) -> bool:
        """Return whether saved sums have the names, types and shapes of these."""
        return tensor_specs(states) == tensor_specs(self.tensors())

    def restore(self, states: Mapping[str, Tensor]) -> None:
        """Continue from saved sums, which `accepts` accepts."""
        for name, tensor in self.tensors().items():
            tensor.copy_(states[name])

    def to(self, device: torch.device | str) -> Self:
        for name, tensor in self.tensors().items():
            setattr(self, name, tensor.to(device))
        return self

    def add_ranks(self) -> None:
        """Replace this rank's sums by those of all ranks."""
        for tensor in self.tensors().values():
            dist.all_reduce(tensor, reduce_operation="SUM")


def require_finite(values: Tensor, what: str, ids: Sequence[int | str] | Tensor | None = None) -> None:
    """Check that a batch has no NaN and no infinity.

    Args:
        values: (B, ...)
        what: the values' name in the message.
        ids: prompt ids, one per row; None: rows are named by their index in the batch.

    Raises:
        ValueError: a value is not finite; names the prompts.
    """
    assert ids is None or len(ids) == len(values), f"{len(ids)} ids for {len(values)} rows"
    finite = values.isfinite().flatten(1).all(dim=1) if values.ndim > 1 else values.isfinite()
    if finite.all():
        return
    rows = [row for row, is_finite in enumerate(finite.tolist()) if not is_finite]
    names = [str(row if ids is None else int(ids[row]) if isinstance(ids, Tensor) else ids[row]) for row in rows]
    where = f"{'rows of the batch' if ids is None else 'prompts'} {join_first(names, 5)}"
    raise ValueError(
        f"{what}: NaN or infinite for {len(rows)} of {len(values)} images ({where}). A score is of finite values "
        "only. Look at these images: a model that has diverged makes them."
    )


@contextlib.contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Compute without gradients, autocast and TensorFloat-32, so that a score does not depend on a run's precision."""
    switches = _tf32_switches()
    values = [getattr(owner, name) for owner, name, _ in switches]
    try:
        for owner, name, off in switches:
            setattr(owner, name, off)
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        for (owner, name, _), value in zip(switches, values, strict=True):
            setattr(owner, name, value)


@contextlib.contextmanager
def computing(device: torch.device, precision: Precision) -> Iterator[None]:
    """Compute without gradients in full float32, or under fp16 autocast (on a CPU with torch's CPU list of float32 ops)."""
    with full_float32(device), torch.autocast(device.type, dtype=torch.float16, enabled=precision == "fp16"):
        yield


def _tf32_switches() -> list[tuple[Any, str, Any]]:
    """Return (owner, attribute, value for float32) of every switch for TensorFloat-32 in this torch.

    From torch 2.9 on, `allow_tf32` is a view of `fp32_precision`. Writing it replaces "ieee" or "tf32" by "none", and
    reading it fails if matmul, conv and rnn have different values (aten/src/ATen/Context.cpp).
    """
    matmul = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn  # conv and rnn are set while torch is imported
    if not hasattr(matmul, "fp32_precision"):
        return [(matmul, "allow_tf32", False), (cudnn, "allow_tf32", False)]
    return [(owner, "fp32_precision", "ieee") for owner in (matmul, cudnn.conv, cudnn.rnn)]


# --- the miniature's networks ---

READER_TENSOR = "damage.weight"
PAIR_TENSOR = "vision_model.embeddings.patch_embedding.weight"
TEXT_FILE = "text_encoder/model.safetensors"
"""The pair's text tower, relative to the folder that has clip/. It is the text encoder, stored once."""


def is_shapes_reader(file: WeightsFile) -> bool:
    """True for the weights of a `Reader`."""
    return READER_TENSOR in file.entries


def is_shapes_pair(file: WeightsFile) -> bool:
    """True for the weights of the pair (its file has all but the text tower)."""
    return PAIR_TENSOR in file.entries and "text_projection.weight" in file.entries


class ReaderFeatures(Extractor):
    """The reader up to its features. Made by `load_shapes_reader`."""

    resize = "none"

    def __call__(self, images: Tensor) -> Tensor:  # (B, 3, 32, 32) in [0, 1] -> (B, 64)
        """Return the features. Raises ValueError: images of another size."""
        _require_size(images)
        with self.computing():
            return self.network.features(2 * images.to(self.device, torch.float32) - 1)


class ShapesPair(ScoringNetwork):
    """The miniature's CLIP pair, with the interface of `evaluation.clip_score.ClipPair`. Made by `load_shapes_pair`."""

    def encode_images(self, images: Tensor) -> Tensor:
        """Return features of length 1, (B, 64) float32. Images, (B, 3, 32, 32) in [0, 1], are first rounded to 8 bits.

        Raises:
            ValueError: images of another size.
        """
        _require_size(images)
        pixels = (images * 255).to(torch.uint8).to(self.device) / 127.5 - 1.0
        with self.computing():
            pooled = self.network.vision_model(pixel_values=pixels).pooler_output
            return F.normalize(self.network.visual_projection(pooled).float(), dim=-1)

    def encode_texts(self, captions: Sequence[str]) -> Tensor:
        """Return features of length 1, (N, 64) float32."""
        with self.computing():
            pooled = self.network.text_model(input_ids=tokenize(captions).to(self.device)).pooler_output
            return F.normalize(self.network.text_projection(pooled).float(), dim=-1)


def load_shapes_reader(file: WeightsFile) -> ReaderFeatures:
    """Load a reader from its file. Raises ValueError: the file does not fit."""
    network = Reader()
    copy_weights(network, file, "the miniature's reader")
    return ReaderFeatures(network, "shapes-reader", file_digest(file.path, "sha256"), NUM_FEATURES)


def load_shapes_pair(file: WeightsFile) -> ShapesPair:
    """Load the pair from its file and the text encoder's. Raises ValueError: the latter is missing, or one does not fit."""
    text = open_weights(file.path.parent.parent / TEXT_FILE)
    network: Any = build_clip()
    copy_weights(network, WeightsFile(file.path, {**text.tensors, **file.tensors}), "the miniature's CLIP pair")
    digests = "".join(file_digest(part.path, "sha256") for part in (file, text))
    fingerprint = hashlib.sha256(digests.encode()).hexdigest()
    return ShapesPair(network, "shapes-CLIP", fingerprint, network.config.projection_dim)


def _require_size(images: Tensor) -> None:
    assert images.ndim == 4 and images.shape[1] == 3, f"{tuple(images.shape)} is not (B, 3, H, W)"
    height, width = images.shape[2:]
    if (height, width) != (SIDE_PX, SIDE_PX):
        text = f"images: {width} x {height} px, but the miniature's scoring networks take {SIDE_PX} x {SIDE_PX} px"
        raise ValueError(f"{text}. Set image_size={SIDE_PX}, or give other networks.")
