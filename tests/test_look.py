"""prepare/look.py: facts against the samples themselves, the contact sheet, what is damaged, and what is refused."""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import picture, tree
from PIL import Image
from test_latents import images_of, rows
from test_prepare import IMAGES
from test_prepare_parts import bucket  # noqa: F401  bucket is a fixture

from prepare import latents, look
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


def facts_of(text: str) -> dict[str, str]:
    """Name -> value of the printed facts."""
    return {line[: look.NAME_WIDTH].rstrip(): line[look.NAME_WIDTH + 1 :] for line in text.splitlines()}


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
    assert facts["location"] == str(stage) and facts["made_by"] == "prepare.shards" and facts["stage"] == "images"
    assert facts["shards"] == str(len(files)) and facts["samples"] == "48"
    assert facts["bytes"] == f"{sum(file.stat().st_size for file in files):,}"
    assert facts["columns"] == ", ".join(f"{name} ({kind})" for name, kind in sorted(COLUMNS.items()))
    assert facts["read"] == f"48 samples of {len(files)} of {len(files)} shards, whose hashes are right"
    assert facts["unusable samples"] == "0 of 48 (0 %)" and facts["format: JPEG"] == "48 of 48 (100 %)"
    for name, unit in (("width", "width, px"), ("height", "height, px")):
        values = sorted(row[name] for row in made)
        points = values[23], values[0], values[int(np.ceil(0.95 * 48)) - 1], values[-1]
        assert facts[unit] == "median {}, least {}, 95 % at most {}, greatest {}".format(*points)
    assert facts["captions that repeat"] == facts["keys that repeat"] == "0 of 48 (0 %)"


def test_facts_of_moments_are_those_of_their_values(encoded, tmp_path, capsys):
    facts = looked(capsys, encoded, tmp_path / "a.png")
    stored = np.stack([row["moments"] for row in rows(encoded)]).astype(np.float64)  # (48, 8, 8, 8)
    for name, values in (("mean", stored[:, :4]), ("deviation", np.exp(0.5 * stored[:, 4:]))):
        for what, of_each in (("mean", values.mean(axis=(1, 2, 3))), ("spread", values.std(axis=(1, 2, 3), ddof=1))):
            least = float(facts[f"posterior's {name}: {what}"].split("least ")[1].split(", 95")[0])
            assert least == pytest.approx(of_each.min(), rel=1e-4, abs=1e-6)
    # A draw has the mean's spread and its deviation: law of total variance, times the scale of SD's latents.
    expected = 0.18215 * np.sqrt(stored[:, :4].var(axis=(1, 2, 3)) + np.exp(stored[:, 4:]).mean(axis=(1, 2, 3)))
    drawn = float(facts["posterior's draws, scaled: spread"].split(",")[0].removeprefix("median "))
    assert drawn == pytest.approx(np.median(expected), rel=5 / np.sqrt(stored[0, :4].size))  # five standard errors
    assert (
        facts["stored tokens not of the caption"] == "0 of 48 (0 %)" and facts["moments are shown as"] == look.AS_COLORS
    )


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
        assert f"; {reason}: {len(named)} (e.g. {named[-1]})" in facts["unusable samples"]
    assert facts["keys that repeat"] == f"2 of {num} ({200 / num:.3g} %)"


def test_moments_that_are_not_finite_or_not_of_their_caption_are_counted(encoded, tmp_path, capsys):
    made = [
        {name: np.array(value) if name in ("moments", "tokens") else value for name, value in row.items()}
        for row in rows(encoded)[:6]
    ]
    for row, value in ((made[1], np.nan), (made[4], np.inf)):
        row["moments"][0, 0, :2] = value
    made[5]["tokens"][3] += 1
    kinds = {"moments": "ndarray:float16:8,8,8", "tokens": "ndarray:uint16:77", "caption": "str", "key": "str"}
    source, made_of = images_of(made, tmp_path / "in", kinds), json.loads((encoded / "dataset.json").read_text())
    names = ("family", "preset", "variant", "image_size", "encoders", "normalize")
    write_facts(source, "moments", {name: made_of[name] for name in names})
    facts = looked(capsys, source, tmp_path / "a.png")
    assert facts["unusable samples"] == f"2 of 6 (33.3 %); moments are not finite in float16: 2 (e.g. {made[4]['key']})"
    assert facts["stored tokens not of the caption"] == "1 of 6 (16.7 %)"


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
    assert {**first, "contact sheet": ""} == {**again, "contact sheet": ""} != {**other, "contact sheet": ""}
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
            for values, shown in zip(stored, look.decode(vae, stored, normalize), strict=True):
                image = vae.decode(torch.from_numpy(values[:4].astype(np.float32))[None]).sample[0]
                unit = (image / 2 + 0.5 if normalize == "symmetric" else image).clamp(0, 1)
                expected = (unit.permute(1, 2, 0).numpy() * 255).round()
                assert shown.shape == (64, 64, 3) and np.abs(shown - expected).max() <= 1  # rounding at a half


def test_without_weights_moments_are_colours_that_can_be_compared():
    flat = np.zeros((8, 4, 4), np.float16)
    ramp = np.broadcast_to(np.linspace(-3, 3, 4).astype(np.float16), (8, 4, 4))
    pale, bright = look.channels_as_rgb([flat, ramp])
    assert pale.shape == (4, 4, 3) and pale.std() == 0 and abs(int(pale[0, 0, 0]) - 128) <= 1
    assert (bright[:, 0] == 0).all() and (bright[:, -1] == 255).all()
    assert look.channels_as_rgb([flat])[0].std() == 0
    assert look.channels_as_rgb([ramp[:2]])[0].shape == (4, 4, 3)


