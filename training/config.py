"""A run's configuration: its keys, their aliases, and what null means on this machine."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from callbacks.mlperf_log import MLPerfConfig
from callbacks.profile import ProfileConfig
from callbacks.run_record import CostConfig
from callbacks.throughput import MeasureConfig
from checkpointing.callback import DEFAULT_EVERY_IMAGES, DEFAULT_EVERY_MIN, SaveConfig
from common import dist
from common.command_line import Alias
from common.value_types import ImageSize, Pixels, duration, limited
from data import DataConfig
from ema import EMAConfig
from evaluation.samples import SamplesConfig
from evaluation.scorer import EvalConfig, TargetConfig
from evaluation.validation import ValidationConfig
from families import load_family, mlperf
from families.encoders import ModelConfig, default_num_frames, default_weights
from families.lora import LoraConfig
from families.mlperf import SD, SD_WARMUP_BATCHES
from families.objectives import ObjectiveConfig
from families.spec import MAX_FRAMES, MAX_SIDE_PX, parse_size
from mds.dataset import EMPTY_DIGEST, Dataset
from mds.moments import has_empty_text, read_empty_text
from model import LatentDiffusion, build_model, zero_states
from ranks import collectives
from training import speed
from training.health import HealthConfig
from training.loggers import LoggersConfig
from training.optimizer import OptimizerConfig, ScheduleConfig
from training.other_trainers import OTHER_TRAINERS
from training.speed import SpeedKeys


@dataclass(frozen=True)
class RunKeys:
    """The run itself and the folder of its record."""

    run_name: str | None = None
    """Name of the run; an existing one is resumed. null: family, size and start time."""
    run_folder: str = "runs"
    """Parent folder of all runs."""
    seed: int = limited(17, 0, 2**32 - 1)
    """Seed of the weights, the order of samples and all random numbers."""
    max_duration: str = duration("30ba", "ba", "sp", "ep")
    """How long to train."""
    global_batch_size: int = limited(2048, 1, 10**9)
    """Images per step, over all ranks."""
    device_train_microbatch_size: int | Literal["auto"] | None = limited(None, 1, 10**9)
    """Images per pass on each device. null: the device batch. auto: as many as fit."""
    image_size: Pixels = limited(512, 1, MAX_SIDE_PX, usual="512, or [width, height]")
    """Pixels: a number, or [width, height]."""
    num_frames: int | None = limited(None, 1, MAX_FRAMES, usual="9 to 129")
    """Frames of a video. null: the family's default."""
    precision: Literal["fp32", "tf32", "bf16", "fp16", "bf16_params"] | None = None
    """null: bf16 on a GPU, fp32 on a CPU. bf16_params: no float32 copy of the weights."""


@dataclass(frozen=True)
class RunConfig(SpeedKeys, RunKeys):  # fields of the last base come first
    """A run's whole configuration. Each section is declared next to the code that owns it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    loggers: LoggersConfig = field(default_factory=LoggersConfig)
    mlperf: MLPerfConfig = field(default_factory=MLPerfConfig)
    algorithms: list[Any] = field(default_factory=list)
    """Composer Algorithms of your own: path/to/file.py:Class(name=value), or {class: ..., args: {...}}."""
    callbacks: list[Any] = field(default_factory=list)
    """Composer Callbacks of your own, in the same form."""

    @property
    def size(self) -> ImageSize:
        """(width, height) in pixels; of a family of videos (width, height, frames)."""
        own = default_num_frames(self.model)
        return parse_size(self.image_size) + (() if own is None else (self.num_frames or own,))


Config = TypeVar("Config", bound=RunConfig)

MODEL_NAMES = [
    *(f"CompVis/stable-diffusion-v1-{number}" for number in (1, 2, 3, 4)),
    *(f"{owner}/stable-diffusion-v1-5" for owner in ("runwayml", "sd-legacy", "stable-diffusion-v1-5")),
    *(
        f"{owner}/stable-diffusion-{release}"
        for owner in ("stabilityai", "sd2-community")
        for release in ("2-base", "2", "2-1-base", "2-1")
    ),
]
"""What diffusers' users know Stable Diffusion 1 and 2 by. The network of 2-1 is that of 2."""


