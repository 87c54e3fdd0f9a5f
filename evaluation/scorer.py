"""Score a model by the images that it generates for a set of prompts: FID, CLIP score and CMMD, on all ranks together.

    prompts, strided over the ranks -> tokens, and each prompt's own noise -> model.generate -> images in [0, 1]
    images -> image network -> sums of features, float64 ---> all-reduced -> mean, covariance -> FID against a file
    images, captions -> CLIP pair -> sum of cosines, float64 -> all-reduced -> mean
    images -> CLIP image encoder -> embeddings, float32 -----> gathered ----> CMMD against the same file

A score is a flat dictionary: the metrics and everything that they depend on (number of images, networks' fingerprints,
resize, sampler, guidance, weights). Two scores can be compared if all of that is equal.

An evaluation of the benchmark takes 15 to 60 minutes. So each rank saves its sums once a minute and at a signal, which all
ranks check between two sampling steps. The same evaluation later resumes with the remaining prompts.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from common import dist
from common.log import progress_interval_sec
from common.value_types import MAX_NUMBER, ImageSize, Pixels, Scales, file_problem, limited
from evaluation import clip_score, cmmd, fid
from evaluation.generate import as_bytes, gather_images, generate_chunks
from evaluation.metrics import EvaluationProgress, Meter, Parts
from evaluation.prompts import PromptSet, read_prompts
from families.objectives import ObjectiveConfig
from families.sampling import MAX_STEPS, MIN_STEPS, SamplerName, default_sampler, sampling_problems, split_by_rank
from families.spec import MAX_SIDE_PX, parse_size
from ranks.collectives import Signalled
from weights import hub
from weights.hub_names import parse_hub_name
from weights.tensors import fingerprint, is_out_of_memory

if TYPE_CHECKING:
    from model import LatentDiffusion

REQUIRED_FILES = {"inception": fid.REQUIRED_FILES, "clip": clip_score.REQUIRED_FILES, "cmmd": cmmd.REQUIRED_FILES}
EVERY_IMAGES = 512_000  # of the MLPerf benchmark
CPU_BATCH_SIZE = 16
GPU_BATCH_SIZES = (64, 32, 16, 8, 4, 2, 1)
FIGURES = ("num_images", "fid", "clip", "clip_x100", "cmmd", "eval_sec", "eval_images_per_sec")
"""A score's metrics; its other keys say how they were measured."""


