"""The pages as people see them, in Chromium, driven by playwright, which `make test-browser` has beside the environment."""

from __future__ import annotations

import importlib.util
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_pages import NASTY, RECORD, broken_run, copy_run, find_browser, other_run, words_for_browser

from reports import live, page
from reports.formatting import NONE

HAS_PLAYWRIGHT = importlib.util.find_spec("playwright") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120, func_only=True),
    pytest.mark.skipif(not HAS_PLAYWRIGHT, reason="playwright: make test-browser has it"),
    pytest.mark.skipif(find_browser() is None, reason="no Chromium: apt-get install chromium"),
]
PAGES = ("one", "compared", "broken", "index")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=words_for_browser())
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Each page's address: of a run, of two compared, of a broken one, and the table of all three."""
    runs = tmp_path_factory.mktemp("pages") / "runs"
    one, other, broken = copy_run(runs), other_run(runs), broken_run(runs)
    assert page.main([str(one)]) == page.main([str(broken)]) == 0
    assert page.main([str(one), str(other), f"out={runs / 'compared.html'}"]) == page.main([str(runs)]) == 0
    places = (one / "page.html", runs / "compared.html", broken / "page.html", runs / "index.html")
    return {name: place.as_uri() for name, place in zip(PAGES, places, strict=True)}


class Opened:
    """A page in a tab of its own, what went wrong in it and what it has asked for."""

    def __init__(self, chromium: Any, address: str, width: int = 1200, height: int = 900, **more: Any):
        self.context = chromium.new_context(viewport={"width": width, "height": height}, **more)
        self.tab = self.context.new_page()
        self.wrong: list[str] = []
        self.asked: list[str] = []
        self.tab.on("console", lambda said: self.wrong.append(said.text) if said.type in ("error", "warning") else None)
        self.tab.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.tab.on("request", lambda one: None if one.url.startswith("data:") else self.asked.append(one.url))
        self.tab.goto(address)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *given: object) -> None:
        self.context.close()

    def shown(self, end: str = "") -> str:
        """Images seen at the one sample grid that can be seen."""
        pictures = self.tab.locator(f"#samples-image{end} img")
        [image] = [one for one in pictures.all() if one.is_visible()]
        assert image.evaluate("one => one.complete && one.naturalWidth > 0")
        return image.get_attribute("data-images")


def grids_of(folder: Path) -> list[str]:
    return [str(int(path.stem[2:])) for path in sorted((folder / "samples").glob("*.png"))]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_loads_without_an_error_and_asks_nothing_of_a_network(chromium, pages, name):
    with Opened(chromium, pages[name]) as opened:
        assert opened.wrong == [] and opened.asked == [pages[name]]
        assert opened.tab.locator("h1").count() == 1 and opened.tab.title() not in ("", "hit")
    with Opened(chromium, pages[name], java_script_enabled=False) as opened:
        count = {"index": ("#runs tbody tr", 3), "one": ("#samples-image img:visible", 1)}
        assert opened.tab.locator(count[name][0]).count() == count[name][1] if name in count else True


def test_short_the_slider_moves_by_keys_and_by_mouse_and_shows_another_image(chromium, pages):
    """The test that `make test-slow` runs."""
    grids = grids_of(RECORD)
    with Opened(chromium, pages["one"]) as opened:
        slider, seen = opened.tab.locator("#samples-slider"), opened.tab.locator("#samples-seen")
        assert opened.shown() == grids[-1] and len(grids) == 4
        slider.focus()
        for key, place in (("ArrowLeft", -2), ("Home", 0), ("ArrowRight", 1), ("End", -1)):
            slider.press(key)
            assert opened.shown() == grids[place] and seen.inner_text() == f"{int(grids[place]):,}"
            assert slider.get_attribute("aria-valuetext") == f"{int(grids[place]):,} images"
        box = slider.bounding_box()
        opened.tab.mouse.click(box["x"] + 4, box["y"] + box["height"] / 2)
        assert opened.shown() == grids[0]
        assert opened.wrong == []


