"""export.py: plain diffusers loads what it writes and draws the run's images; what it refuses; what it leaves behind."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, cost_made_up, started, tree
from exported import CASES, OF_RUNS, drawn_elsewhere, drawn_here
from hub_server import TOKEN, Hub
from PIL import Image
from torch import nn

import benchmark
import eval as scoring
import export
from cli.files import whole_folder
from model import build_model
from record.checkpoint_files import FULL, WEIGHTS, listed
from reports.model_card import blocks_of
from training import places, warm_start
from weights import ldm
from weights.hub import upload
from weights.tensors import fingerprint
from zoo import load_family, pipeline_folder
from zoo.model_config import ModelConfig
from zoo.objectives import ObjectiveConfig

pytestmark = pytest.mark.timeout(120, func_only=True)

SHAPES = CASES["shapes"]
SHORT = ("max_duration=2ba", "save.every_images=1000", "measure.warmup_batches=1", "measure.window_batches=1")
CAPTIONS = (
    "",
    "a large RED triangle, at the top!",
    "wow!! (so) don't -- 50% 'quoted' !?",
    "very long " * 60,
    "Å naïve café",
)


def train(runs: Path, name: str, *words: str) -> Path:
    """Leave a run of four batches with two snapshots of EMA weights, and two full checkpoints."""
    with cost_made_up():
        assert benchmark.main([*OF_RUNS, "eval.steps=3", f"run_folder={runs}", f"run_name={name}", *words]) == 0
    return runs / name


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The miniature's family after four batches; its record has a grid's caption."""
    folder = train(tmp_path_factory.mktemp("runs"), "shapes", *SHAPES)
    (folder / "samples").mkdir()
    (folder / "samples/captions.txt").write_text(
        "a large red triangle at the top left on a white background\nanother\n"
    )
    return folder


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory) -> Path:
    """Its export, only read."""
    return exported(run, tmp_path_factory.mktemp("exports") / "folder")


@pytest.fixture
def change(run, tmp_path) -> Iterator[Path]:
    """A copy of the run, to be broken."""
    shutil.copytree(run, tmp_path / "copy/shapes")
    return tmp_path / "copy/shapes"


def exported(run: Path, out: Path, *words: object) -> Path:
    assert export.main([str(run), str(out), *map(str, words)]) == 0
    return out


def refused(capsys, *words: object, code: int = 2) -> str:
    capsys.readouterr()
    assert export.main(list(map(str, words))) == code
    return capsys.readouterr().err.rstrip("\n")


# --- plain diffusers draws the run's images ---


