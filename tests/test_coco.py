"""prepare/coco.py: the rules' captions by plain pandas and by numpy alone, images by PIL, and what is refused."""

from __future__ import annotations

import functools
import hashlib
import http.server
import io
import itertools
import json
import multiprocessing
import os
import random
import signal
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from conftest import picture, tree
from PIL import Image
from streaming import StreamingDataset

from evaluation.prompts import Prompt, read_prompts
from prepare import coco, latents, places, shards
from prepare.coco import choose, image_name, read_annotations
from prepare.transfer import Wanted

NUM_IMAGES, NUM_TAKEN = 30, 24
LIMIT_SEC = 60
ODD = [
    'A "stop" sign',
    "\ttabs\tin it ",
    "two\nlines \n",
    "café \u2028 au lait",
    "'single'",
    "Same.",
    "Same.",
]


def annotations() -> list[dict[str, Any]]:
    """One to five captions of each image: ids in no order, texts twice, images' captions apart from each other."""
    drawn = random.Random(5)
    pairs = [(image, n) for image in range(NUM_IMAGES) for n in range(1 + image % 5)]
    drawn.shuffle(pairs)
    ids = drawn.sample(range(1, 10**6), len(pairs))
    texts = [
        ODD[n % 2 if image == 4 else image] if image < len(ODD) else f" Picture {image}, {n} times\n"
        for image, n in pairs
    ]
    return [
        {"image_id": 42 + 1000 * image, "id": number, "caption": text}
        for (image, _), number, text in zip(pairs, ids, texts, strict=True)
    ]


def by_plain_pandas(given: list[dict[str, Any]], num_images: int) -> list[tuple[int, int, str]]:
    """(image_id, id, caption): the rules' own steps, one after the other, as mlcommons/training has them."""
    frame = pandas.DataFrame(given)
    frame["caption"] = frame["caption"].apply(lambda text: text.replace("\n", "").strip())
    frame = frame.sample(frac=1, random_state=2023).reset_index(drop=True)
    frame = frame.drop_duplicates(subset=["image_id"], keep="first")[:num_images].sort_values(by=["id"])
    return [(row["image_id"], row["id"], row["caption"]) for _, row in frame.iterrows()]


def by_numpy_alone(given: list[dict[str, Any]], num_images: int) -> list[tuple[int, int, str]]:
    """The same without pandas; numpy promises that a RandomState's numbers never change."""
    first: dict[int, dict[str, Any]] = {}
    for place in np.random.RandomState(2023).permutation(len(given)).tolist():
        first.setdefault(given[place]["image_id"], given[place])
    taken = sorted(list(first.values())[:num_images], key=lambda one: one["id"])
    return [(one["image_id"], one["id"], one["caption"].replace("\n", "").strip()) for one in taken]


