"""prepare/latents.py: moments against the VAE itself, the counts, ranks, stores, and what is refused."""

from __future__ import annotations

import io
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY_RUN, picture, run, tree
from PIL import Image
from streaming import MDSWriter
from streaming.base.format import reader_from_json
from streaming.base.hashing import get_hash
from test_image_formats import encoded
from test_parts import bucket, objects  # noqa: F401  bucket is a fixture
from test_shards import COUNTS, skipped
from torchvision import transforms

import benchmark
from data import DataConfig
from families.encoders import ModelConfig
from families.objectives import ObjectiveConfig
from families.sd2 import SD2
from mds.dataset import read_dataset, write_metadata
from mds.fetch import HASH
from mds.images import decode_image, resize_and_crop
from model import build_model
from preflight.config_checks import expected_metadata
from prepare import latents
from prepare.shards import COLUMNS

KEYS = ["model.preset=tiny", "model.weights=random", "image_size=64", "batch_size=5"]
SIZE = (64, 64)

pytestmark = pytest.mark.usefixtures("same_number_of_threads")


@pytest.fixture(scope="module")
def reference():
    """The encoders as every command draws them."""
    config = ModelConfig(preset="tiny", weights="random")
    return build_model(config, ObjectiveConfig(), size=SIZE, normalize="symmetric", seed=0)


@pytest.fixture(scope="module")
def unbroken(stage, tmp_path_factory) -> Path:
    """What one undisturbed command makes of the dataset."""
    out = tmp_path_factory.mktemp("latents") / "out"
    assert latents.main([str(stage), str(out), *KEYS]) == 0
    return out


def rows(stage: Path) -> list[dict]:
    entries = json.loads((stage / "index.json").read_text())["shards"]
    return [row for entry in entries for row in reader_from_json(str(stage), None, entry)]


def images_of(samples: list[dict], out: Path, columns: dict[str, str] = COLUMNS, size_limit: int = 1 << 20) -> Path:
    """A dataset `images` as another tool may write it: nothing was checked."""
    with MDSWriter(out=str(out), columns=columns, hashes=[HASH], size_limit=size_limit) as writer:
        for number, sample in enumerate(samples):
            row = {"caption": "x", "key": f"{number:03d}", "width": 1, "height": 1, "metadata": {"n": number}, **sample}
            writer.write({name: row[name] for name in columns})
    write_metadata(out, "images", {})
    return out


# --- what is stored ---


def moments_of(reference, images: torch.Tensor) -> np.ndarray:
    """What the VAE itself gives for one image."""
    with torch.no_grad():
        return reference.encoders.modules["vae"].encode(images).latent_dist.parameters[0].numpy()


def assert_rounded(stored: np.ndarray, expected: np.ndarray, atol: float = 1e-5) -> None:
    assert stored.dtype == np.float16
    np.testing.assert_allclose(stored.astype(np.float32), expected, rtol=2**-10, atol=atol)


def test_moments_are_the_vaes_and_the_other_columns_those_of_the_images(stage, unbroken, reference, tmp_path):
    made, images = rows(unbroken), rows(stage)
    assert len(made) == 48 and set(made[0]) == {"moments", "tokens", "caption", "key", "metadata"}
    for row, sample in zip(made, images, strict=True):
        image = resize_and_crop(decode_image(sample["jpg"]), SIZE)[None].float() / 127.5 - 1.0
        assert_rounded(row["moments"], moments_of(reference, image))
        assert all(row[name] == sample[name] for name in ("caption", "key", "metadata"))
    tokens = reference.family.tokenize([row["caption"] for row in images])["tokens"]
    assert [row["tokens"].tolist() for row in made] == tokens.tolist() and made[0]["tokens"].dtype == np.uint16
    assert latents.main([str(stage), str(tmp_path / "out"), *KEYS, "workers=4"]) == 0
    assert tree(tmp_path / "out") == tree(unbroken)


