"""Files from a web with faults: each arrives whole, with its digest right and once only, or is not there and says why."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest
from fault_server import serving, web  # noqa: F401

from common.errors import Refused
from prepare import http_download
from prepare.http_download import FileToFetch, fetch_all

CONTENT = random.Random(27).randbytes(300_000)
OTHER = random.Random(28).randbytes(300_000)
NO_END = "is sent without a size, or compressed, and no digest says whether that is the file"
QUICK = dict(wait_sec=0.01, timeout_sec=20.0)


def digest(content: bytes = CONTENT, kind: str = "sha256") -> str:
    return f"{kind}:{hashlib.new(kind, content).hexdigest()}"


def one(url: str, name: str = "a.bin", content: bytes = CONTENT, **more) -> FileToFetch:
    return FileToFetch(name, (url,), **{"bytes": len(content), "digest": digest(content), **more})


def get(folder: Path, *files: FileToFetch, **more) -> dict[str, str]:
    return fetch_all(files, folder, **{**QUICK, **more})


def only(folder: Path, file: FileToFetch, **more) -> str | None:
    """Fetch one file, and return why it is not there."""
    failed = get(folder, file, **more)
    there = (folder / file.name).exists()
    assert there == (not failed) and not (there and (folder / ".work").exists())
    return failed.get(file.name)


# --- what arrives ---


def test_several_files_arrive_whole_and_are_not_fetched_again(web, tmp_path):  # noqa: F811
    files, contents = [], [b"", *(CONTENT[number:] for number in range(1, 9))]
    for number, content in enumerate(contents):
        web.put(f"{number}.bin", content)
        files.append(one(web.url(f"{number}.bin"), f"of/{number % 3}/{number}.bin", content))
    assert get(tmp_path, *files) == {}
    assert [(tmp_path / file.name).read_bytes() for file in files] == contents
    assert sorted(path.name for path in tmp_path.iterdir()) == ["of"]
    num = len(web.asked)
    assert get(tmp_path, *files) == {} and len(web.asked) == num


@pytest.mark.parametrize("kind", ["sha256", "md5"])
def test_each_kind_of_digest_is_compared_and_after_a_wrong_one_the_next_mirror_is_asked(web, tmp_path, kind):  # noqa: F811
    web.put("a.tar.gz", CONTENT, heads={"Content-Encoding": "gzip"})  # as some servers send a .gz: it is not unpacked
    web.put("wrong", OTHER)
    url, urls = web.url("a.tar.gz"), (web.url("wrong"), web.url("a.tar.gz"))
    assert only(tmp_path, FileToFetch("a.bin", urls, len(CONTENT), digest(kind=kind))) is None
    assert (tmp_path / "a.bin").read_bytes() == CONTENT and len(web.ranges("wrong")) == 1
    assert not (tmp_path / ".work").exists()
    wrong, right = digest(OTHER, kind).partition(":")[2], digest(kind=kind).partition(":")[2]
    text = only(tmp_path, one(url, "b.bin", digest=digest(OTHER, kind)))
    assert text == f"{url}: its {kind} is {right}, {wrong} is wanted"


# --- going on ---


def test_cut_answers_are_continued_and_tries_that_add_bytes_do_not_count(web, tmp_path):  # noqa: F811
    web.put("a.bin", CONTENT, cut_after=[30_000] * 9)
    assert only(tmp_path, one(web.url("a.bin")), tries=2) is None
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert web.ranges("a.bin") == [None, *(f"bytes={30_000 * n}-" for n in range(1, 10))]
    assert {heads["accept-encoding"] for _, heads in web.asked} == {"identity"}


@pytest.mark.parametrize("fault", [{"ranges": False}, {"shift": 1}])
def test_a_server_that_ignores_ranges_or_sends_another_sends_the_file_from_the_start(web, tmp_path, fault):  # noqa: F811
    web.put("a.bin", CONTENT, cut_after=[200_000, 100_000][: 1 + ("ranges" in fault)], **fault)
    assert only(tmp_path, one(web.url("a.bin"))) is None
    assert (tmp_path / "a.bin").read_bytes() == CONTENT and len(web.asked) == 3


def test_a_part_that_is_longer_than_the_file_is_fetched_again(web, tmp_path):  # noqa: F811
    bare = dict(bytes=None, digest=None)
    web.put("a.bin", CONTENT, etag='"same"', cut_after=[200_000, 0])
    assert only(tmp_path, one(web.url("a.bin"), **bare), tries=1) is not None
    web.put("a.bin", CONTENT[:100], etag='"same"')  # answers 416
    assert only(tmp_path, one(web.url("a.bin"), **bare)) is None and (tmp_path / "a.bin").read_bytes() == CONTENT[:100]


def test_a_mirror_continues_where_the_first_one_ended_if_a_digest_shows_that_it_is_the_same(web, tmp_path):  # noqa: F811
    web.put("second", CONTENT, etag='"another"')
    for name, known, ranges in (("a.bin", (len(CONTENT), digest()), ["bytes=100000-"]), ("b.bin", (), [None])):
        web.put("first", CONTENT, cut_after=[100_000, 0, 0, 0])
        web.asked.clear()
        assert only(tmp_path, FileToFetch(name, (web.url("first"), web.url("second")), *known), tries=2) is None
        assert web.ranges("second") == ranges


# --- what does not arrive ---


@pytest.mark.parametrize(
    ("content", "faults", "more", "message"),
    [
        (b"", {"endless": True}, {}, "does not end after 300,000 bytes"),
        (b"", {"endless": True}, {"bytes": None, "digest": None}, NO_END),
        (CONTENT + b"-", {}, {}, "has 300,001 bytes, 300,000 are wanted"),
        (CONTENT[1:], {"chunked": True}, {}, "has 299,999 bytes, 300,000 are wanted"),
        (b"<html><p>Log in", {"kind": "text/html"}, {"bytes": None, "digest": None}, "is a web page, as for a login "),
    ],
    ids=range(5),
)
def test_a_body_that_is_not_the_file_is_refused(web, tmp_path, content, faults, more, message):  # noqa: F811
    web.put("a.bin", content, **faults)
    url = web.url("a.bin")
    assert only(tmp_path, one(url, **more), tries=3, most_bytes=1_000_000).startswith(f"{url}: {message}")
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    ("status", "tries", "message"), [(404, 1, "HTTP 404 (Not Found)"), (429, 3, "HTTP 429"), (503, 3, "HTTP 503")]
)
def test_an_answer_without_the_file_is_reported_and_tried_again_where_that_helps(web, tmp_path, status, tries, message):  # noqa: F811
    web.put("a.bin", CONTENT, statuses=[status] * 9)
    assert message in only(tmp_path, one(web.url("a.bin")), tries=3)
    assert len(web.asked) == tries
    web.put("a.bin", CONTENT, statuses=[status] * (tries - 1))
    assert only(tmp_path, one(web.url("a.bin")), tries=3) is None


def test_dead_and_silent_servers_are_given_up(tmp_path):
    with serving() as closed:
        url = closed.url("a.bin")
    assert only(tmp_path, one(url), tries=2).startswith(f"{url}: failed after ")
    with serving() as web:  # noqa: F811
        web.put("a.bin", CONTENT, statuses=[0, 0, 0])  # closes without an answer
        assert "failed after " in only(tmp_path, one(web.url("a.bin")), tries=3)
        web.put("a.bin", CONTENT, pause_sec=1.0)
        text = only(tmp_path, one(web.url("a.bin")), tries=1, timeout_sec=0.2)
        assert text.startswith(f"{web.url('a.bin')}: failed after 1 tries (ReadTimeout: ")


def test_a_disk_without_room_is_reported_before_anything_is_fetched(web, tmp_path, monkeypatch):  # noqa: F811
    free = http_download.shutil.disk_usage(tmp_path)._replace(free=2**28)
    monkeypatch.setattr(http_download.shutil, "disk_usage", lambda path: free)
    message = f"^to: {tmp_path}: about 1 GiB are to come, 0.25 GiB are free. Make room there, or give another "
    with pytest.raises(Refused, match=message):
        get(tmp_path, one(web.url("a.bin"), bytes=2**30))
    assert web.asked == []


def test_a_token_goes_to_its_own_host_alone(web, tmp_path, monkeypatch):  # noqa: F811
    """More of redirects and ~/.netrc: test_hostile_servers.py."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    web.put("own", CONTENT, token="secret")
    web.put("there", CONTENT)
    mirrored = FileToFetch("c", (web.url("none"), web.url("there", "localhost")), len(CONTENT), digest(), "HF_TOKEN")
    for file in (one(web.url("own"), token="HF_TOKEN"), mirrored):
        assert only(tmp_path / "to", file) is None
    assert [heads.get("authorization") for _, heads in web.asked] == ["Bearer secret"] * 2 + [None]
    text = only(tmp_path / "to", one(web.url("own") + "?sig=hunter2", "e"))
    assert text == f"{web.url('own')}: HTTP 403 (Forbidden)"


# --- the folder ---


@pytest.mark.parametrize("name", ["../a", "/a", "a/../../b", "", "a\\b", ".work/a"])
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="is no path inside a folder"):
        get(tmp_path / "to", FileToFetch(name, ("http://127.0.0.1:9/a",)))
    assert list(tmp_path.iterdir()) == []
