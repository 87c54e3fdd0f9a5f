"""Convert image-caption pairs into the dataset `images`, videos into `videos`, or MLPerf's moments into `moments`.

    python -m prepare.shards SOURCE... OUT
    python -m prepare.shards clips/ /data/videos
    python -m prepare.shards laion/00000.tar laion/00001.tar /data/laion_images
    python -m prepare.shards laion/ s3://bucket/laion_images shard_size=64mb workers=16 min_side_px=256 max_aspect=2
    python -m prepare.shards s3://bucket/photos.csv /data/images image=file caption=short,long
    python -m prepare.shards hf://datasets/OWNER/NAME /data/images split=train

SOURCE, here or at s3://, one of
    a tar, a folder of tars       WebDataset's, img2dataset's: the files of a key are a sample; a key ends at the first dot
    a folder of files             KEY.jpg (.png, .webp, .avif, .bmp, .tif, .gif; .mp4, .webm, .mov, .mkv), KEY.txt, KEY.json;
                                  a key ends at the last dot; not at s3://
    .parquet, .arrow              with the images' bytes, or with paths; a folder of such files
    .csv, .tsv, .jsonl            with paths: relative to the file's folder, absolute, or s3://
    hf://datasets/OWNER/NAME      a Hugging Face dataset on the hub, streamed; or a folder of one, with split=
A sample's image, captions and key have the names that are usual (jpg, image; txt, caption, text, prompt), or those that
image=, caption= and key= give: a suffix, a column, or json:FIELD. What was taken is printed. With several captions the
dataset has a column `captions` of all of them, and the first one in `caption`. Everything else becomes `metadata`. URLs are
not downloaded; img2dataset does that. With videos and no images, or with video=, the dataset is one of `videos`. With the
files that MLPerf's references publish it is one of `moments`; the first sample decides. SD2's is KEY.npy instead of an image.
FLUX.1's is a table with mean, logvar, t5_encodings and clip_encodings; empty= is the folder of t5_empty.npy and
clip_empty.npy, for runs that then need no encoder (prepare/moment_rows.py).
OUT: a folder that is new, empty or from the same command, or an address in a store.

Images are stored with their original bytes and are not encoded again; each is decoded once as a check. Unusable samples are
skipped, counted, and listed with their reasons in OUT/skipped.jsonl; so are sources that cannot be read to their end, and
files that belong to no sample. What min_side_px, max_aspect and min_similarity leave out is counted, but not listed. The last
line has all of these counts.

Each file becomes a part of OUT (prepare/parts.py); of a folder each 1,000 samples, of a table with paths each 10,000 rows. If
stopped at any point, the same command resumes with the missing parts. OUT then has the same bytes as without the stop, with
any number of workers (processes; default: one per core). OUT is a dataset once it has a dataset.json.
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
from tqdm import tqdm

from common.command import command, start
from common.command_line import Problem
from common.errors import ConfigError, Failed, Refused
from common.log import log
from common.value_types import ImageSize, bytes_to_int, limited, size_in_bytes
from families import load_family
from families.sd2 import PIXELS_PER_LATENT
from families.spec import Family
from mds.dataset import is_remote
from mds.images import SampleError, decode_image, size_of
from mds.videos import inspect_video
from prepare import moment_rows
from prepare.addresses import Address, open_address, out_problem, report_write_errors
from prepare.arguments import parse_arguments
from prepare.engines import Engine, EngineKeys, Make, check_engine_keys
from prepare.find_sources import find_sources
from prepare.moment_rows import mds_columns, parse_npy, parse_npy_moments, put_empty_text, tokenize_captions
from prepare.parts import (
    Part,
    Plan,
    SampleCounts,
    begin_dataset,
    check_out_is_shared,
    finish_dataset,
    format_destination,
    make_part,
    parts_to_make,
)
from prepare.samples import (
    CONSTANT,
    Filters,
    LeftOut,
    RequestedFields,
    Sample,
    SampleFields,
    SourceError,
    TableRow,
    check_key,
    choose_fields,
    column_of,
    read_captions,
)
from prepare.sources import IMG2DATASET, MOMENTS_SUFFIX, Source
from prepare.tables import HubKeys, TextTablePart

COLUMNS = {"jpg": "bytes", "caption": "str", "key": "str", "width": "int", "height": "int", "metadata": "json"}
# mp4: the file's bytes, whatever its container; num_frames and fps: as they were counted
VIDEO_COLUMNS = {"mp4": "bytes", "caption": "str", "key": "str", "width": "int", "height": "int"}
VIDEO_COLUMNS |= {"num_frames": "int", "fps": "float64", "metadata": "json"}
MLPERF_FAMILY = ("sd2", "full", "stock")
MLPERF_SIZE = (512, 512)
FIRST_SAMPLES, FIRST_BYTES = 100, 2**26  # of a source, by which the names are chosen


@dataclass(frozen=True)
class ShardsConfig(EngineKeys):
    """The keys of this command."""

    image: str | None = None
    """Column or suffix with the image or its path. null: found by its usual names."""
    video: str | None = None
    """The same of videos: it makes a dataset of them, also of a table. null: videos are found by their suffixes."""
    caption: str | None = None
    """Column, suffix or json:FIELD with the caption; several with commas between. null: found by its usual names."""
    caption_text: str | None = None
    """One caption for all samples, which then need none: a photo of sks dog."""
    key: str | None = None
    """Column with the key. null: found by its usual names, or made from the names and rows of files."""
    config: str | None = None
    """Configuration of a Hugging Face dataset. null: the only one."""
    split: str | None = None
    """Split of a Hugging Face dataset. null: train, or the only one."""
    revision: str | None = None
    """Branch, tag or commit of a dataset on the hub; the commit is kept in the plan. null: its main branch."""
    min_side_px: int | None = limited(None, 1, 16384)
    """Least shorter side: of the image, and of what it was resized from if the metadata has that."""
    max_aspect: float | None = limited(None, 1, 1000)
    """Largest ratio of the longer to the shorter side, of the same sizes."""
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
    def requested_fields(self) -> RequestedFields:
        captions = None if self.caption is None else tuple(name.strip() for name in self.caption.split(","))
        if self.caption_text is not None:
            captions = (f"{CONSTANT}{self.caption_text.strip()}",)
        return RequestedFields(self.video or self.image, captions, self.key)

    @property
    def filters(self) -> Filters:
        return Filters(self.min_side_px, self.max_aspect, self.min_similarity, self.similarity)


def check(config: ShardsConfig) -> list[Problem]:
    """Return every problem that can be found before anything is read."""
    if config.image is not None and config.video is not None:
        return [Problem(f"video: {config.video} is given beside image={config.image}. Give one of them.", ("video",))]
    if config.caption_text is not None and config.caption is not None:
        text = f"caption_text: given beside caption={config.caption}. Give one of them."
        return [Problem(text, ("caption_text", "caption"))]
    if config.caption_text is not None and not config.caption_text.strip():
        return [Problem("caption_text: is empty. Give a caption, or leave it out.", ("caption_text",))]
    if config.similarity is not None and config.min_similarity is None:
        return [Problem("similarity: has no use without min_similarity. Give that, or leave it out.", ("similarity",))]
    return check_engine_keys(config)


@dataclass(frozen=True)
class ShardPlan:
    """A plan, and how its parts are made."""

    plan: Plan
    fields: SampleFields
    to_row: Callable[[Sample], dict[str, Any]]
    """Checks a sample and returns its row. Raises SampleError: it is unusable; LeftOut: not wanted."""
    empty: Mapping[str, np.ndarray] = field(default_factory=dict)
    """States of the empty text, float16 (L, D) or (P,)."""


# ---------------------------------------------------------------------------------------------------------------------
# From a sample to a row
# ---------------------------------------------------------------------------------------------------------------------


def image_row(sample: Sample, fields: SampleFields = IMG2DATASET, filters: Filters | None = None) -> dict[str, Any]:
    """Check one sample and return its row of the dataset `images`. Raises SampleError: unusable; LeftOut: not wanted."""
    check_key(sample.key)
    content = sample.image(fields)
    width, height = size_of(decode_image(content))
    captions, metadata = read_captions(sample, fields), sample.metadata(fields)
    if filters is not None:
        filters.check(width, height, metadata)
    row = {"jpg": content, "width": width, "height": height, "caption": captions[0], "key": sample.key}
    return row | {"metadata": metadata} | ({"captions": captions} if fields.has_several_captions else {})


def video_row(sample: Sample, fields: SampleFields, filters: Filters) -> dict[str, Any]:
    """The same of the dataset `videos`; the file is decoded to its end once."""
    check_key(sample.key)
    content = sample.image(fields)
    captions, metadata = read_captions(sample, fields), sample.metadata(fields)  # before the slow decoding
    video = inspect_video(content)
    filters.check(video.width, video.height, metadata)
    row = {"mp4": content, "width": video.width, "height": video.height}
    row |= {"num_frames": video.num_frames, "fps": video.fps}
    row |= {"caption": captions[0], "key": sample.key, "metadata": metadata}
    return row | ({"captions": captions} if fields.has_several_captions else {})


def moments_row(sample: Sample, family: Family, shape: Sequence[int]) -> dict[str, Any]:
    """Check one sample and return its row of the dataset `moments`. Raises SampleError: it is unusable."""
    check_key(sample.key)
    if MOMENTS_SUFFIX not in sample.files:
        raise SampleError("missing moments")
    moments, [caption] = parse_npy_moments(sample.files[MOMENTS_SUFFIX], shape), read_captions(sample, IMG2DATASET)
    tokens = {name: values[0] for name, values in tokenize_captions(family, [caption]).items()}
    metadata = sample.metadata(IMG2DATASET)
    return {"moments": moments, **tokens, "caption": caption, "key": sample.key, "metadata": metadata}


# ---------------------------------------------------------------------------------------------------------------------
# The plan
# ---------------------------------------------------------------------------------------------------------------------


def inspect_first_samples(
    sources: Sequence[Source], folder: Path, *, image: str | None = None, video: str | None = None
) -> tuple[str, ImageSize, list[Sample], str]:
    """Look at the first samples of each source, up to the first one with images, videos or moments.

    Args:
        folder: for what has to be fetched.
        image, video: the name of images or videos that was asked for.

    Returns:
        the kind of stage, for moments the images' size, px, and the first samples and the name of that source.
    """
    kind, others = None, ([], "")
    images = {"image"} | ({image, column_of(image)} if image else set())
    videos = {"video"} | ({video, column_of(video)} if video else set())
    for source in sources:
        samples: list[Sample] = []
        with contextlib.suppress(SourceError):  # reported when its part is made
            for sample in source.read(None, folder, lambda *_: None):
                samples.append(sample)
                held = sum(len(part) for read in samples for part in read.files.values() if isinstance(part, bytes))
                if len(samples) == FIRST_SAMPLES or held > FIRST_BYTES:
                    break
        samples = [sample for sample in samples if sample.files]
        for sample in samples:
            is_image = isinstance(sample, TableRow) or bool(images & sample.files.keys())
            if video or (not is_image and videos & sample.files.keys()):
                return "videos", MLPERF_SIZE, samples, source.name
            if is_image and kind is None:
                return "images", MLPERF_SIZE, samples, source.name
            if MOMENTS_SUFFIX in sample.files:
                kind = "moments"
                if size := _image_size_of(sample.files[MOMENTS_SUFFIX]):
                    return kind, size, samples, source.name
        others = others if others[0] else (samples, source.name)
    return kind or "images", MLPERF_SIZE, *others


def _image_size_of(content: bytes) -> ImageSize | None:
    """Return the images' size from the moments in an .npy file, or None if their shape fits no size."""
    try:
        shape = parse_npy(content).shape
    except SampleError:
        return None
    if len(shape) != 4 or 0 in shape:
        return None
    size = (shape[3] * PIXELS_PER_LATENT, shape[2] * PIXELS_PER_LATENT)
    wanted = load_family(*MLPERF_FAMILY).columns("moments", size)["moments"].shape
    return size if shape == (1, *wanted) else None


