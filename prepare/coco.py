"""Make COCO 2014's validation sets as MLPerf's benchmarks have them: captions, images of one size, statistics for FID.

    python -m prepare.coco datasets/coco2014
    python -m prepare.coco datasets/coco2014 inception=/weights/pt_inception-2015-12-05-6726825d.pth
    python -m prepare.coco datasets/coco2014 subset=flux
    python -m prepare.coco datasets/coco2014 images=/data/val2014.zip annotations=/data/annotations_trainval2014.zip

OUT: a folder. What is made in it, of Stable Diffusion v2's benchmark:
    downloads/              val2014.zip and annotations_trainval2014.zip, compared with their SHA-1s; 6 GB
    val2014_30k.tsv         30,000 captions with image_id and id; eval.prompts reads it
    val2014_30k/            their images at 512 x 512 px: COCO_val2014_000000000042.jpg
    val2014_30k_stats.npz   these images' statistics by prepare.fid_statistics, where inception= is given; for eval.statistics
and with subset=flux, of the validation of FLUX.1's:
    val2014_flux.tsv        29,696 captions, each with its timestep, 0 to 7
    val2014_flux/           tars of 1,000 samples at 256 x 256 px: KEY.png, .txt, .json; prepare.shards reads them

The captions, of both benchmarks: all captions in the order of captions_val2014.json, line feeds taken out (nothing in their
place) and blanks at both ends stripped; shuffled by pandas' sample(frac=1, random_state=2023); of each image the first one;
of these the first N; sorted by id; written by pandas' to_csv with tabs. N is 30,000 for Stable Diffusion v2 and 29,696 for
FLUX.1, which gives row n of the sorted table the timestep n mod 8 in a column of its own.

Images are resized by PIL's bicubic straight to a square, without keeping their aspect ratio, and saved with PIL's defaults,
grey ones as grey ones, as the references do (a JPEG's quality is 75). They are read from the zip; it is never unpacked.

Sources: mlcommons/training, stable_diffusion/scripts/datasets/coco-split-resize.py and coco-2014-validation-split-resize.sh;
mlcommons/training at 1c759d08, text_to_image/README.md, which names the script of its reference, a fork of
pytorch/torchtitan: experiments/flux/scripts/coco_to_webdataset.py at bdd19fed.

What is there already is not made again. If stopped at any point, the same command resumes: a file appears whole or not at
all. Images that are unreadable are all named in OUT/skipped.jsonl.
Exit code: 0 if all that was asked for is there, 1 if an image is unreadable or the work failed, 2 if it could not start.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cli.command import command, start
from cli.command_line import Problem
from cli.errors import ConfigError, Failed, Refused
from cli.files import MOST_BYTES, is_bounded, open_regular, read_regular, write_whole
from cli.limits import kind_of_path, limited, shown
from prepare import fid_statistics
from prepare.coco_images import Pictures, image_name, write_images, write_tars
from prepare.names import GO_ON
from prepare.places import Folder, out_problem, writing
from prepare.transfer import Wanted, fetch_all
from prepare.words import read_words
from stages.dataset import is_remote
from stages.moments import NUM_TIMESTEPS, TIMESTEP
from weights.hub_names import parse
from zoo.spec import MAX_SIDE_PX

if TYPE_CHECKING:
    from pandas import DataFrame

DOWNLOADS = "downloads"
SEED = 2023
CAPTIONS = "captions_val2014.json"
GIVE = f"Give annotations_trainval2014.zip, or its {CAPTIONS}"
# mlcommons/training, stable_diffusion/scripts/datasets/coco-2014-validation-download.sh: of the images, of the annotations
PUBLISHED_SHA1 = ("fbedd73593f242db65cce6bcefde193fcedcc5c0", "8e0b9df54c175f1688400e98d1a97f292e726870")
ZIPS = {
    "images": Wanted(
        "val2014.zip",
        ("http://images.cocodataset.org/zips/val2014.zip",),
        digest=f"sha1:{PUBLISHED_SHA1[0]}",
    ),
    "annotations": Wanted(
        "annotations_trainval2014.zip",
        ("http://images.cocodataset.org/annotations/annotations_trainval2014.zip",),
        digest=f"sha1:{PUBLISHED_SHA1[1]}",
    ),
}


@dataclass(frozen=True)
class Kind:
    """A benchmark's set: how many images, their side in px, and its name in OUT."""

    num_images: int
    size: int
    name: str


