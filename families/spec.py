"""The contract between data, model and families: the tensors of a batch, and the interface of a family.

Shapes: B batch, C latent channels, H W height and width in pixels, h w height and width of the latent (SD2: H/8, W/8),
        F frames and f latent frames (families of videos only), L text tokens, D text width.

A batch is a dict of tensors with B first. The family defines them for each dataset (`Family.columns`):

    stage     column     type     one sample, SD2 at 512 px
    images    images     uint8    (3, H, W), e.g. (3, 512, 512), not normalized; float32, / 255 (the variant mlperf)
    videos    videos     uint8    (3, F, H, W), e.g. (3, 9, 544, 960), not normalized: families of videos, instead of images
    moments   moments    float16  (2C, h, w), e.g. (8, 64, 64): mean then logvar of the posterior, unscaled; (C, h, w)
                                  of an autoencoder without one (DC-AE)
    both      tokens     int64    (L,), e.g. (77,); a family with two tokenizers has a second such column
    moments   text       float16  (L, D), e.g. (77, 1024): stored states of the text encoder, instead of tokens
    moments   pooled     float16  (P,): stored states of the whole caption, where the family has some (SDXL, FLUX)
    both      sizes      int64    (4,): the source image's height and width, top and left of the crop (SDXL)
    moments   mask       float16  (L,): 1 where a caption has a token, if the network has a mask (Mochi, HunyuanVideo)
    moments   first_frame, image_states   float16: the network's inputs from the first frame (Wan, image to video)

The family chooses the latent's shape: FLUX packs it only inside its network, a video's is (C, f, h, w). The condition is a
dict: text states, the family's further columns, and the guidance scale if the network has it as an input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from common.value_types import ImageSize, format_value
from families.lora import ATTENTION
from families.objectives import Objective, ObjectiveConfig, build_objective
from families.sampling import (
    FLOW,
    PUBLISHED_SETTINGS,
    Spacing,
    build_scheduler,
    classifier_free_guidance,
    dynamic_shift,
)
from weights.tensors import copy_to_device

if TYPE_CHECKING:
    from weights.ldm_names import NetworkNames

T = TypeVar("T")

MAX_SIDE_PX = 16384
MAX_FRAMES = 1025


def parse_size(value: Any) -> ImageSize:
    """Read one number (a square) or [width, height]. Raises ValueError: anything else."""
    sides = [value, value] if isinstance(value, int) else value
    is_pair = isinstance(sides, list | tuple) and len(sides) == 2
    if not is_pair or any(type(side) is not int or not 1 <= side <= MAX_SIDE_PX for side in sides):
        allowed = f"pixels, e.g. 512, or [width, height], to {MAX_SIDE_PX}"
        raise ValueError(f"{format_value(value)} is not a size. Possible: {allowed}.")
    return (sides[0], sides[1])


@dataclass(frozen=True)
class Column:
    """Shape and type of one sample's entry in a batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    below: int | None = None
    """For integers: every value lies in [0, below)."""

    @property
    def stored_dtype(self) -> str:
        """The type in a shard, by numpy's name: tokens of a vocabulary up to 65,536 take two bytes."""
        if self.below is not None and self.below <= 2**16 and self.dtype == torch.int64:
            return "uint16"
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Pipeline:
    """diffusers' own pipeline of a family: what its model_index.json has besides our networks.

    name: its class; settings: of its constructor; absent_parts: parts that are left out.
    is_square: its images are square if no size is given: sample_size of the UNet is one number.
    """

    name: str
    settings: Mapping[str, Any]
    absent_parts: tuple[str, ...]
    is_square: bool = False