def build_plan(sources: Sequence[Source], config: ShardsConfig, folder: Path) -> ShardPlan:
    """Return the plan for these sources, and how it is done.

    Args:
        folder: for what has to be fetched.

    Raises:
        ValueError: the first samples have not what is asked for; a problem a line.
        OSError: a source cannot be read.
    """
    kind, size, samples, where = inspect_first_samples(sources, folder, image=config.image, video=config.video)
    fields, filters = IMG2DATASET, config.filters
    of_flux = moment_rows.find_flux_fields(samples, where)
    if (kind == "moments" or of_flux) and (config.requested_fields != RequestedFields() or filters != Filters()):
        raise ValueError(f"{where}: holds moments, for which there are no filters and no other names. Leave them out.")
    if of_flux is not None:
        return _build_flux_plan(sources, config, of_flux, samples, where)
    if config.empty is not None:
        raise ValueError(f"empty: {where} has no encodings of FLUX.1, which it belongs to. Leave it out.")
    if kind != "moments" and samples:
        fields = choose_fields(samples, config.requested_fields, where, "video" if kind == "videos" else "image")
        metadata = []
        for sample in samples:
            with contextlib.suppress(SampleError):
                metadata.append(sample.metadata(fields))
        filters.check_names(metadata, where)
    make_row, columns = (video_row, VIDEO_COLUMNS) if kind == "videos" else (image_row, COLUMNS)
    columns = columns | ({"captions": "json"} if fields.has_several_captions else {})
    facts, to_row = {**fields.facts, **filters.facts}, functools.partial(make_row, fields=fields, filters=filters)
    if kind == "moments":
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
    inputs = [source.identify() for source in sources]
    return ShardPlan(
        Plan("prepare.shards", kind, columns, bytes_to_int(config.shard_size), facts, inputs), fields, to_row
    )


