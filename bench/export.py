"""Measure how far the images of an exported model are from the run's own, as plain diffusers draws them from its card.

    python -m bench.export                             # a table, and reports/results/export_difference.json
    python -m bench.export results=/tmp/export.json num_prompts=1

For each family and variant: a run of four batches with the tiny preset, on synthetic moments; its export; the images by the
code in the export's card, in a process that has diffusers and not this project; and the same by LatentDiffusion.generate
with the snapshot's EMA weights. Values of images lie in [0, 1]. Exit code: 0 measured, 2 when the command cannot be read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.command import head, read_keys, write_record
from bench.contest import rounded
from cli.command import command
from cli.limits import limited
from cli.table import as_table
from config import as_written
from export import ExportConfig, caption_of, export, read_run
from record.checkpoint_files import WEIGHTS, listed, read
from reports.model_card import blocks_of
from training.run_config import build
from zoo.sampling import prompt_noise

SCHEMA = 2
ROOT = Path(__file__).resolve().parent.parent
CASES = {
    "shapes": ("model.family=shapes", "image_size=[64, 32]", "eval.sampler=dpm++"),
    "sd2_stock": ("model.variant=stock", "eval.sampler=plms"),
    "sd2_sd15": ("model.variant=sd15", "eval.sampler=euler"),
    "sd2_mlperf": ("model.variant=mlperf", "eval.sampler=ddim", "optimizer.lr=1e-2"),
    "sdxl": ("model.family=sdxl", "image_size=[96, 64]", "eval.sampler=euler"),
    "flux_dev": ("model.family=flux", "image_size=[96, 64]"),
    "flux_schnell": ("model.family=flux", "model.variant=schnell"),
    "flux_mlperf": ("model.family=flux", "model.variant=mlperf", "optimizer.lr=1e-2"),
    "sd2_zero_snr": ("objective.prediction=v", "objective.zero_terminal_snr=true", "eval.sampler=ddim"),
}
"""Name -> the keys of its run beside OF_RUNS: every family and variant, every sampler."""
OF_RUNS = (
    "model.preset=tiny",
    "image_size=64",
    "global_batch_size=8",
    "max_duration=4ba",
    "loggers.progress_bar=false",
)
OF_RUNS += ("data.synthetic=true", "data.stage=moments", "ema.enabled=true", "ema.decay=0.5", "eval.guidance=2")
OF_RUNS += (
    "save.every_images=16",
    "save.snapshot_every_images=16",
    "measure.window_batches=2",
    "measure.warmup_batches=2",
)

ELSEWHERE = """
import json, sys, torch
torch.set_num_threads(1)
for out, code in json.load(open(sys.argv[1])).items():
    names = {"images": []}
    exec(code, names)
    torch.save(torch.stack(names["images"]), out)
ours = [name for name in ("model", "zoo", "weights", "config") if name in sys.modules]
assert not ours, f"this process has {ours} of the project"
"""


@dataclass(frozen=True)
class ExportBenchConfig:
    """The keys of this command."""

    num_prompts: int = limited(4, 1, 1000)
    """Images of each model."""
    steps: int = limited(20, 2, 500)
    """Steps of the sampler."""
    results: str = "reports/results/export_difference.json"
    """File of the record; an earlier one is replaced."""


def drawn_elsewhere(outs: Mapping[str, Path], folder: Path, num_prompts: int = 1) -> dict[str, Tensor]:
    """Do as the exports' cards say in a process of its own, without rounding to 8 bits.

    Args:
        outs: name -> an export, which lies in `folder`.

    Returns:
        name -> images of prompts 0, 1, ..., (N, 3, H, W) in [0, 1].
    """
    codes = {}
    for name, out in outs.items():
        code = "\n".join(blocks_of((out / "README.md").read_text()))
        code = code.replace(").images[0]", ', output_type="pt").images[0]')
        [call] = [line for line in code.splitlines() if "generator=generator(" in line]
        calls = [call.replace(", 0), output_type", f", {number}), output_type") for number in range(num_prompts)]
        codes[str(folder / f"{name}.pt")] = code + "".join(f"{each}\nimages.append(image)\n" for each in calls)
    (folder / "codes.json").write_text(json.dumps(codes))
    own = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | own
    words = [sys.executable, "-I", "-c", ELSEWHERE, str(folder / "codes.json")]
    subprocess.run(words, cwd=folder, env=environment, check=True, timeout=600, stderr=subprocess.PIPE)
    return {name: torch.load(folder / f"{name}.pt") for name in outs}


def drawn_here(run: Path, num_prompts: int = 1, weights: str = "ema") -> Tensor:
    """Draw the same images with a snapshot's weights put in by hand, (N, 3, H, W)."""
    config = read_run(run, None)
    model = build(config)
    content = read(listed(run / "checkpoints", WEIGHTS)[0])
    model.load_state_dict(content["model"] | (content["ema"]["weights"] if weights == "ema" else {}))
    ways = dict(sampler=config.eval.sampler, steps=config.eval.steps, guidance=config.eval.guidances()[0])
    text = model.family.tokenize([caption_of(run)])
    noise = [prompt_noise(config.seed, [number], model.latent_shape) for number in range(num_prompts)]
    return torch.cat([model.generate(text, each, **ways) for each in noise])


def measure(config: ExportBenchConfig, work: Path) -> dict[str, Any]:
    """Measure and return the record: name -> differences, seconds and bytes."""
    begin = {**head(SCHEMA), "config": as_written(config)}
    done, outs, cpu_sec = {}, {}, {}
    for name, keys in CASES.items():
        words = [*OF_RUNS, f"eval.steps={config.steps}", *keys, f"run_folder={work}/runs", f"run_name={name}"]
        program = [sys.executable, str(ROOT / "benchmark.py"), *words]
        subprocess.run(program, cwd=ROOT, check=True, timeout=600, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        outs[name] = work / name
        begun = time.process_time()
        done[name] = export(str(work / "runs" / name), outs[name], ExportConfig())
        cpu_sec[name] = rounded(time.process_time() - begun)
    images = drawn_elsewhere(outs, work, config.num_prompts)
    models = {}
    for name, theirs in images.items():
        difference = (drawn_here(work / "runs" / name, config.num_prompts) - theirs).abs()
        facts = json.loads((outs[name] / "export.json").read_text())
        models[name] = {
            **{
                key: facts[key] for key in ("family", "variant", "preset", "prediction", "sampler", "steps", "guidance")
            },
            "max_abs_difference": float(difference.max()),
            "mean_abs_difference": float(difference.mean()),
            "image_std": float(theirs.std()),
            "export_cpu_sec": cpu_sec[name],
            "bytes": done[name]["bytes"],
        }
    return {**begin, "models": models}


def table(record: Mapping[str, Any]) -> str:
    """Format a record for the terminal."""
    rows = []
    for name, row in record["models"].items():
        figures = (row["max_abs_difference"], row["mean_abs_difference"], row["image_std"], row["export_cpu_sec"])
        rows.append((name, row["sampler"], *(f"{figure:.2g}" for figure in (*figures, row["bytes"] / 2**20))))
    titles = ("model", "sampler", "greatest difference", "mean", "std of images", "export, CPU s", "MiB")
    return as_table(titles, rows, "llrrrrr")


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    config = read_keys(ExportBenchConfig, argv)
    if config is None:
        return 0
    with tempfile.TemporaryDirectory(prefix="export-") as work:
        record = measure(config, Path(work))
    write_record(config.results, record)
    print(table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
