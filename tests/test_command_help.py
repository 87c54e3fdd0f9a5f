"""--help, and the refusal of a command line that cannot be read: from the source, before a command's imports."""

from __future__ import annotations

import ast
import importlib
import json
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest
from conftest import ROOT
from test_layout import module_of, sources

from common.command_help import Key, keys_of, print_help, read_command
from common.static_schema import read_name
from config import schema_keys
from training.config import ALIASES

HEAVY = ("composer", "diffusers", "matplotlib", "numpy", "pandas", "pyarrow", "streaming", "torch", "transformers")
PATHS = {module_of(path): path for path in sources() if "\n@command(" in path.read_text()}
EARLY = sorted(set(PATHS) - {"common.key_reference"})
COMPARED = ["reports/results/shapes_cpu_seed18.json", "reports/results/shapes_cpu_seed19.json"]
SECTIONS = "model, lora, objective, data, optimizer, schedule, ema, save, eval, target, validation, samples, "
SECTIONS += "measure, profile, cost, health, loggers, mlperf"

CHILD = f"""
import contextlib, io, json, runpy, sys
own = set(sys.modules)
for name, *words in json.loads(sys.argv[1]):
    for module in set(sys.modules) - own:
        if sys.modules[module].__dict__.get("__file__", "").startswith({str(ROOT)!r} + "/"):
            del sys.modules[module]
    code, out = None, io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            if name.endswith(".py"):
                sys.argv = [name, *words]
                runpy.run_path(name, run_name="__main__")
            else:
                sys.argv, sys.orig_argv = ["-m", *words], ["python", "-m", name, *words]
                runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        code = stop.code
    print(json.dumps([code, out.getvalue(), [name for name in {HEAVY} if name in sys.modules]]))
"""
"""Runs commands one after the other: a process for each would take a minute."""


def call(*commands: Sequence[str]) -> tuple[list[tuple[int, str, list[str]]], str]:
    """Run commands. Returns the exit code, stdout and heavy imports of each, and stderr."""
    words = [sys.executable, "-c", CHILD, json.dumps(commands)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100)
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()], done.stderr


def address_of(module: str) -> str:
    """Return what follows `python` or `python -m`."""
    return module.removesuffix(".__main__") if "." in module else f"{module}.py"


@pytest.mark.timeout(120, func_only=True)
def test_the_help_of_a_command_imports_no_heavy_library():
    answers, errors = call(*([address_of(module), "a", "--help"] for module in EARLY))
    assert errors == ""
    for module, (code, out, heavy) in zip(EARLY, answers, strict=True):
        assert (module, code, heavy) == (module, 0, [])
        assert out.startswith(ast.get_docstring(ast.parse(PATHS[module].read_text())) + "\n")


@pytest.mark.parametrize("module", EARLY)
def test_what_is_read_from_the_source_is_what_the_module_has(module):
    static = read_command(PATHS[module]).keys
    if static is None:
        return
    schema = getattr(importlib.import_module(module), static.__name__)
    assert keys_and_sections(static) == keys_and_sections(schema)
    hints, expected = ({key: str(hint) for key, hint in schema_keys(of).items()} for of in (static, schema))
    assert hints == expected


def keys_and_sections(schema: type) -> list[tuple[str, ...]]:
    """Return all that a page says of the keys."""
    return [
        (each.name, each.owner.__name__, each.default, each.possible, each.text)
        if isinstance(each, Key)
        else (each[0], each[1].__name__)
        for each in keys_of(schema)
    ]


@pytest.mark.timeout(60, func_only=True)
def test_what_cannot_be_read_is_refused_before_the_imports_and_alone():
    words = ["optimizer.lrr=3", "seed=many", "data.workers=9999", "--resolution", "512", "learning_rate=1e-4"]
    answers, errors = call(["benchmark.py", *words], ["eval.py", "runs/x", *words])
    assert answers == [(2, "", [])] * 2
    assert errors.splitlines() == 2 * [
        "command line: unknown flag '--resolution'. Use image_size=PIXELS.",
        "command line: unknown key 'learning_rate'. Use optimizer.lr=VALUE.",
        "command line: unknown key 'optimizer.lrr'. Did you mean 'optimizer.lr'?",
        "command line: seed is 'many'. Possible: an integer.",
        "command line: data.workers is 9999. Possible: 0 to 512.",
    ]


@pytest.mark.parametrize("words", (["benchmark.py", "--help"], ["-m", "reports.compare", *COMPARED]), ids=" ".join)
def test_a_command_whose_reader_has_left_ends_quietly(words):
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as reader:
        reader.wait()
        out, errors = reader.stdin, subprocess.PIPE
        done = subprocess.run([sys.executable, *words], cwd=ROOT, stdout=out, stderr=errors, timeout=100)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_help_shows_a_section_or_a_key_and_lists_the_sections(capsys):
    def help_of(*words: str, code: int | None = 0) -> str:
        assert print_help(ROOT / "benchmark.py", [*words]) == code
        return "".join(capsys.readouterr())

    keys = [line.strip() for line in help_of("--help", "lora").splitlines() if line[2] != " "]
    of_lora = ("rank=null   (1 to 4,096, null)", "alpha=null   (above 0, null)", "targets=null   (a list, null)")
    assert keys == [f"lora.{key}" for key in of_lora]
    text = "  optimizer.lr=null   (above 0, null)\n      Learning rate after warm-up"
    assert help_of("--help", "optimizer.lr").startswith(text)
    text = f"command line: no section or key 'optimiser'. Sections: {SECTIONS}.\n"
    assert help_of("--help", "optimiser", code=2) == text
    assert help_of("max_duration=1ba", code=None) == ""


def test_the_advice_about_other_trainers_names_keys_that_exist():
    keys = set(schema_keys(read_name("training.config", "RunConfig")))
    advised = {flag: alias.advice for flag, alias in ALIASES.items() if alias.advice}
    assert not set(advised) & keys
    for flag, advice in advised.items():
        named = [word.partition("=")[0] for word in advice.replace(",", " ").split() if "=" in word]
        assert named and set(named) <= keys, flag
