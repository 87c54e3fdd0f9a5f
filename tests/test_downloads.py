"""The manifest, and `prepare.downloads`: lists of MLCommons' form, gated files, the hub's models and data sets, the list."""

from __future__ import annotations

import contextlib
import hashlib
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from fault_server import Web, web  # noqa: F401
from hub_server import TOKEN

from cli.errors import ConfigError
from evaluation.inception import PUBLISHED_FILE, PUBLISHED_SHA1
from prepare import coco, downloads
from prepare.downloads import MANIFEST, Group, choose, list_urls, read_list, read_manifest
from prepare.transfer import DIGITS
from weights.hub_names import WELL_KNOWN
from zoo import load_family

GROUPS = read_manifest()
CONTENT = {f"{number:05d}.tar": random.Random(number).randbytes(300_000 + number) for number in range(12)}


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


# --- the manifest ---


def test_every_file_of_the_manifest_has_a_name_addresses_and_a_digest_or_null():
    for name, group in GROUPS.items():
        files = group.wanted()
        assert (group.kind == "files") == bool(files) and [one.problem() for one in files] == [None] * len(files)
        assert group.kind == "groups" or group.model or group.source, name
        hosts = {url.split("/")[2] for one in files for url in one.urls}
        assert all(url.startswith("https://") for one in files for url in one.urls[:1])
        assert not any("@" in host for host in hosts) and all(len(set(one.urls)) == len(one.urls) for one in files)
    known = {one.digest.partition(":")[0] for group in GROUPS.values() for one in group.wanted() if one.digest}
    assert known <= set(DIGITS) and len(GROUPS["laion"].wanted()) == 32
    bare = {one.name for name, group in GROUPS.items() if name != "laion" for one in group.wanted() if not one.digest}
    assert bare == {"open_clip_config.json"}


def test_the_manifest_agrees_with_what_the_code_says_of_the_same_files():
    [inception] = GROUPS["inception"].wanted()
    assert (inception.name, inception.digest) == (PUBLISHED_FILE, f"sha1:{PUBLISHED_SHA1}")
    assert PUBLISHED_FILE.removesuffix(".pth").rpartition("-")[2] == "6726825d"
    for group in GROUPS.values():
        if group.model:
            family = load_family(group.family, "full", group.variant)
            assert group.model == family.on_hub and group.model in WELL_KNOWN
    amd = {GROUPS[name].model or GROUPS[name].data_set for name in GROUPS["zoo"].groups}
    assert {"bghira/pseudo-camera-10k", "Wild-Heart/Disney-VideoGeneration-Dataset"} < amd and len(amd) == 7


def test_the_groups_have_the_files_that_the_recipes_name():
    there = {f"{group.folder}/{one.name}" for group in GROUPS.values() for one in group.wanted()}
    named = set()
    for path in (ROOT / "yamls").glob("*.yaml"):
        config = yaml.safe_load(path.read_text())
        values = [config.get("model", {}).get("weights"), *(config.get("eval") or {}).values()]
        named |= {value for value in values if isinstance(value, str) and re.match(r"(checkpoints|datasets)/", value)}
    assert {Path(value).suffix for value in named} >= {".ckpt", ".pth", ".bin", ".tsv", ".npz"}
    assert named <= there
    assert [name for name in sorted(there) if name in named] == sorted(named & there)


def test_the_files_of_coco_and_laion_are_those_of_their_own_commands():
    [annotations, images] = GROUPS["coco"].wanted()
    for own, key in ((annotations, "annotations"), (images, "images")):
        assert (own.name, own.digest) == (coco.ZIPS[key].name, coco.ZIPS[key].digest)
        assert set(coco.ZIPS[key].urls) <= set(own.urls)
    assert Path(GROUPS["coco"].folder).name == coco.DOWNLOADS
    for path in (ROOT / "yamls" / "prepare").glob("laion*.yaml"):
        config = yaml.safe_load(path.read_text())
        urls = [config["metadata"]["urls"].format(part=n) for n in range(config["metadata"]["num_parts"])]
        assert [one.urls for one in GROUPS["laion"].wanted()] == [(url,) for url in urls]
    first = yaml.safe_load((ROOT / "yamls" / "prepare" / "laion.yaml").read_text())
    assert GROUPS["laion"].folder == f"{first['folder']}/metadata"


