"""FID: sums against numpy, distances against pytorch-fid, torchmetrics and closed forms, Inception, files, the commands."""

from __future__ import annotations

import io
import itertools
import warnings
import zipfile
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import scipy.linalg
import torch
import torch.nn.functional as F
from conftest import picture
from PIL import Image

from evaluation import inception
from evaluation.fid import (
    BLOCK,
    FeatureSums,
    Statistics,
    covariance_warning,
    frechet_distance,
    read_facts,
    read_statistics,
    write_statistics,
)
from evaluation.inception import load_inception
from evaluation.numerics import full_float32
from prepare import fid_statistics


def features(num: int, dim: int, seed: int = 0) -> torch.Tensor:
    """Correlated, with a mean that is large beside their spread, float32."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(num, dim, generator=generator) @ torch.randn(dim, dim, generator=generator) / dim**0.5
    return 3 + 0.5 * mixed + 0.1 * torch.rand(dim, generator=generator)


def statistics(given: torch.Tensor, batch: int = 1000) -> Statistics:
    sums = FeatureSums(given.shape[1])
    for part in given.split(batch):
        sums.update(part)
    return sums.compute()


def numpy_statistics(given: torch.Tensor) -> Statistics:
    array = given.double().numpy()
    return Statistics(array.mean(axis=0), np.atleast_2d(np.cov(array, rowvar=False)), len(array))


def pytorch_fid(a: Statistics, b: Statistics) -> float:
    """Its own distance. It asks scipy's root for an estimate of the error, drops that, and scipy 1.18 has it no more."""
    from pytorch_fid import fid_score

    def sqrtm(matrix: np.ndarray, disp: bool = True) -> Any:
        root = scipy.linalg.sqrtm(matrix)
        return root if disp else (root, None)

    with mock.patch.object(fid_score, "linalg", SimpleNamespace(sqrtm=sqrtm)):
        return fid_score.calculate_frechet_distance(a.mean, a.covariance, b.mean, b.covariance)


# --- sums ---


@pytest.mark.parametrize("dim", [1, 64, BLOCK + 44])
def test_sums_give_numpys_mean_and_covariance(dim):
    given = features(500, dim)
    found, expected = statistics(given, batch=64), numpy_statistics(given)
    assert found.mean.dtype == found.covariance.dtype == np.float64
    assert (found.mean.shape, found.covariance.shape, found.num_images) == ((dim,), (dim, dim), 500)
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-12)
    np.testing.assert_allclose(found.covariance, expected.covariance, atol=1e-12)
    assert np.array_equal(found.covariance, found.covariance.T)


def test_a_mean_a_thousand_times_the_spread_leaves_ten_digits_of_the_covariance():
    given = features(500, 8).double() + 500
    np.testing.assert_allclose(statistics(given).covariance, numpy_statistics(given).covariance, atol=1e-9)


def test_sums_are_the_same_however_batches_are_split():
    given = features(257, 40)
    whole = statistics(given, batch=257)
    for batch in (1, 7, 256):
        np.testing.assert_allclose(statistics(given, batch).covariance, whole.covariance, atol=1e-12)


def test_two_ranks_give_what_one_gives():
    """Their states added, as dist_reduce_fx says, by torchmetrics' own gathering of two ranks."""
    given = features(300, 40)
    ranks = [FeatureSums(40), FeatureSums(40)]
    ranks[0].update(given[:100])
    ranks[1].update(given[100:])
    states = [[getattr(rank, name) for rank in ranks] for name in ranks[0]._reductions]
    gathered = FeatureSums(40, dist_sync_fn=lambda tensor, group: states.pop(0), distributed_available_fn=lambda: True)
    gathered.update(given[:1])  # any: what it holds is replaced by what is gathered
    found, expected = gathered.compute(), statistics(given)
    assert found.num_images == 300
    np.testing.assert_allclose(found.covariance, expected.covariance, atol=1e-12)

    ranks[0].merge_state(ranks[1])
    np.testing.assert_allclose(ranks[0].compute().covariance, expected.covariance, atol=1e-12)


