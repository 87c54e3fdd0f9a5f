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

Which captions are taken: prepare/coco_subset.py. Images are resized by PIL's bicubic straight to a square, without keeping
their aspect ratio, and saved with PIL's defaults, grey ones as grey ones, as the references do (a JPEG's quality is 75).
They are read from the zip; it is never unpacked.

steps= says what is done of download, subset, images, statistics. What is there already is not made again. If stopped at any
point, the same command goes on: a file appears whole or not at all.
Images that are unreadable are all named in OUT/skipped.jsonl.
Exit code: 0 if all that was asked for is there, 1 if an image is unreadable or the work failed, 2 if it could not start.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cli.command import command, start
from cli.command_line import Problem
from cli.errors import ConfigError, Failed, Refused
from cli.files import write_whole
from cli.limits import kind_of_path, limited, shown
from prepare import fid_statistics
from prepare.coco_images import Pictures, write_images, write_tars
from prepare.coco_subset import as_tsv, choose, image_name, read_annotations
from prepare.names import GO_ON
from prepare.places import Folder, out_problem, writing
from prepare.transfer import fetch_all
from prepare.wanted import Memory, Wanted, wrong_digest
from prepare.words import read_words
from stages.dataset import is_remote
from weights.hub_names import parse
from zoo.spec import MAX_SIDE_PX

STEPS = ("download", "subset", "images", "statistics")
DOWNLOADS = "downloads"
URL = ("http://", "https://", "file://")
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
    """val2014.zip or its URL, or a folder with its images. null: COCO's own, downloaded."""
    annotations: str | None = None
    """annotations_trainval2014.zip or its URL, or captions_val2014.json. null: COCO's own, downloaded."""
    verify: bool = True
    """Compare zips with COCO's SHA-1s. false: for others in COCO's form."""
    steps: str | None = None
    """Of download, subset, images, statistics those to do, with commas between. null: all."""
    workers: int | None = limited(None, 1, 512)
    """Images at once. null: one for each core that this process may use."""
    inception: str | None = None
    """Weights for the statistics, as prepare.fid_statistics takes them. null: no statistics."""
    resize: Literal["bilinear299", "bicubic256"] = "bilinear299"
    """How images are resized for that network; must equal eval.resize."""
    batch_size: int = limited(50, 1, 2**16)
    """Images of a pass of that network."""

    @property
    def todo(self) -> tuple[str, ...]:
        """The steps to do."""
        return STEPS if self.steps is None else tuple(word.strip() for word in self.steps.split(","))

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
    if unknown := [word for word in config.todo if word not in STEPS]:
        given = f"steps: {shown(', '.join(unknown))}"
        found.append(Problem(f"{given}. Possible: {', '.join(STEPS)}, with commas between.", ("steps",)))
    if config.subset == "flux" and config.kind.num_images % 8:
        given = f"num_images: {config.kind.num_images:,} is not a multiple of the 8 timesteps of subset=flux"
        found.append(Problem(f"{given}. Nearest: {config.kind.num_images // 8 * 8 or 8:,}.", ("num_images", "subset")))
    for key in ZIPS:
        path = getattr(config, key)
        if path is not None and not path.startswith(URL):
            possible = ("file", "folder") if key == "images" else ("file",)
            if is_remote(path) or kind_of_path(path) not in possible:
                found.append(Problem(f"{key}: no {' or '.join(possible)} {shown(path, 300)}. Check the path.", (key,)))
    if config.inception is not None:
        if config.subset == "flux":
            text = "inception: given, but the validation of subset=flux is a loss, without statistics. Leave it out."
            found.append(Problem(text, ("inception", "subset")))
        elif config.inception != "random" and not parse(config.inception) and kind_of_path(config.inception) != "file":
            text = f"inception: no file {shown(config.inception, 300)}. Give pt_inception-2015-12-05-6726825d.pth"
            found.append(Problem(f"{text}, or random for a trial.", ("inception",)))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The files of COCO
# ---------------------------------------------------------------------------------------------------------------------


def place_of(key: str, out: Path, config: CocoConfig) -> Path:
    """Return where COCO's images or annotations lie on this machine, or will lie once they are downloaded."""
    given = getattr(config, key)
    return Path(given).expanduser() if given and not given.startswith(URL) else out / DOWNLOADS / ZIPS[key].name