def test_the_recipes_of_the_benchmark_say_what_fetches_their_data():
    said = {}
    for path in sorted((ROOT / "yamls").glob("mlperf_*.yaml")):
        [said[path.name]] = re.findall(r"^# Data: python -m prepare\.downloads (\w+);", path.read_text(), re.M)
    assert said == {name: "flux" if "flux" in name else "mlperf" for name in said} and len(said) == 10
    assert set(said.values()) <= set(GROUPS)


def test_the_page_names_each_group_and_the_manifest_has_no_key():
    page = (ROOT / "docs" / "data-and-stores.md").read_text()
    section = page.split("\n## Downloads\n")[1].split("\n## ")[0]
    assert [name for name in GROUPS if f"`{name}`" not in section] == []
    text = MANIFEST.read_text()
    assert not re.search(r"access_key|secret|password|token=|Signature", text, re.I)
    digests = {(one.digest or "").partition(":")[2] for group in GROUPS.values() for one in group.wanted()}
    commits = set(re.findall(r"/resolve/([0-9a-f]{40})/", text))
    assert set(re.findall(r"\b[0-9a-f]{32,}\b", text)) <= digests | commits


def test_a_name_stands_for_groups_each_once_and_a_wrong_one_is_told_with_the_nearest():
    assert choose(["flux", "flux_coco", "sd2"], GROUPS) == ["flux_empty", "flux_coco", "flux_cc12m", "sd2"]
    with pytest.raises(ConfigError) as error:
        choose(["moment"], GROUPS)
    assert str(error.value) == f"GROUP: there is no moment. Nearest: moments. Possible: {', '.join(GROUPS)}."


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("[1, 2]", "Give a YAML file as downloads.yaml."),
        ("a: [", "Give a YAML file as downloads.yaml."),
        ("a: 3", "a: "),
        ("a: {about: x}", "a: has nothing. Give one of files, uri, model, data_set, groups, and a relative folder."),
        ("a: {about: x, folder: ../b, uri: u}", "a: has uri. Give one of files, "),
        ("a: {about: x, groups: [b]}", "a: names no group: b."),
        ("a: {about: x, folder: f, files: [{name: n, urls: ['http://x/n'], digest: 'md5:1'}]}", "a: n: its digest is md5:1."),
        ("a: {about: x, folder: f, files: [{name: ../n, urls: ['http://x/n']}]}", "a: ../n: is no path inside a folder."),
        ("a: {about: x, folder: f, files: [{name: n, urls: ['http://x/n'], bytes: many}]}", "a: Value 'many' of type 'str'"),
        ("a: {about: x, folder: f, files: [{name: n, links: ['http://x/n']}]}", "a: Key 'links' not in 'Entry'"),
    ],
)  # fmt: skip
def test_a_manifest_with_a_fault_is_refused(tmp_path, capsys, given, said):
    (tmp_path / "own.yaml").write_text(given)
    assert downloads.main(["list", f"manifest={tmp_path}/own.yaml"]) == 2
    assert (
        f"manifest: {tmp_path}/own.yaml" in (err := capsys.readouterr().err) and said in err and "Traceback" not in err
    )


# --- lists of MLCommons' form ---


def test_a_list_is_read_as_its_own_downloader_reads_it():
    text = f"{md5(b'1')}  ./b/00001.tar\n\n{md5(b'0')} *00000.tar\n{md5(b'2')}  with space.tar\n"
    files = read_list("https://host/folder/\n", text, "X.md5")
    assert [(one.name, one.urls, one.digest) for one in files] == [
        ("00000.tar", ("https://host/folder/00000.tar",), f"md5:{md5(b'0')}"),
        ("b/00001.tar", ("https://host/folder/b/00001.tar",), f"md5:{md5(b'1')}"),
        ("with space.tar", ("https://host/folder/with%20space.tar",), f"md5:{md5(b'2')}"),
    ]
    assert list_urls(GROUPS["moments"], ".md5")[0] == (
        "https://training.mlcommons-storage.org/metadata/stable-diffusion-laion-400m-filtered-moments-dataset.md5"
    )


