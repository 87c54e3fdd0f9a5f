"""Files from a web with faults: each arrives whole, with its digest right and once only, or is not there and says why."""

from __future__ import annotations

import contextlib
import hashlib
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest
from conftest import ROOT
from fault_server import serving, web  # noqa: F401

from cli.errors import Failed, Refused
from prepare import places, transfer
from prepare.transfer import Wanted, check_wanted, fetch_all

CONTENT = random.Random(27).randbytes(300_000)
OTHER = random.Random(28).randbytes(300_000)
NO_END = "is sent without a size, or compressed, and no digest says whether that is the file"
QUICK = dict(wait_sec=0.01, timeout_sec=20.0)


def digest(content: bytes = CONTENT, kind: str = "sha256") -> str:
    return f"{kind}:{hashlib.new(kind, content).hexdigest()}"


def one(url: str, name: str = "a.bin", content: bytes = CONTENT, **more) -> Wanted:
    return Wanted(name, (url,), **{"bytes": len(content), "digest": digest(content), **more})


def get(folder: Path, *files: Wanted, **more) -> dict[str, str]:
    return fetch_all(files, folder, **{**QUICK, **more})


def only(folder: Path, file: Wanted, **more) -> str | None:
    """Fetch one file, and return why it is not there."""
    failed = get(folder, file, **more)
    there = (folder / file.name).exists()
    assert there == (not failed) and not (there and (folder / ".work").exists())
    return failed.get(file.name)


# --- what arrives ---


def test_several_files_arrive_whole_and_are_not_fetched_again(web, tmp_path):  # noqa: F811
    files = []
    for number in range(9):
        content = CONTENT[number:]
        web.put(f"{number}.bin", content)
        files.append(one(web.url(f"{number}.bin"), f"of/{number % 3}/{number}.bin", content))
    assert get(tmp_path, *files) == {}
    assert all((tmp_path / f"of/{n % 3}/{n}.bin").read_bytes() == CONTENT[n:] for n in range(9))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["of"]
    asked = len(web.asked)
    assert get(tmp_path, *files) == {} and len(web.asked) == asked


@pytest.mark.parametrize("kind", ["sha256", "sha1", "sha512", "md5"])
def test_each_kind_of_digest_is_compared(web, tmp_path, kind):  # noqa: F811
    web.put("a.bin", CONTENT)
    url = web.url("a.bin")
    assert only(tmp_path, one(url, digest=digest(kind=kind))) is None
    wrong, right = digest(OTHER, kind).partition(":")[2], digest(kind=kind).partition(":")[2]
    assert (
        only(tmp_path, one(url, "b.bin", digest=digest(OTHER, kind)))
        == f"{url}: its {kind} is {right}, {wrong} is wanted"
    )


def test_an_empty_file_and_one_of_which_nothing_is_known_arrive(web, tmp_path):  # noqa: F811
    web.put("empty", b"")
    web.put("a.bin", CONTENT)
    assert only(tmp_path, one(web.url("empty"), "empty", b"")) is None
    assert only(tmp_path, Wanted("a.bin", (web.url("a.bin"),))) is None
    assert (tmp_path / "empty").read_bytes() == b"" and (tmp_path / "a.bin").read_bytes() == CONTENT


# --- going on ---


def test_cut_answers_are_continued_and_tries_that_bring_something_do_not_count(web, tmp_path):  # noqa: F811
    web.put("a.bin", CONTENT, cut_after=[30_000] * 9)
    assert only(tmp_path, one(web.url("a.bin")), tries=2) is None
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert web.ranges("a.bin") == [None, *(f"bytes={30_000 * n}-" for n in range(1, 10))]
    assert {heads["accept-encoding"] for _, heads in web.asked} == {"identity"}


