"""stages/device_decoding.py: pictures decoded in the training process, on torch's CPU device, are today's to the bit.

That device goes the same way as a GPU, but for a stream of its own; tests/gpu compares what a GPU makes of them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torchvision
from conftest import picture
from PIL import Image
from streaming import MDSWriter
from test_data import FAMILY
from test_image_files import swapped_jpeg
from test_jpegs import jpeg, sampled
from torchvision.io import decode_jpeg

from data import DataConfig, StreamingLAIONDataset, build_data
from preflight.run import batch_gib, wanted_of_stage
from prepare.shards import COLUMNS
from stages import device_decoding
from stages.dataset import write_facts
from stages.device_decoding import CONTENT, MOST_SHRUNK, UNDECODED, has_nvjpeg, header_for_device
from stages.fetch import HASH, RetryingStream
from stages.images import JpegHeader, Pixels, SampleError, decode_image
from training.run_config import RunConfig
from training.validation import ValidationConfig
from zoo.model_config import ModelConfig

CPU, SIZE, SEED, BATCH = torch.device("cpu"), (48, 40), 7, 6


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return jpeg((90, 61), exif=exif)


def without_codes(file: bytes) -> bytes:
    """The file with a table of codes that cannot be: no header says so."""
    changed, table = bytearray(file), file.index(b"\xff\xc4")
    changed[table + 5 : table + 9] = b"\xff" * 4
    return bytes(changed)


PLAIN = {
    "4:4:4": jpeg((90, 61), subsampling=0),
    "4:2:2": jpeg((61, 90), subsampling=1),
    "4:2:0": jpeg((90, 61), subsampling=2),
    "progressive": jpeg((200, 70), progressive=True),
    "restarts": jpeg((70, 200), restart_marker_blocks=2),
    "grey": jpeg((90, 61), "L"),
    "as large": jpeg(SIZE),
    "1 x 1": jpeg((1, 1)),
    "small": jpeg((5, 4)),
    **{f"turned {orientation}": turned(orientation) for orientation in range(1, 10)},
    "cut and mended": jpeg((90, 61))[:1500] + b"\xff\xd9",
}
OTHERS = {
    # A comment behind the picture that is longer than the file: torchvision refuses it, PIL does not.
    "odd end": jpeg((90, 61))[:-2] + b"\xff\xfe\x40\x00\xff\xd9",
    **{kind: picture(3, (90, 61), kind) for kind in ("PNG", "WEBP", "AVIF", "BMP", "TIFF", "GIF")},
    "another profile": swapped_jpeg((90, 61)),
    "CMYK": jpeg((90, 61), "CMYK"),
    "RGB in a JPEG": jpeg((90, 61), subsampling=0, keep_rgb=True),
    "4:4:0": sampled(jpeg((160, 97), subsampling=0), 0x12),
    "long": jpeg((300, 17)),
    "far larger": jpeg((MOST_SHRUNK * 48 + 40, MOST_SHRUNK * 40 + 40)),
}
BROKEN = {
    "empty": (b"", "image of zero bytes"),
    "no end": (jpeg((90, 61))[:1500], "truncated or damaged image"),
    "no codes": (without_codes(jpeg((90, 61))), "truncated or damaged image"),
    "no codes, grey": (without_codes(jpeg((90, 61), "L")), "truncated or damaged image"),
    "last": (without_codes(jpeg((60, 60), progressive=True)), "truncated or damaged image"),
}


def write_stage(out, *shards: dict[str, bytes]) -> None:
    """Write pictures by their keys, two captions each."""
    with MDSWriter(out=str(out), columns={**COLUMNS, "captions": "json"}, hashes=[HASH], size_limit=1 << 30) as writer:
        for files in shards:
            for key, file in files.items():
                captions = [f"one of {key}", f"two of {key}"]
                row = {"jpg": file, "caption": captions[0], "captions": captions, "key": key, "metadata": {}}
                writer.write({**row, "width": 1, "height": 1})
            writer.flush_shard()
            writer._reset_cache()
    write_facts(out, "images", {})


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A stage in two shards; of the broken samples, four lie together, and one is its shard's last."""
    good, broken = list({**PLAIN, **OTHERS}.items()), [(name, file) for name, (file, _) in BROKEN.items()]
    out = tmp_path_factory.mktemp("odd") / "images"
    write_stage(out, dict([*good[:7], *broken[:4], *good[7:12], broken[4]]), dict(good[12:]))
    return out


