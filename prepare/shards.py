"""Convert image-caption pairs into the stage `images`, films into `videos`, or MLPerf's moments into `moments`.

    python -m prepare.shards SOURCE... OUT
    python -m prepare.shards films/ /data/videos
    python -m prepare.shards laion/00000.tar laion/00001.tar /data/laion_images
    python -m prepare.shards laion/ s3://bucket/laion_images shard_size=64mb workers=16 min_side_px=256 max_aspect=2
    python -m prepare.shards s3://bucket/pictures.csv /data/images image=file caption=short,long
    python -m prepare.shards hf://datasets/OWNER/NAME /data/images split=train

SOURCE, here or at s3://, one of
    a tar, a folder of tars       WebDataset's, img2dataset's: the files of a key are a sample; a key ends at the first dot
    a folder of files             KEY.jpg (.png, .webp, .avif, .bmp, .tif, .gif; .mp4, .webm, .mov, .mkv), KEY.txt, KEY.json;
                                  a key ends at the last dot; not at s3://
    .parquet, .arrow              with the images' bytes, or with paths; a folder of such files
    .csv, .tsv, .jsonl            with paths: relative to the file's folder, absolute, or s3://
    hf://datasets/OWNER/NAME      a Hugging Face data set on the hub, streamed; or a folder of one, with split=
A sample's image, captions and key have the names that are usual (jpg, image; txt, caption, text, prompt), or those that
image=, caption= and key= give: a suffix, a column, or json:FIELD. What was taken is printed. With several captions the stage
has a column `captions` of all of them, and the first one in `caption`. Everything else becomes `metadata`. URLs are
img2dataset's business. With films and no images, or with video=, the stage is `videos`. With what
MLPerf's references publish it is `moments`; the first sample decides. SD2's is KEY.npy instead of the image. FLUX.1's is
a table with mean, logvar, t5_encodings and clip_encodings; empty= is the folder
of t5_empty.npy and clip_empty.npy, for runs that then need no encoder (prepare/flux_encodings.py).
OUT: a folder that is new, empty or from the same command, or an address in a store.

Images are stored with their original bytes and are not encoded again; each is decoded once as a check. Unusable samples are
skipped, counted, and listed with their reasons in OUT/skipped.jsonl; so are sources that cannot be read to their end, and
files that belong to no sample. What min_side_px, max_aspect and min_similarity leave out is counted, but not listed. The last
line has all of these counts.

Each file becomes a part of OUT (prepare/parts.py); of a folder each 1,000 samples, of a table with paths each 10,000 rows. If
stopped at any point, the same command resumes with the missing parts. OUT then has the same bytes as without the stop, with
any number of workers (processes; default: one per core). OUT is a stage once it has a dataset.json.
Exit code: 0 if samples were written, 1 if none was, a source was not read to its end, or the work failed; 2 if it could not
start.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from streaming.base.util import bytes_to_int
from tqdm import tqdm

from cli.command import command, start
from cli.command_line import Problem
from cli.errors import ConfigError, Failed, Refused
from cli.limits import ImageSize, limited, size_in_bytes
from cli.log import log
from prepare import flux_encodings
from prepare.counts import SampleCounts, where_to_look
from prepare.engines import Engine, EngineKeys, Make, check_keys
from prepare.filters import Filters, LeftOut
from prepare.find import find_sources
from prepare.hub_datasets import HubKeys
from prepare.moments import mds_columns, npy_values, put_empty_text, read_npy, tokens_of
from prepare.parts import (
    Part,
    Plan,
    begin,
    check_shared,
    finish,
    make_part,
    parts_to_make,
)
from prepare.places import Place, open_place, out_problem, writing
from prepare.samples import Asked, Row, Sample, SourceError, Taken, check_key, choose, column_of, read_captions
from prepare.sources import IMG2DATASET, MOMENTS_SUFFIX, Source
from prepare.tables import Lines
from prepare.words import read_words
from stages.dataset import is_remote
from stages.images import SampleError, decode_image, size_of
from stages.videos import inspect_film
from zoo import load_family
from zoo.sd2 import PIXELS_PER_LATENT
from zoo.spec import Family

COLUMNS = {"jpg": "bytes", "caption": "str", "key": "str", "width": "int", "height": "int", "metadata": "json"}
VIDEO_COLUMNS = {"mp4": "bytes", "caption": "str", "key": "str", "width": "int", "height": "int"}
VIDEO_COLUMNS |= {
    "num_frames": "int",
    "fps": "float64",
    "metadata": "json",
}  # num_frames as counted, mp4 of any container
MLPERF_FAMILY = ("sd2", "full", "stock")
MLPERF_SIZE = (512, 512)
FIRST_SAMPLES, FIRST_BYTES = 100, 2**26  # of a source, by which the names are chosen


@dataclass(frozen=True)
class ShardsConfig(EngineKeys):
    """The keys of this command."""

    image: str | None = None
    """Column or suffix with the image or its path. null: found by its usual names."""
    video: str | None = None
    """The same of videos: it makes a stage of them, also of a table. null: films are found by their suffixes."""
    caption: str | None = None
    """Column, suffix or json:FIELD with the caption; several with commas between. null: found by its usual names."""
    key: str | None = None
    """Column with the key. null: found by its usual names, or made from the names and rows of files."""
    config: str | None = None
    """Configuration of a Hugging Face data set. null: the only one."""
    split: str | None = None
    """Split of a Hugging Face data set. null: train, or the only one."""
    revision: str | None = None
    """Branch, tag or commit of a data set on the hub; the commit is kept in the plan. null: its main branch."""
    min_side_px: int | None = limited(None, 1, 16384)
    """Least shorter side: of the image, and of what it was resized from where the metadata says so."""
    max_aspect: float | None = limited(None, 1, 1000)
    """Most that the longer side is of the shorter one, of the same sizes."""
    min_similarity: float | None = limited(None, -1, 100)
    """Least similarity of image and caption, which the metadata has to have."""
    similarity: str | None = None
    """Field of the metadata with the similarity. null: found by its usual names."""
    empty: str | None = None
    """Folder of the empty text's states that MLPerf publishes with FLUX.1's. null: a run encodes the empty text."""
    shard_size: str = size_in_bytes("64mb", 1024, 2**32 - 1, "1kb to 4gb")  # MDS counts in 32 bits
    """Size of a shard."""
    workers: int | None = limited(None, 1, 512)
    """Processes. null: one for each core that this process may use, or of the cluster."""

    @property
    def asked(self) -> Asked:
        captions = None if self.caption is None else tuple(name.strip() for name in self.caption.split(","))
        return Asked(self.video or self.image, captions, self.key)

    @property
    def filters(self) -> Filters:
        return Filters(self.min_side_px, self.max_aspect, self.min_similarity, self.similarity)


def check(config: ShardsConfig) -> list[Problem]:
    """Return every problem that can be found before anything is read."""
    if config.image is not None and config.video is not None:
        return [Problem(f"video: {config.video} is given beside image={config.image}. Give one of them.", ("video",))]
    if config.similarity is not None and config.min_similarity is None:
        return [Problem("similarity: has no use without min_similarity. Give that, or leave it out.", ("similarity",))]
    return check_keys(config)


@dataclass(frozen=True)
class Work:
    """A plan, and how its parts are made."""

    plan: Plan
    taken: Taken
    to_row: Callable[[Sample], dict[str, Any]]
    """Checks a sample and returns its row. Raises SampleError: it is unusable; LeftOut: not wanted."""
    empty: Mapping[str, np.ndarray] = field(default_factory=dict)
    """States of the empty text, float16 (L, D) or (P,)."""


# ---------------------------------------------------------------------------------------------------------------------
# From a sample to a row
# ---------------------------------------------------------------------------------------------------------------------


def image_row(sample: Sample, taken: Taken = IMG2DATASET, filters: Filters | None = None) -> dict[str, Any]:
    """Check one sample and return its row of the stage `images`. Raises SampleError: it is unusable; LeftOut: not wanted."""
    check_key(sample.key)
    content = sample.image(taken)
    width, height = size_of(decode_image(content))
    captions, metadata = read_captions(sample, taken), sample.metadata(taken)
    if filters is not None:
        filters.check(width, height, metadata)
    row = {"jpg": content, "width": width, "height": height, "caption": captions[0], "key": sample.key}
    return row | {"metadata": metadata} | ({"captions": captions} if taken.several else {})


def video_row(sample: Sample, taken: Taken, filters: Filters) -> dict[str, Any]:
    """The same of the stage `videos`; the file is decoded to its end once."""
    check_key(sample.key)
    content = sample.image(taken)
    captions, metadata = read_captions(sample, taken), sample.metadata(taken)  # before it is decoded, which takes long
    film = inspect_film(content)
    filters.check(film.width, film.height, metadata)
    row = {"mp4": content, "width": film.width, "height": film.height, "num_frames": film.num_frames, "fps": film.fps}
    row |= {"caption": captions[0], "key": sample.key, "metadata": metadata}
    return row | ({"captions": captions} if taken.several else {})


def moments_row(sample: Sample, family: Family, shape: Sequence[int]) -> dict[str, Any]:
    """Check one sample and return its row of the stage `moments`. Raises SampleError: it is unusable."""
    check_key(sample.key)
    if MOMENTS_SUFFIX not in sample.files:
        raise SampleError("missing moments")
    moments, [caption] = read_npy(sample.files[MOMENTS_SUFFIX], shape), read_captions(sample, IMG2DATASET)
    tokens = {name: values[0] for name, values in tokens_of(family, [caption]).items()}
    metadata = sample.metadata(IMG2DATASET)
    return {"moments": moments, **tokens, "caption": caption, "key": sample.key, "metadata": metadata}


# ---------------------------------------------------------------------------------------------------------------------
# The plan
# ---------------------------------------------------------------------------------------------------------------------


def peek(
    sources: Sequence[Source], folder: Path, *, image: str | None = None, video: str | None = None
) -> tuple[str, ImageSize, list[Sample], str]:
    """Look at the first samples of each source, up to the first one with images, videos or moments.

    Args:
        folder: for what has to be fetched.
        image, video: the name of images or videos that was asked for.

    Returns:
        the kind of stage, for moments the images' size, px, and the first samples and the name of that source.
    """
    stage, others = None, ([], "")
    images = {"image"} | ({image, column_of(image)} if image else set())
    videos = {"video"} | ({video, column_of(video)} if video else set())
    for source in sources:
        samples: list[Sample] = []
        with contextlib.suppress(SourceError):  # told when its part is made
            for sample in source.read(None, folder, lambda *_: None):
                samples.append(sample)
                held = sum(len(part) for one in samples for part in one.files.values() if isinstance(part, bytes))
                if len(samples) == FIRST_SAMPLES or held > FIRST_BYTES:
                    break
        samples = [sample for sample in samples if sample.files]
        for sample in samples:
            is_image = isinstance(sample, Row) or bool(images & sample.files.keys())
            if video or (not is_image and videos & sample.files.keys()):
                return "videos", MLPERF_SIZE, samples, source.name
            if is_image and stage is None:
                return "images", MLPERF_SIZE, samples, source.name
            if MOMENTS_SUFFIX in sample.files:
                stage = "moments"
                if size := _size_of(sample.files[MOMENTS_SUFFIX]):
                    return stage, size, samples, source.name
        others = others if others[0] else (samples, source.name)
    return stage or "images", MLPERF_SIZE, *others


def _size_of(content: bytes) -> ImageSize | None:
    """Return the images' size from the moments in an .npy file, or None if their shape fits no size."""
    try:
        shape = npy_values(content).shape
    except SampleError:
        return None
    if len(shape) != 4 or 0 in shape:
        return None
    size = (shape[3] * PIXELS_PER_LATENT, shape[2] * PIXELS_PER_LATENT)
    wanted = load_family(*MLPERF_FAMILY).columns("moments", size)["moments"].shape
    return size if shape == (1, *wanted) else None


