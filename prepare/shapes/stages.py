"""Losses and metrics of the miniature's three encoders, in the order of their training: the reader, the CLIP pair, the VAE.

    encoder  learns                                          metric, on images of held-out scenes
    reader   attributes and damage of images                 fraction of each attribute classified right
    clip     which images and captions match                 how often the right caption beats one with a changed attribute
    vae      images <-> latents, with the reader's layers    what a reconstruction keeps of the CLIP score, of the reader's
             in its loss                                     attributes, and of the right captions

Every batch depends only on (seed, encoder, step). So there is no data set, and a stopped training resumes as if it had never
been stopped. The pair is not part of the VAE's loss, so one of the VAE's two metrics is independent of its training.

Shapes: B batch, H = W = 32 px, E = 64 features of the pair.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prepare.shapes.pictures import draw_jitter, render
from zoo.shapes.networks import SIDE_PX, Reader, build_clip, build_vae, tokenize
from zoo.shapes.scenes import ATTRIBUTES, Scene, changed, draw_scene, random_scene

HELD_OUT_PARTS = ("prompts", "reference")
HELD_OUT_SEED = 20260101  # any fixed number: all trainings are measured on the same images
PERCEPTUAL_WEIGHT = 0.3
KL_WEIGHT = 1e-3
MAX_NOISE = 0.4  # standard deviation; images have a range of 2


class Stage(Protocol):
    """The training of one encoder."""

    name: str
    network: nn.Module
    learning_rate: float

    def loss(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, and its parts for the log."""
        ...

    def measure(self, network: nn.Module) -> dict[str, Any]:
        """Return metrics of the network (or its EMA weights); `score` decides which state is the best."""
        ...


# --- pictures ---


def step_seed(seed: int, stage: str, step: int) -> int:
    """Return the seed of one step, derived from a text, so that neighbouring steps are independent."""
    return random.Random(f"encoders {seed} {stage} {step}").getrandbits(32)


def training_scenes(num: int, seed: int) -> list[Scene]:
    """Draw scenes of the training part, as many with one object as with two."""
    return [draw_scene(number, seed) for number in range(num)]


def pictures_of(scenes: Sequence[Scene], seed: int) -> Tensor:  # -> (B, 3, 32, 32) in [-1, 1]
    """Draw an image of every scene; `seed` decides the objects' deviations."""
    pixels = np.stack([np.asarray(render(scene, SIDE_PX, draw_jitter(i, seed))) for i, scene in enumerate(scenes)])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1.0


def damaged(images: Tensor, generator: torch.Generator, most: float = 1.0) -> tuple[Tensor, Tensor]:
    """Blur some images and add noise to some; a third is not blurred, and a third gets no noise.

    Args:
        most: the largest amount, in (0, 1].

    Returns:
        The images, (B, 3, H, W), and each one's amount of blur and noise, (B, 2) in [0, 1].
    """
    amounts = (most * (1.5 * torch.rand(len(images), 2, generator=generator) - 0.5)).clamp(min=0.0)
    blur, noise = amounts[:, 0, None, None, None], amounts[:, 1, None, None, None]
    coarse = F.interpolate(F.avg_pool2d(images, 4), scale_factor=4, mode="bilinear", align_corners=False)
    grain = torch.randn(images.shape, generator=generator)
    return torch.lerp(images, coarse, blur.expand_as(images)) + MAX_NOISE * noise * grain, amounts


@dataclass(frozen=True)
class HeldOut:
    """Images of held-out scenes, with one changed caption per attribute."""

    scenes: Sequence[Scene]
    images: Tensor
    """(N, 3, 32, 32) in [-1, 1]."""
    changed: Mapping[str, Sequence[tuple[int, Scene]]]
    """Attribute -> number of the image, and its scene with another value of that attribute."""


