"""Make COCO 2014's validation sets as MLPerf's benchmarks have them: captions, and images of one size.

    python -m prepare.coco datasets/coco2014
    python -m prepare.coco datasets/coco2014 subset=flux
    python -m prepare.coco datasets/coco2014 images=/data/val2014.zip annotations=/data/annotations_trainval2014.zip

OUT: a folder. What is made in it, of Stable Diffusion v2's benchmark:
    downloads/              val2014.zip and annotations_trainval2014.zip, compared with their SHA-1s; 6 GB
    val2014_30k.tsv         30,000 captions with image_id and id; eval.prompts reads it
    val2014_30k/            their images at 512 x 512 px: COCO_val2014_000000000042.jpg
and with subset=flux, of the validation of FLUX.1's:
    val2014_flux.tsv        29,696 captions, each with its timestep, 0 to 7
    val2014_flux/           tars of 1,000 samples at 256 x 256 px: KEY.png, .txt, .json; prepare.shards reads them

The captions, of both benchmarks: all captions in the order of captions_val2014.json, line feeds taken out (nothing in their
place) and blanks at both ends stripped; shuffled by pandas' sample(frac=1, random_state=2023); of each image the first one;
of these the first N; sorted by id; written by pandas' to_csv with tabs. N is 30,000 for Stable Diffusion v2 and 29,696 for
FLUX.1, which gives row n of the sorted table the timestep n mod 8 in a separate column.

Images are resized by PIL's bicubic straight to a square, without keeping their aspect ratio, and saved with PIL's defaults,
gray ones as gray ones, as the references do (a JPEG's quality is 75). They are read from the zip; it is never unpacked.

Sources: mlcommons/training, stable_diffusion/scripts/datasets/coco-split-resize.py and coco-2014-validation-split-resize.sh;
mlcommons/training at 1c759d08, text_to_image/README.md, which names the script of its reference, a fork of
pytorch/torchtitan: experiments/flux/scripts/coco_to_webdataset.py at bdd19fed.

Existing files are not made again. If stopped at any point, the same command resumes: a file appears whole or not at
all. Images that are unreadable are all named in OUT/skipped.jsonl.
Exit code: 0 if all that was asked for is there, 1 if an image is unreadable or the work failed, 2 if it could not start.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from PIL import Image
from tqdm import tqdm

from common.command import command, start
from common.command_line import Problem
from common.errors import ConfigError, Failed, Refused
from common.files import atomic_path, open_regular, read_regular, sync_to_disk, write_atomic
from common.value_types import kind_of_path, limited, truncate
from families.spec import MAX_SIDE_PX
from mds.dataset import is_remote
from mds.images import open_image
from mds.moments import NUM_TIMESTEPS, TIMESTEP_COLUMN
from prepare.addresses import Folder, out_problem, report_write_errors
from prepare.arguments import RESUME_HINT, parse_arguments
from prepare.http_download import FileToFetch, fetch_all
from prepare.parts import SKIPPED_FILE, SampleLog

if TYPE_CHECKING:
    from pandas import DataFrame

SAMPLES_PER_TAR = 1000
MAX_NAMED = 5
IMAGES_HINT = "Give COCO's whole val2014.zip, or a folder with all of its images"
DOWNLOADS = "downloads"
SEED = 2023
CAPTIONS = "captions_val2014.json"
CAPTIONS_HINT = f"Give annotations_trainval2014.zip, or its {CAPTIONS}"
# mlcommons/training, stable_diffusion/scripts/datasets/coco-2014-validation-download.sh: of the images, of the annotations
PUBLISHED_SHA1 = ("fbedd73593f242db65cce6bcefde193fcedcc5c0", "8e0b9df54c175f1688400e98d1a97f292e726870")
ZIPS = {
    "images": FileToFetch(
        "val2014.zip",
        ("http://images.cocodataset.org/zips/val2014.zip",),
        digest=f"sha1:{PUBLISHED_SHA1[0]}",
    ),
    "annotations": FileToFetch(
        "annotations_trainval2014.zip",
        ("http://images.cocodataset.org/annotations/annotations_trainval2014.zip",),
        digest=f"sha1:{PUBLISHED_SHA1[1]}",
    ),
}


@dataclass(frozen=True)
class CocoSubset:
    """A benchmark's set: how many images, their side in px, and its name in OUT."""

    num_images: int
    size: int
    name: str


