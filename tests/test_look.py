"""prepare/look.py: facts against the samples themselves, the contact sheet, what is damaged, and what is refused."""

from __future__ import annotations

import io
import json
import shutil
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import picture, tree, write_tar
from PIL import Image
from streaming.base.format import reader_from_json
from test_latents import images_of, rows
from test_prepare import IMAGES, moments, npy
from test_prepare_parts import bucket  # noqa: F401  bucket is a fixture

from prepare import latents, look, look_samples, shards
from prepare.shards import COLUMNS
from stages.dataset import write_facts
from zoo import load_family
from zoo.encoders import build_encoders

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(60, func_only=True),
    pytest.mark.usefixtures("same_number_of_threads"),
]  # slow: most draw a picture

TINY = ["model.preset=tiny", "model.weights=random", "image_size=64", "batch_size=8"]
CAPTIONS = [
    "word " * 10_000,
    "A" * 5_000,
    "from $5_{x^ \\frac to $6",
    "世界の人々が集まる庭園で" * 20,
    "👩‍💻🎉🦄",
    "مرحبا بالعالم",
    "tab\tnew\r\nline \x1b[31mred\x07",
    "WWWW MMMM " * 30,
]


@pytest.fixture(scope="module")
def encoded(stage, tmp_path_factory) -> Path:
    """The moments of the stage, with text states."""
    out = tmp_path_factory.mktemp("look") / "moments"
    assert latents.main([str(stage), str(out), *TINY, "store_text=true"]) == 0
    return out


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A stage of MLPerf's own moments: nobody says which encoders made them."""
    folder = tmp_path_factory.mktemp("mlperf")
    samples = {f"{n}": {"npy": npy(moments(n)), "txt": CAPTIONS[n].encode()} for n in range(5)}
    assert shards.main([str(write_tar(folder / "in.tar", samples)), str(folder / "out")]) == 0
    return folder / "out"


