"""export.py: plain diffusers loads what it writes and draws the run's images; what it refuses; what it leaves behind."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, started, tree
from exported_runs import CASES, OF_RUNS, drawn_elsewhere, drawn_here, python_blocks
from hub_server import TOKEN, Hub
from safetensors.torch import load_file

import benchmark
import eval as scoring
import export
from checkpointing.files import FULL, WEIGHTS, list_checkpoints
from common.files import atomic_folder
from evaluation import sources
from families import load_family, pipeline_files
from families.encoders import ModelConfig
from training import initial_weights
from weights import published
from weights.hub import upload
from weights.tensors import fingerprint

pytestmark = pytest.mark.timeout(120, func_only=True)

SHAPES = CASES["shapes"]
SHORT = ("max_duration=2ba", "save.every_images=1000", "measure.warmup_batches=1", "measure.window_batches=1")
CAPTIONS = ("", "a large RED triangle, at the top!", "wow!! don't -- 50% 'quoted' !?", "long " * 60, "Å naïve café")


def train(runs: Path, name: str, *words: str) -> Path:
    """Leave a run of four batches with two snapshots of EMA weights, and two full checkpoints."""
    assert benchmark.main([*OF_RUNS, "eval.steps=3", f"run_folder={runs}", f"run_name={name}", *words]) == 0
    return runs / name


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The miniature's family after four batches; its record has a grid's caption."""
    folder = train(tmp_path_factory.mktemp("runs"), "shapes", *SHAPES)
    (folder / "samples").mkdir()
    (folder / "samples/captions.txt").write_text("a large red triangle on a white background\nanother\n")
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
@pytest.mark.parametrize("names", [["shapes", "sd2_mlperf"], pytest.param(list(CASES), marks=pytest.mark.long)])
def test_plain_diffusers_draws_the_runs_images_in_a_process_without_our_code(run, tmp_path, names):
    others = {name: CASES[name] for name in names if name != "shapes"}
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
    assert code == (ROOT / "families/mixed_norms.py").read_text()
    if len(names) < len(CASES):
        return
    zero = json.loads((outs["sd2_zero_snr"] / "scheduler/scheduler_config.json").read_text())
    expected = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing", "prediction_type": "v_prediction"}
    assert expected.items() <= zero.items()
    # mlperf begins with its own export, and with no other.
    own, of_videos = ModelConfig(preset="tiny", variant="mlperf", denoiser=str(outs["sd2_mlperf"])), outs["wan_t2v"]
    assert initial_weights.problems(own, None) == []
    other = ModelConfig(preset="tiny", variant="mlperf", denoiser=str(outs["sd2_stock"]))
    assert any("it is of another" in problem.text for problem in initial_weights.problems(other, "v"))
    source = sources.find_source(str(of_videos), ModelConfig(), with_encoders=True)
    assert sources.model_keys_of_export(source)["num_frames"] == 5


@pytest.mark.parametrize(("name", "variant"), [("shapes", "stock"), ("sd2", "stock"), ("sd2", "sd15")])
def test_the_tokenizers_files_give_the_familys_tokens(name, variant, tmp_path):
    import transformers

    family = load_family(name, "tiny", variant)
    [(folder, kind)] = family.save_tokenizers(tmp_path).items()
    tokenizer = getattr(transformers, kind).from_pretrained(tmp_path / folder)
    ours = family.tokenize(CAPTIONS)["tokens"]
    theirs = tokenizer(list(CAPTIONS), padding="max_length", truncation=True, return_tensors="pt").input_ids
    if variant == "sd15":  # `tokenize` pads with 0, `encode_text` puts the end token there
        ours = torch.where((ours == 49407).cumsum(dim=1) > 0, 49407, ours)
    assert torch.equal(ours, theirs)


# --- an LDM file ---