@pytest.mark.slow
@pytest.mark.timeout(360, func_only=True)
def test_plain_diffusers_draws_the_runs_images_in_a_process_without_our_code(run, tmp_path):
    others = {name: words for name, words in CASES.items() if name != "shapes"}
    runs = {"shapes": run} | {name: train(tmp_path / "runs", name, *words, *SHORT) for name, words in others.items()}
    outs = {name: exported(one, tmp_path / name) for name, one in runs.items()}
    images = drawn_elsewhere(outs, tmp_path, num_prompts=2)
    for name, image in images.items():
        ours = drawn_here(runs[name], num_prompts=2)
        assert ours.std() > 0.05 and float((ours[0] - ours[1]).abs().max()) > 0.05, name
        assert image.shape == ours.shape and float((ours - image).abs().max()) < 1e-4, name
    # mlperf's norms have no stock class: its card runs the file beside the weights, and nobody else's does.
    trusts = {name for name, out in outs.items() if "trust_remote_code" in (out / "README.md").read_text()}
    assert trusts == {"sd2_mlperf"} == {name for name, out in outs.items() if list(out.rglob("*.py"))}
    code = (outs["sd2_mlperf"] / "unet/mixed_norms.py").read_text()
    assert code == (ROOT / "zoo/mixed_norms.py").read_text()

    zero = json.loads((outs["sd2_zero_snr"] / "scheduler/scheduler_config.json").read_text())
    assert zero["rescale_betas_zero_snr"] and zero["timestep_spacing"] == "trailing"
    assert zero["prediction_type"] == "v_prediction"
    # And back: an export is a place of eval.py, which knows its network and size; its first image is that of the run.
    for name in ("shapes", "sd2_mlperf", "sdxl", "flux_dev"):
        out, facts = outs[name], json.loads((outs[name] / "export.json").read_text())
        ways = [f"eval.{key}={facts[key]}" for key in ("sampler", "steps", "guidance")]
        words = [str(out), f"images={tmp_path}/look/{name}", f"prompts=[{export.caption_of(runs[name])}]", *ways]
        assert scoring.main(words) == 0, name
        [path] = (tmp_path / "look" / name).glob("0*.png")
        drawn = torch.from_numpy(np.asarray(Image.open(path)) / 255.0).permute(2, 0, 1)
        assert drawn.shape == images[name][1].shape and float((drawn - images[name][1]).abs().max()) < 1.5 / 255, name
    # mlperf begins with its own export, and with no other.
    own, stock = (ModelConfig(preset="tiny", variant=name) for name in ("mlperf", "stock"))
    model = build_model(own, ObjectiveConfig(), size=(64, 64), normalize="unit", seed=0)
    warm_start.load(model, str(outs["sd2_mlperf"]))
    facts = json.loads((outs["sd2_mlperf"] / "export.json").read_text())
    assert fingerprint(model.denoiser) == facts["denoiser_fingerprint"]

    def misfits(config: ModelConfig, name: str) -> str:
        config = dataclasses.replace(config, denoiser=str(outs[name]))
        return "\n".join(problem.text for problem in warm_start.problems(config, "v" if config is own else "epsilon"))

    name = "UNet2DConditionMixedNorms"
    assert f"has _class_name UNet2DConditionModel, this model's has {name}: it is of another" in misfits(
        own, "sd2_stock"
    )
    assert "has norm_num_groups 4, this model's has 8: it is of another model." in misfits(stock, "sd2_mlperf")
    assert warm_start.problems(dataclasses.replace(own, denoiser=str(outs["sd2_mlperf"])), None) == []


def test_the_scheduler_is_the_evaluations_and_other_samplers_can_be_made_of_it(folder):
    from diffusers import DDIMScheduler

    stated = json.loads((folder / "scheduler/scheduler_config.json").read_text())
    wanted = {
        "_class_name": "DPMSolverMultistepScheduler",
        "algorithm_type": "dpmsolver++",
        "prediction_type": "v_prediction",
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "steps_offset": 1,
        "clip_sample": False,
        "set_alpha_to_one": False,
    }
    assert wanted.items() <= stated.items()
    ddim = DDIMScheduler.from_pretrained(folder, subfolder="scheduler").config
    assert not ddim.clip_sample and not ddim.set_alpha_to_one and ddim.prediction_type == "v_prediction"


@pytest.mark.parametrize(
    ("name", "variant"), [("shapes", "stock"), ("sd2", "stock"), ("sd2", "sd15")], ids=lambda value: value
)
def test_the_tokenizers_files_give_the_familys_tokens(name, variant, tmp_path):
    import transformers

    family = load_family(name, "tiny", variant)
    [(folder, kind)] = family.save_tokenizers(tmp_path).items()
    tokenizer = getattr(transformers, kind).from_pretrained(tmp_path / folder)
    ours = family.tokenize(CAPTIONS)["tokens"]
    theirs = tokenizer(list(CAPTIONS), padding="max_length", truncation=True, return_tensors="pt").input_ids
    if variant == "sd15":  # `tokenize` pads with 0, `encode_text` puts the end token there
        ended = (ours == 49407).cumsum(dim=1) > 0
        ours = torch.where(ended, 49407, ours)
    assert torch.equal(ours, theirs)


# --- an LDM file ---