def test_the_metadata_names_the_encoders_and_the_source(stage, unbroken, reference):
    metadata = json.loads((unbroken / "dataset.json").read_text())
    expected = {"stage": "moments", "made_by": "prepare.latents", "family": "sd2", "preset": "tiny", "variant": "stock"}
    expected |= {"image_size": [64, 64], "normalize": "symmetric", "resize": "bicubic, uint8", "precision": "fp32"}
    expected |= {"source": {"index_sha256": read_dataset(str(stage)).index_sha256, "samples": 48}, "counts": COUNTS}
    assert (expected | {"encoders": reference.encoders.fingerprints, "store_text": False}).items() <= metadata.items()


def test_text_states_are_stored_where_asked_for(stage, tmp_path, reference):
    assert latents.main([str(stage), str(tmp_path / "out"), *KEYS, "store_text=true"]) == 0
    made = rows(tmp_path / "out")[:5]
    tokens = reference.family.tokenize([row["caption"] for row in made])
    with torch.no_grad():
        states = reference.family.encode_text(reference.encoders.modules, tokens)["text"]
    for row, state in zip(made, states, strict=True):
        assert_rounded(row["text"], state.numpy(), atol=1e-4)


def test_the_variant_mlperf_encodes_the_references_images_which_are_not_rounded(stage, tmp_path, reference):
    assert latents.main([str(stage), str(tmp_path / "out"), *KEYS, "model.variant=mlperf", "normalize=unit"]) == 0
    bicubic = transforms.Resize(64, transforms.InterpolationMode.BICUBIC, antialias=True)
    chain = transforms.Compose([transforms.ToTensor(), bicubic, transforms.CenterCrop(64)])
    image = chain(Image.open(io.BytesIO(rows(stage)[3]["jpg"])))[None]
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["resize"] == "bicubic, float32"
    assert_rounded(rows(tmp_path / "out")[3]["moments"], moments_of(reference, image))


# --- samples that cannot be used ---


def test_moments_that_float16_cannot_hold_cost_their_sample(stage, unbroken, tmp_path, monkeypatch, capsys):
    encode, calls = SD2.encode_images, itertools.count()

    def encode_images(self, encoders, images):
        moments = encode(self, encoders, images)
        for row in moments:
            if bad := {3: float("nan"), 4: 70000.0, 17: float("inf")}.get(next(calls)):
                row[0, 0, 0] = bad
        return moments

    monkeypatch.setattr(SD2, "encode_images", encode_images)
    assert latents.main([str(stage), str(tmp_path / "out"), *KEYS]) == 0
    made, whole = ({row["key"]: row["moments"] for row in rows(out)} for out in (tmp_path / "out", unbroken))
    lost, reason = {f"{n:09d}" for n in (3, 4, 17)}, "moments are not finite in float16"
    assert {named[1:] for named in skipped(tmp_path / "out" / "skipped.jsonl")} == {(key, reason) for key in lost}
    assert made.keys() == whole.keys() - lost and all(np.array_equal(made[key], whole[key]) for key in made)
    assert capsys.readouterr().out.startswith(f"found 48 samples, wrote 45, skipped 3 ({reason}: 3); ")


# --- stopped, several ranks, stores ---


def test_from_a_store_to_a_store_are_the_bytes_from_a_folder_to_a_folder(stage, unbroken, bucket):  # noqa: F811
    for name, content in tree(stage).items():
        bucket.put_object(Bucket="easel", Key=f"in/images/{name}", Body=content)
    assert latents.main(["s3://easel/in/images/", "s3://easel/moments", *KEYS]) == 0
    assert objects(bucket, "moments/") == tree(unbroken)
    assert read_dataset("s3://easel/moments").kind == "moments"