def _keys_of(model_name: str) -> list[str]:
    if "-v1-" in model_name:
        return ["model.family=sd2", "model.variant=sd15", "objective.prediction=epsilon"]
    return ["model.family=sd2", f"objective.prediction={'epsilon' if model_name.endswith('-base') else 'v'}"]


ALIASES = {
    "batch_size": Alias("global_batch_size"),
    "image_size": Alias("image_size"),
    "remote": Alias("data.remote"),
    "local": Alias("data.local"),
    "use_synth_data": Alias("data.synthetic", value_if_bare="true"),
    "model_name": Alias(
        "model.family",
        choices={"sd2": ["model.family=sd2"], **{name: _keys_of(name) for name in MODEL_NAMES}},
    ),
    "use_ema": Alias("ema.enabled", value_if_bare="true"),
    "wandb_name": Alias("loggers.wandb.name"),
    "wandb_project": Alias("loggers.wandb.project"),
    "device_train_microbatch_size": Alias("device_train_microbatch_size"),
    **{flag: Alias("", advice=advice) for flag, advice in OTHER_TRAINERS.items()},
}


def drop_keys_of_speed(config: Config, typed: Collection[str]) -> tuple[Config, str | None]:
    """Take from a tiny network's run those keys of speed of its YAML that cost it more than they save, or need a GPU.

    Compiling takes minutes, a tiny run seconds. So a recipe for GPUs is tried with model.preset=tiny alone.

    Args:
        typed: keys of the command line; they stay, and are refused where they need a GPU.

    Returns:
        the configuration, and what was left out, for the user; None: nothing.
    """
    if config.model.preset != "tiny":
        return config, None
    plain: dict[str, Any] = {} if "compile" in typed else speed.NOT_COMPILED
    if not torch.cuda.is_available():
        plain = plain | dict.fromkeys(speed.ON_A_GPU, False)
        plain |= {} if config.attention in speed.ON_A_CPU else {"attention": "auto"}
    plain = {key: value for key, value in plain.items() if key not in typed and getattr(config, key) != value}
    if not plain:
        return config, None
    settings = ", ".join(f"{key}={str(getattr(config, key)).lower()}" for key in sorted(plain))
    return dataclasses.replace(config, **plain), f"{settings}: left out for model.preset=tiny"


def resolve(config: Config) -> Config:
    """Replace null by its value on this machine, so that the run record shows what was used."""
    model, batch = config.model, config.global_batch_size
    family = load_family(model.family, model.preset, model.variant)
    objective = config.objective.resolved(family.objective)
    assert objective.prediction is not None
    precision = config.precision or ("bf16" if torch.cuda.is_available() else "fp32")
    is_sd = mlperf.find_benchmark(model.family, model.variant) is SD
    evaluation = config.eval.resolved(batch, prediction=objective.prediction, has_ema=config.ema.enabled)
    every = 0 if config.data.synthetic else DEFAULT_EVERY_IMAGES
    if evaluation.when != "off":  # a checkpoint before each evaluation, which may take longer than training to it
        every = snapshots = evaluation.every_images or 0
    else:
        snapshots = SD.interval(batch) if every and is_sd else every  # the rules ask for these
    rate = SD.lr_per_image(batch) if takes_reference_rate(model, config.optimizer) else None
    is_timed = config.data.synthetic or config.mlperf.enabled  # nothing is written in it that was not asked for
    return dataclasses.replace(
        config,
        run_name=config.run_name or f"{name_without_time(config)}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
        save=config.save.resolved(every, snapshots, 0.0 if is_timed else DEFAULT_EVERY_MIN),
        eval=evaluation,
        validation=config.validation.resolved(batch),
        samples=config.samples.resolved(batch),
        data=config.data.with_num_nodes(collectives.num_nodes()),
        precision=precision,
        attention=speed.resolve_attention(
            config.attention, precision, has_mask="mask" in family.columns("moments", config.size, stored_text=True)
        ),
        device_train_microbatch_size=config.device_train_microbatch_size or batch // dist.get_world_size(),
        num_frames=config.size[2] if len(config.size) > 2 else None,
        model=dataclasses.replace(
            config.model,
            variant=family.variant,  # "stock" is FLUX.1 dev
            weights=config.model.weights or default_weights(family, is_real=not config.data.synthetic),
        ),
        lora=config.lora.resolved(family.lora_targets),
        objective=objective,
        optimizer=config.optimizer.resolved(rate, precision),
        ema=config.ema.resolved(),
        mlperf=config.mlperf.resolved(mlperf.find_logged_benchmark(config.model.family, config.model.variant)),
        schedule=config.schedule.resolved(SD_WARMUP_BATCHES if is_sd else None),
    )


