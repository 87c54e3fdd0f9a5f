"""Evaluations that are stopped by a signal or killed: they resume with the rest, and end with the same metrics."""

# ruff: noqa: F811  (fixtures of another file)

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, run
from test_checkpoints import newest, same_training
from test_evaluation import evaluations, figures, words_of  # noqa: F401

import benchmark
from checkpointing.files import FULL, list_checkpoints
from evaluation import metrics
from evaluation.metrics import Parts
from evaluation.scorer import EvalConfig, Scorer
from evaluation.table import read_rows
from model import LatentDiffusion
from ranks import collectives
from run_folder.files import EVAL_PARTS

# --- files and sums ---


def test_a_part_is_found_by_its_evaluation_and_rank_alone_and_removed_after_the_score(tmp_path):
    mine, others = (Parts(tmp_path / "p", is_alone=alone) for alone in (False, True))
    assert mine.find("this", 0) is None and not (tmp_path / "p").exists()
    for name, chunks in (("this", 1), ("this", 2), ("other", 9)):
        mine.save(name, 3, {"chunks": chunks})
    path, content = mine.find("this", 3)
    assert content == {"schema": 1, "of": "this", "chunks": 2} and len(list(path.parent.iterdir())) == 2
    assert mine.find("this", 0) is None and mine.find("third", 3) is None
    mine.remove("this")
    assert mine.find("this", 3) is None and mine.find("other", 3) is not None
    others.remove("this")
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("how", ["cut", "flipped", "pickled"])
def test_a_damaged_part_is_set_aside(tmp_path, capsys, how):
    parts = Parts(tmp_path, is_alone=False)
    parts.save("this", 0, {"chunks": 5})
    path, _ = parts.find("this", 0)
    whole = path.read_bytes()
    if how == "pickled":
        torch.save({"schema": 1, "of": tmp_path}, path)
    else:
        path.write_bytes({"cut": whole[:-9], "flipped": whole[:80] + b"?" + whole[81:]}[how])
    (tmp_path / f".{path.name[:34]}.77.tmp").touch()  # of a killed writer
    assert parts.find("this", 0) is None
    assert capsys.readouterr().err == f"eval: {path} is damaged, or of another evaluation; set aside.\n"
    assert path.with_name(path.name + ".damaged").exists() and not list(tmp_path.glob("*.tmp"))


def test_a_signal_is_noted_instead_of_ending_and_handlers_are_restored():
    before, done = [signal.getsignal(number) for number in collectives.STOP_SIGNALS], []
    with collectives.note_signals() as noted:
        exchange = collectives.SignalExchange(noted, 3)
        assert not exchange.has_signal() and exchange.agree_on_signal() == 0
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        assert exchange.has_signal() and exchange.agree_on_signal() == signal.SIGUSR1
    with pytest.raises(collectives.Signalled, match="^SIGUSR1$") as caught, collectives.stop_together() as noted:
        signal.raise_signal(signal.SIGUSR1)
        done.append(noted())
    assert done == [signal.SIGUSR1] and caught.value.number == signal.SIGUSR1
    with collectives.stop_together() as noted:
        assert noted() == 0
    assert [signal.getsignal(number) for number in collectives.STOP_SIGNALS] == before


class Painter(torch.nn.Module):
    """A minimal model: an image is its prompt's noise. It is killed after some passes."""

    family = SimpleNamespace(
        tokenize=lambda captions: {"tokens": torch.zeros(len(captions), 1)}, latent_shape=lambda size: (3, *size)
    )
    device, encoders, in_step = torch.device("cpu"), SimpleNamespace(fingerprints={}), False

    def __init__(self, passes: int):
        super().__init__()
        self.passes = passes

    def generate(self, text, noise, **ways):
        if not self.passes:
            raise KeyboardInterrupt
        self.passes -= 1
        return noise.sigmoid()


def test_a_killed_evaluation_scores_the_rest_alone_and_has_the_figures_of_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "EVERY_SEC", 0.0)
    prompts = "".join(f"{number}\t{number}\tpicture {number}\n" for number in range(7))
    (tmp_path / "prompts.tsv").write_text(f"image_id\tid\tcaption\n{prompts}")
    config = EvalConfig(prompts=str(tmp_path / "prompts.tsv"), clip="random", batch_size=2)

    def score(model: Painter, parts: Parts | None) -> tuple[int, float]:
        found = Scorer(config, size=(32, 32), seed=0, parts=parts).score(model, 1.0)
        return found["num_images"], found["clip"]

    whole, parts = score(Painter(4), None), Parts(tmp_path / "parts", is_alone=True)
    with pytest.raises(KeyboardInterrupt):
        score(Painter(2), parts)
    again = Painter(4)
    assert score(again, parts) == whole and whole[0] == 7 and again.passes == 2