SUBSETS = {"sd2": CocoSubset(30_000, 512, "val2014_30k"), "flux": CocoSubset(29_696, 256, "val2014_flux")}


@dataclass(frozen=True)
class CocoConfig:
    """The keys of this command."""

    subset: Literal["sd2", "flux"] = "sd2"
    """Whose: sd2, the prompts and images of Stable Diffusion v2's benchmark; flux, the validation of FLUX.1's."""
    num_images: int | None = limited(None, 1, 10**6)
    """Images, each with one caption. null: 30,000 of sd2, 29,696 of flux."""
    size: int | None = limited(None, 1, MAX_SIDE_PX)
    """Side of the images in pixels. null: 512 of sd2, 256 of flux."""
    images: str | None = None
    """val2014.zip, or a folder with its images. null: COCO's own, downloaded."""
    annotations: str | None = None
    """annotations_trainval2014.zip, or captions_val2014.json. null: COCO's own, downloaded."""
    verify: bool = True
    """Compare zips with COCO's SHA-1s. false: for others in COCO's form."""
    workers: int | None = limited(None, 1, 512)
    """Images at once. null: one for each core that this process may use."""

    @property
    def kind(self) -> CocoSubset:
        """The set with what is given of it; another number or size has another name."""
        usual = SUBSETS[self.subset]
        num, size, name = self.num_images or usual.num_images, self.size or usual.size, usual.name
        if num != usual.num_images:
            name = f"{name.removesuffix('_30k')}_{num}"
        return CocoSubset(num, size, name)

    @property
    def images_folder_name(self) -> str:
        """Name in OUT of the folder of images."""
        return self.kind.name + ("" if self.kind.size == SUBSETS[self.subset].size else f"_{self.kind.size}px")


def check(config: CocoConfig) -> list[Problem]:
    """Return every problem that can be found before anything is read."""
    problems = []
    if config.subset == "flux" and config.kind.num_images % NUM_TIMESTEPS:
        text = (
            f"num_images: {config.kind.num_images:,} is not a multiple of the {NUM_TIMESTEPS} timesteps of subset=flux"
        )
        problems.append(Problem(f"{text}. Give such a multiple.", ("num_images", "subset")))
    for key, possible in (("images", ("file", "folder")), ("annotations", ("file",))):
        path = getattr(config, key)
        if path is not None and kind_of_path(path) not in possible:
            problems.append(
                Problem(f"{key}: no {' or '.join(possible)} {truncate(path, 300)}. Check the path.", (key,))
            )
    return problems


# --- the files of COCO ---


def resolve_path(key: str, out: Path, config: CocoConfig) -> Path:
    """Return where COCO's images or annotations are on this machine; fetch them if they are not given.

    Raises:
        Refused: the zip is not COCO's.
        Failed: they cannot be fetched.
    """
    path_argument, wanted = getattr(config, key), ZIPS[key]
    if path_argument is None:
        if failed := fetch_all([wanted], out / DOWNLOADS, argument_name="OUT"):
            raise Failed(f"{key}: {failed[wanted.name]}. {RESUME_HINT}; or give {key}= on this machine.")
        return out / DOWNLOADS / wanted.name
    path = Path(path_argument).expanduser()
    if config.verify and path.is_file() and path.suffix != ".json" and (problem := wanted.find_fault(path, read=True)):
        hint = f"verify=false takes others in COCO's form. Or leave {key} out: COCO's own is downloaded"
        raise Refused(f"{key}: {path} is not COCO's {wanted.name}: {problem}. {hint}.")
    return path


