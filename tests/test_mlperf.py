"""families/mlperf.py against MLCommons' own checker, and in which keys a run differs from the benchmark's reference."""

from __future__ import annotations

import pytest

import benchmark
from config import flatten, schema_keys
from families.mlperf import BENCHMARKS, FLUX, SD, SD_EVERY_IMAGES


@pytest.mark.parametrize(("of", "ruleset"), [(of, ruleset) for of in BENCHMARKS for ruleset in of.rulesets])
def test_reference_points_are_those_of_the_official_checker(of, ruleset):
    """mlperf-logging, a direct need: every point, each of its runs, and the mean as the checker itself takes it."""
    from mlperf_logging.rcp_checker.rcp_checker import RCP_Checker

    official = RCP_Checker("training", ruleset, of.name, False).rcp_data.values()
    ours, values = of.list_points(ruleset), of.reference_values
    assert [point.global_batch_size for point in ours] == [record["BS"] for record in official]
    for point, record in zip(ours, official, strict=True):
        given = record["Hyperparams"]
        assert list(point.images) == record["Epochs to converge"]  # its own name for samples
        assert point.mean_images == pytest.approx(record["RCP Mean"], rel=1e-12)
        rate, warmup = given["opt_base_learning_rate"], given["opt_learning_rate_warmup_steps"]
        assert (point.lr if of is FLUX else point.lr_per_image, point.warmup_batches) == (rate, warmup)
        assert [values["optimizer.eps"], values["optimizer.weight_decay"]] == [
            given["opt_adamw_epsilon"],
            given["opt_adamw_weight_decay"],
        ]
        if of is FLUX:
            assert values["optimizer.betas"] == [given["opt_adamw_beta_1"], given["opt_adamw_beta_2"]]
            assert values["optimizer.clip_norm"] == given["opt_gradient_clip_norm"]


def test_batches_between_two_checkpoints():
    """384 is the example of the rules: 1334 batches, 512,256 images; 64, 512 and 2048 are the reference's configurations."""
    for size, batches in {64: 8000, 384: 1334, 512: 1000, 2048: 250, 3000: 171}.items():
        assert SD.interval(size) == batches * size
        assert (batches - 1) * size < SD_EVERY_IMAGES <= batches * size


def test_a_point_is_found_by_its_exact_global_batch_and_ruleset():
    assert SD.find_point(256).lr == pytest.approx(7.168e-5, rel=1e-12)
    assert SD.find_point(256, "4.1.0").lr_per_image == 1.8e-7 and SD.find_point(256, "4.0.0") is None
    assert SD.find_point(257) is None
    assert SD.find_point(384).batches(SD.find_point(384).fastest_images) == 3 * 1334


def test_the_rate_without_a_point_names_the_nearest_and_the_known_rulesets():
    assert SD.lr_per_image(512) == 2.3e-7 and SD.lr_per_image(512, "4.0.0") == 1.25e-7
    nearest = {(320,): [256, 384], (512,): [384, 1024], (64,): [256], (8192,): [2048], (300, "4.0.0"): [384]}
    for given, sizes in nearest.items():
        assert [point.global_batch_size for point in SD.nearest_points(*given)] == sizes
    with pytest.raises(ValueError, match=r"^no reference point at a global batch of 320 .* Nearest: 256 .2\.8e-07 an"):
        SD.lr_per_image(320)
    with pytest.raises(ValueError, match=r"^ruleset: '3.1.0' has no reference points .* Known: 4.0.0, 4.1.0, 5.0.0\."):
        SD.lr_per_image(512, "3.1.0")


# --- deviations ---

REFERENCE = {
    **SD.reference_values,
    "global_batch_size": 256,
    "optimizer.lr": None,
    "optimizer.lr_per_image": 2.8e-7,
    "schedule.warmup_batches": 1000,
    "schedule.warmup_images": None,
}


def changed(**values) -> list[str]:
    """Deviations of the reference with some keys changed; a dot is written as two underlines."""
    return SD.deviations({**REFERENCE, **{key.replace("__", "."): value for key, value in values.items()}})


def test_every_key_that_is_compared_is_a_key_of_a_run():
    assert sorted(REFERENCE.keys() - schema_keys(benchmark.RunConfig).keys()) == []


def test_the_reference_itself_does_not_deviate_however_its_numbers_are_written():
    assert changed() == []
    assert changed(optimizer__lr_per_image=None, optimizer__lr=7.168e-5) == []
    assert changed(optimizer__lr_per_image=2.8e-7 * (1 + 5e-7)) == []
    assert changed(schedule__warmup_batches=None, schedule__warmup_images=256_000) == []
    assert changed(schedule__warmup_batches=None, schedule__warmup_images=255_745) == []  # rounded up to whole batches
    assert changed(image_size=[512, 512], objective__caption_dropout=0, optimizer__betas=(0.9, 0.999)) == []
    assert changed(global_batch_size=2048, optimizer__lr_per_image=1.25e-7) == []


def test_each_deviation_is_named():
    point = "free in the closed division; the reference point has"
    for key, value, message in (
        ("objective.prediction", "epsilon", "epsilon; the reference: v"),
        ("optimizer.eps", 1e-6, "1e-06; the reference: 1e-08"),
        ("image_size", [512, 768], "[512, 768]; the reference: 512"),
        ("optimizer.lr_per_image", 1e-7, f"1e-07; {point} 2.8e-07"),
        ("schedule.warmup_images", 256_001, f"256001; {point} 1000 batches"),
        ("global_batch_size", 320, "320; free in the closed division; no reference point at a global batch of 320"),
    ):
        [found] = SD.deviations({**REFERENCE, key: value})
        assert found.startswith(f"{key}: {message}")


def test_no_key_of_the_reference_can_change_unseen():
    for key, value in SD.reference_values.items():
        [found] = SD.deviations({**REFERENCE, key: not value if isinstance(value, bool) else "another"})
        assert found.startswith(f"{key}: ")


def test_all_that_the_closed_division_fixes_is_held_against_a_run_as_it_is_given():
    """A stock run, as config.flatten gives it: the fixed keys that the benchmark's rules list, then the free ones."""
    own = {"objective.prediction": "epsilon", "objective.timesteps": "uniform", "objective.caption_dropout": 0.1}
    values = {**flatten(benchmark.RunConfig()), **own}
    fixed, free = ["objective.prediction", "objective.caption_dropout", "data.normalize"], "optimizer.lr"
    found = [text.partition(":")[0] for text in SD.deviations({**values, free: 1e-4})]
    assert found == [*fixed, free, "schedule.warmup_batches"]


def test_snapshots_elsewhere_than_where_the_rules_ask_for_them_are_a_deviation():
    values = {"global_batch_size": 384, "save.snapshot_every_images": 512_000}
    assert SD.deviations(values)[0] == "save.snapshot_every_images: 512000; the rules: 512256"
    assert SD.fixed_deviations({**values, "save.snapshot_every_images": 512_256}) == []
    assert SD.fixed_deviations({**values, "data.synthetic": True}) == []
