"""FID: sums against numpy, distances against pytorch-fid, torchmetrics and closed forms, Inception, files, the commands."""

from __future__ import annotations

import itertools
import re
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

from evaluation import fid
from evaluation.fid import (
    BLOCK,
    FeatureSums,
    Statistics,
    covariance_warning,
    frechet_distance,
    load_inception,
    read_facts,
    read_statistics,
    write_statistics,
)
from evaluation.scoring_networks import full_float32
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


@pytest.mark.parametrize(("dim", "batch", "offset"), [(1, 64, 0), (64, 1, 0), (BLOCK + 44, 500, 0), (8, 7, 500)])
def test_sums_give_numpys_mean_and_covariance(dim, batch, offset):
    """Also of a mean a thousand times the spread, and whatever the batches; of two ranks when their sums are added."""
    given = features(500, dim).double() + offset
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = statistics(given, batch), numpy_statistics(given)
    first, second = FeatureSums(dim), FeatureSums(dim)
    first.update(given[:100])
    second.update(given[100:])
    for name, tensor in first.tensors().items():
        tensor += second.tensors()[name]
    for one in (found, first.compute()):
        assert one.mean.dtype == one.covariance.dtype == np.float64
        assert (one.mean.shape, one.covariance.shape, one.num_images) == ((dim,), (dim, dim), 500)
        np.testing.assert_allclose(one.mean, expected.mean, rtol=1e-12)
        np.testing.assert_allclose(one.covariance, expected.covariance, atol=1e-9 if offset else 1e-12)
        assert np.array_equal(one.covariance, one.covariance.T)


def test_features_that_are_not_finite_name_their_prompts():
    given, sums = features(8, 4), FeatureSums(4)
    given[3, 1], given[5, 0] = float("nan"), float("inf")
    for rows, ids, text in (
        (given, [11, 12, 13, 417, 15, 901, 17, 18], r"^FID: NaN or infinite for 2 of 8 images \(prompts 417, 901\)"),
        (torch.full((8, 4), float("nan")), torch.arange(8), r"\(prompts 0, 1, 2, 3, 4 and 3 more\)"),
    ):
        with pytest.raises(ValueError, match=text):
            sums.update(rows, ids=ids)
    assert not sums.n, "nothing was added"


@pytest.mark.filterwarnings("ignore:.*was called before.*:UserWarning")
def test_less_than_two_images_are_refused_and_too_few_for_a_covariance_are_a_warning():
    for num in (0, 1):
        with pytest.raises(ValueError, match=f"^FID: {num} images were given. A covariance needs 2 at least."):
            statistics(features(num, 4)) if num else FeatureSums(4).compute()
    assert covariance_warning(2049, 2048) is None and covariance_warning(None, 2048) is None
    assert "the covariance is singular (rank 2,047 at most)" in covariance_warning(2048, 2048)


# --- distance ---


def test_distance_equals_pytorch_fid_and_torchmetrics():
    given = features(600, 64, seed=1), features(700, 64, seed=2)
    a, b = map(statistics, given)
    assert frechet_distance(a, b) == pytest.approx(pytorch_fid(a, b), rel=1e-9)
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), rel=1e-12)
    assert frechet_distance(a, b) == pytest.approx(torchmetrics_fid(*given), rel=1e-8)


def torchmetrics_fid(a: torch.Tensor, b: torch.Tensor) -> float:
    from torchmetrics.image.fid import FrechetInceptionDistance

    network = torch.nn.Identity()
    network.num_features = a.shape[1]
    metric = FrechetInceptionDistance(network).set_dtype(torch.float64)
    metric.update(a.double(), real=True)
    metric.update(b.double(), real=False)
    return float(metric.compute())


@pytest.mark.parametrize(("num_a", "num_b"), [(20, 400), (20, 30), (400, 20), (2, 2)])
def test_a_singular_covariance_needs_no_epsilon(num_a, num_b):
    """Against sigma = X^T X: the trace of the root is the nuclear norm of the product of the centred features."""
    a, b = features(num_a, 64, seed=1).double(), features(num_b, 64, seed=2).double()
    centred = [(x - x.mean(dim=0)) / (len(x) - 1) ** 0.5 for x in (a, b)]
    root = torch.linalg.matrix_norm(centred[0] @ centred[1].T, "nuc")
    expected = (a.mean(0) - b.mean(0)).square().sum() + sum(x.square().sum() for x in centred) - 2 * root
    one, two = statistics(a), statistics(b)
    assert frechet_distance(one, two) == pytest.approx(float(expected), rel=1e-10)
    for same in (one, two, statistics(torch.ones(10, 64))):
        assert frechet_distance(same, same) == pytest.approx(0, abs=1e-12 * np.trace(same.covariance))


