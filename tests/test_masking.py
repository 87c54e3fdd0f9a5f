"""masking.py: passwords and values behind `${...}` are used, and are nowhere to be found afterwards."""

from __future__ import annotations

import gzip
import json
import re
import sys
import zipfile
import zlib
from pathlib import Path

import pytest
from conftest import run

SECRETS = {
    "password": "hunter2pw/+x",
    "token": "q8f3token77",
    "variable": "blueheron4711",
}
SHOWN = "sftp://user:***@example.invalid/laion?***"


def found_in(data: bytes, where: str) -> list[str]:
    """The secrets in some bytes, also packed, and as JSON, YAML, URLs and UTF-16 would have them."""
    hits = []
    for name, secret in SECRETS.items():
        forms = {secret, secret.replace("/", "%2F").replace("+", "%2B"), secret.replace("/", "\\/")}
        hits += [f"{name} in {where}" for form in forms if form.encode() in data or form.encode("utf-16-le") in data]
    for start in (b"\x1f\x8b", b"\x78\x9c", b"\x78\x01", b"\x78\xda"):
        for at in (found.start() for found in re.finditer(re.escape(start), data)):
            try:
                inner = (zlib.decompressobj() if start[:1] == b"\x78" else zlib.decompressobj(31)).decompress(data[at:])
            except zlib.error:
                continue
            hits += found_in(inner, f"{where} (packed)") if len(inner) > 16 and inner != data else []
    return hits


def found_under(folder: Path) -> list[str]:
    """The secrets in the names and bytes of all files of a folder, archives opened."""
    hits, num = [], 0
    for path in sorted(folder.rglob("*")):
        hits += found_in(str(path.relative_to(folder)).encode(), f"the name {path}")
        if not path.is_file():
            continue
        num += 1
        hits += found_in(path.read_bytes(), str(path))
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    hits += found_in(archive.read(name), f"{path}:{name}")
    assert num > 10
    return hits


def test_the_search_itself_finds_what_is_packed(tmp_path):
    for number in range(11):
        (tmp_path / str(number)).write_text("nothing here")
    assert found_under(tmp_path) == []
    (tmp_path / "k").write_bytes(b"some " + gzip.compress(b"a text with q8f3token77 in it"))
    with zipfile.ZipFile(tmp_path / "l", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data.pkl", b"x" * 50 + b"blueheron4711")
    assert {hit.split()[0] for hit in found_under(tmp_path)} == {"token", "variable"}


@pytest.mark.slow
@pytest.mark.budget(400)
def test_a_whole_run_and_what_it_prints_hold_no_secret(miniature, tmp_path):
    remote = f"sftp://user:{SECRETS['password']}@example.invalid/laion?token={SECRETS['token']}"
    runs, prompts = tmp_path / "runs", tmp_path / SECRETS["variable"] / "prompts.tsv"
    prompts.parent.mkdir()
    prompts.write_bytes(miniature.prompts.read_bytes())
    evaluated = ["eval.when=in_training", "eval.every_images=16", "target.clip=2.0", "eval.samples=4"]
    words = miniature.small(
        runs,
        "one",
        "data.synthetic=true",  # the address is not asked, and stands in all that is written
        f"data.remote={remote}",
        "data.local='/nowhere/${oc.env:EASEL_TEST_SECRET}'",
        *evaluated,
        f"eval.prompts='{prompts.parent.parent}/${{oc.env:EASEL_TEST_SECRET}}/prompts.tsv'",
        "loggers.wandb.project=easel",
        "loggers.wandb.mode=offline",
        "loggers.tensorboard.log_dir=null",
        "mlperf.enabled=true",
    )
    done = run(sys.executable, "benchmark.py", *words, EASEL_TEST_SECRET=SECRETS["variable"])
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert found_in((done.stdout + done.stderr).encode(), "what is printed") == []
    assert found_under(runs) == []
    names = {path.name for path in runs.rglob("*")}
    assert {"mlperf.log", "config.yaml", "wandb-metadata.json"} <= names
    metadata = json.loads(next(runs.rglob("wandb-metadata.json")).read_text())
    assert f"data.remote={SHOWN}" in metadata["args"] and "git" not in metadata
    config = (runs / "one/config.yaml").read_text()
    assert f"  remote: {SHOWN}\n  local: /nowhere/${{oc.env:EASEL_TEST_SECRET}}\n" in config