def plan_for(sources: Sequence[Source], config: ShardsConfig, folder: Path) -> Work:
    """Return the plan for these sources, and how it is done.

    Args:
        folder: for what has to be fetched.

    Raises:
        ValueError: the first samples have not what is asked for; a problem a line.
        OSError: a source cannot be read.
    """
    stage, size, samples, where = peek(sources, folder, image=config.image, video=config.video)
    taken, filters = IMG2DATASET, config.filters
    of_flux = flux_encodings.find_encodings(samples, where)
    if (stage == "moments" or of_flux) and (config.asked != Asked() or filters != Filters()):
        raise ValueError(f"{where}: holds moments, for which there are no filters and no other names. Leave them out.")
    if of_flux is not None:
        return _work_of_flux(sources, config, of_flux, samples, where)
    if config.empty is not None:
        raise ValueError(f"empty: {where} has no encodings of FLUX.1, which it belongs to. Leave it out.")
    if stage != "moments" and samples:
        taken = choose(samples, config.asked, where, "video" if stage == "videos" else "image")
        metadata = []
        for sample in samples:
            with contextlib.suppress(SampleError):
                metadata.append(sample.metadata(taken))
        filters.check_names(metadata, where)
    make_row, columns = (video_row, VIDEO_COLUMNS) if stage == "videos" else (image_row, COLUMNS)
    columns = columns | ({"captions": "json"} if taken.several else {})
    facts, to_row = {**taken.facts, **filters.facts}, functools.partial(make_row, taken=taken, filters=filters)
    if stage == "moments":
        (name, preset, variant), family = MLPERF_FAMILY, load_family(*MLPERF_FAMILY)
        columns = mds_columns(family, size, text={}, metadata=True)
        shape = family.columns("moments", size)["moments"].shape
        to_row = functools.partial(moments_row, family=family, shape=shape)
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
    inputs = [source.known_by() for source in sources]
    return Work(Plan("prepare.shards", stage, columns, bytes_to_int(config.shard_size), facts, inputs), taken, to_row)