def test_an_impossible_covariance_and_other_features_have_no_distance():
    fine = Statistics(np.zeros(2), np.eye(2))
    with pytest.raises(ValueError, match=r"^FID: a covariance has the eigenvalue -1, the largest is 3\."):
        frechet_distance(fine, Statistics(np.zeros(2), np.array([[1.0, 2.0], [2.0, 1.0]])))
    with pytest.raises(ValueError, match=r"^FID: statistics of 2 and of 3 features\."):
        frechet_distance(fine, Statistics(np.zeros(3), np.eye(3)))


# --- files ---


def test_statistics_survive_the_file_and_pytorch_fids_file_is_read(tmp_path):
    one, path = statistics(features(30, 6)), tmp_path / "a.stats"  # no suffix is added
    write_statistics(path, one, {"extractor": "mine", "resize": "none", "image_size": 64})
    found = read_statistics(path, num_features=6)
    assert np.array_equal(found.mean, one.mean) and np.array_equal(found.covariance, one.covariance)
    assert read_facts(path) == {"num_images": 30, "extractor": "mine", "resize": "none", "image_size": 64}
    assert [p.name for p in tmp_path.iterdir()] == ["a.stats"] and found.num_images == 30
    rounded = one.covariance.astype(np.float32)
    rounded[0, 1] *= 1 + 1e-6  # not quite symmetric
    np.savez_compressed(path := tmp_path / "theirs.npz", mu=one.mean, sigma=rounded)
    found = read_statistics(path)
    np.testing.assert_allclose(found.covariance, one.covariance, atol=1e-6)
    assert found.num_images is None and found.covariance.dtype == np.float64
    assert np.array_equal(found.covariance, found.covariance.T) and read_facts(path) == {}


SHAPES = "mu is {}, sigma is float64 {}. Possible: real numbers (D"
NAN = np.array([0.0, np.nan])


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        (dict(mean=np.zeros(2), cov=np.eye(2)), "its arrays are mean, cov. Statistics are mu and sigma."),
        (dict(mu=np.zeros((1, 2)), sigma=np.eye(2)), SHAPES.format("float64 (1, 2)", "(2, 2)")),
        (dict(mu=NAN, sigma=np.eye(2)), "mu has 1 values that are NaN or infinite."),
        (dict(mu=np.zeros(2), sigma=np.array([[1.0, 0.5], [0.4, 1.0]])), "sigma and its transpose differ by 0.1."),
        (dict(mu=np.zeros(3), sigma=np.eye(3)), "mu is float64 (3,), sigma is float64 (3, 3). The image network gi"),
    ],
)
def test_a_file_that_holds_no_statistics_is_refused(tmp_path, arrays, text):
    np.savez(path := tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match="^" + re.escape(f"{path}: {text}")):
        read_statistics(path, num_features=2)