@pytest.mark.slow
def test_an_ldm_file_is_read_back_by_ours_and_by_diffusers_as_it_was(run, folder, tmp_path):
    from diffusers import AutoencoderKL, UNet2DConditionModel

    file = str(exported(run, tmp_path / "model.safetensors"))
    facts, family = json.loads((folder / "export.json").read_text()), load_family("shapes", "tiny", "stock")
    modules = {"denoiser": family.build_denoiser(), **family.build_encoders()}
    networks = {label: (module, family.network_names()[label](module)) for label, module in modules.items()}
    assert published.find_problems(file, networks) == [] == published.load_networks(file, networks)
    for kind, label, part in ((UNet2DConditionModel, "denoiser", "unet"), (AutoencoderKL, "vae", "vae")):
        ways = dict(config=str(folder), subfolder=part, local_files_only=True)
        modules[f"their {label}"] = kind.from_single_file(file, **ways)
    for label, module in modules.items():
        assert fingerprint(module) == facts[f"{label.removeprefix('their ')}_fingerprint"]


def test_weights_stored_in_half_precision_are_rounded_and_nothing_else(run, folder, tmp_path):
    half = exported(run, tmp_path / "half", "dtype=bf16")
    stored = [load_file(out / "unet/diffusion_pytorch_model.safetensors") for out in (folder, half)]
    assert all(torch.equal(stored[0][name].bfloat16(), tensor) for name, tensor in stored[1].items())
    assert ", torch_dtype=torch.bfloat16)" in (half / "README.md").read_text()
    text = r"^dtype: fp16, but unet.x has values beyond 65,504. Set dtype=bf16, or fp32\.$"
    with pytest.raises(ValueError, match=text):
        pipeline_files.cast_for_storage("unet.x", torch.tensor([1e5]), "fp16")


# --- back again ---


@pytest.mark.long
def test_a_run_begins_with_an_export_and_an_evaluation_scores_it_as_the_run(miniature, tmp_path, capsys):
    snapshot = "save.snapshot_every_images=16"
    assert benchmark.main(miniature.small(tmp_path, "a", snapshot, "max_duration=2ba", "optimizer.lr=1e-2")) == 0
    assert scoring.main([str(tmp_path / "a")]) == 0
    out = exported(tmp_path / "a", tmp_path / "out")
    [of_run] = [json.loads(line) for line in (tmp_path / "a/eval.jsonl").read_text().splitlines()]
    scores = f"{of_run['guidance']:g} | 3 | `dpm++` | 32 | {of_run['fid']:.6g} | {of_run['clip']:.6g} |"
    assert f"| 16 | `ema` | {scores}" in (out / "README.md").read_text()

    words = [word for word in miniature.small(tmp_path, "b") if word.startswith(("eval.", "model.preset"))]
    words = [word for word in words if not word.startswith(("eval.when", "eval.samples"))]
    words += ["model.family=shapes", "eval.sampler=dpm++", "eval.guidance=2", f"out={tmp_path}/scored"]
    assert scoring.main([str(out), *words]) == 0, capsys.readouterr().err
    [row] = [json.loads(line) for line in (tmp_path / "scored/eval.jsonl").read_text().splitlines()]
    assert row["denoiser_fingerprint"] == json.loads((out / "export.json").read_text())["denoiser_fingerprint"]
    assert row["eval_image_size"] == [32, 32]
    assert [row[key] for key in ("fid", "clip")] == pytest.approx([of_run[key] for key in ("fid", "clip")], rel=1e-6)

    begun = [f"model.denoiser={out}", f"model.weights={out}"]
    assert benchmark.main(miniature.small(tmp_path, "c", *begun, "max_duration=2ba")) == 0, capsys.readouterr().err
    assert f"model.denoiser: begins with {out}" in capsys.readouterr().err
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in "ac"]
    assert summaries[1]["denoiser_start_fingerprint"] == row["denoiser_fingerprint"]
    assert summaries[0]["vae_fingerprint"] == summaries[1]["vae_fingerprint"]


# --- which weights ---