def _work_of_flux(
    sources: Sequence[Source],
    config: ShardsConfig,
    taken: flux_encodings.Encodings,
    samples: Sequence[Sample],
    where: str,
) -> Work:
    """Return the work on MLPerf's preprocessed samples of FLUX.1. Raises ValueError, OSError: as `plan_for`."""
    preset, size = flux_encodings.find_family(samples, where)
    family = load_family("flux", preset, "mlperf")
    empty = flux_encodings.read_empty(config.empty, family) if config.empty else {}
    if not empty:
        log.info("empty: not given. A run that drops captions encodes the empty text, and has to build T5 for that.")
    columns, facts = flux_encodings.mds_columns_of(taken, family, size), flux_encodings.facts_of(preset, size, empty)
    to_row = functools.partial(
        flux_encodings.encodings_row, shapes=flux_encodings.shapes_of(family, size), has_timestep=taken.has_timestep
    )
    inputs = [source.known_by() for source in sources]
    plan = Plan("prepare.shards", "moments", columns, bytes_to_int(config.shard_size), facts, inputs)
    return Work(plan, taken, to_row, empty)


# ---------------------------------------------------------------------------------------------------------------------
# Making the parts
# ---------------------------------------------------------------------------------------------------------------------


def fill_part(
    source: Source, taken: Taken, to_row: Callable[[Sample], dict[str, Any]], folder: Path, part: Part
) -> None:
    """Write one source's samples; unusable ones are skipped with their reason."""
    seen: set[str] = set()
    try:
        for sample in source.read(taken, folder, part.ignore):
            part.read()
            try:
                if sample.problem is not None:
                    raise SampleError(sample.problem)
                if sample.key in seen:
                    raise SampleError("duplicate key")
                part.write(to_row(sample))
            except LeftOut as error:
                part.leave_out(str(error))
            except SampleError as error:
                part.skip(sample.key, str(error))
            else:
                seen.add(sample.key)
    except SourceError as error:
        part.fault(str(error), error.lost)