@pytest.mark.parametrize(
    ("base", "text", "said"),
    [
        ("https://host", "<html>\n", "X.md5 is no list of MLCommons', but begins "),
        ("https://host", f"{md5(b'')}  ../../etc/passwd", "X.md5: ../../etc/passwd: is no path inside a folder."),
        ("https://host", f"{md5(b'')}  /etc/passwd", "X.md5: /etc/passwd: is no path inside a folder."),
        ("https://host", f"{md5(b'')}\n", "X.md5 is no list "),
        ("https://host", "\n", "X.md5 is no list "),
        ("<html> <p>", f"{md5(b'')}  a", "X.md5 is no list of MLCommons', but begins '<html> <p>"),
    ],
)  # fmt: skip
def test_a_list_that_is_none_is_refused(base, text, said):
    with pytest.raises(ValueError) as error:
        read_list(base, text, "X.md5")
    assert str(error.value).startswith(said)


@pytest.fixture
def published(web: Web, tmp_path: Path, monkeypatch) -> Callable[..., int]:  # noqa: F811
    """A web with a list and a group of files, and the command on their manifest."""
    for name, content in CONTENT.items():
        web.put(f"set/{name}", content)
    web.put("metadata/tars.uri", web.url("set/").encode() + b"\n")
    web.put("metadata/tars.md5", "".join(f"{md5(c)}  {n}\n" for n, c in CONTENT.items()).encode())
    web.put("one.bin", CONTENT["00000.tar"])
    web.put("gated.bin", CONTENT["00001.tar"], token="secret")
    one = {
        "name": "one.bin",
        "urls": [web.url("one.bin")],
        "bytes": 300_000,
        "digest": f"md5:{md5(CONTENT['00000.tar'])}",
    }
    gated = {"name": "gated.bin", "urls": [web.url("gated.bin")]}
    manifest = {
        "tars": {"about": "tars", "folder": "data/tars", "uri": web.url("metadata/tars.uri"), "about_gb": 0.004},
        "one": {"about": "one", "source": "this test", "folder": "weights", "files": [one]},
        "gated": {
            "about": "g",
            "folder": "weights",
            "files": [gated],
            "gated": "https://host/terms",
            "token": "HF_TOKEN",
        },
        "all": {"about": "all", "groups": ["one", "gated", "tars"]},
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(manifest, sort_keys=False))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("prepare.downloads.LISTS_COPY", web.url("nowhere"))

    def run(*words: str) -> int:
        return downloads.main([*words, f"to={tmp_path}/to", f"manifest={tmp_path}/own.yaml", "tries=1"])

    return run


def test_groups_are_fetched_one_fault_holds_up_no_other_and_the_same_command_ends_the_work(
    published,
    web,  # noqa: F811
    tmp_path,
    capsys,
    monkeypatch,
):
    to = tmp_path / "to"
    assert published("all") == 1
    said = capsys.readouterr()
    assert f"one: 1 files are in {to}/weights" in said.out and f"tars: 12 files are in {to}/data/tars" in said.out
    assert f"gated: {to}/weights/gated.bin: {web.url('gated.bin')}: HTTP 403 (Forbidden)" in said.err
    assert (
        "gated: Gated: accept its terms at https://host/terms, and set HF_TOKEN to a token of that account." in said.err
    )
    assert "Not complete: gated. What has come stays; the same command resumes from there." in said.err
    assert "gated.bin: digest not published, the size alone is compared." in said.err
    assert {path.name: path.read_bytes() for path in (to / "data/tars").glob("*.tar")} == CONTENT
    monkeypatch.setenv("HF_TOKEN", "secret")
    web.asked.clear()
    assert published("all") == 0 and (to / "weights/gated.bin").read_bytes() == CONTENT["00001.tar"]
    assert sorted(name for name, _ in web.asked) == ["gated.bin", "metadata/tars.md5", "metadata/tars.uri"]


