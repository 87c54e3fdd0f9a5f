"""The cost of a step, kept on disk: read again to the bit, made anew where it does not agree, traced by one of several."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY_RUN, started
from filelock import FileLock

from training import kept_cost as file_of
from training.cost import Cost
from zoo.model_config import ModelConfig
from zoo.objectives import ObjectiveConfig
from zoo.tokenizer_files import open_clip_tokenizer

COST = Cost(866 * 10**6, 430 * 10**6, 2.409e12 / 3, 0.1 + 0.2, 1.6, 0.8)
WAYS = dict(stage="moments", stored_text=False, size=(64, 64), precision="bf16", gradient_checkpointing=0.0)
TRACE = """
import sys
from pathlib import Path
from zoo.model_config import ModelConfig
from training import kept_cost as file_of
from zoo.objectives import ObjectiveConfig

def traced(*given, trace=file_of.measure_cost, **ways):
    print("traced", flush=True)
    return trace(*given, **ways)

file_of.measure_cost = traced
print("ready", flush=True)
while not Path(sys.argv[1]).exists():
    pass
ways = dict(stage="images", size=(32, 32), precision="fp32")
print(file_of.kept_cost(ModelConfig(family="shapes", preset="tiny"), ObjectiveConfig(), **ways))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "easel" / "costs"


@pytest.fixture
def traces(monkeypatch) -> list[int]:
    """One number for each trace; what is traced here is made up, see the last tests for real ones."""
    numbers: list[int] = []

    def trace(*given, **ways) -> Cost:
        numbers.append(len(numbers))
        time.sleep(0.1)
        return COST

    monkeypatch.setattr(file_of, "measure_cost", trace)
    return numbers


def ask(config: ModelConfig | None = None, objective: ObjectiveConfig | None = None, **ways) -> Cost:
    """As a process that has just begun."""
    return file_of.kept_cost.__wrapped__(config or ModelConfig(), objective or ObjectiveConfig(), **{**WAYS, **ways})


def test_a_cost_is_traced_once_and_read_again_to_the_bit(folder, traces):
    assert [ask(), ask(), ask()] == [COST] * 3 and len(traces) == 1
    (path,) = folder.glob("*.json")
    assert json.loads(path.read_text())["cost"] == dataclasses.asdict(COST)


