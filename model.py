"""One ComposerModel for every family: encode -> corrupt -> denoise -> loss, and back: generate.

The order of a training step, for a batch that `BatchRandomness` has given its random numbers:

    images (B, 3, H, W) --normalise, VAE--------> moments (B, 2C, h, w)      stage `images` only
    moments + posterior noise ------------------> latents x_0 (B, C, h, w)   scaled once
    tokens (B, L), some replaced by the empty caption's --text encoder--> condition
    x_0, noise, times --------------------------> x_t --denoiser--> prediction, against the objective's target

and of generating:

    tokens (B, L), and the empty caption's ----------text encoder--> condition, unconditional rows first
    noise (B, C, h, w) --sampler, denoiser------> latents x_0 --VAE--> images (B, 3, H, W) float32 in [0, 1]

Shapes: B batch, C latent channels, H W image height and width, h w latent height and width, L text tokens.

The denoiser is the only registered module. The frozen encoders live in a plain holder, outside the module tree: no state
dict has them, DDP does not broadcast them, `model.train()` does not reach them, no optimizer sees them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from composer import Callback, Logger, State
from composer.devices import Device, DeviceCPU, DeviceGPU
from composer.models import ComposerModel
from composer.utils import dist
from torch import Tensor, nn

from cli.command_line import Problem
from cli.limits import ImageSize
from cli.private_api import require_private_api
from zoo import load_family
from zoo.encoders import RANDOM, FrozenEncoders, build_encoders, weights_problems
from zoo.objectives import Objective, ObjectiveConfig
from zoo.sampling import sample
from zoo.spec import Family, as_size

# h w of the latents that the VAE decodes in one call: 16 images of SD2 at 512 px. A tensor of its last block takes 128 MiB an
# image there (256 x 512 x 512 in two bytes), where the latent takes 64 KiB: it would bound the batch of the sampler.
DECODE_PLACES = 16 * 64 * 64
AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}

require_private_api(Device, "_device", why="torch's own device, on which the networks are placed")


@dataclass(frozen=True)
class ModelConfig:
    """The model, its frozen encoders, and where training begins."""

    family: str = "sd2"
    """The kind of model: sd2 (Stable Diffusion 2), or shapes (the miniature)."""
    preset: str = "full"
    """full, or tiny: the same code and kinds of blocks with under 2 M parameters, for a CPU."""
    variant: str = "stock"
    """stock. For sd2 also mlperf (the MLPerf benchmark's network) and sd15 (Stable Diffusion 1.5)."""
    weights: str | None = None
    """The frozen encoders: diffusers folder, LDM checkpoint, `random`, or `shipped`. null: shipped where there are any,
    else random for synthetic data only."""
    denoiser: str | None = None
    """Where training begins: a run's folder or checkpoint, or published weights. null: at random weights."""


def model_problems(config: ModelConfig, image_size: Any, *, encoders_wanted: bool) -> list[Problem]:
    """Return what cannot be about a family, its size and its encoders' weights.

    Args:
        image_size: as the user gave it.
        encoders_wanted: real pictures are encoded, or their moments trained on: random weights have to be asked for.
    """
    found = []
    try:
        size = as_size(image_size)
    except ValueError as error:
        size = None
        found.append(Problem(f"image_size: {error}", ("image_size",)))
    family = None
    try:
        family = load_family(config.family, config.preset, config.variant)
    except ValueError as error:
        found.append(Problem(str(error), ("model.family", "model.preset", "model.variant")))
    else:
        if size is not None and (text := family.size_problem(size)):
            found.append(Problem(f"image_size: {text}", ("image_size",)))
    if config.weights is None and encoders_wanted and (family is None or family.shipped is None):
        ways = (
            "Give a diffusers folder or an LDM checkpoint (512-base-ema.ckpt), or model.weights=random for random ones"
        )
        text = f"model.weights: not given. Real data want encoders. {ways}."
        found.append(Problem(text, ("model.weights", "data.synthetic")))
    elif config.weights not in (None, RANDOM) and family is not None:
        texts = weights_problems(family, config.weights)
        keys = ("model.weights", "model.family", "model.preset", "model.variant")
        found += [Problem(f"model.weights: {text}", keys) for text in texts]
    return found


def normalize_images(images: Tensor, normalize: str) -> Tensor:
    """# (B, 3, H, W) uint8, or float32 / 255 -> float32 in [-1, 1] ("symmetric", as SD's VAE was trained) or [0, 1] ("unit").

    "unit" is what the MLPerf reference feeds its VAE (its issue 721): needed to compare with it, wrong otherwise.
    """
    unit = images if images.is_floating_point() else images.float() / 255.0
    return unit if normalize == "unit" else unit * 2.0 - 1.0


class LatentDiffusion(ComposerModel):
    """A family's denoiser with its frozen encoders and objective.

    Args:
        family: what is particular to the model.
        objective: the forward process, its target and weights.
        denoiser: the trained network.
        encoders: the frozen networks.
        size: (width, height) of the images, px.
        normalize: "symmetric" or "unit", see `normalize_images`.
        posterior: "sample" or "mean": what of the VAE's posterior is the latent.
        caption_dropout: fraction of captions replaced by the empty one in training.
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
        self.empty_text = family.tokenize([""])  # column -> (1, L)
        self.device = torch.device("cpu")
        # Of images and latents on their way into a network: see training/speed.py.
        self.memory_format = torch.contiguous_format
        self.replays_graphs = False  # the denoiser's kernels come from CUDA graphs: see training/speed.py
        self._autocast_dtype: torch.dtype | None = None
        self._empty_condition: dict[str, Tensor] | None = None

    @property
    def frozen(self) -> Mapping[str, nn.Module]:
        """The frozen networks by name."""
        return self.encoders.modules

    def place(self, device: torch.device, precision: str) -> LatentDiffusion:
        """Move all parts to the device; encoders are cast to the compute precision, the denoiser stays float32.

        Composer opens autocast on a GPU and refuses it on a CPU, so there the model opens its own.
        """
        self.denoiser.to(device)
        self.encoders.to(device, AUTOCAST_DTYPES.get(precision, torch.float32))
        return self.compute_on(device, precision)

    def compute_on(self, device: torch.device, precision: str) -> LatentDiffusion:
        """Bring what is no module to the device where the modules are already."""
        self.device = device
        self.objective.to(device)
        self.empty_text = {name: tokens.to(device) for name, tokens in self.empty_text.items()}
        self._autocast_dtype = AUTOCAST_DTYPES.get(precision)
        self._empty_condition = None
        return self

    # --- one step ---

    def draw(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Return the batch with every random number of its step: posterior, noise, times and caption dropout.

        Drawn for the whole device batch before it is split, so that the microbatch size changes no number.

        Args:
            batch: columns of the stage, B first.
            generator: on the model's device; the only source of randomness of a step.
        """
        num = len(next(iter(batch.values())))

        def normal() -> Tensor:
            return torch.randn(num, *self.latent_shape, generator=generator, device=generator.device)

        draws = {
            "posterior_noise": normal(),
            "noise": normal(),
            "times": self.objective.draw_times(num, generator),
            "caption_dropped": torch.rand(num, generator=generator, device=generator.device) < self.caption_dropout,
        }
        return {**batch, **draws}

    @torch.no_grad()
    def encode(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the frozen encoders, one call each for the batch: latents (B, C, h, w) float32, and the condition."""
        if "moments" in batch:
            moments = batch["moments"]
        else:
            images = normalize_images(batch["images"], self.normalize).to(self.encoders.dtype)
            images = images.contiguous(memory_format=self.memory_format)
            moments = self.family.encode_images(self.encoders.modules, images)
        noise = batch["posterior_noise"]
        if self.posterior == "mean":
            noise = torch.zeros_like(noise)
        latents = self.family.sample_latents(moments.float(), noise)

        dropped = batch["caption_dropped"][:, None]
        text = {name: torch.where(dropped, empty, batch[name]) for name, empty in self.empty_text.items()}
        return latents, self.family.encode_text(self.encoders.modules, {**batch, **text})

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return prediction and target, (B, C, h, w), and each sample's weight, (B,)."""
        assert "noise" in batch, "the batch has no random numbers: BatchRandomness is not among the callbacks"
        latents, condition = self.encode(batch)
        noise, times = batch["noise"], batch["times"]
        noisy = self.objective.corrupt(latents, noise, times)
        with self._autocast("cpu"):
            prediction = self._denoise(noisy, times, condition)
        target = self.objective.target(latents, noise, times)
        return {"prediction": prediction, "target": target, "weight": self.objective.weight(times)}

    def _denoise(self, noisy: Tensor, times: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        """One call of the network, (B, C, h, w), (B,) -> (B, C, h, w), in training and in sampling alike.

        The tensors' types and layouts are the same in both: a compiled network has a graph for each it has seen.
        """
        noisy = noisy.contiguous(memory_format=self.memory_format)
        prediction = self.family.denoise(self.denoiser, noisy, times.contiguous(), condition)
        # A replay writes where the one before has written, and a sampler may still hold that.
        return prediction.clone() if self.replays_graphs else prediction

    def loss(self, outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted mean squared error, a float32 scalar."""
        error = F.mse_loss(outputs["prediction"].float(), outputs["target"].float(), reduction="none")
        return (outputs["weight"] * error.flatten(1).mean(dim=1)).mean()

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {}  # Composer would compute and reduce training metrics in every batch

    def autocast(self) -> contextlib.AbstractContextManager:
        """The precision that Composer opens around a step on a GPU, for a step without it; nothing on a CPU."""
        return self._autocast("cuda")

    def _autocast(self, device_type: str) -> contextlib.AbstractContextManager:
        """The run's autocast where the model is on such a device, nothing where it is on another."""
        if self._autocast_dtype is None or self.device.type != device_type:
            return contextlib.nullcontext()
        return torch.autocast(device_type, dtype=self._autocast_dtype)

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
        progress: Callable[[int, int], None] | None = None,
    ) -> Tensor:
        """Make images from captions and noise, with the weights that the denoiser holds now.

        Args:
            text: the batch's text columns, (B, L) each, as `Family.tokenize` returns them.
            noise: (B, C, h, w) standard normal; its h and w say the images' size.
            sampler: one of zoo.sampling.SAMPLERS.
            steps: of the sampler.
            guidance: its scale, away from the empty caption; 1 is none, and half the work.
            progress: see `zoo.sampling.sample`.

        Returns:
            (B, 3, H, W) float32 in [0, 1], on the model's device.

        Raises:
            ValueError: an invalid sampler, number of steps or guidance.
        """
        columns = {name: tokens.to(self.device, non_blocking=True) for name, tokens in text.items()}
        # The same autocast as in training: on a GPU around the text encoder too, where Composer opens it around the step.
        with evaluating(self.denoiser), self._autocast("cuda"):
            condition = self.family.encode_text(self.encoders.modules, columns)
            if guidance != 1.0:
                if self._empty_condition is None:
                    self._empty_condition = self.family.encode_text(self.encoders.modules, self.empty_text)
                empty = {name: self._empty_condition[name].expand_as(states) for name, states in condition.items()}
                condition = {name: torch.cat([empty[name], states]) for name, states in condition.items()}
            with self._autocast("cpu"):
                latents = sample(
                    lambda noisy, times: self._denoise(noisy, times, condition),
                    noise.to(self.device, non_blocking=True),
                    sampler=sampler,
                    prediction=self.objective.prediction,
                    steps=steps,
                    guidance=guidance,
                    progress=progress,
                )
        with torch.autocast(self.device.type, enabled=False):
            parts = latents.split(max(1, DECODE_PLACES // latents[0, 0].numel()))
            images = torch.cat([self.family.decode_latents(self.encoders.modules, part).float() for part in parts])
        return ((images + 1.0) / 2.0).clamp(0.0, 1.0)


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Hold a module in eval mode; afterwards every part of it is as it was, whatever happened."""
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
) -> LatentDiffusion:
    """Build a model on the CPU: the denoiser's weights from `seed`; random encoders come from a seed of their own."""
    family = load_family(config.family, config.preset, config.variant)
    encoders = build_encoders(family, config.weights)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        denoiser = family.build_denoiser()
    objective = objective.filled(family.objective)
    return LatentDiffusion(
        family,
        family.build_objective(objective),
        denoiser,
        encoders,
        size=size,
        normalize=normalize,
        posterior=posterior,
        caption_dropout=objective.caption_dropout,
    )


def build_device(precision: str) -> Device:
    """Return Composer's device; float32 means float32, tf32 has to be asked for (Composer's own default allows it).

    On a CPU the ranks of a machine share its cores, unless OMP_NUM_THREADS says how many threads each has: with all cores
    each, two ranks on two cores were 50 times slower.
    """
    if torch.cuda.is_available():
        return DeviceGPU(allow_tf32=precision != "fp32")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // dist.get_local_world_size()))
    return DeviceCPU()


def composer_precision(device: Device, precision: str) -> str:
    """Return what Composer calls a run's precision: which autocast it opens around a step, on a GPU alone."""
    names = {torch.bfloat16: "amp_bf16", torch.float16: "amp_fp16"}
    return names.get(AUTOCAST_DTYPES.get(precision), "fp32") if device.name == "gpu" else "fp32"


def step_seed(seed: int, batch_index: int, rank: int) -> int:
    """Return the seed of one step's generator, in [0, 2**63): a hash, so that neighbours share nothing."""
    digest = hashlib.blake2b(f"{seed} {batch_index} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class BatchRandomness(Callback):
    """Gives every batch its random numbers from (seed, global batch index, rank) alone.

    Nothing random in a step comes from the global generator, which Composer does not restore in mid-epoch.
    """

    def __init__(self, model: LatentDiffusion, seed: int):
        self.model = model  # state.model may be wrapped by DDP
        self.seed = seed

    def batch_start(self, state: State, logger: Logger) -> None:
        generator = torch.Generator(self.model.device)
        generator.manual_seed(step_seed(self.seed, state.timestamp.batch.value, dist.get_global_rank()))
        state.batch = self.model.draw(state.batch, generator)
