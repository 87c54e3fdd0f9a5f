"""The manifest, and `prepare.downloads`: lists of MLCommons' form, gated files, the hub's models and datasets, the list."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from fault_server import Web, web  # noqa: F401
from hub_server import TOKEN

from evaluation.fid import PUBLISHED_FILE, PUBLISHED_SHA1
from families import load_family
from prepare import coco, downloads
from prepare.downloads import MANIFEST, DownloadGroup, read_list, read_manifest
from weights.hub_names import WELL_KNOWN

GROUPS = read_manifest()
CONTENT = {f"{number:05d}.tar": random.Random(number).randbytes(300_000 + number) for number in range(12)}


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


# --- the manifest ---


def test_every_file_of_the_manifest_has_a_name_addresses_and_a_digest_or_null():
    files = {name: group.wanted() for name, group in GROUPS.items()}
    for file in sum(files.values(), []):
        assert file.problem() is None and file.urls[0].startswith("https://") and len(set(file.urls)) == len(file.urls)
    bare = {file.name for name in files if name != "laion" for file in files[name] if not file.digest}
    assert bare == {"open_clip_config.json"}
    assert not re.search(r"access_key|secret|password|token=|Signature", MANIFEST.read_text(), re.I)


def test_the_manifest_agrees_with_the_code_and_the_recipes():
    [inception] = GROUPS["inception"].wanted()
    assert (inception.name, inception.digest) == (PUBLISHED_FILE, f"sha1:{PUBLISHED_SHA1}")
    for group in GROUPS.values():
        if group.model:
            assert group.model == load_family(group.family, "full", group.variant).hub_name in WELL_KNOWN
    for file, key in zip(GROUPS["coco"].wanted(), ("annotations", "images"), strict=True):
        assert (file.name, file.digest) == (coco.ZIPS[key].name, coco.ZIPS[key].digest)
    for path in (ROOT / "yamls" / "prepare").glob("laion*.yaml"):
        config = yaml.safe_load(path.read_text())
        urls = [config["metadata"]["urls"].format(part=n) for n in range(config["metadata"]["num_parts"])]
        assert [file.urls for file in GROUPS["laion"].wanted()] == [(url,) for url in urls]


def test_the_groups_have_the_files_that_the_recipes_name():
    files = {f"{group.folder}/{file.name}" for group in GROUPS.values() for file in group.wanted()}
    configs = [yaml.safe_load(path.read_text()) for path in (ROOT / "yamls").glob("*.yaml")]
    values = [v for c in configs for v in (c.get("model", {}).get("weights"), *(c.get("eval") or {}).values())]
    named = {value for value in values if isinstance(value, str) and re.match(r"(checkpoints|datasets)/", value)}
    assert {Path(value).suffix for value in named} >= {".ckpt", ".pth", ".bin", ".tsv", ".npz"} and named <= files


ONE = "a: {about: x, folder: f, files: [{name: n, urls: ['http://x/n'], %s}]}"


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ("a: [", "Give a YAML file as downloads.yaml."),
        ("a: {about: x, folder: ../b, uri: u}", "a: has the folder '../b', which leads out of "),
        ("a: {about: x, groups: [b]}", "a: names no group: b."),
        (ONE % "digest: 'md5:1'", "n: its digest is md5:1."),
    ],
)
def test_a_manifest_with_a_mistake_is_refused(tmp_path, capsys, manifest, message):
    (tmp_path / "own.yaml").write_text(manifest)
    assert downloads.main(["list", f"manifest={tmp_path}/own.yaml"]) == 2
    text = capsys.readouterr().err
    assert f"manifest: {tmp_path}/own.yaml" in text and message in text and "Traceback" not in text


# --- lists of MLCommons' form ---


def test_a_list_is_read_as_its_own_downloader_reads_it():
    text = f"{md5(b'1')}  ./b/00001.tar\n\n{md5(b'0')} *00000.tar\n{md5(b'2')}  with space.tar\n"
    files = [(file.name, *file.urls, file.digest) for file in read_list("https://host/folder/\n", text, "X.md5")]
    assert files == [
        ("00000.tar", "https://host/folder/00000.tar", f"md5:{md5(b'0')}"),
        ("b/00001.tar", "https://host/folder/b/00001.tar", f"md5:{md5(b'1')}"),
        ("with space.tar", "https://host/folder/with%20space.tar", f"md5:{md5(b'2')}"),
    ]
    for text, message in (
        ("\n", "is no list"),
        (f"{md5(b'')}  ../../etc/passwd", "passwd: is no path inside a folder."),
    ):
        with pytest.raises(ValueError, match=message):
            read_list("https://host", text, "X.md5")


@pytest.fixture
def published(web: Web, tmp_path: Path, monkeypatch) -> Callable[..., int]:  # noqa: F811
    """A web with a list and a group of files, and the command on their manifest."""
    for name, content in CONTENT.items():
        web.put(f"set/{name}", content)
    web.put("metadata/tars.uri", web.url("set/").encode() + b"\n")
    web.put("metadata/tars.md5", "".join(f"{md5(c)}  {n}\n" for n, c in CONTENT.items()).encode())
    web.put("one.bin", CONTENT["00000.tar"])
    web.put("gated.bin", CONTENT["00001.tar"], token="secret")
    one = f"name: one.bin, urls: ['{web.url('one.bin')}'], bytes: 300_000, digest: 'md5:{md5(CONTENT['00000.tar'])}'"
    gated = f"name: gated.bin, urls: ['{web.url('gated.bin')}']"
    (tmp_path / "own.yaml").write_text(f"""