def test_whatever_changes_a_step_has_a_cost_of_its_own(folder, traces, monkeypatch):
    ask()
    ask(ModelConfig(weights="random", denoiser="runs/other"))  # no step costs more for the values of its weights
    assert len(traces) == 1
    ask(ModelConfig(preset="tiny"))
    ask(objective=ObjectiveConfig(caption_dropout=0.5))
    others = dict(stage="images", stored_text=True, size=(64, 32), precision="fp32", gradient_checkpointing=0.5)
    for key, value in others.items():
        ask(**{key: value})
    ask(is_compiled=True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    ask()
    assert len(traces) == len(list(folder.glob("*.json"))) == 10


@pytest.mark.parametrize("change", ["torch", "a family"])
def test_another_version_traces_anew_in_the_same_file(folder, traces, monkeypatch, tmp_path, change):
    source = tmp_path / "zoo" / "sd2.py"
    source.parent.mkdir()
    source.write_text("depth = 2")
    monkeypatch.setattr(file_of, "ROOT", tmp_path)
    file_of._made_by.cache_clear()
    ask()
    if change == "torch":
        monkeypatch.setattr(file_of, "versions", lambda: {"torch_version": "9.9"})
    else:
        source.write_text("depth = 3")
    file_of._made_by.cache_clear()
    assert [ask(), ask()] == [COST] * 2 and len(traces) == 2 and len(list(folder.glob("*.json"))) == 1
    monkeypatch.undo()
    file_of._made_by.cache_clear()


def test_the_sources_that_a_trace_goes_through_are_there():
    found = [[path.name for path in file_of.ROOT.glob(pattern)] for pattern in file_of.SOURCES]
    assert all(found) and {"sd2.py", "objectives.py", "encoders.py", "wan.py"} <= set(found[-1])


@pytest.mark.slow
def test_the_sources_are_all_of_the_project_that_a_trace_runs_through():
    """By what runs: each file of ours with a frame in it while a step of a family is traced, also with an adapter."""
    code = """
import json, sys
from pathlib import Path
import model
from training.cost import measure_cost
from zoo.model_config import ModelConfig
from zoo.objectives import ObjectiveConfig
seen, root = set(), str(Path(model.__file__).parent)
sys.setprofile(lambda frame, event, arg: seen.add(frame.f_code.co_filename) if event == "call" else None)
ways = dict(stage="moments", stored_text=True, has_encoders=True, precision="bf16", gradient_checkpointing=1.0)
for name, size in (("sd2", (64, 64)), ("wan", (64, 64, 5))):
    for lora in (None, (4, ("to_k",))):
        measure_cost(ModelConfig(name, "tiny"), ObjectiveConfig(), size=size, lora=lora, **ways)
sys.setprofile(None)
print(json.dumps(sorted(str(Path(file).relative_to(root)) for file in seen if file.startswith(root))))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=file_of.ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    sources = {
        path.relative_to(file_of.ROOT).as_posix() for pattern in file_of.SOURCES for path in file_of.ROOT.glob(pattern)
    }
    run = set(json.loads(done.stdout.splitlines()[-1]))
    assert {"model.py", "zoo/wan.py", "training/cost.py"} <= run
    assert run - sources == set()


def changed(**numbers) -> str:
    """A file that is whole but for a number."""
    return json.dumps({"cost": dataclasses.asdict(COST) | numbers, "digest": "0" * 32})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"cost"',
        b"\xff\xfe\x00",
        b"[" * 4000,
        b" " * 10**6,
        b'{"cost": {}, "digest": 3}',
        changed().encode(),
        changed(flops_per_image=float("nan")).encode(),
        changed(frozen_gib=-1.0).encode(),
        changed(trained_parameters="many").encode(),
        changed(more=1).encode(),
    ],
)
def test_a_broken_file_is_made_anew(folder, traces, content):
    ask()
    (path,) = folder.glob("*.json")
    whole = path.read_bytes()
    path.write_bytes(content)
    assert ask() == COST and len(traces) == 2 and path.read_bytes() == whole
    assert sorted(each.suffix for each in folder.iterdir()) == [".json", ".lock"]


def test_a_number_changed_by_hand_and_a_file_of_another_step_are_made_anew(folder, traces):
    ask()
    (path,) = folder.glob("*.json")
    content = json.loads(path.read_text())
    content["cost"]["flops_per_image"] *= 10
    path.write_text(json.dumps(content))
    assert ask() == COST and len(traces) == 2
    ask(size=(32, 32))
    (other,) = set(folder.glob("*.json")) - {path}
    path.write_bytes(other.read_bytes())
    assert ask() == COST and len(traces) == 4


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_left_alone(folder, traces, make, capsys):
    ask()
    (path,) = folder.glob("*.json")
    path.unlink()
    make(path)
    assert [ask(), ask()] == [COST] * 2 and len(traces) == 3 and not path.is_file()
    assert capsys.readouterr().err.count("the cost of a step cannot be kept") == 2


def test_a_folder_that_cannot_be_written_is_said_and_done_without(traces, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    assert [ask(), ask()] == [COST] * 2 and len(traces) == 2
    line = (
        "cache: the cost of a step cannot be kept ([Errno 2] No such file or directory: '/proc/nothing'). Each start traces "
        "its step anew, which takes seconds. XDG_CACHE_HOME=FOLDER names another place.\n"
    )
    assert capsys.readouterr().err == line * 2


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_read(folder, traces, capsys):
    ask()
    folder.chmod(0o500)
    assert ask() == COST and len(traces) == 1
    assert ask(size=(32, 32)) == COST and len(traces) == 2
    assert "cannot be kept ([Errno 13] Permission denied" in capsys.readouterr().err


def test_a_user_without_a_home_traces_each_time(traces, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-this-name/cache")
    assert [ask(), ask()] == [COST] * 2 and len(traces) == 2


def test_of_two_that_ask_at_once_one_traces(folder, traces):
    found: list[Cost] = []
    threads = [threading.Thread(target=lambda: found.append(ask())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [COST] * 4 and len(traces) == 1


def test_a_turn_that_does_not_come_is_not_waited_for(folder, traces, monkeypatch):
    ask()
    (path,) = folder.glob("*.json")
    path.unlink()
    monkeypatch.setattr(file_of, "TURN_SEC", 0.1)
    with FileLock(path.with_suffix(".lock")):
        assert ask() == COST
    assert len(traces) == 2 and path.is_file()


@pytest.mark.slow
@pytest.mark.timeout(120, func_only=True)
def test_of_three_processes_one_traces_and_a_killed_one_holds_up_nobody(tmp_path):
    """Real traces. The one that is killed has its turn; the others get theirs at once."""
    begin, variables = tmp_path / "begin", {"XDG_CACHE_HOME": str(tmp_path)}

    def process():
        return started("python", "-c", TRACE, str(begin), output=-1, **variables)

    begin.touch()
    with process() as killed:
        assert [killed.stdout.readline() for _ in range(2)] == ["ready\n", "traced\n"]
        os.kill(killed.pid, signal.SIGSTOP)  # in the middle of it
        begin.unlink()
        with process() as one, process() as two, process() as three:
            others = (one, two, three)
            assert [each.stdout.readline() for each in others] == ["ready\n"] * 3
            begin.touch()
            time.sleep(0.5)
            assert not list(tmp_path.glob("easel/costs/*.json"))  # it is their turn afterwards
            os.kill(killed.pid, signal.SIGKILL)
            said = [each.communicate(timeout=100)[0].splitlines() for each in others]
    assert sorted(map(len, said)) == [1, 1, 2] and len({lines[-1] for lines in said}) == 1
    assert "trained_parameters=" in said[0][-1]


def test_the_tokenizer_loaded_alone_is_open_clips():
    import open_clip

    captions = ["", "a photo of a cat!", "  Zürich &amp; l'été  ", "word " * 100]
    alone = open_clip_tokenizer()
    assert alone is not open_clip.tokenizer
    assert torch.equal(alone.tokenize(captions, context_length=77), open_clip.tokenize(captions, context_length=77))


@pytest.mark.slow
@pytest.mark.timeout(120, func_only=True)
def test_a_start_loads_nothing_that_only_others_need(tmp_path):
    """What Composer itself loads is beyond us."""
    words = [*TINY_RUN, "max_duration=1ba", "measure.warmup_batches=0", "--use_synth_data", f"run_folder={tmp_path}"]
    code = f"import sys, benchmark; assert benchmark.main({words}) == 0; print(*sorted(sys.modules))"
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split())
    others = "wandb timm open_clip mlflow pandas sklearn boto3 pytorch_fid webdataset accelerate.accelerator"
    assert not loaded & set(others.split())
