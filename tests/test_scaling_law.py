"""preflight/scaling_*.py: the law against closed forms, its fit, its errors, failures, time to the target."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from conftest import ROOT
from scipy.optimize import minimize_scalar
from scipy.special import lambertw

from families.mlperf import FLUX, SD, Benchmark
from reports.compare import Measurement
from scaling import estimates
from scaling import law as laws
from scaling.devices import CARDS, Predictor, Step, at_tflop, law_with_measured_rate
from scaling.estimates import batches_of, convergence, seconds_to_target
from scaling.law import Interval, Setup

ROWS = laws.read_rows()
USED = laws.usable_rows(ROWS)
RECORD = json.loads((ROOT / "reports/results/scaling.json").read_text())
H200 = "mlperf_h200_v41"
NOTHING = {"jitter": 1e-12, "hop_sec": 1e-12, "hidden": 1e-9}
ALL = 1 - 1e-9  # of a share
FAR = Setup("graphs", 4.0, 400.0, 50.0, 8)


@pytest.fixture(scope="module")
def whole():
    return laws.hold_out_places(USED, laws.fit(USED))


def theta(rate: float, **shared: float) -> np.ndarray:
    """Logarithms of one rate and of the shared parameters, their priors where nothing is said."""
    values = [shared.get(name, prior.value) for name, prior in laws.PARAMETERS.items()]
    return np.append(np.log(rate), laws.to_theta(np.array(values)))


def seconds(setup: Setup, num: int, batch: int, rate: float = 100.0, **shared: float) -> float:
    """A step's time."""
    return batch / math.exp(laws.log_speed(theta(rate, **shared), laws.points_of([(setup, num, batch, 0)]))[0])


# --- the law ---


def test_a_ring_within_a_domain_and_one_across_take_the_bytes_over_the_bandwidth():
    """Also where 4 of a domain of 8 share each layer: each part has 2 holders there, and 8 in 4 domains."""
    assert seconds(FAR, 1, 64, fixed_graphs=2.0) == pytest.approx((64 + 2) / 100)  # nobody to exchange with
    shared = {**NOTHING, "fixed_graphs": 1e-9, "link_share": 0.5}
    within = 2 * 4.0 * 7 / 8 / (laws.INNER_SHARE * 400) + 160 * 2 * 3 * laws.INNER_HOP_SEC  # 160 buckets of 25 MB
    across = 2 * 4.0 / 8 * 3 / 4 / (0.5 * 50)
    assert seconds(FAR, 8, 80, **shared) == pytest.approx(0.1 + within, abs=1e-3)
    assert seconds(FAR, 32, 320, **shared) == pytest.approx(0.1 + within + across, abs=1e-3)
    by_four = dataclasses.replace(FAR, tensor=4)
    within = 2 * 1.0 / 2 / (laws.INNER_SHARE * 400) + 40 * 2 * laws.INNER_HOP_SEC
    across = 2 * 1.0 / 2 * 3 / 4 / (0.5 * 50)
    assert seconds(by_four, 32, 320, **shared) == pytest.approx(0.1 + within + across, abs=1e-3)


def test_what_the_last_backward_pass_is_long_enough_for_is_hidden_and_no_more():
    slow = Setup("graphs", 4.0, 400.0, 1.0, 8)
    shared = {**NOTHING, "fixed_graphs": 1e-9, "link_share": ALL}
    bare = seconds(slow, 32, 32 * 256, **shared)
    for microbatch in (256, 16):  # 1.7 s of backward pass hide all of it, 0.11 s that much
        hidden = {**shared, "hidden": ALL}
        less = bare - seconds(dataclasses.replace(slow, microbatch=microbatch), 32, 32 * 256, **hidden)
        exchange = bare - 2.56
        assert less == pytest.approx(min(exchange, laws.BACKWARD_FRAC * microbatch / 100), abs=5e-3)


def test_hops_are_the_logarithm_of_the_domains_and_are_not_hidden():
    shared = {**NOTHING, "fixed_graphs": 1e-9}
    more = {**shared, "hop_sec": 0.01}
    for num, hops in ((8, 0), (16, 1), (64, 3)):
        assert seconds(FAR, num, num, **more) - seconds(FAR, num, num, **shared) == pytest.approx(0.02 * hops, abs=1e-6)


def test_the_slowest_of_many_is_slower_by_the_root_of_twice_their_logarithm():
    far = Setup("graphs", 1e-9, 400.0, 50.0, 8)
    shared = {**NOTHING, "fixed_graphs": 1e-9}
    grown = seconds(far, 512, 5120, **{**shared, "jitter": 0.01}) / seconds(far, 512, 5120, **shared)
    assert grown == pytest.approx(1 + 0.01 * math.sqrt(2 * math.log(512)), rel=2e-3)
    drawn = np.random.default_rng(1).normal(1, 0.01, (2000, 512)).max(axis=1).mean()
    assert grown == pytest.approx(drawn, rel=0.01)  # the asymptote of the mean of the maximum