def make_one(place: Place, work: Work, sources: Sequence[Source], number: int) -> SampleCounts:
    """Make one part; in a worker process or in this one."""

    def fill(number: int, part: Part) -> None:
        with place.scratch_folder() as folder:
            fill_part(sources[number], work.taken, work.to_row, folder, part)

    return make_part(place, work.plan, number, fill)


def begin_parts(place: Place, work: Work, sources: Sequence[Source], is_cluster: bool) -> Make:
    """Return what makes a part; called in each worker, which on another node has to see what this one does."""
    if is_cluster:
        check_shared(place, work.plan)
    return functools.partial(make_one, place, work, sources)


def make_parts(place: Place, work: Work, engine: Engine) -> SampleCounts:
    """Make every part that is not done, show the progress, and return the counts of what was made."""
    todo, made = parts_to_make(place, work.plan), SampleCounts()
    with tqdm(unit=" samples", desc=f"{len(todo)} parts", disable=not todo) as progress:
        for _, counts in engine.run(todo):
            progress.update(counts.read)
            made.add(counts)
    return made


def write_stage(
    sources: Sequence[Source], place: Place, config: ShardsConfig, folder: Path
) -> tuple[SampleCounts, str]:
    """Make the stage from the sources, or its missing parts.

    Returns:
        The counts over all parts, and a text with the speed of those that were made now.

    Raises:
        ConfigError, Refused, Failed: the message says why.
        OSError: OUT is not writable.
    """
    try:
        work = plan_for(sources, config, folder)
    except OSError as error:
        raise Refused(f"SOURCE: cannot be read: {error}. Check its permissions.") from error
    except (Failed, Refused):
        raise
    except ValueError as error:
        raise ConfigError(str(error).splitlines()) from error
    if work.taken != IMG2DATASET:
        print(f"taken: {work.taken}", flush=True)
    start = functools.partial(begin_parts, place, work, sources, config.engine != "local")
    with config.opened(start, config.workers) as engine, place.only_writer():
        begin(place, work.plan)
        started = time.monotonic()
        made = make_parts(place, work, engine)
        speed = made.pace("samples", time.monotonic() - started)
        put_empty_text(place, work.empty)
        return finish(place, work.plan), speed


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    with tempfile.TemporaryDirectory() as folder:
        return _run(argv, Path(folder))