@pytest.mark.parametrize(
    "cast",
    [
        lambda sums: sums.half(),
        lambda sums: sums.set_dtype(torch.float16),
        lambda sums: sums.to(torch.bfloat16),
        lambda sums: torch.nn.ModuleList([sums]).half(),
        lambda sums: torch.nn.ModuleList([sums]).to(torch.float16),
    ],
)
def test_states_stay_float64_whatever_is_cast(cast):
    sums = FeatureSums(8)
    sums.update(features(10, 8))
    before = sums.sum.clone()
    cast(sums)
    assert {sums.n.dtype, sums.sum.dtype, sums.outer.dtype} == {torch.float64}
    assert torch.equal(sums.sum, before)
    sums.reset()
    assert sums.outer.dtype == torch.float64 and not sums.outer.any()


def test_autocast_outside_changes_nothing():
    given = features(50, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = statistics(given)
    assert np.array_equal(found.covariance, statistics(given).covariance)


def test_states_have_one_size_for_any_number_of_images():
    sums = FeatureSums(16)
    sizes = []
    for num in (2, 2000):
        sums.update(features(num, 16))
        sizes.append({name: tuple(getattr(sums, name).shape) for name in sums._reductions})
    assert sizes == [{"n": (), "sum": (16,), "outer": (16, 16)}] * 2


def test_features_that_are_not_finite_name_their_prompts():
    given = features(8, 4)
    given[3, 1], given[5, 0] = float("nan"), float("inf")
    sums = FeatureSums(4)
    with pytest.raises(ValueError) as caught:
        sums.update(given, ids=[11, 12, 13, 417, 15, 901, 17, 18])
    assert str(caught.value) == (
        "FID: NaN or infinite for 2 of 8 images (prompts 417, 901). A score is of finite values only. Look at these images: "
        "a model that has diverged makes them."
    )
    with pytest.raises(ValueError, match=r"\(rows of the batch 3, 5\)"):
        sums.update(given)
    with pytest.raises(ValueError, match=r"\(prompts 0, 1, 2, 3, 4 and 3 more\)"):
        sums.update(torch.full((8, 4), float("nan")), ids=torch.arange(8))
    assert not sums.n, "nothing was added"


@pytest.mark.filterwarnings("ignore:.*was called before.*:UserWarning")
@pytest.mark.parametrize("num", [0, 1])
def test_statistics_of_less_than_two_images_are_refused(num):
    with pytest.raises(ValueError) as caught:
        statistics(features(num, 4)) if num else FeatureSums(4).compute()
    assert str(caught.value) == f"FID: {num} images were given. A covariance needs 2 at least. Generate more."


def test_too_few_images_for_a_covariance_are_warned_of():
    assert covariance_warning(2049, 2048) is None and covariance_warning(None, 2048) is None
    assert covariance_warning(2048, 2048) == (
        "2,048 images for 2,048 features: the covariance is singular (rank 2,047 at most) and FID comes out too high. "
        "Compare with figures of as many images only, or take many more than 2,048."
    )


# --- distance ---


def test_distance_equals_pytorch_fid():
    a, b = statistics(features(600, 64, seed=1)), statistics(features(700, 64, seed=2))
    assert frechet_distance(a, b) == pytest.approx(pytorch_fid(a, b), rel=1e-9)
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), rel=1e-12)


def torchmetrics_fid(a: torch.Tensor, b: torch.Tensor) -> float:
    from torchmetrics.image.fid import FrechetInceptionDistance

    network = torch.nn.Identity()
    network.num_features = a.shape[1]
    metric = FrechetInceptionDistance(network).set_dtype(torch.float64)
    metric.update(a.double(), real=True)
    metric.update(b.double(), real=False)
    return float(metric.compute())


def test_distance_equals_torchmetrics():
    a, b = features(600, 64, seed=1), features(700, 64, seed=2)
    assert frechet_distance(statistics(a), statistics(b)) == pytest.approx(torchmetrics_fid(a, b), rel=1e-8)


