"""README.md and docs/: every command is understood, every link works, every figure is in a record, no sentence is long.

How each command of a page is checked stands in the name of its case:

    parsed      by the program's own reader of its command line, keys and types included
    cloud       the file that it names is there; for MosaicML's, by its own parser. tests/test_launch.py reads the files
    target      there is such a target in the Makefile; RUN_BY says which test runs what it runs
    launched    a script of launch/ is there, and the words that it hands on are understood; tests/test_slurm.py runs it
    module      of another project: it is installed; tests/test_mlperf_log.py and tests/test_reports_mlperf.py run MLPerf's
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pytest
from conftest import ROOT
from PIL import Image

import benchmark
from bench.ladder import read_ladder
from cli.command_line import Assignment, parse_command_line
from cli.describe import Key, described, keys_of, page_of
from cli.limits import limited
from config import load, schema_keys
from eval import EvalCommand
from preflight import scaling
from prepare.laion import command as laion
from prepare.words import split_words
from record.summary import rounded
from reports import compare, samples, study
from sweeps.file import read_sweep
from tests.cluster.__main__ import table as table_of_restarts
from tests.store.__main__ import table as table_of_faults
from zoo import FAMILIES, load_family
from zoo.flux import OBJECTIVES
from zoo.sampling import SAMPLERS, SamplerName

PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
NAMES = (
    "mlperf miniature evaluation data-and-stores configuration looking measuring checkpoints speed "
    "benchmarks weights video versions licences metrics sweeps comparing precision laion clusters "
    "scaling launching health clouds faults amd"
)


def blocks(kind: str) -> list[tuple[str, str]]:
    """Return (page, block) for each fenced block of a kind."""
    return [(page, found[2]) for page, text in PAGES.items() for found in BLOCK.finditer(text) if found[1] == kind]


def spans(text: str) -> list[str]:
    """Return what stands between single backticks."""
    return re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))


def commands() -> Iterator[tuple[str, str]]:
    """Yield (page, command), in blocks and in the text."""
    for page, block in blocks("bash"):
        yield from ((page, line.split(" #")[0].strip()) for line in block.splitlines() if line.strip())
    for page, text in PAGES.items():
        begins = re.compile(r"([A-Z_]+=\S+ )*(composer|python -m|python export.py|python sweep.py|make|sbatch) ")
        yield from ((page, span) for span in spans(text) if begins.match(span))


# --- commands ---

COMMANDS = {
    "prepare.shards": ("ShardsConfig", range(2, 100)),
    "prepare.downloads": ("DownloadsConfig", range(1, 100)),
    "prepare.latents": ("LatentsConfig", range(2, 3)),
    "prepare.buckets": ("BucketsConfig", range(2, 3)),
    "prepare.adopt": ("AdoptConfig", range(1, 2)),
    "prepare.look": ("LookConfig", range(1, 3)),
    "prepare.fid_statistics": ("FidStatisticsConfig", range(2, 3)),
    "prepare.coco": ("CocoConfig", range(1, 2)),
    "bench.ema": ("EMABenchConfig", range(1)),
    "bench.saving": ("SavingConfig", range(1)),
    "bench.store": ("StoreConfig", range(1)),
    "bench.latency": ("LatencyConfig", range(1)),
    "bench.step": ("StepConfig", range(1)),
    "bench.scale": ("ScaleConfig", range(1)),
    "bench.data": ("DataBenchConfig", range(1)),
    "export": ("ExportConfig", range(2, 3)),
    "preflight.scaling": ("ScalingConfig", range(0)),
    "sweeps.file": ("SweepCommand", range(0)),
}
"""Command -> the dataclass of its keys, and how many places it takes."""

RUN_BY = {
    "demo": "tests/test_miniature.py",
    "miniature": "tests/test_miniature.py",
    "test": "tests/conftest.py",  # this suite
    "test-store": "tests/store/test_harness.py",
    "test-faults": "tests/test_faults.py",
    "test-8bit": "tests/test_adamw_8bit.py",
    "test-tables": "tests/test_tables.py",
    "test-cluster": "tests/test_engines.py",
    "test-loggers": "tests/test_mlflow.py",
    "test-browser": "tests/test_browser.py",
    "test-health": "tests/test_health.py",
    "test-clouds": "tests/test_launch_tools.py",
    "test-image": "tests/image.sh",  # by hand: it builds an image of 9 GB
    **dict.fromkeys(("build_and_launch_docker", "exec_docker", "stop_docker"), "tests/test_launch.py"),
    "test-slow": "tests/conftest.py",
    "mutants": "tests/test_mutants.py",
    "hooks": "tests/test_contributing.py",
    "audit": "tests/test_contributing.py",  # by hand: it asks PyPI
    "test-gpu": "tests/gpu/test_on_gpu.py",
    "controls": "tests/test_shapes_records.py",  # an hour: its records are compared
    "demo-flux": "tests/test_shapes_flow.py",
    "controls-flux": "tests/test_shapes_flow.py",  # its records are compared
    "demo-video": "tests/test_shapes_moving.py",
    "controls-video": "tests/test_shapes_moving.py",  # its records are compared
    "study": "tests/test_study.py",  # an hour: its record is compared
    "gpu-ladder": "tests/test_ladder.py",  # the same code on a CPU
    "gpu-evaluation": "tests/test_bench_evaluation.py",
    "gpu-families": "tests/test_ladder.py",
    "report": "tests/test_report.py",
    "gpu-latency": "tests/test_latency.py",
    "download_assets": "tests/test_downloads.py",
    "env": "tests/test_locks.py",
    "lint": "tests/test_layout.py",
    "lock": "tests/test_locks.py",
}
"""Target of the Makefile -> the test of what it runs."""


CLOUDS = ("mcli", "sky", "kubectl")


def kind_of(command: str) -> str:
    words = [word for word in command.split() if not re.match(r"[A-Z_]+=", word)]
    if words[0] in ("composer", "pip") or words[:2] in (["python", "export.py"], ["python", "sweep.py"]):
        return "parsed"
    if words[0] in ("sbatch", "launch/ranks.sh") or (words[:1] == ["source"] and words[1].startswith("launch/")):
        return "launched"
    if words[:2] == ["python", "-m"]:
        return "module" if words[2].startswith(("mlperf_logging.", "pytest")) else "parsed"
    return {"make": "target", "source": "target", **dict.fromkeys(CLOUDS, "cloud")}.get(words[0], "unknown")


def read(module: str, words: list[str]) -> None:
    """Read a command as the program does. Raises ConfigError: a key or its type; AssertionError: places."""
    if module in ("benchmark", "prepare.doctor"):
        command_line = parse_command_line(words, benchmark.ALIASES)
        load(benchmark.RunConfig, command_line, check=lambda config: [])
    elif module == "eval":
        keys = [word for word in words if "=" in word]
        load(EvalCommand, parse_command_line(keys, {}), check=lambda config: [])
    elif module == "bench.ladder":
        assert read_ladder(str(ROOT / words[0])).rungs and all(
            word.startswith(("results=", "runs=")) for word in words[1:]
        )
    elif module == "sweep":
        sweep = read_sweep(words)
        for values in sweep.points.values():
            line = parse_command_line([sweep.own.yaml or "", *sweep.keys, *sweep.typed], benchmark.ALIASES)
            own = [Assignment("", key, value, key) for key, value in values.items()]
            load(benchmark.RunConfig, replace(line, assignments=line.assignments + own), check=lambda config: [])
    elif module == "prepare.laion":
        stages, [yaml, *keys] = words[0].split("|"), words[1:]
        assert {*stages} <= {*laion.STAGES, "all", "account"}
        yaml = "yamls/prepare/laion.yaml" if yaml == "FILE.yaml" else yaml
        load(laion.LaionConfig, parse_command_line([yaml, *keys], {}), check=lambda config: [])
    elif module == "tests.cluster":
        assert {word.partition("=")[0] for word in words} <= {"rounds", "only", "out"}
    elif module == "reports.mlperf":
        assert words and all(word.startswith(("runs/", "out=")) for word in words)
    elif module == "reports.wandb_dashboard":
        assert words[0].count("/") == 1 and {word.partition("=")[0] for word in words[1:]} <= {"grouped", "out"}
    elif module in ("reports.latency", "reports.study", "reports.tables"):
        assert [Path(word).suffix for word in words] in ([".json"], [".json", ".png"])
    elif module == "reports.compare":
        assert compare.read_line(words)[0]
    elif module == "preflight.scaling":
        assert Path(scaling.read_words(words).yaml).is_file()
    elif module == "reports.live":
        assert words[0].startswith("runs") and {word.partition("=")[0] for word in words[1:]} <= {"port", "host"}
    elif module == "reports.page":
        assert words and all(word == "runs" or word.startswith("runs/") or word.endswith(".html") for word in words)
    elif module == "reports.samples":
        assert len([word for word in words if "=" not in word]) == 3
    else:
        name, num_places = COMMANDS[module]
        places, keys = split_words(words)
        schema = getattr(importlib.import_module(module), name)
        load(schema, parse_command_line(keys, {}), check=lambda config: [])
        assert len(places) in num_places


CASES = sorted(set(commands()))


@pytest.mark.parametrize(
    ("page", "command"), CASES, ids=[f"{page}, {kind_of(command)}: {command[:60]}" for page, command in CASES]
)
def test_every_command_of_a_page_is_understood(page, command, monkeypatch):
    monkeypatch.chdir(ROOT)
    kind = kind_of(command)
    words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
    if kind == "target":
        # What is activated is what `make env` makes.
        targets = ["env"] if words[0] == "source" else [word for word in words[1:] if "=" not in word]
        makefile = (ROOT / "Makefile").read_text()
        assert targets and all(re.search(rf"^{target}:", makefile, re.M) for target in targets)
        assert all((ROOT / RUN_BY[target]).is_file() for target in targets)
    elif kind == "launched" and "--wrap" in words:
        read("sweep", words[-1].removeprefix("exec python sweep.py ").split())
    elif kind == "launched":
        script, *rest = [word for word in words if not word.startswith("--")][0 if "/" in words[0] else 1 :]
        assert (ROOT / script).is_file()
        if rest and rest[0].endswith(".sh"):
            assert (ROOT / rest.pop(0)).is_file()
        if words[0] != "source":
            read("eval" if rest[:1] == ["eval.py"] else "benchmark", rest)
    elif kind == "cloud":
        [file] = [word for word in words if word.endswith(".yaml")]
        assert (ROOT / file).is_file() and "benchmark.py" in (ROOT / file).read_text()
        if words[0] == "mcli":
            from mcli.cli.cli import get_parser

            assert get_parser().parse_args(words[1:]).file == file
    elif kind == "module":
        assert importlib.util.find_spec(f"{words[2]}.__main__")
        assert all((ROOT / word).is_file() for word in words[3:] if word.startswith("tests/"))
    elif words[0] == "pip":
        assert (ROOT / words[words.index("-r") + 1]).is_file()
    elif "-m" in words:
        module = words[words.index("-m") + 1]
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file() or (ROOT / module.replace(".", "/")).is_dir()
        read(module, words[words.index("-m") + 2 :])
    else:
        script = next(number for number, word in enumerate(words) if word.endswith(".py"))
        read(words[script].removesuffix(".py"), words[script + 1 :])


def test_the_ten_seeds_of_the_benchmark_are_one_sweep(monkeypatch):
    monkeypatch.chdir(ROOT)
    sweep = read_sweep(["yamls/sweeps/mlperf_256_ten_seeds.yaml"])
    assert len(sweep.points) == 10 == len({values["seed"] for values in sweep.points.values()})
    assert (sweep.own.yaml, sweep.own.ranks) == ("yamls/mlperf_256.yaml", 8)
    assert all(name.startswith("seed-") for name in sweep.points)  # as the report's command names them


def test_every_block_says_whether_it_is_commands_or_text_and_every_command_has_a_kind():
    kinds = {found[1] for text in PAGES.values() for found in BLOCK.finditer(text)}
    assert kinds == {"bash", "text"}
    assert [command for _, command in CASES if kind_of(command) == "unknown"] == []
    assert {kind_of(command) for _, command in CASES} == {"parsed", "target", "module", "launched", "cloud"}


# --- the pages ---


def test_the_readme_is_short_and_each_page_is_there():
    assert len(PAGES["README.md"].splitlines()) <= 180
    assert {Path(page).stem for page in PAGES if page.startswith("docs/")} == set(NAMES.split())
    assert all(f"](docs/{name}.md)" in PAGES["README.md"] for name in NAMES.split())


def prose(text: str) -> list[str]:
    """Return a page's paragraphs and list items, without blocks, tables, headings and comments."""
    text = re.sub(r"<!--.*?-->", "", BLOCK.sub("\n\n", text))
    lines = ["" if re.match(r"\||#|!\[", line) else line for line in text.splitlines()]
    starts = [f"\n{line}" if re.match(r"\s*([-*]|\d+\.) ", line) else line for line in lines]
    parts = "\n".join(starts).split("\n\n")
    return [" ".join(re.sub(r"^\s*([-*]|\d+\.) ", "", line) for line in part.split("\n")).strip() for part in parts]


