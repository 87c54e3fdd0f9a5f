"""Images of given captions, `composer eval.py SOURCE images=OUT`: one a caption and seed, whatever is made with it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import run, started
from PIL import Image

import benchmark
import eval as eval_command
from evaluation.generate import ImageRequest, save_image
from evaluation.prompts import Prompt, parse_captions
from reports.samples import tiles_of
from run_folder import sample_videos

NAME = re.compile(r"(\d{5,12}|id)-\d+(-[a-z0-9-]+)?-[0-9a-f]{8}\.(png|mp4)")

NASTY = {
    "HTML": '<script>alert("x")</script> & <b>bold</b>',
    "ANSI": "\x1b[31mred\x1b[0m \x1b]0;title\x07 cat",
    "newlines": "a cat\nNegative prompt: a dog\r\nSteps: 3, Seed: 9",
    "scripts": "日本の城 🐱👩‍🚀 Москва القاهرة e\u0301 \u202edrowkcab",
    "long": "a " + "cat" * 3332,
    "path": "../../etc/passwd",
    "dashes": "-rf --help",
    "half a letter": "a \ud800 cat",
}
SETTINGS = {"steps": 50, "sampler": "dpm++", "image_size": [64, 32], "precision": "fp32"}
SETTINGS["denoiser_fingerprint"] = "0123456789abcdef" * 2
ABOUT = {"model": "a, b: c", "images_seen": 512_000, "weights": "ema", "commit": "f" * 40}


def wanted(caption: str, number: int = 1, seed: int = 17, guidance: float = 3.0, **more) -> ImageRequest:
    return ImageRequest(Prompt(number, number, caption), seed, guidance, {**SETTINGS, **more})


def told_by(path: Path) -> dict:
    """The metadata of a file that was written here."""
    if path.suffix == ".mp4":
        return json.loads(sample_videos.comment_in(path))
    with Image.open(path, formats=("PNG",)) as image:
        return json.loads(image.info["easel"])


# --- captions ---


def test_captions_are_a_list_whose_places_are_their_ids_or_a_file(tmp_path):
    captions = ["a red circle", "a cat, asleep", "no", "1e3", "2024-01-01"]
    found = parse_captions('[a red circle, "a cat, asleep", no, 1e3, 2024-01-01]')
    assert [(prompt.number, prompt.caption) for prompt in found] == list(enumerate(captions, 1))
    (tmp_path / "lines.txt").write_text("a\n\n  b\n")
    found = parse_captions(f"{tmp_path}/lines.txt")
    assert [(prompt.number, prompt.caption) for prompt in found] == [(1, "a"), (3, "b")]
    (tmp_path / "p.tsv").write_text("image_id\tid\tcaption\n5\t770337\ta cat\n")
    assert parse_captions(f"{tmp_path}/p.tsv") == [Prompt(770337, 5, "a cat")]


# --- names and metadata ---


@pytest.mark.parametrize("caption", NASTY.values(), ids=NASTY)
def test_no_caption_leads_a_name_a_terminal_or_the_metadata_astray(caption, tmp_path):
    one = wanted(caption)
    assert NAME.fullmatch(one.file_name) and len(one.file_name) < 100
    save_image(torch.zeros(3, 4, 8, dtype=torch.uint8), tmp_path / one.file_name, one, ABOUT)
    with Image.open(tmp_path / one.file_name) as image:
        own = image.text["easel"]
    assert own.isprintable() and own.isascii()
    assert json.loads(own)["prompt"] == caption and told_by(tmp_path / one.file_name) == json.loads(own)


def test_whatever_an_image_depends_on_is_in_its_name():
    others = [dict(number=2), dict(seed=18), dict(guidance=2.0), dict(steps=20), dict(precision="bf16")]
    others.append(dict(denoiser_fingerprint="00"))
    names = {wanted("A cat").file_name, *(wanted("a cat", **more).file_name for more in ({}, {}, *others))}
    assert len(names) == 2 + len(others)
    assert all(name.startswith(("00001-17-a-cat-", "00002-17-a-cat-", "00001-18-a-cat-")) for name in names)
    assert all(NAME.fullmatch(wanted("x", number=n).file_name) for n in (0, 770337, -3, 10**4000))


# --- of a run ---

CAPTIONS = ["a big red circle", "a small blue square", "a green triangle", "a ring", "a cross", "a star"]
pytestmark = pytest.mark.timeout(120, func_only=True)


@pytest.fixture(scope="module")
def trained(miniature, tmp_path_factory) -> Path:
    """A run with two snapshots, and grids of its own for CAPTIONS."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "captions.txt").write_text("".join(f"{caption}\n" for caption in CAPTIONS))
    own = ["ema.decay=0.5", "save.snapshot_every_images=16", f"samples.prompts={folder}/captions.txt"]
    own += ["samples.every_images=16", "eval.samples=6", "eval.batch_size=4", "eval.guidance=2"]
    assert benchmark.main(miniature.small(folder, "demo", *own)) == 0
    return folder / "demo"


def drawn(folder: Path) -> dict[tuple[str, int], np.ndarray]:
    """Caption and seed -> pixels."""
    found = {}
    for path in folder.glob("0*.png"):
        told = told_by(path)
        found[told["prompt"], told["seed"]] = np.asarray(Image.open(path))
    return found


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


def captions(*numbers: int) -> str:
    return f"prompts=[{', '.join(CAPTIONS[number] for number in numbers)}]"