def test_distance_is_the_closed_form_for_covariances_that_commute():
    """|m_a - m_b|^2 + sum (sqrt(a_i) - sqrt(b_i))^2 for eigenvalues a, b of common eigenvectors, some of them 0."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.linalg.qr(torch.randn(50, 50, generator=generator, dtype=torch.float64))[0].numpy()
    a, b = (torch.rand(50, generator=generator, dtype=torch.float64).numpy() ** 8 for _ in range(2))
    mean = torch.rand(50, generator=generator, dtype=torch.float64).numpy()
    for a_zeros, b_zeros in ((0, 0), (20, 0), (20, 30), (50, 0)):
        a[:a_zeros], b[50 - b_zeros :] = 0, 0
        of_a, of_b = ((vectors * values) @ vectors.T for values in (a, b))
        found = frechet_distance(Statistics(mean, (of_a + of_a.T) / 2), Statistics(0 * mean, (of_b + of_b.T) / 2))
        assert found == pytest.approx(mean @ mean + ((np.sqrt(a) - np.sqrt(b)) ** 2).sum(), rel=1e-9)


def test_distance_of_one_feature_is_that_of_two_numbers():
    a, b = Statistics(np.array([1.0]), np.array([[4.0]])), Statistics(np.array([3.0]), np.array([[9.0]]))
    assert frechet_distance(a, b) == pytest.approx((1 - 3) ** 2 + (2 - 3) ** 2, rel=1e-14)


@pytest.mark.parametrize(("num_a", "num_b"), [(20, 400), (20, 30), (400, 20), (2, 2)])
def test_a_singular_covariance_needs_no_epsilon(num_a, num_b):
    """Against sigma = X^T X: the trace of the root is the nuclear norm of the product of the centred features."""
    a, b = features(num_a, 64, seed=1).double(), features(num_b, 64, seed=2).double()
    centred = [(x - x.mean(dim=0)) / (len(x) - 1) ** 0.5 for x in (a, b)]
    root = torch.linalg.matrix_norm(centred[0] @ centred[1].T, "nuc")
    expected = (a.mean(0) - b.mean(0)).square().sum() + sum(x.square().sum() for x in centred) - 2 * root
    assert frechet_distance(statistics(a), statistics(b)) == pytest.approx(float(expected), rel=1e-10)


def test_statistics_have_no_distance_to_themselves():
    for num in (2, 20, 400):
        one = statistics(features(num, 64))
        assert frechet_distance(one, one) == pytest.approx(0, abs=1e-12 * np.trace(one.covariance))
    same = statistics(torch.ones(10, 64))
    assert frechet_distance(same, same) == 0


def test_the_largest_statistics_of_float32_have_a_distance_and_beyond_there_is_none(tmp_path):
    largest = Statistics(np.full(2, 3e38), np.diag([1e77, 1e77]))
    write_statistics(tmp_path / "a.npz", largest, {})
    distance = frechet_distance(read_statistics(tmp_path / "a.npz"), Statistics(np.zeros(2), np.eye(2)))
    assert distance == pytest.approx(2 * 3e38**2 + 2e77, rel=1e-6)
    for mean, variance in ((1e200, 1.0), (0.0, 1e308)):
        with pytest.raises(ValueError, match="FID: the distance is .*Make these statistics again"):
            beyond = Statistics(np.full(2, mean), np.diag([variance, variance]))
            frechet_distance(beyond, beyond._replace(mean=np.zeros(2)))


def test_what_is_no_covariance_has_no_distance():
    fine = Statistics(np.zeros(2), np.eye(2))
    with pytest.raises(ValueError) as caught:
        frechet_distance(fine, Statistics(np.zeros(2), np.array([[1.0, 2.0], [2.0, 1.0]])))
    assert str(caught.value) == (
        "FID: a covariance has the eigenvalue -1, the largest is 3. A covariance has none below 0. Make these statistics "
        "again."
    )
    with pytest.raises(ValueError) as caught:
        frechet_distance(fine, Statistics(np.zeros(3), np.eye(3)))
    assert str(caught.value) == (
        "FID: statistics of 2 and of 3 features. Possible: of the same image network. Make both with one."
    )


def synthetic_features(num_images: int, num_features: int, seed: int) -> torch.Tensor:
    """Return features like Inception's, (N, D) float32: not negative, correlated, of full rank."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(256, num_features, generator=torch.Generator().manual_seed(0)) / 16
    features = torch.randn(num_images, 256, generator=generator) @ mixing
    return features.add_(torch.randn(num_images, num_features, generator=generator), alpha=0.1).add_(0.3).relu_()


@pytest.mark.slow
@pytest.mark.timeout(120, func_only=True)
def test_2048_features_equal_pytorch_fid_and_torchmetrics():
    for num in (3000, 500):  # 500: singular
        a, b = (synthetic_features(num, 2048, seed=seed) for seed in (1, 2))
        found = frechet_distance(statistics(a), statistics(b))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert found == pytest.approx(torchmetrics_fid(a, b), rel=1e-6)
            if num == 3000:
                assert found == pytest.approx(pytorch_fid(statistics(a), statistics(b)), rel=1e-8)


