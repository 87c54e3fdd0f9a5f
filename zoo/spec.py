"""The contract between data, model and families: the tensors of a batch, and the interface of a family.

Shapes: B batch, C latent channels, H W height and width in pixels, h w height and width of the latent (SD2: H/8, W/8),
        F frames and f latent frames (families of videos alone), L text tokens, D text width.

A batch is a dict of tensors with B first. The family says which, for each stage (`Family.columns`):

    stage     column     type     one sample, SD2 at 512 px
    images    images     uint8    (3, H, W), e.g. (3, 512, 512), not normalised; float32, / 255 (the variant mlperf)
    videos    videos     uint8    (3, F, H, W), e.g. (3, 9, 544, 960), not normalised: families of videos, instead of images
    moments   moments    float16  (2C, h, w), e.g. (8, 64, 64): mean then logvar of the posterior, unscaled
    both      tokens     int64    (L,), e.g. (77,); a family with two tokenizers has a second such column
    moments   text       float16  (L, D), e.g. (77, 1024): stored states of the text encoder, instead of tokens
    moments   pooled   float16  (P,): stored states of the whole caption, where the family has some (SDXL, FLUX)
    both      sizes    int64    (4,): height and width of the picture as it came, top and left of what is shown (SDXL)
    moments   mask     float16  (L,): 1 where a caption has a token, where the network is told (Mochi, HunyuanVideo)
    moments   first_frame, image_states    float16: what the network is told of the first frame (Wan, image to video)

The family chooses the latent's shape: FLUX packs it only inside of its network, a video's is (C, f, h, w). The condition is a
dict: text states, the family's further columns, and the guidance scale where the network has that as an input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from cli.limits import ImageSize, given_as
from zoo.lora import ATTENTION
from zoo.objectives import Objective, ObjectiveConfig, build
from zoo.sampling import OF_PUBLISHED, Spacing, build_scheduler

if TYPE_CHECKING:
    from weights.ldm_names import Network

T = TypeVar("T")

MAX_SIDE_PX = 16384
MAX_FRAMES = 1025


def as_size(value: Any) -> ImageSize:
    """Read one number (a square) or [width, height]. Raises ValueError: anything else."""
    sides = [value, value] if isinstance(value, int) else value
    is_pair = isinstance(sides, list | tuple) and len(sides) == 2
    if not is_pair or any(type(side) is not int or not 1 <= side <= MAX_SIDE_PX for side in sides):
        possible = f"pixels, e.g. 512, or [width, height], to {MAX_SIDE_PX}"
        raise ValueError(f"{given_as(value)} is not a size. Possible: {possible}.")
    return (sides[0], sides[1])


@dataclass(frozen=True)
class Column:
    """Shape and type of one sample's entry in a batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    below: int | None = None
    """For integers: every value lies in [0, below)."""

    @property
    def stored(self) -> str:
        """The type in a shard, by numpy's name: tokens of a vocabulary up to 65,536 take two bytes."""
        if self.below is not None and self.below <= 2**16 and self.dtype == torch.int64:
            return "uint16"
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Pipeline:
    """diffusers' own pipeline of a family: what its model_index.json has beside the parts that we have.

    name: its class; settings: of its constructor; absent: parts that it does without.
    square: its images are squares where no size is given: sample_size of the UNet is one number.
    """

    name: str
    settings: Mapping[str, Any]
    absent: tuple[str, ...]
    square: bool = False