def photo(number: int) -> bytes:
    """No two of one size; some are grey, as some of COCO's are."""
    return picture(number, (96 + number, 130 - 2 * number), mode="L" if number % 7 == 3 else "RGB")


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> Path:
    """A folder with COCO's two zips, in small."""
    folder = tmp_path_factory.mktemp("coco")
    with zipfile.ZipFile(folder / "val2014.zip", "w") as file:
        for image in range(NUM_IMAGES):
            file.writestr(f"val2014/{image_name(42 + 1000 * image)}", photo(image))
    content = {"info": {}, "images": [], "licenses": [], "annotations": annotations()}
    with zipfile.ZipFile(folder / "annotations_trainval2014.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("annotations/instances_val2014.json", json.dumps({"annotations": [INSTANCE]}))
        file.writestr("annotations/captions_val2014.json", json.dumps(content))
    return folder


INSTANCE = {"segmentation": [[1.0, 2.0]], "area": 3.0, "image_id": 42, "bbox": [0, 0, 1, 1], "category_id": 18, "id": 1}


def words(given: Path, out: Path, *more: str) -> list[str]:
    zips = [f"images={given / 'val2014.zip'}", f"annotations={given / 'annotations_trainval2014.zip'}", "verify=false"]
    return [str(out), *zips, f"num_images={NUM_TAKEN}", "size=64", "workers=2", *more]


# --- the rule ---


@pytest.mark.parametrize("num_images", [1, 7, NUM_TAKEN, NUM_IMAGES])
def test_the_captions_are_those_of_plain_pandas_and_of_numpy_alone(num_images):
    table = choose(annotations(), num_images, timesteps=False)
    found = list(table[["image_id", "id", "caption"]].itertuples(index=False, name=None))
    assert found == by_plain_pandas(annotations(), num_images) == by_numpy_alone(annotations(), num_images)
    assert len({image_id for image_id, *_ in found}) == num_images == len(found)
    assert [number for _, number, _ in found] == sorted(number for _, number, _ in found)


def test_the_order_of_the_draw_is_the_one_of_2023_whatever_numpys_and_pandas_versions():
    given = [{"image_id": 100 + n, "id": n, "caption": "a"} for n in range(16)]
    drawn = [12, 2, 8, 10, 11, 0, 5, 13]  # the first of numpy.random.RandomState(2023).permutation(16)
    assert sorted(drawn) == choose(given, 8, timesteps=False)["id"].tolist()


def test_an_image_with_many_captions_gives_the_first_drawn_and_equal_texts_are_no_duplicates():
    """Duplicates are of images: two images may have one text, and an image's second caption never counts."""
    given = [{"image_id": n % 4, "id": 900 - n, "caption": "the same"} for n in range(40)]
    table = choose(given, 4, timesteps=False)
    first = {}
    for place in np.random.RandomState(2023).permutation(40).tolist():
        first.setdefault(place % 4, 900 - place)
    assert dict(zip(table["image_id"], table["id"], strict=True)) == first and set(table["caption"]) == {"the same"}


def test_the_table_comes_back_from_the_evaluations_own_reader_letter_for_letter(tmp_path):
    path = tmp_path / "val.tsv"
    choose(annotations(), NUM_IMAGES, timesteps=False).to_csv(path, sep="\t", index=False)
    rows = by_plain_pandas(annotations(), NUM_IMAGES)
    assert list(read_prompts(str(path)).prompts) == [Prompt(number, image_id, text) for image_id, number, text in rows]
    assert {text for *_, text in rows} >= {
        'A "stop" sign',
        "tabs\tin it",
        "twolines",
        "café \u2028 au lait",
    }
    assert path.read_bytes().startswith(b"image_id\tid\tcaption\n")
    plain = pandas.read_csv(path, sep="\t")  # as the reference's own loader reads it
    assert [tuple(row) for row in plain.itertuples(index=False)] == rows


def test_a_carriage_return_within_a_caption_that_is_taken_is_refused():
    given = [{"image_id": n, "id": n, "caption": "a\r b" if n == 2 else "a \r\n"} for n in range(3)]
    with pytest.raises(ValueError, match=r"^annotations: the caption with id 2 has a carriage return, which would end"):
        choose(given, 3, timesteps=False)
    assert choose(given[:2], 2, timesteps=False)["caption"].tolist() == ["a", "a"]


def test_each_of_the_flux_rows_has_the_time_of_its_place_in_the_sorted_table(tmp_path):
    table = choose(annotations(), NUM_TAKEN, timesteps=True)
    assert table["timestep"].tolist() == [*range(8)] * 3
    assert list(table[["image_id", "id", "caption"]].itertuples(index=False, name=None)) == by_plain_pandas(
        annotations(), NUM_TAKEN
    )
    path = tmp_path / "val.tsv"
    table.to_csv(path, sep="\t", index=False)
    assert path.read_text().splitlines()[0] == "image_id\tid\tcaption\ttimestep"
    assert len(read_prompts(str(path)).prompts) == NUM_TAKEN


# --- the command ---


@pytest.fixture(scope="module")
def unbroken(given, tmp_path_factory) -> Path:
    """What one undisturbed command makes."""
    out = tmp_path_factory.mktemp("unbroken") / "out"
    assert coco.main(words(given, out)) == 0
    return out


def test_images_are_pils_own_at_that_size_grey_ones_stay_grey_and_qualities_are_the_default(unbroken):
    folder = unbroken / f"val2014_{NUM_TAKEN}_64px"
    taken = [image_id for image_id, *_ in by_plain_pandas(annotations(), NUM_TAKEN)]
    assert sorted(path.name for path in folder.iterdir()) == [f"COCO_val2014_{n:012}.jpg" for n in sorted(taken)]
    modes = set()
    for image_id in taken:
        image = Image.open(io.BytesIO(photo(image_id // 1000))).resize((64, 64), resample=Image.BICUBIC)
        file = io.BytesIO()
        image.save(file, "JPEG", quality=75)
        assert (folder / image_name(image_id)).read_bytes() == file.getvalue()
        modes.add(image.mode)
    assert modes == {"RGB", "L"}


def test_it_says_what_is_there_and_makes_nothing_again(given, unbroken, capsys):
    before = {path: path.stat().st_mtime_ns for path in unbroken.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert coco.main(words(given, unbroken)) == 0
    assert {path: path.stat().st_mtime_ns for path in unbroken.rglob("*") if path.is_file()} == before
    assert capsys.readouterr().out.splitlines() == [
        f"subset: 24 captions in {unbroken / 'val2014_24.tsv'}",
        f"images: 24 of 64 x 64 px in {unbroken / 'val2014_24_64px'}, 0 of them made now",
    ]


def test_a_folder_of_images_and_a_file_of_captions_make_the_same_as_the_zips(given, unbroken, tmp_path):
    for name in ("val2014.zip", "annotations_trainval2014.zip"):
        zipfile.ZipFile(given / name).extractall(tmp_path / "in")
    unpacked = [f"images={tmp_path / 'in'}", f"annotations={tmp_path / 'in/annotations/captions_val2014.json'}"]
    assert coco.main([*words(given, tmp_path / "out"), *unpacked]) == 0
    assert tree(tmp_path / "out") == tree(unbroken)


def test_the_names_of_the_benchmarks_sets():
    def name(**keys: Any) -> tuple[str, str, int, int]:
        config = coco.CocoConfig(**keys)
        return config.kind.name, config.images_name, config.kind.num_images, config.kind.size

    assert name() == ("val2014_30k", "val2014_30k", 30_000, 512)
    assert name(subset="flux") == ("val2014_flux", "val2014_flux", 29_696, 256)
    assert name(size=256) == ("val2014_30k", "val2014_30k_256px", 30_000, 256)
    assert name(num_images=800) == ("val2014_800", "val2014_800", 800, 512)
    assert name(subset="flux", num_images=800) == ("val2014_flux_800", "val2014_flux_800", 800, 256)


# --- FLUX.1's ---


def test_the_flux_samples_are_a_stage_with_their_times_beside_them(given, tmp_path):
    out = tmp_path / "out"
    assert coco.main(words(given, out, "subset=flux")) == 0
    name = f"val2014_flux_{NUM_TAKEN}"
    table = pandas.read_csv(out / f"{name}.tsv", sep="\t")
    with tarfile.open(out / f"{name}_64px" / "shard_00000.tar") as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar.getmembers()}
    assert len(members) == 3 * NUM_TAKEN
    for image_id, text, timestep in table[["image_id", "caption", "timestep"]].itertuples(index=False, name=None):
        key, file = f"{image_id:012}", io.BytesIO()
        Image.open(io.BytesIO(photo(image_id // 1000))).resize((64, 64), Image.BICUBIC).save(file, "PNG")
        assert members[f"{key}.png"] == file.getvalue() and members[f"{key}.txt"].decode() == text
        about = {"id": str(image_id), "caption": text, "filename": f"COCO_val2014_{key}.png", "timestep": timestep}
        assert json.loads(members[f"{key}.json"]) == about
    assert shards.main([str(out / f"{name}_64px"), str(tmp_path / "stage"), "workers=1"]) == 0
    rows = list(StreamingDataset(local=str(tmp_path / "stage"), batch_size=1, shuffle=False))
    assert [row["key"] for row in rows] == [f"{image_id:012}" for image_id in table["image_id"]]
    assert [row["metadata"]["timestep"] for row in rows] == [n % 8 for n in range(NUM_TAKEN)]
    assert [row["caption"] for row in rows] == table["caption"].tolist()
    tiny = ["model.family=flux", "model.variant=mlperf", "model.preset=tiny", "model.weights=random", "image_size=64"]
    assert latents.main([str(tmp_path / "stage"), str(tmp_path / "moments"), *tiny, "timestep=true"]) == 0
    kept = StreamingDataset(local=str(tmp_path / "moments"), batch_size=1, shuffle=False)
    assert [(row["key"], row["timestep"]) for row in kept] == [
        (row["key"], row["metadata"]["timestep"]) for row in rows
    ]


def test_the_flux_tars_have_a_thousand_samples_each_and_a_missing_one_is_made_again(given, tmp_path, monkeypatch):
    monkeypatch.setattr(coco, "SAMPLES_PER_TAR", 10)
    out = tmp_path / "out"
    assert coco.main(words(given, out, "subset=flux")) == 0
    folder = out / f"val2014_flux_{NUM_TAKEN}_64px"
    before = tree(folder)
    assert sorted(before) == [f"shard_{n:05d}.tar" for n in range(3)]
    (folder / "shard_00001.tar").unlink()
    assert coco.main(words(given, out, "subset=flux")) == 0 and tree(folder) == before


# --- stopped ---


def in_child(function: Any) -> int:
    """Run in a process of its own; its exit code, or minus the signal that ended it."""
    child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(function()))
    child.start()
    child.join(LIMIT_SEC)
    assert child.exitcode is not None, "hangs"
    return child.exitcode


@pytest.mark.parametrize("nth", [0, 1, 11, NUM_TAKEN - 1])
def test_killed_within_any_image_it_goes_on_to_the_same_bytes(given, unbroken, tmp_path, nth):
    out, folder = tmp_path / "out", tmp_path / "out" / f"val2014_{NUM_TAKEN}_64px"

    def killed() -> int:
        write, calls = coco.write_whole, itertools.count()

        def dying(path: Path, content: bytes) -> None:
            if path.suffix == ".jpg" and next(calls) == nth:
                path.with_name(f".{path.name}.{os.getpid()}.tmp").write_bytes(
                    content[:100]
                )  # where it would be by then
                os.kill(os.getpid(), signal.SIGKILL)
            write(path, content)

        coco.write_whole = dying
        return coco.main(words(given, out))

    assert in_child(killed) == -signal.SIGKILL
    whole = {path: path.stat().st_mtime_ns for path in folder.glob("COCO*")}
    assert nth - 1 <= len(whole) <= nth + 1  # two threads
    assert coco.main(words(given, out)) == 0
    assert tree(out) == tree(unbroken)
    assert {path: path.stat().st_mtime_ns for path in whole} == whole, "a whole image was made again"


@pytest.mark.parametrize("nth", [0, 35, 3 * NUM_TAKEN - 1])
def test_killed_within_a_tar_it_goes_on_to_the_same_bytes(given, tmp_path, nth, monkeypatch):
    monkeypatch.setattr(coco, "SAMPLES_PER_TAR", 10)
    assert coco.main(words(given, tmp_path / "whole", "subset=flux")) == 0

    def killed() -> int:
        add, calls = tarfile.TarFile.addfile, itertools.count()

        def dying(*arguments: Any) -> None:
            add(*arguments)
            if next(calls) == nth:
                os.kill(os.getpid(), signal.SIGKILL)

        tarfile.TarFile.addfile = dying
        return coco.main(words(given, tmp_path / "out", "subset=flux"))

    assert in_child(killed) == -signal.SIGKILL
    assert coco.main(words(given, tmp_path / "out", "subset=flux")) == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_second_command_on_the_same_folder_is_refused(given, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(places, "LOCK_WAIT_SEC", 0.2)
    out = tmp_path / "out"
    with places.Folder(str(out)).only_writer():
        assert coco.main(words(given, out)) == 2
    assert capsys.readouterr().err == (
        f"OUT: {out} is being written by another command on this machine. Let that one end, or stop it.\n"
    )


# --- downloads ---


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address(given) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(given))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_what_is_not_given_is_downloaded_and_compared_with_its_sha1(
    given, unbroken, address, tmp_path, monkeypatch, capsys
):
    def known(**wrong: str) -> dict[str, Wanted]:
        sums = {key: hashlib.sha1((given / one.name).read_bytes()).hexdigest() for key, one in coco.ZIPS.items()}
        urls = {key: (f"{address}/{one.name}",) for key, one in coco.ZIPS.items()}
        sums |= wrong
        return {key: Wanted(one.name, urls[key], digest=f"sha1:{sums[key]}") for key, one in OURS.items()}

    out, more = tmp_path / "out", [f"num_images={NUM_TAKEN}", "size=64", "workers=2"]
    monkeypatch.setattr(coco, "ZIPS", known(annotations="0" * 40))
    assert coco.main([str(out), *more]) == 1
    said = capsys.readouterr().err
    right = hashlib.sha1((given / "annotations_trainval2014.zip").read_bytes()).hexdigest()
    assert f"its sha1 is {right}, {'0' * 40} is wanted" in said
    assert not (out / "downloads/annotations_trainval2014.zip").exists()
    monkeypatch.setattr(coco, "ZIPS", known())
    assert coco.main([str(out), *more]) == 0
    made = {name: content for name, content in tree(out).items() if not name.startswith("downloads/")}
    assert made == tree(unbroken)


OURS = dict(coco.ZIPS)


# --- what is refused ---


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"<html>", "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
        (b"{\xff}", "UnicodeDecodeError: "),
        (b"[]", "TypeError: "),
        ({"images": []}, "KeyError: 'annotations'"),
        ({"annotations": []}, "ValueError: there are none"),
        ({"annotations": [1]}, "TypeError: "),
        ({"annotations": [INSTANCE]}, "KeyError: 'caption'"),
        (
            {"annotations": [{"image_id": "1", "id": 1, "caption": "a"}]},
            "ValueError: this is no caption: {'image_id': '1'",
        ),
        ({"annotations": [{"image_id": 1, "id": 1, "caption": None}]}, "ValueError: this is no caption: "),
    ],
    ids=itertools.count(),
)
def test_annotations_that_are_not_cocos_are_refused_by_name(given, tmp_path, capsys, content, said):
    path = tmp_path / "captions_val2014.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    assert coco.main([*words(given, tmp_path / "out"), f"annotations={path}"]) == 2
    found = capsys.readouterr().err
    assert found.startswith(f"annotations: {path} cannot be read: {said}"), found
    assert found.endswith("Give annotations_trainval2014.zip, or its captions_val2014.json.\n")
    assert not list((tmp_path / "out").glob("val2014*"))


def changed_zip(given: Path, to: Path, kind: str) -> Path:
    """A zip of the images that is not what it should be."""
    path, taken = to / "val2014.zip", by_plain_pandas(annotations(), NUM_TAKEN)
    with zipfile.ZipFile(given / "val2014.zip") as source, zipfile.ZipFile(path, "w") as file:
        for member in source.infolist():
            content = source.read(member)
            if member.filename.endswith(image_name(taken[3][0])):
                if kind == "lacks one":
                    continue
                content = content[: len(content) // 2] if kind == "cut image" else content
            file.writestr(member.filename, content)
    content = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    if kind == "flipped bit":
        with zipfile.ZipFile(path) as file:
            member = next(one for one in file.infolist() if one.filename.endswith(image_name(taken[3][0])))
        at = content.index(b"\xff\xd9", member.header_offset) - 9
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    return path


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ("truncated", 2, "images: {} cannot be read: it is no whole zip: File is not a zip file."),
        ("lacks one", 2, "images: {} lacks 1 of the images: {name}. Give COCO's whole val2014.zip"),
        ("cut image", 1, "images: 1 cannot be read: {name} (OSError: image file is truncated"),
        (
            "flipped bit",
            1,
            "images: 1 cannot be read: {name} (BadZipFile: Bad CRC-32 for file 'val2014/{name}'); reasons:",
        ),
    ],
)
@pytest.mark.parametrize("subset", ["sd2", "flux"])
def test_a_zip_of_images_that_is_not_whole_is_named_with_what_it_lacks(
    given, tmp_path, capsys, subset, kind, code, said
):
    path, name = changed_zip(given, tmp_path, kind), image_name(by_plain_pandas(annotations(), NUM_TAKEN)[3][0])
    out = tmp_path / "out"
    assert coco.main([*words(given, out), f"images={path}", f"subset={subset}"]) == code
    assert said.format(path, name=name, num=NUM_TAKEN) in capsys.readouterr().err
    lines = [json.loads(line) for line in (out / "skipped.jsonl").read_text().splitlines()] if code == 1 else []
    assert [(line["source"], line["key"]) for line in lines] == [("val2014.zip", name)] * len(lines)
    assert coco.main([*words(given, out), f"subset={subset}"]) == 0  # with a whole one it goes on
    assert coco.main([*words(given, tmp_path / "whole"), f"subset={subset}"]) == 0
    assert tree(out) == tree(tmp_path / "whole")


def refused(capsys, *command: str, code: int = 2) -> str:
    capsys.readouterr()
    assert coco.main([*command]) == code
    return capsys.readouterr().err


def test_what_cannot_be_begun_is_refused_all_at_once(given, tmp_path, capsys):
    out = str(tmp_path / "out")
    ours = coco.PUBLISHED_SHA1[0]
    own = hashlib.sha1((given / "val2014.zip").read_bytes()).hexdigest()
    said = refused(capsys, *words(given, tmp_path / "out", "verify=true"))
    assert said.startswith(
        f"annotations: {given / 'annotations_trainval2014.zip'} is not COCO's annotations_trainval2014.zip"
    )
    captions = tmp_path / "captions_val2014.json"
    captions.write_text(json.dumps({"annotations": annotations()}))
    said = refused(capsys, *words(given, tmp_path / "out", "verify=true"), f"annotations={captions}")
    assert said.startswith(
        f"images: {given / 'val2014.zip'} is not COCO's val2014.zip: its sha1 is {own}, {ours} is wanted."
    )
    lines = refused(capsys, out, "subset=flux", "num_images=12", "images=/no.zip")
    assert lines.splitlines() == [
        "num_images: 12 is not a multiple of the 8 timesteps of subset=flux. Give such a multiple.",
        "images: no file or folder /no.zip. Check the path.",
    ]
    assert refused(capsys, "s3://bucket/coco").startswith("OUT: s3://bucket/coco is in a store. Possible: a folder.")
    assert refused(capsys, "a", "b").startswith("command line: OUT has to be given, and nothing else.")
    assert refused(capsys, *words(given, tmp_path / "out", "num_images=31")) == (
        "num_images: 31, but annotations has captions of 30 images. Possible: 1 to 30. Give fewer, or COCO's own "
        "captions_val2014.json.\n"
    )


def test_another_table_of_the_same_name_is_never_replaced(given, tmp_path, capsys):
    path = tmp_path / "out" / f"val2014_{NUM_TAKEN}.tsv"
    path.parent.mkdir()
    path.write_text("image_id\tid\tcaption\n1\t1\ta\n")
    said = refused(capsys, *words(given, tmp_path / "out"))
    assert said == f"OUT: {path} exists and is another one. Remove it with its images, or give another OUT.\n"
    assert path.read_text().endswith("1\t1\ta\n")


def test_a_zip_of_annotations_without_the_captions_is_refused(given, tmp_path, capsys):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr("annotations/captions_train2014.json", "{}")
    (tmp_path / "b.zip").write_bytes(b"PK\x03\x04 and no more")
    for name, said in (("a.zip", "cannot be read: KeyError: "), ("b.zip", "cannot be read: ")):
        found = refused(capsys, *words(given, tmp_path / "out"), f"annotations={tmp_path / name}")
        assert found.startswith(f"annotations: {tmp_path / name} {said}")
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_annotations(tmp_path / "no.json")
