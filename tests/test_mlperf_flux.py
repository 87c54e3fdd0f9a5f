"""MLPerf's FLUX.1: constants against MLCommons' own files, the validation by formulas, the log before MLPerf's checkers."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import mlperf_logging
import pytest
import torch
from conftest import ROOT, sample_files, write_tar
from mlperf_fixture import FIXTURE, Drive, closed, config_of, problems_of
from mlperf_fixture import header as sd_header
from omegaconf import OmegaConf
from streaming import MDSWriter, StreamingDataset

import benchmark
from callbacks.mlperf_log import MLPerfConfig, describe_computation
from common.errors import ConfigError
from config import flatten
from data import DataConfig, open_datasets
from evaluation.validation import Validator, eighths_of
from families.mlperf import BENCHMARKS, FLUX, SD, evaluation_frequency, find_benchmark, find_logged_benchmark
from families.sampling import prompt_generator
from mds.dataset import read_dataset, write_metadata
from mds.mixture import resolve_streams
from prepare import latents, shards
from reports.mlperf import RULES, check, read_run, reference_points
from run_folder.mlperf_log import OPEN_LOSS, read_events
from training.builders import build_start_settings
from training.config import build, resolve
from training.start import lines_of_target

pytestmark = pytest.mark.timeout(200, func_only=True)

CHECKERS = Path(mlperf_logging.__file__).parent
RECIPES = sorted((ROOT / "yamls").glob("mlperf_flux_*.yaml"))

# --- constants ---


@pytest.mark.parametrize("ruleset", FLUX.rulesets)
def test_interval_and_target_are_those_that_the_checker_compares(ruleset):
    lines = (CHECKERS / f"compliance_checker/training_{ruleset}/closed_flux1.yaml").read_text()
    rounded = f"int(math.ceil({FLUX.every_images} / v['value'])) * v['value']" in lines
    assert rounded or f"v['value'] == {FLUX.every_images}" in lines
    assert f"v['value'] <= {FLUX.target['val_loss']} " in lines
    intervals = {512: 262_144, 4096: 262_144, 500: 262_500, 2304: 262_656}  # CEIL(262144 / batch) x batch
    for batch, images in intervals.items():
        assert FLUX.interval(batch) == images
        assert evaluation_frequency(images, batch, ruleset) == (images if rounded else 262_144)
    assert evaluation_frequency(16, 8, ruleset) == 16  # of a run that has not the rules' interval


def test_each_network_has_its_benchmark_with_the_rulesets_of_the_checker():
    assert [find_benchmark(each.family, "mlperf") for each in BENCHMARKS] == [SD, FLUX]
    logged = {"flux": "dev", "sd2": "stock", "shapes": "flow"}
    assert [find_logged_benchmark(*names) for names in logged.items()] == [FLUX, SD, FLUX]
    for each in BENCHMARKS:
        rules = RULES[each.name]
        own = (each.rulesets, each.train_samples, each.eval_samples, [*each.target])
        assert (rules.rulesets, rules.num_samples, rules.num_images, [*rules.target]) == own
    there = {path.parent.name.removeprefix("training_") for path in CHECKERS.rglob("training_*/closed_flux1.yaml")}
    assert {*FLUX.rulesets} == there


def test_a_ruleset_of_the_other_benchmark_is_refused_and_the_default_is_the_newest():
    text = "{} has no {}, the benchmark of model.family={}. Possible: {}."
    for ruleset, of, words in (
        ("5.0.0", FLUX, ("flux1", "flux", "5.1.0, 6.0.0, 6.1.0")),
        ("6.0.0", SD, ("stable_diffusion", "sd2", "4.0.0, 4.1.0, 5.0.0")),
    ):
        given = MLPerfConfig(enabled=True, ruleset=ruleset, org="A", platform="B")
        assert given.problems(of) == [("mlperf.ruleset", text.format(ruleset, *words))]
    assert (MLPerfConfig().resolved(FLUX).ruleset, MLPerfConfig().resolved(SD).ruleset) == ("6.1.0", "5.0.0")
    assert [key for key, _ in MLPerfConfig(enabled=True).problems(FLUX)] == ["mlperf.org", "mlperf.platform"]


def test_a_log_has_the_precision_in_which_a_run_computes_and_communicates():
    for precision, sharding, computed, sent in (
        ("tf32", "full", "tf32", "fp32"),
        ("bf16", "off", "bfloat16", "fp32"),
        ("bf16", "hybrid", "bfloat16", "bfloat16"),
        ("bf16_params", "off", "bfloat16", "bfloat16"),
    ):
        found = describe_computation(precision, sharding, 16)
        lowest = [found[f"lowest_numerical_precision_in_{where}"] for where in ("linear", "attn", "comm")]
        assert lowest == [computed, computed, sent] and found["micro_batch_size"] == 16


# --- recipes ---


def test_the_recipes_are_the_benchmark_at_each_reference_point():
    for path in RECIPES:
        config = config_of(path)
        values, batch = flatten(resolve(config)), config.global_batch_size
        assert path.name == f"mlperf_flux_{batch}.yaml"
        assert FLUX.closed_deviations(values) == FLUX.deviations(values) == []
        assert config.mlperf.resolved(FLUX).ruleset == "6.1.0"
        point = FLUX.find_point(batch)
        assert int(config.max_duration.removesuffix("sp")) == point.slowest_images + 2 * FLUX.every_images
        assert values["validation.num_samples"] == FLUX.eval_samples
        text = " ".join(path.read_text().replace("#", " ").split())
        assert f"the target at {point.mean_images:,.0f} images" in text
        assert f"({point.fastest_images:,} to {point.slowest_images:,})" in text
    assert {int(path.stem.rpartition("_")[2]) for path in RECIPES} == {p.global_batch_size for p in FLUX.list_points()}


DEVIATIONS = {
    "optimizer.betas=[0.9, 0.999]": "[0.9, 0.999]; the reference: [0.9, 0.95]",
    "objective.caption_dropout=0.0": "0; the reference: 0.1",
    "target.val_loss=0.6": "0.6; the reference: 0.586",
    "model.weights=random": "random; the reference: its published weights",
    "validation.every_images=262145": "263168; the rules: 262144",
}


def test_the_closed_division_refuses_each_deviation_by_name():
    for word, text in DEVIATIONS.items():
        found = FLUX.closed_deviations(flatten(resolve(config_of(RECIPES[0], word))))
        assert found == [f"{word.partition('=')[0]}: {text}"]
    for batch in (500, 2304):  # any batch is allowed, validated after each CEIL(262144 / batch); 72 GPUs have 2304
        config = resolve(config_of(RECIPES[0], f"global_batch_size={batch}", "device_train_microbatch_size=4"))
        assert FLUX.closed_deviations(flatten(config)) == []
        assert config.validation.every_images == FLUX.interval(batch) == -(-262_144 // batch) * batch


# --- the validation ---


@pytest.fixture(scope="module")
def stages(tmp_path_factory) -> dict[str, Path]:
    """48 pictures that are trained on and 20 that are not, as moments of the tiny FLUX.1."""
    folder, made = tmp_path_factory.mktemp("flux"), {}
    for name, numbers in (("train", range(48)), ("held_out", range(100, 120))):
        write_tar(folder / name / "tars/a.tar", {f"{n:06d}": sample_files(n) for n in numbers})
        assert shards.main([str(folder / name / "tars"), str(folder / name / "images")]) == 0
        made[name] = folder / name / "moments"
        own = ["model.family=flux", "model.variant=mlperf", "model.preset=tiny", "image_size=32"]
        assert latents.main([str(folder / name / "images"), str(made[name]), *own, "model.weights=random"]) == 0
    return made


def words_of(stages: dict[str, Path], folder: Path, name: str, *more: str) -> list[str]:
    """A run of six batches of 8, validated after each two."""
    return [
        *("model.family=flux", "model.variant=mlperf", "model.preset=tiny", "model.weights=random", "image_size=32"),
        *("global_batch_size=8", "device_train_microbatch_size=4", "max_duration=6ba", "optimizer.lr=1e-3"),
        *("optimizer.betas=[0.9, 0.95]", "optimizer.weight_decay=0.1", "optimizer.clip_norm=1.0", "seed=7"),
        "schedule.warmup_batches=3",
        *("data.stage=moments", f"data.remote={stages['train']}", "data.workers=0", "measure.warmup_batches=0"),
        *(f"validation.remote={stages['held_out']}", "validation.every_images=16", "validation.times=eighths"),
        *("loggers.progress_bar=false", f"run_folder={folder}", f"run_name={name}", *more),
    ]


@pytest.fixture(scope="module")
def tiny_flux(stages, tmp_path_factory):
    """The model of such a run."""
    config = resolve(config_of(*words_of(stages, tmp_path_factory.mktemp("no"), "x")))
    model = build(config).to_device(torch.device("cpu"), "fp32")
    with torch.no_grad():  # the benchmark's last layer is all zeros
        torch.nn.init.normal_(model.denoiser.proj_out.weight, generator=torch.Generator().manual_seed(1))
    return model


def validator_on(stage: Path, model, num: int, chunk: int, times: str = "eighths") -> Validator:
    data = DataConfig(stage="moments", remote=str(stage), workers=0)
    given = resolve_streams(data.sources, data.read(), (32, 32))
    dataset = open_datasets(data, model.family, given, device_batch_size=chunk, seed=0)
    return Validator(model, dataset, num_samples=num, chunk=chunk, times=times)


def losses_by_the_formulas(model, folder: Path, eighths: list[int]) -> torch.Tensor:
    """x_t = (1 - t) x + t noise, against noise - x: the reference's, written out again; sample n at its eighth."""
    stage, losses = StreamingDataset(local=str(folder), batch_size=1, shuffle=False), []
    for n, eighth in enumerate(eighths):
        generator, t = prompt_generator(0, n), eighth / 8
        posterior, noise = (torch.randn(1, *model.latent_shape, generator=generator) for _ in range(2))
        mean, logvar = torch.from_numpy(stage[n]["moments"].copy())[None].float().chunk(2, dim=1)
        latents = (mean + (0.5 * logvar).exp() * posterior - 0.1159) * 0.3611
        tokens = model.family.tokenize([stage[n]["caption"]])
        with torch.no_grad():
            condition = model.family.encode_text(model.encoders.modules, tokens)
            noisy = (1 - t) * latents + t * noise
            said = model.family.denoise(model.denoiser.eval(), noisy, torch.tensor([t]), condition)
        losses.append((said - (noise - latents)).square().mean().item())
    return torch.tensor(losses, dtype=torch.float64)