def sentences(text: str) -> list[str]:
    """Return the sentences of a page; code and a link's text count as one word."""
    found = []
    for part in prose(text):
        plain = re.sub(r"`[^`]+`|\[[^]]+\]\([^)]+\)", "CODE", part)
        found += re.split(r"(?<=[.?!])[*)\"]*\s+(?=[A-Z\"*(])", plain)
    return [sentence for sentence in found if sentence]


@pytest.mark.parametrize("page", PAGES)
def test_no_sentence_has_more_than_thirty_words(page):
    assert [sentence for sentence in sentences(PAGES[page]) if len(sentence.split()) > 30] == []


@pytest.mark.parametrize("page", PAGES)
def test_no_empty_line_cuts_a_table(page):
    rows = PAGES[page].splitlines()
    heads = [n for n, row in enumerate(rows) if row.startswith("|") and not rows[n - 1].startswith("|")]
    assert [rows[n] for n in heads if not re.match(r"\|[ :-]*-", rows[n + 1])] == []


def test_every_sweep_is_on_its_page():
    named = set(re.findall(r"`(\w+\.yaml)`", PAGES["docs/sweeps.md"]))
    assert named == {path.name for path in (ROOT / "yamls/sweeps").glob("*.yaml")}


def test_a_long_sentence_is_seen():
    text = f"Short. A {'word ' * 30}end.\n\n| {'word ' * 40} |\n\n```bash\n{'word ' * 40}\n```\n- {'word ' * 30}"
    assert [len(sentence.split()) for sentence in sentences(text)] == [1, 32, 30]


