"""Latents that others have stored: of which size, made by this VAE or not, multiplied by its scale or not.

mosaicml/diffusion's scripts/precompute_latents.py stores, for each picture, a draw from the VAE's posterior as float16 bytes,
latents_256 (4, 32, 32) and latents_512 (4, 64, 64), times 0.18215, none of a picture that is smaller; and the text encoder's
states, of which a tenth are the empty caption's for good. The latents are used, the states are not.

A data set says nothing of that, but has the pictures beside the latents. They are encoded anew, prepared as there: the
shorter side scaled to the latent's size, bilinear with antialias, the centre cut out, values in [-1, 1]. The VAE's deviation
is small beside the mean. So a draw lies near the mean of the VAE that it is from, not near that of another or another scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as vision

from cli.command_line import Problem
from cli.errors import ConfigError, Failed
from model import normalize_images
from stages.images import SampleError, decode_image
from stages.moments import read_latent
from zoo import load_family
from zoo.encoders import build_encoders
from zoo.model_config import ModelConfig, fetched, model_problems
from zoo.spec import Family

NUM_COMPARED = 8
# Of the root mean square of mean - latent, by that of the mean. Another scale of SD's gives 0.8 or 4.5, another VAE above 1.
NEAR = 0.3


def problems_of_latents(config: ModelConfig, column: str | None) -> list[Problem]:
    """Return the problems of the VAE's weights. Without latents they are not looked at."""
    if column is None:
        if config.weights is None:
            return []
        return [Problem("model.weights: has no use without latents=COLUMN. Leave it out.", ("model.weights",))]
    if config.weights is None:
        given = f"not given. The data set does not say which VAE has made {column}, nor of which scale they are"
        todo = "Give the VAE that it was: they are compared with what it makes of some pictures"
        return [Problem(f"model.weights: {given}. {todo}.", ("model.weights",))]
    try:
        family = load_family(config.family, config.preset, config.variant)
    except ValueError as error:
        return [Problem(str(error), ("model.family", "model.preset", "model.variant"))]
    side = 64 * math.lcm(*_pixels_per_latent(family))
    return model_problems(config, (side, side), encoders_wanted=True)


def _pixels_per_latent(family: Family) -> tuple[int, int]:
    _, height, width = family.latent_shape((1024, 1024))
    return 1024 // width, 1024 // height


def side_of(latents: Sequence[Any], family: Family, column: str) -> int:
    """Return the pictures' side, px, by the bytes of the latents. Raises ConfigError: of several sizes, or not square."""
    sizes = sorted({len(latent) for latent in latents})
    channels, pixels = family.latent_shape((1024, 1024))[0], _pixels_per_latent(family)[0]
    side = math.isqrt(sizes[0] // (2 * channels))
    if len(sizes) > 1 or 2 * channels * side**2 != sizes[0]:
        shown = ", ".join(f"{size:,}" for size in sizes[:4])
        possible = f"float16 of {channels} channels in a square, all of one size"
        raise ConfigError([f"latents: column {column} has entries of {shown} bytes. Possible: {possible}."])
    return side * pixels


def compare(config: ModelConfig, column: str, samples: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], str]:
    """Compare stored latents with what the VAE makes of the pictures beside them.

    Args:
        samples: with `latents` and `jpg`; at least one.

    Returns:
        (what dataset.json has to say of them, the same in words).

    Raises:
        ConfigError: they are not this VAE's, or of no scale that is known.
    """
    family = load_family(config.family, config.preset, config.variant)
    encoders = build_encoders(family, fetched(config).weights)
    side = side_of([sample["latents"] for sample in samples], family, column)
    shape = family.latent_shape((side, side))
    means, stored = [], []
    for sample in samples[:NUM_COMPARED]:
        try:
            latent = read_latent(sample["latents"], shape, 1.0)
            pixels = center_square(decode_image(sample["jpg"]), side)
        except SampleError:
            continue  # counted when it was read
        with torch.no_grad():
            moments = family.encode_images(encoders.modules, normalize_images(pixels[None], "symmetric"))
        means.append(moments.chunk(2, dim=1)[0][0].float())
        stored.append(latent.float())
    if not stored:
        raise Failed(f"latents: none of {len(samples)} entries of {column} could be compared.")
    ones, zeros = torch.ones(()), torch.zeros(shape)
    scale_of_family = float(
        family.sample_latents(torch.cat([ones.expand(shape), zeros - 30.0])[None], zeros[None]).mean()
    )
    unscaled, given = torch.stack(means), torch.stack(stored)
    away = {scale: _distance(given / scale, unscaled) for scale in (round(scale_of_family, 6), 1.0)}
    scale, nearest = min(away.items(), key=lambda pair: pair[1])
    if nearest > NEAR:
        found = ", ".join(f"{distance:.2g} if they were multiplied by {scale:g}" for scale, distance in away.items())
        text = f"latents: {column} is not what this VAE makes of the pictures: {found}, of the means' root mean square"
        raise ConfigError([f"{text}. Possible: up to {NEAR}. Give the VAE that made them as model.weights."])
    facts = {
        "family": config.family,
        "preset": config.preset,
        "variant": config.variant,
        "image_size": [side, side],
        "normalize": "symmetric",
        "encoders": {"vae": encoders.fingerprints["vae"]},
        "latent_scale": scale,
    }
    times = "not scaled" if scale == 1.0 else f"multiplied by {scale:g}"
    off = f"{nearest:.2g} of the root mean square off this VAE's means ({len(stored)} pictures)"
    drawn = "each was drawn once: a run has the same latent at every reading, whatever data.posterior says"
    return facts, f"latents of {side} x {side} px, {times}; {off}\n{drawn}"


def _distance(latents: Tensor, means: Tensor) -> float:
    return float((latents - means).square().mean().sqrt() / means.square().mean().sqrt())


def center_square(image: Tensor, side: int) -> Tensor:
    """# uint8 (3, h, w) -> uint8 (3, side, side), as mosaicml/diffusion makes it."""
    scaled = vision.resize(vision.to_pil_image(image), [side], interpolation=InterpolationMode.BILINEAR, antialias=True)
    left, top = (scaled.width - side) // 2, (scaled.height - side) // 2
    square = scaled.crop((left, top, left + side, top + side))
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)
