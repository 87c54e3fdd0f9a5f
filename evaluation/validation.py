"""Validation: the loss on samples that are not trained on, each always at the same time and with the same noise.

    held-out dataset, its first samples in order -> chunks, strided over the ranks -> batches, as in training
    sample n -> its time and noise, see `fixed_draws` -> model -> mean squared error, unweighted, no caption dropped
    errors of all samples, float64 (N,) ---> all-reduced -> mean, and a mean for each bin of the times

So the losses of a run differ by its weights alone. Seed, ranks and resumes do not change them; the size of a chunk, which the
microbatch sets, changes the last bits of a float32. Losses of two runs compare where stage, number of samples, prediction and
schedule are alike.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from common import dist
from common.errors import Failed
from common.log import EVERY_RANK, log
from common.masking import to_printable
from common.value_types import limited
from data import DataConfig, Encodings
from evaluation.scorer import EVERY_IMAGES, rounded_up
from families.sampling import prompt_generator
from mds.dataset import Dataset, find_known_keys, key_digest
from mds.mixture import ResolvedStream, StreamConfig
from mds.moments import NUM_TIMESTEPS, TIMESTEP_COLUMN, MomentsDataset
from mds.reader import BatchDataset
from model import LatentDiffusion, eval_mode
from ranks.collectives import SignalExchange, Signalled

MAX_CHUNK = 64  # samples of a pass: more are no faster, and the last chunk is filled up
NOISE_SEED = 0  # not the run's: runs of two seeds compare
NAMED = 3


@dataclass(frozen=True)
class ValidationConfig:
    """Validation loss on a held-out dataset, by the weights that `eval.weights` says. Its first point is before training."""

    remote: str | None = None
    """Held-out dataset: a folder or an address. null: no validation."""
    local: str | None = None
    """Cache of `remote`, as data.local."""
    every_images: int | None = limited(None, 1)
    """Images between validations. null: 512000."""
    num_samples: int = limited(1000, 10)
    """The dataset's first samples."""
    times: Literal["thousandths", "eighths"] = "thousandths"
    """Times of the samples: evenly spread; eighths: as in MLPerf's FLUX.1."""

    @property
    def is_given(self) -> bool:
        return self.remote is not None

    def identity_of(self, held_out: Dataset) -> dict[str, Any]:
        """Return what a loss depends on besides the weights, as a line of the record names it."""
        num = min(self.num_samples, held_out.num_samples)
        return {"times": self.times, "num_samples": num, "stage_sha256": held_out.index_sha256}

    @functools.cached_property
    def held_out(self) -> StreamConfig:
        """The dataset, which keeps what it has read."""
        return StreamConfig(self.remote, self.local)

    def resolved(self, global_batch_size: int) -> ValidationConfig:
        """Replace null by its value; every_images becomes whole batches."""
        if not self.is_given:
            return self
        resolved = replace(self, every_images=rounded_up(self.every_images or EVERY_IMAGES, global_batch_size))
        vars(resolved)["held_out"] = self.held_out
        return resolved

    def source(self, data: DataConfig, kind: str) -> DataConfig:
        """Return where the held-out samples come from; the rest is as in training. `kind`: of the dataset."""
        none: dict[str, Any] = dict(metadata=None, streams=None, cache_limit=None, num_canonical_nodes=None)
        plain: dict[str, Any] = dict(flip=False, crop="center", shuffle=False, stage=kind)
        section = replace(data, remote=self.remote, local=self.local, **none, **plain)
        vars(section)["sources"] = [self.held_out]
        return section

    def problems(
        self, data: DataConfig, made_for: Mapping[str, Any], encodings: Encodings = lambda size: {}
    ) -> list[tuple[str, str]]:
        """(key, message) for every invalid value, as of the section `data`; the dataset has to fit the run, too."""
        if not self.is_given:
            names = [name for name in ("local", "every_images") if getattr(self, name) is not None]
            text = "not given, but validation.{} is. Give the held-out dataset, or leave both out."
            return [("validation.remote", text.format(names[0]))] if names else []
        if data.synthetic:
            text = "given, but data.synthetic=true: nothing is learned that could be validated. Leave it out."
            return [("validation.remote", text)]
        for key, source in data.named_sources():
            if self.local is not None and source.local is not None and _is_same(self.local, source.local):
                text = f"{self.local} is {key}.local too. Give another folder, or leave it out."
                return [("validation.local", text)]
        try:
            stage = self.held_out.dataset
        except Failed as error:  # its store is away
            raise Failed(f"validation.remote: {error}") from error
        except ValueError as error:
            return [("validation.remote", str(error))]
        if stage.buckets:
            text = f"{stage.location} has buckets, but the losses are of one size. Give a dataset without buckets."
            return [("validation.remote", text)]
        problems = self.source(data, stage.kind).problems(1, made_for, encodings)
        own = {"data.remote": "validation.remote", "data.local": "validation.local"}
        return [
            (own[key], text.replace(" data.remote", " validation.remote").replace(" data.local", " validation.local"))
            if key in own
            else ("validation.remote", f"does not fit this run: {key}: {text}")
            for key, text in problems
        ]