@pytest.mark.parametrize("page", PAGES)
def test_no_cell_of_a_table_is_a_paragraph(page):
    rows = [line for line in BLOCK.sub("", PAGES[page]).splitlines() if line.startswith("|")]
    cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    assert [cell for cell in cells if len(cell.split()) > 25] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_and_picture_is_there(page):
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", PAGES[page])) if "://" not in link]
    for link in links:
        place, _, heading = link.partition("#")
        target = (ROOT / page).parent / place if place else ROOT / page
        assert target.exists(), link
        heads = re.findall(r"^#+ (.*)$", target.read_text(), re.M) if heading else []
        assert not heading or heading in [re.sub(r"[^\w\- ]", "", head).lower().replace(" ", "-") for head in heads]
    assert links or page in ("docs/versions.md", "docs/measuring.md", "docs/checkpoints.md", "CONTRIBUTING.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_file_of_the_project_that_is_named_is_there(page):
    named = [span for span in spans(PAGES[page]) if re.fullmatch(r"[\w./-]+\.(py|yaml|csv|json|lock|txt)", span)]
    ours = [name for name in named if name.split("/")[0] in FOLDERS or (ROOT / name).exists() or name.endswith(".py")]
    assert [name for name in ours if not (ROOT / name).exists()] == []


FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"runs", "cache", "datasets"}


