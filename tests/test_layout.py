"""The map: who may import whom, names that would hide a library, one ComposerModel, sizes of files and functions."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

FLOORS = [
    {"masking"},
    {"limits"},
    {"command_line"},
    {
        "zoo.spec",
        "zoo.objectives",
        "zoo.sampling",
        "zoo.ldm_names",
        "zoo.clip_text",
        "zoo.shapes_world",
        "zoo.closed_pickle",
        "zoo.mlperf",
        "config",
        "tensors",
        "store_errors",
        "time_by_kind",
    },
    {"zoo.weight_files", "zoo.latent_family", "zoo.shapes_networks", "store_clients", "images"},
    {"zoo.ldm", "fetch"},
    {"stage", "shard_file"},
    {
        "stream",
        "alarm",
        "metrics",
        "prompts",
        "curves",
        "image_folder",
        "zoo",
        "encoders",
        "checkpoint_files",
        "shared_memory",
        "workers",
        "batch_wait",
        "environment",
        "run_files",
        "mlperf_events",
        "fp8",
        "copy_stream",
    },
    {"unfinished"},
    {"scoring"},
    {"model", "data", "ema", "optim", "speed", "quiet_trainer", "checkpoints", "callbacks", "loggers"},
    {"machine", "plan", "preflight", "resume", "run_config", "warm_start"},
    {"microbatch"},
    {"checks", "subjects", "quality"},
    {"benchmark", "eval", "sweep", "export", "prepare", "bench", "reports"},
]
"""Rooms by floor, the lowest first; a longer name wins (zoo.spec is not zoo)."""

FORBIDDEN_FOLDERS = {"data", "model", "eval", "ema", "datasets", "streaming", "diffusers", "composer"}


def tracked(pattern: str) -> list[Path]:
    """Files of the project, new ones that git does not ignore included."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", pattern]
    names = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def sources() -> list[Path]:
    return [path for path in tracked("*.py") if "tests" not in path.relative_to(ROOT).parts]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_and_floor(module: str) -> tuple[str, int] | None:
    """The room that a module lies in: the longest name on the map that is the module or holds it."""
    found = [
        (room, floor) for floor, rooms in enumerate(FLOORS) for room in rooms if f"{module}.".startswith(f"{room}.")
    ]
    return max(found, key=lambda pair: len(pair[0]), default=None)


def imports_of(path: Path) -> set[str]:
    """Modules that a file imports when it runs; those for type checkers alone are left out."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def violations(path: Path) -> list[str]:
    """Imports of a file that do not go down. Families (zoo/NAME.py) are rooms of their own on the zoo's floor."""
    module = module_of(path)
    own_room, own_floor = room_and_floor(module)
    found = []
    for imported in imports_of(path):
        target = room_and_floor(imported)
        if target is None:
            continue
        room, floor = target
        is_family = own_room == room == "zoo" and imported.count(".") == 1
        inside = room == own_room and not is_family and room != "callbacks"
        if floor >= own_floor and not inside and imported != module:
            found.append(f"{module} (floor {own_floor}) imports {imported} (floor {floor})")
    return found


def test_every_source_file_has_a_room_on_the_map():
    assert [module for module in map(module_of, sources()) if room_and_floor(module) is None] == []


def test_imports_go_down():
    assert [text for path in sources() for text in violations(path)] == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("model.py", "import data"),
        ("zoo/sd2.py", "from zoo.flux import x"),
        ("stream.py", "from model import y"),
        ("config.py", "import benchmark"),
        ("callbacks/throughput.py", "from callbacks import run_record"),
    ],
)
def test_the_import_rule_sees_a_breach(tmp_path, monkeypatch, file, line):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    for name in (
        "model.py",
        "data.py",
        "benchmark.py",
        "config.py",
        "zoo/sd2.py",
        "zoo/flux.py",
        "callbacks/run_record.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    path = tmp_path / file
    path.write_text(line + "\n")
    assert violations(path)


def test_no_folder_or_module_hides_a_library():
    folders = {path.relative_to(ROOT).parts[0] for path in tracked("*") if len(path.relative_to(ROOT).parts) > 1}
    assert not folders & FORBIDDEN_FOLDERS
    roots = {path.stem for path in sources() if path.parent == ROOT}
    assert not roots & set(sys.stdlib_module_names)


def test_there_is_one_composer_model():
    found = [
        f"{module_of(path)}.{node.name}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("ComposerModel") for base in node.bases)
    ]
    assert found == ["model.LatentDiffusion"]


def test_files_and_functions_stay_short():
    long = [f"{path.name}: {count} lines" for path in sources() if (count := len(path.read_text().splitlines())) > 450]
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                count = node.end_lineno - node.lineno + 1
                long += [f"{path.name}:{node.lineno} {node.name}: {count} lines"] if count > 60 else []
    assert long == []


def test_fixed_names_of_the_root_are_there():
    names = "benchmark.py data.py model.py mcloud.yaml yamls tests requirements.txt README.md Makefile LICENSE .ci/run"
    assert [name for name in names.split() if not (ROOT / name).exists()] == []


def test_nothing_heavy_is_imported_by_the_lowest_floor():
    """config, zoo.spec and zoo.objectives need torch at most: a missing library hurts only the run that uses it."""
    heavy = "sorted({'composer', 'diffusers', 'transformers', 'streaming', 'open_clip'} & set(sys.modules))"
    code = f"import sys, config, zoo.spec, zoo.objectives; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