def test_a_file_that_is_no_npz_is_refused(tmp_path):
    np.savez(tmp_path / "pickled.npz", mu=np.array([print], dtype=object), sigma=np.eye(2))
    (tmp_path / "text.npz").write_text("<html>404</html>")
    np.savez(tmp_path / "cut.npz", mu=np.zeros(2), sigma=np.eye(2))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:-100])
    for name in ("missing.npz", "pickled.npz", "text.npz", "cut.npz"):
        with pytest.raises(ValueError) as caught:
            read_statistics(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name}: cannot be read as an .npz (")


# --- Inception ---


@pytest.fixture(scope="module")
def extractor():
    return load_inception("random")


def images(num: int, height: int, width: int) -> torch.Tensor:
    return torch.rand(num, 3, height, width, generator=torch.Generator().manual_seed(height))


def full_state() -> dict[str, torch.Tensor]:
    return fid._random_network().state_dict()


@pytest.mark.slow
@pytest.mark.timeout(120, func_only=True)
def test_features_are_pytorch_fids(extractor, monkeypatch):
    """Those of its own InceptionV3, whose download is answered with the same weights."""
    import pytorch_fid.inception as theirs

    monkeypatch.setattr(theirs, "load_state_dict_from_url", lambda *_, **__: full_state())
    network, given = theirs.InceptionV3().eval(), images(2, 80, 100)
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


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9")
def test_each_fp32_precision_is_restored_by_itself(monkeypatch):
    owners = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn
    for values in itertools.product(["ieee", "tf32"], repeat=3):
        for owner, value in zip(owners, values, strict=True):
            monkeypatch.setattr(owner, "fp32_precision", value)
        with full_float32(torch.device("cpu")):
            assert [owner.fp32_precision for owner in owners] == ["ieee"] * 3
        assert [owner.fp32_precision for owner in owners] == [*values]


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


@pytest.mark.long
@pytest.mark.timeout(120, func_only=True)
def test_the_published_file_is_loaded_and_known_by_its_sha1(tmp_path, extractor, monkeypatch):
    path, state = tmp_path / "pt_inception.pth", full_state()
    torch.save({name: tensor for name, tensor in state.items() if "num_batches" not in name}, path)
    digest = fid.file_digest(path, "sha1")
    published = "pt_inception-2015-12-05-6726825d.pth is bd836944fd6db519dfd8d924aa457f5b3c8357ff"
    with pytest.raises(ValueError, match=f"^{path}: its SHA-1 is {digest}, that of {published}."):
        load_inception(path)
    monkeypatch.setattr(fid, "PUBLISHED_SHA1", digest)
    loaded = load_inception(str(path), resize="bicubic256")
    assert (loaded.name, loaded.fingerprint, loaded.resize) == ("inception-2015-12-05", digest, "bicubic256")
    monkeypatch.setattr(loaded, "resize", "bilinear299")
    given = images(1, 50, 50)
    assert torch.equal(loaded(given), extractor(given))


# --- commands ---


class Small:
    """Another image network in Inception's place: the mean colours of a picture's quarters."""

    name, fingerprint, resize, num_features = "quarters", "0" * 32, "none", 12

    def to(self, device):
        return self

    def __call__(self, images):
        return F.adaptive_avg_pool2d(images, 2).flatten(1)


def test_the_command_makes_statistics_of_a_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fid_statistics, "load_inception", lambda weights, resize: Small())
    folder, out, rows = tmp_path / "images", tmp_path / "out.npz", []
    folder.mkdir()
    for number in range(6):
        path = folder / f"{number}.jpg"
        path.write_bytes(picture(number, (40 + number % 2 * 8, 48)))
        pixels = np.array(Image.open(path).convert("RGB").resize((32, 32), Image.Resampling.BICUBIC))
        rows.append(Small()(torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255)[0])
    words = [str(folder), str(out), "inception=random", "image_size=32", "batch_size=4"]

    def made(code: int, *more: str) -> tuple[str, str]:
        assert fid_statistics.main([*words, *more]) == code
        return capsys.readouterr()

    printed, _ = made(0)
    assert printed == f"statistics of 6 images, 12 features of quarters: {out}\n"
    expected, found, before = numpy_statistics(torch.stack(rows)), read_statistics(out), out.read_bytes()
    np.testing.assert_allclose(found.covariance, expected.covariance, atol=1e-7)
    np.testing.assert_allclose(found.mean, expected.mean, atol=1e-6)
    facts = {"extractor": "quarters", "fingerprint": "0" * 32, "resize": "none", "image_size": 32, "num_images": 6}
    assert read_facts(out) == facts

    assert made(2)[1].startswith(f"OUT: {out} exists. Give another name, remove it, or set overwrite=true.")
    (folder / "3.jpg").write_bytes(b"broken")
    assert f"{folder / '3.jpg'}: cannot be read as an image" in made(1, "overwrite=true")[1]
    assert out.read_bytes() == before


def test_the_command_reports_everything_that_is_wrong(tmp_path, capsys):
    here = str(tmp_path)
    for words, texts in (
        (
            [here, f"{here}/out.npy", "batch_size=0", "image_siz=3"],
            [
                *("command line: batch_size is 0.", "command line: unknown key 'image_siz'."),
                *(f"FOLDER: {here}: no image among its 0 entries.", f"OUT: {here}/out.npy does not end in .npz."),
            ],
        ),
        (["inception=random"], ["command line: FOLDER and OUT.npz have to be given."]),
        ([here, f"{here}/no/out.npz", "inception=random"], [f"OUT: there is no folder {here}/no."]),
        ([here, f"{here}/out.npz", "inception=/none.pth"], ["inception: /none.pth: there is no such file."]),
    ):
        assert fid_statistics.main(words) == 2
        for line, text in zip(capsys.readouterr().err.splitlines(), texts, strict=True):
            assert line.startswith(text)
        (tmp_path / "a.png").write_bytes(picture(1, kind="PNG"))