def name_without_time(config: RunConfig) -> str:
    """Return the beginning of the name of a run that was given none."""
    frames = "".join(f"-{num}f" for num in config.size[2:])
    family = config.model.family.rpartition(":")[2].partition("(")[0]  # a class from outside has a path
    return f"{family}-{config.model.preset}-{config.size[0]}px{frames}"


def needs_encoders(config: RunConfig) -> bool:
    """Return whether training runs its frozen encoders: not if batches have all their outputs and no image is generated.

    To drop captions without them, each dataset has to have the empty text's states.
    """
    data, objective = config.data, config.objective
    draws = config.samples.is_given or config.eval.when == "in_training"
    if draws or data.stage != "moments" or data.text != "stored":
        return True
    try:
        family = load_family(config.model.family, config.model.preset, config.model.variant)
        is_zero = (
            data.synthetic
            or family.has_zero_empty_condition
            or not objective.resolved(family.objective).caption_dropout
        )
        return not (is_zero or all(map(has_empty_text, data.sources)))
    except ValueError:  # one of the run's problems
        return True


def build_for_training(config: RunConfig, datasets: Sequence[Dataset], *, has_denoiser: bool = True) -> LatentDiffusion:
    """Build a run's model, with its encoders where training needs them, on the CPU.

    Args:
        has_denoiser: see model.build_model.
        datasets: those that it is trained on; none for synthetic data.

    Raises:
        ConfigError: the encoders' weights do not fit. ValueError: the datasets' empty texts differ, or cannot be read.
    """
    if needs_encoders(config):
        return build(config, has_denoiser=has_denoiser)
    family = load_family(config.model.family, config.model.preset, config.model.variant)
    digests = {dataset.metadata.get(EMPTY_DIGEST) for dataset in datasets}
    empty = zero_states(family, config.size)
    if digests and None not in digests and not family.has_zero_empty_condition:
        if len(digests) > 1:
            raise ValueError(
                "data.streams: their empty texts differ. Mix datasets that were made with the same text encoders."
            )
        empty = read_empty_text(datasets[0])
    return build(config, empty, has_denoiser=has_denoiser)


def build(
    config: RunConfig, empty_states: Mapping[str, Tensor] | None = None, *, has_denoiser: bool = True
) -> LatentDiffusion:
    """Build a run's model with its encoders, on the CPU. Raises ConfigError: the encoders' weights do not fit.

    Args:
        empty_states, has_denoiser: see model.build_model: with the first no encoder is built.
    """
    return build_model(
        config.model,
        config.objective,
        size=config.size,
        normalize=config.data.normalize,
        posterior=config.data.posterior,
        seed=config.seed,
        empty_states=empty_states,
        has_denoiser=has_denoiser,
    )


def takes_reference_rate(model: ModelConfig, optimizer: OptimizerConfig) -> bool:
    """Return whether the learning rate is that of MLPerf's reference point for Stable Diffusion v2."""
    is_sd = mlperf.find_benchmark(model.family, model.variant) is SD
    return is_sd and optimizer.lr is None and optimizer.lr_per_image is None