def facts_of(text: str) -> dict[str, str]:
    """Name -> value of the printed facts; a line without a name belongs to the one above it."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, value = line[: look.NAME_WIDTH].rstrip(), line[look.NAME_WIDTH + 1 :]
        if name:
            found[name] = value
        else:
            found[next(reversed(found))] += f" | {value}"
    return found


def looked(capsys, *words: object, code: int = 0) -> dict[str, str]:
    """Look, quietly and to the given exit code; at one sample where nothing is said of them: a page of 16 takes a second."""
    capsys.readouterr()
    assert look.main(["samples=1", *map(str, words)]) == code
    captured = capsys.readouterr()
    assert code or captured.err == ""
    return facts_of(captured.out)


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


# --- facts ---


def test_facts_of_images_are_those_of_the_files_and_the_samples(stage, tmp_path, capsys):
    facts, made = looked(capsys, stage, tmp_path / "a.png"), rows(stage)
    index = json.loads((stage / "index.json").read_text())["shards"]
    files = [stage / shard["raw_data"]["basename"] for shard in index]
    assert facts["kind"] == "images" and facts["location"] == str(stage) and facts["made by"] == "prepare.shards"
    assert facts["shards"] == str(len(files)) and facts["samples"] == "48" and facts["counts, written"] == "48"
    assert facts["bytes"].endswith(f"({sum(file.stat().st_size for file in files):,})")
    counts = [shard["samples"] for shard in index]
    assert facts["samples a shard"].startswith(f"median {np.median(counts):g}, least {min(counts)}, ")
    assert facts["columns"] == ", ".join(f"{name} ({kind})" for name, kind in sorted(COLUMNS.items()))
    read = f"48 samples of {len(files)} of {len(files)} shards; the hashes of these are right"
    assert facts["read"] == read and facts["unusable samples"] == "0 of 48 (0 %)"
    assert facts["format: JPEG"] == "48 of 48 (100 %)"
    for name, unit in (("width", "width, px"), ("height", "height, px")):
        values = sorted(row[name] for row in made)
        most = values[int(np.ceil(0.95 * 48)) - 1]
        expected = f"median {np.median(values):g}, least {values[0]}, 95 % at most {most}, greatest {values[-1]}"
        assert facts[unit] == expected
    for shape, num in (("wider than high", "24 of 48 (50 %)"), ("square", "12 of 48 (25 %)")):
        assert facts[shape] == num
    assert facts["bytes an image"].startswith(f"median {np.median([len(row['jpg']) for row in made]) / 1024:.1f} KiB")
    assert facts["captions that come again"] == facts["keys that come again"] == "0 of 48 (0 %)"
    assert facts["picture"] == str(tmp_path / "a.png") and not [name for name in facts if "posterior" in name]


def test_facts_of_moments_are_the_means_and_deviations_of_all_their_values(encoded, tmp_path, capsys):
    facts = looked(capsys, encoded, tmp_path / "a.png")
    stored = np.stack([row["moments"] for row in rows(encoded)]).astype(np.float64)  # (48, 8, 8, 8)
    mean, deviation = stored[:, :4], np.exp(0.5 * stored[:, 4:])
    for name, values in (("posterior's mean", mean), ("posterior's deviation", deviation)):
        channels = values.transpose(1, 0, 2, 3).reshape(4, -1)
        for what, number, by_channel in (
            ("mean", values.mean(), channels.mean(axis=1)),
            ("spread", values.std(), channels.std(axis=1)),
        ):
            given = ", ".join(f"{value:.3g}" for value in by_channel)
            assert facts[f"{name}: {what}"] == f"{number:.4g}; by channel {given}"
    # A draw has the mean's spread and its own: law of total variance, times the scale of SD's latents.
    expected = 0.18215 * np.sqrt(mean.var() + (deviation**2).mean())
    drawn = float(facts["drawn latents, scaled: spread"].split(";")[0])
    assert drawn == pytest.approx(expected, rel=5 / np.sqrt(mean.size))  # five standard errors
    assert facts["stored tokens not of the caption"] == "0 of 48 (0 %)"
    assert facts["preset"] == "tiny" and facts["normalize"] == "symmetric" and facts["image size"] == "[64, 64]"
    assert len(facts["encoders, vae"]) == 32 and facts["source, samples"] == "48" and "text (nd" in facts["columns"]


def test_captions_are_measured_before_they_are_cut(tmp_path, capsys):
    captions = [*CAPTIONS, "again", "again", "again", " "]
    source = images_of([{"jpg": picture(n), "caption": text} for n, text in enumerate(captions)], tmp_path / "in")
    facts = looked(capsys, source, tmp_path / "a.png")
    tokens = load_family("sd2", "tiny", "stock").tokenize(captions)["tokens"]
    cut = int((tokens[:, -1] != 0).sum())  # none of them has exactly 77
    assert 2 < cut < 8 and facts["cut off at 77 tokens"].startswith(f"{cut} of 12 ")
    assert facts["caption, CLIP's tokens"].endswith("greatest 2,002")
    assert facts["caption, characters"].endswith("greatest 50,000")
    assert facts["empty captions"] == "1 of 12 (8.33 %)"
    assert facts["captions that come again"] == "3 of 12 (25 %) | 3 times: again"


def test_token_counts_are_those_of_the_family_up_to_its_limit():
    captions = ["", "a b c", "!", "it's 3.5 &amp; more", "x " * 75, "x " * 76, *CAPTIONS]
    family = load_family("sd2", "tiny", "stock")
    tokens = family.tokenize(captions)["tokens"]
    for caption, row in zip(captions, tokens, strict=True):
        sample = look_samples.look_at(family, {"jpg": "bytes"}, {"caption": memoryview(caption.encode())})
        assert (
            min(sample.numbers["caption, CLIP's tokens"], 77) == int(row.argmax()) + 1
        )  # the end mark has the greatest number


def test_unusable_samples_are_counted_by_reason_and_named(tmp_path, capsys):
    samples = [{"key": name, "jpg": data} for name, (_, data, _) in IMAGES.items()]
    samples += [{"key": "silent", "jpg": picture(1), "caption": " "}, {"key": "pixel", "jpg": picture(2)}]
    facts = looked(capsys, images_of(samples, tmp_path / "in"), tmp_path / "a.png")
    num = len(samples)
    reasons = [(outcome, name) for name, (_, _, outcome) in IMAGES.items() if isinstance(outcome, str)]
    reasons.append(("empty caption", "silent"))
    assert facts["unusable samples"].startswith(f"{len(reasons)} of {num} (")
    for reason, _ in reasons:
        named = [name for why, name in reasons if why == reason]
        assert f"; {reason}: {len(named)} ({', '.join(named)})" in facts["unusable samples"]
    formats = {name.removeprefix("format: ") for name in facts if name.startswith("format: ")}
    assert formats == {"JPEG", "PNG", "WebP", "AVIF", "BMP", "GIF", "TIFF", "other"}
    assert facts["keys that come again"] == f"2 of {num} ({200 / num:.3g} %) | 2 times: pixel"


def test_moments_that_are_not_finite_are_counted_and_left_out_of_the_rest(encoded, tmp_path, capsys):
    made = [
        {name: np.array(value) if name in ("moments", "tokens") else value for name, value in row.items()}
        for row in rows(encoded)[:6]
    ]
    for row, value in ((made[1], np.nan), (made[4], np.inf)):
        row["moments"][0, 0, :2] = value
    made[5]["tokens"][3] += 1
    kinds = {"moments": "ndarray:float16:8,8,8", "tokens": "ndarray:uint16:77", "caption": "str", "key": "str"}
    source = images_of(made, tmp_path / "in", kinds)
    write_facts(source, "moments", {"family": "sd2", "preset": "tiny", "variant": "stock"})
    facts = looked(capsys, source, tmp_path / "a.png")
    named = f"{made[1]['key']}, {made[4]['key']}"
    assert facts["unusable samples"] == f"2 of 6 (33.3 %); moments are not finite in float16: 2 ({named})"
    assert facts["stored tokens not of the caption"] == "1 of 6 (16.7 %)"
    left = np.stack([made[n]["moments"][:4] for n in (0, 2, 3, 5)]).astype(np.float64)
    assert facts["posterior's mean: mean"].startswith(f"{left.mean():.4g};")


# --- which samples ---


def test_samples_are_spread_over_eight_shards_and_more_only_where_these_hold_too_few():
    sizes = [100, 120, 80] * 20
    few, many = look.choose(sizes, 50, seed=0), look.choose(sizes, 2000, seed=0)
    assert len(few) == 8 and sum(map(len, few.values())) == 50
    assert sum(map(len, many.values())) == 2000 and 17 <= len(many) <= 24  # 2000 of 80 to 120 each
    for chosen in (few, many):
        assert list(chosen) == sorted(chosen)
        for shard, of in chosen.items():
            assert of == sorted(set(of)) and of[0] >= 0 and of[-1] < sizes[shard]
    assert look.choose(sizes, 50, seed=0) == few != look.choose(sizes, 50, seed=1)
    assert look.choose([3, 0, 2], 9, seed=0) == {0: [0, 1, 2], 2: [0, 1]}


def test_every_sample_of_shards_of_one_size_is_chosen_as_often():
    counts = np.zeros((10, 6))
    for seed in range(600):
        for shard, of in look.choose([6] * 10, 12, seed).items():
            counts[shard, of] += 1
    # 12 of 60 in each of 600 draws: 120 each, standard deviation below sqrt(120); 60 cells, so five of them.
    assert abs(counts - 120).max() < 5 * np.sqrt(120)


def test_a_seed_gives_the_same_picture_and_facts_and_another_one_others(stage, tmp_path, capsys):
    words = ["samples=4", "read=20"]
    first = looked(capsys, stage, tmp_path / "a.png", *words)
    again = looked(capsys, stage, tmp_path / "b.png", *words)
    other = looked(capsys, stage, tmp_path / "c.png", *words, "seed=1")
    assert first["read"].startswith("20 samples of ")
    assert {**first, "picture": ""} == {**again, "picture": ""} != {**other, "picture": ""}
    files = [(tmp_path / f"{name}.png").read_bytes() for name in "abc"]
    assert files[0] == files[1] != files[2]


# --- the picture ---


@pytest.mark.parametrize("samples", [1, 5, 64])
def test_captions_of_any_length_and_script_make_a_picture_without_a_warning(tmp_path, capsys, samples):
    """Warnings are errors in these tests, and `looked` wants nothing on stderr."""
    given = [{"jpg": picture(n, (60 + 40 * n, 90)), "caption": text} for n, text in enumerate(CAPTIONS)]
    source = images_of(given, tmp_path / "in")
    looked(capsys, source, tmp_path / "a.png", f"samples={samples}")
    image = pixels(tmp_path / "a.png")
    assert image.shape[1] == 1584 and image.std() > 10


def test_the_shown_pictures_are_the_samples_of_the_stage(tmp_path, capsys):
    colours = [(250, 10, 10), (10, 250, 10), (10, 10, 250)]
    given = []
    for number, colour in enumerate(colours):
        file = io.BytesIO()
        Image.new("RGB", (50, 50), colour).save(file, "PNG")
        given.append({"jpg": file.getvalue(), "caption": f"{number}"})
    looked(capsys, images_of(given, tmp_path / "in"), tmp_path / "a.png", "samples=16")
    image = pixels(tmp_path / "a.png")
    left = [int(np.argwhere((image == colour).all(axis=2))[:, 1].min()) for colour in colours]
    areas = [int((image == colour).all(axis=2).sum()) for colour in colours]
    assert left == sorted(left) and min(areas) > 200**2  # each about a tile: 264 px


def test_moments_are_decoded_from_their_mean_by_the_vae_in_the_range_of_their_images(encoded):
    family = load_family("sd2", "tiny", "stock")
    vae = build_encoders(family, "random").modules["vae"]
    stored = [row["moments"] for row in rows(encoded)[:2]]
    with torch.no_grad():
        for normalize in ("symmetric", "unit"):
            for values, shown in zip(stored, look_samples.decode(vae, stored, normalize), strict=True):
                image = vae.decode(torch.from_numpy(values[:4].astype(np.float32))[None]).sample[0]
                unit = (image / 2 + 0.5 if normalize == "symmetric" else image).clamp(0, 1)
                expected = (unit.permute(1, 2, 0).numpy() * 255).round()
                assert shown.shape == (64, 64, 3) and np.abs(shown - expected).max() <= 1  # rounding at a half


def test_without_weights_moments_are_colours_that_can_be_compared():
    flat = np.zeros((8, 4, 4), np.float16)
    ramp = np.broadcast_to(np.linspace(-3, 3, 4).astype(np.float16), (8, 4, 4))
    pale, bright = look_samples.channels_as_rgb([flat, ramp])
    assert pale.shape == (4, 4, 3) and pale.std() == 0 and abs(int(pale[0, 0, 0]) - 128) <= 1
    assert (bright[:, 0] == 0).all() and (bright[:, -1] == 255).all()
    assert look_samples.channels_as_rgb([flat])[0].std() == 0
    assert look_samples.channels_as_rgb([ramp[:2]])[0].shape == (4, 4, 3) and look.channels_as_rgb([]) == []


def test_it_is_said_by_which_vae_moments_are_shown(encoded, published, tmp_path, capsys):
    out = tmp_path / "a.png"
    how = "moments are shown as"
    assert looked(capsys, encoded, out)[how] == look.AS_COLOURS
    by_random = "pictures by a VAE of random weights"
    assert looked(capsys, encoded, out, "model.weights=random")[how] == f"{by_random}, which made them"
    other = shutil.copytree(encoded, tmp_path / "other")
    facts = json.loads((other / "dataset.json").read_text())
    made = facts["encoders"]["vae"]
    (other / "dataset.json").write_text(json.dumps({**facts, "encoders": {"vae": "0" * 32}}))
    told = f"{by_random}, NOT the one that made them: {made} instead of {'0' * 32}"
    assert looked(capsys, other, out, "model.weights=random")[how] == told
    unknown = f"{by_random}, perhaps not the one that made them: dataset.json does not say"
    told = looked(capsys, published, out, "model.weights=random", "model.preset=tiny")
    assert told[how] == unknown and told["encoders, vae"] == "null"


def test_a_persons_own_settings_of_matplotlib_are_neither_used_nor_changed(tmp_path):
    import matplotlib

    page = (["head"], [np.zeros((9, 9, 3), np.uint8)], ["$x$"])
    look_samples.write_page(tmp_path / "a.png", *page)
    with matplotlib.rc_context({"figure.facecolor": "red", "font.size": 30.0, "text.usetex": True}):
        look_samples.write_page(tmp_path / "b.png", *page)
        assert matplotlib.rcParams["figure.facecolor"] == "red" and matplotlib.rcParams["text.usetex"]
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        matplotlib.rcParams["font.size"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png"]


# --- stages that are damaged, or elsewhere ---


def test_damaged_shards_are_named_and_the_others_are_looked_at(stage, tmp_path, capsys):
    source = shutil.copytree(stage, tmp_path / "in")
    index = json.loads((source / "index.json").read_text())["shards"]
    names = [index[number]["raw_data"]["basename"] for number in (0, 2)]
    for name in names:
        whole = (source / name).read_bytes()
        (source / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert look.main([str(source), str(tmp_path / "a.png")]) == 1
    captured = capsys.readouterr()
    lines, facts = captured.err.splitlines(), facts_of(captured.out)
    assert len(lines) == 2
    for line, name in zip(lines, names, strict=True):
        assert line.startswith(f"REMOTE: {source}/{name} is damaged: its xxh64 is ")
        assert line.endswith(". Make that stage again, or copy it anew.")
    num, left = len(index), 48 - index[0]["samples"] - index[2]["samples"]
    assert facts["read"] == f"{left} samples of {num - 2} of {num} shards; the hashes of these are right"
    assert facts["shards that cannot be read"] == f"2 of {num} that were tried" and (tmp_path / "a.png").exists()


def test_where_no_sample_can_be_read_there_is_no_picture(tmp_path, capsys):
    source = images_of([{"jpg": picture(1)}], tmp_path / "in")
    whole = (source / "shard.00000.mds").read_bytes()
    (source / "shard.00000.mds").write_bytes(whole[:-1] + b"?")
    assert look.main([str(source), str(tmp_path / "a.png")]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"OUT: no sample of {source} could be read: there is no picture."
    )
    assert not (tmp_path / "a.png").exists()


def test_where_no_sample_can_be_used_there_are_facts(tmp_path, capsys):
    facts = looked(capsys, images_of([{"jpg": b""}] * 3, tmp_path / "in"), tmp_path / "a.png")
    assert facts["unusable samples"] == "3 of 3 (100 %); image of zero bytes: 3 (000, 001, 002)"
    assert "width, px" not in facts and (tmp_path / "a.png").exists()


def test_a_stage_in_a_store_is_looked_at_as_in_a_folder_and_no_shard_is_left_behind(
    stage,
    tmp_path,
    capsys,
    monkeypatch,
    bucket,  # noqa: F811
):
    for name, content in tree(stage).items():
        bucket.put_object(Bucket="easel", Key=f"look/{name}", Body=content)
    open_shard, others = look.open_shard, []

    def watched(place, shard, folder):
        others.extend(folder.iterdir())  # a disk may hold one shard and not eight
        return open_shard(place, shard, folder)

    monkeypatch.setattr(look, "open_shard", watched)
    here = looked(capsys, stage, tmp_path / "a.png")
    there = looked(capsys, "s3://easel/look/", tmp_path / "b.png")
    differ = ("location", "picture")
    assert {**here, **dict.fromkeys(differ)} == {**there, **dict.fromkeys(differ)}
    assert others == [] and not [path for path in Path(tempfile.gettempdir()).rglob("*") if path.is_file()]


def test_a_stage_is_only_read(stage, encoded, tmp_path, capsys):
    for source in (stage, encoded):
        before = tree(source)
        looked(capsys, source, tmp_path / "a.png")
        assert tree(source) == before


def test_other_columns_are_not_decoded_and_captions_and_keys_may_be_missing(tmp_path, capsys):
    """A column of JSON that is none: decoding the whole row would fail."""
    source = images_of([{"jpg": picture(1), "other": b"\xff"}] * 3, tmp_path / "in", {"jpg": "bytes", "other": "bytes"})
    index = json.loads((source / "index.json").read_text())
    for shard in index["shards"]:
        shard["column_encodings"] = ["bytes", "json"]
    (source / "index.json").write_text(json.dumps(index))
    write_facts(source, "images", {})
    with pytest.raises(ValueError):
        list(reader_from_json(str(source), None, index["shards"][0]))
    facts = looked(capsys, source, tmp_path / "a.png")
    assert facts["unusable samples"] == "0 of 3 (0 %)" and not [name for name in facts if "caption" in name]


def test_what_could_lead_a_terminal_astray_is_not_printed(tmp_path, capsys):
    given = [{"jpg": picture(1), "caption": "\x1b[31mred\x07 \u202e", "key": "a\x1b"}] * 2
    source = images_of(given, tmp_path / "in")
    facts = json.loads((source / "dataset.json").read_text())
    (source / "dataset.json").write_text(json.dumps({**facts, "made_by": "\x1b]0;title\x07"}))
    assert look.main([str(source), str(tmp_path / "a.png")]) == 0
    text = capsys.readouterr().out
    assert all(letter == "\n" or letter.isprintable() for letter in text) and "2 times: [31mred" in text


def test_a_terminal_without_unicode_gets_question_marks(monkeypatch):
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", screen)
    look.print_facts([("caption", "世 x")])
    assert screen.buffer.getvalue().decode().split() == ["caption", "?", "x"]


# --- keys, and what is refused ---


def test_what_is_not_given_of_the_model_is_as_the_stage_says(stage, encoded, tmp_path, capsys):
    assert look.main([str(encoded), str(tmp_path / "a.png"), "--print_config"]) == 0
    assert "preset: tiny\n" in capsys.readouterr().out
    assert look.main([str(encoded), str(tmp_path / "a.png"), "model.preset=full", "--print_config"]) == 0
    assert "preset: full\n" in capsys.readouterr().out
    assert look.main([str(stage), "--print_config"]) == 0
    assert "preset: full\n" in capsys.readouterr().out and not (tmp_path / "a.png").exists()


def test_without_a_place_the_picture_is_look_png_in_the_current_folder(stage, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert looked(capsys, stage.resolve())["picture"] == str(tmp_path / "look.png")
    assert [path.name for path in tmp_path.iterdir()] == ["look.png"]


def test_a_picture_that_cannot_be_written_leaves_the_old_one(stage, tmp_path, capsys, monkeypatch):
    out = tmp_path / "a.png"
    looked(capsys, stage, out)
    old = out.read_bytes()
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, to: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert look.main([str(stage), str(out), "seed=3"]) == 1
    monkeypatch.setattr(Path, "replace", replace)
    told = f"OUT: {out} cannot be written: No space left on device. Give another file."
    assert capsys.readouterr().err.splitlines()[-1] == told
    assert out.read_bytes() == old and [path.name for path in tmp_path.iterdir()] == ["a.png"]


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (
            ["samples=3"],
            [
                "command line: REMOTE has to be given, OUT.png can be, and nothing else. python -m prepare.look --help "
                "says more."
            ],
        ),
        (
            ["{tmp}/none", "{tmp}/a.png"],
            ["REMOTE: no folder {tmp}/none. Check the path, or make the stage: python -m prepare.shards --help"],
        ),
        (
            ["ftp://b/in", "{tmp}/a.png"],
            ["REMOTE: ftp://b/in is in no known store. Possible: a folder, alipan://, gs://, oci://, s3://."],
        ),
        (
            ["{videos}", "{tmp}/a.png"],
            ["REMOTE: {videos} is a stage of videos. Possible: a stage of images or moments."],
        ),
        (
            ["{bare}", "{tmp}/a.png"],
            ["REMOTE: {bare} has no column jpg of bytes. Make that stage again, or copy it anew."],
        ),
        (
            ["{pickled}", "{tmp}/a.png"],
            [
                'REMOTE: {pickled}/index.json: shards[0].column_encodings is ["str", "pkl", "int", "bytes", "str", "json", '
                '"int"]. Possible: '
                "encodings of MDS, but none that could run code, as pkl. Make the stage again: python -m prepare.shards "
                "--help"
            ],
        ),
        (["{in}", "{in}/a.png"], ["OUT: {in} lies in {in}, which is only read. Give a place outside of it."]),
        (["{in}", "{tmp}"], ["OUT: {tmp} is not a PNG file on this machine. Give one, e.g. look.png."]),
        (
            ["{in}", "{tmp}/a.jpg"],
            ["OUT: {tmp}/a.jpg is not a PNG file on this machine. Give one, e.g. look.png."],
        ),
        (
            ["{in}", "s3://b/a.png"],
            ["OUT: s3://b/a.png is not a PNG file on this machine. Give one, e.g. look.png."],
        ),
        (
            ["{in}", "/proc/x/a.png"],
            [
                "OUT: /proc/x cannot be written: /proc: No such file or directory. Give a folder that this user may write in."
            ],
        ),
        (
            [
                "{tmp}/none",
                "/proc/x/a.png",
                "samples=0",
                "read=x",
                "seed=-1",
                "model.denoiser=run",
                "model.preset=huge",
            ],
            [
                "command line: samples is 0. Possible: 1 to 400.",
                "command line: read is 'x'. Possible: an integer.",
                "command line: seed is -1. Possible: 0 to 4,294,967,295.",
                "model.denoiser: has no use here: nothing is trained. Leave it out.",
                "model.preset: unknown preset 'huge'. Known: full, tiny.",
                "REMOTE: no folder {tmp}/none. Check the path, or make the stage: python -m prepare.shards --help",
                "OUT: /proc/x cannot be written: /proc: No such file or directory. Give a folder that this user may "
                "write in.",
            ],
        ),
        (
            ["{in}", "{tmp}/a.png", "model.weights=random"],
            ["model.weights: has no use with a stage of images: {in} is shown as it is. Leave it out."],
        ),
        (
            ["{moments}", "{tmp}/a.png", "model.weights=sd2.ckpt"],
            ["model.weights: sd2.ckpt: there is no such file or folder. Give a diffusers folder or an LDM file."],
        ),
        (
            ["{family}", "{tmp}/a.png"],
            ["{family}/dataset.json: model.family is 5. Possible: a text (in quotes where it looks like a number)."],
        ),
    ],
)
def test_look_says_all_that_it_cannot_do_before_it_starts(stage, encoded, tmp_path, capsys, words, messages):
    jpg = [{"jpg": picture(1), "evil": 1}]
    kinds = {"bare": {"caption": "str", "key": "str"}, "pickled": {**COLUMNS, "evil": "pkl"}}
    named = {name: images_of(jpg, tmp_path / name, kinds.get(name, COLUMNS)) for name in ("bare", "pickled", "videos")}
    write_facts(named["videos"], "videos", {})
    named["family"] = shutil.copytree(encoded, tmp_path / "family")
    facts = json.loads((named["family"] / "dataset.json").read_text())
    (named["family"] / "dataset.json").write_text(json.dumps({**facts, "family": 5}))
    named |= {"in": stage, "moments": encoded, "tmp": tmp_path}
    assert look.main([word.format(**named) for word in words]) == 2
    assert capsys.readouterr().err == "".join(f"{message.format(**named)}\n" for message in messages)
    assert not list(tmp_path.glob("*.png"))