def loader_of(stage, device: torch.device = CPU, **config):
    section = DataConfig(local=str(stage), **config)
    return build_data(section, FAMILY, size=SIZE, device_batch_size=BATCH, device=device, seed=SEED).dataloader


def epochs(stage, num: int = 2, begin: tuple[int, int] = (0, 0), device: torch.device = CPU, decode="cpu", **config):
    """Return the batches of some epochs, and the loader's bad samples in their order."""
    loader = loader_of(stage, device, decode=decode, **config)
    if begin != (0, 0):
        loader.resume(*begin, BATCH)
    batches = [batch for _ in range(num) for batch in loader]
    loader.close()
    return batches, list(loader.bad_samples.items())


def assert_same(found, expected) -> None:
    (batches, bad), (others, others_bad) = found, expected
    assert len(batches) == len(others) > 0 and bad == others_bad
    for one, other in zip(batches, others, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].dtype == other[name].dtype and torch.equal(one[name], other[name])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ways", [{}, {"flip": True, "crop": "random"}], ids=str)
def test_samples_draws_and_the_bad_ones_are_those_of_the_loader_processes_to_the_bit(odd, workers, ways):
    expected = epochs(odd, **ways, workers=0)
    assert {name: reason for _, (name, reason) in expected[1]} == {name: reason for name, (_, reason) in BROKEN.items()}
    assert all(batch["images"].shape == (BATCH, 3, *SIZE[::-1]) for batch in expected[0])
    assert_same(epochs(odd, **ways, workers=workers, decode="device"), expected)