def _build_flux_plan(
    sources: Sequence[Source],
    config: ShardsConfig,
    fields: moment_rows.FluxFields,
    samples: Sequence[Sample],
    where: str,
) -> ShardPlan:
    """Return the work on MLPerf's preprocessed samples of FLUX.1. Raises ValueError, OSError: as `build_plan`."""
    preset, size = moment_rows.find_flux_preset(samples, where)
    family = load_family("flux", preset, "mlperf")
    empty = moment_rows.read_empty_text(config.empty, family) if config.empty else {}
    if not empty:
        log.info("empty: not given. A run that drops captions encodes the empty text, and has to build T5 for that.")
    columns, facts = moment_rows.flux_mds_columns(fields, family, size), moment_rows.flux_facts(preset, size, empty)
    to_row = functools.partial(
        moment_rows.flux_row, shapes=moment_rows.flux_shapes(family, size), has_timestep=fields.has_timestep
    )
    inputs = [source.identify() for source in sources]
    plan = Plan("prepare.shards", "moments", columns, bytes_to_int(config.shard_size), facts, inputs)
    return ShardPlan(plan, fields, to_row, empty)


# ---------------------------------------------------------------------------------------------------------------------
# Making the parts
# ---------------------------------------------------------------------------------------------------------------------


def fill_part(
    source: Source, fields: SampleFields, to_row: Callable[[Sample], dict[str, Any]], folder: Path, part: Part
) -> None:
    """Write one source's samples; unusable ones are skipped with their reason."""
    written_keys: set[str] = set()
    try:
        for sample in source.read(fields, folder, part.ignore_file):
            part.read()
            try:
                if sample.problem is not None:
                    raise SampleError(sample.problem)
                if sample.key in written_keys:
                    raise SampleError("duplicate key")
                part.write(to_row(sample))
            except LeftOut as error:
                part.leave_out(str(error))
            except SampleError as error:
                part.skip(sample.key, str(error))
            else:
                written_keys.add(sample.key)
    except SourceError as error:
        part.record_fault(str(error), error.lost)


