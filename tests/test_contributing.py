"""What contributors and users find at the root: hooks and checks, the variables that are read, the citation, the licences."""

from __future__ import annotations

import ast
import re

from conftest import ROOT
from test_layout import sources

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