KINDS = {"sd2": Kind(30_000, 512, "val2014_30k"), "flux": Kind(29_696, 256, "val2014_flux")}


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
    inception: str | None = None
    """Weights for the statistics, as prepare.fid_statistics takes them. null: no statistics."""
    resize: Literal["bilinear299", "bicubic256"] = "bilinear299"
    """How images are resized for that network; must equal eval.resize."""
    batch_size: int = limited(50, 1, 2**16)
    """Images of a pass of that network."""

    @property
    def kind(self) -> Kind:
        """The set with what is given of it; another number and another size have names of their own."""
        usual = KINDS[self.subset]
        num, size, name = self.num_images or usual.num_images, self.size or usual.size, usual.name
        if num != usual.num_images:
            name = f"{name.removesuffix('_30k')}_{num}"
        return Kind(num, size, name)

    @property
    def images_name(self) -> str:
        """Name in OUT of the folder of images."""
        return self.kind.name + ("" if self.kind.size == KINDS[self.subset].size else f"_{self.kind.size}px")


def check(config: CocoConfig) -> list[Problem]:
    """Return every problem that can be found before anything is read."""
    found = []
    if config.subset == "flux" and config.kind.num_images % NUM_TIMESTEPS:
        given = (
            f"num_images: {config.kind.num_images:,} is not a multiple of the {NUM_TIMESTEPS} timesteps of subset=flux"
        )
        found.append(Problem(f"{given}. Give such a multiple.", ("num_images", "subset")))
    for key, possible in (("images", ("file", "folder")), ("annotations", ("file",))):
        path = getattr(config, key)
        if path is not None and kind_of_path(path) not in possible:
            found.append(Problem(f"{key}: no {' or '.join(possible)} {shown(path, 300)}. Check the path.", (key,)))
    if config.inception is not None:
        if config.subset == "flux":
            text = "inception: given, but the validation of subset=flux is a loss, without statistics. Leave it out."
            found.append(Problem(text, ("inception", "subset")))
        elif config.inception != "random" and not parse(config.inception) and kind_of_path(config.inception) != "file":
            text = f"inception: no file {shown(config.inception, 300)}. Give pt_inception-2015-12-05-6726825d.pth"
            found.append(Problem(f"{text}, or random for a trial.", ("inception",)))
    return found


# --- the files of COCO ---


def path_of(key: str, out: Path, config: CocoConfig) -> Path:
    """Return where COCO's images or annotations are on this machine; fetch them if they are not given.

    Raises:
        Refused: the zip is not COCO's.
        Failed: they cannot be fetched.
    """
    given, wanted = getattr(config, key), ZIPS[key]
    if given is None:
        if failed := fetch_all([wanted], out / DOWNLOADS, word="OUT"):
            raise Failed(f"{key}: {failed[wanted.name]}. {GO_ON}; or give {key}= on this machine.")
        return out / DOWNLOADS / wanted.name
    path = Path(given).expanduser()
    if config.verify and path.is_file() and path.suffix != ".json":
        try:
            problem = wanted.fault_of(path, read=True)
        except OSError as error:
            raise Refused(f"{key}: {path} cannot be read: {error.strerror}. Check its permissions.") from error
        if problem:
            others = f"verify=false takes others in COCO's form. Or leave {key} out: COCO's own is downloaded"
            raise Refused(f"{key}: {path} is not COCO's {wanted.name}: {problem}. {others}.")
    return path


def read_annotations(path: Path) -> list[dict[str, Any]]:
    """Return the captions of captions_val2014.json, or of that file in COCO's zip, with all of their fields.

    Raises:
        Refused: it cannot be read, or is not COCO's captions.
    """
    where = f"annotations: {path}"
    try:
        captions = json.loads(_content(path))["annotations"]
        if not captions:
            raise ValueError("there are none")
        for one in captions:
            numbers, text = (one["image_id"], one["id"]), one["caption"]
            if not (type(text) is str and all(type(number) is int and 0 <= number < 10**12 for number in numbers)):
                raise ValueError(f"this is no caption: {str(one)[:80]}")
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error) as error:  # of odd zips, too
        raise Refused(f"{where} cannot be read: {getattr(error, 'strerror', None) or error}. {GIVE}.") from error
    except (ValueError, LookupError, TypeError) as error:
        text = f"{type(error).__name__}: {str(error)[:120]}"
        raise Refused(f"{where} has no list `annotations` of COCO's captions ({text}). {GIVE}.") from error
    return list(captions)