def test_the_list_asks_nobody_and_says_what_is_there_missing_and_wrong(published, web, tmp_path, capsys):  # noqa: F811
    folder = tmp_path / "to" / "data" / "tars"
    assert published("list") == 0 and web.asked == []
    said = capsys.readouterr().out
    assert f"tars   {folder}: 0 of an unknown number of files, 0 wrong, about 0.004 GB; tars\n" in said
    assert f"one    {tmp_path}/to/weights: 0 of 1 files, 0 wrong; one\n" in said
    assert "all    stands for one, gated, tars; all\n" in said
    assert published("tars", "only=0000[0-4].tar") == 0
    web.asked.clear()
    assert published("list", "tars") == 0 and web.asked == []
    said = capsys.readouterr().out
    assert f"tars  {folder}: 5 of 12 files, 0 wrong" in said
    assert said.count(": missing\n") == 7 and said.count(": there\n") == 5
    (folder / "00004.tar").write_bytes(CONTENT["00004.tar"][::-1])
    assert published("list", "tars", "verify=true") == 1
    said = capsys.readouterr().out
    assert "4 of 12 files, 1 wrong, about 0.004 GB; tars\n" in said
    found, right = md5(CONTENT["00004.tar"][::-1]), md5(CONTENT["00004.tar"])
    assert f"  00004.tar: its md5 is {found}, {right} is wanted\n" in said
    assert published("list", "one", "gated") == 0
    said = capsys.readouterr().out
    assert "    one.bin: missing\n" in said and "    source: this test\n" in said
    assert "    Gated: accept its terms at https://host/terms, and set HF_TOKEN to a token of that account.\n" in said


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("metadata/tars.md5", None, "tars: its list is not available: {url}: HTTP 404 (Not Found)"),
        ("metadata/tars.md5", b"<!DOCTYPE html><p>Log in", "tars: its list is not available: {url}: is a web page"),
        ("metadata/tars.md5", b"\xff\xfe\x00", "tars: {url} is no list of MLCommons'"),
        ("metadata/tars.md5", b"{}", "tars: {url} is no list of MLCommons'"),
        ("metadata/tars.uri", b"s3://bucket", ".md5 is no list of MLCommons', but begins 's3://bucket "),
    ],
)
def test_a_list_that_cannot_be_had_is_told(published, web, capsys, name, content, said):  # noqa: F811
    if content is None:
        del web.files[name]
    else:
        web.put(name, content)
    assert published("tars") == 1
    err = capsys.readouterr().err
    assert said.format(url=web.url(name)) in err
    assert "Traceback" not in err and "Not complete: tars." in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sd3"], "GROUP: there is no sd3. Nearest: sd2. Possible: "),
        (["sd2", "verify=true"], "verify: is of list alone, since what is fetched is compared. Leave it out."),
        (["sd2", "to=/dev/null/x"], "to: /dev/null/x cannot be written: "),
        (["at_once=4"], "command line: a GROUP has to be given, or list. python -m prepare.downloads list shows them."),
        (["sd2", "at_once=0"], "command line: at_once is 0. Possible: 1 to 64."),
        (["list", "manifest=/none.yaml"], "manifest: /none.yaml: No such file or directory. Give a YAML "),
    ],
)  # fmt: skip
def test_a_command_line_with_a_fault_starts_nothing(capsys, words, said):
    assert downloads.main(words) == 2
    assert said in capsys.readouterr().err


def test_a_pattern_that_fits_no_file_is_told(published, capsys):
    assert published("one", "only=0*.tar") == 1
    assert "one: has no file like 0*.tar. Give another pattern" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(400, func_only=True)
def test_a_command_that_is_killed_at_random_places_ends_with_the_same_files(published, web, tmp_path):  # noqa: F811
    """Three times kill -9, once Ctrl-C: nothing half has a name, and what has come is not asked for again."""
    folder, chance = tmp_path / "to" / "data" / "tars", random.Random(27)
    for name in CONTENT:
        web.files[f"set/{name}"].pause_sec, web.files[f"set/{name}"].block = 0.05, 20_000
    words = ["tars", f"to={tmp_path}/to", f"manifest={tmp_path}/own.yaml", "at_once=3"]
    for number, sent in enumerate((signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGKILL)):
        before, enough = came(folder), chance.randrange(200_000, 800_000)
        with subprocess.Popen(
            [sys.executable, "-m", "prepare.downloads", *words], cwd=ROOT, text=True, stderr=subprocess.PIPE
        ) as process:
            while process.poll() is None and came(folder) < before + enough:
                time.sleep(0.01)
            process.send_signal(sent)
            _, said = process.communicate(timeout=120)
        assert process.returncode == (130 if sent == signal.SIGINT else -sent), (number, said)
        assert ("What is done stays; the same command continues from there." in said) == (sent == signal.SIGINT)
        assert {path.name: path.read_bytes() for path in folder.glob("*.tar")}.items() <= CONTENT.items()
    kept = came(folder)
    web.asked.clear()
    for name in CONTENT:
        web.files[f"set/{name}"].pause_sec = 0.0
    assert published("tars") == 0
    assert {path.name: path.read_bytes() for path in folder.glob("*.tar")} == CONTENT
    begun = [int(heads["range"][6:-1]) for _, heads in web.asked if "range" in heads]
    whole = {path.name: len(CONTENT[path.name]) for path in folder.glob("*.tar")}
    skipped = sum(size for name, size in whole.items() if f"set/{name}" not in [asked for asked, _ in web.asked])
    assert begun and sum(begun) + skipped == kept


