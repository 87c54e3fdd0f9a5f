"""Convert image-caption pairs from img2dataset into the stage `images`, or MLPerf's moments into the stage `moments`.

    python -m prepare.shards SOURCE... OUT
    python -m prepare.shards laion/00000.tar laion/00001.tar /data/laion_images
    python -m prepare.shards laion/ s3://bucket/laion_images shard_size=64mb workers=16

SOURCE: a tar, a folder of tars, or a folder of files. A sample is the files of one key: KEY.jpg, .png or .webp (the image),
KEY.txt (the caption), and KEY.json (metadata, optional); a key ends at the first dot. With KEY.npy instead of the image, as
the MLPerf reference publishes its moments, the stage is `moments`; the first sample decides. OUT: a folder that is new,
empty or from the same command, or an address in a store.

Images are stored with their original bytes and are not encoded again; each is decoded once as a check. Unusable samples are
skipped, counted, and listed with their reasons in OUT/skipped.jsonl. They are not in the stage.

Each source becomes a part of OUT (prepare/parts.py). If stopped at any point, the same command resumes with the missing
parts. OUT then has the same bytes as without the stop, with any number of workers (processes; default: one per core). OUT is
a stage once it has a dataset.json.
Exit code: 0 if at least one sample was written, 1 if none was or the work failed, 2 if it could not start.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streaming.base.util import bytes_to_int
from tqdm import tqdm

from cli.command import command
from cli.command_line import parse_command_line
from cli.errors import ConfigError, Failed, Refused
from cli.limits import ImageSize, limited, size_in_bytes
from config import load, to_yaml
from prepare.moments import mds_columns, npy_shape, read_npy, tokens_of
from prepare.parts import (
    GO_ON,
    Part,
    Plan,
    SampleCounts,
    begin,
    finish,
    make_part,
    parts_to_make,
    split_words,
    where_to_look,
)
from prepare.places import Place, open_place, out_problem
from prepare.sources import (
    MOMENTS_SUFFIX,
    Sample,
    SourceError,
    check_key,
    find_sources,
    known_by,
    read_caption,
    read_source,
)
from stages.images import SampleError, decode_image
from zoo import load_family
from zoo.sd2 import PIXELS_PER_LATENT
from zoo.spec import Family

COLUMNS = {"jpg": "bytes", "caption": "str", "key": "str", "width": "int", "height": "int", "metadata": "json"}
MLPERF_FAMILY = ("sd2", "full", "stock")
MLPERF_SIZE = (512, 512)


@dataclass(frozen=True)
class ShardsConfig:
    """The keys of this command."""

    shard_size: str = size_in_bytes("64mb", 1024, 2**32 - 1, "1kb to 4gb")  # MDS counts in 32 bits
    """Size of a shard."""
    workers: int | None = limited(None, 1, 512)
    """Processes. null: one for each core that this process may use."""


# ---------------------------------------------------------------------------------------------------------------------
# From a sample to a row
# ---------------------------------------------------------------------------------------------------------------------


def image_row(sample: Sample) -> dict[str, Any]:
    """Check one sample and return its row of the stage `images`. Raises SampleError: it is unusable."""
    check_key(sample.key)
    if "image" not in sample.files:
        raise SampleError("missing image")
    image = decode_image(sample.files["image"])
    row = {"jpg": sample.files["image"], "width": image.width, "height": image.height}
    return row | {"caption": read_caption(sample), "key": sample.key, "metadata": _metadata(sample)}


def moments_row(sample: Sample, family: Family, shape: Sequence[int]) -> dict[str, Any]:
    """Check one sample and return its row of the stage `moments`. Raises SampleError: it is unusable."""
    check_key(sample.key)
    if MOMENTS_SUFFIX not in sample.files:
        raise SampleError("missing moments")
    moments, caption = read_npy(sample.files[MOMENTS_SUFFIX], shape), read_caption(sample)
    tokens = {name: values[0] for name, values in tokens_of(family, [caption]).items()}
    return {"moments": moments, **tokens, "caption": caption, "key": sample.key, "metadata": _metadata(sample)}


def _metadata(sample: Sample) -> Any:
    try:
        return json.loads(sample.files.get("json", b"{}"))
    except (ValueError, RecursionError) as error:
        raise SampleError("metadata is not JSON") from error


# ---------------------------------------------------------------------------------------------------------------------
# The plan
# ---------------------------------------------------------------------------------------------------------------------


def peek(sources: Sequence[Path]) -> tuple[str, ImageSize]:
    """Return the kind of stage, from the first sample with an image or moments; and for moments the images' size, px."""
    stage = None
    for source in sources:
        try:
            for sample in read_source(source, ignore=lambda name: None):
                if "image" in sample.files and stage is None:
                    return "images", MLPERF_SIZE
                if MOMENTS_SUFFIX in sample.files:
                    stage = "moments"
                    if size := _size_of(sample.files[MOMENTS_SUFFIX]):
                        return stage, size
        except SourceError:
            continue  # reported when its part is made
    return stage or "images", MLPERF_SIZE


def _size_of(content: bytes) -> ImageSize | None:
    """Return the images' size from the moments in an .npy file, or None if their shape fits no size."""
    try:
        shape = npy_shape(content)
    except SampleError:
        return None
    if len(shape) != 4 or 0 in shape:
        return None
    size = (shape[3] * PIXELS_PER_LATENT, shape[2] * PIXELS_PER_LATENT)
    wanted = load_family(*MLPERF_FAMILY).columns("moments", size)["moments"].shape
    return size if shape == (1, *wanted) else None


