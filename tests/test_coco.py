"""prepare/coco.py: the rules' captions by plain pandas and by numpy alone, images by PIL, and what is refused."""

from __future__ import annotations

import hashlib
import io
import json
import random
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from conftest import picture, tree
from fault_server import web  # noqa: F401
from PIL import Image
from streaming import StreamingDataset
from test_image_formats import encoded

from evaluation.prompts import Prompt, read_prompts
from prepare import coco, shards
from prepare.coco import choose_captions, image_name
from prepare.http_download import FileToFetch

NUM_IMAGES, NUM_TAKEN = 30, 24
ODD = ['A "stop" sign', "\ttabs\tin it ", "two\nlines \n", "café \u2028 au lait", "'single'", "Same.", "Same."]


def annotations() -> list[dict[str, Any]]:
    """One to five captions of each image: ids in no order, texts twice, images' captions apart from each other."""
    drawn = random.Random(5)
    pairs = [(image, n) for image in range(NUM_IMAGES) for n in range(1 + image % 5)]
    drawn.shuffle(pairs)
    ids = drawn.sample(range(1, 10**6), len(pairs))

    def text(image: int, n: int) -> str:
        return ODD[n % 2 if image == 4 else image] if image < len(ODD) else f" Picture {image}, {n} times\n"

    zipped = zip(pairs, ids, strict=True)
    return [{"image_id": 42 + 1000 * image, "id": id, "caption": text(image, n)} for (image, n), id in zipped]


def by_plain_pandas(captions: list[dict[str, Any]], num_images: int) -> list[tuple[int, int, str]]:
    """(image_id, id, caption): the steps of the rules, as mlcommons/training has them."""
    frame = pandas.DataFrame(captions)
    frame["caption"] = frame["caption"].apply(lambda text: text.replace("\n", "").strip())
    frame = frame.sample(frac=1, random_state=2023).reset_index(drop=True)
    frame = frame.drop_duplicates(subset=["image_id"], keep="first")[:num_images].sort_values(by=["id"])
    return list(frame[["image_id", "id", "caption"]].itertuples(index=False, name=None))


def by_numpy_alone(captions: list[dict[str, Any]], num_images: int) -> list[tuple[int, int, str]]:
    """The same without pandas; numpy promises that a RandomState's numbers never change."""
    first: dict[int, dict[str, Any]] = {}
    for index in np.random.RandomState(2023).permutation(len(captions)).tolist():
        first.setdefault(captions[index]["image_id"], captions[index])
    taken = sorted(list(first.values())[:num_images], key=lambda row: row["id"])
    return [(row["image_id"], row["id"], row["caption"].replace("\n", "").strip()) for row in taken]


def photo(number: int) -> bytes:
    """No two of one size; some are grey, as some of COCO's are."""
    return picture(number, (96 + number, 130 - 2 * number), mode="L" if number % 7 == 3 else "RGB")


