"""bench/check.py: its rule against drawn cases, both codes as they are laid out, its messages, and a planted slowdown."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import warm
from conftest import ROOT, run, started, tree
from filelock import FileLock

from bench import check, check_code, check_turns, contest
from cli.errors import ConfigError, Refused
from cli.files import cache_folder
from record import processes

SCATTER = 0.03
CASES = 10_000


# --- the rule ---


def called(verdict: str, *, rounds: int, shift: float) -> int:
    """How many of CASES pairs get a verdict. The turns of both codes scatter alike; the second costs `shift` times more."""
    draw = random.Random(17)

    def turns(cost: float) -> list[float]:
        return [cost * math.exp(draw.gauss(0, SCATTER)) for _ in range(rounds)]

    return sum(contest.compared(turns(1.0), turns(shift)).verdict == verdict for _ in range(CASES))


def test_equal_codes_are_rarely_called_slower_and_a_fifth_is_found_as_the_page_says():
    by_chance = {rounds: called("more", rounds=rounds, shift=1.0) for rounds in (3, 5)}
    found = called("more", rounds=5, shift=1.2)
    assert by_chance[3] < 0.05 * CASES and by_chance[5] < 0.005 * CASES and found > 0.99 * CASES
    assert called("less", rounds=5, shift=1 / 1.2) > 0.99 * CASES
    page = " ".join((ROOT / "docs/benchmarks.md").read_text().split())
    assert (
        f"of {CASES:,} equal codes {by_chance[5]} are called slower after 5 rounds, and {by_chance[3]} after 3" in page
    )
    assert f"Of {CASES:,} that are slower by 20 %, {found:,} are found after 5 rounds" in page


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([1.0, 1.0, 1.0], [1.3, 1.3, 1.3], "more"),
        ([1.3, 1.3, 1.3], [1.0, 1.0, 1.0], "less"),
        ([1.0, 1.0, 1.0], [1.3, 0.9, 1.3], "same"),  # one round says otherwise
        ([1.0, 1.4, 1.0], [1.2, 1.6, 1.2], "same"),  # by itself it changes by 1.4
        ([1.0, 1.0, 1.0], [1.01, 1.01, 1.01], "same"),  # nobody would act on it
        ([1.0, 2.0, 4.0], [1.0, 2.0, 4.0], "same"),
    ],
)
def test_a_verdict_needs_every_round_and_more_than_one_code_does_by_itself(before, after, verdict):
    assert contest.compared(before, after).verdict == verdict


def test_what_is_compared_is_the_ratio_of_each_round_and_the_largest_step_of_one_code():
    found = contest.compared([1.0, 2.0, 4.0], [1.5, 2.0, 8.0])
    assert (found.ratio, found.least, found.greatest, found.step) == (1.5, 1.0, 2.0, 4.0)


def test_a_speed_is_the_worse_the_less_it_is_and_little_memory_counts_as_none():
    speed, memory = check_turns.FIGURES["moments"][0], check_turns.FIGURES["ema"][1]
    assert speed.cost({"moments_samples_per_sec": 200.0}) == 1 / 200
    assert [memory.cost({"ema_temporary_mib": value}) for value in (0.0, 0.5, 38.0)] == [1.0, 1.0, 38.0]
    found = contest.compared([1.0, 1.0], [38.0, 38.0])
    assert (speed.verdict(found), memory.verdict(found)) == ("slower", "more memory")


# --- the codes ---


def git(root: Path, *words: str) -> str:
    own = ["-c", "user.name=a", "-c", "user.email=a@example.invalid", "-c", "protocol.file.allow=always"]
    command = ["git", *own, "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def micro_record(commit: str | None, **figures: float) -> str:
    return json.dumps({"commit": commit, "date": "2026-01-01", "device": "a", "config": {"parts": "ema"}, **figures})


@pytest.fixture
def history(tmp_path) -> Path:
    """A repository of two commits, whose records name the first."""
    root = tmp_path / "root"
    (root / "bench").mkdir(parents=True)
    (root / "reports/results").mkdir(parents=True)
    git(tmp_path, "init", "-q", str(root))
    (root / "bench/micro.py").write_text("AGE = 'old'\n")
    (root / "removed.py").write_text("")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "old")
    old = git(root, "rev-parse", "HEAD")
    (root / "bench/micro.py").write_text("AGE = 'new'\n")
    (root / ".gitignore").write_text("/runs/\n__pycache__/\n")
    (root / "reports/results/micro.json").write_text(micro_record(old, ema_ms=20.0))
    (root / "reports/results/start.json").write_text(micro_record(old, first_step_sec=9.0))
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "new")
    return root


def config_of(**keys) -> check.CheckConfig:
    return check.CheckConfig(**{"parts": "ema", "rungs": "none", **keys})


def test_the_code_of_a_commit_is_laid_out_and_the_repository_stays_as_it_is(history, tmp_path):
    [task] = check.plan(config_of(), history)
    (history / "bench/micro.py").write_text("AGE = 'today'\n")
    before = {name: content for name, content in tree(history / ".git").items() if not name.startswith("objects/")}
    check_code.write_commit(history, task.code, tmp_path / "then")
    files = {name: content for name, content in tree(tmp_path / "then").items() if "__pycache__" not in name}
    assert files == {"bench/micro.py": b"AGE = 'old'\n", "removed.py": b""}
    after = {name: content for name, content in tree(history / ".git").items() if not name.startswith("objects/")}
    assert after == before and (history / "bench/micro.py").read_text() == "AGE = 'today'\n"


def test_todays_code_is_the_tree_with_what_is_not_committed_and_without_what_git_ignores(history, tmp_path):
    (history / "removed.py").unlink()
    (history / "added.py").write_text("")
    (history / "bench/micro.py").write_text("AGE = 'today'\n")
    (history / "runs").mkdir()
    (history / "runs/large.pt").write_text("")
    copy = check_code.write_today(history, tmp_path / "now")
    (history / "bench/micro.py").write_text("AGE = 'tomorrow'\n")
    assert (copy / "bench/micro.py").read_text() == "AGE = 'today'\n" and (copy / "added.py").is_file()
    assert not (copy / "removed.py").exists() and not (copy / "runs").exists()


def test_a_folder_without_a_history_is_measured_where_it_is(tmp_path):
    assert check_code.write_today(tmp_path, tmp_path / "now") == tmp_path and not (tmp_path / "now").exists()


def test_code_for_which_there_is_no_room_is_told(history, tmp_path, monkeypatch):
    def full(*given, **more):
        raise OSError(28, "No space left on device", "bench/micro.py")

    monkeypatch.setattr(check_code.shutil, "copy2", full)
    with pytest.raises(Refused, match=r"^work: the code of .* No space left .* Give another folder: work=FOLDER.$"):
        check_code.write_today(history, tmp_path / "now")
    said = subprocess.CalledProcessError(128, "git", stderr="error: unable to write file a: No space left on device\n")
    monkeypatch.setattr(check_code, "git", lambda *given, **more: (_ for _ in ()).throw(said))
    with pytest.raises(Refused, match=r"^work: the code of abc cannot be written: error: unable .* work=FOLDER.$"):
        check_code.write_commit(history, "abc", tmp_path / "then")


# --- the plan ---


def test_of_a_part_the_newest_record_counts(history):
    newer = {**json.loads(micro_record("abc", ema_ms=1.0)), "date": "2026-02-01"}
    (history / "reports/results/start.json").write_text(json.dumps(newer))
    assert check.newest_with("ema", history)[0] == "reports/results/start.json"
    newer["date"] = "2025-02-01"
    (history / "reports/results/start.json").write_text(json.dumps(newer))
    assert check.newest_with("ema", history)[0] == "reports/results/micro.json"


def test_a_commit_that_is_given_takes_the_place_of_the_records_own(history):
    assert check.plan(config_of(commit="HEAD"), history)[0].code == git(history, "rev-parse", "HEAD")
    assert check.plan(config_of(), history)[0].code == git(history, "rev-parse", "HEAD~1")


def test_a_record_of_changed_code_stands_for_its_commit_and_that_is_said(history, capsys):
    old = git(history, "rev-parse", "HEAD~1")
    (history / "reports/results/micro.json").write_text(micro_record(f"{old}+changes", ema_ms=20.0))
    assert check.plan(config_of(), history)[0].code == old
    given = f"check: reports/results/micro.json: it is of {old}+changes"
    assert capsys.readouterr().err == f"{given}; what was not committed is in no history and is left out.\n"


NO_ONE = "f" * 40
ANEW = "python -m bench.micro parts=ema results=reports/results/micro.json"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            micro_record(NO_ONE, ema_ms=1.0),
            f"reports/results/micro.json: commit {NO_ONE} is not in this clone. Fetch it: git fetch origin {NO_ONE}. "
            "Or give a checkout of it: other=FOLDER.",
        ),
        (
            micro_record(None, ema_ms=1.0),
            f"reports/results/micro.json: it names no commit. Give one: commit=NAME; or measure it anew: {ANEW}",
        ),
        (
            micro_record("abc"),
            f"reports/results/micro.json and reports/results/start.json: no figure of the part ema. Measure it: {ANEW}",
        ),
        (
            "[]",
            "reports/results/micro.json: no record can be read: it holds a list. Restore it: git checkout -- "
            f"reports/results/micro.json; or measure: {ANEW}",
        ),
    ],
)
def test_what_is_wrong_with_a_record_is_said_before_anything_is_measured(history, content, message):
    (history / "reports/results/micro.json").write_text(content)
    with pytest.raises(ConfigError) as error:
        check.plan(config_of(), history)
    assert str(error.value) == message


def test_a_clone_whose_history_was_cut_says_how_the_commit_comes(history, tmp_path):
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{history}", str(tmp_path / "cut"))
    old = git(history, "rev-parse", "HEAD~1")
    with pytest.raises(ConfigError) as error:
        check.plan(config_of(), tmp_path / "cut")
    assert str(error.value) == (
        f"reports/results/micro.json: commit {old} is not in this clone, whose history was cut. "
        "Fetch it: git fetch --unshallow. Or give a checkout of it: other=FOLDER."
    )


def test_without_a_history_another_checkout_is_wanted(history, tmp_path):
    shutil.copytree(history, tmp_path / "copy", ignore=shutil.ignore_patterns(".git"))
    with pytest.raises(ConfigError, match=r": no history of this project \(.*\). Give a checkout .*: other=FOLDER.$"):
        check.plan(config_of(), tmp_path / "copy")
    [task] = check.plan(config_of(other=str(history)), tmp_path / "copy")
    assert task.code == str(history)


def test_a_rung_without_figures_is_refused():
    with pytest.raises(
        ConfigError, match="too_large.json: it has no figures, its status is refused. Leave out the rung"
    ):
        check.plan(check.CheckConfig(parts="none", rungs="too_large", other=str(ROOT)), ROOT)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("parts=ema,speed", "parts: unknown 'speed'. Known: ema, moments, images, checkpoint, first_step, or none."),
        ("parts=none rungs=none", "parts, rungs: none of both. Give one of them."),
        ("rounds=2", "command line: rounds is 2. Possible: 3 to 100."),
        ("other=/nowhere", "other: /nowhere is no checkout of this project. Give its folder."),
        (f"other={ROOT} commit=HEAD", "commit, other: both are given. Give one of them."),
        ("work=/nowhere", "work: no folder /nowhere. Make it, or leave it out."),
    ],
)
def test_bad_keys_are_named(words, message, capsys):
    assert check.main(words.split()) == 2
    assert capsys.readouterr().err == f"{message}\n"


def test_unknown_rungs_list_those_of_both_ladders(capsys):
    assert check.main(["rungs=onlin"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("rungs: unknown 'onlin'. Known: predecessor, online,") and "whole_channels_last" in said


def test_a_disk_without_room_is_known_before_anything_is_measured(capsys, tmp_path):
    assert check.main([f"work={tmp_path}", "parts=moments", "num_samples=1000000000"]) == 2
    assert "183105.5 GiB are needed. Give another folder" in capsys.readouterr().err


# --- turns, table and exit code ---


@pytest.fixture
def other(tmp_path) -> Path:
    """What counts as a checkout."""
    (tmp_path / "other/bench").mkdir(parents=True)
    for name in ("__init__", "micro"):
        (tmp_path / f"other/bench/{name}.py").touch()
    return tmp_path / "other"


@pytest.fixture
def call(other, tmp_path, monkeypatch):
    """Calls the command with turns that are made up: a function of (part, is_now) gives the figures, or raises."""
    monkeypatch.setattr(check, "write_today", lambda root, folder: root)

    def call(turn, *words: str) -> tuple[int, dict | None]:
        monkeypatch.setattr(check_turns, "part_turn", lambda part, keys, tree, work: turn(part, tree == ROOT))
        results = tmp_path / "check.json"
        code = check.main([f"other={other}", "rungs=none", "rounds=3", f"results={results}", *words])
        return code, json.loads(results.read_text()) if results.is_file() else None

    return call


def test_two_codes_take_turns_and_what_became_slower_is_the_exit_code(call, capsys):
    order = []

    def turn(part: str, is_now: bool) -> dict:
        order.append(f"{part} {'now' if is_now else 'then'}")
        return {"ema_ms": 30.0 if is_now else 20.0, "ema_temporary_mib": 0.0, "moments_samples_per_sec": 1000.0}

    code, record = call(turn, "parts=ema,moments")
    both = ["then", "now", "now", "then", "then", "now"]
    assert order == [*(f"ema {who}" for who in both), *(f"moments {who}" for who in both)]
    assert code == 1 and [row["verdict"] for row in record["figures"]] == ["slower", *[check_turns.SAME] * 2]
    slower = record["figures"][0]
    assert slower["then"] == [20.0] * 3 and slower["now"] == [30.0] * 3 and slower["ratio"] == 1.5
    assert len(slower["committed"]) == 3 and record["not_compared"] == {}
    printed, said = (text.splitlines() for text in capsys.readouterr())
    assert "check: EMA update, ms: 1.500 (1.500 to 1.500), slower" in said  # while others are still to come
    assert printed[-1] == "3 figures compared, worse: EMA update, ms (slower, 1.500)"
    [row] = [line for line in printed if line.startswith("EMA update, ms")]
    assert "1.500 (1.500 to 1.500)" in row and row.endswith("slower")
    assert any(line.startswith("reports/results/micro.json: ") and "torch" in line for line in printed)


def test_where_nothing_became_slower_the_code_is_0(call, capsys):
    code, record = call(lambda part, is_now: {"ema_ms": 20.0, "ema_temporary_mib": 0.0}, "parts=ema")
    assert code == 0 and capsys.readouterr().out.splitlines()[-1] == "2 figures compared, none became slower"
    assert record["config"]["rounds"] == 3 and record["load_average_before"] >= 0


def test_a_figure_of_another_size_than_the_records_is_not_shown_beside_it(call):
    same = {"ema_ms": 20.0, "ema_temporary_mib": 0.0}
    _, record = call(lambda part, is_now: same, "parts=ema", "num_parameters=100000")
    assert [row["committed"] for row in record["figures"]] == [[], []]


def broken(when: str, is_now: bool) -> None:
    if is_now == (when == "now"):
        raise check_turns.DoesNotRun("ImportError: gone")


def test_code_that_does_not_run_here_is_named_and_the_other_figures_still_come(call, capsys, other):
    def turn(part: str, is_now: bool) -> dict:
        if part == "ema":
            broken("then", is_now)
        return {"moments_samples_per_sec": 1000.0}

    code, record = call(turn, "parts=ema,moments")
    assert code == 0 and [row["task"] for row in record["figures"]] == ["moments"]
    said = record["not_compared"]["ema"]
    assert said.startswith(
        f"the code of {other} does not run here: ImportError: gone. Measure the record anew: python -m "
    )
    assert f"check: ema: {said}" in capsys.readouterr().err.splitlines()


def test_todays_code_that_does_not_run_is_worse(call, capsys):
    code, record = call(lambda part, is_now: broken("now", is_now) or {"ema_ms": 20.0}, "parts=ema")
    assert code == 1 and record["not_compared"] == {"ema": "today's code does not run: ImportError: gone"}


def test_a_check_that_compared_nothing_says_so(call, capsys):
    code, record = call(lambda part, is_now: broken("then", is_now), "parts=ema")
    assert code == 2 and record["figures"] == []
    assert (
        capsys.readouterr().err.splitlines()[-1] == "check: nothing was compared. What stood in the way is said above."
    )


def test_another_job_is_not_compared(call):
    turn = {"ema_ms": 20.0, "ema_temporary_mib": 0.0}
    code, record = call(lambda part, is_now: {**turn, "ema_num_parameters": 1 + is_now}, "parts=ema")
    assert code == 2 and record["not_compared"]["ema"].startswith("it is another job: ema_num_parameters was 1, is 2. ")


def test_figures_that_only_one_code_prints_are_left_out(call):
    def turn(part: str, is_now: bool) -> dict:
        return {"checkpoint_write_sec": 1.0, **({"checkpoint_find_sec": 1.0} if is_now else {})}

    code, record = call(turn, "parts=checkpoint")
    assert code == 0 and [row["key"] for row in record["figures"]] == ["checkpoint_write_sec"]


def test_a_second_check_is_refused_while_one_measures(call, capsys):
    cache_folder().mkdir(parents=True, exist_ok=True)
    with FileLock(cache_folder() / "bench_check.lock"):
        code, record = call(lambda part, is_now: pytest.fail("measured"), "parts=ema")
    assert (code, record) == (2, None)
    said = "check: another one measures on this machine. Wait for it: each would slow the other down."
    assert capsys.readouterr().err.splitlines()[-1] == said


def test_a_rung_is_run_by_each_checkout_as_its_own_ladder_has_it(tmp_path, monkeypatch):
    ladder = tmp_path / "yamls/ladders/x.yaml"
    ladder.parent.mkdir(parents=True)
    ladder.write_text("{rungs: [{name: a, yaml: y.yaml, keys: [seed=2]}], limit_sec: 1, budget_sec: 1}")
    seen = []
    monkeypatch.setattr(
        processes, "run", lambda command, limit, tree: (seen.append((command, tree)), (1, "x\nbad key\n"))[1]
    )
    with pytest.raises(check_turns.DoesNotRun, match="^failed: bad key$"):
        check_turns.rung_turn("x", "a", tmp_path, tmp_path)
    [(command, where)] = seen
    assert where == tmp_path and command[5:8] == ["benchmark.py", "y.yaml", "seed=2"]
    with pytest.raises(check_turns.DoesNotRun, match="^its yamls/ladders/x.yaml has no rung 'b'$"):
        check_turns.rung_turn("x", "b", tmp_path, tmp_path)
    with pytest.raises(check_turns.DoesNotRun, match="nowhere.yaml: no such file"):
        check_turns.rung_turn("nowhere", "b", tmp_path, tmp_path)


def test_a_part_that_fails_leaves_its_last_words(other, tmp_path):
    (other / "bench/micro.py").write_text("import sys; sys.exit('micro: no such key')\n")
    with pytest.raises(check_turns.DoesNotRun, match="^micro: no such key$"):
        check_turns.part_turn("ema", [], other, tmp_path)
    assert list(tmp_path.iterdir()) == [other]


def test_make_bench_check_runs_it_on_the_processor():
    done = run("make", "-n", "--no-print-directory", "bench-check", "VENV=/v", "KEYS=rounds=3", MAKEFLAGS="")
    assert done.stdout.splitlines()[-1] == "CUDA_VISIBLE_DEVICES= /v/bin/python -m bench.check rounds=3"


# --- for real ---


@pytest.mark.slow
@pytest.mark.timeout(120, func_only=True)
@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM"])
def test_an_interrupted_check_leaves_nothing_behind(other, tmp_path, sent):
    pid_file, work, results = tmp_path / "pid", tmp_path / "work", tmp_path / "check.json"
    work.mkdir()
    code = f"import os, time, pathlib; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(100)"
    (other / "bench/micro.py").write_text(code)
    words = [f"other={other}", "parts=ema", "rungs=none", f"work={work}", f"results={results}"]
    with started("python", "-m", "bench.check", *words, output=subprocess.PIPE) as process:
        until = time.monotonic() + 90
        while not (pid_file.is_file() and pid_file.read_text()) and time.monotonic() < until:
            time.sleep(0.1)
        child = int(pid_file.read_text())
        assert [path.name for path in work.iterdir()] != []
        process.send_signal(getattr(signal, sent))
        said = process.communicate(timeout=60)[1]
    assert process.returncode == {"SIGINT": 130, "SIGTERM": 143}[sent]
    assert said.endswith("check: interrupted. Nothing is left of it, and no record was written.\n")
    assert list(work.iterdir()) == [] and not results.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


@pytest.mark.slow
@pytest.mark.timeout(300, func_only=True)
def test_a_planted_slowdown_is_found_and_the_same_one_in_both_codes_is_not(tmp_path, monkeypatch, capsys):
    """Each turn is a process of its own checkout, and starts warm. A sleep is the same on a busy machine."""
    plain, slow = (check_code.write_today(ROOT, tmp_path / name) for name in ("plain", "slow"))
    source = (slow / "ema.py").read_text()
    begin = "    def _step(self, num_images: int) -> None:\n"
    assert source.count(begin) == 1
    (slow / "ema.py").write_text(source.replace(begin, f"{begin}        import time\n        time.sleep(0.05)\n"))
    start = SimpleNamespace(**vars(subprocess))
    start.Popen = warm.Process
    monkeypatch.setattr(processes, "subprocess", start)
    monkeypatch.setattr(check, "ROOT", slow)
    words = ["parts=ema", "rungs=none", "rounds=3", "num_parameters=100000", f"work={tmp_path}"]
    found = {}
    for name, earlier in {"found": plain, "not": slow}.items():
        results = tmp_path / f"{name}.json"
        found[name] = check.main([f"other={earlier}", f"results={results}", *words]), json.loads(results.read_text())
    said = capsys.readouterr()
    verdicts = {name: [row["verdict"] for row in record["figures"]] for name, (_, record) in found.items()}
    assert verdicts == {"found": ["slower", check_turns.SAME], "not": [check_turns.SAME] * 2}, said
    assert {name: code for name, (code, _) in found.items()} == {"found": 1, "not": 0}
    [row, _] = found["found"][1]["figures"]
    assert all(ms > 50 for ms in row["now"]) and row["ratio"] > 1.2
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("check-")]
