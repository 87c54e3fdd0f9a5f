"""Classes from outside: the examples of docs/extending.md train, resume and belong to a run's identity; what is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, TINY_RUN
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_checkpoints import newest, same_training

import benchmark
import export
from common.plugins import parse_plugin

EXAMPLES = ROOT / "tests/examples"
COUNTER = """
from composer import Algorithm, Event
class Counter(Algorithm):
    def __init__(self, first=0): self.steps = first
    def match(self, event, state): return event == Event.BATCH_END
    def apply(self, event, state, logger): self.steps += 1
    def state_dict(self): return {"steps": self.steps}
    def load_state_dict(self, state): self.steps = state["steps"]
"""
ODD = """
import torch
class Odd(torch.optim.Optimizer):
    # Keeps a number, and a tensor that is not a moment.
    def __init__(self, params, lr, pull=0.01):
        super().__init__(params, {"lr": lr, "pull": pull})
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                state = self.state[weight]
                state["count"] = state.get("count", 0) + 1
                state["part"] = state.get("part", 0.0) + weight.grad.flatten()[::11]
                weight -= group["lr"] * (weight.grad + group["pull"] * state["part"].mean() / state["count"])
"""
OWN = """
import numpy
from composer import Callback
from families.objectives import DiscreteDiffusion
from families.spec import Family
class One(DiscreteDiffusion):
    def losses(self, prediction, target): return (prediction - target).square().mean()
class Odd(Callback):
    def state_dict(self): return {'a': [numpy.float64(1.0)]}
class Bare(Family):
    def __init__(self, preset, variant): pass