def _run(argv: Sequence[str], folder: Path) -> int:
    paths, config, problems = read_words(argv, ShardsConfig, check)
    sources = []
    if config is None:
        return 0
    if len(paths) < 2:
        problems.append("command line: SOURCE... and OUT have to be given. python -m prepare.shards --help says more.")
    else:
        try:
            sources = find_sources(paths[:-1], HubKeys(config.config, config.split, config.revision), folder)
        except (ValueError, OSError) as error:
            problems.append(str(error))
        problem = out_problem(paths[-1], [path for path in paths[:-1] if is_remote(path) or Path(path).is_dir()])
        problems += [problem] if problem else []
    if config.engine != "local" and any(isinstance(one, Lines) and one.path.is_relative_to(folder) for one in sources):
        what = "SOURCE: CSV files and JSON lines at s3:// are read from a copy on this machine, which other nodes do not see"
        problems.append(f"{what}. Possible with engine=ray: a folder that all nodes share; Parquet at s3://; tars.")
    if problems:
        raise ConfigError(problems)
    with writing(paths[-1]):
        counts, speed = write_stage(sources, open_place(paths[-1]), config, folder)
    print(f"{counts}{speed}; {where_to_look(counts, paths[-1])}")
    return counts.exit_code


if __name__ == "__main__":
    from prepare.shards import main as named  # workers of a cluster know the classes by this module's name

    start(named)
