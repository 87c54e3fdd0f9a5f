"""The code of a commit, and today's, each in a folder of its own, so that files can be edited while both are measured.

Nothing is written into the repository: a commit's files come by way of an index that lies outside it. So there is nothing
to clear up there, whatever ends this process.
"""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
from pathlib import Path

from cli.errors import Refused

GIT_SEC = 300.0
CHANGES = "+changes"
"""What record.environment.commit() adds where the tree differs from its commit."""
MARK = Path("bench", "micro.py")
"""A checkout of this project has it."""


def git(root: Path, *words: str, **variables: str) -> str:
    """Return what git says. Raises OSError: there is no git; CalledProcessError: it fails."""
    command = ["git", "-C", str(root), *words]
    given = {**os.environ, **variables, "LC_ALL": "C"}
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_SEC, env=given).stdout


def why_no_git(root: Path) -> str | None:
    """Return what git says against a folder, or None where it has a history."""
    try:
        git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    except OSError as error:
        return f"git: {error.strerror}"
    except subprocess.CalledProcessError as error:
        return next(iter(error.stderr.splitlines()), "it has no commit")
    return None


def full_name(root: Path, name: str) -> str | None:
    """Return the whole name of a commit, or None where the history does not have it."""
    try:
        return git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}").strip()
    except subprocess.CalledProcessError:
        return None


def how_to_have(root: Path, name: str) -> str:
    """Say why a commit may be missing, and how it comes."""
    is_cut = git(root, "rev-parse", "--is-shallow-repository").strip() == "true"
    ways = "git fetch --unshallow" if is_cut else f"git fetch origin {name}"
    where = "this clone, whose history was cut" if is_cut else "this clone"
    return f"commit {name} is not in {where}. Fetch it: {ways}. Or give a checkout of it: other=FOLDER."


def write_commit(root: Path, name: str, folder: Path) -> Path:
    """Write the files of a commit into a folder, and return it. Raises Refused: there is no room for them."""
    index = f"{folder}.index"
    folder.mkdir(parents=True)
    try:
        git(root, "read-tree", name, GIT_INDEX_FILE=index)
        git(root, "checkout-index", "--all", "--quiet", f"--prefix={folder}/", GIT_INDEX_FILE=index)
    except subprocess.CalledProcessError as error:
        said = (error.stderr.splitlines() or [f"git ended with {error.returncode}"])[-1]
        raise Refused(
            f"work: the code of {name} cannot be written: {said}. Give another folder: work=FOLDER."
        ) from error
    _compile(folder)
    return folder


def write_today(root: Path, folder: Path) -> Path:
    """Copy the files of a checkout that git knows or would add, and return the folder; without git the checkout itself."""
    try:
        names = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    except (OSError, subprocess.CalledProcessError):
        return root
    if str(MARK) not in names:  # of a copy that lies in another project's folder
        return root
    try:
        for name in names:
            source, copy = root / name, folder / name
            if name and (source.is_file() or source.is_symlink()):  # else it was removed and not yet committed
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, copy, follow_symlinks=False)
    except OSError as error:
        said = f"the code of {root} cannot be copied: {error}"
        raise Refused(f"work: {said}. Give another folder: work=FOLDER.") from error
    _compile(folder)
    return folder


def _compile(folder: Path) -> None:
    """Compile the code, so that the first start of a fresh folder is no longer than the next."""
    compileall.compile_dir(folder, maxlevels=0, quiet=2)
    for package in sorted(folder.glob("*/__init__.py")):
        compileall.compile_dir(package.parent, quiet=2)