def test_domains_are_of_one_size():
    sizes = {(8, 4): 4, (8, 64): 8, (72, 72): 72, (72, 512): 64, (72, 36): 36}
    assert {of: laws.domain_of(Setup("graphs", 1.0, 1.0, 1.0, of[0]), of[1]) for of in sizes} == sizes


# --- the fit ---


def test_the_fit_finds_the_law_that_rows_were_made_by():
    truth = laws.fit(USED)
    made = laws.log_speed(truth.theta, laws.row_points(USED, truth.series))
    draw, inside, num = np.random.default_rng(17), [], len(truth.series)
    for _ in range(20):
        noisy = np.exp(made + draw.normal(0, 0.01, len(made)))
        rows = [dataclasses.replace(row, images_per_sec=float(v)) for row, v in zip(USED, noisy, strict=True)]
        found = laws.fit(rows)
        assert found.noise == pytest.approx(0.01, rel=0.4)
        rates = np.abs(found.theta[:num] - truth.theta[:num])
        inside += [*(rates < 1.67 * np.sqrt(np.diag(found.covariance)[:num]))]  # t of 65 degrees at 90 %
    assert 0.8 < np.mean(inside) <= 1.0


def test_the_committed_errors_are_those_of_this_fit_and_the_aim_is_met(whole):
    law, held = whole
    assert law.as_record()["series"] == RECORD["law"]["series"]
    np.testing.assert_allclose(law.theta, RECORD["law"]["theta"], atol=2e-3)
    errors, of_record = [abs(each.error(each.predicted)) for each in held], RECORD["errors"]["sizes"][-1]
    assert np.median(errors) == pytest.approx(of_record["predicted"]["median"], abs=1e-3) and np.median(errors) < 0.10
    assert of_record["alone"]["median"] < 0.10
    assert len(law.theta) == RECORD["errors"]["fitted"] < len(USED) / 3


def inside(held, by: str) -> float:
    """Return the share of held-out places that lie in their interval."""
    return np.mean([getattr(each, by).low <= each.measured <= getattr(each, by).high for each in held])


def test_ninety_of_a_hundred_held_out_places_lie_in_their_interval_also_of_256_devices_and_more(whole):
    law, held = whole
    assert 0.9 <= inside(held, "predicted") <= 0.96 and law.by_doubling > 0
    assert all(each.predicted.low < each.predicted.value < each.predicted.high for each in held)
    for by in ("predicted", "alone"):
        large = [each for each in held if each.num >= 256 and getattr(each, by) is not None]
        assert len(large) == 16 and inside(large, by) >= 0.9
        assert np.median([abs(each.error(each.predicted)) for each in large]) < 0.1
    for share in map(law.parameter, laws.SHARES):
        assert 0 < share.low < share.value < share.high < 1
    values = np.array([prior.value for prior in laws.PARAMETERS.values()])
    np.testing.assert_allclose(laws.to_values(laws.to_theta(values)), values)


def test_a_measured_rate_gives_back_what_was_measured_and_its_interval_grows_with_its_spread(whole):
    law, _ = whole
    narrow = Measurement(140.0, 139.9, 140.1, 0)
    wide = Measurement(140.0, 100.0, 180.0, 3, (100.0, 140.0, 180.0))
    told = []
    for sample in (narrow, wide):
        predictor = Predictor(*law_with_measured_rate(law, FAR, "run", 1, 64, sample), FAR)
        assert predictor.predict(1, 64).value == pytest.approx(140.0)
        told.append(predictor.predict(512, 2048))
    assert told[1].high / told[1].low > told[0].high / told[0].low > 1


def test_another_network_is_as_fast_as_its_flops_say(whole):
    law, _ = whole
    predictors = [Predictor(*at_tflop(law, H200, tflop), laws.SETUPS[H200]) for tflop in (2.41, 4.82)]
    one, two = (of.law.theta[of.law.series.index(of.rate)] for of in predictors)
    assert np.exp(one - two) == pytest.approx(2.0)
    published = Predictor(law, H200, laws.SETUPS[H200]).predict(8, 256).value
    assert predictors[0].predict(8, 256).value == pytest.approx(published)


# --- failures ---


@pytest.mark.parametrize(("d", "m"), [(30.0, 1e5), (600.0, 3600.0)])
def test_the_cadence_is_youngs_where_checkpoints_are_short_and_else_near_the_minimum_of_the_expected_time(d, m):
    """Which has a closed form, by Lambert's W: the zero of its derivative."""
    least = minimize_scalar(lambda w: estimates.overhead_frac(w, d, 100.0, m), bounds=(1, 20 * m), method="bounded")
    exact = m * (1 + lambertw(-math.exp(-d / m - 1)).real)
    assert estimates.overhead_frac(exact, d, 100.0, m) <= least.fun * (1 + 1e-9)
    assert estimates.overhead_frac(estimates.daly_sec(d, m), d, 100.0, m) <= 1.01 * least.fun
    assert estimates.daly_sec(1.0, m) / math.sqrt(2 * m) == pytest.approx(1.0, abs=1.5e-2)
    assert estimates.daly_sec(300.0, 100.0) == 100.0  # a checkpoint that takes longer than two failures: Daly's limit