@pytest.mark.slow
@pytest.mark.timeout(400, func_only=True)
def test_two_ranks_make_the_bytes_of_one(stage, unbroken, tmp_path):
    done = run("composer", "-n", "2", "-m", "prepare.latents", str(stage), str(tmp_path / "out"), *KEYS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert tree(tmp_path / "out") == tree(unbroken) and "found 48 samples, wrote 48, skipped 0; " in done.stdout


# --- inputs that are damaged ---


def test_a_damaged_shard_stops_the_command_with_both_digests(stage, unbroken, tmp_path, capsys):
    source = shutil.copytree(stage, tmp_path / "in")
    shard = source / "part-00001/shard.00000.mds"
    whole = shard.read_bytes()
    damaged = whole[:-1] + bytes([whole[-1] ^ 1])
    shard.write_bytes(damaged)
    assert latents.main([str(source), str(tmp_path / "out"), *KEYS]) == 1
    digests = f"its xxh64 is {get_hash(HASH, damaged)}, that of the dataset is {get_hash(HASH, whole)}. "
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"IN: {shard} is damaged: {digests}")
    assert not (tmp_path / "out" / "dataset.json").exists()
    shard.write_bytes(whole)
    assert latents.main([str(source), str(tmp_path / "out"), *KEYS]) == 0 and tree(tmp_path / "out") == tree(unbroken)


def test_moments_of_another_resize_than_the_runs_are_refused(unbroken):
    def problems(variant: str) -> list[tuple[str, str]]:
        section = DataConfig(stage="moments", local=str(unbroken))
        model = ModelConfig(preset="tiny", variant=variant, weights="random")
        return section.problems(8, *expected_metadata(model, DataConfig(), (64, 64)))

    assert problems("stock") == []
    [(key, text)] = problems("mlperf")
    assert key == "model.variant" and text.endswith("with this variant, or use theirs: model.variant=stock.")


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        ("{in}", "command line: IN and OUT have to be given. python -m prepare.latents --help says more."),
        ("{moments} {tmp}/out", "IN: {moments} is a dataset of moments. Possible: a dataset of images "),
        ("{wordless} {tmp}/out", "IN: {wordless} has no column caption. "),
        ("{in} {in}", "OUT: {in} lies in {in}, which is only read. "),
        ("{in} {moments} flip=true", "OUT: {moments} holds the finished work of another command: flip was null, "),
        (
            "{in} {tmp}/out precision=tf32 image_size=70",
            "precision: tf32 needs a GPU. Possible on a CPU: fp32, bf16.\n"
            "image_size: 70 x 70 px does not fit sd2. Both sides have to be multiples of 8.\n",
        ),
        (
            "{in} {tmp}/out model.weights=null",
            "model.weights: not given. Real data need encoders, and the preset tiny ",
        ),
    ],
)
def test_latents_says_what_it_cannot_do(stage, unbroken, tmp_path, capsys, words, messages):
    folders = {"in": stage, "moments": unbroken, "tmp": tmp_path}
    folders["wordless"] = images_of([{"jpg": b""}], tmp_path / "wordless", {"jpg": "bytes", "key": "str"})
    places, keys = words.format(**folders).split()[:2], words.split()[2:]
    assert latents.main([*places, *KEYS, *keys]) == 2
    assert capsys.readouterr().err.startswith(messages.format(**folders))
    assert not (tmp_path / "out").exists()


@pytest.mark.timeout(60, func_only=True)
def test_training_from_moments_is_training_from_images_to_the_rounding_of_the_moments(miniature, tmp_path):
    """The same posterior draws, noise and times. Mean and logvar are rounded to 11 bits, 4.9e-4 relative: so is the loss.

    The prediction is v, whose target has x_0.
    """
    losses = {}
    for kind, place in (("images", miniature.images), ("moments", miniature.moments)):
        words = [f"data.stage={kind}", f"data.remote={place}", "data.shuffle=false", "max_duration=1ba"]
        assert benchmark.main(miniature.small(tmp_path, kind, *words, "measure.window_batches=1")) == 0
        [line] = (tmp_path / kind / "metrics.jsonl").read_text().splitlines()
        losses[kind] = json.loads(line)["loss"]
    assert losses["moments"] == pytest.approx(losses["images"], rel=4.9e-4) and losses["moments"] != losses["images"]