def test_the_recipes_of_the_readme_are_those_that_there_are():
    rows = PAGES["README.md"].split("## Recipes")[1].split("\n## ")[0]
    named = set()
    for row in re.findall(r"^\| (`.*?) \|", rows, re.M):
        first, *more = re.findall(r"`([^`]+)`", row)
        stem = first.removesuffix(".yaml").rpartition("_")[0]
        named |= {first, *(name if name.endswith(".yaml") else f"{stem}{name}.yaml" for name in more)}
    assert named == {path.name for path in (ROOT / "yamls").glob("*.yaml")}


def test_the_tree_of_the_readme_is_the_tree_and_its_floors_are_those_of_the_layout():
    """Every folder with code and every file at the root, each once, on its floor."""
    from test_layout import FLOORS, sources

    [tree] = [block for page, block in blocks("text") if page == "README.md" and block.startswith("floor 6")]
    named = {}
    for part in re.split(r"^(?=floor )", tree.split("\n\n")[0], flags=re.M)[1:]:
        for room in re.findall(r"^(?:floor \d)? +([\w.]+/|\w+\.py) ", part, re.M):
            assert room not in named
            named[room] = int(part[6])
    there = {part[0] + ("/" if len(part) > 1 else "") for part in (path.relative_to(ROOT).parts for path in sources())}
    floors = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
    assert named == {room: floors[room.removesuffix("/").removesuffix(".py")] for room in there}