tars: {{about: tars, folder: data/tars, uri: {web.url("metadata/tars.uri")}, about_gb: 0.004}}
one: {{about: one, source: this test, folder: weights, files: [{{{one}}}]}}
gated: {{about: g, folder: weights, files: [{{{gated}}}], gated: https://host/terms, token: HF_TOKEN}}
all: {{about: all, groups: [one, gated, tars]}}
""")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("prepare.downloads.LISTS_COPY", web.url("nowhere"))
    return lambda *words: downloads.main([*words, f"to={tmp_path}/to", f"manifest={tmp_path}/own.yaml", "tries=1"])


def test_a_group_that_fails_stops_no_other_and_is_resumed(published, web, tmp_path, capsys, monkeypatch):  # noqa: F811
    to = tmp_path / "to"
    assert published("all") == 1
    printed = capsys.readouterr()
    assert f"one: 1 files are in {to}/weights" in printed.out and f"tars: 12 files are in {to}/data/tars" in printed.out
    for text in (
        f"gated: {to}/weights/gated.bin: {web.url('gated.bin')}: HTTP 403 (Forbidden)",
        "gated: Gated: accept its terms at https://host/terms, and set HF_TOKEN to a token of that account.",
        "Not complete: gated. Finished work is kept; the same command resumes from there.",
        "gated.bin: digest not published, the size alone is compared.",
    ):
        assert text in printed.err
    assert {path.name: path.read_bytes() for path in (to / "data/tars").glob("*.tar")} == CONTENT
    monkeypatch.setenv("HF_TOKEN", "secret")
    web.asked.clear()
    assert published("all") == 0 and (to / "weights/gated.bin").read_bytes() == CONTENT["00001.tar"]
    assert sorted(name for name, _ in web.asked) == ["gated.bin", "metadata/tars.md5", "metadata/tars.uri"]


def test_the_list_asks_nobody_and_shows_complete_missing_and_wrong_files(published, web, tmp_path, capsys):  # noqa: F811
    folder = tmp_path / "to" / "data" / "tars"

    def listed(*words: str, code: int = 0) -> str:
        web.asked.clear()
        capsys.readouterr()
        assert published("list", *words) == code and web.asked == []
        return capsys.readouterr().out

    text = listed()
    assert f"tars   {folder}: 0 of an unknown number of files, 0 wrong, about 0.004 GB; tars\n" in text
    assert f"one    {tmp_path}/to/weights: 0 of 1 files, 0 wrong; one\n" in text
    assert "all    stands for one, gated, tars; all\n" in text
    assert published("tars", "only=0000[0-4].tar") == 0
    text = listed("tars")
    assert f"tars  {folder}: 5 of 12 files, 0 wrong" in text
    assert text.count(": missing\n") == 7 and text.count(": there\n") == 5
    (folder / "00004.tar").write_bytes(CONTENT["00004.tar"][::-1])
    text = listed("tars", "verify=true", code=1)
    wrong, right = md5(CONTENT["00004.tar"][::-1]), md5(CONTENT["00004.tar"])
    assert "4 of 12 files, 1 wrong, " in text and f"  00004.tar: its md5 is {wrong}, {right} is wanted\n" in text


# --- the hub ---


def files_that_are_read(group: DownloadGroup) -> dict[str, bytes]:
    """Files with the names of those that a group's family reads."""
    names: set[str] = set()
    for _, need in downloads.model_needs(group).values():
        for folder, (stem, _) in need.networks:
            names |= {f"{folder}/config.json", f"{folder}/{stem}.safetensors"}
        names |= {*(f"{folder}/vocab.json" for folder in need.whole_folders), *need.optional_files}
    return {name: name.encode() for name in sorted(names)}  # equal files would be one in the cache


@pytest.mark.slow
def test_a_models_files_go_into_the_hubs_cache_and_a_gated_one_is_refused(hub, tmp_path, capsys, monkeypatch):
    group = GROUPS["zoo_flux"]
    hub.add(group.model, {"README.md": b"-", **files_that_are_read(group)})
    hub.models[group.model].is_gated = True
    assert downloads.main(["zoo_flux", f"to={tmp_path}"]) == 1
    text = f"Accept its terms at {hub.address}/{group.model}, and log in: hf auth login, or set HF_TOKEN, with"
    assert text in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert downloads.main(["zoo_flux", f"to={tmp_path}"]) == 0
    assert sorted(set(hub.sent)) == sorted(files_that_are_read(group))
    assert downloads.main(["list", "zoo_flux"]) == 0 and "all is in the hub's cache" in capsys.readouterr().out


def test_a_data_set_goes_into_its_folder_with_every_digest_compared(hub, tmp_path, capsys):
    group, to = GROUPS["zoo_films"], tmp_path / "to"
    folder = to / group.folder
    films = {"videos/1.bin": b"film one" * 999, "videos/2.bin": b"film two" * 999, "prompts.txt": b"one\ntwo\n"}
    hub.add(group.data_set, films, revision=group.revision)
    assert downloads.main(["list", "zoo_films", f"to={to}"]) == 0
    assert f"{folder}: not here" in capsys.readouterr().out and hub.asked == []
    hub.damaged["videos/2.bin"] = 1
    assert downloads.main(["zoo_films", f"to={to}"]) == 1
    printed = capsys.readouterr()
    text = f"{folder}/videos/2.bin did not have the digest that {hub.address[7:]} states. Removed: start again"
    assert text in printed.err
    assert downloads.main(["zoo_films", f"to={to}"]) == 0
    assert f"zoo_films: 3 files are in {folder}" in capsys.readouterr().out
    assert {name: (folder / name).read_bytes() for name in films} == films