@pytest.fixture(scope="module")
def zips(tmp_path_factory) -> Path:
    """A folder with COCO's two published, in small."""
    folder = tmp_path_factory.mktemp("coco")
    with zipfile.ZipFile(folder / "val2014.zip", "w") as file:
        for image in range(NUM_IMAGES):
            file.writestr(f"val2014/{image_name(42 + 1000 * image)}", photo(image))
    content = {"info": {}, "images": [], "licenses": [], "annotations": annotations()}
    with zipfile.ZipFile(folder / "annotations_trainval2014.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("annotations/instances_val2014.json", "{}")
        file.writestr("annotations/captions_val2014.json", json.dumps(content))
    return folder


def words(zips: Path, out: Path, *more: str) -> list[str]:
    published = [f"images={zips / 'val2014.zip'}", f"annotations={zips / 'annotations_trainval2014.zip'}"]
    return [str(out), *published, "verify=false", f"num_images={NUM_TAKEN}", "size=64", "workers=2", *more]


# --- the rule ---


@pytest.mark.parametrize("num_images", [1, 7, NUM_TAKEN, NUM_IMAGES])
def test_the_captions_are_those_of_plain_pandas_and_of_numpy_alone(num_images):
    chosen = choose_captions(annotations(), num_images, timesteps=False)
    written = list(chosen[["image_id", "id", "caption"]].itertuples(index=False, name=None))
    assert written == by_plain_pandas(annotations(), num_images) == by_numpy_alone(annotations(), num_images)
    assert len({image_id for image_id, *_ in written}) == num_images == len(written)
    assert [number for _, number, _ in written] == sorted(number for _, number, _ in written)
    sixteen = [{"image_id": 100 + n, "id": n, "caption": "a"} for n in range(16)]
    drawn = [12, 2, 8, 10, 11, 0, 5, 13]  # the first of numpy.random.RandomState(2023).permutation(16)
    assert sorted(drawn) == choose_captions(sixteen, 8, timesteps=False)["id"].tolist()


def test_the_evaluation_reads_the_table_letter_for_letter(tmp_path):
    path, rows = tmp_path / "val.tsv", by_plain_pandas(annotations(), NUM_IMAGES)
    choose_captions(annotations(), NUM_IMAGES, timesteps=False).to_csv(path, sep="\t", index=False)
    assert list(read_prompts(str(path)).prompts) == [Prompt(number, image_id, text) for image_id, number, text in rows]
    assert {text for *_, text in rows} >= {'A "stop" sign', "tabs\tin it", "twolines", "café \u2028 au lait"}
    plain = pandas.read_csv(path, sep="\t")  # as the reference's loader reads it
    assert list(plain.itertuples(index=False, name=None)) == rows
    captions = [{"image_id": n, "id": n, "caption": "a\r b" if n == 2 else "a \r\n"} for n in range(3)]
    with pytest.raises(ValueError, match="^annotations: the caption with id 2 has a carriage return, which would "):
        choose_captions(captions, 3, timesteps=False)


# --- the command ---


@pytest.fixture(scope="module")
def unbroken(zips, tmp_path_factory) -> Path:
    """What one undisturbed command makes."""
    out = tmp_path_factory.mktemp("unbroken") / "out"
    assert coco.main(words(zips, out)) == 0
    return out


def test_images_are_resized_by_pil_gray_ones_stay_gray_and_nothing_is_made_twice(zips, unbroken, capsys):
    folder = unbroken / f"val2014_{NUM_TAKEN}_64px"
    taken = [image_id for image_id, *_ in by_plain_pandas(annotations(), NUM_TAKEN)]
    assert sorted(path.name for path in folder.iterdir()) == [f"COCO_val2014_{n:012}.jpg" for n in sorted(taken)]
    modes = set()
    for image_id in taken:
        image = Image.open(io.BytesIO(photo(image_id // 1000))).resize((64, 64), resample=Image.BICUBIC)
        assert (folder / image_name(image_id)).read_bytes() == encoded(image, "JPEG", quality=75)
        modes.add(image.mode)
    assert modes == {"RGB", "L"}
    before = {path: path.stat().st_mtime_ns for path in unbroken.rglob("*") if path.is_file()}
    assert coco.main(words(zips, unbroken)) == 0
    assert {path: path.stat().st_mtime_ns for path in unbroken.rglob("*") if path.is_file()} == before
    assert capsys.readouterr().out.splitlines() == [
        f"subset: 24 captions in {unbroken / 'val2014_24.tsv'}",
        f"images: 24 of 64 x 64 px in {unbroken / 'val2014_24_64px'}, 0 of them made now",
    ]


def test_a_folder_of_images_and_a_file_of_captions_make_the_same_as_the_zips(zips, unbroken, tmp_path):
    for name in ("val2014.zip", "annotations_trainval2014.zip"):
        zipfile.ZipFile(zips / name).extractall(tmp_path / "in")
    unpacked = [f"images={tmp_path / 'in'}", f"annotations={tmp_path / 'in/annotations/captions_val2014.json'}"]
    assert coco.main([*words(zips, tmp_path / "out"), *unpacked]) == 0
    assert tree(tmp_path / "out") == tree(unbroken)


# --- FLUX.1's ---


def test_the_flux_samples_are_tars_of_images_with_their_times(zips, tmp_path, monkeypatch):
    monkeypatch.setattr(coco, "SAMPLES_PER_TAR", 10)
    out = tmp_path / "out"
    assert coco.main(words(zips, out, "subset=flux")) == 0
    folder, members = out / f"val2014_flux_{NUM_TAKEN}_64px", {}
    table = pandas.read_csv(out / f"val2014_flux_{NUM_TAKEN}.tsv", sep="\t")
    before = tree(folder)
    for name in (f"shard_{n:05d}.tar" for n in range(3)):
        with tarfile.open(fileobj=io.BytesIO(before.pop(name))) as tar:
            members |= {member.name: tar.extractfile(member).read() for member in tar.getmembers()}
    assert not before and len(members) == 3 * NUM_TAKEN
    for image_id, text, timestep in table[["image_id", "caption", "timestep"]].itertuples(index=False, name=None):
        key, image = f"{image_id:012}", Image.open(io.BytesIO(photo(image_id // 1000)))
        assert members[f"{key}.png"] == encoded(image.resize((64, 64), Image.BICUBIC), "PNG")
        about = {"id": str(image_id), "caption": text, "filename": f"COCO_val2014_{key}.png", "timestep": timestep}
        assert json.loads(members[f"{key}.json"]) == about and members[f"{key}.txt"].decode() == text
    assert shards.main([str(folder), str(tmp_path / "images"), "workers=1"]) == 0
    rows = list(StreamingDataset(local=str(tmp_path / "images"), batch_size=1, shuffle=False))
    assert [row["key"] for row in rows] == [f"{image_id:012}" for image_id in table["image_id"]]
    assert [row["metadata"]["timestep"] for row in rows] == [n % 8 for n in range(NUM_TAKEN)]
    before = tree(folder)
    (folder / "shard_00001.tar").unlink()
    assert coco.main(words(zips, out, "subset=flux")) == 0 and tree(folder) == before


# --- stopped ---


def test_stopped_within_an_image_it_resumes_to_the_same_bytes(zips, unbroken, tmp_path):
    """As a kill leaves it: some images are missing, and one has begun."""
    out = shutil.copytree(unbroken, tmp_path / "out")
    *whole, begun, missing = sorted(out.glob("*/COCO*"))
    missing.unlink()
    begun.with_name(f".{begun.name}.7.tmp").write_bytes(begun.read_bytes()[:100])
    begun.unlink()
    times = {path: path.stat().st_mtime_ns for path in whole}
    assert coco.main(words(zips, out)) == 0 and tree(out) == tree(unbroken)
    assert {path: path.stat().st_mtime_ns for path in whole} == times, "a whole image was made again"


# --- downloads ---


def test_missing_zips_are_downloaded_and_compared_with_their_sha1(zips, unbroken, web, tmp_path, monkeypatch, capsys):  # noqa: F811
    published, out = dict(coco.ZIPS), tmp_path / "out"
    contents = {key: (zips / zip_.name).read_bytes() for key, zip_ in published.items()}
    for key, zip_ in published.items():
        web.put(zip_.name, contents[key])
    sums = {key: hashlib.sha1(content).hexdigest() for key, content in contents.items()}

    def download(**wrong: str) -> int:
        digests = {key: f"sha1:{digits}" for key, digits in (sums | wrong).items()}
        served = {key: FileToFetch(of.name, (web.url(of.name),), digest=digests[key]) for key, of in published.items()}
        monkeypatch.setattr(coco, "ZIPS", served)
        return coco.main([str(out), f"num_images={NUM_TAKEN}", "size=64", "workers=2"])

    assert download(annotations="0" * 40) == 1
    assert f"its sha1 is {sums['annotations']}, {'0' * 40} is wanted" in capsys.readouterr().err
    assert not (out / "downloads/annotations_trainval2014.zip").exists()
    assert download() == 0
    made = {name: content for name, content in tree(out).items() if not name.startswith("downloads/")}
    assert made == tree(unbroken)


# --- what is refused ---