def test_the_newest_snapshot_one_by_name_and_a_full_checkpoint_are_taken(run, change, folder, capsys):
    weights, full = (list_checkpoints(run / "checkpoints", kind) for kind in (WEIGHTS, FULL))
    assert json.loads((folder / "export.json").read_text())["snapshot"] == weights[0].name
    assert export.find_checkpoint(run, "last") == weights[0] and export.find_checkpoint(run, "im16") == weights[1]
    assert export.find_checkpoint(run, "ba2") == full[1]
    assert export.find_run(str(weights[1])) == (run, weights[1])
    assert export.find_run(str(run)) == export.find_run(str(run / "checkpoints")) == (run, None)
    (change / "checkpoints" / weights[0].name).unlink()
    assert export.find_checkpoint(change, "last").name == full[0].name  # newer than the snapshot that is left
    with pytest.raises(ValueError) as caught:
        export.find_checkpoint(change, "im7")
    assert str(caught.value) == f"snapshot: {change} has no 'im7'. It has: last, im16, ba4, ba2."


# --- what cannot be ---


def test_sources_that_are_no_run_are_refused(run, change, tmp_path, capsys):
    lost = Path(shutil.copy(list_checkpoints(run / "checkpoints", WEIGHTS)[0], tmp_path))
    shutil.rmtree(change / "checkpoints")
    out = tmp_path / "out"
    for words, text in (
        ([tmp_path, out], f"{tmp_path} is not a run: {tmp_path} has no config.yaml. Give a run (runs/NAME), or"),
        ([lost, out], f"{lost} is not in a run's folder: {tmp_path.parent} has no "),
        ([run], f"export.py: {run}. Give a run and a folder or file: python export.py runs/NAME OUT."),
        ([change, out], f"{change} has no snapshot or checkpoint to export. "),
    ):
        assert refused(capsys, *words).startswith(text)
    assert not out.exists()


def test_missing_weights_and_encoders_are_named(change, tmp_path, capsys):
    [*_, newest] = sorted((change / "checkpoints").glob("weights-*"))
    config = (change / "config.yaml").read_text()
    shipped = "weights: shipped"

    def refused_with(old: str, new: str) -> str:
        (change / "config.yaml").write_text(config.replace(old, new))
        return refused(capsys, change, tmp_path / "out")

    text = refused_with(shipped, "weights: gone/encoders")
    assert text.startswith("model.weights: gone/encoders") and "\n" not in text
    moved = exported(change, tmp_path / "moved", f"model.weights={ROOT}/families/shapes_weights")
    digest = json.loads((moved / "export.json").read_text())["vae_fingerprint"]
    text = refused_with(shipped, "weights: random")
    assert text.startswith("model.weights: its vae has the fingerprint ")
    assert f"{newest} was trained with {digest}" in text
    assert refused_with("family: shapes", "family: sd4").startswith("model.family: unknown family 'sd4'. Known: flux, ")
    newest.write_bytes(newest.read_bytes()[:-1] + b"-")
    assert refused_with("", "").startswith(f"{newest} is damaged: its bytes do not have the digest")
    assert not (tmp_path / "out").exists()


# --- where it goes ---


def test_an_earlier_export_of_the_run_is_replaced_and_nothing_else(run, folder, change, tmp_path, capsys):
    out = Path(shutil.copytree(folder, tmp_path / "out"))
    exported(run, out, "weights=training")
    before, after = tree(folder), tree(out)
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"export.json", "README.md", "unet/diffusion_pytorch_model.safetensors"}
    assert not list(tmp_path.glob(".*"))
    file = exported(run, tmp_path / "one.safetensors")
    starts = (change / "starts.jsonl").read_text()
    (change / "starts.jsonl").write_text(re.sub(r'"run_id": "\w+"', '"run_id": "another"', starts))
    (out / "notes.txt").touch()
    for source, target, text in (
        (change, folder, " exists and is an export of another run, shapes. Give another name, or remove it."),
        (change, file, " exists and is an export of another run, shapes."),
        (run, run, " exists and is no export."),
        (run, out, " exists and has files that no export has: notes.txt."),
        (run, tmp_path / "a.ckpt", ": no .ckpt file is written."),
    ):
        assert refused(capsys, source, target).startswith(f"{target}{text}")
    assert tree(out) == {**after, "notes.txt": b""}


