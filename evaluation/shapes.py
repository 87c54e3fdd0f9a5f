"""The miniature's scoring networks; they replace FID's Inception and OpenCLIP's pair.

    eval.inception=zoo/shapes_weights/reader/model.safetensors      `ReaderFeatures`, for FID
    eval.clip=zoo/shapes_weights/clip/model.safetensors             `ShapesPair`; text_encoder/ has to be beside clip/

evaluation/inception.py and clip_score.py recognise these files by their tensors' names. Compare scores from these networks
only with each other.

Shapes: B batch, H = W = 32 px, E = 64 features of either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from evaluation.numerics import Extractor, ScoringNetwork
from weights.files import WeightsFile, open_weights
from weights.published import file_digest, fill
from zoo.shapes.networks import NUM_FEATURES, SIDE_PX, Reader, build_clip, tokenize

READER_TENSOR = "damage.weight"
PAIR_TENSOR = "vision_model.embeddings.patch_embedding.weight"
TEXT_FILE = "text_encoder/model.safetensors"
"""The pair's text tower, relative to the folder that has clip/. It is the text encoder, stored once."""


def is_reader(file: WeightsFile) -> bool:
    """True for the weights of a `Reader`."""
    return READER_TENSOR in file.entries


def is_pair(file: WeightsFile) -> bool:
    """True for the weights of the pair (its file has all but the text tower)."""
    return PAIR_TENSOR in file.entries and "text_projection.weight" in file.entries


class ReaderFeatures(Extractor):
    """The reader up to its features. Made by `load_reader`."""

    resize = "none"

    def __call__(self, images: Tensor) -> Tensor:  # (B, 3, 32, 32) in [0, 1] -> (B, 64)
        """Return the features. Raises ValueError: images of another size."""
        _require_size(images)
        with self.computing():
            return self.network.features(2 * images.to(self.device, torch.float32) - 1)


class ShapesPair(ScoringNetwork):
    """The miniature's CLIP pair, with the interface of `evaluation.clip_score.ClipPair`. Made by `load_pair`."""

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


def load_reader(file: WeightsFile) -> ReaderFeatures:
    """Load a reader from its file. Raises ValueError: the file does not fit."""
    network = Reader()
    fill(network, file, "the miniature's reader")
    return ReaderFeatures(network, "shapes-reader", file_digest(file.path, "sha256"), NUM_FEATURES)


def load_pair(file: WeightsFile) -> ShapesPair:
    """Load the pair from its file and the text encoder's. Raises ValueError: the latter is missing, or one does not fit."""
    text = open_weights(file.path.parent.parent / TEXT_FILE)
    network: Any = build_clip()
    fill(network, WeightsFile(file.path, {**text.tensors, **file.tensors}), "the miniature's CLIP pair")
    digests = "".join(file_digest(part.path, "sha256") for part in (file, text))
    fingerprint = hashlib.sha256(digests.encode()).hexdigest()
    return ShapesPair(network, "shapes-CLIP", fingerprint, network.config.projection_dim)


def _require_size(images: Tensor) -> None:
    assert images.ndim == 4 and images.shape[1] == 3, f"{tuple(images.shape)} is not (B, 3, H, W)"
    height, width = images.shape[2:]
    if (height, width) != (SIDE_PX, SIDE_PX):
        given = f"images: {width} x {height} px, but the miniature's scoring networks take {SIDE_PX} x {SIDE_PX} px"
        raise ValueError(f"{given}. Say image_size={SIDE_PX}, or give other networks.")
