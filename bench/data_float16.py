"""What float16 costs stored moments: their error against float32, for a VAE that is here and for numbers of SD2's scale.

    vae_     the moments of the miniature's own VAE on its rendered pictures, in float32 and rounded to float16
    sd2_     drawn: means of the standard deviation that SD2's scale factor stands for, 1 / 0.18215. No figure of its
             posterior: its weights are not in the project

An error of the mean is given in units of the posterior's own standard deviation at that place (what it is drawn with anyway),
and of all latents' standard deviation. The MLPerf reference stores float32 and rounds each drawn, scaled latent to half
precision: its error in the same unit stands beside ours.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from bench.contest import rounded
from model import normalize_images
from zoo import load_family
from zoo.encoders import build_encoders

SD2_SCALE = 0.18215
NUM_PICTURES = 256
NUM_DRAWN = 512
SEED = 17


def measure_float16(folder: Path, num_pictures: int = NUM_PICTURES) -> dict[str, float]:
    """Return all errors, key -> figure; pictures are rendered into the folder."""
    family = load_family("shapes", "full", "stock")
    with torch.no_grad():
        modules = build_encoders(family, None).modules
        moments = family.encode_images(modules, normalize_images(pictures(folder, num_pictures), "symmetric"))
    random = torch.Generator().manual_seed(SEED)
    means = torch.randn(NUM_DRAWN, 4, 64, 64, generator=random) / SD2_SCALE
    of_vae = {f"float16_vae_{key}": value for key, value in errors(moments, family.latent_scale).items()}
    of_sd2 = {f"float16_sd2_{key}": value for key, value in latent_errors(means, SD2_SCALE).items()}
    return {key: rounded(value) for key, value in (of_vae | of_sd2).items()}


def pictures(folder: Path, num: int) -> Tensor:
    """Render the miniature's pictures by its own command; uint8 (N, 3, 32, 32)."""
    command = [sys.executable, "-m", "prepare.shapes", str(folder), f"num_images={num}", "layout=files"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, timeout=600)
    if done.returncode:
        raise RuntimeError(f"prepare.shapes ended with {done.returncode}. It printed: {done.stderr.strip()}")
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".png", ".jpg"))
    return torch.from_numpy(np.stack([np.asarray(Image.open(path).convert("RGB")) for path in files])).permute(
        0, 3, 1, 2
    )


def errors(moments: Tensor, scale: float) -> dict[str, float]:
    """Return what rounding (N, 2C, h, w) float32 moments to float16 does.

    posterior_std          median of the posterior's standard deviation, unscaled
    mean_error_of_std      of the mean, over the posterior's standard deviation at the same place; greatest: _max
    std_error              of that standard deviation, relative; greatest: _max
    latent_error(_max)     see `latent_errors`
    """
    mean, logvar = moments.double().chunk(2, dim=1)
    near_mean, near_logvar = moments.half().double().chunk(2, dim=1)
    std = torch.exp(0.5 * logvar.clamp(-30.0, 20.0))
    of_mean, of_std = (
        (near_mean - mean).abs() / std,
        (torch.exp(0.5 * near_logvar.clamp(-30.0, 20.0)) / std - 1.0).abs(),
    )
    found = {"posterior_std": std.median(), "mean_error_of_std": of_mean.mean(), "mean_error_of_std_max": of_mean.max()}
    found |= {"std_error": of_std.mean(), "std_error_max": of_std.max()}
    return {key: float(value) for key, value in found.items()} | latent_errors(mean, scale)


def latent_errors(means: Tensor, scale: float) -> dict[str, float]:
    """Return the error of scaled latents, unit variance, where the mean was stored in float16.

    Beside it that of a latent that is rounded itself, as the MLPerf reference does (`reference_...`).
    """
    latents = means.double() * scale
    stored = (means.half().double() * scale - latents).abs()
    cast = (latents.half().double() - latents).abs()
    unit = latents.std()
    named = {"latent_error": stored, "reference_latent_error": cast}
    found = {key: float(value.mean() / unit) for key, value in named.items()}
    return found | {f"{key}_max": float(value.max() / unit) for key, value in named.items()}