@dataclass(frozen=True)
class EvalConfig:
    """How a run is scored: FID, CLIP score and CMMD."""

    when: Literal["in_training", "after", "off"] = "off"
    """after: write snapshots, for eval.py to score."""
    every_images: int | None = limited(None, 1)
    """Images between evaluations. null: 512000."""
    prompts: str | None = None
    """TSV file with image_id, id and caption, such as MLPerf's val2014_30k.tsv."""
    num_prompts: int | None = limited(None, 1)
    """Only the first prompts; such a score meets no target. null: all."""
    guidance: Scales = limited(8.0, 0.0)
    """Guidance scale; 1: none. eval.py also takes a list."""
    steps: int = limited(50, MIN_STEPS, MAX_STEPS)
    """Sampling steps."""
    sampler: SamplerName | None = None
    """null: ddim; for a flow euler."""
    weights: Literal["ema", "training"] | None = None
    """Weights to score. null: EMA weights, if any."""
    statistics: str | None = None
    """Reference for FID and CMMD: .npz of prepare.fid_statistics. null: neither."""
    inception: str | None = None
    """FID's network: pt_inception-2015-12-05-6726825d.pth, a hub name, or `random`. null: no FID."""
    resize: Literal["bilinear299", "bicubic256"] = "bilinear299"
    """Resizing for FID: bilinear299 as in MLPerf's reference, bicubic256 as in NVIDIA's submissions."""
    precision: Literal["fp32", "fp16"] = "fp32"
    """Precision of the networks for FID and CLIP score; fp16 as in MLPerf's reference."""
    clip: str | None = None
    """CLIP weights (OpenCLIP's ViT-H-14 or ViT-L-14): file, hub name, or `random`. null: no CLIP score."""
    cmmd: str | None = None
    """CMMD's image encoder: model file of openai/clip-vit-large-patch14-336, hub name, or `random`. null: no CMMD."""
    image_size: Pixels | None = limited(None, 1, MAX_SIDE_PX, usual="512, or [width, height]")
    """Pixels of generated images: a number, or [width, height]. null: as in training."""
    batch_size: int | None = limited(None, 1, 2**16)
    """Images per pass on each device. null: as many as fit."""
    samples: int = limited(16, 0, 1024)
    """Images in the sample grid; 0: no grid."""

    def problems(self, *, now: bool, images_alone: bool = False) -> list[tuple[str, str]]:
        """(key, message) for every missing file or key.

        Args:
            now: this run evaluates, so its files have to exist.
            images_alone: the images exist already, so FID needs no prompts.
        """
        if not now:
            return []
        problems = []
        if self.prompts is None and not (images_alone and self.clip is None):
            problems.append(("eval.prompts", "not given. Give a tab-separated file with image_id, id and caption."))
        if self.statistics is None and self.cmmd is not None:
            todo = "Make it by prepare.fid_statistics cmmd=ENCODER, or leave out eval.cmmd"
            problems.append(("eval.statistics", f"not given, but eval.cmmd is. {todo}."))
        elif (self.statistics is None) != (self.inception is None) and self.cmmd is None:
            present, missing = ("statistics", "inception") if self.inception is None else ("inception", "statistics")
            both = f"not given, but eval.{present} is. FID needs both; leave out both for none."
            problems.append((f"eval.{missing}", both))
        if self.statistics is None and self.inception is None and self.clip is None and self.cmmd is None:
            todo = "Give eval.inception and eval.statistics, eval.clip, or all three"
            problems.append(("eval.inception", f"nothing to score with. {todo}."))
        for key in ("prompts", "statistics", "inception", "clip", "cmmd"):
            path = getattr(self, key)
            if path in (None, "random"):
                continue
            try:
                path = hub.path_if_downloaded(path, REQUIRED_FILES[key]) if key in REQUIRED_FILES else path
                text = None if path is None else file_problem(str(path))
            except ValueError as error:
                text = str(error)
            problems += [(f"eval.{key}", text)] if text else []
        return problems

    def resolved(self, global_batch_size: int, *, prediction: str, has_ema: bool) -> EvalConfig:
        """Replace null by its value; every_images becomes whole batches.

        Args:
            prediction: what the network predicts.
        """
        resolved = dataclasses.replace(self, sampler=self.sampler or default_sampler(prediction))
        if self.when == "off":
            return resolved
        every = rounded_up(self.every_images or EVERY_IMAGES, global_batch_size)
        weights = self.weights or ("ema" if has_ema else "training")
        return dataclasses.replace(resolved, every_images=every, weights=weights)

    def on_hub(self) -> dict[str, tuple[str, hub.RequiredFiles]]:
        """Return those weights that are names of the hub: key -> name and what it needs."""
        weights = {key: getattr(self, key) for key in REQUIRED_FILES}
        return {f"eval.{key}": (name, REQUIRED_FILES[key]) for key, name in weights.items() if parse_hub_name(name)}

    def meter(self) -> Meter:
        """Build the meter on the CPU. Raises ValueError: a file is unreadable or is the wrong one."""
        of_fid: Any = dict(inception=self.inception, statistics=self.statistics, resize=self.resize)
        return Meter(**of_fid, clip=self.clip, cmmd=self.cmmd, precision=self.precision)

    def image_size_or(self, size: ImageSize) -> ImageSize:
        """Return the size of the generated images, `size` where no other is given; of videos with its frames."""
        return size if self.image_size is None else (*parse_size(self.image_size), *size[2:])

    def guidances(self) -> list[float]:
        """Return the guidance scales."""
        scales = self.guidance if isinstance(self.guidance, list | tuple) else [self.guidance]
        return [float(value) for value in scales]


@dataclass(frozen=True)
class TargetConfig:
    """The quality target: training ends when one evaluation meets all given thresholds, or one validation its own."""

    fid: float | None = limited(None, 0.0)
    """Highest FID; MLPerf: 90. null: no threshold."""
    clip: float | None = limited(None, -MAX_NUMBER, MAX_NUMBER)
    """Lowest CLIP score, a cosine; MLPerf: 0.15. null: no threshold."""
    val_loss: float | None = limited(None, 0.0)
    """Highest validation loss, without the other two; MLPerf FLUX.1: 0.586. null: no threshold."""

    @property
    def is_given(self) -> bool:
        return self.is_of_scores or self.val_loss is not None

    @property
    def is_of_scores(self) -> bool:
        """True for a target of FID or CLIP score, which an evaluation meets; one of val_loss is met by a validation."""
        return self.fid is not None or self.clip is not None

    @property
    def metrics(self) -> tuple[str, ...]:
        """The keys of a line that the target is about."""
        return ("fid", "clip") if self.val_loss is None else ("val_loss",)

    def is_met(self, line: Mapping[str, Any]) -> bool:
        """True if an evaluation, or a validation, meets the target; a partial score never does."""
        if self.val_loss is not None:
            loss = line.get("val_loss")
            return loss is not None and loss <= self.val_loss
        if not self.is_of_scores or line["partial"]:
            return False
        fid, clip = line["fid"], line["clip"]
        fid_met = self.fid is None or (fid is not None and fid <= self.fid)
        return fid_met and (self.clip is None or (clip is not None and clip >= self.clip))

    def problems(self, config: EvalConfig) -> list[tuple[str, str]]:
        """(key, message) for every threshold that is invalid or that the evaluation does not measure."""
        problems = []
        for key, needs in (("fid", config.statistics), ("clip", config.clip)):
            value = getattr(self, key)
            if value is not None and config.when == "off":
                problems.append(
                    (f"target.{key}", "given, but nothing is evaluated. Set eval.when=in_training, or after.")
                )
            elif value is not None and needs is None:
                other = "eval.statistics and eval.inception" if key == "fid" else "eval.clip"
                problems.append((f"target.{key}", f"given, but {key} is not measured. Give {other}, or leave it out."))
        if self.val_loss is not None and self.is_of_scores:
            text = "given, but a score is a target too. A run ends at one kind of target: leave out the others."
            problems.append(("target.val_loss", text))
        return problems