def test_the_vae_that_decodes_moments_is_compared_with_the_one_that_made_them(encoded, tmp_path, capsys):
    out, by_random = tmp_path / "a.png", "decoded by the VAE of random"
    how = looked(capsys, encoded, out, "model.weights=random")["moments are shown as"]
    assert how == f"{by_random}, the one that made them"
    other = shutil.copytree(encoded, tmp_path / "other")
    facts = json.loads((other / "dataset.json").read_text())
    made = facts["encoders"]["vae"]
    (other / "dataset.json").write_text(json.dumps({**facts, "encoders": {"vae": "0" * 32}}))
    how = looked(capsys, other, out, "model.weights=random")["moments are shown as"]
    assert how == f"{by_random}, NOT the one that made them: {made} instead of {'0' * 32}"


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
    assert facts["read"] == f"{left} samples of {num - 2} of {num} shards, whose hashes are right"
    assert (tmp_path / "a.png").exists()


def test_where_no_sample_can_be_read_there_is_no_picture(tmp_path, capsys):
    source = images_of([{"jpg": picture(1)}], tmp_path / "in")
    whole = (source / "shard.00000.mds").read_bytes()
    (source / "shard.00000.mds").write_bytes(whole[:-1] + b"?")
    assert look.main([str(source), str(tmp_path / "a.png")]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"REMOTE: no sample of {source} could be read, so there is no contact sheet."
    )
    assert not (tmp_path / "a.png").exists()


def test_where_no_sample_can_be_used_there_are_facts(tmp_path, capsys):
    facts = looked(capsys, images_of([{"jpg": b""}] * 3, tmp_path / "in"), tmp_path / "a.png")
    assert facts["unusable samples"] == "3 of 3 (100 %); image of zero bytes: 3 (e.g. 002)"
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
    differ = ("location", "contact sheet")
    assert {**here, **dict.fromkeys(differ)} == {**there, **dict.fromkeys(differ)}
    assert others == [] and not [path for path in Path(tempfile.gettempdir()).rglob("*") if path.is_file()]


def test_a_stage_is_only_read(stage, encoded, tmp_path, capsys):
    for source in (stage, encoded):
        before = tree(source)
        looked(capsys, source, tmp_path / "a.png")
        assert tree(source) == before


def test_what_could_lead_a_terminal_astray_is_not_printed(tmp_path, capsys):
    given = [{"jpg": picture(1), "caption": "\x1b[31mred\x07 \u202e", "key": "a\x1b"}] * 2
    source = images_of(given, tmp_path / "in")
    facts = json.loads((source / "dataset.json").read_text())
    (source / "dataset.json").write_text(json.dumps({**facts, "made_by": "\x1b]0;title\x07"}))
    assert look.main([str(source), str(tmp_path / "a.png")]) == 0
    text = capsys.readouterr().out
    assert all(letter == "\n" or letter.isprintable() for letter in text)


# --- keys, and what is refused ---


def test_without_a_place_the_picture_is_look_png_in_the_current_folder(stage, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert looked(capsys, stage.resolve())["contact sheet"] == str(tmp_path / "look.png")
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
    ("words", "message"),
    [
        (["samples=3"], "command line: REMOTE has to be given, OUT.png can be, and nothing else. "),
        (["{tmp}/none", "{tmp}/a.png"], "REMOTE: no folder {tmp}/none. "),
        (["ftp://b/in", "{tmp}/a.png"], "REMOTE: ftp://b/in is in no known store. Possible: "),
        (["{videos}"], "REMOTE: {videos} is a stage of videos. Possible: a stage of images or moments"),
        (["{pickled}", "{tmp}/a.png"], "REMOTE: {pickled}/index.json: shards[0].column_encodings is "),
        (["{in}", "{in}/a.png"], "OUT: {in} lies in {in}, which is only read. "),
        (["{in}", "{tmp}/a.jpg"], "OUT: {tmp}/a.jpg is not a PNG file on this machine. "),
        (["{in}", "/proc/x/a.png"], "OUT: /proc/x cannot be written: "),
        (["{in}", "{tmp}/a.png", "samples=0"], "command line: samples is 0. Possible: 1 to 400."),
        (["{in}", "{tmp}/a.png", "model.weights=random"], "model.weights: has no use with a stage of images: {in}. "),
        (["{moments}", "{tmp}/a.png", "model.weights=sd2.ckpt"], "model.weights: sd2.ckpt: there is no such file "),
    ],
)
def test_look_says_what_it_cannot_do_before_it_starts(stage, encoded, tmp_path, capsys, words, message):
    pickled = images_of([{"jpg": picture(1), "evil": 1}], tmp_path / "pickled", {**COLUMNS, "evil": "pkl"})
    videos = images_of([{"jpg": picture(1)}], tmp_path / "videos")
    write_facts(videos, "videos", {})
    named = {"pickled": pickled, "videos": videos, "in": stage, "moments": encoded, "tmp": tmp_path}
    assert look.main([word.format(**named) for word in words]) == 2
    assert capsys.readouterr().err.startswith(message.format(**named))
    assert not list(tmp_path.glob("*.png"))
