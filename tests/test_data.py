"""data.py: pixels against PIL, the batch contract, the order of samples, and samples that cannot be used."""

from __future__ import annotations

import io
import json
import time
import warnings

import numpy as np
import pytest
import torch
from conftest import picture, sample_files
from PIL import Image
from streaming import StreamingDataset

from data import (
    DataConfig,
    SampleError,
    StreamingLAIONDataset,
    SyntheticBatches,
    build_data,
    check_caption,
    decode_image,
    resize_and_crop,
)
from zoo import load_family
from zoo.spec import Column

FAMILY = load_family("sd2", "tiny", "stock")
CPU = torch.device("cpu")


LOADERS = []


@pytest.fixture(autouse=True)
def close_loaders():
    yield
    while LOADERS:
        LOADERS.pop().close()


def loader_of(stage, *, batch: int = 8, workers: int = 0, seed: int = 1, size=(64, 64), **config):
    section = DataConfig(local=str(stage), workers=workers, **config)
    LOADERS.append(build_data(section, FAMILY, size=size, device_batch_size=batch, device=CPU, seed=seed).dataloader)
    return LOADERS[-1]


# --- one sample ---


@pytest.mark.parametrize("source", [(300, 200), (200, 300), (64, 64), (65, 300), (40, 30), (1, 1)])
def test_resize_covers_and_centre_crop_equals_pil(source):
    """PIL's bicubic always antialiases; torch's uint8 path agrees with it to one step of 255."""
    image = decode_image(picture(3, source, kind="PNG"))
    ours = resize_and_crop(image, (64, 64))
    assert ours.shape == (3, 64, 64) and ours.dtype == torch.uint8
    scale = max(64 / image.width, 64 / image.height)
    width, height = max(64, round(image.width * scale)), max(64, round(image.height * scale))
    theirs = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = round((width - 64) / 2), round((height - 64) / 2)
    expected = np.array(theirs.crop((left, top, left + 64, top + 64))).transpose(2, 0, 1)
    assert np.abs(ours.numpy().astype(int) - expected.astype(int)).max() <= 1


def test_a_size_that_is_no_square_is_width_by_height():
    assert resize_and_crop(decode_image(picture(0, (100, 100))), (96, 64)).shape == (3, 64, 96)


@pytest.mark.parametrize("mode", ["L", "P", "CMYK", "RGBA"])
def test_every_colour_mode_becomes_rgb(mode):
    kind = "JPEG" if mode in ("L", "CMYK") else "PNG"
    plain = np.array(decode_image(picture(1, kind="PNG"))).astype(int)
    image = decode_image(picture(1, kind=kind, mode=mode))
    assert image.mode == "RGB"
    if mode in ("RGBA", "CMYK"):
        assert np.abs(np.array(image).astype(int) - plain).mean() < 4


def test_transparency_becomes_white_and_not_what_lies_under_it():
    file = io.BytesIO()
    Image.new("RGBA", (4, 4), (255, 0, 0, 0)).save(file, "PNG")
    assert decode_image(file.getvalue()).getpixel((0, 0)) == (255, 255, 255)


def test_exif_rotation_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.new("RGB", (30, 10)).save(file, "JPEG", exif=exif)
    assert decode_image(file.getvalue()).size == (10, 30)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "image of zero bytes"),
        (b"<html>not found</html>", "not an image"),
        (picture(0, (200, 200))[:1500], "truncated or damaged image"),
        (picture(0, kind="PNG")[:150], "truncated or damaged image"),
    ],
    ids=["empty", "html", "jpeg", "png"],
)
def test_an_image_that_cannot_be_used_says_why(content, reason):
    with pytest.raises(SampleError) as error:
        decode_image(content)
    assert str(error.value) == reason


