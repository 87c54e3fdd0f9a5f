"""MLPerf's FLUX.1: constants against MLCommons' own files, the validation by formulas, the log before MLPerf's checkers."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import mlperf_logging
import pytest
import torch
from conftest import ROOT, sample_files, write_tar
from mlperf_fixture import FIXTURE, Drive, closed
from omegaconf import OmegaConf
from streaming import MDSWriter, StreamingDataset

import benchmark
from callbacks.mlperf_log import MLPerfConfig
from cli.command_line import parse_command_line
from cli.errors import ConfigError
from config import flat, load
from data import DataConfig, open_stages
from preflight import plan
from preflight.run import closed_data_problems, cost_of, quick_problems
from prepare import latents, shards
from record.files import evaluations_of
from record.mlperf_events import OPEN_LOSS, read_events
from reports import mlperf as report
from reports.mlperf_runs import RULES, check, read_run, reference_points
from stages.dataset import read_stage, write_facts
from stages.mixture import opened
from training.eval_callbacks import describe_computation
from training.resume import measured
from training.run_config import build, resolve
from training.validation import Validator, eighths_of
from zoo.mlperf import BENCHMARKS, benchmark_of, logged_as
from zoo.mlperf_flux import FLUX, evaluation_frequency
from zoo.mlperf_sd import SD
from zoo.sampling import prompt_generator

pytestmark = pytest.mark.timeout(200, func_only=True)

CHECKERS = Path(mlperf_logging.__file__).parent
RECIPES = sorted((ROOT / "yamls").glob("mlperf_flux_*.yaml"))

# --- constants ---


@pytest.mark.parametrize("ruleset", FLUX.rulesets)
def test_reference_points_are_those_of_the_official_checker(ruleset):
    from mlperf_logging.rcp_checker.rcp_checker import RCP_Checker

    official = RCP_Checker("training", ruleset, "flux1", False).rcp_data.values()
    ours = FLUX.points_of(ruleset)
    assert [point.global_batch_size for point in ours] == [record["BS"] for record in official]
    for point, record in zip(ours, official, strict=True):
        given = record["Hyperparams"]
        assert list(point.images) == record["Epochs to converge"]  # its own name for samples
        assert point.mean_images == pytest.approx(record["RCP Mean"], rel=1e-12)
        assert point.lr == given["opt_base_learning_rate"]
        assert point.warmup_batches == given["opt_learning_rate_warmup_steps"]
        own = {key: FLUX.fixed[f"optimizer.{key}"] for key in ("betas", "eps", "weight_decay", "clip_norm")}
        betas = [given["opt_adamw_beta_1"], given["opt_adamw_beta_2"]]
        others = [given[f"opt_{key}"] for key in ("adamw_epsilon", "adamw_weight_decay", "gradient_clip_norm")]
        assert list(own.values()) == [betas, *others]


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


def test_each_network_has_its_benchmark_and_reports_know_the_same():
    assert [benchmark_of(each.family, "mlperf") for each in BENCHMARKS] == [SD, FLUX]
    assert benchmark_of("flux", "dev") is None and benchmark_of("sdxl", "mlperf") is None
    assert (logged_as("flux", "dev"), logged_as("sd2", "stock"), logged_as("shapes", "stock")) == (FLUX, SD, SD)
    assert logged_as("shapes", "flow") == FLUX
    for each in BENCHMARKS:
        rules = RULES[each.name]
        assert (rules.rulesets, rules.num_samples, rules.num_images) == (
            each.rulesets,
            each.train_samples,
            each.eval_samples,
        )
        assert [*rules.target] == [*each.target]


def test_rulesets_are_all_that_the_checker_has_for_the_benchmark():
    there = {path.parent.name.removeprefix("training_") for path in CHECKERS.rglob("training_*/closed_flux1.yaml")}
    assert {*FLUX.rulesets} == there
    for ruleset in there:
        assert MLPerfConfig(ruleset=ruleset).problems(FLUX) == []


@pytest.mark.parametrize(
    ("ruleset", "of", "text"),
    [
        ("5.0.0", FLUX, "5.0.0 has no flux1, the benchmark of model.family=flux. Possible: 5.1.0, 6.0.0, 6.1.0."),
        (
            "6.0.0",
            SD,
            "6.0.0 has no stable_diffusion, the benchmark of model.family=sd2. Possible: 4.0.0, 4.1.0, 5.0.0.",
        ),
    ],
)
def test_a_ruleset_of_the_other_benchmark_is_refused(ruleset, of, text):
    given = MLPerfConfig(enabled=True, ruleset=ruleset, org="A", platform="B")
    assert given.problems(of) == [("mlperf.ruleset", text)]


def test_the_default_ruleset_is_the_newest_and_asks_who_and_on_what():
    assert (MLPerfConfig().resolved(FLUX).ruleset, MLPerfConfig().resolved(SD).ruleset) == ("6.1.0", "5.0.0")
    assert MLPerfConfig(enabled=True).problems(FLUX) == [
        (f"mlperf.{key}", "not given; ruleset 6.1.0 asks for it. Give it.") for key in ("org", "platform")
    ]


@pytest.mark.parametrize(
    ("precision", "sharding", "linear", "attention", "sent"),
    [
        ("fp32", "full", "fp32", "fp32", "fp32"),
        ("tf32", "full", "tf32", "tf32", "fp32"),
        ("bf16", "off", "bfloat16", "bfloat16", "fp32"),
        ("bf16", "hybrid", "bfloat16", "bfloat16", "bfloat16"),
        ("fp16", "off", "fp16", "fp16", "fp32"),
        ("bf16_params", "off", "bfloat16", "bfloat16", "bfloat16"),
    ],
)
def test_a_log_says_in_which_precision_a_run_computes_and_sends(precision, sharding, linear, attention, sent):
    found = describe_computation(recipe(RECIPES[0], f"precision={precision}", f"sharding={sharding}"))
    given = [found[f"lowest_numerical_precision_in_{where}"] for where in ("linear", "attn", "comm")]
    assert given == [linear, attention, sent] and found["micro_batch_size"] == 16


# --- recipes ---


def recipe(path: Path, *words: str) -> benchmark.RunConfig:
    given = parse_command_line([str(path), *words], {})
    return load(benchmark.RunConfig, given, check=lambda config: [])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_the_benchmark_at_a_reference_point(path):
    config = recipe(path)
    values, batch = flat(resolve(config)), config.global_batch_size
    assert path.name == f"mlperf_flux_{batch}.yaml" and FLUX.not_closed(values) == []
    assert FLUX.deviations(values) == [] and config.mlperf.resolved(FLUX).ruleset == "6.1.0"
    point = FLUX.reference_point(batch)
    assert int(config.max_duration.removesuffix("sp")) == point.slowest_images + 2 * FLUX.every_images
    assert values["validation.num_samples"] == FLUX.eval_samples
    text = " ".join(path.read_text().replace("#", " ").split())
    assert f"the target at {point.mean_images:,.0f} images" in text
    assert f"({point.fastest_images:,} to {point.slowest_images:,})" in text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # torch, of bf16 on a CPU: the network is only traced
def test_a_recipe_fits_on_the_gpus_that_it_names():
    """By the plan of 64 GPUs on eight machines, without encoders."""
    found = {}
    for path in RECIPES:
        config = resolve(recipe(path))
        cost = dataclasses.replace(plan.on_gpus(cost_of(config), flat(config)), frozen_gib=0.0)
        each = plan.over(cost, 64, config.sharding)
        gib = int(re.search(r"64 GPUs of (\d+) GiB", path.read_text())[1])
        assert config.device_train_microbatch_size <= plan.images_a_pass(each, gib, ema=False)
        assert config.global_batch_size % (64 * config.device_train_microbatch_size) == 0
        found[config.global_batch_size] = gib
    assert found == {512: 80, 1024: 139, 2048: 178, 4096: 178}  # docs/mlperf.md says so


def test_there_is_a_recipe_for_every_reference_point():
    assert {int(path.stem.rpartition("_")[2]) for path in RECIPES} == {p.global_batch_size for p in FLUX.points_of()}


DEVIATIONS = {
    "optimizer.betas": ("[0.9, 0.999]", "[0.9, 0.999]; the reference: [0.9, 0.95]"),
    "optimizer.weight_decay": ("0.01", "0.01; the reference: 0.1"),
    "optimizer.clip_norm": ("null", "null; the reference: 1"),
    "objective.caption_dropout": ("0.0", "0; the reference: 0.1"),
    "objective.timesteps": ("logit_normal", "logit_normal; the reference: uniform"),
    "validation.times": ("thousandths", "thousandths; the reference: eighths"),
    "target.val_loss": ("0.6", "0.6; the reference: 0.586"),
    "image_size": ("512", "512; the reference: 256"),
    "model.weights": ("random", "random; the reference: its published weights"),
    "model.denoiser": ("runs/other", "runs/other; the reference: null"),
    "validation.every_images": ("262145", "263168; the rules: 262144"),
}


@pytest.mark.parametrize("key", DEVIATIONS)
def test_the_closed_division_refuses_each_deviation_by_name(key):
    value, text = DEVIATIONS[key]
    found = FLUX.not_closed(flat(resolve(recipe(RECIPES[0], f"{key}={value}"))))
    assert found == [f"{key}: {text}"]


@pytest.mark.parametrize("batch", [500, 2304])
def test_the_closed_division_takes_any_global_batch_and_validates_after_whole_ones(batch):
    """The rules: every CEIL(262144 / batch) batches. Submissions on 72 GPUs have 2304."""
    config = resolve(recipe(RECIPES[0], f"global_batch_size={batch}", "device_train_microbatch_size=4"))
    assert FLUX.not_closed(flat(config)) == []
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
    given = parse_command_line(words_of(stages, tmp_path_factory.mktemp("no"), "x"), {})
    config = resolve(load(benchmark.RunConfig, given, check=lambda config: []))
    model = build(config).place(torch.device("cpu"), "fp32")
    with torch.no_grad():  # the benchmark's last layer is all zeros
        torch.nn.init.normal_(model.denoiser.proj_out.weight, generator=torch.Generator().manual_seed(1))
    return model


def validator_on(stage: Path, model, num: int, chunk: int, times: str = "eighths") -> Validator:
    data = DataConfig(stage="moments", remote=str(stage), workers=0)
    given = opened(data.sources, data.read(), (32, 32))
    dataset = open_stages(data, model.family, given, device_batch_size=chunk, seed=0)
    return Validator(model, dataset, num_samples=num, chunk=chunk, times=times)


@pytest.fixture(scope="module")
def validator_of(stages, tiny_flux):
    return lambda num, chunk: validator_on(stages["held_out"], tiny_flux, num, chunk)


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


def test_the_loss_is_the_mean_over_all_samples_at_t_eighths_by_the_formulas(validator_of, stages):
    validator = validator_of(20, 4)
    found = validator.measure()
    expected = losses_by_the_formulas(validator.model, stages["held_out"], [n % 8 for n in range(20)])
    assert found["val_loss"] == pytest.approx(expected.mean().item(), rel=2e-5)
    bins = [expected[k::8].mean().item() for k in range(8)]
    assert found["val_loss_bins"] == pytest.approx(bins, rel=2e-5)


def with_timesteps(stage: Path, to: Path, timesteps: list[int]) -> Path:
    """A copy of a stage with that column, as prepare.shards makes it of MLPerf's preprocessed samples."""
    index = json.loads((stage / "index.json").read_text())["shards"][0]
    columns = dict(zip(index["column_names"], index["column_encodings"], strict=True)) | {"timestep": "int"}
    rows = StreamingDataset(local=str(stage), batch_size=1, shuffle=False)
    with MDSWriter(out=str(to), columns=columns, hashes=["xxh64"]) as writer:
        for number, timestep in enumerate(timesteps):
            writer.write({**rows[number], "timestep": timestep})
    facts = json.loads((stage / "dataset.json").read_text())
    write_facts(to, "moments", {key: value for key, value in facts.items() if key not in FACTS_OF_FILES})
    return to


