"""Loss and metrics of the moving miniature's video VAE, trained after the three encoders of stages.py.

A film comes as a reader of files sees it: drawn, written as an MP4 and decoded, so that its colours have half the resolution.

Shapes: B batch, F = 9 frames, H = W = 32 px.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evaluation.motion import motion_in
from prepare.shapes.films import Films
from prepare.shapes.stages import HELD_OUT_SEED, KL_WEIGHT, PERCEPTUAL_WEIGHT, perceptual_distance, step_seed
from stages.videos import read_frames
from zoo.shapes.motion import FRAMES_PER_SEC, NUM_FRAMES
from zoo.shapes.networks import SIDE_PX, build_video_vae
from zoo.shapes.scenes import ATTRIBUTES

READ = ("size", "colour", "shape", "background")
"""Attributes of a scene that the reader is asked for; it knows the places of still objects alone."""


def films_of(films: Films, numbers: Sequence[int]) -> Tensor:  # -> (B, 3, F, 32, 32) in [-1, 1]
    """Draw films, write and decode each."""
    times_sec = [number / FRAMES_PER_SEC for number in range(NUM_FRAMES)]
    decoded = [torch.stack(read_frames(films.file(n), times_sec, lambda frame: frame), dim=1) for n in numbers]
    return torch.stack(decoded).float() / 127.5 - 1.0


class VideoVaeStage:
    """Absolute error, `perceptual_distance` of some frames, and a small KL."""

    name = "video_vae"
    learning_rate = 1e-3
    batch_size = 8

    def __init__(self, seed: int, num_measured: int, reader: nn.Module):
        self.seed = seed
        self.network = build_video_vae()
        self.reader = reader.eval().requires_grad_(False)
        self.held_out = Films(num_measured, SIDE_PX, HELD_OUT_SEED, "reference", "one", "own")
        self.films = films_of(self.held_out, range(num_measured))

    def loss(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        seed = step_seed(self.seed, self.name, step)
        films = films_of(Films(self.batch_size, SIDE_PX, seed, "training", "one", "own"), range(self.batch_size))
        posterior = self.network.encode(films).latent_dist
        latents = posterior.sample(torch.Generator().manual_seed(seed))
        decoded = self.network.decode(latents).sample
        places = [0, 1 + seed % 4, 5 + seed % 4]  # a frame of each latent's
        given, wanted = (video[:, :, places].transpose(1, 2).flatten(0, 1) for video in (decoded, films))
        absolute, kl = F.l1_loss(decoded, films), posterior.kl().mean() / latents[0].numel()
        perceptual = perceptual_distance(self.reader, given, wanted)
        loss = absolute + PERCEPTUAL_WEIGHT * perceptual + KL_WEIGHT * kl
        return loss, {"absolute": absolute, "perceptual": perceptual, "kl": kl}

    @torch.no_grad()
    def measure(self, network: nn.Module) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(HELD_OUT_SEED)
        latents, rebuilt = [], []
        for films in self.films.split(64):
            latents.append(network.encode(films).latent_dist.sample(generator))
            rebuilt.append(network.decode(latents[-1]).sample.clamp(-1.0, 1.0))
        decoded, values = torch.cat(rebuilt), torch.cat(latents).transpose(0, 1).flatten(1)
        read = {"films": self._read_right(self.films), "rebuilt": self._read_right(decoded)}
        error = decoded - self.films
        return {
            "score": sum(read["rebuilt"].values()) / len(read["rebuilt"]) - error.abs().mean().item(),
            "read_right": read,
            "error_levels": 127.5 * error.abs().mean().item(),
            "psnr_db": 10 * float(torch.log10(4.0 / error.square().mean())),
            "latent_mean_of_channels": values.mean(dim=1).tolist(),
            "latent_std_of_channels": values.std(dim=1).tolist(),
        }

    def _read_right(self, films: Tensor) -> dict[str, float]:
        """Return the fractions of films read right: attributes in the middle frame, motion by arithmetic."""
        scenes = [self.held_out.scene(number) for number in range(len(films))]
        logits = self.reader(films[:, :, NUM_FRAMES // 2])
        found = {}
        for name in READ:
            answers = torch.tensor([ATTRIBUTES[name].index(getattr(scene, name)) for scene in scenes])
            found[name] = (logits[name].argmax(dim=1) == answers).float().mean().item()
        motions = [motion_in(film) for film in ((films + 1) * 127.5).round().to(torch.uint8)]
        for name in ("direction", "place"):
            right = [getattr(seen, name) == getattr(scene, name) for seen, scene in zip(motions, scenes, strict=True)]
            found[name] = sum(right) / len(right)
        return found