@pytest.mark.parametrize("bits", ["little", "big"])
def test_sixteen_bits_a_pixel_are_scaled_and_not_cut_to_white(bits):
    ramp = np.linspace(0, 65535, 256).astype("<u2" if bits == "little" else ">u2").reshape(16, 16)
    file = io.BytesIO()
    Image.fromarray(ramp).save(file, "PNG")
    decoded = np.array(decode_image(file.getvalue()))[..., 0].reshape(-1)
    assert np.abs(decoded.astype(int) - np.arange(256)).max() <= 1


def test_other_formats_are_no_images_of_a_stage():
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "BMP")
    with pytest.raises(SampleError, match="^not an image$"):
        decode_image(file.getvalue())


@pytest.mark.parametrize("source", [(1, 8000), (8000, 1), (30, 3000)])
def test_an_elongated_picture_costs_no_more_than_its_crop(source):
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    image = decode_image(picture(0, source, kind="PNG"))
    ours = resize_and_crop(image, (256, 256))
    assert ours.shape == (3, 256, 256)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10 < 200  # MiB; the whole would take GiB
    if min(source) > 1:  # the middle of it, as if all had been scaled
        scale = 256 / min(source)
        whole = image.resize((round(source[0] * scale), round(source[1] * scale)), Image.Resampling.BICUBIC)
        left, top = (whole.width - 256) // 2, (whole.height - 256) // 2
        expected = np.array(whole.crop((left, top, left + 256, top + 256))).transpose(2, 0, 1).astype(int)
        assert np.abs(ours.numpy().astype(int) - expected).max() <= 2


