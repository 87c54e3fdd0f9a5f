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
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from cli.limits import ImageSize, given_as

if TYPE_CHECKING:
    from weights.ldm_names import Network
    from zoo.objectives import Objective, ObjectiveConfig
    from zoo.sampling import Spacing

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


class Family(Protocol):
    """The interface of a family. Everything else is shared (model.py, data.py, prepare/)."""

    name: str
    variant: str
    pictures: str
    """The stage that it is trained on, and that stage's column: images or videos."""
    num_frames: int | None
    """Frames of a video where a run gives no number; None: it makes images."""
    frames_per_sec: float
    """Of its videos, as the published model makes them."""
    predictions: tuple[str, ...]
    """Prediction targets that the family supports."""
    objective: Mapping[str, Any]
    """Key of the `objective` section -> the variant's own value, used where a configuration has null."""
    on_hub: str | None
    """The model on the hub whose encoders this network is trained with: the default for real data. None: there is none."""
    pixels_per_latent: int
    embeds_guidance: bool
    """The guidance scale is an input of the network, so that no second, unconditional call is made (FLUX.1 dev)."""
    empty_is_zero: bool
    """The condition of a dropped caption is zeros, its mask too, instead of the states of the empty text (SDXL, Mochi)."""
    clip_tokenizer: str | None
    """The folder of published weights with CLIP's tokenizer, which makes the column `tokens`; None: the family has none."""
    wide_encoders: tuple[str, ...]
    """Frozen networks with values beyond 65,504, the largest float16: they are float32 in a run of fp16."""
    exact_encoders: tuple[str, ...]
    """Frozen networks that are float32 in every run, unless a key says otherwise."""
    lora_targets: tuple[str, ...]
    """Layers that get an adapter where a run names none, see zoo.lora."""
    sampling_spacing: Spacing
    """How the steps of sampling are spread, see zoo.sampling."""
    shipped: Path | None
    """The diffusers folder in this repository with the encoders' weights, the default of `model.weights`; None: none."""
    pipeline: Pipeline | None
    """None: diffusers has none that takes its parts, so that it is not exported."""

    def size_problem(self, size: ImageSize) -> str | None:
        """Say why images of this size cannot be trained on, or None."""
        ...

    def frames_problem(self, num_frames: int) -> str | None:
        """Say why videos of so many frames cannot be trained on, or None; a family of images is not asked."""
        ...

    def text_columns(self) -> dict[str, Column]:
        """Return the columns that `tokenize` makes."""
        ...

    def columns(self, stage: str, size: ImageSize, *, stored_text: bool = False) -> dict[str, Column]:
        """Return the columns of one sample; the keys are those of a batch.

        Args:
            stored_text: with float16 columns of the condition, as `encode_text` names them, instead of the text columns.

        Raises:
            ValueError: an unknown stage.
        """
        ...

    def beside(self, size: ImageSize) -> dict[str, Column]:
        """Return the columns that `encode_beside` makes; {}: the network is told nothing of the pictures."""
        ...

    def latent_shape(self, size: ImageSize) -> tuple[int, ...]:
        """Return the shape of one latent, e.g. (4, 64, 64), or (C, f, h, w)."""
        ...

    def build_denoiser(self) -> nn.Module:
        """Build the trained network, initialised from torch's global generator."""
        ...

    def build_encoders(self) -> dict[str, nn.Module]:
        """Build the frozen networks by name, with random weights from torch's global generator."""
        ...

    def published(self) -> Mapping[str, Callable[[nn.Module], Network]]:
        """Encoder or "denoiser" -> a function: built module -> its tensors' places in published weights."""
        ...

    def build_objective(self, config: ObjectiveConfig) -> Objective:
        """Build the forward process: times, noise, target and weight."""
        ...

    def tokenize(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Turn captions into the batch's text columns, int64 (B, L) each."""
        ...

    @property
    def tokenizers(self) -> tuple[str, ...]:
        """Folders of published weights that `tokenize`, or a comparison with it, needs; none where weights are shipped."""
        ...

    def read_tokenizers(self, folder: Path) -> None:
        """Take those tokenizers of a folder of published weights that are not in code. Raises ValueError: it lacks one."""
        ...

    def save_tokenizers(self, folder: Path) -> dict[str, str]:
        """Write each tokenizer into a new folder there; return the folder's name -> transformers' class that reads it."""
        ...

    def pipeline_scheduler(self, sampler: str, prediction: str, *, zero_terminal_snr: bool) -> Any:
        """Return diffusers' scheduler with which its pipeline samples as `sample` of zoo.sampling does."""
        ...

    def pipeline_call(self, size: ImageSize, guidance: float) -> dict[str, Any]:
        """Return how the pipeline is called for what `generate` makes: all arguments but caption, steps and noise."""
        ...

    def pipeline_latents(self, noise: Tensor) -> Tensor:
        """# (B, C, h, w) -> as the pipeline's argument `latents` has it."""
        ...

    def further(self, size: ImageSize) -> dict[str, Tensor]:
        """Return the further columns of an image of this size that is generated, (1, ...) each; {}: there are none."""
        ...

    def sampling_shift(self, latent: tuple[int, ...]) -> float:
        """Return the shift of a flow's times in sampling latents of this shape, see zoo.objectives.shifted; 1: none."""
        ...

    def text_mask(self, text: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """# text columns, (B, L) each -> "mask" (B, L) bool, True where a caption has a token; {}: the network has none."""
        ...

    def encode_images(self, encoders: Mapping[str, nn.Module], images: Tensor) -> Tensor:
        """# (B, 3, H, W) normalised, on the encoder's device -> (B, 2C, h, w) mean | logvar, unscaled."""
        ...

    def encode_beside(self, encoders: Mapping[str, nn.Module], pictures: Tensor) -> dict[str, Tensor]:
        """# (B, 3, F, H, W) normalised -> what the network is told of the pictures, beside the noisy latent."""
        ...

    def sample_latents(self, moments: Tensor, noise: Tensor) -> Tensor:
        """# (B, 2C, h, w), (B, C, h, w) -> (B, C, h, w): a draw from the posterior, scaled once."""
        ...

    def decode_latents(self, encoders: Mapping[str, nn.Module], latents: Tensor) -> Tensor:
        """# (B, C, h, w) scaled, of any size the family allows -> (B, 3, H, W) in the decoder's dtype, about [-1, 1]."""
        ...

    def encode_text(self, encoders: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Turn the batch's text columns into the denoiser's condition."""
        ...

    def denoise(self, denoiser: nn.Module, noisy: Tensor, times: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        """# (B, C, h, w), (B,) -> (B, C, h, w): one call of the network."""
        ...
