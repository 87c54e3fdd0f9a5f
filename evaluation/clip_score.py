"""CLIP score: how well images fit their captions, measured by the cosine between OpenCLIP's image and text features.

    pair = load_clip("open_clip_pytorch_model.bin").to(device)
    score = CLIPScore()
    for ...: score.update(pair.encode_images(images), pair.encode_texts(captions), ids)
    score.compute(), times_100(score.compute())

The score is the mean cosine, as in MLPerf's reference (Hessel et al. 2021, arXiv:2104.08718, without its factor 2.5):
neither clamped nor multiplied, in float32 with sums in float64. The reference computes in float16, which is possible
here too: it rounds each cosine and the mean (float16 has steps of 0.00012 at 0.15: 0.149964 becomes 0.150024).

Shapes: B batch, H W height and width in px, E features, e.g. 1024 for ViT-H-14.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.files import read_regular
from evaluation.scoring_networks import (
    Float64Sums,
    ScoringNetwork,
    ShapesPair,
    is_shapes_pair,
    load_shapes_pair,
    require_finite,
)
from weights.files import WeightsFile, open_weights
from weights.hub import RequiredFiles
from weights.hub_names import resolve_weights_path
from weights.published import RANDOM, RANDOM_SEED, copy_weights, file_digest
from weights.tensors import canonical_name, fingerprint

ARCHITECTURES = {(1280, 1024): "ViT-H-14", (1024, 768): "ViT-L-14"}
"""Widths of the image tower and of the text tower -> open_clip's name."""
TINY = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 224, "layers": 2, "width": 64, "head_width": 32, "patch_size": 32},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
"""open_clip's model config of the random pair; 49408 is its tokenizer's vocabulary."""
PLAIN = {"embed_dim", "vision_cfg", "text_cfg", "quick_gelu"}
"""The keys of a model config for open_clip's class CLIP."""
CONFIG_FILE = "open_clip_config.json"  # published next to the weights; has model_cfg and preprocess_cfg
REQUIRED_FILES = RequiredFiles(
    single_file_names=("open_clip_model.safetensors", "open_clip_pytorch_model.bin"),
    optional_files=(CONFIG_FILE,),
    instead="leave eval.clip out",
)
TEXTS_A_PASS = 64
THREADS = 8  # PIL releases the GIL while it resizes


class CLIPScore(Float64Sums):
    """The mean cosine, from the sum of cosines and the number of images over batches and ranks.

    Args:
        in_half: round features, cosines and mean to float16, as MLPerf's reference does: numpy averages its float16 array.
    """

    n: Tensor
    sum: Tensor

    def __init__(self, *, in_half: bool = False):
        super().__init__(n=(), sum=())
        self.in_half = in_half

    def update(
        self, image_features: Tensor, text_features: Tensor, ids: Sequence[int | str] | Tensor | None = None
    ) -> None:
        """Add a batch.

        Args:
            image_features, text_features: (B, E), rows of length 1
            ids: prompt ids, for the message.

        Raises:
            ValueError: a cosine is NaN or infinite; nothing is added.
        """
        shapes = tuple(image_features.shape), tuple(text_features.shape)
        assert shapes[0] == shapes[1] and image_features.ndim == 2, f"{shapes[0]} images, {shapes[1]} texts"
        image, text = (self._rounded(part.to(image_features.device)) for part in (image_features, text_features))
        cosines = self._rounded((image.double() * text.double()).sum(dim=1)).double()
        require_finite(cosines, "CLIP score", ids)
        self.n += len(cosines)
        self.sum += cosines.sum().to(self.sum.device)

    def compute(self) -> Tensor:
        """Return the mean cosine, float64 (), in [-1, 1]. Raises ValueError: no image was given."""
        if not self.n:
            raise ValueError("CLIP score: 0 images were given. A mean needs 1 at least. Generate some.")
        return self._rounded(self.sum / self.n).double()

    def _rounded(self, values: Tensor) -> Tensor:
        return values.half() if self.in_half else values


def times_100(score: float | Tensor) -> float:
    """Return a mean cosine as torchmetrics prints it: times 100, and 0 if negative."""
    return max(100.0 * float(score), 0.0)


# --- the pair ---


