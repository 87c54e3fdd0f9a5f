"""The image network of FID: TensorFlow's Inception of 2015, as ported by the package pytorch-fid.

    extractor = load_inception("pt_inception-2015-12-05-6726825d.pth", resize="bilinear299").to(device)
    features = extractor(images)

Two ways of resizing an image to the network's 299 x 299 px are in use. They give different scores:

    bilinear299   MLPerf's reference: the decoder's float32 output, bilinear without antialias
    bicubic256    NVIDIA's submissions: rounded to 8 bits, then PIL's bicubic to 256 x 256 px; then as above

Shapes: B batch, H W height and width in px, D features, 2048 for Inception.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from evaluation import shapes
from evaluation.numerics import Extractor
from weights.files import open_weights
from weights.hub import Need
from weights.hub_names import place
from weights.published import RANDOM, RANDOM_SEED, file_digest, fill
from weights.tensors import fingerprint

Resize = Literal["bilinear299", "bicubic256"]

PUBLISHED = "inception-2015-12-05"
PUBLISHED_FILE = "pt_inception-2015-12-05-6726825d.pth"  # of pytorch-fid's release fid_weights, 92 MB
PUBLISHED_SHA1 = "bd836944fd6db519dfd8d924aa457f5b3c8357ff"
# No repository on the hub is pytorch-fid's own; a copy is known by the first digits of its SHA-256, which its name has.
NEED = Need(one_of=(PUBLISHED_FILE,), instead="leave eval.inception and eval.statistics out")
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
            miniature's reader (evaluation/shapes.py).

    Raises:
        ValueError: no such file, another file, or an unknown `resize`.
    """
    if resize not in get_args(Resize):
        raise ValueError(f"resize: '{resize}' is not known. Possible: {', '.join(get_args(Resize))}.")
    if str(weights) == RANDOM:
        network = _random_network()
        network.fc = nn.Identity()
        return Inception(network, "random-inception", fingerprint(network), resize)
    path = place(weights)
    file = open_weights(path)
    if shapes.is_reader(file):
        return shapes.load_reader(file)
    digest = file_digest(path, "sha1")
    if digest != PUBLISHED_SHA1:
        given = f"{path}: its SHA-1 is {digest}, that of {PUBLISHED_FILE} is {PUBLISHED_SHA1}"
        way = "FID is defined by that file alone: fetch it again: python -m prepare.downloads inception"
        raise ValueError(f"{given}. {way}.")
    network = _build()
    fill(network, file, "FID's Inception")
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
            if isinstance(module, nn.Conv2d):  # torch's own initialisation halves the signal at each of 20 layers
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return network


def pil_bicubic(images: Tensor, side_px: int) -> Tensor:  # [0, 1] (B, 3, H, W) -> [0, 1] (B, 3, side, side), on the CPU
    """Convert images to 8 bits, as `to_pil_image` does, and resize each by PIL's bicubic; the aspect ratio is not kept."""
    pixels = (images * 255).to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    resized = [Image.fromarray(one).resize((side_px, side_px), Image.Resampling.BICUBIC) for one in pixels]
    return torch.from_numpy(np.stack([np.asarray(one) for one in resized])).permute(0, 3, 1, 2) / 255
