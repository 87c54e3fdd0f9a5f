"""README.md and docs/: every command is understood, every link works, figures are those of records.

How each command of a page is checked stands in the name of its case:

    parsed      by the program's own reader of its command line, keys and types included
    cloud       the file that it names is there; for MosaicML's, by its own parser. tests/test_launch.py reads the files
    target      there is such a target in the Makefile
    launched    a script of launch/ is there, and the words that it hands on are understood; tests/test_slurm.py runs it
    module      of another project: it is installed; tests/test_mlperf_log.py and tests/test_reports_mlperf.py run MLPerf's
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT
from test_layout import FLOORS, sources

import benchmark
from bench.ladder import LadderConfig, read_ladder
from common.command_help import Key, keys_of, read_command
from common.command_line import Assignment, parse_command_line
from common.key_reference import update_tables
from config import load, schema_keys
from eval import EvalCommand
from prepare.arguments import split_arguments
from prepare.laion import __main__ as laion
from run_folder.history import rounded
from scaling import __main__
from sweeps.plan import read_sweep

PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "reports/NOTES.md")),
        *sorted((ROOT / "docs").glob("*.md")),
    ]
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


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

FILES = {
    str(path.relative_to(ROOT)).removesuffix(".py").replace("/", "."): path
    for path in sources()
    if "\n@command(keys=" in path.read_text()
}
"""Command -> its file."""
SCHEMAS = list(dict.fromkeys(read_command(path).keys for path in FILES.values()))

NUM_PLACES = {
    range(
        1
    ): "bench.ema bench.gpu bench.optimizer bench.saving bench.store bench.latency bench.step bench.scale bench.data",
    range(1, 2): "bench.ladder prepare.adopt prepare.coco reports.live reports.wandb_dashboard",
    range(2, 3): "prepare.latents prepare.buckets prepare.fid_statistics export",
    range(3, 4): "reports.samples",
    range(1, 17): "prepare.look reports.compare reports.page",
    range(1, 100): "prepare.downloads reports.mlperf",
    range(2, 100): "prepare.shards",
}
"""How many places -> the commands that take so many."""

CLOUDS = ("mcli", "sky", "kubectl")


def kind_of(command: str) -> str:
    words = [word for word in command.split() if not re.match(r"[A-Z_]+=", word)]
    if words[0] in ("composer", "pip") or re.match(r"python (benchmark|export|sweep)\.py", " ".join(words)):
        return "parsed"
    if words[0] in ("sbatch", "launch/ranks.sh") or (words[:1] == ["source"] and words[1].startswith("launch/")):
        return "launched"
    if words[:2] == ["python", "-m"]:
        return "module" if words[2].startswith(("mlperf_logging.", "pytest")) else "parsed"
    return {"make": "target", "source": "target", **dict.fromkeys(CLOUDS, "cloud")}.get(words[0], "unknown")


def read(module: str, words: list[str]) -> None:
    """Read a command as the program does. Raises ConfigError: a key or its type; AssertionError: places."""
    if words[:1] == ["--help"]:
        return
    if module in ("benchmark", "prepare.doctor"):
        command_line = parse_command_line(words, benchmark.ALIASES)
        load(benchmark.RunConfig, command_line, check=lambda config: [])
    elif module == "eval":
        keys = [word for word in words if "=" in word]
        load(EvalCommand, parse_command_line(keys, {}), check=lambda config: [])
    elif module == "bench.ladder":
        assert read_ladder(str(ROOT / words[0])).rungs
        load(LadderConfig, parse_command_line(words[1:], {}), check=lambda config: [])
    elif module == "sweep":
        sweep = read_sweep(words)
        for values in list(sweep.points.values())[:: max(1, len(sweep.points) - 1)]:  # the first and the last
            line = parse_command_line([sweep.command.yaml or "", *sweep.keys, *sweep.typed], benchmark.ALIASES)
            own = [Assignment("", key, value, key) for key, value in values.items()]
            load(benchmark.RunConfig, replace(line, assignments=line.assignments + own), check=lambda config: [])
    elif module == "prepare.laion":
        stages, [yaml, *keys] = words[0].split("|"), words[1:]
        assert {*stages} <= {*laion.STAGES, "all", "account"}
        yaml = "yamls/prepare/laion.yaml" if yaml == "FILE.yaml" else yaml
        load(laion.LaionConfig, parse_command_line([yaml, *keys], {}), check=lambda config: [])
    elif module in ("reports.study", "reports.tables", "scaling.report"):
        assert [Path(word).suffix for word in words] in ([".json"], [".json", ".png"])
    elif module == "scaling":
        assert Path(__main__.read_command(words).yaml).is_file()
    else:
        [num_places] = [num for num, names in NUM_PLACES.items() if module in names.split()]
        places, keys = split_arguments(words)
        load(read_command(FILES[module]).keys, parse_command_line(keys, {}), check=lambda config: [])
        assert len(places) in num_places


CASES = sorted({command: page for page, command in commands()}.items())


@pytest.mark.parametrize(
    "command", [command for command, _ in CASES], ids=[f"{page}, {kind_of(each)}: {each[:60]}" for each, page in CASES]
)
def test_every_command_of_a_page_is_understood(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    kind = kind_of(command)
    words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
    if kind == "target":
        # What is activated is what `make env` makes.
        targets = ["env"] if words[0] == "source" else [word for word in words[1:] if "=" not in word]
        makefile = (ROOT / "Makefile").read_text()
        assert targets and all(re.search(rf"^{target}:", makefile, re.M) for target in targets)
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


def test_every_block_says_whether_it_is_commands_or_text_and_every_command_has_a_kind():
    kinds = {found[1] for text in PAGES.values() for found in BLOCK.finditer(text)}
    assert kinds == {"bash", "text"}
    assert [command for command, _ in CASES if kind_of(command) == "unknown"] == []
    assert {kind_of(command) for command, _ in CASES} == {"parsed", "target", "module", "launched", "cloud"}


# --- the pages ---


def test_every_page_is_in_the_index():
    index = PAGES["docs/start.md"].split("## All pages")[1]
    names = {Path(page).name for page in PAGES if page.startswith("docs/")} - {"start.md"}
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", index)) == names
    assert "](docs/start.md#all-pages)" in PAGES["README.md"]


FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"runs", "cache", "datasets"}


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_picture_and_file_that_is_named_is_there(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", PAGES[page])):
        place, _, heading = link.partition("#")
        if "://" not in link:
            target = (ROOT / page).parent / place if place else ROOT / page
            assert target.exists(), link
            heads = re.findall(r"^#+ (.*)$", target.read_text(), re.M) if heading else []
            names = [re.sub(r"[^\w\- ]", "", head).lower().replace(" ", "-") for head in heads]
            assert not heading or heading in names, link
    named = [span for span in spans(PAGES[page]) if re.fullmatch(r"[\w./-]+\.(py|yaml|csv|json|lock|txt)", span)]
    ours = [name for name in named if name.split("/")[0] in FOLDERS or name.endswith(".py")]
    assert [name for name in ours if not (ROOT / name).exists()] == []


def test_the_pages_of_recipes_and_sweeps_list_every_yaml():
    recipes = set()
    for row in re.findall(r"^\| (`.*?) \|", PAGES["docs/recipes.md"], re.M):
        first, *more = re.findall(r"`([^`]+)`", row)
        stem = first.removesuffix(".yaml").rpartition("_")[0]
        recipes |= {first, *(name if name.endswith(".yaml") else f"{stem}{name}.yaml" for name in more)}
    sweeps = set(re.findall(r"`(\w+\.yaml)`", PAGES["docs/sweeps.md"]))
    for named, folder in ((recipes, "yamls"), (sweeps, "yamls/sweeps")):
        assert named == {path.name for path in (ROOT / folder).glob("*.yaml")}


def test_every_key_that_is_named_exists():
    keys = set(schema_keys(EvalCommand)) | {flag for flag, alias in benchmark.ALIASES.items() if not alias.advice}
    configuration = PAGES["docs/configuration.md"].split("## The keys")[0]
    assert all(f"`--{flag}`" in configuration for flag, alias in benchmark.ALIASES.items() if not alias.advice)
    sections = {key.partition(".")[0] for key in keys if "." in key}
    others = {key.name for schema in SCHEMAS for key in keys_of(schema) if isinstance(key, Key)}
    unknown = []
    for page, text in PAGES.items():
        for span in spans(text):
            first, *rest = span.split()
            key = first.partition("=")[0]
            if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", key) and key.partition(".")[0] in sections:
                if not key.endswith((".py", ".png", ".csv", ".jsonl", ".yaml", ".log")):
                    named = {key, *(f"{key.rpartition('.')[0]}.{word}" for word in rest)}
                    unknown += [(page, name) for name in named - keys]
            elif re.fullmatch(r"[a-z_]+=\S*", first) and key not in keys | others | {"target", "key"}:
                unknown.append((page, span))
    assert unknown == []


# --- the pages' tables of keys ---


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if "keys of " in text and "docs/" in page])
def test_the_tables_of_keys_are_what_make_report_would_write(page):
    assert update_tables(PAGES[page]) == PAGES[page], "run make report"


# --- figures ---

SCORES = ("fid", ".1f"), ("clip", ".3f")


def flat(page: str) -> str:
    return " ".join(PAGES[page].split())


def record(name: str) -> dict:
    return json.loads((ROOT / f"reports/results/{name}.json").read_text())


def minutes_of(seconds: float) -> str:
    return "{} min {} s".format(*divmod(round(seconds), 60))


def spread(made: dict, key: str, digits: str) -> str:
    value, least, greatest = (format(made[f"{key}{end}"], digits) for end in ("", "_min", "_max"))
    return f"{value} ({least} to {greatest})"


def over_runs(name: str, key: str, digits: str, runs: slice = slice(None)) -> str:
    of = [run[key] for run in record(name)["runs"]][runs]
    return "{} ({} to {})".format(*(format(value, digits) for value in (sum(of) / len(of), min(of), max(of))))


def test_the_result_lines_are_those_of_the_committed_record():
    made = record("shapes_cpu")
    lines = {page: block.strip() for page, block in blocks("text") if block.startswith("images_per_sec=")}
    assert lines.keys() == {"README.md", "docs/miniature.md"}
    for line in lines.values():
        shown = dict(pair.split("=") for pair in line.split())
        assert shown == {key: "none" if made[key] is None else str(rounded(made[key])) for key in shown}
    assert made["commit"] and made["device"] and (made["family"], made["target"]) == ("shapes", "reached")


def test_the_rows_of_results_are_those_of_the_committed_records():
    text = PAGES["README.md"].split("## Results")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\| .*", text, re.M)[1:]]
    assert len(rows) == 5
    for what, hardware, speed, scores, link in rows:
        made = json.loads((ROOT / re.search(r"\((.*)\)", link)[1]).read_text())
        last = made["evaluations"][-1] if made.get("evaluations") else made
        assert made["num_devices"] == 1
        if made["device"] == "NVIDIA H200":
            digits = ".1f" if made["images_per_sec"] >= 10 else ".2f"
            assert (hardware, speed, scores) == ("1 H200", format(made["images_per_sec"], digits), "not measured")
            assert f"batch {made['global_batch_size']}" in what
            continue
        expected = "not measured" if last.get("fid") is None else f"{last['fid']:.1f} / {last['clip']:.3f}"
        assert (speed, scores) == (f"{made['images_per_sec']:.0f}", expected), what
        assert re.fullmatch("CPU .*, 2 threads", made["device"]) and hardware == "2 CPU cores"


def test_the_figures_of_the_pages_are_those_of_their_records():
    spreads = {
        "store_speed": {"cold_mb_per_sec": ".0f", "warm_mb_per_sec": ".0f", "cold_over_download": ".2f"},
        "ema": {f"speedup_vs_{other}": ".2f" for other in ("composer", "diffusers", "diffusers_foreach", "flat")},
    }
    commands, demo = record("cpu_commands"), record("shapes_cpu")
    texts = {
        "docs/benchmarks.md": [
            spread(record(name), key, digits) for name, keys in spreads.items() for key, digits in keys.items()
        ],
        "docs/speed.md": [spread(commands, f"{key}_sec", ".2f") for key in commands["commands"]],
        "docs/algorithms.md": [
            *(over_runs("shapes_algorithms_best", "val_loss", ".3f", slice(point, None, 3)) for point in range(3)),
            *(over_runs(f"shapes_{name}", *of) for name in ("algorithms_min_snr", "ten_seeds") for of in SCORES),
        ],
        "README.md": [f"after {demo['images_to_target']:,} images: {minutes_of(demo['seconds_to_target_with_eval'])}"],
    }
    assert [text for page, of_page in texts.items() for text in of_page if text not in flat(page)] == []


def test_the_readme_is_short():
    assert len(PAGES["README.md"].split()) <= 800


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
def test_a_page_has_short_sentences_and_cells_and_whole_tables(page):
    text = PAGES[page]
    assert [sentence for sentence in sentences(text) if len(sentence.split()) > 30] == []
    rows = text.splitlines()
    heads = [n for n, row in enumerate(rows) if row.startswith("|") and not rows[n - 1].startswith("|")]
    assert [rows[n] for n in heads if not re.match(r"\|[ :-]*-", rows[n + 1])] == []  # an empty line cuts a table
    of_tables = [line for line in BLOCK.sub("", text).splitlines() if line.startswith("|")]
    cells = [cell for row in of_tables for cell in re.split(r"(?<!\\)\|", row)]
    assert [cell for cell in cells if len(cell.split()) > 25] == []


def test_a_long_sentence_is_seen():
    text = f"Short. A {'word ' * 30}end.\n\n| {'word ' * 40} |\n\n```bash\n{'word ' * 40}\n```\n- {'word ' * 30}"
    assert [len(sentence.split()) for sentence in sentences(text)] == [1, 32, 30]


def test_the_map_is_the_tree_and_its_floors_are_those_of_the_layout():
    """Every folder with code and every file at the root, each once, on its floor."""
    [tree] = [block for page, block in blocks("text") if page == "docs/structure.md" and block.startswith("floor ")]
    named = {}
    for part in re.split(r"^(?=floor )", tree.split("\n\n")[0], flags=re.M)[1:]:
        for room in re.findall(r"^(?:floor \d+)? +([\w.]+/|\w+\.py) ", part, re.M):
            assert room not in named
            named[room] = int(part.split()[1])
    there = {part[0] + ("/" if len(part) > 1 else "") for part in (path.relative_to(ROOT).parts for path in sources())}
    floors = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
    assert named == {room: floors[room.removesuffix("/").removesuffix(".py")] for room in there}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_key_says_in_a_few_words_what_it_is(schema):
    texts = {key.name: key.text for key in keys_of(schema) if isinstance(key, Key)}
    assert {name for name in texts if "[]" not in name} == {
        key for key in schema_keys(schema) if not any(other.startswith(f"{key}.") for other in schema_keys(schema))
    }
    assert [name for name, text in texts.items() if not text.endswith(".")] == []
    assert [name for name, text in texts.items() if len(text.split()) > 25] == []