def play(w: float, d: float, r: float, m: float, segments: int, seed: int) -> float:
    """Return `overhead_frac` of one run that is played through, failure by failure."""
    draw, passed = np.random.default_rng(seed), 0.0
    for _ in range(segments):
        until = draw.exponential(m)
        while until < w + d:
            passed += until
            while (until := draw.exponential(m)) < r:
                passed += until
            passed += r
            until = draw.exponential(m)
        passed += w + d
    return passed / (segments * w) - 1


@pytest.mark.parametrize(("w", "d", "r", "m"), [(1800.0, 30.0, 300.0, 20000.0), (600.0, 60.0, 120.0, 2000.0)])
def test_the_expected_time_is_that_of_runs_played_through(w, d, r, m):
    played = [play(w, d, r, m, 4000, seed) for seed in range(8)]
    error = np.std(played) / math.sqrt(len(played))
    assert estimates.overhead_frac(w, d, r, m) == pytest.approx(np.mean(played), abs=4 * error)


# --- a run ---

STEP = Step("plain", 2.41, 865_910_724, 16)
FACTS = estimates.RunSpec("run", STEP, 2048, 10**9, 2, 12.0, sample_bytes=65_772.0, sample_cpu_sec=44e-6)


def row(whole, num: int, spec: estimates.RunSpec = FACTS, **changed) -> dict:
    predictor = spec.step.published(whole[0], CARDS["H200"])
    return estimates.estimate(predictor, spec, num, estimates.ScalingConfig(**changed))


def test_store_and_cores_limit_a_run_that_needs_more(whole):
    free = row(whole, 64)
    assert free["node_mb_per_sec"] == pytest.approx(free["images_per_sec"] / 8 * 65_772 / 1e6)
    slow = row(whole, 64, store_mb_per_sec=10.0)
    assert (slow["limit"], free["limit"]) == ("the store", None)
    assert slow["images_per_sec"] == pytest.approx(8 * 10e6 / 65_772)
    few = row(whole, 64, dataclasses.replace(FACTS, sample_cpu_sec=0.05), cores=1)
    assert few["limit"] == "cores" and few["node_cores"] == pytest.approx(1.0)
    synthetic = row(whole, 64, dataclasses.replace(FACTS, sample_bytes=None, sample_cpu_sec=None), cores=1)
    assert synthetic["limit"] is None and synthetic["node_cores"] is None
    assert [row(whole, num)["global_batch_size"] for num in (2048, 4096)] == [2048, 4096]  # an image for each device
    background = row(whole, 1024, holds_up=False)
    assert background["save_every_sec"] == 12.0
    assert background["overhead_frac"] < row(whole, 1024)["overhead_frac"]


# --- to the target ---


def test_the_law_of_images_is_found_from_points_on_it():
    counts = {batch: round(1e6 * (1 + batch / 1000)) for batch in (256, 512, 1024, 2048)}
    make = lambda batch, count: dataclasses.replace(SD.points[0], global_batch_size=batch, images=(count,) * 4)  # noqa: E731
    made = convergence(dataclasses.replace(SD, points=tuple(make(*item) for item in counts.items())))
    assert [value.value for value in made.parameters()] == pytest.approx([1e6, 1000], rel=1e-4)
    for num in (8, 72, 1024):
        found = batches_of(convergence(SD), num)
        assert found and all(batch % num == 0 and 128 <= batch <= min(4096, 64 * num) for batch in found)
    assert batches_of(convergence(SD), 8192) == []


@pytest.mark.parametrize(("benchmark", "ruleset"), [(SD, "5.0.0"), (SD, "4.1.0"), (FLUX, "6.0.0"), (FLUX, "5.1.0")])
def test_the_law_is_within_a_seventh_of_each_reference_point(benchmark: Benchmark, ruleset):
    law = convergence(benchmark, ruleset)
    for point in benchmark.list_points(ruleset):
        told = law.images(point.global_batch_size)
        assert told.low < told.value < told.high
        assert told.value == pytest.approx(point.mean_images, rel=0.14)


def test_the_best_batch_is_that_of_the_closed_form_where_nothing_is_exchanged():
    """(1 + B / C) (1 / N + b0 / B) is least at sqrt(C N b0)."""
    law, b0, num = convergence(SD), 8.0, 64
    speed = {b: b / (b / num + b0) for b in batches_of(law, num)}
    seconds = {b: seconds_to_target(law.images(b), Interval(v, v, v)).value for b, v in speed.items()}
    _, c = law.parameters()
    assert min(seconds, key=seconds.__getitem__) == pytest.approx(math.sqrt(c.value * num * b0), rel=0.1)
