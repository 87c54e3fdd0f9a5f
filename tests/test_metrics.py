"""evaluation/metrics.py: each batch is measured once; metrics equal those of one large batch."""

from __future__ import annotations

import numpy as np
import open_clip
import pytest
import torch
from test_fid import pytorch_fid
from torchvision.transforms.functional import to_pil_image

from evaluation.clip_score import load_clip
from evaluation.fid import FeatureSums, Statistics, load_inception, read_statistics, write_statistics
from evaluation.metrics import Meter

CAPTIONS = ["a red circle", "two dogs", "", "snow"]


def meter_of(clip: str | None = "random", precision: str = "fp32", **fid) -> Meter:
    given = {"inception": None, "statistics": None, "resize": "bilinear299", **fid}
    return Meter(**given, clip=clip, precision=precision)


@pytest.fixture(scope="module")
def meter() -> Meter:
    return meter_of()


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.rand(4, 3, 40, 40, generator=torch.Generator().manual_seed(1))


def test_batches_give_the_mean_of_all_images(meter, images):
    meter.reset()
    with meter.on(torch.device("cpu")):
        for first, last in ((0, 3), (3, 4)):
            meter.add(images[first:last], range(first, last), CAPTIONS[first:last])
        found = meter.figures()
    pair = load_clip("random")
    cosines = (pair.encode_images(images) * pair.encode_texts(CAPTIONS)).sum(dim=1)
    assert found["num_images"] == 4 and found["clip"] == pytest.approx(cosines.mean().item(), abs=1e-6)


def test_what_only_fills_a_batch_is_not_measured(meter, images):
    both = meter_of()
    both.extractor, both.features = lambda given: given.mean(dim=(2, 3)), FeatureSums(3)
    both.add(images, range(2), CAPTIONS[:2])
    sums, whole = both.sums(), images[:2].double().mean(dim=(2, 3)).sum(dim=0)
    torch.testing.assert_close(sums["features"]["sum"], whole, rtol=1e-5, atol=0)
    found = measured(meter, images[:2], CAPTIONS[:2])
    assert found["num_images"] == 2 == int(sums["cosines"]["n"])
    assert float(sums["cosines"]["sum"]) / 2 == pytest.approx(found["clip"], abs=1e-6)


def test_a_batch_is_refused_with_its_prompts_and_leaves_nothing_for_the_next_evaluation(meter, images):
    broken = images.clone()
    broken[1, 0, 0, 0] = torch.nan
    meter.reset()
    with pytest.raises(ValueError, match="1 of 4 images .prompts 8."), meter.on(torch.device("cpu")):
        meter.add(images, range(4), CAPTIONS)
        meter.add(broken, range(7, 11), CAPTIONS)
        meter.figures()
    assert measured(meter, images, CAPTIONS)["num_images"] == 4


# --- fp16, as MLPerf's reference scores: its own formulas in numpy, with its networks under autocast ---


def half(clip: str | None = None, **fid) -> Meter:
    return meter_of(clip, "fp16", **fid)


def measured(meter: Meter, images: torch.Tensor, captions: list[str]) -> dict:
    meter.reset()
    with meter.on(torch.device("cpu")):
        meter.add(images, range(len(images)), captions)
        return meter.figures()


def test_the_clip_score_in_fp16_is_numpys_mean_of_float16_cosines(meter, images):
    pair, rows = load_clip("random"), []
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        text = pair.network.encode_text(open_clip.tokenize(CAPTIONS))
        text /= text.float().norm(dim=-1, keepdim=True)
        for image in images.half():
            image = pair.network.encode_image(pair.transform(to_pil_image(image))[None])
            image /= image.float().norm(dim=-1, keepdim=True)
            rows.append(image)
        cosines = (torch.cat(rows) * text).float().sum(dim=1).half().numpy()
    found = measured(half("random"), images, CAPTIONS)["clip"]
    assert cosines.dtype == np.float16 and found == float(np.float16(found))
    assert found == pytest.approx(float(np.mean(cosines)), abs=float(2 * np.spacing(np.float16(abs(found)))))
    assert found != measured(meter, images, CAPTIONS)["clip"]


def test_a_mean_just_below_the_target_is_above_it_in_fp16():
    """The step of float16 at 0.15 is 2**-13: the reference's 0.150024 may be 0.149964."""
    score = half("random")
    for mean, shown in ((0.149964, 0.1500244140625), (0.149963, 0.14990234375)):
        score.reset()
        score.restore_sums({"cosines": {"n": torch.tensor(2.0).double(), "sum": torch.tensor(2 * mean).double()}})
        assert score.figures()["clip"] == shown == float(np.mean(np.array([mean, mean], np.float16)))


def test_fid_in_fp16_has_numpys_mean_and_covariance_of_float16_features(tmp_path):
    generator = torch.Generator().manual_seed(4)
    ours, theirs = torch.rand(2, 80, 3, 32, 32, generator=generator)
    reader = load_inception("families/shapes_weights/reader/model.safetensors")
    made = reader(theirs).double().numpy()
    file = tmp_path / "s.npz"
    write_statistics(file, Statistics(made.mean(axis=0), np.cov(made, rowvar=False), 80), {})
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        features = reader.network.features(2 * ours.half() - 1)
    features = features.half().numpy()
    mean, covariance = np.mean(features, axis=0), np.cov(features, rowvar=False)
    assert (mean.dtype, covariance.dtype) == (np.float16, np.float64)
    reference = read_statistics(file)
    expected = pytorch_fid(Statistics(mean, covariance, 80), reference)
    given = dict(inception="families/shapes_weights/reader/model.safetensors", statistics=str(file))
    found = measured(half(**given), ours, [""] * 80)["fid"]
    whole = measured(meter_of(None, **given), ours, [""] * 80)["fid"]
    assert found == pytest.approx(expected, rel=1e-6) and found != pytest.approx(whole, rel=1e-6)
    assert half(**given).facts["eval_precision"] == "fp16"
