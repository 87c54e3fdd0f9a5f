"""The weights that a run begins with: random ones, `model.denoiser`, or a base with an adapter."""

from __future__ import annotations

from cli import ranks
from cli.errors import ConfigError
from cli.log import log
from config import flat
from model import LatentDiffusion
from training import adapter, warm_start
from training.resume import RunState
from training.run_config import RunConfig
from training.sharding import is_sharded
from weights.tensors import fingerprint
from zoo import mlperf


def load_start(config: RunConfig, model: LatentDiffusion, run: RunState) -> str | None:
    """Bring the denoiser to where training begins, and tell the user what is worth knowing about a run's weights.

    A run that goes on has its weights in its checkpoint. Only one with an adapter needs its base again.

    Returns:
        the fingerprint of the weights that it begins with, None for random ones without an adapter.

    Raises:
        ConfigError: the adapter in the run's checkpoint has another base.
    """
    notes, start = [f"model.weights: {note}" for note in model.encoders.notes], None
    saved = None if run.checkpoint is None else run.checkpoint[1]["identity"].get("denoiser_start")
    if config.lora.is_given:
        added, start = add_adapter(config, model)
        notes += added
        if run.checkpoint is not None and saved != start:
            raise ConfigError([adapter.other_base(start, str(run.checkpoint[0]), saved)])
    elif run.checkpoint is not None:
        start = saved
    elif config.model.denoiser is not None:
        place = config.model.denoiser

        def begun() -> tuple[list[str], str]:
            return warm_start.load(model, place), fingerprint(model.denoiser)

        loaded, start = ranks.on_rank_zero(begun) if is_sharded(config) else begun()  # which alone has it then
        notes += [f"model.denoiser: {note}" for note in loaded]
    if benchmark := mlperf.benchmark_of(config.model.family, config.model.variant):
        deviations = benchmark.deviations(flat(config), config.mlperf.ruleset)
        notes += [f"model.variant: mlperf, but {text.rstrip('.')}." for text in deviations]
    for note in notes:
        log.info(note)
    return start


def add_adapter(config: RunConfig, model: LatentDiffusion) -> tuple[list[str], str]:
    """Load the base and add the adapter of a resolved run; return notes for the user, and the base's fingerprint."""
    assert config.precision is not None
    notes = []
    if config.model.denoiser is not None:
        notes += [f"model.denoiser: {note}" for note in warm_start.load(model, config.model.denoiser)]
    base = fingerprint(model.denoiser)
    adapter.add(model, config.lora, base=base, seed=config.seed, precision=config.precision)
    return notes, base