def plan_for(sources: Sequence[Path], shard_size: int) -> Plan:
    """Return the plan for these sources."""
    stage, size = peek(sources)
    columns, facts = COLUMNS, {}
    if stage == "moments":
        name, preset, variant = MLPERF_FAMILY
        columns = mds_columns(load_family(*MLPERF_FAMILY), size, text={}, metadata=True)
        facts = {
            "family": name,
            "preset": preset,
            "variant": variant,
            "image_size": list(size),
            # The MLPerf reference feeds images in [0, 1] to its VAE (mlcommons/training, issue 721), and computes in fp32.
            "normalize": "unit",
            "encoders": {"vae": None, "text": None},  # the reference does not name the weights; SD2's
            "precision": "fp32",
            "store_text": False,
        }
    return Plan("prepare.shards", stage, columns, shard_size, facts, [known_by(source) for source in sources])


# ---------------------------------------------------------------------------------------------------------------------
# Making the parts
# ---------------------------------------------------------------------------------------------------------------------


def fill_part(sources: Sequence[Path], to_row: Callable[[Sample], dict[str, Any]], number: int, part: Part) -> None:
    """Write one source's samples; unusable ones are skipped with their reason."""
    seen: set[str] = set()
    try:
        for sample in read_source(sources[number], part.ignore):
            part.read()
            try:
                if sample.key in seen:
                    raise SampleError("duplicate key")
                part.write(to_row(sample))
            except SampleError as error:
                part.skip(sample.key, str(error))
            else:
                seen.add(sample.key)
    except SourceError as error:
        part.fault(str(error))


def make_one(place: Place, plan: Plan, sources: Sequence[Path], number: int) -> SampleCounts:
    """Make one part; in a worker process or in this one."""
    to_row = image_row
    if plan.stage == "moments":
        family, size = load_family(*MLPERF_FAMILY), tuple(plan.facts["image_size"])
        to_row = functools.partial(moments_row, family=family, shape=family.columns("moments", size)["moments"].shape)
    return make_part(place, plan, number, functools.partial(fill_part, sources, to_row))


def make_parts(place: Place, plan: Plan, sources: Sequence[Path], workers: int) -> None:
    """Make every part that is not done."""
    todo = parts_to_make(place, plan)
    one = functools.partial(make_one, place, plan, sources)
    workers = min(workers, len(todo))
    if workers <= 1:
        _count((functools.partial(one, number) for number in todo), len(todo))
        return
    fork = multiprocessing.get_context("fork")  # `_end_with_parent` needs fork
    with concurrent.futures.ProcessPoolExecutor(workers, fork, _end_with_parent, (os.getpid(),)) as pool:
        futures = [pool.submit(one, number) for number in todo]
        try:
            _count((future.result for future in concurrent.futures.as_completed(futures)), len(todo))
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _count(results: Any, num_parts: int) -> None:
    """Wait for each part's counts and show the progress."""
    with tqdm(unit=" samples", desc=f"{num_parts} parts", disable=not num_parts) as progress:
        for result in results:
            progress.update(result().read)


def write_stage(sources: Sequence[Path], place: Place, config: ShardsConfig) -> SampleCounts:
    """Make the stage from the sources, or its missing parts. Raises Refused, Failed, or OSError: OUT is not writable."""
    try:
        plan = plan_for(sources, bytes_to_int(config.shard_size))
    except OSError as error:
        raise Refused(f"SOURCE: cannot be read: {error}. Check its permissions.") from error
    with place.only_writer():
        begin(place, plan)
        make_parts(place, plan, sources, config.workers or len(os.sched_getaffinity(0)))
        return finish(place, plan)


def _end_with_parent(parent: int) -> None:
    """End this worker soon after its parent was killed; otherwise it would wait for the pool's queue forever."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    paths, words = split_words(argv)
    command_line = parse_command_line(words, {})
    problems, config, sources = [], ShardsConfig(), []
    try:
        config = load(ShardsConfig, command_line, not_yet={}, check=lambda config: [])
    except ConfigError as error:
        problems += error.problems
    if command_line.print_config and not problems:
        print(to_yaml(config), end="")
        return 0
    if len(paths) < 2:
        problems.append("command line: SOURCE... and OUT have to be given. python -m prepare.shards --help says more.")
    else:
        try:
            sources = find_sources([Path(path) for path in paths[:-1]])
        except (ValueError, OSError) as error:
            problems.append(str(error))
        problem = out_problem(paths[-1], [path for path in paths[:-1] if Path(path).is_dir()])
        problems += [problem] if problem else []
    if problems:
        raise ConfigError(problems)
    try:
        counts = write_stage(sources, open_place(paths[-1]), config)
    except OSError as error:
        raise Failed(f"OUT: {paths[-1]} cannot be written: {error}. {GO_ON}.") from error
    except concurrent.futures.BrokenExecutor as error:
        text = "workers: one was killed, perhaps for want of memory"
        raise Failed(f"{text}. {GO_ON}; workers=1 takes least.") from error
    print(f"{counts}; {where_to_look(counts, paths[-1])}")
    return 0 if counts.written else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