# --- whole runs ---

# A rank that is ended, or gets a signal, after so many batches of images of its first evaluation.
PROGRAM = """
import os, signal, sys, time, benchmark, eval
from evaluation import metrics
from common import dist
command, number, rank, batches = sys.argv[1], *map(int, sys.argv[2:5])
progress = metrics.EvaluationProgress
metrics.EVERY_SEC, add, count = 0.0 if number == signal.SIGKILL else 60.0, progress.add, 0

def counted(self, *given):
    global count
    add(self, *given)
    count += 1
    if count == batches and dist.get_global_rank() == rank:
        time.sleep(2.0 * (dist.get_world_size() - 1))  # the others get further meanwhile
        os.kill(os.getpid(), number)

progress.add = counted
sys.exit({"benchmark": benchmark, "eval": eval}[command].main(sys.argv[5:]))
"""

OF_FOUR = ("eval.when=in_training", "eval.batch_size=4")  # two evaluations, of 8 batches each


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("program") / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture(scope="module")
def whole(words_of, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert benchmark.main(words_of(folder, "whole", *OF_FOUR)) == 0
    assert not (folder / "whole" / EVAL_PARTS).exists()
    return folder / "whole"


@pytest.mark.slow
@pytest.mark.timeout(200, func_only=True)
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_an_evaluation_that_is_ended_in_its_midst_goes_on_and_has_the_same_figures(
    number, words_of, whole, program, tmp_path, monkeypatch, capsys
):
    words, folder = words_of(tmp_path, "whole", *OF_FOUR), tmp_path / "whole"
    done = run(sys.executable, str(program), "benchmark", str(int(number)), "0", "3", *words, PYTHONPATH=str(ROOT))
    assert done.returncode == {signal.SIGKILL: -9, signal.SIGTERM: 143}[number], done.stderr
    assert evaluations(folder) == [] and len(list((folder / EVAL_PARTS).glob("part-*.pt"))) == 1
    if number == signal.SIGTERM:  # heard at the first step of the fourth batch
        first, second = done.stderr.splitlines()[-2:]
        assert first == f"eval: stopped by a signal: 12 of 32 images were scored; saved in {folder / EVAL_PARTS}."
        saved = list_checkpoints(folder / "checkpoints", FULL)[0]
        assert saved.name.startswith("full-ba000000000003-")
        assert second == f"SIGTERM: stopped after batch 3; saved {saved}. The same command resumes it."
    made, generate = [], LatentDiffusion.generate
    monkeypatch.setattr(LatentDiffusion, "generate", lambda *given, **ways: made.append(1) or generate(*given, **ways))
    assert benchmark.main(words) == 0
    num_kept = 3  # each batch is measured before the next one is begun
    said = f"eval: resumes: {4 * num_kept} of 32 images were scored by an earlier start.\n"
    assert said in capsys.readouterr().err and len(made) == 8 - num_kept + 8
    assert [figures(line) for line in evaluations(folder)] == [figures(line) for line in evaluations(whole)]
    assert same_training(newest(tmp_path, "whole"), newest(whole.parent, "whole"))
    assert (folder / "samples/im000000000024.png").read_bytes() == (whole / "samples/im000000000024.png").read_bytes()
    assert not (folder / EVAL_PARTS).exists()


@pytest.mark.long
@pytest.mark.timeout(500, func_only=True)
def test_eval_on_two_ranks_is_stopped_by_a_signal_to_one_resumes_and_scores_as_one_rank_does(whole, program, tmp_path):
    """In the batches that one rank has: in others an image differs by some 1e-6, and 8 bits of it by a gray level."""
    words, folder = [str(whole), f"out={tmp_path}", "eval.batch_size=4", "snapshots=last"], tmp_path / EVAL_PARTS
    stopped = run("composer", "-n", "2", str(program), "eval", "10", "1", "2", *words, PYTHONPATH=str(ROOT))
    assert stopped.returncode == 138, stopped.stdout + stopped.stderr
    assert "SIGUSR1: stopped. The same command resumes it.\n" in stopped.stderr
    assert len(list(folder.glob("part-*.pt"))) == 2
    done = run("composer", "-n", "2", "eval.py", *words)
    assert done.returncode == 0 and "images were scored by an earlier start" in done.stderr, done.stderr
    [row], line = read_rows(tmp_path / "eval.csv"), evaluations(whole)[-1]
    assert row["num_images"] == line["num_images"] == 32 and not folder.exists()
    assert row["fid"] == pytest.approx(line["fid"], rel=1e-6) and row["clip"] == pytest.approx(line["clip"], abs=1e-6)