def test_a_decompression_bomb_is_refused_without_being_decoded(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    for size in ((40, 40), (80, 80)):  # PIL warns of the first and raises at the second
        with pytest.raises(SampleError, match="^too many pixels$"):
            decode_image(picture(0, size))
    assert warnings.filters  # the filter of decode_image is its own


@pytest.mark.parametrize(
    ("caption", "reason"),
    [
        (None, "missing caption"),
        (3, "missing caption"),
        ("", "empty caption"),
        (" \n", "empty caption"),
        ("a" * 10_001, "caption of more than 10,000 characters"),
    ],
)
def test_a_caption_that_cannot_be_used_says_why(caption, reason):
    with pytest.raises(SampleError, match=f"^{reason}$"):
        check_caption(caption)
    assert check_caption(" a cat\n") == "a cat" and len(check_caption("a" * 10_000)) == 10_000


# --- batches ---


@pytest.mark.parametrize("workers", [0, 2])
def test_streamed_batches_keep_the_contract_of_the_family(stage, workers):
    columns = FAMILY.columns("images", (64, 64))
    batches = list(loader_of(stage, workers=workers))
    assert len(batches) == 48 // 8
    for batch in batches:
        assert set(batch) == set(columns)
        for name, column in columns.items():
            assert batch[name].shape == (8, *column.shape) and batch[name].dtype == column.dtype


def fingerprints(loader) -> list[list[int]]:
    return [[int(image.long().sum()) for image in batch["images"]] for batch in loader]


def test_an_epoch_gives_every_sample_once_and_the_next_another_order(stage):
    loader = loader_of(stage)
    one, two = fingerprints(loader), fingerprints(loader)
    assert len({value for batch in one for value in batch}) == 48
    assert sorted(sum(one, [])) == sorted(sum(two, [])) and one != two


def test_an_epoch_is_the_whole_batches_of_the_stage(stage):
    loader = loader_of(stage, batch=10, workers=2)
    for _ in range(3):
        assert len(list(loader)) == len(loader) == 4  # 48 // 10


def test_workers_end_at_once_also_in_the_middle_of_an_epoch(stage):
    """Their streams have threads that would wait for a reader for ever."""
    loader = loader_of(stage, batch=1, workers=2)
    assert next(iter(loader))["images"].shape == (1, 3, 64, 64)
    workers, begun = loader._iterator._workers, time.monotonic()
    loader.close()
    assert time.monotonic() - begun < 3.0 and [worker.is_alive() for worker in workers] == [False, False]


def test_an_epoch_that_ends_early_is_an_error(stage, monkeypatch):
    """Streaming ends an epoch without an exception when its threads fail."""
    loader = loader_of(stage)
    monkeypatch.setattr(StreamingDataset, "_each_sample_id", lambda self, it: iter(range(17)))
    with pytest.raises(RuntimeError, match="^data: the stream ended after 2 of 6 batches of this process, without"):
        list(loader)


def test_order_depends_on_the_seed_and_not_on_the_number_of_workers(stage):
    alone, other = fingerprints(loader_of(stage)), fingerprints(loader_of(stage, seed=2))
    assert fingerprints(loader_of(stage, workers=2)) == alone != other


def test_a_copied_stage_gives_the_same_batches(stage, tmp_path):
    section = DataConfig(remote=str(stage), local=str(tmp_path / "cache"), workers=0)
    loader = build_data(section, FAMILY, size=(64, 64), device_batch_size=8, device=CPU, seed=1).dataloader
    assert fingerprints(loader) == fingerprints(loader_of(stage))
    assert list((tmp_path / "cache").rglob("shard.00000.mds"))


@pytest.mark.parametrize("stage_name", ["images", "moments"])
def test_synthetic_batches_keep_the_contract_and_are_drawn_once(stage_name):
    section = DataConfig(stage=stage_name, synthetic=True)
    batches = build_data(section, FAMILY, size=(64, 64), device_batch_size=4, device=CPU, seed=1).dataloader
    one, two = next(iter(batches)), next(iter(batches))
    for name, column in FAMILY.columns(stage_name, (64, 64)).items():
        assert one[name].shape == (4, *column.shape) and one[name].dtype == column.dtype
        assert one[name] is two[name]
        if column.below is not None:
            assert int(one[name].min()) >= 0 and int(one[name].max()) < column.below
    assert one["tokens"].unique().numel() > 100


def test_synthetic_batches_depend_on_the_seed():
    columns = {"x": Column((3,), torch.float16)}
    one, same, other = (SyntheticBatches(columns, 2, CPU, seed).batch["x"] for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


# --- samples that cannot be used ---


def stage_with(tmp_path, broken: dict[str, dict[str, bytes]]):
    """A stage with broken samples in it, as other tools write them: prepare.shards would have left them out."""
    from streaming import MDSWriter

    from fetch import HASH
    from prepare.shards import COLUMNS
    from stage import write_facts

    out = tmp_path / "broken"
    with MDSWriter(out=str(out), columns=COLUMNS, hashes=[HASH]) as writer:
        for number in range(16):
            files = sample_files(number)
            row = {"jpg": files["jpg"], "caption": files["txt"].decode(), "key": f"{number:03d}", "metadata": {}}
            writer.write({**row, "width": 1, "height": 1, **broken.get(f"{number:03d}", {})})
    write_facts(out, "images", {})
    return out


BROKEN = {
    "003": {"jpg": b""},
    "004": {"jpg": b"html"},
    "009": {"jpg": picture(0, (200, 200))[:1500]},
    "015": {"caption": " "},
}


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_samples_are_named_and_replaced_so_that_every_batch_is_full(tmp_path, workers):
    loader = loader_of(stage_with(tmp_path, BROKEN), batch=4, workers=workers)
    assert [len(batch["images"]) for batch in loader] == [4, 4, 4, 4]
    assert loader.bad_samples == {
        3: ("003", "image of zero bytes"),
        4: ("004", "not an image"),
        9: ("009", "truncated or damaged image"),
        15: ("015", "empty caption"),
    }
    list(loader)  # the next epoch meets the same four again
    assert len(loader.bad_samples) == 4


def test_more_broken_samples_than_allowed_stop_the_run_by_name(tmp_path):
    loader = loader_of(stage_with(tmp_path, BROKEN), batch=16, max_bad_samples=3, shuffle=False)
    with pytest.raises(ValueError) as error:
        list(loader)
    assert str(error.value) == (
        "data.max_bad_samples: 4 samples cannot be used, 3 are allowed. First: 003: image of zero bytes; 004: not an "
        "image; 009: truncated or damaged image; 015: empty caption. Raise data.max_bad_samples, or make the stage again "
        "without them."
    )


def test_a_shard_without_a_good_sample_stops_the_run(tmp_path):
    out = stage_with(tmp_path, {f"{number:03d}": {"jpg": b""} for number in range(16)})
    dataset = StreamingLAIONDataset(image_size=(64, 64), tokenize=FAMILY.tokenize, local=str(out), batch_size=1)
    with pytest.raises(ValueError) as error:
        dataset[[0]]
    assert str(error.value) == (
        "data: no sample of shard 0 can be used (000: image of zero bytes; 001: image of zero bytes; 002: image of zero "
        "bytes, ...). Make the stage again."
    )


# --- the section's own checks ---


def test_a_section_that_fits_has_no_problem(stage):
    assert DataConfig(local=str(stage)).problems(8, {}) == []
    assert DataConfig(remote=str(stage), local="/nowhere/yet", cache_limit="1gb").problems(8, {}) == []
    assert DataConfig(synthetic=True, remote="nowhere").problems(8, {}) == []


def test_values_that_cannot_be_are_named(stage, tmp_path):
    def texts(**section):
        return [f"{key}: {text}" for key, text in DataConfig(**section).problems(8, {})]

    assert texts() == ["data.remote: not given. Give a stage's folder or s3:// address, or data.synthetic=true."]
    assert texts(local=str(stage), workers=-1, num_canonical_nodes=0, cache_limit="much") == [
        "data.workers: -1 is below 0. Possible: 0 and up.",
        "data.num_canonical_nodes: 0 is below 1. Possible: 1 and up.",
        "data.cache_limit: 'much' is not a size. Possible: 500mb, 100gb, 1tb.",
    ]
    assert texts(remote="s3://bucket/stage") == [
        "data.local: None cannot keep the shards of s3://bucket/stage. Give a folder."
    ]
    assert texts(stage="moments", local=str(stage)) == [
        f"data.stage: the config says 'moments', {stage}/dataset.json says 'images'. Use data.stage=images, or another "
        f"data.local."
    ]
    assert texts(remote=str(stage), local=str(stage)) == [
        f"data.local: {stage} is data.remote too. Leave it out: a folder is read in place."
    ]
    raw = {"basename": "shard.00000.mds", "bytes": 5, "hashes": {"xxh64": "0" * 16}}
    (tmp_path / "index.json").write_text(json.dumps({"shards": [{"raw_data": raw}]}))
    assert texts(remote=str(stage), local=str(tmp_path)) == [
        f"data.local: {tmp_path} holds shards of another stage than {stage}. Give another folder, or remove this one."
    ]
    link = tmp_path / "link"
    link.symlink_to(stage)
    assert "is data.remote too" in texts(remote=str(stage), local=str(link))[0]
    assert texts(local=str(stage), cache_limit="1gb") == [
        "data.cache_limit: 1gb has no effect on a folder that is read in place. Give data.remote and data.local."
    ]
    for given in ("0", "0gb", "-1gb", "-infgb"):
        above = "is not a size" if given == "-infgb" else "is not above 0"
        told = f"data.cache_limit: '{given}' {above}. Possible: 500mb, 100gb, 1tb."
        assert texts(remote=str(stage), local="/nowhere/yet", cache_limit=given) == [told]
    for given in ("infgb", "nangb", "-1"):
        told = f"data.cache_limit: '{given}' is not a size. Possible: 500mb, 100gb, 1tb."
        assert texts(remote=str(stage), local="/nowhere/yet", cache_limit=given) == [told]
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert texts(remote=str(stage), local=str(tmp_path / "loop")) == []  # preflight.unwritable says so
    [limit] = texts(remote=str(stage), local="/nowhere/yet", cache_limit="10kb")
    assert limit.startswith("data.cache_limit: 10kb holds fewer than 4 of the largest shard (3")
    assert limit.endswith(" bytes). Give at least 1mb, or null.")