def test_an_ldm_file_is_read_back_by_ours_and_by_diffusers_as_it_was(run, folder, tmp_path):
    from diffusers import AutoencoderKL, UNet2DConditionModel

    file = exported(run, tmp_path / "model.safetensors")
    facts = json.loads((folder / "export.json").read_text())
    family = load_family("shapes", "tiny", "stock")
    modules = {"denoiser": family.build_denoiser(), **family.build_encoders()}
    networks = {label: (module, family.published()[label](module)) for label, module in modules.items()}
    assert ldm.problems(str(file), networks) == [] == ldm.load(str(file), networks)
    for label, module in modules.items():
        assert fingerprint(module) == facts[f"{label}_fingerprint"]
    for kind, label, place in ((UNet2DConditionModel, "denoiser", "unet"), (AutoencoderKL, "vae", "vae")):
        theirs = kind.from_single_file(str(file), config=str(folder), subfolder=place, local_files_only=True)
        assert fingerprint(theirs) == facts[f"{label}_fingerprint"]


def test_weights_stored_in_half_are_rounded_and_nothing_else(run, folder, tmp_path):
    from safetensors.torch import load_file

    half = exported(run, tmp_path / "half", "dtype=bf16")
    stored = [load_file(out / "unet/diffusion_pytorch_model.safetensors") for out in (folder, half)]
    assert all(torch.equal(stored[0][name].bfloat16(), tensor) for name, tensor in stored[1].items())
    card = (half / "README.md").read_text()
    assert ", torch_dtype=torch.bfloat16)" in card and "- Its weights are rounded to bf16" in card
    with pytest.raises(
        ValueError, match=r"^dtype: fp16, but unet.x has values beyond 65,504. Say dtype=bf16, or fp32\.$"
    ):
        pipeline_folder.in_type("unet.x", torch.tensor([1e5]), "fp16")


# --- back again ---


@pytest.mark.slow
def test_a_run_begins_with_an_export_and_an_evaluation_scores_it_as_the_run(miniature, tmp_path, capsys):
    trained = ["save.snapshot_every_images=16", "max_duration=2ba", "optimizer.lr=1e-2"]
    assert benchmark.main(miniature.small(tmp_path, "a", *trained)) == 0
    assert scoring.main([str(tmp_path / "a")]) == 0
    out = exported(tmp_path / "a", tmp_path / "out")
    [of_run] = [json.loads(line) for line in (tmp_path / "a/eval.jsonl").read_text().splitlines()]
    card = (out / "README.md").read_text()
    assert (
        f"| 16 | `ema` | {of_run['guidance']:g} | 3 | `dpm++` | 32 | {of_run['fid']:.6g} | {of_run['clip']:.6g} |"
        in card
    )

    words = [word for word in miniature.small(tmp_path, "b") if word.startswith(("eval.", "model.preset"))]
    words = [word for word in words if not word.startswith(("eval.when", "eval.samples"))]
    words += ["model.family=shapes", "eval.sampler=dpm++", "eval.guidance=2", f"out={tmp_path}/scored"]
    assert scoring.main([str(out), *words]) == 0, capsys.readouterr().err
    [row] = [json.loads(line) for line in (tmp_path / "scored/eval.jsonl").read_text().splitlines()]
    assert row["denoiser_fingerprint"] == json.loads((out / "export.json").read_text())["denoiser_fingerprint"]
    assert row["eval_image_size"] == [32, 32] and row["fid"] == pytest.approx(of_run["fid"], rel=1e-6)
    assert row["clip"] == pytest.approx(of_run["clip"], rel=1e-6)

    begun = miniature.small(tmp_path, "c", f"model.denoiser={out}", f"model.weights={out}", "max_duration=2ba")
    assert benchmark.main(begun) == 0, capsys.readouterr().err
    assert f"model.denoiser: begins with {out}" in capsys.readouterr().err
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in "ac"]
    assert summaries[1]["denoiser_start_fingerprint"] == row["denoiser_fingerprint"]
    assert summaries[0]["vae_fingerprint"] == summaries[1]["vae_fingerprint"]


# --- which weights ---