def violations(tab: Any) -> list[str]:
    """What axe-core finds, everything that is folded away unfolded."""
    from axe_playwright_python.sync_playwright import Axe

    tab.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    found = Axe().run(tab).response["violations"]
    return [f"{one['id']}: {node['html'][:200]}" for one in found for node in one["nodes"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_axe_core_finds_nothing_wrong(chromium, pages, name, scheme):
    with Opened(chromium, pages[name], color_scheme=scheme, bypass_csp=True) as opened:
        assert violations(opened.tab) == []
        if (name, scheme) == ("one", "light"):  # it would see a fault
            opened.tab.evaluate("document.querySelector('h1').style.color = '#ddd'")
            assert [text.partition(":")[0] for text in violations(opened.tab)] == ["color-contrast"]


# --- the table of all runs ---


def names_of(opened: Opened) -> list[str]:
    return opened.tab.locator("#runs tbody th > :first-child, #runs tbody th:not(:has(*))").all_inner_texts()


def test_the_table_is_sorted_by_a_click_and_by_a_key_and_what_has_no_value_stays_last(chromium, pages):
    with Opened(chromium, pages["index"]) as opened:

        def head(text: str) -> Any:
            return opened.tab.locator("#runs thead th", has=opened.tab.get_by_role("button", name=text, exact=True))

        def sorts() -> list[str]:
            return opened.tab.locator("#runs thead th:not([aria-sort=none])").all_inner_texts()

        assert sorts() == ["started"] and opened.tab.locator("#runs a").count() == 2
        head("cost").locator("button").click()
        assert names_of(opened)[0] == NASTY and head("cost").get_attribute("aria-sort") == "ascending"
        head("FID").locator("button").press("Space")
        cells = opened.tab.locator("#runs tbody tr td:nth-child(5)").all_inner_texts()
        fids = [float(cell) for cell in cells if cell != NONE]
        assert fids == sorted(fids) and sorts() == ["FID"] and names_of(opened)[-1] == "broken"
        head("run").locator("button").click()
        assert names_of(opened) == sorted(names_of(opened))
        opened.tab.reload()
        assert sorts() == ["run"] and opened.wrong == []
        opened.tab.get_by_role("link", name="shapes_run").click()
        assert opened.tab.locator("#result").get_attribute("data-state") == "reached"


# --- a running run ---


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A folder of runs that is not there yet, and the address at which it is served."""
    monkeypatch.setattr(live, "STATUS", live.STATUS.replace("4000", "100"))
    monkeypatch.setattr(live, "PAUSE", 0.0)
    monkeypatch.setattr(live, "LEAST_SEC", 0.0)
    with live.Server("127.0.0.1", 0, live.Site(tmp_path / "runs")) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield tmp_path / "runs", server.address
        server.shutdown()


def test_a_page_renews_itself_and_keeps_what_the_reader_has_moved(chromium, served, tmp_path):
    runs, address = served
    whole, later = copy_run(tmp_path), tmp_path / "later" / "now"
    shutil.copytree(whole, later)
    (later / "summary.json").unlink()
    lines = (later / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (later / "metrics.jsonl").write_bytes(b"".join(lines[:40]))
    start = json.loads((later / "starts.jsonl").read_text())
    (later / "starts.jsonl").write_text(json.dumps({key: of for key, of in start.items() if key != "seconds"}) + "\n")
    *_, last = sorted((later / "samples").glob("*.png"))
    last.unlink()
    with Opened(chromium, address, height=500) as opened, Opened(chromium, address) as second:
        tab = opened.tab
        assert "no run has started yet" in tab.locator("main").inner_text()
        later.parent.rename(runs)
        running = runs / "now"
        tab.locator("#runs").wait_for(timeout=20_000)
        assert tab.locator("#runs tbody td").first.inner_text() == "running"
        tab.get_by_role("link", name="now").click()
        second.tab.goto(tab.url)
        tab.locator("#samples-slider").press("Home")
        tab.locator("#configuration summary").nth(1).press("Enter")
        tab.locator("#samples-slider").focus()
        at = tab.evaluate("scrollTo(0, 700), scrollY")
        assert at == 700 and opened.shown() == grids_of(whole)[0] and second.shown() == grids_of(whole)[2]
        opened.asked.clear()
        tab.evaluate("document.body.firstElementChild.id = 'old'")
        shutil.copy(whole / "samples" / last.name, running / "samples")
        with open(running / "metrics.jsonl", "ab") as file:
            file.write(b"".join(lines[40:80]) + lines[80][:30])
        for each in (tab, second.tab):
            each.locator("#samples-image img").nth(3).wait_for(state="attached", timeout=20_000)
        assert tab.locator("#old").count() == 0
        # The reader's slider stays where it was put; one that stood at the end shows the newest.
        assert opened.shown() == grids_of(whole)[0] and second.shown() == grids_of(whole)[3]
        assert tab.evaluate("[scrollY, document.activeElement.id]") == [at, "samples-slider"]
        assert tab.locator("#configuration details").nth(1).get_attribute("open") == ""
        assert opened.wrong == second.wrong == []
        assert {url.split("/")[2] for url in opened.asked} == {address.split("/")[2]}
