"""stages/device_decoding.py on a GPU: its pictures beside the CPU's, and that none is written over what is still read.

What differs: nvJPEG's transform rounds otherwise, and it repeats a colour that two or four pixels share, where libjpeg goes
over from one to the next; and torch scales in float32 where the CPU does in 8 bits, a level apart. Repeated colours alone,
imitated on the CPU, move these pictures by 0.3 to 0.8 levels in the mean. The bound is that of torchvision's own test of
its GPU decoder.
"""

from __future__ import annotations

import io

import pytest
import torch
from conftest import picture
from gpu_marks import NEEDS_GPU
from PIL import Image
from test_device_decoding import BATCH, BROKEN, OTHERS, epochs, loader_of, odd, write_stage  # noqa: F401

GPU = torch.device("cuda")
MEAN_LEVELS = 2.0
WAYS = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "progressive": {"subsampling": 2, "progressive": True},
    "restarts": {"restart_marker_blocks": 2},
}

pytestmark = NEEDS_GPU


def jpegs() -> dict[str, bytes]:
    """Pictures without noise, each kind and each orientation, and a grey one."""
    files = {}
    kinds = {**WAYS, **{f"turned {orientation}": {"exif": orientation} for orientation in range(1, 9)}}
    for number, (name, ways) in enumerate(kinds.items()):
        exif, file = Image.Exif(), io.BytesIO()
        exif[0x0112] = ways.get("exif", 1)
        Image.open(io.BytesIO(picture(number, (150, 97), "PNG"))).save(file, "JPEG", **{**ways, "exif": exif})
        files[name] = file.getvalue()
    return {**files, "grey": picture(0, (150, 97), mode="L")}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A stage of JPEGs for the GPU, and of pictures that the loader processes decode."""
    out = tmp_path_factory.mktemp("good") / "images"
    write_stage(out, {**jpegs(), **OTHERS})
    return out


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ways", [{}, {"flip": True, "crop": "random"}], ids=str)
def test_each_picture_is_the_cpus_within_two_levels_in_the_mean(good, workers, ways):
    ways = dict(shuffle=False, workers=workers, **ways)
    (ours, bad), (others, _) = epochs(good, 1, device=GPU, decode="device", **ways), epochs(good, 1, **ways)
    assert not bad and all(batch["images"].device.type == "cuda" for batch in ours)
    for number, key in zip(range(len(ours) * BATCH), [*jpegs(), *OTHERS], strict=False):
        one, other = (batches[number // BATCH] for batches in (ours, others))
        assert torch.equal(one["tokens"].cpu(), other["tokens"])
        image, expected = (batch["images"][number % BATCH].cpu().float() for batch in (one, other))
        assert (image - expected).abs().mean() <= (0.0 if key in OTHERS else MEAN_LEVELS), key


def test_a_batch_with_damaged_files_is_full_and_none_but_these_are_bad(odd):  # noqa: F811
    (batches, bad), (others, _) = epochs(odd, device=GPU, decode="device", workers=2), epochs(odd, workers=0)
    assert len(batches) == len(others) and {len(batch["images"]) for batch in batches} == {BATCH}
    assert {"empty", "no end"} <= {key for _, (key, _) in bad} <= set(BROKEN)


def test_pictures_that_are_decoded_while_the_gpu_computes_are_written_over_nothing(good):
    """The host gives a batch's memory back before the GPU has read it."""

    def sums(num_products: int) -> torch.Tensor:
        busy, found = torch.randn(4096, 4096, device=GPU), []
        loader = loader_of(good, GPU, decode="device", shuffle=False, workers=0)
        for _ in range(8):
            for batch in loader:
                for _ in range(num_products):
                    busy = busy @ busy.T / 64.0
                found.append(batch.pop("images").double().sum())
        loader.close()
        return torch.stack(found)

    assert torch.equal(sums(16), sums(0))