class Family:
    """A family of models on the latents of an autoencoder, conditioned on states of captions. Each family has its own class.

    This one has what most have in common: one KL autoencoder of images, tokens of one tokenizer.
    """

    name: str
    variant: str
    media = "images"
    """images or videos: the dataset that the family is trained on, and that dataset's column."""
    num_frames: int | None = None
    """Default number of frames of a video; None: the family makes images."""
    frames_per_sec = 1.0
    """Of the videos that the published model makes."""
    image_dtype = torch.uint8
    """Type of images in a batch; float32: not rounded, see `mds.images.resize_and_crop`."""
    predictions: tuple[str, ...] = ("epsilon", "v")
    """Prediction targets that the family supports."""
    objective: Mapping[str, Any]
    """Key of the `objective` section -> the variant's own value, used where a configuration has null."""
    hub_name: str | None = None
    """The model on the hub with the encoders that this network is trained with: the default for real data. None: no model."""
    pixels_per_latent: int
    side_multiple: int | None = None
    """Sides of images are multiples of this, px; None: of pixels_per_latent."""
    latent_channels = 4
    num_given_frames = 0
    """Leading latent frames of a video that the network is given. They are left out of the loss."""
    has_posterior = True
    """The autoencoder gives mean and logvar of a normal distribution. False: the latent alone, C channels (Sana's DC-AE)."""
    latent_scale: float
    """1 / standard deviation of the latents."""
    latent_shift = 0.0
    """Their mean, which is subtracted first."""
    latent_means: tuple[float, ...] = ()
    latent_stds: tuple[float, ...] = ()
    """Mean and standard deviation of each latent channel, instead of latent_scale and latent_shift; (): these two."""
    num_tokens: int
    """Length of the tokenizer's output: L."""
    vocabulary_size: int
    """Its largest token plus one."""
    text_width: int
    """Width of the text encoder's states: D."""
    has_guidance_input = False
    """The guidance scale is an input of the network, so there is no second, unconditional call (FLUX.1 dev)."""
    has_zero_empty_condition = False
    """A dropped caption's condition, with its mask, is zeros instead of the states of the empty text (SDXL, Mochi)."""
    tokenizer_folders: tuple[str, ...] = ("tokenizer",)
    """Folders of published weights that `tokenize`, or a comparison with it, needs; () if the weights are shipped."""
    clip_tokenizer_folder: str | None = "tokenizer"
    """The folder of published weights with CLIP's tokenizer, which makes the column `tokens`; None: the family has none."""
    overflow_encoders: tuple[str, ...] = ()
    """Frozen networks with values beyond 65,504, the largest float16: they are float32 in a run of fp16."""
    fp32_encoders: tuple[str, ...] = ()
    """Frozen networks that are float32 in every run, unless a key sets another type."""
    lora_targets: tuple[str, ...] = ATTENTION
    """Default layers with an adapter, see families.lora."""
    token_arguments: Mapping[str, int] | None = None
    """Arguments of the denoiser's blocks, besides `hidden_states` (B, S, D), with an entry for each of S image tokens, after
    those of text tokens if it has them -> that dimension. None: the blocks do not take a part of the tokens."""
    sampling_spacing: Spacing = "linear"
    """How the steps of sampling are spread, see families.sampling."""
    scheduler_settings: Mapping[str, Any] = {}
    """Of a flow's scheduler_config.json, for diffusers' FlowMatchEulerDiscreteScheduler; what is not in it is the default."""
    shipped_weights: Path | None = None
    """The diffusers folder in this repository with the encoders' weights, the default of `model.weights`; None: none."""
    pipeline: Pipeline | None = Pipeline(
        "StableDiffusionPipeline",
        {"requires_safety_checker": False},
        ("safety_checker", "feature_extractor", "image_encoder"),
    )
    """None: diffusers has none that takes its parts, so that it is not exported."""

    # --- what each family defines ---

    def build_denoiser(self) -> nn.Module:
        """Build the trained network, initialized from torch's global generator."""
        raise NotImplementedError

    def build_encoders(self) -> dict[str, nn.Module]:
        """Build the frozen networks by name, with random weights from torch's global generator."""
        raise NotImplementedError

    def network_names(self) -> Mapping[str, Callable[[nn.Module], NetworkNames]]:
        """Encoder or "denoiser" -> a function: built module -> the names of its tensors in published weights."""
        raise ValueError(
            f"model.family: {type(self).__name__} has no network_names. Published weights and exports need it."
        )

    def tokenize(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Turn captions into the batch's text columns, int64 (B, L) each."""
        raise NotImplementedError

    def save_tokenizers(self, folder: Path) -> dict[str, str]:
        """Write each tokenizer into a new folder there; return the folder's name -> transformers' class that reads it.

        Also what prepares images for an encoder of transformers, if the pipeline has one.
        """
        raise ValueError(f"model.family: {type(self).__name__} has no save_tokenizers. An export needs it.")

    def encode_text(self, encoders: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Turn the batch's text columns into the denoiser's condition."""
        raise NotImplementedError

    # --- sizes and columns ---

    def size_problem(self, size: ImageSize) -> str | None:
        """Return why images of this size cannot be trained on, or None."""
        step, (width, height) = self.side_multiple or self.pixels_per_latent, size
        if all(side > 0 and side % step == 0 for side in size):
            return None
        return f"{width} x {height} px does not fit {self.name}. Both sides have to be multiples of {step}."

    def frames_problem(self, num_frames: int) -> str | None:
        """Return why videos of so many frames cannot be trained on, or None; not called for a family of images."""
        return None

    def columns(self, stage: str, size: ImageSize, *, stored_text: bool = False) -> dict[str, Column]:
        """Return the columns of one sample; the keys are those of a batch.

        Args:
            stored_text: with float16 columns of the condition, named as in `encode_text`, instead of the text columns.

        Raises:
            ValueError: an unknown stage.
        """
        channels, *sides = self.latent_shape(size)
        below = 256 if self.image_dtype == torch.uint8 else None
        moments = Column((2 * channels if self.has_posterior else channels, *sides), torch.float16)
        stage_columns = {
            self.media: {self.media: Column(self.media_shape(size), self.image_dtype, below=below)},
            "moments": {"moments": moments, **self.image_columns(size)},
        }
        if stage not in stage_columns:
            raise ValueError(f"data.stage: {self.name} has no dataset '{stage}'. Known: {', '.join(stage_columns)}.")
        text = self.stored_columns() if stored_text else self.text_columns()
        return {**stage_columns[stage], **text, **self.passthrough_columns()}

    def media_shape(self, size: ImageSize) -> tuple[int, ...]:
        """Return the shape of one image or video in a batch."""
        width, height = size
        return (3, height, width)

    def latent_shape(self, size: ImageSize) -> tuple[int, ...]:
        """Return the shape of one latent, e.g. (4, 64, 64), or (C, f, h, w)."""
        width, height = size
        return (self.latent_channels, height // self.pixels_per_latent, width // self.pixels_per_latent)

    def text_columns(self) -> dict[str, Column]:
        """Return the columns that `tokenize` makes."""
        return {"tokens": Column((self.num_tokens,), torch.int64, below=self.vocabulary_size)}

    def stored_columns(self) -> dict[str, Column]:
        """Return the columns of what `encode_text` makes."""
        return {"text": Column((self.num_tokens, self.text_width), torch.float16)}

    def image_columns(self, size: ImageSize) -> dict[str, Column]:
        """Return the columns that `encode_image_columns` makes; {}: the network receives nothing of the images."""
        return {}

    def passthrough_values(self, size: ImageSize) -> dict[str, Tensor]:
        """Return the further columns of an image of this size that is generated, (1, ...) each; {}: there are none."""
        return {}

    def passthrough_columns(self) -> dict[str, Column]:
        """Return the columns of `passthrough_values`."""
        return {}

    # --- networks and what they compute ---

    def build_vae(self, **arguments: Any) -> nn.Module:
        """Build the autoencoder: `block_out_channels`, its width at each level, and further arguments of diffusers' class."""
        from diffusers.models import AutoencoderKL

        depth = len(arguments["block_out_channels"])
        return AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * depth,
            up_block_types=("UpDecoderBlock2D",) * depth,
            layers_per_block=2,
            latent_channels=self.latent_channels,
            scaling_factor=self.latent_scale,
            **arguments,
        )

    def build_objective(self, config: ObjectiveConfig) -> Objective:
        """Build the forward process: times, noise, target and weight."""
        config = config.resolved(self.objective)
        if config.prediction not in self.predictions:
            text = f"objective.prediction: {self.name} cannot be trained on '{config.prediction}'"
            raise ValueError(f"{text}. Possible: {', '.join(self.predictions)}.")
        return build_objective(config)

    def read_tokenizers(self, folder: Path) -> None:
        """Read the tokenizers that are not in code from a folder of published weights. Raises ValueError: one is missing."""

    def text_mask(self, text: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """# text columns, (B, L) each -> "mask" (B, L) bool, True where a caption has a token; {}: the network has none."""
        return {}

    def encode_images(self, encoders: Mapping[str, nn.Module], images: Tensor) -> Tensor:
        """# (B, 3, H, W) normalized, on the encoder's device -> (B, 2C, h, w) mean | logvar, or (B, C, h, w); unscaled."""
        vae: Any = encoders["vae"]
        encoded = vae.encode(images.to(vae.dtype))
        return encoded.latent_dist.parameters if self.has_posterior else encoded.latent

    def encode_image_columns(self, encoders: Mapping[str, nn.Module], images: Tensor) -> dict[str, Tensor]:
        """# (B, 3, H, W) or (B, 3, F, H, W) normalized -> what the network receives of them besides the noisy latent."""
        return {}

    def sample_latents(self, moments: Tensor, noise: Tensor) -> Tensor:
        """# what `encode_images` returns, (B, C, h, w) -> (B, C, h, w): a draw from the posterior, scaled once."""
        latents = moments
        if self.has_posterior:
            mean, logvar = moments.chunk(2, dim=1)
            latents = mean + torch.exp(0.5 * logvar.clamp(-30.0, 20.0)) * noise  # the clamp of the VAE's own posterior
        return self.normalize_latents(
            (latents - self.latent_shift if self.latent_shift else latents) * self.latent_scale
        )

    def normalize_latents(self, latents: Tensor) -> Tensor:
        """# (B, C, ...) as the autoencoder has them, or scaled -> with mean 0 and deviation 1 in each channel."""
        if not self.latent_means:
            return latents
        return (latents - _per_channel(self.latent_means, latents)) / _per_channel(self.latent_stds, latents)

    def decode_latents(self, encoders: Mapping[str, nn.Module], latents: Tensor) -> Tensor:
        """# (B, C, h, w) scaled, of any size the family allows -> (B, 3, H, W) in the decoder's dtype, about [-1, 1]."""
        vae: Any = encoders["vae"]
        if self.latent_means:
            latents = latents * _per_channel(self.latent_stds, latents) + _per_channel(self.latent_means, latents)
        latents = latents / self.latent_scale
        latents = latents + self.latent_shift if self.latent_shift else latents
        return vae.decode(latents.to(vae.dtype), return_dict=False)[0]

    def denoise(self, denoiser: nn.Module, noisy: Tensor, times: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        """# (B, C, h, w), (B,) -> (B, C, h, w): one call of the network."""
        return denoiser(noisy, times, encoder_hidden_states=condition["text"], return_dict=False)[0]

    # --- sampling, here and in diffusers' pipeline ---

    def sampling_shift(self, latent: tuple[int, ...], steps: int) -> float:
        """Return the shift of a flow's times for latents of this shape, see families.objectives.shift_times; 1: none."""
        if self.scheduler_settings.get("use_dynamic_shifting"):
            return dynamic_shift(latent, self.scheduler_settings)
        return self.scheduler_settings.get("shift", 1.0)

    def guide(self, unconditional: Tensor, conditional: Tensor, guidance: float) -> Tensor:
        """# (B, C, h, w) each -> (B, C, h, w): the prediction with guidance."""
        return classifier_free_guidance(unconditional, conditional, guidance)

    def pipeline_scheduler(self, sampler: str, prediction: str, *, zero_terminal_snr: bool, size: ImageSize) -> Any:
        """Return diffusers' scheduler with which its pipeline samples as `sample` of families.sampling does, at this size."""
        if prediction == FLOW:
            from diffusers import FlowMatchEulerDiscreteScheduler

            return FlowMatchEulerDiscreteScheduler(**self.scheduler_settings)
        scheduler: Any = build_scheduler(sampler, prediction, zero_terminal_snr=zero_terminal_snr)
        scheduler.register_to_config(**PUBLISHED_SETTINGS)
        return scheduler

    def pipeline_call(self, size: ImageSize, guidance: float) -> dict[str, Any]:
        """Return the pipeline's arguments for what `generate` makes: all but caption, steps and noise."""
        return {"guidance_scale": guidance}

    def pipeline_latents(self, noise: Tensor) -> Tensor:
        """# (B, C, h, w) -> the pipeline's argument `latents`."""
        return noise


def _per_channel(values: tuple[float, ...], like: Tensor) -> Tensor:  # (C,) -> (C, 1, ...)
    return copy_to_device(torch.tensor(values, dtype=like.dtype), like.device).reshape(-1, *[1] * (like.dim() - 2))


def transformer_blocks(denoiser: nn.Module) -> list[nn.Module]:
    """Return the blocks of diffusers' transformers of images and videos, by what they call the lists of them."""
    lists = [getattr(denoiser, name, ()) for name in ("transformer_blocks", "single_transformer_blocks", "blocks")]
    return [block for blocks in lists for block in blocks]


def select_preset(family: str, variant: str, preset: str, sizes: Mapping[str, Mapping[str, T]]) -> T:
    """Return a family's entry of `sizes` for a variant and a preset. Raises ValueError: none; lists the known ones."""
    if variant not in sizes:
        raise ValueError(f"model.variant: {family} has no variant '{variant}'. Known: {', '.join(sizes)}.")
    if preset not in sizes[variant]:
        raise ValueError(f"model.preset: unknown preset '{preset}'. Known: {', '.join(sizes[variant])}.")
    return sizes[variant][preset]