class ClipPair(ScoringNetwork):
    """OpenCLIP's image and text tower; made by `load_clip`. Its name is open_clip's, of the architecture."""

    def __init__(self, built: tuple[nn.Module, Callable[[Any], Tensor], int], name: str, fingerprint: str):
        network, self.transform, num_features = built
        super().__init__(network, name, fingerprint, num_features)
        self._texts: dict[str, Tensor] = {}

    def preprocess(self, images: Tensor) -> Tensor:  # [0, 1] (B, 3, H, W) -> (B, 3, 224, 224), on the CPU
        """Convert images to 8 bits and apply open_clip's own validation transform to each, in threads.

        It uses PIL. torchvision resizes whole batches ten times as fast, but from 512 px it is off by one level of 255 in
        0.4 % of the values. PIL takes 7 ms of a core per image; generating the image takes 0.2 s of a GPU or more.
        """
        from torchvision.transforms.functional import to_pil_image

        pixels = (images * 255).to(torch.uint8).cpu()
        with ThreadPoolExecutor(THREADS) as pool:
            return torch.stack(list(pool.map(lambda image: self.transform(to_pil_image(image)), pixels)))

    def encode_images(self, images: Tensor) -> Tensor:
        """Return features of length 1, (B, E) float32; `images`: (B, 3, H, W) in [0, 1]."""
        assert images.ndim == 4 and images.shape[1] == 3, f"{tuple(images.shape)} is not (B, 3, H, W)"
        with self.computing():
            return F.normalize(self.network.encode_image(self.preprocess(images).to(self.device)).float(), dim=-1)

    def encode_texts(self, captions: Sequence[str]) -> Tensor:
        """Return features of length 1, (N, E) float32. Features are cached on the CPU, so each caption is encoded once."""
        import open_clip

        new = [caption for caption in dict.fromkeys(captions) if caption not in self._texts]
        for first in range(0, len(new), TEXTS_A_PASS):
            part = new[first : first + TEXTS_A_PASS]
            tokens = open_clip.tokenize(part, context_length=self.network.context_length)
            with self.computing():
                features = F.normalize(self.network.encode_text(tokens.to(self.device)).float(), dim=-1)
            self._texts |= zip(part, features.cpu(), strict=True)
        return torch.stack([self._texts[caption] for caption in captions]).to(self.device)


def load_clip(weights: str | Path, random_config: Mapping[str, Any] = TINY) -> ClipPair | ShapesPair:
    """Build a pair on the CPU, without any download.

    Args:
        weights: a file with OpenCLIP's state dict (open_clip_pytorch_model.bin, .safetensors, or any file of torch.save), or
            the name of one on the hub that was fetched; "random", for tests and trials; or the miniature's pair
            (`ShapesPair`). open_clip_config.json next to the file names the architecture and the normalization of images.
            Without it: ViT-H-14 or ViT-L-14, recognized by the weights' shapes, with OpenAI's normalization and GELU.
            (Weights trained with QuickGELU need that file; the shapes do not show it.)
        random_config: open_clip's model config of the random pair.

    Raises:
        ValueError: no such file, an unknown architecture, or weights of another architecture.
    """
    if str(weights) == RANDOM:
        built = _build(random_config, {})
        return ClipPair(built, "random-CLIP", fingerprint(built[0]))
    path = resolve_weights_path(weights)
    file = open_weights(path)
    if is_shapes_pair(file):
        return load_shapes_pair(file)
    config, preprocess = _read_config(path) or (_config_from_shapes(file), {})
    built, name = _build(config, preprocess), _name_of(config)
    copy_weights(built[0], file, f"OpenCLIP's {name}")
    return ClipPair(built, name, file_digest(path, "sha256"))


def _read_config(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """Return the model and its preprocessing from the config next to a weights file, or None."""
    config_path = path.with_name(CONFIG_FILE)
    if not config_path.is_file():
        return None
    try:
        config = json.loads(read_regular(config_path))
        return dict(config["model_cfg"]), dict(config.get("preprocess_cfg", {}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = "cannot be read: it has to be JSON with model_cfg and preprocess_cfg. Fetch it again, or remove it"
        raise ValueError(f"{config_path}: {what}.") from error


def _config_from_shapes(file: WeightsFile) -> Mapping[str, Any]:
    import open_clip

    sizes = {canonical_name(name): shape for name, (_, shape) in file.entries.items()}
    image, text = sizes.get("visual.conv1.weight", (0,)), sizes.get("token_embedding.weight", (0,))
    name = ARCHITECTURES.get((image[0], text[-1]))
    if name is None:
        widths = f"{file.path}: its image tower is {image[0]} and its text tower {text[-1]} wide (0: there is none)"
        known = ", ".join(f"{name} ({image}, {text})" for (image, text), name in ARCHITECTURES.items())
        raise ValueError(
            f"{widths}. Known by its shapes: {known}. For another one put its {CONFIG_FILE} next to the file."
        )
    config = open_clip.get_model_config(name)
    assert config is not None
    return config


def _name_of(config: Mapping[str, Any]) -> str:
    import open_clip

    same = (name for name in open_clip.list_models() if open_clip.get_model_config(name) == config)
    return next(same, "CLIP of a model config")


def _build(config: Mapping[str, Any], preprocess: Mapping[str, Any]) -> tuple[nn.Module, Callable, int]:
    """Return network, transform for validation, and E."""
    import open_clip
    from open_clip.transform import PreprocessCfg, image_transform_v2, merge_preprocess_dict

    try:
        image, text, size = config["vision_cfg"], config["text_cfg"], config["vision_cfg"]["image_size"]
        if not set(config) <= PLAIN or "timm_model_name" in image or "hf_model_name" in text:
            raise ValueError("towers of other libraries")  # which may fetch something
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(RANDOM_SEED)
            network = open_clip.CLIP(**config)
        settings = merge_preprocess_dict(PreprocessCfg(size=size), dict(preprocess))
        return network, image_transform_v2(PreprocessCfg(**settings), is_train=False), config["embed_dim"]
    except Exception as error:  # for an invalid config, its dataclasses and modules raise errors of many types
        text = f"CLIP architecture: a config of {', '.join(config)} cannot be built ({type(error).__name__}: {error})"
        raise ValueError(f"{text}. Possible: those of open_clip's plain pairs, e.g. of ViT-L-14-quickgelu.") from error