FACTS_OF_FILES = ("schema", "stage", "samples", "index_sha256", "keys_sha256", "keys_xxh64")
OWN = [(5 * n + 3 + n // 6) % 8 for n in range(20)]  # in no order that a sample's number gives


def test_a_stage_with_timesteps_of_its_own_is_seen_at_those_by_the_formulas_on_any_number_of_ranks(
    stages, tiny_flux, tmp_path, monkeypatch
):
    """MLPerf publishes its samples in the order in which its GPUs have encoded them, each with its time beside it."""
    stage = with_timesteps(stages["held_out"], tmp_path / "own", OWN)
    validator = validator_on(stage, tiny_flux, 20, 4)
    found, expected = validator.measure(), losses_by_the_formulas(tiny_flux, stage, OWN)
    assert found["val_loss"] == pytest.approx(expected.mean().item(), rel=2e-5)
    bins = [expected[[n for n in range(20) if OWN[n] == k]].mean().item() for k in range(8)]
    assert found["val_loss_bins"] == pytest.approx(bins, rel=2e-5)
    parts: dict[torch.dtype, list[torch.Tensor]] = {torch.float64: [], torch.int64: []}
    for rank in (0, 1):
        with monkeypatch.context() as patch:
            patch.setattr("composer.utils.dist.get_global_rank", lambda rank=rank: rank)
            patch.setattr("composer.utils.dist.get_world_size", lambda: 2)
            patch.setattr("composer.utils.dist.all_reduce", lambda part, **how: parts[part.dtype].append(part.clone()))
            patch.setattr("composer.utils.dist.all_gather_object", lambda value: [value])
            validator.measure()
    assert sum(parts[torch.float64]).mean().item() == found["val_loss"]
    assert sum(parts[torch.int64]).tolist() == OWN
    spread = validator_on(stage, tiny_flux, 20, 4, times="thousandths").measure()
    plain = validator_on(stages["held_out"], tiny_flux, 20, 4, times="thousandths").measure()
    assert spread["val_loss"] == plain["val_loss"]  # which has no use for them


def test_a_timestep_that_is_no_eighth_is_named(stages, tiny_flux, tmp_path):
    stage = with_timesteps(stages["held_out"], tmp_path / "own", [*OWN[:7], 8, *OWN[8:]])
    with pytest.raises(ValueError, match=r"^validation\.remote: sample 7 has the timestep 8\. Possible: 0 to 7\. Make"):
        validator_on(stage, tiny_flux, 20, 4).measure()


def test_two_ranks_measure_what_one_does_to_the_last_bit(validator_of, monkeypatch):
    """Each rank's part, added up as the all-reduce adds it."""
    validator, parts = validator_of(20, 4), []
    whole = validator.measure()
    for rank in (0, 1):
        with monkeypatch.context() as patch:
            patch.setattr("composer.utils.dist.get_global_rank", lambda rank=rank: rank)
            patch.setattr("composer.utils.dist.get_world_size", lambda: 2)
            patch.setattr("composer.utils.dist.all_reduce", lambda errors, **how: parts.append(errors.clone()))
            patch.setattr("composer.utils.dist.all_gather_object", lambda value: [value])
            validator.measure()
    assert ((parts[0] == 0) != (parts[1] == 0)).all()
    assert sum(parts).mean().item() == whole["val_loss"]


def test_a_target_is_decided_by_losses_that_are_all_measured_alike(stages, tmp_path):
    """Also by those of a run that is over, which an earlier start without a target may have measured in other ways."""
    words = words_of(stages, tmp_path, "a", "target.val_loss=0.5")
    config = load(benchmark.RunConfig, parse_command_line(words, {}), check=lambda config: [])
    own = config.validation.identity_of(read_stage(str(stages["held_out"])))
    line = {"schema": 1, "validation": True, "batch": 2, "images": 16, "seconds": 1.0, "val_loss": 0.4}
    line |= {"val_loss_bins": [], **own}
    later = {**line, "batch": 4, "images": 32}
    as_before = "Losses of one target have to be alike: use that, or another run_name."
    for lines, text in (
        ([line, later], None),
        (
            [{**line, "times": "thousandths"}, later],
            "validation.times: times eighths, but {} was validated with thousandths at 16 images.",
        ),
        (
            [{**line, "num_samples": 10}],
            "validation.num_samples: num_samples 20, but {} was validated with 10 at 16 images.",
        ),
    ):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        if text is None:
            assert measured(tmp_path / "a", config) == lines
            continue
        with pytest.raises(ConfigError) as refusal:
            measured(tmp_path / "a", config)
        assert refusal.value.problems == [f"{text.format(tmp_path / 'a')} {as_before}"]


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


@pytest.mark.slow
def test_a_run_stops_at_the_first_validation_that_meets_its_target_and_says_so(ran, stages, capsys):
    folder = ran / "aimed"
    lines, summary = validations(folder), json.loads((folder / "summary.json").read_text())
    # None before training: MLPerf's clock runs before data are read.
    assert [line["images"] for line in lines] == [16, 32]
    plain = {line["images"]: line["val_loss"] for line in validations(ran / "plain")}
    assert {line["images"]: line["val_loss"] for line in lines} == {images: plain[images] for images in (16, 32)}
    found = {key: summary[key] for key in ("target", "images_to_target", "val_loss", "batches", "stopped_early")}
    assert found == {
        "target": "reached",
        "images_to_target": 32,
        "val_loss": lines[1]["val_loss"],
        "batches": 4,
        "stopped_early": True,
    }
    # The clock: training alone, and with both validations.
    assert summary["seconds_to_target"] == pytest.approx(lines[1]["seconds"], rel=1e-5)
    validated = sum(line["val_sec"] for line in lines)
    assert summary["seconds_to_target_with_eval"] == pytest.approx(lines[1]["seconds"] + validated, rel=1e-5)

    capsys.readouterr()  # started again, it knows
    target = f"target.val_loss={lines[1]['val_loss']!r}"
    assert benchmark.main(words_of(stages, ran, "aimed", target, *LOGGED)) == 0
    said = capsys.readouterr()
    assert "has reached its target (reached with a validation loss of" in said.err
    assert "target=reached images_to_target=32" in said.out and f"val_loss={lines[1]['val_loss']:.6g}" in said.out
    assert len(validations(folder)) == 2


@pytest.mark.slow
def test_a_run_to_a_loss_that_is_evaluated_too_has_its_scores_in_its_result(stages, tmp_path):
    (tmp_path / "prompts.tsv").write_text("image_id\tid\tcaption\n1\t1\ta cat\n2\t2\ta dog\n")
    of_eval = ["eval.when=in_training", "eval.clip=random", f"eval.prompts={tmp_path / 'prompts.tsv'}"]
    of_eval += ["eval.steps=2", "eval.guidance=1.0", "eval.weights=training", "eval.every_images=16"]
    assert benchmark.main(words_of(stages, tmp_path, "a", "target.val_loss=0.1", "max_duration=2ba", *of_eval)) == 0
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    [line] = evaluations_of(tmp_path / "a")
    assert summary["target"] == "missed" and summary["clip"] == pytest.approx(line["clip"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("ruleset", FLUX.rulesets)
def test_the_checker_objects_to_the_log_of_a_tiny_run_for_its_loss_alone(ran, ruleset, tmp_path):
    """It asks for 0.586 in the open division too. With such a loss in its place the same log is accepted."""
    log = ran / "aimed" / "mlperf.log"
    text = "Failed checks for averaged_validation_loss : v['value'] <= 0.586 and v['value'] > 0.0"
    assert check(log, ruleset) == f"MLPerf's checker ({ruleset}) refuses its log: {text}"
    assert check(trained_well(log, tmp_path), ruleset) is None
    events = read_events(log)
    values = {event["key"]: event["value"] for event in events}
    assert values["submission_benchmark"] == "flux1" and values["submission_division"] == "open"
    assert (values["train_samples"], values["eval_samples"], values["evaluation_frequency"]) == (48, 20, 16)
    assert (values["opt_gradient_clip_norm"], values["gradient_accumulation_steps"], values["seed"]) == (1.0, 2, 7)
    rates = [event["value"] for event in events if event["key"] == "lr_abs"]  # of the second batch and the fourth
    assert rates == [pytest.approx(1e-3 * 2 / 4), 1e-3]
    losses = [(e["value"], e["metadata"]["samples_count"]) for e in events if e["key"] == "eval_accuracy"]
    assert losses == [(line["val_loss"], line["images"]) for line in validations(ran / "aimed")]
    assert events[-1]["key"] == "run_stop" and events[-1]["metadata"]["status"] == "success"
    assert check(damaged(trained_well(log, tmp_path), tmp_path, OPEN_LOSS), ruleset) is not None


@pytest.mark.slow
def test_the_report_names_the_loss_and_no_fid(ran, tmp_path, capsys):
    capsys.readouterr()
    assert report.main([str(ran / "aimed"), f"out={tmp_path / 'out'}"]) == 0
    said = capsys.readouterr().out
    assert "FID" not in said
    assert "run=aimed left out: MLPerf's checker (6.1.0) refuses its log: Failed checks for averaged" in said
    shutil.copytree(ran / "aimed", tmp_path / "well")
    trained_well(ran / "aimed/mlperf.log", tmp_path).rename(tmp_path / "well/mlperf.log")
    assert report.main([str(tmp_path / "well"), f"out={tmp_path / 'out'}"]) == 0
    assert "reference points: the open division has none" in capsys.readouterr().out
    assert (tmp_path / "out/Easel/results/tiny/flux1/result_0.txt").is_file()


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


def header(batch: int, seed: int, ruleset: str, **changes: object) -> dict[str, object]:
    point = FLUX.reference_point(batch) or FLUX.nearest(batch)[0]
    return {
        "seed": seed,
        "fixture": FIXTURE,
        "train_samples": FLUX.train_samples,
        "eval_samples": FLUX.eval_samples,
        "gradient_accumulation_steps": 1,
        "global_batch_size": batch,
        "evaluation_frequency": evaluation_frequency(FLUX.interval(batch), batch, ruleset),
        "opt_name": "adamw",
        "opt_adamw_beta_1": 0.9,
        "opt_adamw_beta_2": 0.95,
        "opt_adamw_epsilon": 1e-8,
        "opt_adamw_weight_decay": 0.1,
        "opt_base_learning_rate": point.lr,
        "opt_learning_rate_warmup_steps": point.warmup_batches,
        "opt_gradient_clip_norm": 1.0,
        **describe_computation(recipe(ROOT / "yamls/mlperf_flux_512.yaml")),
        **changes,
    }


def fixture(
    folder: Path,
    images: int,
    *,
    seed: int,
    ruleset: str = "6.1.0",
    loss: float = 0.585,
    batch: int = 512,
    **changes: object,
) -> Path:
    """A log that ends at so many images; the losses are made up."""
    every = FLUX.interval(batch)
    given = header(batch, seed, ruleset, **changes)
    drive = Drive(folder, closed(ruleset), given, benchmark=FLUX, every_images=every)
    points = [
        {"images": at, "val_loss": loss if at == images else 0.7, "eval_sec": 10.0}
        for at in range(every, images + 1, every)
    ]
    drive.start()
    for point in points:
        drive.train(point["images"])
        drive.evaluate(point)
    drive.log.fit_end(drive.state, None)
    drive.log.stop(points[-1], images)
    return folder / "mlperf.log"


@pytest.mark.parametrize("ruleset", FLUX.rulesets)
def test_the_checker_accepts_the_closed_constants_and_refuses_others(tmp_path, ruleset):
    log = fixture(tmp_path / "good", 8 * FLUX.every_images, seed=1, ruleset=ruleset)
    assert check(log, ruleset) is None
    assert OPEN_LOSS not in {event["key"] for event in read_events(log)}
    others = {"evaluation_frequency": 262_145, "opt_adamw_beta_2": 0.999, "opt_gradient_clip_norm": None}
    for key, value in others.items():
        bad = fixture(tmp_path / key, 2 * FLUX.every_images, seed=1, ruleset=ruleset, **{key: value})
        assert f"CHECK for '{key}' failed" in check(bad, ruleset)
    missed = fixture(tmp_path / "missed", 2 * FLUX.every_images, seed=1, ruleset=ruleset, loss=0.5861)
    assert "eval_accuracy" in check(missed, ruleset)
    assert check(damaged(log, tmp_path, "evaluation_frequency"), ruleset) is not None


@pytest.mark.parametrize("ruleset", FLUX.rulesets)
def test_ten_runs_at_a_batch_that_does_not_divide_the_interval_are_a_submission(tmp_path, ruleset):
    """2304 on 72 GPUs: each log before the compliance checker, all before that of reference points, which interpolates."""
    points = [FLUX.reference_point(batch, ruleset).mean_images for batch in (2048, 4096)]
    images = FLUX.interval(2304) * round((points[0] + (points[1] - points[0]) / 8) / FLUX.interval(2304))
    for seed in range(10):
        log = fixture(tmp_path / str(seed), images, seed=seed, ruleset=ruleset, batch=2304)
        assert check(log, ruleset) is None
        log.rename(tmp_path / f"result_{seed}.txt")
    passed, said, _ = reference_points(tmp_path, ruleset)
    assert passed, said


@pytest.mark.parametrize("ruleset", FLUX.rulesets)
def test_the_checker_of_reference_points_passes_ten_of_the_references_own_and_refuses_ten_that_are_too_fast(
    tmp_path, ruleset
):
    for name, images in (("own", FLUX.reference_point(512, ruleset).images[5:15]), ("fast", 10 * (4_194_304,))):
        (tmp_path / name).mkdir()
        for seed, count in enumerate(images):
            log = fixture(tmp_path / name / str(seed), count, seed=seed, ruleset=ruleset)
            log.rename(tmp_path / name / f"result_{seed}.txt")
    passed, said, _ = reference_points(tmp_path / "own", ruleset)
    assert passed and "RCP found" in said
    assert not reference_points(tmp_path / "fast", ruleset)[0]


def test_a_fixture_is_left_out_of_a_result_for_that(tmp_path):
    log = fixture(tmp_path / "r", 4 * FLUX.every_images, seed=1)
    section = {"enabled": True, "division": "closed", "ruleset": "6.1.0", "org": "Fixture", "platform": "no_machine"}
    given = {"global_batch_size": 512, "model": {"family": "flux"}, "mlperf": section, "target": {"val_loss": 0.586}}
    (tmp_path / "r/config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(given)))
    assert read_run(tmp_path / "r").problem() == f"a fixture: {FIXTURE}"
    log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if '"fixture"' not in line))
    assert read_run(tmp_path / "r").problem() is None
    given["target"] = {"val_loss": 0.5}
    (tmp_path / "r/config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(given)))
    text = "its log says success, but none of its evaluations meets target.val_loss=0.5"
    assert read_run(tmp_path / "r").problem() == text


def test_a_report_asks_for_no_scores_of_a_run_to_a_loss(tmp_path):
    """Neither are networks of scores of any matter, nor does eval.py make what is missing."""
    log = fixture(tmp_path / "r", 4 * FLUX.every_images, seed=1)
    lines = [line for line in log.read_text().splitlines(keepends=True) if '"fixture"' not in line]
    given = {"global_batch_size": 512, "model": {"family": "flux"}, "target": {"val_loss": 0.586}}
    given |= {"eval": {"clip": "random"}, "mlperf": {"ruleset": "6.1.0", "division": "closed"}}
    (tmp_path / "r/config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(given)))
    log.write_text("".join(lines))
    assert read_run(tmp_path / "r").problem() is None and read_run(tmp_path / "r").foreign_scores == []
    begun = next(number for number, line in enumerate(lines, 1) if '"run_start"' in line)
    log.write_text("".join(lines[:begun]))
    assert read_run(tmp_path / "r").problem() == "its log has no evaluation: the run has come to none yet"


# --- what is refused ---


def refused(words: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as refusal:
        load(benchmark.RunConfig, parse_command_line(words, {}), check=lambda run: quick_problems(run, []))
    return refusal.value.problems


def test_a_log_without_validation_or_target_is_refused(stages, tmp_path):
    words = words_of(stages, tmp_path, "x", *LOGGED)
    text = "no target.val_loss, so no run could succeed. The benchmark's: 0.586."
    assert refused(words) == [f"mlperf.enabled: true, but {text}"]
    none = ["validation.remote=null", "validation.every_images=null", "target.val_loss=0.586"]
    assert refused([*words, *none]) == [
        "target.val_loss: given, but nothing is validated. Give validation.remote, or leave it out.",
        "mlperf.enabled: true, but nothing is validated. Give the held-out stage: validation.remote=FOLDER.",
    ]
    lines = refused([*words_of(stages, tmp_path, "x"), "target.val_loss=1", "target.clip=0.1", "eval.when=after"])
    text = "given, but a score is a target too. A run ends at one kind of target: leave out the others."
    assert f"target.val_loss: {text}" in lines


def test_the_closed_division_refuses_other_numbers_of_samples(stages, tmp_path):
    words = words_of(stages, tmp_path, "x", *LOGGED, "mlperf.division=closed", "target.val_loss=0.586")
    config = load(benchmark.RunConfig, parse_command_line(words, {}), check=lambda run: [])
    assert [problem.text.partition("; ")[0] for problem in closed_data_problems(config)] == [
        f"mlperf.division: closed, but train_samples: 48 at {stages['train']}",
        f"mlperf.division: closed, but eval_samples: 20 at {stages['held_out']}",
    ]