def test_the_newest_snapshot_one_by_name_and_a_full_checkpoint_are_taken(run, change, folder, capsys):
    weights, full = (listed(run / "checkpoints", kind) for kind in (WEIGHTS, FULL))
    assert json.loads((folder / "export.json").read_text())["snapshot"] == weights[0].name
    assert export.chosen(run, "last") == weights[0] and export.chosen(run, "im16") == weights[1]
    assert export.chosen(run, "ba2") == full[1]
    assert export.run_of(str(weights[1])) == (run, weights[1])
    assert refused(capsys, weights[1], "out", "snapshot=ba2") == (
        f"snapshot: ba2, but {weights[1]} is one. Give the run's folder, or leave it out."
    )
    assert export.run_of(str(run)) == export.run_of(str(run / "checkpoints")) == (run, None)
    (change / "checkpoints" / weights[0].name).unlink()
    assert export.chosen(change, "last").name == full[0].name  # newer than the snapshot that is left
    with pytest.raises(ValueError) as caught:
        export.chosen(change, "im7")
    assert str(caught.value) == f"snapshot: {change} has no 'im7'. It has: last, im16, ba4, ba2."


# --- what cannot be ---


def test_what_is_no_run_is_refused(run, change, tmp_path, capsys):
    ways = "Give a run (runs/NAME), or a checkpoint in its folder (runs/NAME/checkpoints/weights-im...pt)."
    assert refused(capsys, tmp_path, tmp_path / "out") == f"{tmp_path} is no run: {tmp_path} has no config.yaml. {ways}"
    lost = Path(shutil.copy(listed(run / "checkpoints", WEIGHTS)[0], tmp_path))
    assert refused(capsys, lost, tmp_path / "out").startswith(
        f"{lost} is in no run's folder: {tmp_path.parent} has no "
    )
    assert refused(capsys, run) == f"export.py: {run}. Give a run and a place: python export.py runs/NAME OUT."
    shutil.rmtree(change / "checkpoints")
    assert refused(capsys, change, tmp_path / "out") == (
        f"{change} has no snapshot or checkpoint to export. Train it with save.every_images or save.snapshot_every_images."
    )
    assert not (tmp_path / "out").exists()