def test_flags_are_on_the_page():
    page = PAGES["docs/configuration.md"].split("## The keys")[0]
    assert all(f"`--{flag}`" in page for flag in benchmark.ALIASES)


def test_every_key_that_is_named_exists():
    keys = set(schema_keys(EvalCommand)) | set(benchmark.ALIASES)
    sections = {key.partition(".")[0] for key in keys if "." in key}
    others = {
        key.name
        for module, (name, _) in COMMANDS.items()
        for key in keys_of(getattr(importlib.import_module(module), name))
        if isinstance(key, Key)
    }
    unknown = []
    for page, text in PAGES.items():
        for span in spans(text):
            first, *rest = span.split()
            key = first.partition("=")[0]
            if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", key) and key.partition(".")[0] in sections:
                if not key.endswith((".py", ".png", ".csv", ".jsonl", ".yaml", ".log")):
                    named = {key, *(f"{key.rpartition('.')[0]}.{word}" for word in rest)}
                    unknown += [(page, name) for name in named - keys]
            elif re.fullmatch(r"[a-z_]+=\S*", first) and key not in keys | others | {
                "target",
                "out",
                "key",
                "results",
                "runs",
                "grouped",
                "port",
                "host",
                "across",
            }:
                unknown.append((page, span))
    assert unknown == []


# --- the pages' tables of keys ---


@pytest.mark.parametrize(
    "page", [page for page, text in PAGES.items() if re.search("(keys|rows) of ", text) and "docs/" in page]
)
def test_the_tables_of_keys_are_what_make_report_would_write(page):
    assert described(PAGES[page]) == PAGES[page], "run make report"


@pytest.mark.parametrize(
    "module, name", [("benchmark", "RunConfig"), ("eval", "EvalCommand"), *((m, n) for m, (n, _) in COMMANDS.items())]
)
def test_every_key_says_in_a_few_words_what_it_is(module, name):
    schema = getattr(importlib.import_module(module), name)
    texts = {key.name: key.text for key in keys_of(schema) if isinstance(key, Key)}
    assert {name for name in texts if "[]" not in name} == {
        key for key in schema_keys(schema) if not any(other.startswith(f"{key}.") for other in schema_keys(schema))
    }
    assert [name for name, text in texts.items() if not text.endswith(".")] == []
    assert [name for name, text in texts.items() if len(text.split()) > 25] == []


@dataclass(frozen=True)
class Inner:
    """What lies within."""

    size: int | None = limited(None, 1, 8)
    """Pixels. null: as they are."""


@dataclass(frozen=True)
class Outer:
    """What lies without."""

    name: Literal["one", "two"] = "one"
    """Which | of them,
    over two lines."""
    rate: float = 1e-8
    flag: bool = False
    """A flag."""
    inner: Inner = field(default_factory=Inner)