def test_an_epoch_that_is_gone_on_with_has_the_same_replacements(odd):
    ways = dict(flip=True, crop="random", shuffle=False)
    whole, _ = epochs(odd, **ways, workers=0)
    rest, _ = epochs(odd, 1, (1, 1), **ways, workers=1, decode="device")
    assert len(rest) == len(whole) // 2 - 1
    for one, other in zip(rest, whole[len(whole) // 2 + 1 :], strict=True):
        assert torch.equal(one["images"], other["images"]) and torch.equal(one["tokens"], other["tokens"])


def test_pictures_are_decoded_in_several_calls_where_they_are_large(odd, monkeypatch):
    monkeypatch.setattr(device_decoding, "MOST_PIXELS", 6000)
    assert_same(epochs(odd, workers=0, decode="device"), epochs(odd, workers=0))


def test_a_jpeg_is_handed_over_as_it_is_and_what_a_device_reads_otherwise_as_pixels(odd):
    assert all(header_for_device(file, SIZE) is not None for file in PLAIN.values())
    assert [name for name, file in OTHERS.items() if header_for_device(file, SIZE) is not None] == []
    assert header_for_device(Pixels(b"no file"), SIZE) is None
    stored = {name: header_for_device(PLAIN[name], SIZE) for name in ("4:2:0", "turned 6")}
    assert stored == {"4:2:0": JpegHeader((90, 61), 1), "turned 6": JpegHeader((90, 61), 6)}
    assert [header.size for header in stored.values()] == [(90, 61), (61, 90)]
    stream = RetryingStream(local=str(odd))
    dataset = StreamingLAIONDataset(family=FAMILY, image_sizes=[SIZE], streams=[stream], batch_size=1, decode="device")
    for sample_id, file in ((0, PLAIN["4:4:4"]), (len(PLAIN) + len(BROKEN), OTHERS["PNG"])):
        batch = dataset.read_batch(np.array([sample_id]))
        [picture] = batch[UNDECODED].pictures
        given = bytes(batch[CONTENT].numpy())
        assert given == file if picture.header else len(given) == 3 * SIZE[0] * SIZE[1]
        assert (picture.header is None) == (file is OTHERS["PNG"]) and picture.num_bytes == len(given)


def test_a_bad_header_is_refused_for_the_reason_of_the_decoder():
    for file, reason in BROKEN.values():
        with pytest.raises(SampleError, match=f"^{reason}$"):
            decode_image(file)
    square = bytearray(jpeg((8, 8)))
    frame = square.index(b"\xff\xc0")
    square[frame + 5 : frame + 9] = (20_000).to_bytes(2, "big") * 2
    for file, reason in ((b"", "image of zero bytes"), (b"html", "not an image"), (bytes(square), "too many pixels")):
        with pytest.raises(SampleError, match=f"^{reason}$"):
            header_for_device(file, SIZE)


def test_what_the_device_refuses_and_the_cpu_takes_is_read_there_and_said_once(odd, capfd, monkeypatch):
    """Torch's CPU takes all that PIL takes: its decoder stands for one that takes no 4:2:2."""
    expected, why = epochs(odd, workers=0, decode="cpu"), "no such sampling"
    capfd.readouterr()

    def choosy(files: list[torch.Tensor], *ways, **arguments):
        if any(bytes(file.numpy()) == PLAIN["4:2:2"] for file in files):
            raise RuntimeError(why)
        return decode_jpeg(files, *ways, **arguments)

    monkeypatch.setattr(device_decoding, "decode_jpeg", choosy)
    assert_same(epochs(odd, workers=0, decode="device"), expected)
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("data.decode: ")]
    assert said == [
        f"data.decode: the device has refused a picture ({why}), which the CPU decodes. Others like it are not said."
    ]


# --- what is refused ---


def test_where_no_device_decodes_it_is_refused_with_the_ways_out(stage, monkeypatch):
    def problems(made_for=None, **section):
        return DataConfig(**{"local": str(stage), **section}, decode="device").problems(1, made_for or {})

    begin = "device, but "
    config = RunConfig(model=ModelConfig(preset="tiny", variant="mlperf"), image_size=64)
    assert problems(wanted_of_stage(config)[0])[0] == (
        "data.decode",
        f"{begin}model.variant=mlperf resizes in float32, to the bit as its reference does on a CPU. Use data.decode=cpu.",
    )
    assert problems(stage="moments")[0] == (
        "data.decode",
        f"{begin}a stage of moments has no pictures to decode. Leave it out.",
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert problems() == [("data.decode", f"{begin}there is no CUDA device here. Use data.decode=cpu.")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device_decoding, "has_nvjpeg", lambda: False)
    assert problems() == [
        (
            "data.decode",
            f"{begin}torchvision {torchvision.__version__} was built without nvJPEG. Install its build for CUDA (torch is "
            f"{torch.__version__}), or use data.decode=cpu.",
        )
    ]
    monkeypatch.setattr(device_decoding, "has_nvjpeg", lambda: True)
    assert problems() == problems(local=None, synthetic=True) == []


def test_torchvision_says_whether_it_has_nvjpeg():
    assert has_nvjpeg() == (torch.ops.torchvision._cuda_version() != -1)


def test_held_out_pictures_are_decoded_on_the_cpu(stage):
    given = ValidationConfig(remote=str(stage)).source(DataConfig(local="/a", decode="device"), "images")
    assert given.decode == "cpu"


def test_the_room_for_batches_is_that_of_files_where_these_are_larger_than_pixels(odd):
    def gib(decode: str) -> float:
        data = DataConfig(local=str(odd), decode=decode)
        model = ModelConfig(preset="tiny")
        return batch_gib(RunConfig(model=model, global_batch_size=BATCH, image_size=64, data=data))

    files = [*PLAIN.values(), *OTHERS.values(), *(file for file, _ in BROKEN.values())]
    assert gib("device") > BATCH * sum(map(len, files)) / len(files) / 2**30 > gib("cpu")