def came(folder: Path) -> int:
    """Return how many bytes of the tars are there, in whole files and in parts."""
    sizes = []
    for path in (*folder.glob("*.tar"), *folder.glob(".work/*.part")):
        with contextlib.suppress(FileNotFoundError):  # it takes its name just now
            sizes.append(path.stat().st_size)
    return sum(sizes)


# --- the hub ---


def files_that_are_read(group: Group) -> dict[str, bytes]:
    """Files with the names of those that a group's family reads."""
    names: set[str] = set()
    for _, need in downloads.needs_of(group).values():
        for folder, (stem, _) in need.networks:
            names |= {f"{folder}/config.json", f"{folder}/{stem}.safetensors"}
        names |= {*(f"{folder}/vocab.json" for folder in need.whole), *need.more}
    return {name: name.encode() for name in sorted(names)}  # equal files would be one in the cache


@pytest.mark.slow
def test_a_model_goes_into_the_hubs_cache_by_the_files_that_its_family_reads(hub, tmp_path, capsys):
    group = GROUPS["zoo_sd2"]
    hub.add(group.model, {"README.md": b"-", "v2-full.ckpt": b"unused", **files_that_are_read(group)})
    assert downloads.main(["list"]) == 0
    assert f"{tmp_path}/cache/models--{group.model.replace('/', '--')}: not here; " in capsys.readouterr().out
    assert downloads.main(["list", "zoo_sd2"]) == 0
    assert "model.weights and model.denoiser: not all is in the hub's cache" in capsys.readouterr().out
    assert hub.asked == []
    assert downloads.main(["zoo_sd2", f"to={tmp_path}"]) == 0
    assert sorted(hub.sent) == sorted(files_that_are_read(group))
    asked = len(hub.asked)
    assert downloads.main(["list", "zoo_sd2"]) == 0
    assert "all is in the hub's cache" in capsys.readouterr().out
    assert downloads.main(["list"]) == 0
    assert ": begun or there; " in capsys.readouterr().out
    assert len(hub.asked) == asked


def test_a_gated_model_says_where_its_terms_are_and_where_a_token_goes(hub, tmp_path, capsys):
    group = GROUPS["zoo_flux"]
    hub.add(group.model, files_that_are_read(group))
    hub.models[group.model].is_gated = True
    assert downloads.main(["zoo_flux", f"to={tmp_path}"]) == 1
    said = f"Accept its terms at {hub.address}/{group.model}, and log in: hf auth login, or set HF_TOKEN, with"
    assert said in capsys.readouterr().err
    assert downloads.main(["list", "zoo_flux"]) == 0
    assert f"Gated: accept its terms at {group.gated}, and set HF_TOKEN" in capsys.readouterr().out


def test_a_data_set_goes_into_its_folder_with_every_digest_compared(hub, tmp_path, capsys, monkeypatch):
    group, to = GROUPS["zoo_films"], tmp_path / "to"
    folder = to / group.folder
    films = {"videos/1.bin": b"film one" * 999, "videos/2.bin": b"film two" * 999, "prompts.txt": b"one\ntwo\n"}
    hub.add(group.data_set, films, revision=group.revision)
    assert downloads.main(["list", "zoo_films", f"to={to}"]) == 0
    assert f"{folder}: not here" in capsys.readouterr().out and hub.asked == []
    hub.damaged["videos/2.bin"] = 1
    assert downloads.main(["zoo_films", f"to={to}"]) == 1
    said = capsys.readouterr()
    assert (
        f"{folder}/videos/2.bin did not have the digest that {hub.address[7:]} states. Removed: start again" in said.err
    )
    assert downloads.main(["zoo_films", f"to={to}"]) == 0
    assert f"zoo_films: 3 files are in {folder}" in capsys.readouterr().out
    assert {name: (folder / name).read_bytes() for name in films} == films
    hub.models[group.data_set].is_gated = True
    (folder / "prompts.txt").unlink()
    assert downloads.main(["zoo_films", f"to={to}"]) == 1
    assert f"accept its terms at {hub.address}/datasets/{group.data_set}" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert downloads.main(["zoo_films", f"to={to}"]) == 0
    assert (folder / "prompts.txt").read_bytes() == films["prompts.txt"]