def read_annotations(path: Path) -> list[dict[str, Any]]:
    """Return the captions of captions_val2014.json, or of that file in COCO's zip, with all of their fields.

    Raises:
        Refused: it cannot be read, or is not COCO's captions.
    """
    try:
        captions = json.loads(_read_captions_file(path))["annotations"]
        if not captions:
            raise ValueError("there are none")
        for entry in captions:
            numbers, text = (entry["image_id"], entry["id"]), entry["caption"]
            if not (type(text) is str and all(type(number) is int and 0 <= number < 10**12 for number in numbers)):
                raise ValueError(f"this is no caption: {str(entry)[:80]}")
    except (OSError, zipfile.BadZipFile, zlib.error, RuntimeError, ValueError, LookupError, TypeError) as error:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {str(error)[:120]}"
        raise Refused(f"annotations: {path} cannot be read: {why}. {CAPTIONS_HINT}.") from error
    return list(captions)


def _read_captions_file(path: Path) -> bytes:
    """Return the bytes of a file of captions, or of the one in COCO's zip. Raises OSError, KeyError, zipfile's errors."""
    open_regular(path, None).close()
    if not zipfile.is_zipfile(path):
        return read_regular(path)
    with zipfile.ZipFile(path) as file:
        return file.read(f"annotations/{CAPTIONS}")


# --- images ---

# PIL decodes, resizes and encodes without Python's lock, so that threads are enough, and a killed command leaves none behind.


def image_name(image_id: int, suffix: str = "jpg") -> str:
    """Return the name of an image's file: of COCO's own, and with another suffix of ours."""
    return f"COCO_val2014_{image_id:012}.{suffix}"


def open_images(path: Path, names: Iterable[str]) -> Any:
    """Return the folder of COCO's images, on disk or in the zip: both are read by `(folder / name).read_bytes()`.

    Raises:
        Refused: it is no whole zip, or lacks some of the names.
    """
    try:
        if path.is_dir():
            folder: Any = path / "val2014" if (path / "val2014").is_dir() else path
        else:
            open_regular(path, None).close()
            folder = zipfile.Path(path, "val2014/")
        existing_names = {entry.name for entry in folder.iterdir()}
    except (OSError, zipfile.BadZipFile) as error:
        why = getattr(error, "strerror", None) or f"it is no whole zip: {error}"
        raise Refused(f"images: {path} cannot be read: {why}. {IMAGES_HINT}.") from error
    if missing := sorted(set(names) - existing_names):
        raise Refused(f"images: {path} lacks {len(missing):,} of the images: {_join_some(missing)}. {IMAGES_HINT}.")
    return folder