def held_out(num: int) -> HeldOut:
    """Draw held-out images; the same for the same number."""
    scenes = [draw_scene(i, HELD_OUT_SEED, HELD_OUT_PARTS[i // 2 % 2]) for i in range(num)]
    choose = random.Random(HELD_OUT_SEED)
    wrong = {
        name: [(i, changed(scene, choose, name)) for i, scene in enumerate(scenes) if getattr(scene, name) is not None]
        for name in ATTRIBUTES
    }
    return HeldOut(scenes, pictures_of(scenes, HELD_OUT_SEED), wrong)


def answers_of(scenes: Sequence[Scene]) -> dict[str, Tensor]:
    """Return attribute -> index of every scene's value, (B,); -100: the scene does not have it."""
    rows = [scene.answers for scene in scenes]
    return {name: torch.tensor([row[name] for row in rows]) for name in ATTRIBUTES}


# --- metrics ---


@torch.no_grad()
def share_read_right(reader: nn.Module, images: Tensor, scenes: Sequence[Scene]) -> dict[str, float]:
    """Return, for every attribute, the fraction of images with it for which the reader is right."""
    logits, right = reader(images), answers_of(scenes)
    hits = {name: (logits[name].argmax(dim=1) == answers)[answers >= 0] for name, answers in right.items()}
    return {name: hit.float().mean().item() for name, hit in hits.items()}


@torch.no_grad()
def image_features(clip: nn.Module, images: Tensor) -> Tensor:  # (B, 3, 32, 32) in [-1, 1] -> (B, E)
    """Return the pair's features of images, of length 1."""
    return F.normalize(clip.visual_projection(clip.vision_model(pixel_values=images).pooler_output), dim=-1)


def _text_features(clip: nn.Module, scenes: Sequence[Scene]) -> Tensor:
    tokens = tokenize([scene.caption for scene in scenes])
    return F.normalize(clip.text_projection(clip.text_model(input_ids=tokens).pooler_output), dim=-1)


class CaptionJudge:
    """Measures with a CLIP pair how well images fit their captions; the captions' features are cached."""

    @torch.no_grad()
    def __init__(self, clip: nn.Module, those: HeldOut):
        self.clip = clip
        self.right = _text_features(clip, those.scenes)
        self.wrong = {
            name: (torch.tensor([i for i, _ in rows]), _text_features(clip, [scene for _, scene in rows]))
            for name, rows in those.changed.items()
        }

    def score(self, images: Tensor) -> float:
        """Return the mean cosine between images and captions."""
        return (image_features(self.clip, images) * self.right).sum(dim=1).mean().item()

    def score_one_off(self, images: Tensor) -> float:
        """Return the mean cosine between images and captions with one changed attribute, over all of these."""
        features = image_features(self.clip, images)
        return torch.cat([(features[rows] * wrong).sum(dim=1) for rows, wrong in self.wrong.values()]).mean().item()

    def share_told_right(self, images: Tensor) -> dict[str, float]:
        """Return, for every attribute, how often the right caption is nearer than one with another value."""
        features, found = image_features(self.clip, images), {}
        for name, (rows, wrong) in self.wrong.items():
            nearer = (features[rows] * self.right[rows]).sum(dim=1) > (features[rows] * wrong).sum(dim=1)
            found[name] = nearer.float().mean().item()
        return found


def mean_of(shares: Mapping[str, float]) -> float:
    """Return the mean over the attributes."""
    return sum(shares.values()) / len(shares)


# --- the encoders ---


class ReaderStage:
    """Cross-entropy of attributes and squared error of damage, on images of which one in nine is clean."""

    name = "reader"
    learning_rate = 2e-3
    batch_size = 64

    def __init__(self, seed: int, those: HeldOut):
        self.seed, self.those = seed, those
        self.network = Reader()

    def loss(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        seed = step_seed(self.seed, self.name, step)
        scenes = training_scenes(self.batch_size, seed)
        images, amounts = damaged(pictures_of(scenes, seed), torch.Generator().manual_seed(seed))
        said, right = self.network(images), answers_of(scenes)
        of_attributes = sum(F.cross_entropy(said[name], answers) for name, answers in right.items())
        of_damage = F.mse_loss(said["damage"], amounts)
        return of_attributes + 5.0 * of_damage, {"attributes": of_attributes, "damage": of_damage}

    def measure(self, network: nn.Module) -> dict[str, Any]:
        shares = share_read_right(network, self.those.images, self.those.scenes)
        with torch.no_grad():
            covariance = torch.cov(network.features(self.those.images).double().T)
        values = torch.linalg.eigvalsh(covariance)
        spread = {"feature_variance": values.sum().item(), "least_to_greatest": (values[0] / values[-1]).item()}
        return {"score": mean_of(shares), "read_right": shares, **spread}


class ClipStage:
    """The symmetric contrastive loss (Radford et al. 2021, arXiv:2103.00020), on pairs of scenes with one difference.

    Without such pairs, a batch rarely has two captions that differ in one word, so the loss would not need every word.
    """

    name = "clip"
    learning_rate = 1e-3
    batch_size = 128

    def __init__(self, seed: int, those: HeldOut):
        self.seed, self.those = seed, those
        self.network = build_clip()

    def loss(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        seed = step_seed(self.seed, self.name, step)
        scenes = neighbours(self.batch_size, seed)
        images, _ = damaged(pictures_of(scenes, seed), torch.Generator().manual_seed(seed), most=0.5)
        tokens = tokenize([scene.caption for scene in scenes])
        with torch.no_grad():
            self.network.logit_scale.clamp_(max=math.log(100.0))  # as in the paper
        logits = self.network(input_ids=tokens, pixel_values=images).logits_per_image
        pairs = torch.arange(len(scenes))
        loss = (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2
        return loss, {"contrastive": loss, "temperature": self.network.logit_scale.exp()}

    def measure(self, network: nn.Module) -> dict[str, Any]:
        judge = CaptionJudge(network, self.those)
        shares = judge.share_told_right(self.those.images)
        cosines = {
            "cosine": judge.score(self.those.images),
            "cosine_one_attribute_off": judge.score_one_off(self.those.images),
            "cosine_of_others": judge.score(self.those.images.roll(len(self.those.scenes) // 2, dims=0)),
        }
        return {"score": mean_of(shares), "told_right": shares, **cosines}


def neighbours(num: int, seed: int) -> list[Scene]:
    """Draw different scenes of the training part in pairs that differ in one attribute."""
    choose = random.Random(f"neighbours {seed}")
    found: dict[str, Scene] = {}
    while len(found) < num:
        one = random_scene(choose, num_objects=1 + len(found) // 2 % 2)
        other = changed(one, choose)
        if one.part == other.part == "training" and not {one.caption, other.caption} & found.keys():
            found |= {one.caption: one, other.caption: other}
    return list(found.values())


def perceptual_distance(reader: nn.Module, given: Tensor, wanted: Tensor) -> Tensor:  # (B, 3, 32, 32) each -> ()
    """Return the distance of images in the reader's layers, as in LPIPS (Zhang et al. 2018, arXiv:1801.03924)."""
    with torch.no_grad():
        right = reader.layers(wanted)
    pairs = list(zip(reader.layers(given), right, strict=True))
    return sum((F.normalize(a) - F.normalize(b)).square().sum(dim=1).mean() for a, b in pairs) / len(pairs)


class VaeStage:
    """Absolute error, `perceptual_distance`, and a small KL."""

    name = "vae"
    learning_rate = 1e-3
    batch_size = 32

    def __init__(self, seed: int, those: HeldOut, reader: nn.Module, clip: nn.Module):
        self.seed, self.those = seed, those
        self.network = build_vae()
        self.reader = reader.eval().requires_grad_(False)
        self.judge = CaptionJudge(clip, those)
        self.originals = {
            "read_right": share_read_right(reader, those.images, those.scenes),
            "told_right": self.judge.share_told_right(those.images),
            "cosine": self.judge.score(those.images),
        }

    def loss(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        seed = step_seed(self.seed, self.name, step)
        images = pictures_of(training_scenes(self.batch_size, seed), seed)
        posterior = self.network.encode(images).latent_dist
        latents = posterior.sample(torch.Generator().manual_seed(seed))
        decoded = self.network.decode(latents).sample
        absolute, kl = F.l1_loss(decoded, images), posterior.kl().mean() / latents[0].numel()
        perceptual = perceptual_distance(self.reader, decoded, images)
        loss = absolute + PERCEPTUAL_WEIGHT * perceptual + KL_WEIGHT * kl
        return loss, {"absolute": absolute, "perceptual": perceptual, "kl": kl}

    @torch.no_grad()
    def measure(self, network: nn.Module) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(HELD_OUT_SEED)
        latents, decoded = [], []
        for images in self.those.images.split(64):
            latents.append(network.encode(images).latent_dist.sample(generator))
            decoded.append(network.decode(latents[-1]).sample.clamp(-1.0, 1.0))
        rebuilt, values = torch.cat(decoded), torch.cat(latents).transpose(0, 1).flatten(1)
        read = share_read_right(self.reader, rebuilt, self.those.scenes)
        told, cosine = self.judge.share_told_right(rebuilt), self.judge.score(rebuilt)
        error = rebuilt - self.those.images
        kept = {
            "read_right": {name: share / self.originals["read_right"][name] for name, share in read.items()},
            "told_right": {name: share / self.originals["told_right"][name] for name, share in told.items()},
            "cosine": cosine / self.originals["cosine"],
        }
        return {
            "score": min(mean_of(kept["read_right"]), kept["cosine"]) - error.abs().mean().item(),
            "kept": kept,
            "read_right": read,
            "cosine": cosine,
            "error_levels": 127.5 * error.abs().mean().item(),
            "psnr_db": 10 * float(np.log10(4.0 / error.square().mean().item())),
            "latent_std": values.std().item(),
            "latent_mean_of_channels": values.mean(dim=1).tolist(),
            "latent_std_of_channels": values.std(dim=1).tolist(),
        }