def test_weights_and_encoders_that_are_not_there_are_named(change, tmp_path, capsys):
    [*_, newest] = sorted((change / "checkpoints").glob("weights-*"))
    config = (change / "config.yaml").read_text()
    (change / "config.yaml").write_text(config.replace("weights: shipped", "weights: gone/encoders"))
    text = refused(capsys, change, tmp_path / "out")
    assert text.startswith("model.weights: gone/encoders") and "\n" not in text
    assert export.main([str(change), str(tmp_path / "moved"), f"model.weights={ROOT}/zoo/shapes_weights"]) == 0
    digest = json.loads((tmp_path / "moved/export.json").read_text())["vae_fingerprint"]
    (change / "config.yaml").write_text(config.replace("weights: shipped", "weights: random"))
    text = refused(capsys, change, tmp_path / "out")
    assert (
        text.startswith("model.weights: its vae has the fingerprint ") and f"{newest} was trained with {digest}" in text
    )
    (change / "config.yaml").write_text(config.replace("family: shapes", "family: sd3"))
    assert (
        refused(capsys, change, tmp_path / "out")
        == "model.family: unknown family 'sd3'. Known: flux, hunyuan_video, mochi, sd2, sdxl, shapes, wan."
    )
    newest.write_bytes(newest.read_bytes()[:-1] + b"-")
    (change / "config.yaml").write_text(config)
    assert refused(capsys, change, tmp_path / "out").startswith(
        f"{newest} is damaged: its bytes do not have the digest"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_without_ema_has_training_weights_alone(tmp_path, capsys):
    run = train(tmp_path, "plain", *SHAPES, *SHORT, "ema.enabled=false", "ema.decay=null")
    assert json.loads((exported(run, tmp_path / "a") / "export.json").read_text())["weights"] == "training"
    newest = listed(run / "checkpoints", WEIGHTS)[0]
    assert refused(capsys, run, tmp_path / "b", "weights=ema") == (
        f"weights: ema, but {newest} has no EMA weights. Say weights=training."
    )


def test_a_network_of_no_known_class_is_named():
    class Other(nn.Linear):
        pass

    family = load_family("shapes", "tiny", "stock")
    with pytest.raises(ValueError) as caught:
        pipeline_folder.networks_of(family, Other(1, 1), family.build_encoders())
    assert str(caught.value) == (
        "denoiser: a Other of shapes is no class of diffusers or transformers, and no loader for it is written here. "
        "Give a run of another variant."
    )


# --- where it goes ---


def test_an_earlier_export_of_the_run_is_replaced_and_nothing_else(run, folder, change, tmp_path, capsys):
    out = Path(shutil.copytree(folder, tmp_path / "out"))
    exported(run, out, "weights=training")
    before, after = tree(folder), tree(out)
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"export.json", "README.md", "unet/diffusion_pytorch_model.safetensors"}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []

    way = "Give another name, or remove it."
    starts = (change / "starts.jsonl").read_text()
    (change / "starts.jsonl").write_text(re.sub(r'"run_id": "\w+"', '"run_id": "another"', starts))
    assert refused(capsys, change, out) == f"{out} exists and is an export of another run, shapes. {way}"
    (out / "notes.txt").touch()
    assert refused(capsys, run, out) == f"{out} exists and has files that no export has: notes.txt. {way}"
    assert tree(out) == {**after, "notes.txt": b""}
    for place in (run, ROOT / "docs"):
        assert refused(capsys, run, place) == f"{place} exists and is no export. {way}"
    (tmp_path / "plain").touch()
    assert refused(capsys, run, tmp_path / "plain") == f"{tmp_path}/plain exists and is no export. {way}"
    (tmp_path / "empty").mkdir()
    assert export.taken(tmp_path / "empty", run) is None
    assert refused(capsys, run, tmp_path / "a.ckpt") == (
        f"{tmp_path}/a.ckpt: no .ckpt file is written. Give FILE.safetensors, or a folder."
    )

    file = exported(run, tmp_path / "one.safetensors")
    assert export.taken(file, run) is None
    assert export.taken(file, change) == f"{file} exists and is an export of another run, shapes. {way}"
    assert file.stat().st_mode & 0o777 == 0o666 & ~_umask()
    file.write_bytes(b"")
    assert export.taken(file, run) == f"{file} exists and is no export. {way}"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_of_a_full_disk_nothing_is_left(run, tmp_path, capsys, name):
    """A limit on a file's size stands for the disk: writing fails in the middle."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
        text = refused(capsys, run, tmp_path / name, code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot be written: " in text and text.endswith(
        ". Nothing of a new export is left. Make room, or give another place."
    )
    assert "Traceback" not in text and list(tmp_path.iterdir()) == []


KILLED = "import sys; from pathlib import Path; from cli.files import whole_folder\n"
KILLED += "with whole_folder(Path(sys.argv[1])) as folder:\n"
KILLED += "    (folder / 'a').touch(); print('there', flush=True); __import__('time').sleep(60)"


def test_a_killed_export_leaves_no_half_folder_and_the_next_one_clears_up(tmp_path):
    place = tmp_path / "out [1].x"
    with started(sys.executable, "-c", KILLED, str(place), output=subprocess.PIPE) as process:
        assert process.stdout.readline() == "there\n"
        process.kill()
        process.wait(30)
    [left] = tmp_path.iterdir()
    assert not place.exists() and left.name.startswith(".out [1].x.")
    with whole_folder(place) as folder:
        (folder / "b").touch()
    assert tree(tmp_path) == {"out [1].x/b": b""}
    with pytest.raises(ZeroDivisionError), whole_folder(place):
        1 / 0  # noqa: B018
    assert tree(tmp_path) == {"out [1].x/b": b""}
    place.rename(tmp_path / f".out [1].x.before.{process.pid}.tmp")  # as if killed while it took an earlier one's place
    with pytest.raises(ZeroDivisionError), whole_folder(place):
        1 / 0  # noqa: B018
    assert tree(tmp_path) == {"out [1].x/b": b""}


@pytest.mark.slow
def test_an_interrupt_in_the_imports_is_told_in_a_line(tmp_path):
    words = [sys.executable, "export.py", "runs/none", str(tmp_path / "out")]
    with subprocess.Popen(
        words, cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:  # cold, so that it has imports
        while "libtorch_cpu" not in Path(f"/proc/{process.pid}/maps").read_text():
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGINT
    assert said == "export.py: interrupted. Nothing of a new export is left. The same command begins anew.\n"


# --- the card ---

HOSTILE = '</code><script>alert(1)</script> `|` \x1b[31m\n---\n```\n\'""" \\ 🐱 ' + "x" * 10_000