def make_shard_part(address: Address, shard_plan: ShardPlan, sources: Sequence[Source], number: int) -> SampleCounts:
    """Make one part; in a worker process or in this one."""

    def fill(number: int, part: Part) -> None:
        with address.scratch_folder() as folder:
            fill_part(sources[number], shard_plan.fields, shard_plan.to_row, folder, part)

    return make_part(address, shard_plan.plan, number, fill)


def build_part_maker(address: Address, shard_plan: ShardPlan, sources: Sequence[Source], is_cluster: bool) -> Make:
    """Return what makes a part; called in each worker, which on another node has to see what this one does."""
    if is_cluster:
        check_out_is_shared(address, shard_plan.plan)
    return functools.partial(make_shard_part, address, shard_plan, sources)


def make_parts(address: Address, shard_plan: ShardPlan, engine: Engine) -> SampleCounts:
    """Make every part that is not done, show the progress, and return the counts of what was made."""
    todo, new_counts = parts_to_make(address, shard_plan.plan), SampleCounts()
    with tqdm(unit=" samples", desc=f"{len(todo)} parts", disable=not todo) as progress:
        for _, counts in engine.run(todo):
            progress.update(counts.read)
            new_counts.add(counts)
    return new_counts


def write_dataset(
    sources: Sequence[Source], address: Address, config: ShardsConfig, folder: Path
) -> tuple[SampleCounts, str]:
    """Make the dataset from the sources, or its missing parts.

    Returns:
        The counts over all parts, and a text with the speed of those that were made now.

    Raises:
        ConfigError, Refused, Failed: the message says why.
        OSError: OUT is not writable.
    """
    try:
        shard_plan = build_plan(sources, config, folder)
    except OSError as error:
        raise Refused(f"SOURCE: cannot be read: {error}. Check its permissions.") from error
    except (Failed, Refused):
        raise
    except ValueError as error:
        raise ConfigError(str(error).splitlines()) from error
    if shard_plan.fields != IMG2DATASET:
        print(f"taken: {shard_plan.fields}", flush=True)
    start = functools.partial(build_part_maker, address, shard_plan, sources, config.engine != "local")
    with config.open_engine(start, config.workers) as engine, address.lock_for_writing():
        begin_dataset(address, shard_plan.plan)
        started = time.monotonic()
        new_counts = make_parts(address, shard_plan, engine)
        speed = new_counts.format_speed("samples", time.monotonic() - started)
        put_empty_text(address, shard_plan.empty)
        return finish_dataset(address, shard_plan.plan), speed


@command(keys=ShardsConfig)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    with tempfile.TemporaryDirectory() as folder:
        return _run(argv, Path(folder))


def _run(argv: Sequence[str], folder: Path) -> int:
    paths, config, problems = parse_arguments(argv, ShardsConfig, check)
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
    if config.engine != "local" and any(
        isinstance(source, TextTablePart) and source.path.is_relative_to(folder) for source in sources
    ):
        what = "SOURCE: CSV files and JSON lines at s3:// are read from a copy on this machine, which other nodes do not see"
        problems.append(f"{what}. Possible with engine=ray: a folder that all nodes share; Parquet at s3://; tars.")
    if problems:
        raise ConfigError(problems)
    with report_write_errors(paths[-1]):
        counts, speed = write_dataset(sources, open_address(paths[-1]), config, folder)
    print(f"{counts}{speed}; {format_destination(counts, paths[-1])}")
    return counts.exit_code


if __name__ == "__main__":
    from prepare.shards import main as named  # workers of a cluster know the classes by this module's name

    start(named)