class Scorer:
    """Scores models by one section `eval`; networks and prompts are read once.

    Args:
        config: `when` is ignored.
        size: of the images if eval.image_size is null, px.
        seed: of the prompts' noise, which is the run's.
        settings: the model's settings that a score depends on, besides its weights (precision, prediction).
        show_progress: show a bar with the time left of rank 0.
        on_batch_size: called with the batch size when it has been found, on rank 0.
        parts: where an unfinished evaluation is saved; None: not saved.

    Attributes:
        signal: returns the signal that this rank has received, 0: none; checked during an evaluation.

    Raises:
        ValueError: prompts, statistics or weights are unusable; says why.
    """

    def __init__(
        self,
        config: EvalConfig,
        *,
        size: ImageSize,
        seed: int,
        settings: Mapping[str, Any] | None = None,
        show_progress: bool = False,
        on_batch_size: Callable[[int], None] | None = None,
        parts: Parts | None = None,
    ):
        assert config.prompts is not None
        self.on_batch_size = on_batch_size if dist.get_global_rank() == 0 else None
        self.model_settings, self.parts = dict(settings or {}), parts
        self.signal: Callable[[], int] = lambda: 0
        self.config, self.seed, self.show_progress = config, seed, show_progress
        self.size = config.image_size_or(size)
        self.prompt_set: PromptSet = read_prompts(config.prompts, config.num_prompts)
        if config.inception is not None and len(self.prompt_set.prompts) < 2:
            text = "eval.num_prompts: 1, but FID compares covariances"
            raise ValueError(f"{text}. Give 2 at least, or leave out eval.inception.")
        self.meter = config.meter()
        self.meter.log_warnings(len(self.prompt_set.prompts))
        self.batch_size = config.batch_size
        self.progress: EvaluationProgress | None = None
        self.samples: list[tuple[str, Tensor]] = []
        """Captions and images, (3, H, W) uint8, of the last score's first prompts, in their order."""

    def settings(self, guidance: float) -> dict[str, Any]:
        """Return everything that a score at this guidance depends on, except the scored weights."""
        return {
            "num_prompts": len(self.prompt_set.prompts),
            "partial": self.prompt_set.partial,
            "prompts_sha256": self.prompt_set.sha256,
            "guidance": guidance,
            "steps": self.config.steps,
            "sampler": self.config.sampler,
            "eval_image_size": list(self.size),
            "noise_seed": self.seed,
            "eval_batch_size": self.batch_size,
            **self.model_settings,
            **self.meter.facts,
        }

    def find_batch_size(self, model: LatentDiffusion) -> int:
        """Return the batch size; if it was not known, it is set to the largest that fits every rank's free memory.

        On a CPU it is fixed: a larger one is no faster there. Raises ValueError: not even one image fits.
        """
        if self.batch_size is not None:
            return self.batch_size
        fits = CPU_BATCH_SIZE
        if model.device.type == "cuda":
            self.meter.reset()
            with self.meter.on(model.device):
                # A resumed run's first evaluation comes before its gradients exist; later ones need memory beside them.
                gradients = [torch.empty_like(p) for p in model.parameters() if p.requires_grad and p.grad is None]
                fits = next((size for size in GPU_BATCH_SIZES if self._fits(model, size)), 0)
                del gradients
        least = torch.tensor([fits], device=model.device)
        dist.all_reduce(least, reduce_operation="MIN")
        if not int(least):
            raise ValueError("eval.batch_size: not one image fits the memory that is left. Lower eval.image_size.")
        self.batch_size = int(least)
        if self.on_batch_size is not None:
            self.on_batch_size(self.batch_size)
        return self.batch_size

    def _fits(self, model: LatentDiffusion, size: int) -> bool:
        """Try to generate and measure this many images at once."""
        try:
            text, shape = model.family.tokenize([""] * size), model.family.latent_shape(self.size)
            guidance = max(self.config.guidances())
            sampling: dict[str, Any] = dict(sampler=self.config.sampler, steps=MIN_STEPS, guidance=guidance)
            images = model.generate(text, torch.zeros(size, *shape), **sampling)
            self.meter.add(images, range(size), [""] * size)
            return True
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            torch.cuda.empty_cache()

    def score(self, model: LatentDiffusion, guidance: float) -> dict[str, Any]:
        """Generate an image for each prompt and score them. All ranks call it and get the same score.

        Its seconds include earlier starts of this evaluation, as far as their parts were saved.

        Raises:
            ValueError: images or features are not finite; names the prompts.
            collectives.Signalled: a rank has received a signal; the sums so far are saved.
        """
        began = time.monotonic()
        batch_size = self.find_batch_size(model)
        sampling = dict(sampler=self.config.sampler, steps=self.config.steps, guidance=guidance)
        self.meter.reset()
        with self.meter.on(model.device):
            self.progress = progress = self._begin(model, guidance, began)
            how: Any = dict(
                size=self.size, seed=self.seed, sampling=sampling, signal=self.signal, num_done=progress.num_done
            )
            bar = tqdm(
                total=progress.num_images,
                initial=min(progress.num_done * batch_size, progress.num_images),
                desc="evaluation",
                unit="image",
                mininterval=progress_interval_sec(),
                disable=not (self.show_progress and dist.get_global_rank() == 0),
            )
            try:
                for chunk, images in generate_chunks(model, self.prompt_set.prompts, batch_size, **how):
                    captions = [prompt.caption for prompt in chunk]
                    self.meter.add(images, [prompt.number for prompt in chunk], captions)
                    wanted = min(progress.num_wanted, len(chunk))
                    progress.add(captions[:wanted], as_bytes(images[:wanted]) if wanted else images[:0])
                    bar.update(len(chunk))
            except Signalled:
                progress.stop()
                raise
            finally:
                bar.close()
            figures = self.meter.figures()
        self.samples = gather_images(progress.samples) if self.config.samples else []
        seconds = progress.seconds
        measured = {"eval_sec": seconds, "eval_images_per_sec": len(self.prompt_set.prompts) / seconds}
        return {**figures, **self.settings(guidance), **measured}

    def _begin(self, model: LatentDiffusion, guidance: float, began: float) -> EvaluationProgress:
        """Begin an evaluation, or resume its saved parts."""
        rank, num_ranks, identity = dist.get_global_rank(), dist.get_world_size(), [""]
        if self.parts is not None:
            if rank == 0 or model.in_step:
                identity[0] = self._identity(model, guidance)
            dist.broadcast_object_list(identity)
        return EvaluationProgress(
            self.parts,
            identity[0],
            self.meter,
            num_images=len(split_by_rank(len(self.prompt_set.prompts), rank, num_ranks)),
            batch_size=self.find_batch_size(model),
            num_samples=len(range(rank, self.config.samples, num_ranks)),
            began=began,
        )

    def _identity(self, model: LatentDiffusion, guidance: float) -> str:
        """Return the text that identifies this evaluation."""
        of: dict[str, Any] = {"weights": fingerprint(model), "encoders": dict(model.encoders.fingerprints)}
        of |= {"samples": self.config.samples, "ranks": dist.get_world_size(), **self.settings(guidance)}
        return json.dumps(of, sort_keys=True)

    def remove_parts(self) -> None:
        """Remove the parts of the last score, which is written."""
        if self.progress is not None:
            self.progress.finish()


def sampler_problems(config: EvalConfig, objective: ObjectiveConfig) -> list[tuple[str, str]]:
    """(key, message) where the sampler cannot sample what a network was trained on; `objective`: without null."""
    assert objective.prediction is not None
    trained_on: dict[str, Any] = dict(prediction=objective.prediction, zero_terminal_snr=objective.zero_terminal_snr)
    sampler = config.sampler or default_sampler(objective.prediction)
    return [(f"eval.{key}", text) for key, text in sampling_problems(sampler, MIN_STEPS, 1.0, **trained_on)]


def rounded_up(every_images: int, global_batch_size: int) -> int:
    """Round an interval in images up to whole batches: CEIL(every / batch) x batch, as in the MLPerf rules."""
    return -(-every_images // global_batch_size) * global_batch_size
