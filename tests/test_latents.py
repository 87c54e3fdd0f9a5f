"""prepare/latents.py: moments against the VAE itself, the counts, ranks, stores, and what is refused."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY_RUN, run, sample_files, started, tree, write_tar
from PIL import Image
from streaming import MDSWriter
from streaming.base.format import reader_from_json
from test_prepare import COUNTS, IMAGES, skipped
from test_prepare_parts import bucket, objects  # noqa: F401  bucket is a fixture
from torchvision import transforms

import benchmark
from data import DataConfig
from model import build_model
from preflight.run import wanted_of_stage
from prepare import encoder, latents, parts, places, shards
from prepare.shards import COLUMNS
from stages.dataset import read_stage, write_facts
from stages.fetch import HASH
from stages.images import decode_image, resize_and_crop
from training.run_config import RunConfig
from zoo.model_config import ModelConfig
from zoo.objectives import ObjectiveConfig
from zoo.sd2 import SD2

KEYS = ["model.preset=tiny", "model.weights=random", "image_size=64", "batch_size=5"]
SIZE = (64, 64)

pytestmark = pytest.mark.usefixtures("same_number_of_threads", "quick_estimate")


@pytest.fixture(scope="module")
def reference():
    """The encoders as every command draws them."""
    config = ModelConfig(preset="tiny", weights="random")
    return build_model(config, ObjectiveConfig(), size=SIZE, normalize="symmetric", seed=0)


@pytest.fixture(scope="module")
def unbroken(stage, tmp_path_factory) -> Path:
    """What one undisturbed command makes of the stage."""
    out = tmp_path_factory.mktemp("latents") / "out"
    assert latents.main([str(stage), str(out), *KEYS]) == 0
    return out


def rows(stage: Path) -> list[dict]:
    entries = json.loads((stage / "index.json").read_text())["shards"]
    return [row for entry in entries for row in reader_from_json(str(stage), None, entry)]


def images_of(samples: list[dict], out: Path, columns: dict[str, str] = COLUMNS, size_limit: int = 1 << 20) -> Path:
    """A stage `images` as another tool may write it: nothing was checked."""
    with MDSWriter(out=str(out), columns=columns, hashes=[HASH], size_limit=size_limit) as writer:
        for number, sample in enumerate(samples):
            row = {"caption": "x", "key": f"{number:03d}", "width": 1, "height": 1, "metadata": {"n": number}, **sample}
            writer.write({name: row[name] for name in columns})
    write_facts(out, "images", {})
    return out


# --- what is stored ---


def test_moments_are_the_posterior_parameters_of_the_vae_to_the_rounding_of_float16(stage, unbroken, reference):
    vae = reference.encoders.modules["vae"]
    made, given = rows(unbroken), rows(stage)
    assert [row["key"] for row in made] == [row["key"] for row in given] and len(made) == 48
    for row, sample in zip(made, given, strict=True):
        image = resize_and_crop(decode_image(sample["jpg"]), SIZE)[None].float() / 127.5 - 1.0
        with torch.no_grad():
            expected = vae.encode(image).latent_dist.parameters[0].numpy()
        assert row["moments"].dtype == np.float16 and row["moments"].shape == (8, 8, 8)
        np.testing.assert_allclose(row["moments"].astype(np.float32), expected, rtol=2**-10, atol=1e-5)


def test_tokens_captions_keys_and_metadata_are_those_of_the_images(stage, unbroken, reference):
    made, given = rows(unbroken), rows(stage)
    tokens = reference.family.tokenize([row["caption"] for row in given])["tokens"]
    assert [row["tokens"].tolist() for row in made] == tokens.tolist() and made[0]["tokens"].dtype == np.uint16
    for name in ("caption", "key", "metadata"):
        assert [row[name] for row in made] == [row[name] for row in given]
    assert set(made[0]) == {"moments", "tokens", "caption", "key", "metadata"}


def test_the_stage_says_by_which_encoders_and_of_what_it_was_made(stage, unbroken, reference):
    facts = json.loads((unbroken / "dataset.json").read_text())
    fingerprints = reference.encoders.fingerprints
    assert set(fingerprints) == {"vae", "text"}
    given = read_stage(str(stage))
    expected = {
        "stage": "moments",
        "made_by": "prepare.latents",
        "family": "sd2",
        "preset": "tiny",
        "variant": "stock",
        "image_size": [64, 64],
        "normalize": "symmetric",
        "resize": "bicubic, uint8",
        "encoders": fingerprints,
        "precision": "fp32",
        "store_text": False,
        "source": {"index_sha256": given.index_sha256, "samples": 48},
        "counts": COUNTS,
    }
    assert {key: facts[key] for key in expected} == expected
    assert read_stage(str(unbroken)).kind == "moments" and read_stage(str(unbroken)).num_samples == 48
    assert str(stage) not in "".join(content.decode(errors="ignore") for content in tree(unbroken).values())


def test_text_states_are_stored_where_asked_for(stage, tmp_path, reference):
    assert latents.main([str(stage), str(tmp_path / "out"), *KEYS, "store_text=true"]) == 0
    made = rows(tmp_path / "out")
    tokens = reference.family.tokenize([row["caption"] for row in made[:5]])
    with torch.no_grad():
        states = reference.family.encode_text(reference.encoders.modules, tokens)["text"]
    for row, state in zip(made[:5], states, strict=True):
        assert row["text"].dtype == np.float16 and row["text"].shape == (77, 16)
        np.testing.assert_allclose(row["text"].astype(np.float32), state.numpy(), rtol=2**-10, atol=1e-4)


def test_the_variant_mlperf_encodes_the_references_images_which_are_not_rounded(stage, tmp_path, reference):
    words = ["model.preset=tiny", "model.variant=mlperf", "model.weights=random", "image_size=64", "normalize=unit"]
    assert latents.main([str(stage), str(tmp_path / "out"), *words]) == 0
    vae, row, sample = reference.encoders.modules["vae"], rows(tmp_path / "out")[3], rows(stage)[3]
    bicubic = transforms.InterpolationMode.BICUBIC
    chain = [transforms.ToTensor(), transforms.Resize(64, bicubic, antialias=True), transforms.CenterCrop(64)]
    image = transforms.Compose(chain)(Image.open(io.BytesIO(sample["jpg"])))[None]
    with torch.no_grad():
        expected = vae.encode(image).latent_dist.parameters[0].numpy()
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["resize"] == "bicubic, float32"
    np.testing.assert_allclose(row["moments"].astype(np.float32), expected, rtol=2**-10, atol=1e-5)


def test_size_range_and_precision_are_those_of_the_keys(stage, tmp_path, reference):
    keys = [key for key in KEYS if "size" not in key]
    words = ["image_size=[96,64]", "normalize=unit", "precision=bf16"]
    assert latents.main([str(stage), str(tmp_path / "out"), *keys, *words]) == 0
    row, sample = rows(tmp_path / "out")[7], rows(stage)[7]
    image = resize_and_crop(decode_image(sample["jpg"]), (96, 64))[None].float() / 255.0
    with torch.no_grad():
        expected = reference.encoders.modules["vae"].encode(image).latent_dist.parameters[0].numpy()
    assert row["moments"].shape == (8, 8, 12)
    error = np.abs(row["moments"].astype(np.float32) - expected).mean() / np.abs(expected).mean()
    assert 0 < error < 0.1  # bf16 has 8 bits; another range or size is off by more than one


# --- samples that cannot be used ---


def test_every_kind_of_image_is_encoded_or_skipped_with_its_reason(tmp_path):
    samples = [{"key": name, "jpg": data} for name, (_, data, _) in IMAGES.items()]
    captions = [" ", "", "word " * 2_000, "one\r\ntwo", "ä世"]
    samples += [
        {"key": f"caption{n}", "jpg": sample_files(1)["jpg"], "caption": text} for n, text in enumerate(captions)
    ]
    reasons = {name: outcome for name, (_, _, outcome) in IMAGES.items() if isinstance(outcome, str)}
    reasons |= {"caption0": "empty caption", "caption1": "empty caption"}
    out = tmp_path / "out"
    assert latents.main([str(images_of(samples, tmp_path / "in")), str(out), *KEYS, "workers=3"]) == 0
    assert [row["key"] for row in rows(out)] == [s["key"] for s in samples if s["key"] not in reasons]
    assert {key: reason for _, key, reason in skipped(out / "skipped.jsonl")} == reasons
    counts = json.loads((out / "dataset.json").read_text())["counts"]
    assert counts["read"] == len(samples) == counts["written"] + sum(counts["skipped"].values())


def test_moments_that_float16_cannot_hold_cost_their_sample_and_no_other(
    stage, unbroken, tmp_path, monkeypatch, capsys
):
    encode, spoilt = SD2.encode_images, {"at": 0}

    def encode_images(self, encoders, images):
        moments = encode(self, encoders, images)
        for row in range(len(images)):
            if spoilt["at"] in (3, 4, 17):
                moments[row, 0, 0, 0] = {3: float("nan"), 4: 70000.0, 17: float("inf")}[spoilt["at"]]
            spoilt["at"] += 1
        return moments

    monkeypatch.setattr(SD2, "encode_images", encode_images)
    assert latents.main([str(stage), str(tmp_path / "out"), *KEYS]) == 0
    made = {row["key"]: row["moments"] for row in rows(tmp_path / "out")}
    whole = {row["key"]: row["moments"] for row in rows(unbroken)}
    lost = [f"{n:09d}" for n in (3, 4, 17)]
    named = [(key, reason) for _, key, reason in skipped(tmp_path / "out" / "skipped.jsonl")]
    assert named == [(key, "moments are not finite in float16") for key in lost]
    assert all(np.array_equal(made[key], whole[key]) for key in whole if key not in lost) and len(made) == 45
    assert capsys.readouterr().out.startswith(
        "found 48 samples, wrote 45, skipped 3 (moments are not finite in float16: 3); "
    )


@pytest.mark.parametrize("num_samples", [1, 47])
def test_any_number_of_samples_comes_out_whole_with_any_number_of_threads(tmp_path, num_samples):
    files = {f"{n:09d}": sample_files(n) for n in range(num_samples)}
    source = write_tar(tmp_path / "in.tar", files)
    assert shards.main([str(source), str(tmp_path / "images"), "shard_size=16kb"]) == 0
    for workers in (1, 4):
        out = tmp_path / f"{workers}"
        assert latents.main([str(tmp_path / "images"), str(out), *KEYS, f"workers={workers}", "shard_size=4kb"]) == 0
        assert [row["key"] for row in rows(out)] == list(files)
    assert tree(tmp_path / "1") == tree(tmp_path / "4")


def test_where_nothing_can_be_used_there_is_no_stage(tmp_path, capsys):
    source = images_of([{"jpg": b""}] * 7, tmp_path / "in")
    assert latents.main([str(source), str(tmp_path / "out"), *KEYS]) == 1
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("found 7 samples, wrote 0, skipped 7 (image of zero bytes: 7); ")
    assert line.endswith(f"; no stage; reasons: {tmp_path}/out/skipped.jsonl")
    assert sorted(tree(tmp_path / "out")) == ["part-00000/part.json", "plan.json", "skipped.jsonl"]


# --- stopped, several ranks, stores ---


def test_stopped_at_any_file_it_goes_on_to_the_same_bytes(stage, unbroken, tmp_path, monkeypatch, capsys):
    put, whole = places.Folder.put, tree(unbroken)
    for nth in range(len(whole)):
        out, calls = tmp_path / f"{nth}", itertools.count()

        def stopped(self, name, file, nth=nth, calls=calls):
            if next(calls) == nth:
                raise OSError("no space")
            put(self, name, file)

        with monkeypatch.context() as patch:
            patch.setattr(places.Folder, "put", stopped)
            assert latents.main([str(stage), str(out), *KEYS]) == (1 if nth else 2)  # without a plan it did not start
        with pytest.raises(ValueError):
            read_stage(str(out))
        times = {path: path.stat().st_mtime_ns for path in out.glob("*/part.json")}
        assert latents.main([str(stage), str(out), *KEYS]) == 0
        assert tree(out) == whole and {path: path.stat().st_mtime_ns for path in times} == times


def test_who_makes_a_part_changes_no_byte(stage, unbroken, tmp_path, monkeypatch):
    """Rank 0 stops after the plan; rank 1 of 2 makes its share; ranks 0 of 2 and of 1 the rest."""
    out = tmp_path / "out"
    words = [str(stage), str(out), *KEYS]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(latents, "make_parts", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        latents.main(words)
    num = len(json.loads((out / "plan.json").read_text())["parts"])
    for rank in (1, 0):
        with monkeypatch.context() as patch:
            for name, value in {
                "global_rank": rank,
                "local_rank": rank,
                "world_size": 2,
                "local_world_size": 2,
            }.items():
                patch.setattr(latents.dist, f"get_{name}", lambda value=value: value)
            assert latents.main(words) == 0
        done = {int(path.parent.name[-5:]) for path in out.glob("*/part.json")}
        assert done == (set(range(1, num, 2)) if rank else set(range(num)))
    assert tree(out) == tree(unbroken)


def test_from_a_store_to_a_store_are_the_bytes_from_a_folder_to_a_folder(stage, unbroken, bucket):  # noqa: F811
    for name, content in tree(stage).items():
        bucket.put_object(Bucket="easel", Key=f"in/images/{name}", Body=content)
    assert latents.main(["s3://easel/in/images/", "s3://easel/moments", *KEYS]) == 0
    assert objects(bucket, "moments/") == tree(unbroken)
    assert read_stage("s3://easel/moments").kind == "moments"


@pytest.mark.slow
@pytest.mark.timeout(400, func_only=True)
def test_two_ranks_killed_and_started_again_on_one_make_the_bytes_of_one(stage, unbroken, tmp_path):
    words = ["-m", "prepare.latents", str(stage), str(tmp_path / "out"), *KEYS]
    done = run("composer", "-n", "2", *words[:3], str(tmp_path / "two"), *KEYS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert tree(tmp_path / "two") == tree(unbroken)
    assert "found 48 samples, wrote 48, skipped 0; " in done.stdout

    slow = "import time, prepare.latents as p; m = p.make_part\n"
    slow += "p.make_part = lambda *a: (m(*a), time.sleep(1))\nimport sys; sys.exit(p.main(sys.argv[1:]))\n"
    (tmp_path / "slow.py").write_text(slow)  # a second between parts, in which to be killed
    with started("composer", "-n", "2", str(tmp_path / "slow.py"), *words[2:]):
        while not list((tmp_path / "out").glob("*/part.json")):
            time.sleep(0.05)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/part.json")}
    assert made and not (tmp_path / "out" / "dataset.json").exists()
    done = run("python", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert tree(tmp_path / "out") == tree(unbroken)
    assert {path: path.stat().st_mtime_ns for path in made} == made


@pytest.mark.slow
@pytest.mark.timeout(90, func_only=True)
def test_two_ranks_that_cannot_start_say_it_once(stage, tmp_path):
    words = [str(stage), str(tmp_path / "out"), *KEYS, "image_size=65", "precision=fp64"]
    done = run("composer", "-n", "2", "-m", "prepare.latents", *words)
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr
    assert done.stderr.count("image_size: 65 x 65 px does not fit sd2. Both sides have to be multiples of 8.\n") == 1
    assert done.stderr.count("command line: precision is 'fp64'. Possible: one of fp32, tf32, bf16.\n") == 1
    assert not (tmp_path / "out").exists()


# --- inputs that are damaged ---


def test_a_damaged_shard_stops_the_command_with_both_digests(stage, unbroken, tmp_path, capsys):
    source = shutil.copytree(stage, tmp_path / "in")
    name = "part-00001/shard.00000.mds"
    whole = (source / name).read_bytes()
    (source / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert latents.main([str(source), str(tmp_path / "out"), *KEYS]) == 1
    listed = next(
        s["raw_data"]
        for s in json.loads((source / "index.json").read_text())["shards"]
        if s["raw_data"]["basename"] == name
    )
    from streaming.base.hashing import get_hash

    assert capsys.readouterr().err.splitlines()[-1] == (
        f"IN: {source}/{name} is damaged: its xxh64 is {get_hash(HASH, (source / name).read_bytes())}, that of the stage "
        f"is {listed['hashes'][HASH]}. Make that stage again, or copy it anew."
    )
    assert not (tmp_path / "out" / "dataset.json").exists()
    (source / name).write_bytes(whole)  # mended, it goes on
    assert latents.main([str(source), str(tmp_path / "out"), *KEYS]) == 0
    assert tree(tmp_path / "out") == tree(unbroken)


def test_a_shard_that_is_missing_in_a_store_stops_the_command_by_name(stage, bucket, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr(places, "NUM_TRIES", 1)
    for name, content in tree(stage).items():
        if name != "part-00001/shard.00000.mds":
            bucket.put_object(Bucket="easel", Key=f"holes/{name}", Body=content)
    assert latents.main(["s3://easel/holes", "s3://easel/holes_moments", *KEYS]) == 1
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith(
            "IN: s3://easel/holes/part-00001/shard.00000.mds cannot be read: s3://easel/holes/part-00001/shard.00000.mds "
            "cannot be read: ClientError: "
        )
    )


def test_a_transfer_that_fails_once_is_done_again(stage, tmp_path):
    class Shaky(places.Folder):
        reads = 0

        def fetch(self, name, folder):
            self.reads += 1
            file = folder / "copy.mds"
            file.write_bytes((self.path / name).read_bytes()[self.reads == 1 :])
            return file

    entry = json.loads((stage / "index.json").read_text())["shards"][0]
    reader = encoder.open_shard(Shaky(str(stage)), entry, tmp_path)
    assert len(list(reader)) == entry["samples"]


def test_a_run_looks_for_the_columns_that_are_written(unbroken):
    tiny = RunConfig(model=ModelConfig(preset="tiny", weights="random"), image_size=64)
    section = DataConfig(stage="moments", local=str(unbroken))
    assert section.problems(8, *wanted_of_stage(tiny)) == []
    _, encodings = wanted_of_stage(dataclasses.replace(tiny, image_size=128))
    has, wanted = (encodings((128, 128))["moments"].replace("16,16", f"{side},{side}") for side in (8, 16))
    assert section.problems(8, {}, lambda size: encodings((128, 128))) == [
        ("data.local", f"{unbroken} has a column moments of {has}, this run reads {wanted}. Make the stage again.")
    ]


@pytest.mark.parametrize("made_with", ["stock", "mlperf"])
def test_moments_of_another_resize_than_the_runs_are_refused(unbroken, tmp_path, made_with):
    """Where the stage says nothing of it, it is taken: moments of others do not say it."""
    folder = shutil.copytree(unbroken, tmp_path / "moments")
    facts = json.loads((folder / "dataset.json").read_text())
    resize, other = {"stock": ("bicubic, uint8", "bicubic, float32"), "mlperf": ("bicubic, float32", "bicubic, uint8")}[
        made_with
    ]
    of_run = {"stock": "mlperf", "mlperf": "stock"}[made_with]
    (folder / "dataset.json").write_text(json.dumps({**facts, "variant": made_with, "resize": resize}))

    def problems(variant: str) -> list[tuple[str, str]]:
        section = DataConfig(stage="moments", local=str(folder))  # it keeps what it has read
        model = ModelConfig(preset="tiny", variant=variant, weights="random")
        return section.problems(8, *wanted_of_stage(RunConfig(model=model, image_size=64)))

    assert problems(made_with) == []
    assert problems(of_run) == [
        (
            "model.variant",
            f"its images are resized by '{other}', but the moments at {folder} were made of images resized by '{resize}'. "
            f"Make the moments again with this variant, or use theirs: model.variant={made_with}.",
        )
    ]
    del facts["resize"]
    (folder / "dataset.json").write_text(json.dumps(facts))
    assert problems(of_run) == []


def test_a_pickled_column_is_not_read(tmp_path, capsys):
    source = images_of(
        [{"jpg": b"", "evil": 1}], tmp_path / "in", {"jpg": "bytes", "caption": "str", "key": "str", "evil": "pkl"}
    )
    assert latents.main([str(source), str(tmp_path / "out"), *KEYS]) == 2
    assert (
        'is ["str", "pkl", "bytes", "str"]. Possible: encodings of MDS, but none that could' in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["{in}"], ["command line: IN and OUT have to be given. python -m prepare.latents --help says more."]),
        (
            ["{tmp}/none", "{tmp}/out"],
            ["IN: no folder {tmp}/none. Check the path, or make the stage: python -m prepare.shards --help"],
        ),
        (
            ["{moments}", "{tmp}/out"],
            ["IN: {moments} is a stage of moments. Possible: a stage of images (prepare.shards)."],
        ),
        (
            ["{empty}", "{tmp}/out"],
            ["IN: {empty}/index.json lists no sample. Make the stage again: python -m prepare.shards --help"],
        ),
        (
            ["{wordless}", "{tmp}/out"],
            ["IN: {wordless} has no column caption. Make that stage again, or copy it anew."],
        ),
        (["{in}", "{in}"], ["OUT: {in} lies in {in}, which is only read. Give a place outside of it."]),
        (["{in}", "{in}/out"], ["OUT: {in}/out lies in {in}, which is only read. Give a place outside of it."]),
        (
            ["ftp://b/in", "{tmp}/out"],
            ["IN: ftp://b/in is in no known store. Possible: a folder, alipan://, gs://, oci://, s3://."],
        ),
        (["{in}", "{moments}/plan.json"], ["OUT: {moments}/plan.json is a file. Give a folder."]),
        (["{in}", "{in}/../full"], ["OUT: {in}/../full exists and is not empty. Give a new folder, or remove it."]),
        (
            ["{in}", "{moments}", "batch_size=4"],
            [
                "OUT: {moments} holds the finished work of another command: batch_size was 5, is 4. Give another OUT, or "
                "remove this one."
            ],
        ),
        (
            ["{in}", "{tmp}/out", "batch_size=0", "workers=x", "precision=tf32", "image_size=70", "shard_size=1"],
            [
                "command line: batch_size is 0. Possible: 1 to 65,536 or null.",
                "command line: workers is 'x'. Possible: an integer.",
                "command line: shard_size is 1. Possible: 1kb to 4gb.",
                "precision: tf32 needs a GPU. Possible on a CPU: fp32, bf16.",
                "image_size: 70 x 70 px does not fit sd2. Both sides have to be multiples of 8.",
            ],
        ),
        (
            ["{in}", "{tmp}/out", "model.weights=null", "model.preset=huge"],
            [
                "model.preset: unknown preset 'huge'. Known: full, tiny.",
            ],
        ),
        (
            ["{in}", "{tmp}/out", "model.weights=null", "model.preset=tiny"],
            [
                "model.weights: not given. Real data need encoders, and the preset tiny has none on the hub. Give a name "
                "on the hub, a diffusers folder or an LDM checkpoint, or model.weights=random for random ones.",
            ],
        ),
        (
            ["{in}", "{tmp}/out", "model.weights=sd2.ckpt"],
            ["model.weights: sd2.ckpt: there is no such file or folder. Give a diffusers folder or an LDM file."],
        ),
    ],
)
def test_latents_says_what_it_cannot_do(stage, unbroken, tmp_path, capsys, words, messages):
    places_of = {"in": stage, "moments": unbroken, "tmp": tmp_path}
    for name, columns in (("empty", COLUMNS), ("wordless", {"jpg": "bytes", "key": "str"})):
        places_of[name] = images_of([] if name == "empty" else [{"jpg": b""}], tmp_path / name, columns)
    (stage.parent / "full").mkdir(exist_ok=True)
    (stage.parent / "full" / "file").touch()
    given, keys = words[:2] if len(words) > 1 else words, words[2:]
    assert latents.main([word.format(**places_of) for word in [*given, *KEYS, *keys]]) == 2
    assert capsys.readouterr().err == "".join(f"{message.format(**places_of)}\n" for message in messages)
    assert not (tmp_path / "out").exists()


def test_print_config_shows_every_key_and_starts_nothing(stage, tmp_path, capsys):
    assert latents.main([str(stage), str(tmp_path / "out"), *KEYS, "--print_config"]) == 0
    assert "batch_size: 5\n" in capsys.readouterr().out and not (tmp_path / "out").exists()


def test_the_counts_of_the_parts_add_up_to_the_counts_of_the_stage(unbroken):
    accounts = [json.loads(path.read_text())["account"] for path in unbroken.glob("*/part.json")]
    assert len(accounts) == len(json.loads((unbroken / "plan.json").read_text())["parts"]) > 2
    assert sum(counts["read"] for counts in accounts) == 48
    assert parts.part_name(12) == "part-00012"


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
    other = tmp_path / "other"
    shutil.copytree(unbroken, other)
    facts = json.loads((other / "dataset.json").read_text())
    made = facts["encoders"]["vae"]
    (other / "dataset.json").write_text(json.dumps({**facts, "encoders": {**facts["encoders"], "vae": "0" * 32}}))
    words = [*TINY_RUN, "data.stage=moments", f"data.local={other}", "model.weights=random", f"run_folder={tmp_path}"]
    assert benchmark.main(words) == 2
    assert capsys.readouterr().err == (
        f"model.weights: its vae has the fingerprint {made}, the moments at {other} were made with {'0' * 32}. Use those "
        f"weights, or make the moments again: python -m prepare.latents --help\n"
    )
    words += ["image_size=128", "data.normalize=unit"]
    assert benchmark.main(words) == 2
    assert capsys.readouterr().err == (
        f"data.normalize: unit, but the moments at {other} were made for symmetric. Use that value.\n"
        f"image_size: [128, 128], but the moments at {other} were made for [64, 64]. Use that value.\n"
    )


# --- mirrored pictures, several captions ---


def test_flipped_moments_are_those_of_a_stage_of_mirrored_pictures_and_the_others_are_as_without(tmp_path):
    pixels = [np.random.default_rng(n).integers(0, 256, (64, 64, 3), np.uint8) for n in range(7)]

    def png(levels: np.ndarray) -> dict[str, bytes]:
        file = io.BytesIO()
        Image.fromarray(levels).save(file, "PNG")
        return {"jpg": file.getvalue()}

    given = images_of([png(levels) for levels in pixels], tmp_path / "given")
    mirrored = images_of([png(levels[:, ::-1]) for levels in pixels], tmp_path / "mirrored")
    for source, name, more in ((given, "both", ["flip=true"]), (given, "plain", []), (mirrored, "of_mirrored", [])):
        assert latents.main([str(source), str(tmp_path / name), *KEYS, *more]) == 0
    both, plain, of_mirrored = (rows(tmp_path / name) for name in ("both", "plain", "of_mirrored"))
    for row, without, expected in zip(both, plain, of_mirrored, strict=True):
        assert np.array_equal(row["moments"], without["moments"])
        assert np.array_equal(row["moments_flipped"], expected["moments"]) and row.keys() - without.keys() == {
            "moments_flipped"
        }
    facts = {name: json.loads((tmp_path / name / "dataset.json").read_text()) for name in ("both", "plain")}
    assert facts["both"]["flip"] is True and "flip" not in facts["plain"]  # as older versions wrote it
    assert "flip" not in json.loads((tmp_path / "plain/plan.json").read_text())


def test_flip_is_another_command_than_the_unfinished_one(stage, unbroken, capsys):
    assert latents.main([str(stage), str(unbroken), *KEYS, "flip=true"]) == 2
    assert capsys.readouterr().err == (
        f"OUT: {unbroken} holds the finished work of another command: flip was null, is true. Give another OUT, or remove "
        f"this one.\n"
    )


@pytest.mark.parametrize("store_text", [False, True])
def test_usable_captions_are_passed_on_and_tokens_and_text_are_of_the_first(tmp_path, reference, capsys, store_text):
    captions = [["a ", "b"], [], ["", "c"], [" ", None]]
    samples = [
        {"jpg": sample_files(n)["jpg"], "caption": f"only {n}", "captions": each} for n, each in enumerate(captions)
    ]
    given = images_of(samples, tmp_path / "given", {**COLUMNS, "captions": "json"})
    assert latents.main([str(given), str(tmp_path / "out"), *KEYS, f"store_text={str(store_text).lower()}"]) == 0
    made = rows(tmp_path / "out")
    assert [row["caption"] for row in made] == ["a", "only 1", "c"]
    tokens = reference.family.tokenize(["a", "only 1", "c"])["tokens"]
    assert [row["tokens"].tolist() for row in made] == tokens.tolist()
    assert [line[1:] for line in skipped(tmp_path / "out/skipped.jsonl")] == [("003", "empty caption")]
    told = "store_text: true: of a picture's several captions the first is kept, whose text states are stored.\n"
    assert (told in capsys.readouterr().err) == store_text
    if store_text:  # a state is of one caption
        assert "captions" not in made[0]
    else:
        assert [row["captions"] for row in made] == [["a", "b"], ["only 1"], ["c"]]
