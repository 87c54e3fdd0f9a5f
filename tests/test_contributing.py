"""What contributors and users find at the root: hooks and checks, the variables that are read, the citation, the licences."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from test_layout import sources

from evaluation.fid import PUBLISHED_FILE
from weights.hub_names import MIRRORS, SD2, SD15

LISTED = re.findall(r"^# ([A-Z][A-Z0-9_]+)=.*$", (ROOT / ".env.example").read_text(), re.M)
NAME = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|TMPDIR")
OF_LIBRARIES = re.compile(
    r"\b(?:AWS|HF|WANDB|COMPOSER|S3|OMP|CUDA|NCCL|GLOO|TORCH\w*|TRITON|FUZZ|SKIP|LOCAL|WORLD)_[A-Z0-9_]+\b"
)
TESTS = ("test_fuzz_config.py", "test_damaged_run_folder.py", "gpu_marks.py")
"""Those that a variable tells how much they do; others read what they have set themselves."""


def read_in(source: str) -> set[str]:
    """Return the variables that a file's text reads; where a name is computed, all names that stand in the file."""
    tree, found = ast.parse(source), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv", "os.environ.pop"):
            name = node.args[0]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            name = node.slice
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "os.environ":
            name = node.left
        else:
            continue
        if isinstance(name, ast.Constant):
            found.add(name.value)
        else:
            texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            found |= {text for text in texts if NAME.fullmatch(text)}
    return found


def read_by_the_code() -> set[str]:
    files = [*sources(), *(ROOT / "tests" / name for name in TESTS)]
    return set().union(*(read_in(path.read_text()) for path in files))


def test_every_variable_that_is_read_is_in_the_example():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "mcloud.yaml", *(ROOT / "docs").glob("*.md")]
    named = {name for page in pages for name in OF_LIBRARIES.findall(page.read_text())}
    assert sorted((read_by_the_code() | named) - set(LISTED)) == []
    assert len(LISTED) == len(set(LISTED))


@pytest.mark.parametrize(("beginning", "package"), [("AWS", "botocore"), ("HF", "huggingface_hub"), ("WANDB", "wandb")])
def test_every_variable_of_a_library_is_one_that_it_reads(beginning, package):
    folder = Path(importlib.util.find_spec(package).origin).parent
    text = "".join(path.read_text() for path in (*folder.glob("*.py"), *folder.glob("sdk/wandb_settings.py")))
    names = [name for name in LISTED if name.startswith(f"{beginning}_")]
    own = {"AWS_ENDPOINT_URL_S3"}  # botocore puts it together of AWS_ENDPOINT_URL and the service
    unknown = [name for name in names if name not in text and name.removeprefix(f"{beginning}_").lower() not in text]
    assert names and set(unknown) <= own


def test_every_other_variable_is_read_by_the_code_or_named_on_a_page():
    known = read_by_the_code() | set(re.findall(r"\w+", " ".join(p.read_text() for p in (ROOT / "docs").glob("*.md"))))
    known |= set(re.findall(r"\w+", (ROOT / "Makefile").read_text()))
    assert [name for name in LISTED if name not in known and not name.startswith(("AWS_", "HF_", "WANDB_"))] == []


def test_hooks_and_ci_run_the_same_checks():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    [repository] = config["repos"]
    hooks = {hook["id"]: hook for hook in repository["hooks"]}
    assert repository["repo"] == "local" and all(hook["language"] == "system" for hook in hooks.values())
    assert all(hook["entry"] == f"make --no-print-directory -s {name}" for name, hook in hooks.items())
    makefile = (ROOT / "Makefile").read_text()
    [lints] = re.findall(r"^LINTS := (.*)$", makefile, re.M)
    before_commit = {name for name, hook in hooks.items() if hook.get("stages", ["pre-commit"]) == ["pre-commit"]}
    assert before_commit == {"test-quick", *(f"lint-{lint}" for lint in lints.split())}
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    assert hooks.keys() <= targets
    assert (hooks["audit"]["stages"], hooks["test"]["stages"]) == (["manual"], ["pre-push"])
    assert re.search(r"^test: .*\blint\b", makefile, re.M) and "make test\n" in (ROOT / ".ci" / "run").read_text()


def test_the_page_of_licenses_names_all_that_is_fetched_by_default():
    page = (ROOT / "docs" / "licenses.md").read_text()
    wanted = [SD2, SD15, PUBLISHED_FILE, "laion/CLIP-ViT-H-14-laion2B-s32B-b79K", "LAION-400M", "COCO 2014"]
    assert [name for name in wanted if name not in page] == []
    variants = {f"{SD2.removesuffix('-base')}{rest}" for rest in ("", "-base", "-1", "-1-base")}
    assert set(MIRRORS.values()) - {SD15} == variants