def test_a_table_of_keys_has_default_what_is_possible_and_the_text_under_the_field():
    head = "| key | default | possible | meaning |\n| --- | --- | --- | --- |\n"
    own = [
        "| `name` | `one` | `one`, `two` | Which \\| of them, over two lines. |",
        "| `rate` | `1e-8` | a number |  |",
        "| `flag` | `false` | `true`, `false` | A flag. |",
    ]
    assert page_of(Outer, own=True) == "\n" + head + "\n".join(own) + "\n\n"
    inner = "| `inner.size` | `null` | 1 to 8, null | Pixels. null: as they are. |"
    parts = ["### Keys without a section", "What lies without.", head + "\n".join(own)]
    parts += ["### `inner`", "What lies within.", head + inner]
    assert page_of(Outer) == "\n" + "\n\n".join(parts) + "\n\n"


# --- the picture of samples; tests/test_report.py compares it ---


def test_the_picture_of_a_runs_page_is_of_a_committed_record_and_small():
    makefile = (ROOT / "Makefile").read_text()
    assert "reports.page reports/results/shapes_run out=" in makefile
    made = record("shapes_run/summary")
    assert (made["target"], "+" in made["commit"]) == ("reached", False)
    path = ROOT / "docs/pictures/page.png"
    with Image.open(path) as picture:
        assert picture.width == 1200 and path.stat().st_size <= 200_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["grid.png"], "command line: Give three places: GRID.png CAPTIONS.txt OUT.png."),
        (["grid.png", "captions.txt", "out.png", "gap_px=x"], "command line: gap_px is 'x'. Possible: an integer."),
        (
            ["grid.png", "captions.txt", "out.png"],
            "11 x 11 px, not 2 x 2 images with gaps of 2 px. Possible: a",
        ),
    ],
)
def test_a_grid_that_cannot_be_cut_is_refused(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (11, 11)).save("grid.png")
    Path("captions.txt").write_text("one\ntwo\nthree\n")
    assert samples.main(words) == 2
    assert capsys.readouterr().err.startswith(message)


# --- figures ---


def flat(page: str) -> str:
    return " ".join(PAGES[page].split())


def record(name: str) -> dict:
    return json.loads((ROOT / f"reports/results/{name}.json").read_text())


def test_the_result_lines_are_those_of_the_committed_record():
    made = record("shapes_cpu")
    lines = {page: block.strip() for page, block in blocks("text") if block.startswith("images_per_sec=")}
    assert lines.keys() == {"README.md", "docs/miniature.md"}
    for line in lines.values():
        shown = dict(pair.split("=") for pair in line.split())
        assert shown == {key: "none" if made[key] is None else str(rounded(made[key])) for key in shown}
    assert len(lines["README.md"].split()) < len(lines["docs/miniature.md"].split())
    assert made["commit"] and made["device"] and (made["family"], made["target"]) == ("shapes", "reached")


def test_the_rows_of_results_are_those_of_the_committed_records():
    text = PAGES["README.md"].split("## Results")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\| .*", text, re.M)[1:]]
    assert len(rows) == 6
    for what, hardware, speed, scores, link in rows:
        if "[shapes_precision]" in link:  # means of three seeds; the machine was busy, so its speeds are none
            table = study.table_of(record("shapes_precision"))
            of = {row[:4]: [cell.split()[0] for cell in row[6:8]] for row in table.rows}
            plain, float32 = of["0.0001", "bf16_params", "bf16", "nearest"], of["0.0001", "fp32", "-", "-"]
            assert (speed, scores) == ("-", f"{' / '.join(plain)}; {' / '.join(float32)}")
            continue
        if link == "-":
            assert (speed, scores) == ("not measured", "not measured") and hardware == "8 GPUs"
            continue
        made = json.loads((ROOT / re.search(r"\((.*)\)", link)[1]).read_text())
        last = made["evaluations"][-1] if made.get("evaluations") else made
        assert speed == f"{made['images_per_sec']:.0f}"
        expected = "not measured" if last.get("fid") is None else f"{last['fid']:.1f} / {last['clip']:.3f}"
        assert scores == expected, what
        assert made["device"].startswith("CPU") and hardware.startswith("2 CPU cores") and made["num_devices"] == 1
        assert ("one thread" in hardware) == ("1 threads" in made["device"])