def test_samples_take_the_eight_times_in_turn():
    assert eighths_of([0, 1, 7, 8, 15, 29_695]).tolist() == [0, 125, 875, 0, 875, 875]
    counts = torch.bincount(eighths_of(range(FLUX.eval_samples)) // 125)
    assert counts.tolist() == 8 * [29_696 // 8]  # so the mean of all is the mean of the eight means


def check_formulas(found: dict, model, folder: Path, eighths: list[int]) -> None:
    expected = losses_by_the_formulas(model, folder, eighths)
    assert found["val_loss"] == pytest.approx(expected.mean().item(), rel=2e-5)
    bins = [expected[[n for n in range(20) if eighths[n] == k]].mean().item() for k in range(8)]
    assert found["val_loss_bins"] == pytest.approx(bins, rel=2e-5)


def test_the_loss_is_the_mean_over_all_samples_at_t_eighths_by_the_formulas(tiny_flux, stages):
    found = validator_on(stages["held_out"], tiny_flux, 20, 4).measure()
    check_formulas(found, tiny_flux, stages["held_out"], [n % 8 for n in range(20)])


def with_timesteps(stage: Path, to: Path, timesteps: list[int]) -> Path:
    """A copy of a dataset with that column, as prepare.shards makes it of MLPerf's preprocessed samples."""
    index = json.loads((stage / "index.json").read_text())["shards"][0]
    columns = dict(zip(index["column_names"], index["column_encodings"], strict=True)) | {"timestep": "int"}
    rows = StreamingDataset(local=str(stage), batch_size=1, shuffle=False)
    with MDSWriter(out=str(to), columns=columns, hashes=["xxh64"]) as writer:
        for number, timestep in enumerate(timesteps):
            writer.write({**rows[number], "timestep": timestep})
    facts = json.loads((stage / "dataset.json").read_text())
    write_metadata(to, "moments", {key: value for key, value in facts.items() if key not in FACTS_OF_FILES})
    return to


FACTS_OF_FILES = ("schema", "stage", "samples", "index_sha256", "keys_sha256", "keys_xxh64")
OWN = [(5 * n + 3 + n // 6) % 8 for n in range(20)]  # in no order that a sample's number gives


def measured_on_two_ranks(validator: Validator, monkeypatch) -> dict[torch.dtype, torch.Tensor]:
    """Return the sums over both ranks of what each sends to the all-reduce, by type."""
    parts: dict[torch.dtype, list[torch.Tensor]] = {}
    for rank in (0, 1):
        with monkeypatch.context() as patch:
            patch.setattr("common.dist.get_global_rank", lambda rank=rank: rank)
            patch.setattr("common.dist.get_world_size", lambda: 2)
            add = lambda part, **how: parts.setdefault(part.dtype, []).append(part.clone())  # noqa: E731
            patch.setattr("common.dist.all_reduce", add)
            patch.setattr("common.dist.all_gather_object", lambda value: [value])
            validator.measure()
    return {dtype: sum(each) for dtype, each in parts.items()}


def test_a_dataset_with_timesteps_is_measured_at_those_by_the_formulas_on_any_number_of_ranks(
    stages, tiny_flux, tmp_path, monkeypatch
):
    """MLPerf publishes its samples in the order in which its GPUs have encoded them, each with its time."""
    stage = with_timesteps(stages["held_out"], tmp_path / "own", OWN)
    validator = validator_on(stage, tiny_flux, 20, 4)
    found = validator.measure()
    check_formulas(found, tiny_flux, stage, OWN)
    summed = measured_on_two_ranks(validator, monkeypatch)
    assert summed[torch.float64].mean().item() == found["val_loss"] and summed[torch.int64].tolist() == OWN


def test_a_timestep_that_is_no_eighth_is_named(stages, tiny_flux, tmp_path):
    stage = with_timesteps(stages["held_out"], tmp_path / "own", [*OWN[:7], 8, *OWN[8:]])
    with pytest.raises(ValueError, match=r"^validation\.remote: sample 7 has the timestep 8\. Possible: 0 to 7\."):
        validator_on(stage, tiny_flux, 20, 4).measure()


def test_a_target_is_decided_by_losses_that_are_all_measured_alike(stages, tmp_path):
    """Also by those of a run that is over, which an earlier start without a target may have measured in other ways."""
    words = words_of(stages, tmp_path, "a", "target.val_loss=0.5")
    config = config_of(*words)
    settings, own = build_start_settings(config), config.validation.identity_of(read_dataset(str(stages["held_out"])))
    line = {"schema": 1, "validation": True, "batch": 2, "images": 16, "seconds": 1.0, "val_loss": 0.4}

    def lines_after(**changed: object) -> list[dict]:
        lines = [{**line, "val_loss_bins": [], **own, **changed}, {**line, **own, "batch": 4, "images": 32}]
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a/metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        return lines

    assert lines_after() == lines_of_target(settings)
    text = f"{{}}, but {tmp_path / 'a'} was validated with {{}} at 16 images."
    for key, value, given in (("times", "thousandths", "times eighths"), ("num_samples", 10, "num_samples 20")):
        lines_after(**{key: value})
        with pytest.raises(ConfigError) as refusal:
            lines_of_target(settings)
        assert refusal.value.problems[0].startswith(f"validation.{key}: {text.format(given, value)}")


# --- whole runs ---

LOGGED = ("mlperf.enabled=true", "mlperf.org=Easel", "mlperf.platform=tiny")


@pytest.fixture(scope="module")
def ran(stages, tmp_path_factory) -> Path:
    """A run with a target that its second validation is the first to meet."""
    folder = tmp_path_factory.mktemp("ran")
    assert benchmark.main(words_of(stages, folder, "plain")) == 0
    lines = validations(folder / "plain")
    assert lines[0]["val_loss"] > lines[1]["val_loss"] > lines[2]["val_loss"]
    target = f"target.val_loss={lines[2]['val_loss']!r}"
    assert benchmark.main(words_of(stages, folder, "aimed", target, *LOGGED)) == 0
    return folder


def validations(folder: Path) -> list[dict]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line.get("validation")]


@pytest.mark.long
def test_a_run_stops_at_the_first_validation_that_meets_its_target_and_says_so(ran):
    folder = ran / "aimed"
    lines, summary = validations(folder), json.loads((folder / "summary.json").read_text())
    # None before training: MLPerf's clock runs before data are read.
    assert [line["images"] for line in lines] == [16, 32]
    plain = {line["images"]: line["val_loss"] for line in validations(ran / "plain")}
    assert {line["images"]: line["val_loss"] for line in lines} == {images: plain[images] for images in (16, 32)}
    expected = {"target": "reached", "images_to_target": 32, "val_loss": lines[1]["val_loss"], "batches": 4}
    assert summary.items() >= {**expected, "stopped_early": True}.items()
    # The clock: training alone, and with both validations.
    assert summary["seconds_to_target"] == pytest.approx(lines[1]["seconds"], rel=1e-5)
    validated = sum(line["val_sec"] for line in lines)
    assert summary["seconds_to_target_with_eval"] == pytest.approx(lines[1]["seconds"] + validated, rel=1e-5)


@pytest.mark.slow
def test_the_checker_objects_to_the_log_of_a_tiny_run_for_its_loss_alone(ran, tmp_path):
    """It asks for 0.586 in the open division too. With such a loss in its place the same log is accepted."""
    log = ran / "aimed" / "mlperf.log"
    text = "Failed checks for averaged_validation_loss : v['value'] <= 0.586 and v['value'] > 0.0"
    well = trained_well(log, tmp_path)
    for ruleset in FLUX.rulesets:
        assert check(log, ruleset) == f"MLPerf's checker ({ruleset}) refuses its log: {text}"
        assert check(well, ruleset) is None
    events = read_events(log)
    values = {event["key"]: event["value"] for event in events}
    expected = {"submission_benchmark": "flux1", "submission_division": "open", "train_samples": 48, "eval_samples": 20}
    expected |= {"evaluation_frequency": 16, "opt_gradient_clip_norm": 1.0, "gradient_accumulation_steps": 2, "seed": 7}
    assert values.items() >= expected.items()
    rates = [event["value"] for event in events if event["key"] == "lr_abs"]  # of the second batch and the fourth
    assert rates == [pytest.approx(1e-3 * 2 / 4), 1e-3]
    losses = [(e["value"], e["metadata"]["samples_count"]) for e in events if e["key"] == "eval_accuracy"]
    assert losses == [(line["val_loss"], line["images"]) for line in validations(ran / "aimed")]


def trained_well(log: Path, folder: Path) -> Path:
    """A copy whose last loss is one that the benchmark asks for, as no tiny network has it; the run's target allows it."""
    lines, last = log.read_text().splitlines(keepends=True), validations(log.parent)[-1]["val_loss"]
    (folder / "well.log").write_text("".join(line.replace(f'"value": {last!r}', '"value": 0.5') for line in lines))
    return folder / "well.log"


def damaged(log: Path, folder: Path, key: str) -> Path:
    """A copy without the events of a key."""
    lines = [line for line in log.read_text().splitlines(keepends=True) if f'"key": "{key}"' not in line]
    (folder / "damaged.log").write_text("".join(lines))
    return folder / "damaged.log"


# --- the closed division's log, by fixtures that say that they are none ---


@functools.cache
def computation() -> dict[str, object]:
    config = config_of(ROOT / "yamls/mlperf_flux_512.yaml")
    return describe_computation(config.precision, config.sharding, config.device_train_microbatch_size)


def header(seed: int, ruleset: str, **changes: object) -> dict[str, object]:
    point, every = FLUX.find_point(512), FLUX.interval(512)
    own = {"train_samples": FLUX.train_samples, "eval_samples": FLUX.eval_samples, "opt_adamw_beta_2": 0.95}
    own |= {"evaluation_frequency": evaluation_frequency(every, 512, ruleset), "opt_adamw_weight_decay": 0.1}
    own |= {"opt_base_learning_rate": point.lr, "opt_gradient_clip_norm": 1.0}
    own |= {"opt_learning_rate_warmup_steps": point.warmup_batches}
    return {**sd_header(512, seed), **own, **computation(), **changes}


def fixture(folder: Path, images: int, *, seed=1, ruleset: str = "6.1.0", loss=0.585, **changes: object) -> Path:
    """A log that ends at so many images; the losses are made up."""
    every, given = FLUX.interval(512), header(seed, ruleset, **changes)
    drive = Drive(folder, closed(ruleset), given, benchmark=FLUX.name, every_images=every).start()
    for at in range(every, images + 1, every):
        drive.reach({"images": at, "val_loss": loss if at == images else 0.7, "eval_sec": 10.0})
    drive.log.fit_end(drive.state, None)
    drive.log.stop(drive.evaluations[-1], images)
    return folder / "mlperf.log"


@pytest.mark.parametrize("ruleset", FLUX.rulesets)
def test_the_checker_accepts_the_closed_constants_and_refuses_others(tmp_path, ruleset):
    log = fixture(tmp_path / "good", 8 * FLUX.every_images, ruleset=ruleset)
    assert check(log, ruleset) is None
    assert OPEN_LOSS not in {event["key"] for event in read_events(log)}
    others = {"evaluation_frequency": 262_145, "opt_adamw_beta_2": 0.999, "opt_gradient_clip_norm": None}
    for key, value in others.items():
        bad = fixture(tmp_path / key, 2 * FLUX.every_images, ruleset=ruleset, **{key: value})
        assert f"CHECK for '{key}' failed" in check(bad, ruleset)
    missed = fixture(tmp_path / "missed", 2 * FLUX.every_images, ruleset=ruleset, loss=0.5861)
    assert "eval_accuracy" in check(missed, ruleset)
    assert check(damaged(log, tmp_path, "evaluation_frequency"), ruleset) is not None


def test_a_report_counts_a_run_to_a_loss_without_scores_and_leaves_out_a_fixture(tmp_path):
    log = fixture(tmp_path / "r", 4 * FLUX.every_images)
    section = {"enabled": True, "division": "closed", "ruleset": "6.1.0", "org": "Fixture", "platform": "no_machine"}
    given = {"global_batch_size": 512, "model": {"family": "flux"}, "mlperf": section, "eval": {"clip": "random"}}

    def problem(target: float = 0.586) -> str | None:
        content = OmegaConf.create({**given, "target": {"val_loss": target}})
        (tmp_path / "r/config.yaml").write_text(OmegaConf.to_yaml(content))
        return read_run(tmp_path / "r").problem()

    assert problem() == f"a fixture: {FIXTURE}"
    lines = [line for line in log.read_text().splitlines(keepends=True) if '"fixture"' not in line]
    log.write_text("".join(lines))
    assert problem() is None and read_run(tmp_path / "r").foreign_scores == []
    assert problem(0.5) == "its log says success, but none of its evaluations meets target.val_loss=0.5"


# --- what is refused ---


def test_a_log_without_validation_or_target_is_refused(stages, tmp_path):
    words = words_of(stages, tmp_path, "x", *LOGGED)
    text = "no target.val_loss, so no run could succeed. The benchmark's: 0.586."
    assert problems_of(*words) == [f"mlperf.enabled: true, but {text}"]
    none = ["validation.remote=null", "validation.every_images=null", "target.val_loss=0.586"]
    first, second = problems_of(*words, *none)
    assert first.startswith("target.val_loss: given, but nothing is validated.")
    assert second.startswith("mlperf.enabled: true, but nothing is validated. Give the held-out dataset")


@pytest.mark.slow
@pytest.mark.parametrize("ruleset", FLUX.rulesets)
def test_the_checker_of_reference_points_passes_ten_of_the_references_own_and_refuses_ten_that_are_too_fast(
    tmp_path, ruleset
):
    for name, images in (("own", FLUX.find_point(512, ruleset).images[5:15]), ("fast", 10 * (4_194_304,))):
        (tmp_path / name).mkdir()
        for seed, count in enumerate(images):
            log = fixture(tmp_path / name / str(seed), count, seed=seed, ruleset=ruleset)
            log.rename(tmp_path / name / f"result_{seed}.txt")
    passed, said, _ = reference_points(tmp_path / "own", ruleset)
    assert passed and "RCP found" in said
    assert not reference_points(tmp_path / "fast", ruleset)[0]