KILLED = """
import sys, time
from pathlib import Path
from common.files import atomic_folder
with atomic_folder(Path(sys.argv[1])) as folder:
    (folder / "a").touch(); print("there", flush=True); time.sleep(60)
"""


def test_a_killed_export_leaves_no_half_folder_and_the_next_one_cleans_up(tmp_path):
    place = tmp_path / "out [1].x"
    with started(sys.executable, "-c", KILLED, str(place), output=subprocess.PIPE) as process:
        assert process.stdout.readline() == "there\n"
        process.kill()
        process.wait(30)
    [left] = tmp_path.iterdir()
    assert not place.exists() and left.name.startswith(".out [1].x.")
    with atomic_folder(place) as folder:
        (folder / "b").touch()
    assert tree(tmp_path) == {"out [1].x/b": b""}


# --- the card ---

HOSTILE = '</code><script>alert(1)</script> `|` \x1b[31m\n---\n```\n\'""" \\ 🐱 ' + "x" * 10_000


def test_third_party_texts_are_escaped_in_the_card(change, tmp_path):
    import ast

    (change / "samples/captions.txt").write_text(HOSTILE.replace("\n", " "))
    config = yaml.safe_load((change / "config.yaml").read_text())
    config["data"]["remote"] = "s3://user:secret@host/" + HOSTILE[:120].replace("\n", " ").replace("\x1b", "")
    (change / "config.yaml").write_text(yaml.safe_dump(config))
    card = (exported(change, tmp_path / "out") / "README.md").read_text()
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head)["license"] == "other" and yaml.safe_load(head)["pipeline_tag"] == "text-to-image"
    outside = re.sub(r"`[^`\n]*`", "", re.sub(r"```python\n.*?```\n", "", body, flags=re.S))
    assert "<" not in outside and "`" not in outside and "\x1b" not in card and "secret" not in card
    first, second = python_blocks(card)
    calls = [node for node in ast.walk(ast.parse(first)) if isinstance(node, ast.Call) and node.keywords]
    assert calls[-1].args[0].value == HOSTILE.replace("\n", " ")[:200]
    assert compile(second, "card", "exec")


# --- the hub ---


def test_an_export_is_uploaded_to_the_hub_and_read_back(hub: Hub, run, tmp_path, monkeypatch, capsys):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    out, name, push = tmp_path / "out", hub.address.removeprefix("http://"), "push_to_hub=easel/tiny"
    text = f"push_to_hub: easel/tiny, but no token is set for {name}. To write, log in: hf auth login, or set HF_TOKEN."
    assert refused(capsys, run, out, push) == text
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert refused(capsys, run, out, "push_to_hub=tiny").startswith("push_to_hub: 'tiny' is not a model's name.")
    assert not out.exists() and hub.asked == []

    exported(run, out, push)
    assert f"hub={hub.address}/easel/tiny" in capsys.readouterr().out
    model = hub.models["easel/tiny"]
    assert list(model.commits.values()) == [tree(out)] and model.private
    assert "from_pretrained('easel/tiny')" in (out / "README.md").read_text()
    source = sources.find_source("easel/tiny", ModelConfig(), with_encoders=True)  # of eval.py: it knows its network
    expected = {"model.family": "shapes", "model.preset": "tiny", "model.variant": "stock"}
    assert sources.model_keys_of_export(source) == expected

    (out / "README.md").write_text("another\n")  # the model is replaced, and stays private
    upload(out, "easel/tiny", private=False, message="again")
    assert model.commits[model.refs["main"]] == tree(out) and model.private
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ValueError, match=f"^push_to_hub: easel/tiny: {name} did not take it .HTTP 401.. "):
        upload(out, "easel/tiny", private=True, message="again")
