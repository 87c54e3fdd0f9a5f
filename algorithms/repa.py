"""Representation alignment: states inside the denoiser learn what a frozen image encoder says of the clean image.

    algorithms=["algorithms.repa:Repa(encoder='facebook/dinov2-base', depth=8)"]

With the features y_n (E) of the image's patches, the states h_n (D) of its tokens after `depth` blocks, and a projection p
that is trained with the network:

    loss = diffusion loss - weight mean_n cos(y_n, p(h_n))

Yu et al. 2024, arXiv:2410.06940, equation 8, weight 0.5; p has three layers with SiLU between them. `spatial` is iREPA
(Singh et al. 2025, arXiv:2512.10794): p is a 3 x 3 convolution, and y_n becomes (y_n - 0.6 mean) / std over the patches.

The image is resized so that the encoder has a patch for each token. Batches of moments have no image: the VAE decodes the
mean of the posterior, which takes longer than a step where the VAE is large; data.stage=images has the images themselves.

The projection has its own AdamW with the run's learning rate, outside the norm that gradients are clipped by. It is saved in
checkpoints and in no export. FLOPs, MFU and the memory plan leave out encoder and projection. The training loss of logs and
records includes the term; validation does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from composer import Algorithm, Event, Logger, State
from torch import Tensor, nn

from common import dist
from common.errors import ConfigError
from families.block_inputs import change_inputs
from families.spec import Family, transformer_blocks
from model import normalize_images
from weights.hub import summarize_error
from weights.image_features import ImageFeatures
from weights.tensors import build_on_meta, fingerprint

WIDTH = 2048  # of the projection's inner layers
MEAN_FRACTION, EPS = 0.6, 1e-6  # iREPA's


class Repa(Algorithm):
    """Subtract the cosine between projected states and an encoder's features, times `weight`, from the loss.

    Args:
        encoder: a folder of transformers, or its name on the hub: DINOv2, DINOv3, CLIP, SigLIP.
        depth: number of blocks before the states.
        weight: of the term.
        spatial: as iREPA has it.
        until_images: the term is left out after so many; None: never.

    Raises:
        ValueError: an argument is outside.
        ConfigError: the encoder cannot be loaded, or is another one than before; only a part of the tokens is there.
    """

    def __init__(
        self, encoder: str, depth: int = 8, weight: float = 0.5, spatial: bool = False, until_images: int | None = None
    ):
        is_limit = until_images is None or (type(until_images) is int and until_images >= 1)
        for key, value, fits, possible in (
            ("encoder", encoder, isinstance(encoder, str), "a folder or a name on the hub"),
            ("depth", depth, type(depth) is int and depth >= 1, "an integer from 1"),
            ("weight", weight, type(weight) in (int, float) and 0.0 < weight < math.inf, "a number above 0"),
            ("spatial", spatial, type(spatial) is bool, "true, false"),
            ("until_images", until_images, is_limit, "null, or an integer from 1"),
        ):
            if not fits:
                raise ValueError(f"{key} is {value!r}. Possible: {possible}")
        self.name, self.depth, self.weight = encoder, depth, weight
        self.is_spatial, self.until_images = spatial, until_images
        self.encoder: ImageFeatures
        self.projection: nn.Module | None = None
        self._optimizer: torch.optim.AdamW | None = None
        self._states: Tensor | None = None  # (B, N, D) of this microbatch's tokens
        self._saved: Mapping[str, Any] = {}

    def problem(self, family: Family, keys: Mapping[str, Any]) -> str | None:
        """Say why a run cannot use it, or None. `keys`: of a resolved run."""
        num = len(transformer_blocks(build_on_meta(family.build_denoiser)))
        if family.num_frames is not None or not num:
            what = "makes videos" if num else "has no list of transformer blocks"
            return f"repa: {family.name} ({family.variant}) {what}. Leave it out."
        if self.depth >= num:
            return f"repa: depth={self.depth}, but there are {num} blocks. Possible: 1 to {num - 1}."
        if keys["compile"] == "whole":
            return "repa: compile=whole makes one graph, and states are read between blocks. Set compile=blocks."
        if keys["data.stage"] == "moments" and keys["data.text"] == "stored":
            return "repa: moments with stored text are trained on without a VAE, and it needs images. Set data.stage=images."
        try:
            ImageFeatures.read_config(self.name)
        except (OSError, ValueError) as error:
            text = f"repa: no encoder {self.name} ({summarize_error(error)})"
            return f"{text}. Give a folder of transformers, or its name on the hub."
        return None

    def match(self, event: Event, state: State) -> bool:
        return event in (Event.FIT_START, Event.AFTER_LOSS, Event.AFTER_TRAIN_BATCH)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        model: Any = getattr(state.model, "module", state.model)  # without DDP
        if event == Event.FIT_START:
            try:
                self.encoder = ImageFeatures(self.name).to(model.device)
            except Exception as error:  # transformers raises errors of many types
                text = f"algorithms: repa: {self.name} cannot be loaded ({summarize_error(error)})"
                raise ConfigError([f"{text}. Copy the folder again, or give another encoder."]) from error
            self._fingerprint = fingerprint(self.encoder)
            if self._saved and self._saved["encoder"] != self._fingerprint:
                text = f"algorithms: repa: {self.name} is not the encoder that the checkpoint was trained with"
                raise ConfigError([f"{text}. Give that one."])
            change_inputs(transformer_blocks(model.denoiser)[self.depth], self._read, first=True)
        elif self.until_images is not None and state.timestamp.sample.value >= self.until_images:
            self._states = None
        elif event == Event.AFTER_LOSS:
            assert self._states is not None and isinstance(state.loss, Tensor)
            if self.projection is None:
                self._build(self._states.shape[-1], state.rank_zero_seed, model.device)
            images = images_of(model, state.batch)
            side = model.family.side_multiple or model.family.pixels_per_latent  # of a token, px
            state.loss = state.loss - self.weight * self.alignment(self._states, images, side)
            self._states = None
        else:
            self._step(state.optimizers[0].param_groups[0]["lr"])

    def alignment(self, states: Tensor, images: Tensor, side: int) -> Tensor:
        """Return the mean cosine of the batch, a scalar, of states (B, N, D) and images (B, 3, H, W) in [0, 1].

        Args:
            side: of the square of an image that is a token, px.
        """
        rows, columns = (length // side for length in images.shape[-2:])
        if rows * columns != states.shape[1]:
            text = f"algorithms: repa: {states.shape[1]} of {rows * columns} tokens enter block {self.depth}"
            raise ConfigError([f"{text}. With token routing, give a depth up to where the route starts."])
        assert self.projection is not None
        with torch.autocast(states.device.type, enabled=False):
            features = self.encoder(images, rows, columns)  # (B, N, E)
            states = states.float()
            if self.is_spatial:
                features = features - MEAN_FRACTION * features.mean(1, keepdim=True)
                features = features / (features.std(1, keepdim=True) + EPS)
                grid = states.transpose(1, 2).unflatten(2, (rows, columns))  # (B, D, rows, columns)
                projected = self.projection(grid).flatten(2).transpose(1, 2)
            else:
                projected = self.projection(states)
            return F.cosine_similarity(features, projected, dim=-1).mean()

    def _read(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self._states = arguments["hidden_states"]
        return arguments

    def _build(self, width: int, seed: int, device: torch.device) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.is_spatial:
                self.projection = nn.Conv2d(width, self.encoder.width, 3, padding=1)
            else:
                layers = [nn.Linear(width, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU()]
                self.projection = nn.Sequential(*layers, nn.Linear(WIDTH, self.encoder.width))
        self.projection.to(device)
        self._optimizer = torch.optim.AdamW(self.projection.parameters(), weight_decay=0.0)
        if self._saved:
            self.projection.load_state_dict(self._saved["projection"])
            self._optimizer.load_state_dict(self._saved["optimizer"])

    def _step(self, lr: float) -> None:
        """Update the projection by the mean of all ranks' gradients."""
        assert self.projection is not None and self._optimizer is not None
        for parameter in self.projection.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        if self.projection is None or self._optimizer is None:
            return dict(self._saved)
        states = {"projection": dict(self.projection.state_dict()), "optimizer": self._optimizer.state_dict()}
        return {"encoder": self._fingerprint, **states}

    def load_state_dict(self, state: dict[str, Any], strict: bool = False) -> None:
        self._saved = state


def images_of(model: Any, batch: Any) -> Tensor:  # -> (B, 3, H, W) in [0, 1]
    """Return a batch's images, or what the VAE makes of their moments."""
    if (images := batch.get("images")) is not None:
        return normalize_images(images, "unit")
    with torch.no_grad():
        moments = batch["moments"].float()
        latents = model.family.sample_latents(moments, torch.zeros_like(batch["posterior_noise"]))
        return model.decode_latents(latents)