# --- files ---


def test_statistics_survive_the_file(tmp_path):
    one, path = statistics(features(30, 6)), tmp_path / "a.stats"  # no suffix is added
    write_statistics(path, one, {"extractor": "mine", "resize": "none", "image_size": 64})
    found = read_statistics(path, num_features=6)
    assert np.array_equal(found.mean, one.mean) and np.array_equal(found.covariance, one.covariance)
    assert found.num_images == 30
    assert read_facts(path) == {"num_images": 30, "extractor": "mine", "resize": "none", "image_size": 64}
    assert [p.name for p in tmp_path.iterdir()] == ["a.stats"]


def test_pytorch_fids_file_is_read(tmp_path):
    one = statistics(features(30, 6))
    np.savez_compressed(tmp_path / "theirs.npz", mu=one.mean, sigma=one.covariance.astype(np.float32))
    found = read_statistics(tmp_path / "theirs.npz")
    np.testing.assert_allclose(found.covariance, one.covariance, atol=1e-6)
    assert found.num_images is None and found.covariance.dtype == np.float64
    assert read_facts(tmp_path / "theirs.npz") == {}


def test_a_file_that_cannot_be_written_leaves_the_earlier_one(tmp_path, monkeypatch):
    one, path = statistics(features(30, 6)), tmp_path / "a.npz"
    write_statistics(path, one, {})
    before = path.read_bytes()

    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        write_statistics(path, one, {"extractor": "mine"})
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["a.npz"]