def download(key: str, out: Path, config: CocoConfig) -> None:
    """Fetch COCO's images or annotations, and compare them. Raises Refused, Failed: they cannot be had."""
    url, zip_file = getattr(config, key), ZIPS[key]
    wanted = Wanted(zip_file.name, (url,) if url else zip_file.urls, digest=zip_file.digest if config.verify else None)
    [outcome] = fetch_all([wanted], out / DOWNLOADS, word="OUT")
    if outcome.reason:
        instead = f"or give {key}= on this machine"
        raise Failed(f"{key}: {wanted.name} cannot be had: {outcome.reason}. {GO_ON}; {instead}.")
    print(f"download: {out / DOWNLOADS / wanted.name}{'' if outcome.is_fetched else ' is there'}", flush=True)


def found_at(key: str, out: Path, config: CocoConfig) -> Path:
    """Return where the images or annotations lie; fetch them if need be.

    Raises:
        Refused: they are not there, or the zip is not COCO's.
        Failed: they cannot be had.
    """
    path, zip_file = place_of(key, out, config), ZIPS[key]
    if path.parent == out / DOWNLOADS and "download" in config.todo:
        download(key, out, config)
    if not path.exists():
        raise Refused(f"{key}: {path} is not there. Let steps have download, or give {key}= on this machine.")
    is_known = path.parent == out / DOWNLOADS and Memory(path.parent).knows(zip_file)
    if config.verify and path.is_file() and path.suffix != ".json" and not is_known:
        assert zip_file.digest is not None
        try:
            problem = wrong_digest(path, zip_file.digest)
        except OSError as error:
            raise Refused(f"{key}: {path} cannot be read: {error.strerror}. Check its permissions.") from error
        if problem:
            others = f"verify=false takes others in COCO's form. Or leave {key} out: COCO's own is downloaded"
            raise Refused(f"{key}: {path} is not COCO's {zip_file.name}: {problem}. {others}.")
    return path


# ---------------------------------------------------------------------------------------------------------------------
# The steps
# ---------------------------------------------------------------------------------------------------------------------


def write_subset(out: Path, config: CocoConfig, content: bytes) -> None:
    """Write the table of captions, or see that it is the one that is there. Raises Refused: it is another one."""
    path = out / f"{config.kind.name}.tsv"
    if path.exists():
        if path.read_bytes() != content:
            raise Refused(f"OUT: {path} exists and is another one. Remove it with its images, or give another OUT.")
    else:
        write_whole(path, content)
    print(f"subset: {config.kind.num_images:,} captions in {path}", flush=True)


def make_statistics(out: Path, config: CocoConfig, wanted: Sequence[str]) -> int:
    """Make the statistics of the images, if they are not there. Raises Failed: the folder has others, or not all."""
    folder, path = out / config.images_name, out / f"{config.images_name}_stats.npz"
    if config.inception is None:
        print("statistics: not made, since inception is not given (pt_inception-2015-12-05-6726825d.pth)", flush=True)
        return 0
    if path.exists():
        print(f"statistics: {path} is there", flush=True)
        return 0
    there = {entry.name for entry in os.scandir(folder)} if folder.is_dir() else set()
    if missing := sorted(set(wanted) - there):
        raise Failed(f"statistics: {folder} lacks {len(missing):,} images, e.g. {missing[0]}. Let steps have images.")
    if others := sorted(there - set(wanted)):
        raise Failed(f"statistics: {folder} has {len(others):,} other files, e.g. {others[0]}. Remove them.")
    keys = [f"{key}={getattr(config, key)}" for key in ("inception", "resize", "batch_size")]
    return fid_statistics.main(
        [str(folder), str(path), *keys, *([f"workers={config.workers}"] if config.workers else [])]
    )


def make(out: Path, config: CocoConfig) -> int:
    """Do the steps; return the exit code. Raises Refused, Failed: the message says why. OSError: OUT is not writable."""
    if {*config.todo} == {"download"}:
        for key in ZIPS:
            found_at(key, out, config)
        return 0
    kind, is_flux = config.kind, config.subset == "flux"
    table = choose(read_annotations(found_at("annotations", out, config)), kind.num_images, timesteps=is_flux)
    write_subset(out, config, as_tsv(table))
    names = [image_name(number) for number in table["image_id"]]
    workers = config.workers or len(os.sched_getaffinity(0))
    if "images" in config.todo:
        folder = out / config.images_name
        write = write_tars if is_flux else write_images

        def pictures() -> Pictures:
            return Pictures(found_at("images", out, config))

        done = write(folder, table, pictures, kind.size, workers)
        print(f"images: {done}", flush=True)
    return make_statistics(out, config, names) if "statistics" in config.todo and not is_flux else 0


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