@pytest.fixture(scope="module")
def all_six(trained, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("six")
    words = [str(trained), f"images={folder}/six", f"prompts={trained.parent}/captions.txt"]
    assert eval_command.main([*words, "loggers.progress_bar=true"]) == 0
    return drawn(folder / "six")


@pytest.mark.long
def test_a_caption_has_the_same_image_as_in_the_grid_of_its_run_and_whatever_is_drawn_beside_it(
    trained, all_six, tmp_path
):
    """Bit for bit, as long as a pass has as many images (eval.batch_size); else to one grey level of 255."""
    *_, last = sorted((trained / "samples").glob("im*.png"))
    with Image.open(last) as grid:
        tiles = [np.asarray(tile) for tile in tiles_of(grid.convert("RGB"), 6, 2)]
    assert same(all_six, {(caption, 17): tile for caption, tile in zip(CAPTIONS, tiles, strict=True)})

    def of(name: str, *more: str) -> dict:
        assert eval_command.main([str(trained), f"images={tmp_path}/{name}", captions(0, 1), *more]) == 0
        return drawn(tmp_path / name)

    three, nineteen = of("three", "images_per_prompt=3"), of("seed", "seed=19")
    assert len(three) == 6 == len({image.tobytes() for image in three.values()})
    assert all(np.array_equal(image, all_six[key]) for key, image in three.items() if key[1] == 17)
    assert same(nineteen, {key: three[key] for key in three if key[1] == 19})
    other = of("of3", "images_per_prompt=3", "eval.batch_size=3")
    assert max(np.abs(other[key].astype(int) - three[key]).max() for key in three) <= 1


@pytest.mark.slow
def test_two_ranks_draw_the_same_images_as_one(trained, all_six, tmp_path):
    words = [str(trained), f"images={tmp_path}/two", f"prompts={trained.parent}/captions.txt"]
    done = run("composer", "-n", "2", "eval.py", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert same(drawn(tmp_path / "two"), all_six)
    assert "images=6 drawn=6" in done.stdout


@pytest.mark.long
def test_existing_images_are_not_drawn_again_or_overwritten(trained, tmp_path, capsys):
    words = [str(trained), f"images={tmp_path}/out", captions(0, 1, 2)]
    assert eval_command.main(words) == 0
    before = times_of(tmp_path / "out")
    gone = sorted(before)[1]
    (tmp_path / "out" / gone).unlink()
    assert eval_command.main(words) == 0
    assert "images=3 drawn=1" in capsys.readouterr().out
    assert eval_command.main([*words, "eval.guidance=[1,2]", "snapshots=all"]) == 0
    out, after = capsys.readouterr().out, times_of(tmp_path / "out")
    assert "images_seen=16 weights=ema images=6 drawn=6" in out and "images_seen=32 weights=ema images=6 drawn=3" in out
    assert len(after) == 12 and all(after[name] == before[name] for name in before if name != gone)


def times_of(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("0*.png")}


@pytest.mark.long
def test_a_stopped_command_resumes(trained, tmp_path):
    words, out = [str(trained), f"images={tmp_path}/out", f"prompts={trained.parent}/captions.txt"], tmp_path / "out"
    words += ["eval.steps=60", "eval.batch_size=1"]
    with started("composer", "-n", "1", "eval.py", *words) as process:
        end = time.monotonic() + 60
        while not times_of(out) and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    there = times_of(out)
    assert 0 < len(there) < 6 and not list(out.glob(".*"))
    assert all(told_by(out / name) for name in there)  # whole
    assert eval_command.main(words) == 0
    after = times_of(out)
    assert len(after) == 6 and there.items() <= after.items()


@pytest.mark.long
def test_the_weights_are_those_that_were_asked_for(trained, tmp_path, capsys):
    snapshots = sorted((trained / "checkpoints").glob("weights-*.pt"))
    ways = {"ema": [trained], "training": [trained, "eval.weights=training"]}
    ways |= {"first": snapshots[:1], "file": snapshots[-1:]}
    for name, words in ways.items():
        assert eval_command.main([*map(str, words), f"images={tmp_path}/{name}", captions(0)]) == 0
    ema, training, first, of_file = (drawn(tmp_path / name) for name in ways)
    assert same(of_file, ema) and not same(training, ema) and not same(first, ema)
    [path] = (tmp_path / "first").glob("0*.png")
    told = told_by(path)
    expected = {"images_seen": 16, "weights": "ema", "model": "demo", "number": 1, "snapshot": snapshots[0].name}
    assert (expected | {"sampler": "dpm++", "guidance": 2.0}).items() <= told.items()
    assert told["text_fingerprint"] and len(told["denoiser_fingerprint"]) == 32


@pytest.mark.long
def test_what_cannot_be_drawn_is_refused_before_anything_is_built(trained, tmp_path, capsys):
    snapshot = next((trained / "checkpoints").glob("weights-*.pt"))
    lost = shutil.copy(snapshot, tmp_path / snapshot.name)
    for source, words, said in (
        (snapshot, ["snapshots=last"], f"snapshots: last, but {snapshot} is one snapshot. Leave snapshots out."),
        (lost, [], f"{lost} is a run's checkpoint, outside its run's folder. Give its path in RUN/checkpoints/."),
        (trained / "samples", [], f"images: {trained}/samples is a folder of images, without a model."),
    ):
        capsys.readouterr()
        assert eval_command.main([str(source), f"images={tmp_path}/out", captions(0), *words]) == 2
        assert capsys.readouterr().err.startswith(said)