@pytest.mark.parametrize("chunked", [True, False])
def test_without_etag_or_digest_a_range_is_asked_by_the_time_or_not_at_all(web, tmp_path, chunked):  # noqa: F811
    bare = dict(bytes=None, digest=None)
    time_of_it = "Tue, 24 Nov 2026 03:00:00 GMT"
    web.put("timed", CONTENT, etag='W/"weak"', modified=time_of_it, cut_after=[100_000], chunked=chunked)
    assert only(tmp_path, one(web.url("timed"), "timed", **bare)) is None
    assert [heads.get("if-range") for _, heads in web.asked] == [None, time_of_it]
    web.put("bare", CONTENT, etag=None, cut_after=[100_000], chunked=chunked)
    assert only(tmp_path, one(web.url("bare"), "bare", **bare)) is None and web.ranges("bare") == [None, None]
    assert {(tmp_path / name).read_bytes() for name in ("timed", "bare")} == {CONTENT}


def test_a_server_that_ignores_ranges_sends_it_from_the_beginning(web, tmp_path):  # noqa: F811
    web.put("a.bin", CONTENT, ranges=False, cut_after=[200_000, 100_000])
    assert only(tmp_path, one(web.url("a.bin"))) is None
    assert (tmp_path / "a.bin").read_bytes() == CONTENT and len(web.asked) == 3


def test_another_version_is_never_joined_to_the_first_one(web, tmp_path):  # noqa: F811
    web.put("a.bin", OTHER, cut_after=[100_000, 0])
    assert only(tmp_path, one(web.url("a.bin")), tries=1) is not None
    web.put("a.bin", CONTENT)
    assert only(tmp_path, one(web.url("a.bin"))) is None and (tmp_path / "a.bin").read_bytes() == CONTENT
    assert web.ranges("a.bin")[2:] == ["bytes=100000-", None]  # the digest tells, and it is fetched anew


def test_a_range_other_than_the_one_asked_for_is_not_taken(web, tmp_path):  # noqa: F811
    web.put("a.bin", CONTENT, cut_after=[100_000], shift=1)
    assert only(tmp_path, one(web.url("a.bin"))) is None and (tmp_path / "a.bin").read_bytes() == CONTENT
    assert web.ranges("a.bin") == [None, "bytes=100000-", None]


def test_what_has_come_is_longer_than_the_file_of_now(web, tmp_path):  # noqa: F811
    bare = dict(bytes=None, digest=None)
    web.put("a.bin", CONTENT, etag='"same"', cut_after=[200_000, 0])
    assert only(tmp_path, one(web.url("a.bin"), **bare), tries=1) is not None
    web.put("a.bin", CONTENT[:100], etag='"same"')  # answers 416
    assert only(tmp_path, one(web.url("a.bin"), **bare)) is None and (tmp_path / "a.bin").read_bytes() == CONTENT[:100]


def test_a_mirror_goes_on_where_the_first_one_ended(web, tmp_path):  # noqa: F811
    web.put("first", CONTENT, cut_after=[100_000, 0, 0, 0])
    web.put("second", CONTENT, etag='"another"')
    file = Wanted("a.bin", (web.url("first"), web.url("second")), len(CONTENT), digest())
    assert only(tmp_path, file, tries=2) is None and web.ranges("second") == ["bytes=100000-"]
    bare = Wanted("b.bin", (web.url("first"), web.url("second")))
    web.put("first", CONTENT, cut_after=[100_000, 0, 0, 0])
    assert only(tmp_path, bare, tries=2) is None and web.ranges("second")[1:] == [
        None
    ]  # nothing says that it is the same


WAITING = """
import sys
from pathlib import Path
from prepare.transfer import Wanted, fetch_all
url, name, size, digest, folder = sys.argv[1:]
print(fetch_all([Wanted(name, (url,), int(size), digest)], Path(folder), timeout_sec=60.0))
"""