def _is_same(one: str, other: str) -> bool:
    return Path(one).expanduser().resolve() == Path(other).expanduser().resolve()


# --- what is validated ---


OTHERS = "Give a dataset of other samples: a loss on training samples says nothing about others."


def check_apart(held_out: Dataset, trained: Dataset) -> None:
    """Check that two datasets are not one, and have no shard in common. Raises ValueError: they have; names some."""
    where = f"validation.remote: {held_out.location}"
    if held_out.index_sha256 == trained.index_sha256:
        raise ValueError(f"{where} is the dataset that is trained on: its index.json is the same. {OTHERS}")
    known, own = set(trained.digests()), zip(held_out.shards.names, held_out.digests(), strict=True)
    if both := sorted(name for name, digest in own if digest and digest in known):
        text = f"{len(both):,} of its {len(held_out.shards):,} shards are trained on too"
        raise ValueError(f"{where}: {text} ({trained.location}): {_some(both)}. {OTHERS}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(to_printable, names[:NAMED])) + (", ..." if len(names) > NAMED else "")


def check_samples(held_out: BatchDataset, num: int, trained: Sequence[ResolvedStream]) -> None:
    """Check that none of the held-out samples is trained on, as far as both datasets have keys. One rank calls it.

    Args:
        num: the first samples of `held_out` that are used.
        trained: the datasets that are trained on; the list of keys of one in a store is kept in its folder of shards.

    Raises:
        ValueError: some are; says how many, and names some.
    """
    shard: Any = held_out.shards[0]
    has_keys = shard.adopted.key is not None if shard.adopted else "key" in shard.column_names
    of_keys = [(str(one["key"]), key_digest(one)) for one in map(held_out.__getitem__, range(num if has_keys else 0))]
    digests, unknown = np.array([digest for _, digest in of_keys], np.uint64), []
    for stream in trained:
        is_known = find_known_keys(stream.dataset, digests, stream.config.local)
        if is_known is None:
            unknown.append(stream.dataset.location)
        elif is_known.any():
            keys = [key for (key, _), is_in in zip(of_keys, is_known, strict=True) if is_in]
            text = f"{len(keys):,} of {num:,} samples are trained on too ({stream.dataset.location}): {_some(keys)}"
            raise ValueError(f"validation.remote: {text}. {OTHERS}")
    if unknown or not has_keys:
        lacks = f"{_some(unknown)} has no keys.u64" if has_keys else "the held-out dataset has no column key"
        again = "A dataset that prepare.shards or prepare.latents of this version makes has both"
        log.info(f"validation: {lacks}: whether its samples are trained on cannot be checked. {again}.")


# --- how ---


def thousandths_of(numbers: Sequence[int]) -> Tensor:  # -> (B,) int64 in [0, 1000)
    """Return where in the schedule each sample is seen: its number's last three decimal digits in reverse order.

    Of any ten samples in a row each bin has one, and of any thousand each thousandth has one: van der Corput's sequence
    (1935) in base 10, whose parts are as even as can be, however many samples there are.
    """
    return torch.tensor([int(f"{number % 1000:03d}"[::-1]) for number in numbers])


def eighths_of(numbers: Sequence[int]) -> Tensor:  # -> (B,) int64 in [0, 1000)
    """Return the same as MLPerf's FLUX.1 has it: of any eight samples in a row each eighth, from 0 to 7/8, has one.

    mlcommons/training at 1c759d08, text_to_image/README.md, quality metric: the samples take the eight times in turn. That
    is of its table, which is sorted by id; a dataset of moments in another order has the column TIMESTEP, which comes first.
    """
    return torch.tensor([125 * (number % 8) for number in numbers])


def add_timesteps(dataset: BatchDataset) -> bool:
    """Have a dataset of moments give its TIMESTEP, if it has that column, with each batch; return whether it does."""
    shard = dataset.shards[0]
    encodings = dict(zip(shard.column_names, shard.column_encodings, strict=True))
    if not isinstance(dataset, MomentsDataset) or encodings.get(TIMESTEP_COLUMN) != "int":
        return False
    dataset.columns = [{**of_stream, TIMESTEP_COLUMN: ((), "int64", "int64")} for of_stream in dataset.columns]
    return True


TIMES: dict[str, tuple[Callable[[Sequence[int]], Tensor], int]] = {
    "thousandths": (thousandths_of, 10),
    "eighths": (eighths_of, 8),
}
"""Ways to give each sample its time, and how many bins their means have."""


def fixed_draws(model: LatentDiffusion, numbers: Sequence[int], times: str) -> dict[str, Tensor]:
    """Return all random numbers of a step for these samples, on the CPU; a sample's depend on its number alone.

    Args:
        times: a key of TIMES.
    """
    each = [model.draw({"number": torch.tensor([number])}, prompt_generator(NOISE_SEED, number)) for number in numbers]
    draws = {name: torch.cat([draw[name] for draw in each]) for name in each[0] if name != "number"}
    draws["times"] = model.objective.times_at(TIMES[times][0](numbers))
    draws["caption_dropped"] = torch.zeros_like(draws["caption_dropped"])
    return draws


class Validator:
    """Measures a model's loss on the first samples of a dataset.

    Args:
        dataset: the held-out dataset; its batches are read in this process.
        num_samples: how many are used.
        chunk: samples of a pass.
        times: a key of TIMES: when each sample is seen.
        signal: returns the signal that this rank has received, 0: none.
    """

    def __init__(
        self,
        model: LatentDiffusion,
        dataset: BatchDataset,
        *,
        num_samples: int,
        chunk: int,
        times: str = "thousandths",
        signal: Callable[[], int] = lambda: 0,
    ):
        self.model, self.dataset, self.num_samples, self.chunk, self.signal = model, dataset, num_samples, chunk, signal
        self.times, (of_numbers, self.num_bins) = times, TIMES[times]
        self.bins = of_numbers(range(num_samples)) * self.num_bins // 1000
        self.has_timesteps = times == "eighths" and add_timesteps(dataset)
        self.bad: dict[int, str] = {}

    def measure(self) -> dict[str, Any]:
        """Return val_loss, val_loss_bins, bad_samples and val_sec; the same on all ranks.

        Raises:
            collectives.Signalled: a rank has received a signal.
            StreamFailure, ValueError: samples are unavailable.
        """
        began = time.monotonic()
        begins = range(0, self.num_samples, self.chunk)[dist.get_global_rank() :: dist.get_world_size()]
        errors = torch.zeros(self.num_samples, dtype=torch.float64)
        timesteps = torch.zeros(self.num_samples, dtype=torch.int64)
        exchange = SignalExchange(self.signal, len(begins), in_step=self.model.in_step)
        for begin in exchange.iterate_pieces(begins):
            if exchange.has_signal():
                break
            first = begin or 0
            places = range(first, min(first + self.chunk, self.num_samples))
            sample_errors, own = self._errors_of(places)
            if begin is None:  # others in step are not through
                continue
            errors[begin : places.stop] = sample_errors
            if own is not None:
                timesteps[begin : places.stop] = own
            exchange.done()
        if number := exchange.agree_on_signal():
            log.info("validation: stopped by a signal; the next start measures it again.")
            raise Signalled(number)
        # Each place is 0 on all ranks but one: the sum is exact, and the means are taken in the order of the samples.
        errors = errors.to(self.model.device)
        dist.all_reduce(errors, reduce_operation="SUM")
        errors = errors.cpu()
        if self.has_timesteps:
            timesteps = timesteps.to(self.model.device)
            dist.all_reduce(timesteps, reduce_operation="SUM")
            self.bins = timesteps.cpu()
        of_bins = [errors[self.bins == number] for number in range(self.num_bins)]
        return {
            "val_loss": errors.mean().item(),
            "val_loss_bins": [of_bin.mean().item() if len(of_bin) else None for of_bin in of_bins],
            "bad_samples": sum(dist.all_gather_object(len(self.bad))),
            "val_sec": time.monotonic() - began,
        }

    def _errors_of(self, places: range) -> tuple[Tensor, Tensor | None]:  # -> (N,) float64, (N,) int64
        """Return the errors of some samples, and the dataset's own eighths at which they were seen, if it has some.

        A short chunk is filled up with its last one: every pass has one shape.
        """
        model, numbers = self.model, [*places, *[places[-1]] * (self.chunk - len(places))]
        columns = self.dataset.read_batch(np.array(numbers, np.int64))
        for number, key, reason in columns.pop("bad"):
            if number not in self.bad:
                problem = f"sample {number:,} ({to_printable(key)}) cannot be used: {reason}"
                log.info(f"validation: {problem}. The next good one of its shard takes its place.", extra=EVERY_RANK)
                self.bad[number] = reason
        own = columns.pop(TIMESTEP_COLUMN, None)
        columns |= fixed_draws(model, numbers, self.times)
        if own is not None:
            if (wrong := (own < 0) | (own >= NUM_TIMESTEPS)).any():
                first = numbers[int(wrong.nonzero()[0])]
                text = f"validation.remote: sample {first:,} has the timestep {own[wrong][0]}. Possible: 0 to 7"
                raise ValueError(f"{text}. Rebuild the dataset, or set validation.times=thousandths.")
            columns["times"] = model.objective.times_at(125 * own)
        batch = {name: column.to(model.device) for name, column in columns.items()}
        with torch.no_grad(), eval_mode(model.denoiser), model.autocast():
            errors = model.errors(model(batch))
        return errors[: len(places)].double().cpu(), None if own is None else own[: len(places)]