@pytest.mark.timeout(60, func_only=True)
def test_moments_of_other_encoders_size_or_range_are_refused(unbroken, tmp_path, capsys):
    other = shutil.copytree(unbroken, tmp_path / "other")
    metadata = json.loads((other / "dataset.json").read_text())
    made = metadata["encoders"]["vae"]
    metadata["encoders"]["vae"] = "0" * 32
    (other / "dataset.json").write_text(json.dumps(metadata))
    words = [*TINY_RUN, "data.stage=moments", f"data.local={other}", "model.weights=random", f"run_folder={tmp_path}"]
    assert benchmark.main(words) == 2
    text = f"model.weights: its vae has the fingerprint {made}, the moments at {other} were made with {'0' * 32}. "
    assert capsys.readouterr().err.startswith(text)
    assert benchmark.main([*words, "image_size=128", "data.normalize=unit"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"data.normalize: unit, but the moments at {other} were made for symmetric. ")
    assert lines[1].startswith(f"image_size: [128, 128], but the moments at {other} were made for [64, 64]. ")


# --- mirrored images, several captions ---


def test_flipped_moments_are_those_of_mirrored_images_and_the_others_are_as_without(tmp_path):
    pixels = [np.random.default_rng(n).integers(0, 256, (64, 64, 3), np.uint8) for n in range(7)]

    def images(name: str, levels: list[np.ndarray]) -> Path:
        return images_of([{"jpg": encoded(Image.fromarray(each), "PNG")} for each in levels], tmp_path / name)

    source, mirrored = images("in", pixels), images("mirrored", [levels[:, ::-1] for levels in pixels])
    made = {}
    for name, folder, *more in (("both", source, "flip=true"), ("plain", source), ("of_mirrored", mirrored)):
        assert latents.main([str(folder), str(tmp_path / name), *KEYS, *more]) == 0
        made[name] = rows(tmp_path / name)
    for row, without, expected in zip(*made.values(), strict=True):
        assert np.array_equal(row["moments"], without["moments"])
        assert np.array_equal(row["moments_flipped"], expected["moments"])
        assert row.keys() - without.keys() == {"moments_flipped"}
    flips = [json.loads((tmp_path / name / "dataset.json").read_text()).get("flip") for name in ("both", "plain")]
    assert flips == [True, None]


@pytest.mark.parametrize("store_text", [False, True])
def test_usable_captions_are_passed_on_and_tokens_and_text_are_of_the_first(tmp_path, reference, capsys, store_text):
    captions = [["a ", "b"], [], ["", "c"], [" ", None]]
    samples = [{"jpg": picture(n), "caption": f"only {n}", "captions": each} for n, each in enumerate(captions)]
    samples += [{"jpg": b"", "caption": "x", "captions": []}, {"jpg": picture(1)[:900], "caption": "x", "captions": []}]
    source = images_of(samples, tmp_path / "in", {**COLUMNS, "captions": "json"})
    assert latents.main([str(source), str(tmp_path / "out"), *KEYS, f"store_text={str(store_text).lower()}"]) == 0
    made = rows(tmp_path / "out")
    assert [row["caption"] for row in made] == ["a", "only 1", "c"]
    tokens = reference.family.tokenize(["a", "only 1", "c"])["tokens"]
    assert [row["tokens"].tolist() for row in made] == tokens.tolist()
    reasons = ["empty caption", "image of zero bytes", "truncated or damaged image"]
    named = [(f"{n:03d}", reason) for n, reason in enumerate(reasons, 3)]
    assert [line[1:] for line in skipped(tmp_path / "out/skipped.jsonl")] == named
    message = "store_text: true: of an image's several captions the first is kept, whose text states are stored.\n"
    assert (message in capsys.readouterr().err) == store_text
    kept = [row.get("captions") for row in made]
    assert kept == ([None] * 3 if store_text else [["a", "b"], ["only 1"], ["c"]])  # a text state is of one caption
