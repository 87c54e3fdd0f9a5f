"""metrics/meter.py: each batch is measured once, after the next one has been given; figures are those of all at once."""

from __future__ import annotations

import pytest
import torch

from metrics.clip_score import load_clip
from metrics.meter import Meter

CAPTIONS = ["a red circle", "two dogs", "", "snow"]


@pytest.fixture(scope="module")
def meter() -> Meter:
    return Meter(inception=None, statistics=None, resize="bilinear299", clip="random")


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.rand(4, 3, 40, 40, generator=torch.Generator().manual_seed(1))


def test_a_batch_is_measured_when_the_next_one_is_in_the_making(meter, images, monkeypatch):
    order = []
    encode = meter.pair.encode_images
    monkeypatch.setattr(meter.pair, "encode_images", lambda given: order.append(len(given)) or encode(given))
    meter.reset()
    with meter.on(torch.device("cpu")):
        for first, last in ((0, 3), (3, 4)):
            order.append("made")
            meter.add(images[first:last], range(first, last), CAPTIONS[first:last])
        found = meter.figures()
    assert order == ["made", "made", 3, 1]
    pair = load_clip("random")
    cosines = (pair.encode_images(images) * pair.encode_texts(CAPTIONS)).sum(dim=1)
    assert found["num_images"] == 4 and found["clip"] == pytest.approx(cosines.mean().item(), abs=1e-6)


def test_what_only_fills_a_batch_is_not_measured(meter, images):
    meter.reset()
    with meter.on(torch.device("cpu")):
        meter.add(images, range(2), CAPTIONS[:2])
        assert meter.figures()["num_images"] == 2


def test_the_last_batch_too_is_refused_with_its_prompts_and_leaves_nothing_for_the_next_evaluation(meter, images):
    broken = images.clone()
    broken[1, 0, 0, 0] = torch.nan
    meter.reset()
    with pytest.raises(ValueError, match="images: not finite for the prompts 8"), meter.on(torch.device("cpu")):
        meter.add(images, range(4), CAPTIONS)
        meter.add(broken, range(7, 11), CAPTIONS)
        meter.figures()
    meter.reset()
    with meter.on(torch.device("cpu")):
        meter.add(images, range(4), CAPTIONS)
        assert meter.figures()["num_images"] == 4


def test_an_evaluation_that_was_broken_off_hands_no_batch_on(meter, images):
    meter.reset()
    with pytest.raises(KeyboardInterrupt), meter.on(torch.device("cpu")):
        meter.add(images, range(4), CAPTIONS)
        raise KeyboardInterrupt
    meter.measure_given()
    assert int(meter.cosines.n) == 0