AGAIN = "Make the file again: python -m prepare.fid_statistics."
BROKEN = {
    "other keys": (
        dict(mean=np.zeros(2), cov=np.eye(2)),
        f"its arrays are mean, cov. Statistics are mu and sigma. {AGAIN}",
    ),
    "other shapes": (
        dict(mu=np.zeros((1, 2)), sigma=np.eye(2)),
        f"mu is float64 (1, 2), sigma is float64 (2, 2). Possible: real numbers (D,) and (D, D). {AGAIN}",
    ),
    "sigma of other features": (
        dict(mu=np.zeros(2), sigma=np.eye(3)),
        f"mu is float64 (2,), sigma is float64 (3, 3). Possible: real numbers (D,) and (D, D). {AGAIN}",
    ),
    "texts": (
        dict(mu=np.array(["a", "b"]), sigma=np.eye(2)),
        f"mu is <U1 (2,), sigma is float64 (2, 2). Possible: real numbers (D,) and (D, D). {AGAIN}",
    ),
    "NaN": (
        dict(mu=np.array([0.0, np.nan]), sigma=np.eye(2)),
        f"mu has 1 values that are NaN or infinite. Possible: finite ones. {AGAIN}",
    ),
    "infinity": (
        dict(mu=np.zeros(2), sigma=np.full((2, 2), np.inf)),
        f"sigma has 4 values that are NaN or infinite. Possible: finite ones. {AGAIN}",
    ),
    "not symmetric": (
        dict(mu=np.zeros(2), sigma=np.array([[1.0, 0.5], [0.4, 1.0]])),
        f"sigma and its transpose differ by 0.1. A covariance is symmetric. {AGAIN}",
    ),
    "a number of images that is none": (
        dict(mu=np.zeros(2), sigma=np.eye(2), num_images=[3, 4]),
        f"num_images is int64 (2,). Possible: one whole number. {AGAIN}",
    ),
    "another network": (
        dict(mu=np.zeros(3), sigma=np.eye(3)),
        "mu is float64 (3,), sigma is float64 (3, 3). The image network gives 2 features. Give the statistics of the same "
        "network.",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_file_that_holds_no_statistics_is_refused(tmp_path, fault):
    arrays, text = BROKEN[fault]
    path = tmp_path / "a.npz"
    np.savez(path, **arrays)
    with pytest.raises(ValueError) as caught:
        read_statistics(path, num_features=2)
    assert str(caught.value) == f"{path}: {text}"


def test_float32_rounding_is_no_fault(tmp_path):
    np.savez(tmp_path / "a.npz", mu=np.zeros(2), sigma=np.array([[1.0, 0.5], [0.5 + 1e-6, 1.0]]))
    covariance = read_statistics(tmp_path / "a.npz").covariance
    assert np.array_equal(covariance, covariance.T)


def test_what_is_no_npz_is_refused(tmp_path):
    np.savez(tmp_path / "pickled.npz", mu=np.array([print], dtype=object), sigma=np.eye(2))
    (tmp_path / "text.npz").write_text("<html>404</html>")
    (tmp_path / "empty.npz").touch()
    whole = tmp_path / "whole.npz"
    np.savez(whole, mu=np.zeros(2), sigma=np.eye(2))
    (tmp_path / "cut.npz").write_bytes(whole.read_bytes()[:-100])
    np.save(tmp_path / "array.npy", np.eye(2))
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        array = io.BytesIO()
        np.save(array, np.zeros(2**18))
        for number in range(129):
            archive.writestr(f"{number}.npy", array.getvalue())
    for name in ("a.npz", "pickled.npz", "text.npz", "empty.npz", "cut.npz", "array.npy", "bomb.npz"):
        with pytest.raises(ValueError) as caught:
            read_statistics(tmp_path / name)
        begin, end = f"{tmp_path / name}: cannot be read as an .npz (", AGAIN
        assert str(caught.value).startswith(begin) and str(caught.value).endswith(end)
    assert "it holds 270,549,120 bytes; at most 268,435,456 are read" in str(caught.value)


def test_statistics_that_could_not_be_read_are_not_written(tmp_path):
    with pytest.raises(ValueError, match=r"a.npz: is not written: mu has 1 values that are NaN"):
        write_statistics(tmp_path / "a.npz", Statistics(np.array([np.nan]), np.eye(1)), {})
    assert list(tmp_path.iterdir()) == []


# --- Inception ---


@pytest.fixture(scope="module")
def extractor():
    return load_inception("random")


def images(num: int, height: int, width: int) -> torch.Tensor:
    return torch.rand(num, 3, height, width, generator=torch.Generator().manual_seed(height))


def pytorch_fids_network(monkeypatch, state):
    """Its own InceptionV3, its download answered with the given weights."""
    import pytorch_fid.inception as theirs

    monkeypatch.setattr(theirs, "load_state_dict_from_url", lambda *_, **__: state)
    return theirs.InceptionV3().eval()


def full_state() -> dict[str, torch.Tensor]:
    return inception._random_network().state_dict()


@pytest.mark.slow
@pytest.mark.timeout(120, func_only=True)
def test_features_are_pytorch_fids(extractor, monkeypatch):
    network = pytorch_fids_network(monkeypatch, full_state())
    given = images(2, 80, 100)
    with torch.no_grad():
        expected = network(given)[0].flatten(1)
    found = extractor(given)
    assert found.shape == (2, 2048) and found.dtype == torch.float32 and not found.requires_grad
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert found.std(dim=0).mean() > 1e-3, "random weights tell images apart"


def test_features_are_full_float32_whatever_is_outside(extractor):
    given = images(1, 40, 40)
    expected = extractor(given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = extractor(given)
    assert torch.equal(found, expected) and not extractor.network.training
    assert extractor.name == "random-inception" and extractor.num_features == 2048 and extractor.resize == "bilinear299"
    torch.manual_seed(5)
    assert load_inception("random").fingerprint == extractor.fingerprint, "the same for every seed"


@pytest.mark.parametrize("allowed", [False, True])
def test_tensorfloat_is_off_while_a_score_is_computed_and_as_before_after_it(allowed):
    """Set by the old switches, as Composer does it, and seen through them; a mix of both kinds is an error in torch."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    try:
        matmul.allow_tf32 = cudnn.allow_tf32 = allowed
        with pytest.raises(KeyError), full_float32(torch.device("cpu")):
            if not hasattr(matmul, "fp32_precision"):
                assert (matmul.allow_tf32, cudnn.allow_tf32) == (False, False)
            raise KeyError
        assert (matmul.allow_tf32, cudnn.allow_tf32) == (allowed, allowed)
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9")
def test_each_fp32_precision_is_restored_by_itself():
    owners = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn

    def read():
        return tuple(owner.fp32_precision for owner in owners)

    def write(values):
        for owner, value in zip(owners, values, strict=True):
            owner.fp32_precision = value

    before = read()
    try:
        for values in itertools.product(["ieee", "tf32"], repeat=3):
            write(values)
            with full_float32(torch.device("cpu")):
                assert read() == ("ieee", "ieee", "ieee")
            assert read() == values
    finally:
        write(before)


def test_each_resize_is_what_it_says(extractor, monkeypatch):
    seen = []
    monkeypatch.setattr(extractor, "network", lambda given: seen.append(given) or torch.zeros(len(given), 2048))
    given = images(2, 60, 90)
    extractor(given)
    monkeypatch.setattr(extractor, "resize", "bicubic256")
    extractor(given)
    plain = 2 * F.interpolate(given, (299, 299), mode="bilinear", align_corners=False) - 1
    torch.testing.assert_close(seen[0], plain, rtol=0.0, atol=1e-6)  # rounded to 8 bits it would be 0.004 off

    from torchvision.transforms.functional import to_pil_image, to_tensor

    small = [to_tensor(to_pil_image(one).resize((256, 256), Image.Resampling.BICUBIC)) for one in given]
    by_pil = 2 * F.interpolate(torch.stack(small), (299, 299), mode="bilinear", align_corners=False) - 1
    torch.testing.assert_close(seen[1], by_pil, rtol=0.0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(120, func_only=True)
def test_the_published_file_is_loaded_and_known_by_its_sha1(tmp_path, extractor, monkeypatch):
    path, state = tmp_path / "pt_inception.pth", full_state()
    torch.save({name: tensor for name, tensor in state.items() if "num_batches" not in name}, path)
    with pytest.raises(ValueError) as caught:
        load_inception(path)
    digest = inception.file_digest(path, "sha1")
    assert str(caught.value) == (
        f"{path}: its SHA-1 is {digest}, that of pt_inception-2015-12-05-6726825d.pth is "
        "bd836944fd6db519dfd8d924aa457f5b3c8357ff. FID is defined by that file alone: fetch it again: python -m "
        "prepare.downloads inception."
    )
    monkeypatch.setattr(inception, "PUBLISHED_SHA1", digest)
    loaded = load_inception(str(path), resize="bicubic256")
    assert (loaded.name, loaded.fingerprint, loaded.resize) == ("inception-2015-12-05", digest, "bicubic256")
    monkeypatch.setattr(loaded, "resize", "bilinear299")
    given = images(1, 50, 50)
    assert torch.equal(loaded(given), extractor(given))


def test_other_weights_files_and_resizes_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError) as caught:
        load_inception("random", resize="lanczos")
    assert str(caught.value) == "resize: 'lanczos' is not known. Possible: bilinear299, bicubic256."
    with pytest.raises(ValueError, match="there is no such file"):
        load_inception(tmp_path / "none.pth")
    torch.save({"fc.weight": torch.zeros(2, 2), "other": torch.zeros(1)}, tmp_path / "a.pth")
    monkeypatch.setattr(inception, "PUBLISHED_SHA1", inception.file_digest(tmp_path / "a.pth", "sha1"))
    with pytest.raises(ValueError) as caught:
        load_inception(tmp_path / "a.pth")
    text = str(caught.value)
    assert (
        text.startswith(f"{tmp_path / 'a.pth'}: does not fit FID's Inception: 471 missing (")
        and "1 left over (other)" in text
    )
    assert text.endswith("1 of another form (fc.weight is (2, 2), not (1008, 2048)). Give the weights of that network.")


# --- commands ---


def folder_of_pictures(folder, num=6):
    for number in range(num):
        (folder / f"{number}.jpg").write_bytes(picture(number, (40 + number % 2 * 8, 48)))
    return folder


class Small:
    """Another image network in Inception's place: the mean colours of a picture's quarters."""

    name, fingerprint, resize, num_features = "quarters", "0" * 32, "none", 12

    def to(self, device):
        return self

    def __call__(self, images):
        return F.adaptive_avg_pool2d(images, 2).flatten(1)


def test_the_command_makes_statistics_of_a_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fid_statistics, "load_inception", lambda weights, resize: Small())
    folder = tmp_path / "pictures"
    folder.mkdir()
    folder_of_pictures(folder)
    out = tmp_path / "out.npz"
    words = [str(folder), str(out), "inception=random", "image_size=32", "batch_size=4"]
    assert fid_statistics.main(words) == 0
    said = capsys.readouterr()
    assert said.out == f"statistics of 6 images, 12 features of quarters: {out}\n"
    assert "FOLDER: 6 images for 12 features: the covariance is singular (rank 5 at most)" in said.err
    rows = []
    for path in sorted(folder.iterdir()):
        pixels = np.array(Image.open(path).convert("RGB").resize((32, 32), Image.Resampling.BICUBIC))
        rows.append(Small()(torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255)[0])
    expected, found = numpy_statistics(torch.stack(rows)), read_statistics(out)
    np.testing.assert_allclose(found.covariance, expected.covariance, atol=1e-7)
    np.testing.assert_allclose(found.mean, expected.mean, atol=1e-6)
    facts = {"extractor": "quarters", "fingerprint": "0" * 32, "resize": "none", "image_size": 32, "num_images": 6}
    assert read_facts(out) == facts

    assert fid_statistics.main(words) == 2
    assert capsys.readouterr().err == f"OUT: {out} exists. Give another name, remove it, or say overwrite=true.\n"
    (folder / "3.jpg").write_bytes(b"broken")
    before = out.read_bytes()
    assert fid_statistics.main([*words, "overwrite=true"]) == 1
    said = capsys.readouterr().err
    assert f"{folder / '3.jpg'}: cannot be read as an image" in said and out.read_bytes() == before
    (folder / "3.jpg").write_bytes(picture(3))
    (folder / "notes.txt").touch()
    assert fid_statistics.main([*words, "overwrite=true"]) == 0
    assert capsys.readouterr().out.endswith("; files that are no images by their suffixes: 1, e.g. notes.txt\n")
    (folder / "notes.txt").unlink()
    (folder / "3.jpg").unlink()
    assert fid_statistics.main([*words, "overwrite=true"]) == 0
    assert read_statistics(out).num_images == 5


def test_the_command_says_everything_that_is_wrong(tmp_path, capsys):
    assert fid_statistics.main([]) == 2
    assert fid_statistics.main(["--help"]) == 0
    assert "python -m prepare.fid_statistics FOLDER OUT.npz" in capsys.readouterr().out
    assert fid_statistics.main([str(tmp_path), str(tmp_path / "out.npy"), "batch_size=0", "image_siz=3"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "command line: batch_size is 0. Possible: 1 to 65,536.",
        "command line: unknown key 'image_siz'. Did you mean 'image_size'?",
        "inception: not given. Give the path of pt_inception-2015-12-05-6726825d.pth, or random for a trial.",
        f"FOLDER: {tmp_path}: no image among its 0 entries. Give a folder with images (.jpg, .jpeg, .png, .webp, "
        ".avif, .bmp, .tif, .tiff, .gif).",
        f"OUT: {tmp_path / 'out.npy'} does not end in .npz. Give a name that does.",
    ]
    assert fid_statistics.main(["inception=random"]) == 2
    assert "command line: FOLDER and OUT.npz have to be given." in capsys.readouterr().err
    (tmp_path / "a.png").write_bytes(picture(1, kind="PNG"))
    assert fid_statistics.main([str(tmp_path), str(tmp_path / "no" / "out.npz"), "inception=random"]) == 2
    assert capsys.readouterr().err == f"OUT: there is no folder {tmp_path / 'no'}. Make it first.\n"
    assert fid_statistics.main([str(tmp_path), str(tmp_path / "out.npz"), "inception=/none.pth"]) == 2
    assert capsys.readouterr().err.startswith("inception: /none.pth: there is no such file.")


@pytest.mark.slow
@pytest.mark.timeout(120, func_only=True)
def test_the_command_makes_statistics_with_inception(tmp_path, capsys, extractor):
    folder = tmp_path / "pictures"
    folder.mkdir()
    folder_of_pictures(folder, num=4)
    out = tmp_path / "out.npz"
    assert fid_statistics.main([str(folder), str(out), "inception=random", "batch_size=3"]) == 0
    rows = [
        torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)[None] / 255 for path in sorted(folder.iterdir())
    ]
    expected = numpy_statistics(torch.cat([extractor(row) for row in rows]))
    np.testing.assert_allclose(read_statistics(out, 2048).covariance, expected.covariance, atol=1e-7)
