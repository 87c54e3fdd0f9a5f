"""reports.live, reports.page and run_folder.history: what is served, to whom; without a browser."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import statistics
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser_pages import HTML, broken_run, copy_run, other_run
from filelock import FileLock

from reports import live, page
from reports.page_content import figures_of, seconds_left
from run_folder import history
from run_folder.history import read_history, signature, state_of


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def server(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[live.Server]:
    monkeypatch.setattr(live, "PAUSE", 0.0)
    monkeypatch.setattr(live, "LEAST_SEC", 0.0)
    with live.Server("127.0.0.1", 0, live.Site(runs)) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server
        server.shutdown()


RUN = "/shapes_run/page.html"


def ask(server: live.Server, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str, str]:
    """Status, ETag and text of an answer."""
    client = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
    client.request(method, path, headers=headers)
    answer = client.getresponse()
    return answer.status, answer.getheader("ETag", ""), answer.read().decode()


# --- who is answered what ---


def test_a_page_is_made_again_only_when_the_record_has_changed(server, runs, monkeypatch):
    folder, made = copy_run(runs), []
    monkeypatch.setattr(live, "page_of", lambda run, real=live.page_of: (made.append(run), real(run))[1])
    status, tag, text = ask(server, RUN)
    assert (status, made) == (200, [folder]) and "Target reached" in text
    assert ask(server, RUN) == (200, tag, text)
    assert ask(server, RUN, **{"If-None-Match": tag}) == (304, tag, "")
    assert ask(server, RUN, "HEAD") == (200, tag, "") and len(made) == 1
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'{"batch": 1610, "ima')  # a line that is being written
    status, newer, text = ask(server, RUN, **{"If-None-Match": tag})
    assert status == 200 and newer != tag and len(made) == 2 and "The last line of metrics.jsonl is cut off" in text


def test_only_the_pages_of_runs_are_served_and_nothing_can_be_changed(server, runs, monkeypatch):
    folder = copy_run(runs)
    assert ask(server, f"{RUN}?a=b")[0] == 200
    others = ["/x", "/shapes_run", "/shapes_run/config.yaml", "/%2e%2e/etc/passwd", "//etc/passwd", "/%ff", "*"]
    for path in (*others, f"/..{RUN}", f"/shapes_run/..{RUN}", f"{RUN}/"):
        assert ask(server, path)[0] == 404, path
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert ask(server, "/", method)[0] == 501

    def refuse(run: Path) -> str:
        raise ValueError("a <b>reason</b>")

    os.utime(folder / "metrics.jsonl", (1, 1))
    with monkeypatch.context() as patch:
        patch.setattr(live, "page_of", refuse)
        assert "<p>a &lt;b&gt;reason&lt;/b&gt;</p>" in ask(server, RUN)[2]
    os.utime(folder / "metrics.jsonl")
    assert "Target reached" in ask(server, RUN)[2]


def test_a_page_of_another_site_cannot_read_the_answers(server):
    """DNS rebinding: its name leads here, and its scripts could read what is answered."""
    for host in ("evil.example", "127.0.0.1.evil.example:80", "", "[::1"):
        status, _, text = ask(server, Host=host)
        assert status == 421 and "Host: not a name of this machine." in text, host
    for host in ("localhost:9000", "LOCALHOST", "127.0.0.1", "[::1]:80", "192.168.0.7:8765"):
        assert ask(server, Host=host)[0] == 200, host


def test_a_name_with_html_or_that_is_no_text_has_its_own_page(server, runs):
    """The name of a folder is bytes, not always those of UTF-8."""
    other_run(runs)
    shutil.copytree(copy_run(runs), Path(os.fsdecode(os.fsencode(runs) + b"/d\xe9but")))
    text = ask(server)[2]
    assert "a&lt;b&gt;&amp;&#39;q&#34; \U0001f600" in text and "a<b>" not in text
    links = [part.partition('"')[0] for part in text.split('<a href="')[1:]]
    nasty = "a%3Cb%3E%26%27q%22%20%F0%9F%98%80/page.html"
    assert sorted(links) == [nasty, "d%E9but/page.html", "shapes_run/page.html"]
    assert [ask(server, f"/{link}")[0] for link in links] == [200] * 3
    assert ask(server, "/d%C3%A9but/page.html")[0] == 404


# --- the table of all runs ---


def test_the_table_has_every_run_under_a_folder_with_its_figures(runs, capsys):
    copy_run(runs, "one")
    other_run(runs)
    broken_run(runs / "group")
    assert page.main([str(runs / "one")]) == page.main([str(runs)]) == 0
    assert capsys.readouterr().out == f"written: {runs / 'one/page.html'}\nwritten: {runs / 'index.html'}\n"
    text = (runs / "index.html").read_text()
    cells = ["reached", "missed", "37.00", "51.40", "127.4", "51,200", "8 min 20 s", "1.390", "2026-11-28 20:27 UTC"]
    assert all(f">{cell}</td>" in text for cell in cells)
    assert '<a href="one/page.html">one</a>' in text and text.count("<a ") == 1 and "group/broken" in text
    assert "2 finished, 1 failed." in text and "2 without a link have no page yet" in text
    assert HTML not in text and "loss: nan &lt;img" in text


def test_a_state_is_that_of_the_lock_and_the_record(tmp_path, monkeypatch):
    folder, ended, failed = copy_run(tmp_path), {"seconds": 5.0}, {"seconds": 5.0, "failed": "loss: nan"}
    # Without an end: written a moment ago, by a machine whose locks are not to be seen.
    for start, summary, state in (
        (ended, {"batches": 1}, "finished"),
        (ended, {}, "stopped"),
        (failed, {}, "failed"),
        ({}, {}, "running"),
    ):
        assert state_of(folder, [start], summary) == state
    for name in ("metrics.jsonl", "starts.jsonl"):
        os.utime(folder / name, (0, 0))
    assert state_of(folder, [{}], {}) == "stopped"
    before = signature(folder)
    with FileLock(folder / ".lock"):
        assert state_of(folder, [{}], {}) == state_of(folder, [ended], {}) == "running" and signature(folder) != before
        monkeypatch.setattr(history, "LOCKS", tmp_path / "none")
        assert state_of(folder, [{}], {}) == "stopped"
    with FileLock(folder / ".lock", timeout=0):
        pass


def test_a_running_run_has_the_figures_of_its_record_so_far(runs):
    folder = copy_run(runs)
    (folder / "summary.json").unlink()
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:60]) + lines[60][:40])
    (folder / "overrides.yaml").write_text("cost:\n  per_device_hour: 3600\n")
    start = json.loads((folder / "starts.jsonl").read_text())
    (folder / "starts.jsonl").write_text(json.dumps({**start, "seconds": 100.0, "num_devices": 8}) + "\n")
    kept = [json.loads(line) for line in lines[:60]]
    evaluation = [line for line in kept if line.get("evaluation")][-1]
    speeds = [line["images_per_sec"] for line in kept if line.get("warmup") is False]
    found, seconds = figures_of(read_history(folder)), max(100.0, *(line["start_sec"] for line in kept))
    expected = {"fid": evaluation["fid"], "clip": evaluation["clip"], "images": kept[-1]["images"], "seconds": seconds}
    assert expected.items() <= found.items()
    assert found["images_per_sec"] == pytest.approx(statistics.median(speeds))
    assert found["cost"] == pytest.approx(8 * seconds)
    assert '<td data-key="stopped" class="stopped">stopped</td>' in page.html_of_all(runs, [folder])
    left = 2000 * 32 - kept[-1]["images"]  # of config.yaml
    assert seconds_left(read_history(folder)) == pytest.approx(left * seconds / kept[-1]["images"])
