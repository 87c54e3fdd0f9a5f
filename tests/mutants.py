"""Faults of the core, one at a time: each has to fail a fast test of its own room. By hand, half an hour.

    python -m tests.mutants list                           each anchor is found once; runs nothing
    python -m tests.mutants base                           the tree as it is passes the test files of every mutant
    python -m tests.mutants pass=before                    all mutants; the record is written after each
    python -m tests.mutants pass=after numbers=1,5 record=none limit=300

A mutant is a copy of the tracked files with one text replaced. Its test files run there with -x, without the slow ones, for
limit=120 seconds at most (give more on a busy machine). The outcome is `killed` by a test, `survived`, or `timed out`, which
is no kill. Exit code: 0, 1 where a mutant was not killed (base: where a test failed), 2 where the words or an anchor are
wrong.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = "reports/results/mutants.json"
LIMIT_SEC = 120
END_SEC = 20  # for tests that were interrupted to end their own processes

# Number | file | test files of its room, without test_ | what is wrong; a text that stands in the file once; the new one.
TABLE = """
1 | families/objectives.py | objectives | forward process: sign of the noise
- signal * latents + sigma * noise
+ signal * latents - sigma * noise
2 | families/objectives.py | objectives | times are drawn from 1 on
- torch.randint(0, len(
+ torch.randint(1, len(
3 | families/spec.py | sd2 model | posterior: variance for standard deviation
- torch.exp(0.5 * logvar
+ torch.exp(logvar
4 | families/spec.py | families model | latents: height and width exchanged
- (self.latent_channels, height // self.pixels_per_latent, width // self.pixels_per_latent)
+ (self.latent_channels, width // self.pixels_per_latent, height // self.pixels_per_latent)
5 | model.py | model | caption dropout at one and a half times its rate
- < self.caption_dropout
+ < 1.5 * self.caption_dropout
6 | model.py | model | every rank draws the same random numbers
- {seed} {batch_index} {rank}"
+ {seed} {batch_index} 0"
7 | model.py | model objectives | loss: the samples' weights are left out
- outputs["weight"] * of_samples
+ of_samples
8 | ema.py | ema | EMA: exponent of the power function one too small
- ** (self._gamma + 1.0)
+ ** self._gamma
9 | ema.py | ema | EMA: a step that the scaler skipped is averaged
- if self._skipped:
+ if False:
10 | training/optimizer.py | optimizer | warm-up one batch early
- * batch / warmup_batches
+ * (batch + 1) / warmup_batches
11 | callbacks/throughput.py | throughput | images_per_sec over all clocks
- "images_per_sec": images / clocks["train"]
+ "images_per_sec": images / sum(seconds)
12 | families/sampling.py | sampling generate | guidance: sign
- return unconditional + guidance
+ return unconditional - guidance
13 | model.py | generate | guidance: conditional rows first
- torch.cat([empty[name], states])
+ torch.cat([states, empty[name]])
14 | evaluation/fid.py | fid | FID: biased covariance
- .T) / (n - 1)
+ .T) / n
15 | families/sampling.py | sampling scorer | the last prompt is no rank's
- return range(rank, num, world_size)
+ return range(rank, num - 1, world_size)
16 | evaluation/clip_score.py | clip_score | CLIP score: sum over the batch instead of the features
- text.double()).sum(dim=1)
+ text.double()).sum(dim=0)
17 | evaluation/metrics.py | metrics | FID: what only fills the batch is measured
- self.features.update(self.extractor(images)[:num], numbers)
+ self.features.update(self.extractor(images)[-num:], numbers)
18 | evaluation/scorer.py | scorer | a partial score meets the target
- if not self.is_of_scores or line["partial"]:
+ if not self.is_of_scores:
19 | evaluation/scorer.py | interrupted_evaluation scorer | an evaluation that goes on leaves out a batch
- num_done=progress.num_done
+ num_done=progress.num_done + 1
20 | callbacks/periodic.py | scorer | evaluation time is added to that of training twice
- self._owed_sec = time.monotonic() - began
+ self._owed_sec = began - time.monotonic()
21 | checkpointing/files.py | checkpoints | a damaged checkpoint counts as whole
- return None if is_as_named else
+ return None if True else
22 | checkpointing/callback.py | checkpoints | a checkpoint is due one image late
- now // every > before // every
+ (now - 1) // every > before // every
23 | checkpointing/callback.py | checkpoints | one full checkpoint fewer is kept
- [self.config.keep :]
+ [self.config.keep - 1 :]
24 | checkpointing/content.py | checkpoints | the optimizer's parameters are not compared
- if saved["names"] != _optimizer_names(model, optimizer):
+ if False:
25 | checkpointing/content.py | checkpoints | a checkpoint at an epoch's end stays in that epoch
- now = now.to_next_epoch()
+ pass
26 | checkpointing/content.py | checkpoints | what a checkpoint lacks is not compared
- if saved.get(key) != value and not
+ if saved.get(key, value) != value and not
27 | ema.py | ema | EMA: steps since the last update are lost in a checkpoint
- self._pending_steps, self._pending_images = state["pending_steps"], state["pending_images"]
+ self._pending_steps, self._pending_images = 0, 0
28 | mds/reader.py | reader | an epoch ends one batch early
- order[: len(order) // self.batch_size * self.batch_size]
+ order[: (len(order) // self.batch_size - 1) * self.batch_size]
29 | mds/moments.py | reader data | an infinity among the moments counts as finite
- .max() < 0x7C00 and
+ .max() <= 0x7C00 and
30 | mds/reader.py | reader data | the sample behind the wanted one is read
- (int(offset) + step) % shard_samples
+ (int(offset) + step + 1) % shard_samples
31 | mds/cache.py | cache_space | room in the cache is made without the wanted shard
- while self.limit and usage + needed > self.limit:
+ while self.limit and usage > self.limit:
32 | mds/fetch.py | reader | digests are not compared
- (digest := file_digest(path, expected[0])) != expected[1]
+ (digest := file_digest(path, expected[0])) == ""
33 | mds/loader.py | data reader | a resume begins at as many samples as there were batches
- self.dataset.resume(epoch, batch_in_epoch * global_batch_size)
+ self.dataset.resume(epoch, batch_in_epoch)
34 | mds/dataset.py | dataset | index.json is not compared with dataset.json
- if metadata.get("schema") == METADATA_SCHEMA and of_index != index.sha256:
+ if False:
35 | run_folder/mlperf_log.py | mlperf_log | times of the log run backwards
- time_ms = self._last_ms = max(time_ms, self._last_ms)
+ self._last_ms = time_ms
36 | callbacks/mlperf_log.py | mlperf_log | an evaluation comes twice after a restart at its point
- if count <= images}
+ if count < images}
37 | callbacks/mlperf_log.py | mlperf_log | the learning rate is the next batch's
- self.log.event("lr_abs", self._lr,
+ self.log.event("lr_abs", state.optimizers[0].param_groups[0]["lr"],
38 | callbacks/mlperf_log.py | mlperf_log | a log that was closed is not moved to an earlier pass
- reached["images"] < stop["samples_count"]
+ reached["images"] > stop["samples_count"]
39 | reports/mlperf.py | reports_mlperf | olympic mean with the best run in it
- sorted(values)[1 : len(values)
+ sorted(values)[0 : len(values)
"""


@dataclass(frozen=True)
class Mutant:
    """One fault of the table."""

    number: int
    file: str
    tests: tuple[str, ...]
    what: str
    old: str
    new: str

    def problems(self) -> list[str]:
        """Say why it cannot be made; nothing where it can be."""
        path = ROOT / self.file
        count = path.read_text().count(self.old) if path.is_file() else 0
        found = [] if count == 1 else [f"mutant {self.number}: {self.file} has '{self.old}' {count} times, not once."]
        return found + [
            f"mutant {self.number}: there is no {name}." for name in self.tests if not (ROOT / name).is_file()
        ]


def read_table(table: str = TABLE) -> list[Mutant]:
    """Return the mutants of the table."""
    found = []
    lines = table.strip().splitlines()
    for head, old, new in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        number, file, tests, what = head.split(" | ")
        assert old.startswith("- ") and new.startswith("+ "), head
        names = tuple(f"tests/test_{name}.py" for name in tests.split())
        found.append(Mutant(int(number), file, names, what, old[2:], new[2:]))
    return found


def main(argv: Sequence[str]) -> int:
    """Do what the words ask for; returns the exit code."""
    modes = [word for word in argv if "=" not in word]
    given = dict(word.split("=", 1) for word in argv if "=" in word)
    mutants = read_table()
    numbers = given.get("numbers", ",".join(str(mutant.number) for mutant in mutants)).split(",")
    wanted = [mutant for mutant in mutants if str(mutant.number) in numbers]
    passes = [given[key] for key in given if key == "pass"]
    others = given.keys() - {"numbers", "record", "pass", "limit"}
    if others or (modes, passes) not in ((["list"], []), (["base"], []), ([], ["before"]), ([], ["after"])):
        print(f"mutants: '{' '.join(argv)}' is not possible.\n\n{__doc__}", file=sys.stderr)
        return 2
    problems = [text for mutant in wanted for text in mutant.problems()]
    problems += [f"numbers: there is no mutant {n}." for n in numbers if n not in {str(m.number) for m in mutants}]
    if problems:
        print(*problems, sep="\n", file=sys.stderr)
        return 2
    if modes == ["list"]:
        print(*(f"{mutant.number:2d} {mutant.file}: {mutant.what}" for mutant in wanted), sep="\n")
        return 0
    limit_sec = int(given.get("limit", LIMIT_SEC))
    if modes == ["base"]:
        return run_base(wanted, limit_sec)
    return run_pass(wanted, limit_sec, given["pass"], given.get("record", RECORD))


def run_base(wanted: Sequence[Mutant], limit_sec: int) -> int:
    """Run each set of test files once on the tree as it is."""
    num_failed = 0
    for tests in dict.fromkeys(mutant.tests for mutant in wanted):
        outcome, by, seconds = outcome_of(None, tests, limit_sec)
        num_failed += outcome != "survived"
        text = "passed" if outcome == "survived" else f"{outcome} {by}"
        print(f"{seconds:6.1f} s {' '.join(tests)}: {text}", flush=True)
    return int(num_failed > 0)


def run_pass(wanted: Sequence[Mutant], limit_sec: int, name: str, record: str) -> int:
    """Run mutants one after another; an earlier result of the same pass and number is replaced in the record."""
    path = None if record == "none" else ROOT / record
    content = json.loads(path.read_text()) if path is not None and path.is_file() else {"schema": 1}
    lines = {line["number"]: line for line in content.get(name, {}).get("mutants", [])}
    commit = commit_of_the_tree()
    for mutant in wanted:
        outcome, by, seconds = outcome_of(mutant, mutant.tests, limit_sec)
        line = {"number": mutant.number, "file": mutant.file, "what": mutant.what, "outcome": outcome, "by": by}
        lines[mutant.number] = {**line, "seconds": round(seconds, 1), "limit_sec": limit_sec, "commit": commit}
        print(f"{mutant.number:2d} {seconds:6.1f} s {outcome} {by or ''} ({mutant.file}: {mutant.what})", flush=True)
        if path is not None:
            ordered = [lines[number] for number in sorted(lines)]
            content[name] = {"date": datetime.date.today().isoformat(), **counts(ordered), "mutants": ordered}
            path.write_text(json.dumps(content, indent=2) + "\n")
    print(json.dumps(counts([lines[mutant.number] for mutant in wanted])))
    return int(any(lines[mutant.number]["outcome"] != "killed" for mutant in wanted))


def counts(lines: Sequence[dict]) -> dict[str, object]:
    """Return how many were killed, and what was not, by number and fault."""
    by_outcome = {
        kind: [f"{line['number']}: {line['what']}" for line in lines if line["outcome"] == kind]
        for kind in ("killed", "survived", "timed out")
    }
    return {**by_outcome, "killed": len(by_outcome["killed"])}


def outcome_of(mutant: Mutant | None, tests: Sequence[str], limit_sec: int) -> tuple[str, str | None, float]:
    """Return killed, survived or timed out, by which test, and after how many seconds; mutant None: the tree as it is."""
    with tempfile.TemporaryDirectory(prefix="easel-mutant-") as place:
        tree, temporary = Path(place, "tree"), Path(place, "tmp")
        temporary.mkdir()
        for name in filter(None, git("ls-files", "-z").split("\0")):
            if (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
        if mutant is not None:
            source = (tree / mutant.file).read_text()
            (tree / mutant.file).write_text(source.replace(mutant.old, mutant.new))
        began = time.monotonic()
        code, text = run_tests(tests, tree, temporary, limit_sec)
        seconds = time.monotonic() - began
    if code in (0, None):
        return "timed out" if code is None else "survived", None, seconds
    by = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
    if by is None:
        raise RuntimeError(f"pytest ended with {code} and names no test:\n{text[-2000:]}")
    return "killed", by[1], seconds


def run_tests(tests: Sequence[str], tree: Path, temporary: Path, limit_sec: int) -> tuple[int | None, str]:
    """Return pytest's exit code, None at the limit, and what it printed."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m"]
    command = [sys.executable, "-m", "pytest", *options, "not slow and not gpu", *tests]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(temporary)}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace"}
    process = subprocess.Popen(command, cwd=tree, env=environment, start_new_session=True, **streams)
    with process, ended(process):
        try:
            text, _ = process.communicate(timeout=limit_sec)
            return process.returncode, text
        except subprocess.TimeoutExpired:
            return None, ""


@contextlib.contextmanager
def ended(process: subprocess.Popen) -> Iterator[None]:
    """Leave nothing of a process group; it is interrupted first, so that tests end what they have started themselves."""
    try:
        yield
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.communicate(timeout=END_SEC)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def commit_of_the_tree() -> str:
    """Return the commit, with +changes where tracked files differ from it, records left out."""
    changes = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!reports/results")
    return git("rev-parse", "HEAD").strip() + ("+changes" if changes else "")


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so would pytest
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that nothing is left running
    sys.exit(main(sys.argv[1:]))
