"""A set of buckets in a folder or a store: a stage for each size, and the two files that make them one data set.

OUT/plan.json                 the inputs and settings, as of any stage (prepare/parts.py)
OUT/576x448/                  a stage for each size that has samples
OUT/skipped.jsonl             those of all of them
OUT/index.json                an index without shards
OUT/dataset.json              and, last, the sizes and the number of samples (stages/dataset.py reads it)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cli.limits import ImageSize
from prepare.counts import SKIPPED_FILE
from prepare.parts import Plan
from prepare.places import Place
from stages.dataset import FACTS_FILE, write_facts


def bucket_name(size: ImageSize) -> str:
    """Return the name of a bucket, which is its folder's."""
    return f"{size[0]}x{size[1]}"


def plan_of_set(
    made_by: str, stage: str, shard_size: int, sizes: Sequence[ImageSize], facts: Mapping[str, Any]
) -> Plan:
    """Return the plan of a set; each bucket has one of its own."""
    return Plan(made_by, stage, {}, shard_size, {**facts, "sizes": [bucket_name(size) for size in sizes]}, [])


def finish_set(place: Place, plan: Plan, samples: Mapping[ImageSize, int]) -> None:
    """Make the finished buckets one data set, if it is not yet. `samples`: of each size; those without any are left out."""
    if FACTS_FILE in place.names():
        return
    facts = {key: value for key, value in plan.facts.items() if key != "sizes"}
    facts["buckets"] = [bucket_name(size) for size, num in samples.items() if num]
    of_buckets = [place.read(f"{bucket_name(size)}/{SKIPPED_FILE}") for size in samples]
    place.put_bytes(SKIPPED_FILE, b"".join(of_buckets))
    with place.scratch_folder() as folder:
        (folder / "index.json").write_text(json.dumps({"version": 2, "shards": []}))
        write_facts(folder, plan.stage, {"made_by": plan.made_by, **facts, "samples": sum(samples.values())})
        place.put("index.json", folder / "index.json")
        place.put(FACTS_FILE, folder / FACTS_FILE)
    place.clear_scratch()