class Family:
    """A family of models on the latents of an autoencoder, conditioned on states of captions. Each has a class of its own.

    Here is what most have in common: one KL autoencoder of images, tokens of one tokenizer.
    """

    name: str
    variant: str
    pictures = "images"
    """The stage that it is trained on, and that stage's column: images or videos."""
    num_frames: int | None = None
    """Frames of a video where a run gives no number; None: it makes images."""
    frames_per_sec = 1.0
    """Of its videos, as the published model makes them."""
    image_dtype = torch.uint8
    """Type of pictures in a batch; float32: not rounded, see `stages.images.resize_and_crop`."""
    predictions: tuple[str, ...] = ("epsilon", "v")
    """Prediction targets that the family supports."""
    objective: Mapping[str, Any]
    """Key of the `objective` section -> the variant's own value, used where a configuration has null."""
    on_hub: str | None = None
    """The model on the hub whose encoders this network is trained with: the default for real data. None: there is none."""
    pixels_per_latent: int
    side_step: int | None = None
    """Sides of images are multiples of this, px; None: of pixels_per_latent."""
    latent_channels = 4
    latent_scale: float
    """1 / standard deviation of the latents."""
    latent_shift = 0.0
    """Their mean, which is subtracted first."""
    num_tokens: int
    """Of the tokenizer: L."""
    vocabulary: int
    """Its largest token plus one."""
    text_width: int
    """Of the text encoder's states: D."""
    embeds_guidance = False
    """The guidance scale is an input of the network, so that no second, unconditional call is made (FLUX.1 dev)."""
    empty_is_zero = False
    """The condition of a dropped caption is zeros, its mask too, instead of the states of the empty text (SDXL, Mochi)."""
    tokenizers: tuple[str, ...] = ("tokenizer",)
    """Folders of published weights that `tokenize`, or a comparison with it, needs; none where weights are shipped."""
    clip_tokenizer: str | None = "tokenizer"
    """The folder of published weights with CLIP's tokenizer, which makes the column `tokens`; None: the family has none."""
    wide_encoders: tuple[str, ...] = ()
    """Frozen networks with values beyond 65,504, the largest float16: they are float32 in a run of fp16."""
    exact_encoders: tuple[str, ...] = ()
    """Frozen networks that are float32 in every run, unless a key says otherwise."""
    lora_targets: tuple[str, ...] = ATTENTION
    """Layers that get an adapter where a run names none, see zoo.lora."""
    sampling_spacing: Spacing = "linear"
    """How the steps of sampling are spread, see zoo.sampling."""
    shipped: Path | None = None
    """The diffusers folder in this repository with the encoders' weights, the default of `model.weights`; None: none."""
    pipeline: Pipeline | None = Pipeline(
        "StableDiffusionPipeline",
        {"requires_safety_checker": False},
        ("safety_checker", "feature_extractor", "image_encoder"),
    )
    """None: diffusers has none that takes its parts, so that it is not exported."""

    # --- what each family has of its own ---

    def build_denoiser(self) -> nn.Module:
        """Build the trained network, initialised from torch's global generator."""
        raise NotImplementedError

    def build_encoders(self) -> dict[str, nn.Module]:
        """Build the frozen networks by name, with random weights from torch's global generator."""
        raise NotImplementedError

    def published(self) -> Mapping[str, Callable[[nn.Module], Network]]:
        """Encoder or "denoiser" -> a function: built module -> its tensors' places in published weights."""
        raise NotImplementedError

    def tokenize(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Turn captions into the batch's text columns, int64 (B, L) each."""
        raise NotImplementedError

    def save_tokenizers(self, folder: Path) -> dict[str, str]:
        """Write each tokenizer into a new folder there; return the folder's name -> transformers' class that reads it."""
        raise NotImplementedError

    def encode_text(self, encoders: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Turn the batch's text columns into the denoiser's condition."""
        raise NotImplementedError

    # --- sizes and columns ---

    def size_problem(self, size: ImageSize) -> str | None:
        """Say why images of this size cannot be trained on, or None."""
        step, (width, height) = self.side_step or self.pixels_per_latent, size
        if all(side > 0 and side % step == 0 for side in size):
            return None
        return f"{width} x {height} px does not fit {self.name}. Both sides have to be multiples of {step}."

    def frames_problem(self, num_frames: int) -> str | None:
        """Say why videos of so many frames cannot be trained on, or None; a family of images is not asked."""
        return None

    def columns(self, stage: str, size: ImageSize, *, stored_text: bool = False) -> dict[str, Column]:
        """Return the columns of one sample; the keys are those of a batch.

        Args:
            stored_text: with float16 columns of the condition, as `encode_text` names them, instead of the text columns.

        Raises:
            ValueError: an unknown stage.
        """
        channels, *sides = self.latent_shape(size)
        below = 256 if self.image_dtype == torch.uint8 else None
        moments = Column((2 * channels, *sides), torch.float16)
        of_stage = {
            self.pictures: {self.pictures: Column(self.picture_shape(size), self.image_dtype, below=below)},
            "moments": {"moments": moments, **self.beside(size)},
        }
        if stage not in of_stage:
            raise ValueError(f"data.stage: {self.name} has no stage '{stage}'. Known: {', '.join(of_stage)}.")
        text = self.stored_columns() if stored_text else self.text_columns()
        return {**of_stage[stage], **text, **self.further_columns()}

    def picture_shape(self, size: ImageSize) -> tuple[int, ...]:
        """Return the shape of one picture in a batch."""
        width, height = size
        return (3, height, width)

    def latent_shape(self, size: ImageSize) -> tuple[int, ...]:
        """Return the shape of one latent, e.g. (4, 64, 64), or (C, f, h, w)."""
        width, height = size
        return (self.latent_channels, height // self.pixels_per_latent, width // self.pixels_per_latent)

    def text_columns(self) -> dict[str, Column]:
        """Return the columns that `tokenize` makes."""
        return {"tokens": Column((self.num_tokens,), torch.int64, below=self.vocabulary)}

    def stored_columns(self) -> dict[str, Column]:
        """Return what `encode_text` makes, as it is stored."""
        return {"text": Column((self.num_tokens, self.text_width), torch.float16)}

    def beside(self, size: ImageSize) -> dict[str, Column]:
        """Return the columns that `encode_beside` makes; {}: the network is told nothing of the pictures."""
        return {}

    def further(self, size: ImageSize) -> dict[str, Tensor]:
        """Return the further columns of an image of this size that is generated, (1, ...) each; {}: there are none."""
        return {}

    def further_columns(self) -> dict[str, Column]:
        """Return the columns of `further`."""
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
            given = f"objective.prediction: {self.name} cannot be trained on '{config.prediction}'"
            raise ValueError(f"{given}. Possible: {', '.join(self.predictions)}.")
        return build(config)

    def read_tokenizers(self, folder: Path) -> None:
        """Take those tokenizers of a folder of published weights that are not in code. Raises ValueError: it lacks one."""

    def text_mask(self, text: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """# text columns, (B, L) each -> "mask" (B, L) bool, True where a caption has a token; {}: the network has none."""
        return {}

    def encode_images(self, encoders: Mapping[str, nn.Module], images: Tensor) -> Tensor:
        """# (B, 3, H, W) normalised, on the encoder's device -> (B, 2C, h, w) mean | logvar, unscaled."""
        vae: Any = encoders["vae"]
        return vae.encode(images.to(vae.dtype)).latent_dist.parameters

    def encode_beside(self, encoders: Mapping[str, nn.Module], pictures: Tensor) -> dict[str, Tensor]:
        """# (B, 3, F, H, W) normalised -> what the network is told of the pictures, beside the noisy latent."""
        return {}

    def sample_latents(self, moments: Tensor, noise: Tensor) -> Tensor:
        """# (B, 2C, h, w), (B, C, h, w) -> (B, C, h, w): a draw from the posterior, scaled once."""
        mean, logvar = moments.chunk(2, dim=1)
        latents = mean + torch.exp(0.5 * logvar.clamp(-30.0, 20.0)) * noise  # the clamp of the VAE's own posterior
        return (latents - self.latent_shift if self.latent_shift else latents) * self.latent_scale

    def decode_latents(self, encoders: Mapping[str, nn.Module], latents: Tensor) -> Tensor:
        """# (B, C, h, w) scaled, of any size the family allows -> (B, 3, H, W) in the decoder's dtype, about [-1, 1]."""
        vae: Any = encoders["vae"]
        latents = latents / self.latent_scale
        latents = latents + self.latent_shift if self.latent_shift else latents
        return vae.decode(latents.to(vae.dtype), return_dict=False)[0]

    def denoise(self, denoiser: nn.Module, noisy: Tensor, times: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        """# (B, C, h, w), (B,) -> (B, C, h, w): one call of the network."""
        return denoiser(noisy, times, encoder_hidden_states=condition["text"], return_dict=False)[0]

    # --- sampling, here and in diffusers' pipeline ---

    def sampling_shift(self, latent: tuple[int, ...]) -> float:
        """Return the shift of a flow's times in sampling latents of this shape, see zoo.objectives.shifted; 1: none."""
        return 1.0

    def pipeline_scheduler(self, sampler: str, prediction: str, *, zero_terminal_snr: bool) -> Any:
        """Return diffusers' scheduler with which its pipeline samples as `sample` of zoo.sampling does."""
        scheduler: Any = build_scheduler(sampler, prediction, zero_terminal_snr=zero_terminal_snr)
        scheduler.register_to_config(**OF_PUBLISHED)
        return scheduler

    def pipeline_call(self, size: ImageSize, guidance: float) -> dict[str, Any]:
        """Return how the pipeline is called for what `generate` makes: all arguments but caption, steps and noise."""
        return {"guidance_scale": guidance}

    def pipeline_latents(self, noise: Tensor) -> Tensor:
        """# (B, C, h, w) -> as the pipeline's argument `latents` has it."""
        return noise


def of_choice(family: str, variant: str, preset: str, sizes: Mapping[str, Mapping[str, T]]) -> T:
    """Return what a family has for a variant and a preset, of `sizes`. Raises ValueError: it has none; lists the others."""
    if variant not in sizes:
        raise ValueError(f"model.variant: {family} has no variant '{variant}'. Known: {', '.join(sizes)}.")
    if preset not in sizes[variant]:
        raise ValueError(f"model.preset: unknown preset '{preset}'. Known: {', '.join(sizes[variant])}.")
    return sizes[variant][preset]
