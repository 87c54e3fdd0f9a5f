"""README.md: its commands are ones that the programs understand, its tree is the tree, its figures are in a record."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess

import pytest
from conftest import ROOT

import benchmark
from bench.micro import table
from cli.command_line import parse_command_line
from config import load, schema_keys
from eval import EvalCommand
from prepare import latents
from prepare.parts import split_words
from record.summary import rounded
from tests.store.__main__ import table as table_of_faults

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```", README, re.M | re.S)
LINES = [line.split(" #")[0].strip() for block in BLOCKS for line in block.splitlines()]


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("composer ")])
def test_every_composer_command_is_understood(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(line)
    if "-m" in words:
        assert words[words.index("-m") + 1] == "prepare.latents"
        places, keys = split_words(words[words.index("-m") + 2 :])
        load(latents.LatentsConfig, parse_command_line(keys, {}), not_yet={}, check=lambda config: [])
        assert len(places) == 2
        return
    if "eval.py" in words:
        keys = [word for word in words[words.index("eval.py") + 1 :] if "=" in word]
        load(EvalCommand, parse_command_line(keys, {}), not_yet={}, check=lambda config: [])
        return
    script = words.index("benchmark.py")
    command_line = parse_command_line(words[script + 1 :], benchmark.ALIASES)
    load(benchmark.RunConfig, command_line, not_yet=benchmark.NOT_YET, check=lambda config: [])


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("for ")])
def test_each_line_for_a_result_starts_ten_runs_of_ten_seeds(line, monkeypatch):
    """As bash reads it, with the program replaced by one that shows its words."""
    monkeypatch.chdir(ROOT)
    shown = subprocess.run(
        ["bash", "-euc", f'composer() {{ printf "%s\\n" "$*"; }}; {line}'], capture_output=True, text=True, timeout=30
    )
    commands = [shlex.split(command) for command in shown.stdout.splitlines()]
    runs = []
    scored = [words[-1] for words in commands if "eval.py" in words]
    for words in (words for words in commands if "benchmark.py" in words):
        command_line = parse_command_line(words[words.index("benchmark.py") + 1 :], benchmark.ALIASES)
        runs.append(load(benchmark.RunConfig, command_line, not_yet=benchmark.NOT_YET, check=lambda config: []))
    assert len(runs) == 10 == len({run.seed for run in runs}) == len({run.run_name for run in runs})
    assert {run.model.variant for run in runs} == {"mlperf"}
    assert scored == ([f"runs/{run.run_name}" for run in runs] if runs[0].mlperf.enabled else [])


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("make ")])
def test_every_make_target_exists(line):
    target = line.split()[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)


def test_every_python_module_that_is_named_exists():
    modules = set(re.findall(r"python -m ([\w.]+)", README))
    theirs = {module for module in modules if module.startswith("mlperf_logging.")}
    ours = modules - theirs
    assert ours and all((ROOT / (module.replace(".", "/") + ".py")).is_file() for module in ours)
    assert theirs and all(importlib.util.find_spec(f"{module}.__main__") for module in theirs)


def test_every_source_file_stands_in_the_tree_and_nothing_else_does():
    from test_layout import sources

    [tree] = [block for block in BLOCKS if block.startswith("benchmark.py  ")]
    named = {line.split()[0] for line in tree.splitlines()}
    files = {str(path.relative_to(ROOT)) for path in sources() if path.name != "__init__.py"}
    assert files <= named
    for name in named - files:
        assert any(ROOT.glob(name.split("*")[0].rstrip(",") + "*")), name


def test_every_key_that_is_named_exists_and_every_section_is_named():
    keys = schema_keys(benchmark.RunConfig)
    rows = [
        row.split("|")[1] for row in README.split("## Configuration")[1].split("##")[0].splitlines() if "| `" in row[:3]
    ]
    named = set()
    for row in rows:
        for code in re.findall(r"`([^`]+)`", row):
            first, *rest = code.split()  # `section.one two three` names three keys of a section
            named |= {first, *(f"{first.rpartition('.')[0]}.{word}" for word in rest)}
    assert sorted(name for name in named if name not in keys) == []
    leaves = {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}
    assert sorted(leaves - named) == ["objective.timesteps", "optimizer.name"]  # each has one value so far


def test_the_result_line_is_that_of_the_committed_record():
    record = json.loads((ROOT / "reports/results/shapes_cpu.json").read_text())
    [line] = [block.strip() for block in BLOCKS if block.startswith("images_per_sec=")]
    shown = dict(pair.split("=") for pair in line.split())
    assert shown == {key: "none" if record[key] is None else str(rounded(record[key])) for key in shown}
    assert record["commit"] and record["device"] and (record["family"], record["target"]) == ("shapes", "reached")
    text = f"(FID {record['fid']:.1f}, CLIP score {record['clip']:.3f}, after {record['images_to_target']:,} images)"
    assert text in " ".join(README.split())


def test_the_quality_of_the_miniatures_encoders_is_that_of_their_records():
    folder = ROOT / "zoo/shapes_weights"
    reader, clip, vae = (json.loads((folder / n / "quality.json").read_text()) for n in ("reader", "clip", "vae"))
    assert set(reader["read_right"].values()) == {1.0}
    least = min(clip["told_right"], key=clip["told_right"].get)
    assert (
        f"in {100 * clip['score']:.1f} % of the cases ({least}, the least: {100 * clip['told_right'][least]:.1f} %)"
        in README
    )
    cosine, attribute = 100 * vae["kept"]["cosine"], 100 * min(vae["kept"]["read_right"].values())
    kept = f"keeps {cosine:.2f} % of the CLIP score and at least {attribute:.1f} %"
    assert kept in README.replace("\n", " ")
    log = (ROOT / "reports/results/shapes_encoders.jsonl").read_text().splitlines()
    of_vae = [line for line in map(json.loads, log) if line["stage"] == "vae" and line.get("best")]
    assert of_vae[-1]["kept"] == vae["kept"]


def spread(record: dict, key: str, digits: str) -> str:
    value, least, greatest = (format(record[f"{key}{end}"], digits) for end in ("", "_min", "_max"))
    return f"{value} ({least} to {greatest})"


@pytest.mark.parametrize(
    ("name", "key", "digits"),
    [
        ("store_speed", "download_mb_per_sec", ".0f"),
        ("store_speed", "cold_mb_per_sec", ".0f"),
        ("store_speed", "warm_mb_per_sec", ".0f"),
        ("store_speed", "arrival_over_download", ".2f"),
        ("store_speed", "verify_sec_per_gb", ".3f"),
        ("generate_speed", "speedup_vs_one_at_a_time", ".2f"),
        ("generate_speed", "speedup_vs_batched", ".2f"),
        ("fid_speed", "total_speedup", ".2f"),
        ("data_speed", "speedup_vs_webdataset_worker", ".2f"),
        ("data_speed", "speedup_vs_webdataset16_worker", ".2f"),
        ("data_speed", "speedup_vs_files_worker", ".2f"),
        ("data_speed", "paced_data_wait_frac_ours", ".4f"),
    ],
)
def test_the_speeds_of_the_other_commands_are_those_of_their_records(name, key, digits):
    record = json.loads((ROOT / f"reports/results/{name}.json").read_text())
    assert f"| {spread(record, key, digits)}" in README and record["commit"]


def test_the_table_of_faults_is_that_of_the_committed_records_and_ours_are_all_good():
    names = {"plain": "store_faults", "ours": "store_faults_ours"}
    records = {kind: json.loads((ROOT / f"reports/results/{name}.json").read_text()) for kind, name in names.items()}
    assert table_of_faults(records) in README and len(records["ours"]["faults"]) >= 20
    ours = [fault["ours"] for fault in records["ours"]["faults"].values()]
    assert all(of["good"] == sum(of["counts"].values()) >= 10 for of in ours)


def test_the_table_of_the_parts_is_that_of_the_committed_record():
    record = json.loads((ROOT / "reports/results/micro.json").read_text())
    assert table(record) in README
    assert record["commit"] and {"ema_speedup_vs_composer", "moments_speedup_vs_webdataset"} <= record.keys()