def test_what_others_have_written_is_escaped_in_the_card(run, change, tmp_path):
    import ast

    (change / "samples/captions.txt").write_text(HOSTILE.replace("\n", " "))
    config = (change / "config.yaml").read_text()
    tree_of = yaml.safe_load(config)
    tree_of["data"]["remote"] = "s3://user:secret@host/" + HOSTILE[:120].replace("\n", " ").replace("\x1b", "")
    (change / "config.yaml").write_text(yaml.safe_dump(tree_of))
    out = exported(change, tmp_path / "out")
    card = (out / "README.md").read_text()
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head)["license"] == "other" and yaml.safe_load(head)["pipeline_tag"] == "text-to-image"
    outside = re.sub(r"`[^`\n]*`", "", re.sub(r"```python\n.*?```\n", "", body, flags=re.S))
    assert "<" not in outside and "`" not in outside and "\x1b" not in card and "secret" not in card
    first, second = blocks_of(card)
    calls = [node for node in ast.walk(ast.parse(first)) if isinstance(node, ast.Call) and node.keywords]
    assert calls[-1].args[0].value == HOSTILE.replace("\n", " ")[:200]
    assert compile(second, "card", "exec")


# --- the hub ---


def test_an_export_is_brought_to_the_hub_and_comes_back(hub: Hub, run, tmp_path, monkeypatch, capsys):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    out, name = tmp_path / "out", hub.address.removeprefix("http://")
    log_in = "To write, log in: hf auth login, or set HF_TOKEN."
    words = [run, out, "push_to_hub=easel/tiny"]
    assert refused(capsys, *words) == f"push_to_hub: easel/tiny, but no token is set for {name}. {log_in}"
    assert refused(capsys, *words[:2], "push_to_hub=tiny") == (
        "push_to_hub: 'tiny' is not a model's name. Possible: OWNER/NAME."
    )
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert refused(capsys, run, f"{out}.safetensors", words[2]) == (
        f"push_to_hub: easel/tiny, but {out}.safetensors is a single file. Give a folder: its model card goes with it."
    )
    assert refused(capsys, *words[:2], "private=false") == (
        "private: false, but nothing is brought to the hub. Give push_to_hub=OWNER/NAME, or leave it out."
    )
    assert not out.exists() and hub.asked == []

    exported(*words)
    assert f"hub={hub.address}/easel/tiny" in capsys.readouterr().out
    model = hub.models["easel/tiny"]
    assert list(model.commits.values()) == [tree(out)] and model.private
    assert "from_pretrained('easel/tiny')" in (out / "README.md").read_text()
    moved = exported(run, tmp_path / "again", "model.weights=easel/tiny")
    commit = model.refs["main"]
    place = places.find("easel/tiny", ModelConfig(), encoders=True)  # as a place of eval.py it knows its network
    assert places.of_export(place) == {"model.family": "shapes", "model.preset": "tiny", "model.variant": "stock"}
    assert json.loads((moved / "export.json").read_text())["encoders"] == f"easel/tiny@{commit}"

    (out / "README.md").write_text("another\n")  # what is there is replaced, and stays private
    upload(out, "easel/tiny", private=False, message="again")
    assert model.commits[model.refs["main"]] == tree(out) and model.private
    for token, status, way in (
        ("hf_wrong", 200, log_in),
        (TOKEN, 503, f"{out} is whole: the same command uploads it again."),
    ):
        monkeypatch.setenv("HF_TOKEN", token)
        hub.status = status
        with pytest.raises(ValueError) as caught:
            upload(out, "easel/tiny", private=True, message="again")
        said = f"push_to_hub: easel/tiny: {name} did not take it (HTTP {401 if status == 200 else status})"
        assert str(caught.value) == f"{said}. {way}"