def resize_image(content: bytes, size: int, kind: str) -> bytes:
    """Return an image's file at size x size px, by PIL's bicubic, as the references make it.

    Args:
        kind: JPEG or PNG, with PIL's defaults.

    Raises:
        SampleError: it is not an image, or has too many pixels.
        Exception: whatever PIL raises for a damaged one.
    """
    with open_image(content) as image:
        resized = image.resize((size, size), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    resized.save(file, kind)
    return file.getvalue()


def write_images(folder: Path, table: DataFrame, fetch_images: Callable[[], Path], size: int, workers: int) -> str:
    """Write each row's image into the folder, those that are not there yet; return a summary for people.

    Args:
        table: with image_id.
        fetch_images: fetches COCO's own, a zip or a folder; called only if some are to be made.
        size: side in px.
        workers: threads.

    Raises:
        Refused: COCO's own are not all there.
        Failed: some are unreadable; the others are made.
        OSError: the folder cannot be written.
    """
    names = [image_name(number) for number in table["image_id"]]
    todo = _missing(folder, names)
    if todo:
        source = open_images(path := fetch_images(), todo)

        def make_image(name: str) -> str:
            content, problem = _resize_file(source / name, size, "JPEG")
            if not problem:
                write_atomic(folder / name, content)
            return problem

        with ThreadPoolExecutor(workers) as pool:
            outcomes = tqdm(pool.map(make_image, todo), total=len(todo), unit=" images", desc="resize")
            problems = {name: problem for name, problem in zip(todo, outcomes, strict=True) if problem}
        sync_to_disk(folder)
        _report_unreadable(problems, path.name, folder.parent)
    return f"{len(names):,} of {size} x {size} px in {folder}, {len(todo):,} of them made now"


def write_tars(folder: Path, table: DataFrame, fetch_images: Callable[[], Path], size: int, workers: int) -> str:
    """Write each row's image, caption and facts into tars of 1,000, as the reference of FLUX.1 does; see `write_images`.

    A sample's key is its image_id with twelve digits. Its JSON has id, caption, filename and timestep.
    """
    rows = list(table[["image_id", "caption", TIMESTEP_COLUMN]].itertuples(index=False, name=None))
    firsts = range(0, len(rows), SAMPLES_PER_TAR)
    shards = {f"shard_{n // SAMPLES_PER_TAR:05d}.tar": rows[n : n + SAMPLES_PER_TAR] for n in firsts}
    todo = _missing(folder, list(shards))
    if todo:
        problems: dict[str, str] = {}
        source = open_images(path := fetch_images(), [image_name(row[0]) for name in todo for row in shards[name]])
        for name in tqdm(todo, unit=" tars", desc="resize"):
            names = [image_name(row[0]) for row in shards[name]]
            with ThreadPoolExecutor(workers) as pool:
                outcomes = list(pool.map(lambda image: _resize_file(source / image, size, "PNG"), names))
            tar_problems = {image: problem for image, (_, problem) in zip(names, outcomes, strict=True) if problem}
            problems |= tar_problems
            if not tar_problems:
                _write_tar(folder / name, shards[name], [content for content, _ in outcomes])
        sync_to_disk(folder)
        _report_unreadable(problems, path.name, folder.parent)
    return f"{len(rows):,} of {size} x {size} px in {len(shards):,} tars in {folder}, {len(todo):,} of them made now"


def _write_tar(path: Path, rows: Sequence[Any], images: Sequence[bytes]) -> None:
    with atomic_path(path) as temporary, tarfile.open(temporary, "w") as tar:
        for (image_id, caption, timestep), image in zip(rows, images, strict=True):
            facts = {
                "id": str(image_id),
                "caption": caption,
                "filename": image_name(image_id, "png"),
                TIMESTEP_COLUMN: timestep,
            }
            files = {"png": image, "txt": caption.encode(), "json": json.dumps(facts, indent=2).encode()}
            for suffix, content in files.items():
                member = tarfile.TarInfo(f"{image_id:012}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def _resize_file(image: Any, size: int, kind: str) -> tuple[bytes, str]:
    """Return an image's file at its size, or what is wrong with it."""
    try:
        return resize_image(image.read_bytes(), size, kind), ""
    except Exception as error:  # decoders raise a dozen classes
        return b"", f"{type(error).__name__}: {error}"


def _missing(folder: Path, names: Sequence[str]) -> list[str]:
    """Return the names that the folder lacks, in order; remove what a killed command has left half written."""
    folder.mkdir(parents=True, exist_ok=True)
    for temporary in folder.glob(".*.tmp"):
        temporary.unlink()
    existing_names = {entry.name for entry in os.scandir(folder)}
    return [name for name in names if name not in existing_names]


def _report_unreadable(problems: dict[str, str], source: str, out: Path) -> None:
    """Raise Failed if images are unreadable: name -> why. All are in skipped.jsonl, some in the message."""
    sample_log = SampleLog(source)
    for name in sorted(problems):
        sample_log.skip(name, problems[name])
    sample_log.write(out / SKIPPED_FILE)
    if problems:
        named = _join_some([f"{name} ({problems[name]})" for name in sorted(problems)])
        text = f"images: {len(problems):,} cannot be read: {named}; reasons: {out / SKIPPED_FILE}"
        raise Failed(f"{text}. {IMAGES_HINT}. {RESUME_HINT}.")


def _join_some(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED:,} more" if len(names) > MAX_NAMED else "")


# --- the steps ---


def choose_captions(captions: Sequence[Mapping[str, Any]], num_images: int, *, timesteps: bool) -> DataFrame:
    """Return the rule's captions as a table, sorted by id; see the head of this file.

    Args:
        captions: of `read_annotations`.
        num_images: how many images, each with one caption.
        timesteps: give each row its timestep, 0 to 7.

    Raises:
        Refused: there are captions of fewer images; or one that is taken has a carriage return, which ends a row.
    """
    import numpy as np
    from pandas import DataFrame

    table = DataFrame(captions)
    table["caption"] = table["caption"].map(lambda text: text.replace("\n", "").strip())
    table = table.sample(frac=1, random_state=SEED).drop_duplicates(subset=["image_id"], keep="first")
    if len(table) < num_images:
        problem = f"num_images: {num_images:,}, but annotations has captions of {len(table):,} images"
        raise Refused(f"{problem}. Possible: 1 to {len(table):,}. Give fewer, or COCO's own {CAPTIONS}.")
    table = table.iloc[:num_images].sort_values(by=["id"])
    if broken := [number for number, text in zip(table["id"], table["caption"], strict=True) if "\r" in text]:
        problem = f"annotations: the caption with id {broken[0]} has a carriage return, which would end its row"
        raise Refused(f"{problem}. {CAPTIONS_HINT}.")
    return table.assign(**{TIMESTEP_COLUMN: np.arange(num_images) % NUM_TIMESTEPS}) if timesteps else table


def write_subset(out: Path, config: CocoConfig, content: bytes) -> None:
    """Write the table of captions, or see that it is the one that is there. Raises Refused: it is another one."""
    path = out / f"{config.kind.name}.tsv"
    if path.exists():
        if path.read_bytes() != content:
            raise Refused(f"OUT: {path} exists and is another one. Remove it with its images, or give another OUT.")
    else:
        write_atomic(path, content)
    print(f"subset: {config.kind.num_images:,} captions in {path}", flush=True)


def make_subset(out: Path, config: CocoConfig) -> int:
    """Do the steps; return the exit code. Raises Refused, Failed: the message says why. OSError: OUT is not writable."""
    kind, is_flux = config.kind, config.subset == "flux"
    table = choose_captions(
        read_annotations(resolve_path("annotations", out, config)), kind.num_images, timesteps=is_flux
    )
    write_subset(out, config, table.to_csv(sep="\t", index=False, lineterminator="\n").encode())
    write, workers = write_tars if is_flux else write_images, config.workers or len(os.sched_getaffinity(0))
    done = write(
        out / config.images_folder_name, table, lambda: resolve_path("images", out, config), kind.size, workers
    )
    print(f"images: {done}", flush=True)
    return 0


@command(keys=CocoConfig)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    paths, config, problems = parse_arguments(argv, CocoConfig, check)
    if config is None:
        return 0
    if len(paths) != 1:
        problems.append("command line: OUT has to be given, and nothing else. python -m prepare.coco --help says more.")
    elif is_remote(paths[0]):
        problems.append(f"OUT: {paths[0]} is in a store. Possible: a folder.")
    elif text := out_problem(paths[0], []):
        problems.append(text)
    if problems:
        raise ConfigError(problems)
    out = Path(paths[0])
    with report_write_errors(out), Folder(str(out)).lock_for_writing():
        return make_subset(out, config)


if __name__ == "__main__":
    start(main)
