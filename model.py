"""One ComposerModel for every family. Training: encode -> corrupt -> denoise -> loss; sampling: generate.

A training step, for a batch whose random numbers `BatchRandomness` has drawn:

    images (B, 3, H, W) --normalize, VAE--------> moments (B, 2C, h, w)      dataset `images` only; `videos` (B, 3, F, H, W)
    moments + posterior noise ------------------> latents x_0 (B, C, h, w)   scaled once
    tokens (B, L), some replaced by the empty caption's --text encoder--> condition; or stored, float16 (B, L, D)
    further columns of the family ---------------> condition, as they are
    x_0, noise, times --------------------------> x_t --denoiser--> prediction, against the objective's target

Generating images:

    tokens (B, L), and the empty caption's ----------text encoder--> condition, unconditional rows first
    noise (B, C, h, w) --sampler, denoiser------> latents x_0 --VAE--> images (B, 3, H, W) float32 in [0, 1]

Shapes: B batch, C latent channels, H W image height and width, h w latent height and width, L text tokens.

The denoiser is the only registered module. The frozen encoders are held outside the module tree: they are in no state dict
and no optimizer, DDP does not broadcast them, and `model.train()` does not reach them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from composer import Callback, Logger, State
from composer.models import ComposerModel
from torch import Tensor, nn

from common import dist
from common.value_types import ImageSize
from families import load_family
from families.encoders import FrozenEncoders, ModelConfig, build_encoders
from families.objectives import Objective, ObjectiveConfig, mean_squared_errors
from families.sampling import sample
from families.spec import Family
from weights.drawing import DrawnInThreads
from weights.tensors import build_on_meta

# Latent positions (B h w) that the VAE decodes in one call: 16 images of SD2 at 512 px. A tensor of its last block takes
# 128 MiB per image (256 x 512 x 512 in two bytes), a latent only 64 KiB. More would let decoding limit the sampler's batch.
DECODE_POSITIONS = 16 * 64 * 64
AUTOCAST_DTYPES = {"fp16": torch.float16, **dict.fromkeys(("bf16", "bf16_params"), torch.bfloat16)}


def normalize_images(images: Tensor, normalize: str) -> Tensor:
    """# (B, 3, H, W) uint8, or float32 / 255 -> float32 in [-1, 1] ("symmetric", as SD's VAE was trained) or [0, 1] ("unit").

    The MLPerf reference feeds its VAE "unit" (its issue 721). Use that only to compare with it; otherwise it is wrong.
    """
    unit = images if images.is_floating_point() else images.float() / 255.0
    return unit if normalize == "unit" else unit * 2.0 - 1.0


class LatentDiffusion(ComposerModel):
    """A family's denoiser with its frozen encoders and objective.

    Args:
        family: see `families.spec.Family`.
        objective: the forward process with its target and loss weights.
        denoiser: the trained network.
        encoders: the frozen networks.
        size: (width, height) of the images, px.
        normalize: "symmetric" or "unit", see `normalize_images`.
        posterior: "sample" or "mean": the latent is drawn from the VAE's posterior, or is its mean.
        caption_dropout: fraction of captions replaced by the empty one in training.
        frozen_device: where the encoders are: "device", the model's, or "cpu".
        empty_states: the empty caption's text states, (1, L, D) or (1, P); None: they are encoded when they are needed.
    """

    def __init__(
        self,
        family: Family,
        objective: Objective,
        denoiser: nn.Module,
        encoders: FrozenEncoders,
        *,
        size: ImageSize,
        normalize: str,
        posterior: str = "sample",
        caption_dropout: float,
        frozen_device: str = "device",
        empty_states: Mapping[str, Tensor] | None = None,
    ):
        super().__init__()
        self.family = family
        self.objective = objective
        self.denoiser = denoiser
        self.encoders = encoders
        self.latent_shape = family.latent_shape(size)
        self.normalize = normalize
        self.posterior = posterior
        self.caption_dropout = caption_dropout
        self.frozen_device = frozen_device
        self.empty_text = family.tokenize([""])  # column -> (1, L)
        self.empty_states = empty_states
        self.passthrough_columns = tuple(family.passthrough_values(size))  # that go to the network as they are
        self.image_columns = tuple(family.image_columns(size))  # that encoders make of the images
        self.device = torch.device("cpu")
        # Memory format of images and latents at a network's input: see training/speed.py.
        self.memory_format = torch.contiguous_format
        self.adapter: Any = None  # LoRA in the denoiser: see families/lora.py
        self.replays_graphs = False  # the denoiser runs as CUDA graphs: see training/speed.py
        self.in_step = False  # all ranks have to call the denoiser equally often: see training/sharding.py
        self.on_losses: Callable[[Tensor, Mapping[str, Tensor]], None] | None = None  # gets each sample's loss, (B,)
        self.autocast_dtype: torch.dtype | None = None  # None: no autocast
        self._empty_condition: dict[str, Tensor] | None = None

    @property
    def frozen(self) -> Mapping[str, nn.Module]:
        """The frozen networks by name."""
        return self.encoders.modules

    def to_device(self, device: torch.device, precision: str) -> LatentDiffusion:
        """Move everything to the device.

        Encoders are cast to the compute precision; the denoiser stays float32, except with bf16_params.
        With frozen_device="cpu" the encoders stay on the CPU, and their outputs are moved.

        Composer opens autocast on a GPU and refuses it on a CPU, so on a CPU the model opens its own.
        """
        cast_weights(self.denoiser, precision)
        self.denoiser.to(device)
        return self.move_frozen_to_device(device, precision)

    def move_frozen_to_device(self, device: torch.device, precision: str) -> LatentDiffusion:
        """Move all but the denoiser, which is there already, in parts."""
        dtype = AUTOCAST_DTYPES.get(precision, torch.float32)
        self.encoders.to(torch.device("cpu") if self.frozen_device == "cpu" else device, dtype)
        return self.set_compute_device(device, precision)

    def set_compute_device(self, device: torch.device, precision: str) -> LatentDiffusion:
        """Move everything that is not a module to the device; the modules are there already."""
        self.device = device
        self.objective.to(device)
        self.empty_text = {name: tokens.to(device) for name, tokens in self.empty_text.items()}
        self.autocast_dtype = AUTOCAST_DTYPES.get(precision)
        self._empty_condition = None
        return self

    # --- one step ---

    def latent_shape_of(self, batch: Mapping[str, Tensor]) -> tuple[int, ...]:
        """Return the shape of a batch's latents, (C, h, w): with buckets, each batch has its own."""
        if "moments" in batch:
            channels, *sides = batch["moments"].shape[1:]
            return (channels // 2 if self.family.has_posterior else channels, *sides)
        if (images := batch.get(self.family.media)) is not None:
            *frames, height, width = images.shape[2:]
            return self.family.latent_shape((width, height, *frames))
        return self.latent_shape

    def draw(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Return the batch with all random numbers of its step: posterior, noise, times and caption dropout.

        They are drawn for the whole device batch before it is split, so they do not depend on the microbatch size.

        Args:
            batch: columns of the dataset, B first.
            generator: on the model's device; the only source of randomness of a step.
        """
        num, latent = len(next(iter(batch.values()))), self.latent_shape_of(batch)

        def normal() -> Tensor:
            return torch.randn(num, *latent, generator=generator, device=generator.device)

        draws = {
            "posterior_noise": normal(),
            "noise": normal(),
            "times": self.objective.draw_times(num, generator),
            "caption_dropped": torch.rand(num, generator=generator, device=generator.device) < self.caption_dropout,
        }
        if self.objective.offset_noise:  # the last draw: without it the others are the same
            shape = (num, latent[0], *[1] * (len(latent) - 1))
            offset = torch.randn(shape, generator=generator, device=generator.device)
            draws["noise"] = draws["noise"] + self.objective.offset_noise * offset
        return {**batch, **draws}

    @torch.no_grad()
    def empty_condition(self) -> dict[str, Tensor]:
        """Return the condition of the empty caption, (1, L, D); it was given, or is encoded once."""
        if self._empty_condition is None and self.empty_states is not None:
            dtype = self.autocast_dtype or torch.float32
            self._empty_condition = {n: s.to(self.device, dtype) for n, s in self.empty_states.items()}
        elif self._empty_condition is None:
            states = self._encode_text(self.empty_text)
            is_zero = self.family.has_zero_empty_condition
            self._empty_condition = {n: torch.zeros_like(s) if is_zero else s for n, s in states.items()}
        return self._empty_condition

    @torch.no_grad()
    def encode(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Run each frozen encoder once; return the latents, (B, C, h, w) float32, and the condition."""
        columns = batch if "moments" in batch else self.encode_images(batch[self.family.media])
        noise = batch["posterior_noise"]
        noise = torch.zeros_like(noise) if self.posterior == "mean" else noise
        latents = self.family.sample_latents(columns["moments"].float(), noise)
        condition = self._text_of(batch) | {name: columns[name].float() for name in self.image_columns}
        return latents, condition | {name: batch[name] for name in self.passthrough_columns}

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> dict[str, Tensor]:  # (B, 3, H, W) -> moments (B, 2C, h, w), ...
        """Run the encoders of images where they are; return the columns of the dataset `moments` that they make."""
        images = normalize_images(images.to(self.encoders.device), self.normalize)
        images = images.contiguous(memory_format=self.memory_format)
        with self._frozen_autocast():
            columns = {"moments": self.family.encode_images(self.encoders.modules, images)}
            columns |= self.family.encode_image_columns(self.encoders.modules, images)
        return {name: tensor.to(self.device) for name, tensor in columns.items()}

    def _encode_text(self, text: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the text encoders where they are, on the batch's text columns; return the states on the model's device."""
        at = self.encoders.device
        to_gpu = at.type == "cuda"  # towards the CPU nothing else would wait for the copy
        columns = {name: text[name].to(at, non_blocking=to_gpu) for name in self.empty_text}
        with self._frozen_autocast():
            states = self.family.encode_text(self.encoders.modules, columns)
        return {name: state.to(self.device) for name, state in states.items()}

    def _text_of(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the condition that captions give, of which some are dropped: (B, L, D)."""
        dropped, is_stored = batch["caption_dropped"], not self.empty_text.keys() <= batch.keys()
        if not (is_stored or self.family.has_zero_empty_condition):
            text = {name: torch.where(dropped[:, None], empty, batch[name]) for name, empty in self.empty_text.items()}
            return self._encode_text(text)
        states, condition = batch if is_stored else self._encode_text(batch), {}
        for name, empty in self.empty_condition().items():  # rounded to float16 where the stored states are
            where = dropped.reshape(-1, *[1] * (empty.ndim - 1))
            condition[name] = torch.where(where, empty.to(states[name].dtype), states[name]).to(empty.dtype)
        return condition

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return prediction and target, (B, C, h, w), and each sample's weight, (B,). A video's given frames are left out."""
        assert "noise" in batch, "the batch has no random numbers: BatchRandomness is not among the callbacks"
        latents, condition = self.encode(batch)
        noise, times = batch["noise"], batch["times"]
        noisy = self.objective.corrupt(latents, noise, times)
        with self._autocast("cpu"):
            prediction = self._denoise(noisy, times, condition)
        target = self.objective.target(latents, noise, times)
        if num_given := self.family.num_given_frames:
            prediction, target = prediction[:, :, num_given:], target[:, :, num_given:]
        return {"prediction": prediction, "target": target, "weight": self.objective.weight(times)}

    def _denoise(self, noisy: Tensor, times: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        """One call of the network, (B, C, h, w), (B,) -> (B, C, h, w), for training and sampling.

        Both use the same types and memory formats, because a compiled network compiles again for every new one.
        """
        noisy = noisy.contiguous(memory_format=self.memory_format)
        prediction = self.family.denoise(self.denoiser, noisy, times.contiguous(), condition)
        # Each replay overwrites the output of the one before, which a sampler may still use.
        return prediction.clone() if self.replays_graphs else prediction

    def errors(self, outputs: Mapping[str, Tensor]) -> Tensor:
        """Return each sample's mean squared error without its weight, (B,) float32."""
        return mean_squared_errors(outputs["prediction"].float(), outputs["target"].float())

    def loss(self, outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted mean of the samples' losses, a float32 scalar."""
        prediction, target = outputs["prediction"], outputs["target"]
        if prediction.shape != target.shape:  # torch would broadcast
            raise ValueError(
                f"model: the network returned {tuple(prediction.shape)}, its target is {tuple(target.shape)}."
            )
        of_samples = self.objective.losses(prediction.float(), target.float())
        if of_samples.shape != outputs["weight"].shape:
            wanted = f"{tuple(outputs['weight'].shape)}, one loss a sample"
            raise ValueError(f"objective.name: losses() returned {tuple(of_samples.shape)}. Return {wanted}.")
        losses = outputs["weight"] * of_samples  # (B,)
        if self.on_losses is not None:
            self.on_losses(losses.detach(), batch)
        return losses.mean()

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {}  # else Composer would compute and reduce training metrics in every batch

    def autocast(self) -> contextlib.AbstractContextManager:
        """On a GPU, the autocast that Composer opens around a step, for a step without Composer; nothing on a CPU."""
        return self._autocast("cuda")

    def _autocast(self, device_type: str) -> contextlib.AbstractContextManager:
        """The run's autocast if the model is on a device of this type, else nothing."""
        if self.autocast_dtype is None or self.device.type != device_type:
            return contextlib.nullcontext()
        return torch.autocast(device_type, dtype=self.autocast_dtype)

    def _frozen_autocast(self) -> contextlib.AbstractContextManager:
        """No autocast around encoders of which some stay float32: it would cast these too."""
        is_mixed = self.autocast_dtype is not None and self.encoders.has_mixed_dtypes(self.autocast_dtype)
        return torch.autocast(self.device.type, enabled=False) if is_mixed else contextlib.nullcontext()

    # --- generating ---

    @torch.no_grad()
    def generate(
        self,
        text: Mapping[str, Tensor],
        noise: Tensor,
        *,
        sampler: str,
        steps: int,
        guidance: float,
        image_condition: Mapping[str, Tensor] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Tensor:
        """Generate images from captions and noise, with the denoiser's current weights.

        Args:
            text: the batch's text columns, (B, L) each, as `Family.tokenize` returns them.
            noise: (B, C, h, w) standard normal; its h and w give the images' size.
            sampler, steps, progress: see `families.sampling.sample`.
            guidance: guidance scale; 1 is none, and takes half the time, unless the network has it as an input.
            image_condition: what the network receives of given images, see `encode_images`; (B, ...) each.

        Returns:
            (B, 3, H, W) float32 in [0, 1], on the model's device; of videos (B, 3, F, H, W).

        Raises:
            ValueError: an invalid sampler, number of steps or guidance.
        """
        # The same autocast as in training. On a GPU it includes the text encoder, since Composer opens it around the step.
        with eval_mode(self.denoiser), self._autocast("cuda"):
            condition, family = self._condition_of({**text, **(image_condition or {})}, noise, guidance), self.family
            with self._autocast("cpu"):
                latents = sample(
                    lambda noisy, times: self._denoise(noisy, times, condition),
                    noise.to(self.device, non_blocking=True),
                    sampler=sampler,
                    prediction=self.objective.prediction,
                    zero_terminal_snr=self.objective.zero_terminal_snr,
                    shift=family.sampling_shift(tuple(noise.shape[1:]), steps),
                    spacing=family.sampling_spacing,
                    last_time=family.scheduler_settings.get("shift_terminal"),
                    guide=family.guide,
                    steps=steps,
                    guidance=1.0 if family.has_guidance_input else guidance,
                    progress=progress,
                )
        with torch.autocast(self.device.type, enabled=False):
            parts = latents.split(max(1, DECODE_POSITIONS // latents[0, 0].numel()))
            return torch.cat([self.decode_latents(part) for part in parts])

    def decode_latents(self, latents: Tensor) -> Tensor:
        """Run the VAE's decoder on its device: (B, C, h, w) -> (B, 3, H, W) float32 in [0, 1], on the model's."""
        images = self.family.decode_latents(self.encoders.modules, latents.to(self.encoders.device))
        return ((images.to(self.device).float() + 1.0) / 2.0).clamp(0.0, 1.0)

    def _condition_of(self, text: Mapping[str, Tensor], noise: Tensor, guidance: float) -> dict[str, Tensor]:
        """Return what the network receives in addition to the latents, in generating; unconditional rows first, if any."""
        num, condition = len(noise), self._encode_text(text)
        if missing := ", ".join(name for name in self.image_columns if name not in text):
            raise ValueError(f"{self.family.name} starts a video from its first frame: {missing} is not given.")
        if self.family.has_guidance_input:
            condition["guidance"] = torch.full((num,), guidance, device=self.device)
        elif guidance != 1.0:
            empty = {name: self.empty_condition()[name].expand_as(states) for name, states in condition.items()}
            condition = {name: torch.cat([empty[name], states]) for name, states in condition.items()}
        scale, rows = self.family.pixels_per_latent, len(next(iter(condition.values())))
        passthrough = self.family.passthrough_values((noise.shape[-1] * scale, noise.shape[-2] * scale))
        condition |= {n: value.to(self.device).expand(rows, *value.shape[1:]) for n, value in passthrough.items()}
        return condition | {
            n: text[n].to(self.device).repeat(rows // num, *[1] * (text[n].ndim - 1)) for n in self.image_columns
        }


@contextlib.contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode; afterwards restore each submodule's mode, even after an error."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def build_model(
    config: ModelConfig,
    objective: ObjectiveConfig,
    *,
    size: ImageSize,
    normalize: str,
    posterior: str = "sample",
    seed: int,
    empty_states: Mapping[str, Tensor] | None = None,
    has_denoiser: bool = True,
) -> LatentDiffusion:
    """Build a model on the CPU. The denoiser's weights come from `seed`, random encoders from a separate fixed seed.

    Args:
        has_denoiser: False: the denoiser has names and shapes, and no memory (on meta).
        empty_states: of the empty caption, see LatentDiffusion. With them no encoder is built: for batches that need none.
    """
    family = load_family(config.family, config.preset, config.variant)
    built = empty_states is None
    encoders = build_encoders(family, config.weights, config.vae_precision) if built else FrozenEncoders({}, [])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if has_denoiser:
            with DrawnInThreads():
                denoiser = family.build_denoiser()
        else:
            denoiser = build_on_meta(family.build_denoiser)
    objective = objective.resolved(family.objective)
    assert objective.caption_dropout is not None
    return LatentDiffusion(
        family,
        family.build_objective(objective),
        denoiser,
        encoders,
        size=size,
        normalize=normalize,
        posterior=posterior,
        caption_dropout=objective.caption_dropout,
        frozen_device=config.frozen_device,
        empty_states=empty_states,
    )


def zero_states(family: Family, size: ImageSize) -> dict[str, Tensor]:
    """Return zeros in place of the empty caption's states, (1, L, D) or (1, P), where they do not matter; its mask does."""
    others = {"moments", *family.image_columns(size), *family.passthrough_values(size)}
    columns = family.columns("moments", size, stored_text=True)
    states = {name: torch.zeros(1, *column.shape) for name, column in columns.items() if name not in others}
    # HunyuanVideo takes the mean over a caption's tokens: a mask without any gives 0 / 0.
    return states | family.text_mask(family.tokenize([""]))


def weights_dtype(precision: str) -> torch.dtype:
    """Return the type in which a run keeps its denoiser's weights."""
    return torch.bfloat16 if precision == "bf16_params" else torch.float32


def cast_weights(denoiser: nn.Module, precision: str) -> None:
    """Cast a denoiser to the type in which a run keeps its weights."""
    if (dtype := weights_dtype(precision)) != torch.float32:
        nn.Module.to(denoiser, dtype)  # diffusers' own warns where a type is given


def step_seed(seed: int, batch_index: int, rank: int, purpose: str = "") -> int:
    """Return the seed of one step's generator, in [0, 2**63): a hash, so that neighboring steps are independent.

    Args:
        purpose: what else than the batch's own random numbers is drawn.
    """
    text = f"{seed} {batch_index} {rank}" + (f" {purpose}" if purpose else "")
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class BatchRandomness(Callback):
    """Draws every batch's random numbers from (seed, global batch index, rank) alone.

    No step uses the global generator, because Composer does not restore it when resuming within an epoch.
    """

    def __init__(self, model: LatentDiffusion, seed: int):
        self.model, self.seed = model, seed  # state.model may be wrapped by DDP

    def batch_start(self, state: State, logger: Logger) -> None:
        generator = torch.Generator(self.model.device)
        generator.manual_seed(step_seed(self.seed, state.timestamp.batch.value, dist.get_global_rank()))
        state.batch = self.model.draw(state.batch, generator)