def _content(path: Path) -> bytes:
    """Return the bytes of a file of captions, or of the one in a zip. Raises OSError, zipfile's errors."""
    open_regular(path, None).close()
    if not zipfile.is_zipfile(path):
        return read_regular(path)
    with zipfile.ZipFile(path) as file:
        member = next((one for one in file.infolist() if Path(one.filename).name == CAPTIONS), None)
        if member is None:
            raise zipfile.BadZipFile(f"it has no {CAPTIONS}")
        if member.file_size > MOST_BYTES or not is_bounded(member):
            raise zipfile.BadZipFile(f"{CAPTIONS} is packed in an odd way, or above {MOST_BYTES:,} bytes")
        return file.read(member)


# --- the steps ---


def choose(captions: Sequence[Mapping[str, Any]], num_images: int, *, timesteps: bool) -> DataFrame:
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
        given = f"num_images: {num_images:,}, but annotations has captions of {len(table):,} images"
        raise Refused(f"{given}. Possible: 1 to {len(table):,}. Give fewer, or COCO's own {CAPTIONS}.")
    table = table.iloc[:num_images].sort_values(by=["id"])
    if broken := [number for number, text in zip(table["id"], table["caption"], strict=True) if "\r" in text]:
        given = f"annotations: the caption with id {broken[0]} has a carriage return, which would end its row"
        raise Refused(f"{given}. {GIVE}.")
    return table.assign(**{TIMESTEP: np.arange(num_images) % NUM_TIMESTEPS}) if timesteps else table


def write_subset(out: Path, config: CocoConfig, content: bytes) -> None:
    """Write the table of captions, or see that it is the one that is there. Raises Refused: it is another one."""
    path = out / f"{config.kind.name}.tsv"
    if path.exists():
        if path.read_bytes() != content:
            raise Refused(f"OUT: {path} exists and is another one. Remove it with its images, or give another OUT.")
    else:
        write_whole(path, content)
    print(f"subset: {config.kind.num_images:,} captions in {path}", flush=True)


def make_statistics(out: Path, config: CocoConfig, wanted: set[str]) -> int:
    """Make the statistics of the images, if they are not there. Raises Failed: the folder has other files."""
    folder, path = out / config.images_name, out / f"{config.images_name}_stats.npz"
    if config.inception is None:
        print("statistics: not made, since inception is not given (pt_inception-2015-12-05-6726825d.pth)", flush=True)
        return 0
    if path.exists():
        print(f"statistics: {path} is there", flush=True)
        return 0
    if others := sorted({entry.name for entry in os.scandir(folder)} - wanted):
        raise Failed(f"statistics: {folder} has {len(others):,} other files, e.g. {others[0]}. Remove them.")
    keys = [f"{key}={getattr(config, key)}" for key in ("inception", "resize", "batch_size")]
    return fid_statistics.main(
        [str(folder), str(path), *keys, *([f"workers={config.workers}"] if config.workers else [])]
    )


def make(out: Path, config: CocoConfig) -> int:
    """Do the steps; return the exit code. Raises Refused, Failed: the message says why. OSError: OUT is not writable."""
    kind, is_flux = config.kind, config.subset == "flux"
    table = choose(read_annotations(path_of("annotations", out, config)), kind.num_images, timesteps=is_flux)
    write_subset(out, config, table.to_csv(sep="\t", index=False, lineterminator="\n").encode())
    write, workers = write_tars if is_flux else write_images, config.workers or len(os.sched_getaffinity(0))
    done = write(out / config.images_name, table, lambda: Pictures(path_of("images", out, config)), kind.size, workers)
    print(f"images: {done}", flush=True)
    return 0 if is_flux else make_statistics(out, config, {image_name(number) for number in table["image_id"]})


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    places, config, problems = read_words(argv, CocoConfig, check)
    if config is None:
        return 0
    if len(places) != 1:
        problems.append("command line: OUT has to be given, and nothing else. python -m prepare.coco --help says more.")
    elif is_remote(places[0]):
        problems.append(f"OUT: {places[0]} is in a store. Possible: a folder.")
    elif text := out_problem(places[0], []):
        problems.append(text)
    if problems:
        raise ConfigError(problems)
    out = Path(places[0])
    with writing(out), Folder(str(out)).only_writer():
        return make(out, config)


if __name__ == "__main__":
    start(main)