def test_the_time_under_the_picture_is_that_of_the_record():
    minutes, seconds = divmod(round(record("shapes_cpu")["seconds_to_target_with_eval"]), 60)
    assert f"after {record('shapes_cpu')['images_to_target']:,} images: {minutes} min {seconds} s" in flat("README.md")


def test_the_demos_of_three_seeds_are_those_of_their_records():
    for seed, name in ((17, "shapes_cpu"), (18, "shapes_cpu_seed18"), (19, "shapes_cpu_seed19")):
        made = record(name)
        minutes, seconds = divmod(made["command_seconds"], 60)
        cells = (seed, f"{minutes} min {seconds} s", f"{made['fid']:.1f}", f"{made['clip']:.3f}")
        row = f"| {' | '.join(map(str, cells))} | {made['images_to_target']:,} | [{name}]"
        assert row in PAGES["docs/miniature.md"]


def test_the_quality_of_the_miniatures_encoders_is_that_of_their_records():
    folder = ROOT / "zoo/shapes_weights"
    reader, clip, vae = (json.loads((folder / n / "quality.json").read_text()) for n in ("reader", "clip", "vae"))
    assert set(reader["read_right"].values()) == {1.0}
    least = min(clip["told_right"], key=clip["told_right"].get)
    told = f"in {100 * clip['score']:.1f} % of the cases ({least}, the least: {100 * clip['told_right'][least]:.1f} %)"
    assert told in flat("docs/miniature.md")
    cosine, attribute = 100 * vae["kept"]["cosine"], 100 * min(vae["kept"]["read_right"].values())
    assert f"keeps {cosine:.2f} % of the CLIP score and at least {attribute:.1f} %" in flat("docs/miniature.md")
    rendered = f"{clip['cosine']:.3f} |", f"one attribute changed | - | {clip['cosine_one_attribute_off']:.3f} |"
    assert all(text in PAGES["docs/miniature.md"] for text in rendered)
    log = (ROOT / "reports/results/shapes_encoders.jsonl").read_text().splitlines()
    of_vae = [line for line in map(json.loads, log) if line["stage"] == "vae" and line.get("best")]
    assert of_vae[-1]["kept"] == vae["kept"]


def spread(made: dict, key: str, digits: str) -> str:
    value, least, greatest = (format(made[f"{key}{end}"], digits) for end in ("", "_min", "_max"))
    return f"{value} ({least} to {greatest})"


@pytest.mark.parametrize(
    ("name", "key", "digits"),
    [
        ("store_speed", "download_mb_per_sec", ".0f"),
        ("store_speed", "cold_mb_per_sec", ".0f"),
        ("store_speed", "warm_mb_per_sec", ".0f"),
        ("store_speed", "cold_over_download", ".2f"),
        ("store_speed", "cold_over_one", ".2f"),
        ("store_speed", "arrival_over_download", ".2f"),
        ("store_speed", "verify_sec_per_gb", ".3f"),
        ("adopt_speed", "adopt_sec", ".1f"),
        ("adopt_speed", "plain_over_ours", ".2f"),
        ("adopt_speed", "zstd_over_plain", ".2f"),
        ("adopt_speed", "gz_over_plain", ".2f"),
        ("adopt_speed", "zstd_over_plain_cpu", ".2f"),
        ("adopt_speed", "unpack_zstd_mb_per_sec", ".0f"),
        ("micro", "ema_speedup_vs_composer", ".2f"),
        ("micro", "ema_speedup_vs_diffusers", ".2f"),
        ("micro", "ema_speedup_vs_diffusers_foreach", ".2f"),
        ("micro", "ema_over_flat", ".2f"),
        ("mixture", "two_over_one", ".2f"),
        ("mixture", "buckets_over_square", ".2f"),
        ("fid_speed", "total_speedup", ".2f"),
        ("data_speed", "speedup_vs_webdataset_worker", ".2f"),
        ("data_speed", "speedup_vs_webdataset16_worker", ".2f"),
        ("data_speed", "speedup_vs_files_worker", ".2f"),
        ("data_speed", "paced_data_wait_frac_ours", ".4f"),
        ("data_speed", "read_speedup_vs_by_row", ".2f"),
        ("images_speed", "cpu_speedup_vs_before", ".2f"),
        ("images_speed", "cpu_speedup_vs_predecessor", ".2f"),
        ("images_speed", "cpu_speedup_vs_webdataset", ".2f"),
    ],
)
def test_the_speeds_of_the_other_commands_are_those_of_their_records(name, key, digits):
    made = record(name)
    assert f"| {spread(made, key, digits)}" in PAGES["docs/benchmarks.md"] and made["commit"]


