"""The map: who may import whom, names that would hide a library, one ComposerModel, sizes of files and functions."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conftest import ROOT

import families

FLOORS = [
    {"common"},
    {"config", "ranks"},
    {"mds", "weights"},
    {"families", "run_folder", "ema"},
    {"model", "data", "checkpointing"},
    {"callbacks", "algorithms", "reports"},
    {"evaluation"},
    {"training"},
    {"scaling", "export"},
    {"preflight"},
    {"prepare", "bench", "sweeps", "launch"},
    {"benchmark", "eval", "sweep"},
]
"""Rooms by floor, the lowest first. Tests may import everything."""

ITS_PARTS = {"sweep": "sweeps"}
"""File at the root -> the folder of its parts, which is one room with it."""

ROOT_FILES = {"benchmark", "eval", "sweep", "export", "config", "data", "model", "ema"}
FORBIDDEN_FOLDERS = {"runs", "checkpoints", "datasets", "samples", "cache", "wandb"}
"""Folders of people's own, which a checkout must not bring."""
FAMILIES = {path.stem for path in (ROOT / "families").glob("*.py")} & set(families.FAMILIES) | {"shapes"}


READS_RUN_CONFIG = {"benchmark.py", "training/config.py", "training/builders.py"}
READS_RUN_CONFIG_ROOMS = {"preflight", "sweeps", "scaling"}
MAX_RUN_CONFIG_FUNCTIONS = 40
"""Functions that take the whole configuration. All others take their section, or plain values."""

NARRATIVES, NARRATIVE_LINES = {"benchmark.py:train"}, 90
"""Functions that tell a whole run in the order in which it happens, in paragraphs with headings."""


def tracked(pattern: str) -> list[Path]:
    """Files of the project, new ones that git does not ignore included."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", pattern]
    names = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def sources() -> list[Path]:
    return [path for path in tracked("*.py") if "tests" not in path.relative_to(ROOT).parts]


def nodes(kind: type[ast.AST]) -> Iterator[tuple[Path, Any]]:
    """Yield each node of this kind in the sources, with its file."""
    for path in sources():
        yield from ((path, node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kind))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def floor_of(module: str) -> int | None:
    """The floor of the room that a module lies in; None: it is no module of the project."""
    room = module.split(".")[0]
    return next((floor for floor, rooms in enumerate(FLOORS) if room in rooms), None)


def imports_of(path: Path) -> set[str]:
    """Modules that a file imports when it runs; those for type checkers alone are left out."""
    tree, found = ast.parse(path.read_text()), set()
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    typing_only = {node for block in blocks for node in ast.walk(block)}
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def violations(path: Path) -> list[str]:
    """Imports of a file that do not go down: up, to a room beside it, to another callback or to another family."""
    module = module_of(path)
    room, floor, found = module.split(".")[0], floor_of(module), []
    for imported in imports_of(path) - {module}:
        target = floor_of(imported)
        if target is None:
            continue
        inside = imported.split(".")[0] in (room, ITS_PARTS.get(room))
        family, other = (set(name.split(".")[1:2]) & FAMILIES for name in (module, imported))
        apart = room in ("callbacks", "algorithms") or (room == "families" and family and other and family != other)
        if (inside and apart and "." in imported) or (not inside and target >= floor):
            found.append(f"{module} (floor {floor}) imports {imported} (floor {target})")
    return found


def circles() -> list[list[str]]:
    """Files that import each other, one way or round about; each circle once."""
    known = {module_of(path): path for path in sources()}
    arrows = {name: {found for found in imports_of(path) if found in known} - {name} for name, path in known.items()}
    order: list[str] = []
    while free := [name for name, targets in arrows.items() if name not in order and targets <= set(order)]:
        order += free
    return [sorted(set(arrows) - set(order))] if len(order) < len(arrows) else []


def test_every_source_file_has_a_room_on_the_map():
    assert [module for module in map(module_of, sources()) if floor_of(module) is None] == []
    assert {path.stem for path in sources() if path.parent == ROOT} <= ROOT_FILES


def test_imports_go_down_and_not_in_circles():
    assert [text for path in sources() for text in violations(path)] == []
    assert circles() == []


def test_the_import_rule_sees_a_breach(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    for file, line in (
        ("model.py", "import data"),
        ("families/sd2.py", "from families.flux import x"),
        ("mds/reader.py", "from model import y"),
        ("config.py", "import benchmark"),
        ("callbacks/throughput.py", "from callbacks import run_record"),
    ):
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(line + "\n")
        assert violations(path), file


def test_no_folder_or_module_hides_a_library():
    folders = {path.relative_to(ROOT).parts[0] for path in tracked("*") if len(path.relative_to(ROOT).parts) > 1}
    assert not folders & FORBIDDEN_FOLDERS
    names = {name for name in folders if (ROOT / name / "__init__.py").is_file()} | ROOT_FILES
    assert not names & set(sys.stdlib_module_names)
    beside = [place for place in sys.path if "site-packages" in place]
    installed = [name for name in names if any(list(Path(place).glob(f"{name}/__init__.py")) for place in beside)]
    assert installed == []


def test_there_is_one_composer_model():
    found = [
        f"{module_of(path)}.{node.name}"
        for path, node in nodes(ast.ClassDef)
        if any(ast.unparse(base).endswith("ComposerModel") for base in node.bases)
    ]
    assert found == ["model.LatentDiffusion"]


def test_files_and_functions_stay_short():
    long = [f"{path.name}: {count} lines" for path in sources() if (count := len(path.read_text().splitlines())) > 700]
    for path, node in nodes(ast.FunctionDef):
        count = node.end_lineno - node.lineno + 1
        limit = NARRATIVE_LINES if f"{path.name}:{node.name}" in NARRATIVES else 60
        long += [f"{path.name}:{node.lineno} {node.name}: {count} lines"] if count > limit else []
    assert long == []


def test_the_whole_configuration_reaches_builders_only():
    taking = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path, node in nodes(ast.FunctionDef)
        for arguments in [[*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
        if any(each.annotation and re.search(r"\bRunConfig\b", ast.unparse(each.annotation)) for each in arguments)
    ]
    elsewhere = [where for where in taking if where.partition(":")[0] not in READS_RUN_CONFIG]
    elsewhere = [where for where in elsewhere if where.partition("/")[0] not in READS_RUN_CONFIG_ROOMS]
    assert elsewhere == [] and 0 < len(taking) <= MAX_RUN_CONFIG_FUNCTIONS, len(taking)


def test_nothing_heavy_is_imported_by_the_lowest_floor():
    """config, families.spec and families.objectives need torch at most: a missing library hurts only the run that uses it."""
    heavy = "sorted({'composer', 'diffusers', 'transformers', 'streaming', 'open_clip'} & set(sys.modules))"
    code = f"import sys, config, families.spec, families.objectives; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