"""
pytestmark = pytest.mark.timeout(120, func_only=True)


def run(folder: Path, name: str, *words: str) -> int:
    own = ["data.synthetic=true", "save.every_images=16", "save.snapshot_every_images=16", "save.keep=9"]
    own += [f"run_folder={folder}", f"run_name={name}"]
    return benchmark.main([*TINY_RUN, *own, *words])


@pytest.mark.slow
def test_a_model_an_optimizer_and_an_algorithm_from_outside_train_and_resume_bit_for_bit(tmp_path, capsys):
    for name, text in {"my_dit": (EXAMPLES / "my_dit.py").read_text(), "counter": COUNTER, "odd": ODD}.items():
        (tmp_path / f"{name}.py").write_text(text)
    model, optimizer = f"model.family={tmp_path}/my_dit.py:MyDiT", f"optimizer.name={tmp_path}/odd.py:Odd(pull=0.5)"
    algorithm = f"algorithms=[{{class: '{tmp_path}/counter.py:Counter', args: {{first: 10}}}}]"
    assert run(tmp_path, "whole", model, optimizer, algorithm) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    (tmp_path / "part/summary.json").unlink()
    next((tmp_path / "part/checkpoints").glob("full-ba000000000004*")).unlink()
    capsys.readouterr()
    assert run(tmp_path, "part", model, optimizer, algorithm) == 0
    logged = capsys.readouterr().err
    assert "resumes from batch 2" in logged and "next: " not in logged  # export.py has no pipeline for it
    assert export.main([str(tmp_path / "part"), str(tmp_path / "out")]) == 2
    assert "is not exported: no pipeline of diffusers takes its parts" in capsys.readouterr().err
    one, two = newest(tmp_path, "whole"), newest(tmp_path, "part")
    assert same_training(one, two)
    for content in (one, two):  # of both starts
        assert content["callbacks"]["algorithms[0] Counter"] == {"steps": 14}

    with open(tmp_path / "counter.py", "a") as file:
        file.write("# changed\n")
    assert run(tmp_path, "part", model, optimizer, algorithm, "max_duration=6ba") == 2
    assert "algorithms[0] (digest of its file)" in capsys.readouterr().err
    assert run(tmp_path, "part", model, algorithm, "max_duration=6ba") == 2
    assert "optimizer.name: adamw, but" in capsys.readouterr().err


def test_a_loss_and_a_callback_from_outside_reach_the_loss_and_the_loggers(tmp_path, capsys):
    words = [f"objective.name={EXAMPLES}/my_loss.py:Huber(delta=0.1)", "loggers.tensorboard.log_dir=null"]
    words.append(f"callbacks=['{EXAMPLES}/my_callbacks.py:LogAttention(every=2)']")
    assert run(tmp_path, "own", *words) == 0
    assert f"next: python export.py {tmp_path}/own OUT\n" in capsys.readouterr().err
    loss = json.loads((tmp_path / "own/summary.json").read_text())["loss"]
    # Huber's of an untrained network, 0.1 (|e| - 0.05) for an error of 1; the squared error is near 1.
    assert loss < 0.1
    events = EventAccumulator(str(next((tmp_path / "own/tensorboard").rglob("events.*")).parent)).Reload()
    assert [event.step for event in events.Images("user/attention")] == [2, 4]
    assert all(0.0 < event.value < 1.0 for event in events.Scalars("user/attention_max"))


def test_arguments_are_literals_in_pythons_or_yamls_words():
    plugin = parse_plugin("x", "a/b.py:C(two='x, y', three=[1.5, true], four=None, five=null)")
    assert plugin.arguments == {"two": "x, y", "three": [1.5, True], "four": None, "five": None}


# --- what is refused ---


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.family=FOLDER/none.py:A", "there is no file FOLDER/none.py (in "),
        ("model.family=FOLDER/good.py:MyDit", "FOLDER/good.py has no class MyDit. Did you mean MyDiT?"),
        ("model.family=torch.nn:Linear", "torch.nn:Linear is not a subclass of families.spec.Family. "),
        ("model.family=FOLDER/good.py:MyDiT(depth=3)", "FOLDER/good.py:MyDiT: got an unexpected keyword argument"),
        ("model.family=FOLDER/good.py:MyDiT(depth=)", "the arguments (depth=) cannot be read."),
        ("model.family=FOLDER/raises.py:A", "FOLDER/raises.py raised ZeroDivisionError: division by zero (FOLDER/"),
        ("model.family=FOLDER/own.py:Bare", "FOLDER/own.py:Bare does not define name, objective, pixels_per_latent"),
        ("optimizer.name=torch.optim:SGD(lr=0.5)", "lr is an argument of it. Give optimizer.lr instead."),
        ("callbacks=five", "callbacks is 'five'. Possible: a list."),
    ],
)
def test_what_is_no_class_of_the_right_kind_is_refused_by_key_and_line(tmp_path, capsys, word, message):
    good = (EXAMPLES / "my_dit.py").read_text()
    for name, text in {"good": good, "own": OWN, "raises": "1 / 0\n"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert run(tmp_path, "a", *word.replace("FOLDER", str(tmp_path)).split()) == 2
    problems = capsys.readouterr().err.replace(str(tmp_path), "FOLDER").splitlines()
    keys = "|".join(re.escape(each.partition("=")[0]) for each in word.split())
    begins = re.compile(rf"(command line|({keys})(\[0\])?): {re.escape(message)}")
    assert len(list(filter(begins.match, problems))) == 1, problems
    assert not (tmp_path / "a").exists()


@pytest.mark.usefixtures("traced_cost")
def test_a_family_whose_step_raises_is_named_with_its_line_before_the_run_begins(tmp_path, capsys):
    late, good = tmp_path / "late.py", (EXAMPLES / "my_dit.py").read_text()
    own = ["", "class Late(MyDiT):", "    def denoise(self, *given):", "        raise KeyError('mask')"]
    late.write_text("\n".join([good, *own]))
    assert run(tmp_path, "a", f"model.family={late}:Late") == 2
    line = len(late.read_text().splitlines())
    assert capsys.readouterr().err == f"model.family: {late}:Late raised KeyError: 'mask' ({late}, line {line}).\n"
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_what_would_be_wrong_without_a_word_ends_the_run(tmp_path, capsys):
    (tmp_path / "own.py").write_text(OWN)
    for name, word, message in (
        ("a", "objective.name={}:One", "objective.name: losses() returned (). Return (8,), one loss a sample."),
        ("b", "callbacks=['{}:Odd']", "callbacks[0] Odd: its state_dict has a numpy.float64. Possible: tensors"),
    ):
        assert run(tmp_path, name, word.format(tmp_path / "own.py")) == 1
        assert message in capsys.readouterr().err