def test_seconds_and_bytes_of_a_page_are_those_of_the_record():
    made = record("page_speed")
    for num in made["windows"]:
        row = f"| {num:,} | {spread(made, f'windows_{num}_sec', '.1f')} | {made[f'windows_{num}_bytes'] / 1e6:.2f} |"
        assert row in PAGES["docs/looking.md"] and made["commit"]


def test_the_other_figures_of_data_and_store_are_those_of_their_records():
    data, page = record("data_speed"), PAGES["docs/benchmarks.md"]
    for kind in ("webdataset", "webdataset16", "files"):
        ratio = spread(data, f"speedup_vs_{kind}_worker", ".2f")
        assert f"| {ratio} | {data[f'speedup_vs_{kind}_in_process']:.2f} |" in page
    times = [
        f"{data[f'{kind}_worker_cpu_us_a_sample']:.0f}" for kind in ("ours", "webdataset", "webdataset16", "files")
    ]
    assert f"ours | {times[0]} |" in page and f"| {', '.join(times[1:])} |" in page
    for name in ("epoch", "read", "by_row"):
        kept = spread(data, f"{name}_over_preadv", ".2f")
        assert f"| {spread(data, f'reading_{name}_cpu_us_a_sample', '.1f')} | {kept} |" in page
    assert f"one buffer | {spread(data, 'reading_preadv_cpu_us_a_sample', '.1f')} | |" in page
    assert f"the tars in float32 | {data['bytes_over_webdataset']:.3f} |" in page
    assert f"WebDataset | {data['paced_data_wait_frac_webdataset']:.4f} |" in page
    assert f"this keeps {data['node_cores_ours']:.2f} of 16 cores busy from moments" in page
    jpegs = 8 * 200 * 1e-6 * record("images_speed")["ours_cpu_us_an_image"]  # data_speed's reader had PIL decode them
    assert f"{jpegs:.1f} from JPEGs" in page
    adopted = record("adopt_speed")
    of_adoption = f"| bytes that it reads, of {adopted['many_bytes']:,} | {adopted['adopt_bytes_read']:,} |"
    assert of_adoption in page and f"(load average {adopted['load_average_before']:.1f})" in page
    assert f"samples/s | {record('store_speed')['warm_samples_per_sec']:,.0f} |" in page


def test_the_seconds_of_a_restart_are_those_of_the_record():
    made = record("slurm_restarts")
    assert table_of_restarts(made) in PAGES["docs/launching.md"] and made["commit"]


def test_the_names_that_the_texts_of_keys_give_are_those_of_the_code():
    texts = {key.name: key.text for key in keys_of(benchmark.RunConfig) if isinstance(key, Key)}
    assert typing.get_args(SamplerName) == SAMPLERS
    assert all(re.search(rf"\b{family}\b", texts["model.family"]) for family in FAMILIES)
    assert all(re.search(rf"\b{variant}\b", texts["model.variant"]) for variant in OBJECTIVES)
    assert all(load_family("sd2", "tiny", name) for name in ("stock", "mlperf", "sd15"))


def test_the_table_of_faults_is_that_of_the_committed_records_and_ours_are_all_good():
    records = {kind: record(name) for kind, name in {"plain": "store_faults", "ours": "store_faults_ours"}.items()}
    assert table_of_faults(records) in PAGES["docs/data-and-stores.md"] and len(records["ours"]["faults"]) >= 20
    ours = [fault["ours"] for fault in records["ours"]["faults"].values()]
    assert all(of["good"] == sum(of["counts"].values()) >= 10 for of in ours)
