"""A small miniature for end-to-end tests: its data with few images, and the command-line words of its runs.

It has every part of a run, with the encoders and scoring networks of families/shapes_weights. So a test of seconds shows what
happens in a long run. Tests about SD2, synthetic data and images of many sizes have other fixtures, see conftest.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT, tree

WEIGHTS = ROOT / "families/shapes_weights"
READER = f"inception={WEIGHTS}/reader/model.safetensors"
NUM_IMAGES, NUM_PROMPTS = 192, 32

SMALL = [
    "model.preset=tiny",
    "global_batch_size=8",
    "max_duration=4ba",
    "schedule.name=constant",  # a cosine would end with the run, so that it could not go on
    "schedule.warmup_batches=0",
    "measure.window_batches=2",
    "measure.warmup_batches=2",
    "eval.when=off",
    "eval.steps=3",
    "target.fid=null",
    "target.clip=null",
    "mlperf.enabled=false",
]


@dataclass(frozen=True)
class Miniature:
    """Where its parts lie, made once and only read: 192 captioned pictures of 32 px, and 32 prompts."""

    folder: Path
    images: Path
    moments: Path
    reference: Path
    statistics: Path
    prompts: Path

    def words(self, runs: Path, name: str, *more: str) -> list[str]:
        """The words after `benchmark.py` of a run of yamls/shapes.yaml; its epoch is 6 batches of 32."""
        data = [f"data.remote={self.moments}", "data.local=null", "data.workers=0"]
        scored = [f"eval.prompts={self.prompts}", f"eval.statistics={self.statistics}", "eval.samples=4"]
        scored += [f"eval.{READER}", f"eval.clip={WEIGHTS}/clip/model.safetensors"]
        own = ["loggers.progress_bar=false", f"run_folder={runs}", f"run_name={name}"]
        return [str(ROOT / "yamls/shapes.yaml"), *data, *scored, *own, *more]

    def small(self, runs: Path, name: str, *more: str) -> list[str]:
        """Those of a short run of the tiny network, not evaluated, where only mechanics matter: 24 batches of 8 an epoch."""
        return self.words(runs, name, *SMALL, *more)


def make(folder: Path) -> Miniature:
    """Make what `make miniature` makes, of fewer pictures and in several shards."""
    from prepare import fid_statistics, latents, shapes, shards

    names = ("images", "moments", "reference", "reference.npz", "prompts.tsv")
    made = Miniature(folder, *(folder / name for name in names))
    tars, images, moments, shard = str(made.folder / "tars"), str(made.images), str(made.moments), "shard_size=32kb"
    assert shapes.main([tars, f"num_images={NUM_IMAGES}"]) == 0
    assert shards.main([tars, images, shard]) == 0
    assert latents.main([images, moments, "model.family=shapes", "image_size=32", shard]) == 0
    assert shapes.main([str(made.reference), "num_images=256", "part=reference", "layout=files"]) == 0
    assert fid_statistics.main([str(made.reference), str(made.statistics), READER]) == 0
    assert shapes.main([str(made.prompts), f"num_images={NUM_PROMPTS}", "part=prompts"]) == 0
    return made


@pytest.fixture(scope="session")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Miniature]:
    """The data of whole runs, see `make`."""
    made = make(tmp_path_factory.mktemp("miniature"))
    before = tree(made.folder)
    yield made
    assert tree(made.folder) == before, "a test has changed what all share"