def start(folder: Path, file: Wanted) -> subprocess.Popen[str]:
    words = [file.urls[0], file.name, str(file.bytes), file.digest, str(folder)]
    return subprocess.Popen(
        [sys.executable, "-c", WAITING, *words], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def wait_for(reached, limit_sec: float = 60.0) -> None:
    deadline = time.monotonic() + limit_sec
    while not reached():
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.timeout(180, func_only=True)
def test_a_killed_process_is_resumed_and_the_folder_has_one_writer(web, tmp_path, monkeypatch):  # noqa: F811
    """Kill -9 in the middle: the next one asks for the rest. While it is at work, a second one is refused."""
    served = web.put("a.bin", CONTENT, pause_sec=0.05, block=5_000)
    file, part = one(web.url("a.bin")), tmp_path / ".work" / "a.bin.part"
    first = start(tmp_path, file)
    wait_for(lambda: part.exists() and part.stat().st_size >= 50_000)
    monkeypatch.setattr(places, "LOCK_WAIT_SEC", 0.2)
    with pytest.raises(Refused) as refused:
        get(tmp_path, file)
    text = "is being written by another command on this machine. Let that one end, or stop it."
    assert str(refused.value) == f"to: {tmp_path} {text}"
    first.send_signal(signal.SIGKILL)
    first.wait(30)
    first.communicate()
    assert not (tmp_path / "a.bin").exists()
    came, served.pause_sec = part.stat().st_size, 0.0
    assert 50_000 <= came < len(CONTENT)
    assert only(tmp_path, file) is None and (tmp_path / "a.bin").read_bytes() == CONTENT
    assert web.ranges("a.bin") == [None, f"bytes={came}-"]


def test_a_whole_part_that_only_lacked_its_name_is_not_asked_for_again(web, tmp_path, monkeypatch):  # noqa: F811
    web.put("a.bin", CONTENT)
    put = places.Folder.put
    monkeypatch.setattr(places.Folder, "put", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(Failed) as failed:
        get(tmp_path, one(web.url("a.bin")))
    assert str(failed.value).endswith("What has come stays; the same command resumes from there.")
    monkeypatch.setattr(places.Folder, "put", put)
    assert only(tmp_path, one(web.url("a.bin"))) is None and len(web.asked) == 1


# --- what does not arrive ---


def test_a_wrong_digest_is_told_with_both_and_the_next_mirror_is_asked(web, tmp_path, caplog):  # noqa: F811
    web.put("wrong", OTHER)
    web.put("right", CONTENT)
    assert only(tmp_path, Wanted("a.bin", (web.url("wrong"), web.url("right")), len(CONTENT), digest())) is None
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    found, right = digest(OTHER).partition(":")[2], digest().partition(":")[2]
    said = only(tmp_path, one(web.url("wrong"), "b.bin"))
    assert said == f"{web.url('wrong')}: its sha256 is {found}, {right} is wanted"
    assert len(web.ranges("wrong")) == 2 and not (tmp_path / ".work").exists()  # nothing of it is left


@pytest.mark.parametrize(
    ("content", "faults", "more", "said"),
    [
        (b"", {"endless": True}, {}, "does not end after 300,000 bytes"),
        (b"", {"endless": True}, {"bytes": None}, "does not end after 1,000,000 bytes"),
        (b"", {"endless": True}, {"bytes": None, "digest": None}, NO_END),
        (CONTENT + b"-", {}, {}, "has 300,001 bytes, 300,000 are wanted"),
        (CONTENT[1:], {"chunked": True}, {}, "HTTP 416 (Requested Range Not Satisfiable)"),
        (CONTENT + b"-", {"chunked": True}, {}, "does not end after 300,000 bytes"),
        (CONTENT, {"heads": {"Content-Encoding": "gzip"}}, {"digest": None},
         NO_END),
        (b"<!DOCTYPE html>\n<p>Log in", {"kind": "text/html; charset=utf-8"}, {},
         "has 25 bytes, 300,000 are wanted"),
        (b"<html><p>Log in", {"kind": "text/html"}, {"bytes": None, "digest": None},
         "is a web page, as for a login or an error, and no file"),
        (b" <!-- a -->\n<HTML lang=en>", {}, {"bytes": None, "digest": None},
         "is a web page, as for a login or an error, and no file"),
    ],
    ids=[*(f"endless, {known}" for known in ("known", "digest", "nothing")), *(
        "too long", "too short", "chunked and too long", "compressed", "page, known", "page, by its type", "page")],
)  # fmt: skip
def test_a_body_that_is_not_the_file_is_refused(web, tmp_path, content, faults, more, said):  # noqa: F811
    web.put("a.bin", content, **faults)
    url = web.url("a.bin")
    assert only(tmp_path, one(url, **more), tries=3, most_bytes=1_000_000) == f"{url}: {said}"
    assert not list(tmp_path.rglob("*.part"))


def test_a_body_that_a_server_compresses_is_compared_as_it_comes(web, tmp_path):  # noqa: F811
    web.put("a.tar.gz", CONTENT, heads={"Content-Encoding": "gzip"})  # what some servers say of a .gz
    assert only(tmp_path, one(web.url("a.tar.gz"), "a.tar.gz")) is None
    assert (tmp_path / "a.tar.gz").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("status", "tries", "said"),
    [
        (404, 1, "HTTP 404 (Not Found)"),
        (403, 1, "HTTP 403 (Forbidden)"),
        (429, 3, "HTTP 429 (Too Many Requests)"),
        (503, 3, "HTTP 503 (Service Unavailable)"),
    ],
)
def test_an_answer_without_the_file_is_reported_and_tried_again_where_that_helps(web, tmp_path, status, tries, said):  # noqa: F811
    web.put("a.bin", CONTENT, statuses=[status] * 9)
    assert said in only(tmp_path, one(web.url("a.bin")), tries=3)
    assert len(web.asked) == tries
    web.put("a.bin", CONTENT, statuses=[status] * (tries - 1))
    assert only(tmp_path, one(web.url("a.bin")), tries=3) is None


def test_dead_and_silent_servers_are_given_up(tmp_path):
    with serving() as gone:
        url = gone.url("a.bin")
    said = only(tmp_path, one(url), tries=2)
    assert said is not None and said.startswith(f"{url}: failed after ")
    with serving() as web:  # noqa: F811
        web.put("a.bin", CONTENT, statuses=[0, 0, 0])  # closes without a word
        assert "failed after " in str(only(tmp_path, one(web.url("a.bin")), tries=3))
        web.put("a.bin", CONTENT, pause_sec=3.0)
        said = only(tmp_path, one(web.url("a.bin")), tries=1, timeout_sec=0.5)
        assert said.startswith(f"{web.url('a.bin')}: failed after 1 tries (ReadTimeout: ")


def test_redirects_are_followed_to_an_end(web, tmp_path):  # noqa: F811
    web.put("a.bin", CONTENT)
    web.put("moved", redirect=web.url("a.bin"))
    web.put("round", redirect=web.url("round"))
    assert only(tmp_path, one(web.url("moved"))) is None
    assert only(tmp_path, one(web.url("round"), "b")) == f"{web.url('round')}: redirects without an end"


def test_a_token_goes_to_its_own_host_alone(web, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password hunter2\n")
    (tmp_path / "netrc").chmod(0o600)
    web.put("own", CONTENT, token="secret")
    assert only(tmp_path / "to", one(web.url("own"), token="HF_TOKEN")) is None
    web.put("there", CONTENT)
    web.put("own", token="secret", redirect=web.url("there", "localhost"))
    web.asked.clear()
    assert only(tmp_path / "to", one(web.url("own"), "b", token="HF_TOKEN")) is None
    assert [heads.get("authorization") for _, heads in web.asked] == ["Bearer secret", None]
    web.asked.clear()
    mirrored = Wanted("c", (web.url("none"), web.url("there", "localhost")), len(CONTENT), digest(), "HF_TOKEN")
    assert only(tmp_path / "to", mirrored) is None
    assert only(tmp_path / "to", one(web.url("there"), "d")) is None  # no token: none of ~/.netrc either
    assert [heads.get("authorization") for _, heads in web.asked] == ["Bearer secret", None, None]
    said = only(tmp_path / "to", one(web.url("own") + "?sig=hunter2", "e"))
    assert said == f"{web.url('own')}: HTTP 403 (Forbidden)"


# --- the folder ---


def test_a_disk_without_room_is_told_before_anything_is_asked(web, tmp_path, monkeypatch):  # noqa: F811
    web.put("a.bin", CONTENT)
    free = transfer.shutil.disk_usage(tmp_path)._replace(free=2**28)
    monkeypatch.setattr(transfer.shutil, "disk_usage", lambda path: free)
    ways = "Make room there, or give another folder."
    with pytest.raises(Refused) as refused:
        get(tmp_path, one(web.url("a.bin"), bytes=2**30))
    assert str(refused.value) == f"to: {tmp_path}: about 1 GiB are to come, 0.25 GiB are free. {ways}"
    with pytest.raises(Refused) as refused:
        get(tmp_path, one(web.url("a.bin"), bytes=None), about_bytes=2**31)
    assert str(refused.value) == f"to: {tmp_path}: about 2 GiB are to come, 0.25 GiB are free. {ways}"
    assert web.asked == []


def test_a_full_disk_ends_all_files_and_keeps_what_has_come(web, tmp_path, monkeypatch):  # noqa: F811
    served = web.put("a.bin", CONTENT, cut_after=[100_000])
    write = transfer._Download._write

    def full(self, answer, total):
        with contextlib.suppress(httpx2.HTTPError):
            write(self, answer, total)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transfer._Download, "_write", full)
    with pytest.raises(Failed) as failed:
        get(tmp_path, one(web.url("a.bin")))
    assert str(failed.value) == (
        f"to: {tmp_path} cannot be written: [Errno 28] No space left on device. What has come stays; the same command "
        "resumes from there."
    )
    came = (tmp_path / ".work" / "a.bin.part").stat().st_size
    monkeypatch.setattr(transfer._Download, "_write", write)
    served.cut_after = []
    assert only(tmp_path, one(web.url("a.bin"))) is None
    assert web.ranges("a.bin") == [None, f"bytes={came}-"] and 0 < came < len(CONTENT)


def test_a_file_of_another_size_is_fetched_again_and_its_digest_is_compared_on_request(web, tmp_path):  # noqa: F811
    web.put("a.bin", CONTENT)
    file, path = one(web.url("a.bin")), tmp_path / "a.bin"
    path.write_bytes(CONTENT[1:])
    assert file.fault_of(path, read=False) == "has 299,999 bytes, 300,000 are wanted"
    assert only(tmp_path, file) is None and path.read_bytes() == CONTENT
    path.write_bytes(OTHER)  # of the same size
    found, right = digest(OTHER).partition(":")[2], digest().partition(":")[2]
    assert file.fault_of(path, read=False) is None
    assert file.fault_of(path, read=True) == f"its sha256 is {found}, {right} is wanted"
    assert file.fault_of(tmp_path / "b", read=True) == "missing"


@pytest.mark.parametrize("name", ["../a", "/a", "a/../../b", "a//b", "", ".", "a\\b", "a\nb", ".work/a", "x" * 181])
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="is no path inside a folder"):
        get(tmp_path / "to", Wanted(name, ("http://127.0.0.1:9/a",)))
    assert list(tmp_path.iterdir()) == []


def test_every_fault_of_a_list_is_told_at_once():
    bad = [
        Wanted("a", ()),
        Wanted("b", ("ftp://x/b",)),
        Wanted("d", ("http://x/d",), 1, "sha256:12"),
        Wanted("e", ("http://x/e",), 1, "crc:1234"),
        Wanted("a", ("http://x/a",)),
    ]
    with pytest.raises(ValueError) as error:
        check_wanted(bad)
    possible = "KIND:DIGITS, with sha256, sha1, sha512, md5"
    assert str(error.value).splitlines() == [
        "a: its addresses are []. Possible: http:// and https://.",
        "b: its addresses are ['ftp://x/b']. Possible: http:// and https://.",
        f"d: its digest is sha256:12. Possible: {possible}.",
        f"e: its digest is crc:1234. Possible: {possible}.",
        "a: is wanted twice. Leave one out.",
    ]
