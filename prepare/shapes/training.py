"""Train the miniature's encoders on a CPU. It takes hours and can be stopped and resumed at any time.

    python -m prepare.shapes --train_encoders OUT
    python -m prepare.shapes --train_encoders OUT max_minutes=30      # then the same command resumes

    python -m prepare.shapes --train_encoders OUT reader_steps=0 clip_steps=0 vae_steps=0      # the video VAE alone

    OUT/NAME.pt             an encoder's newest state (reader, clip, vae, video_vae); it resumes from there
    OUT/training.jsonl      a line every 100 steps (losses), and one every `every_steps` (metrics)
    OUT/weights/            every network's best weights so far, complete at any time; zoo/shapes_weights is a copy

The weights are EMA weights (decay 0.999), stored in float16; metrics are computed after that rounding. With one thread and
the same libraries, the same seed gives the same bytes, even if it was stopped and resumed.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cli.files import whole, write_whole
from cli.private_api import require_private_api
from prepare.shapes.stages import ClipStage, ReaderStage, Stage, VaeStage, held_out
from prepare.shapes.video_stage import VideoVaeStage
from zoo.shapes.networks import WEIGHTS, Reader, build_clip

EMA_DECAY = 0.999
CLIP_NORM = 1.0
LOG_STEPS = 100
TEXT_TOWER = "text_model."

require_private_api(torch, "_foreach_lerp_", why="the average of all weights in one pass")


@dataclass(frozen=True)
class TrainingConfig:
    """The keys of `--train_encoders`."""

    seed: int = 17
    """Seed of weights and images."""
    reader_steps: int = 5000
    """Steps of the reader."""
    clip_steps: int = 7000
    """Steps of the CLIP pair."""
    vae_steps: int = 5000
    """Steps of the VAE."""
    video_vae_steps: int = 3000
    """Steps of the moving miniature's video VAE. 0 steps, here and above: it is not trained, the shipped one stays."""
    every_steps: int = 500
    """Steps between two measurements, each of which writes a state."""
    num_measured: int = 1024
    """Held-out images to measure on."""
    max_minutes: int = 10**6
    """Stop after this many minutes, with a state written; the same command resumes."""

    def steps(self, stage: str) -> int:
        return getattr(self, f"{stage}_steps")


def train_encoders(out: Path, config: TrainingConfig) -> bool:
    """Train every encoder to its end, or until the time is up; return whether all are done."""
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * config.max_minutes
    torch.set_num_threads(1)  # more threads change the last bits
    those = held_out(config.num_measured)

    def made_by(name: str) -> Path:
        return out / "weights" if config.steps(name) else WEIGHTS

    makers: dict[str, Callable[[], Stage]] = {
        "reader": lambda: ReaderStage(config.seed, those),
        "clip": lambda: ClipStage(config.seed, those),
        "vae": lambda: VaeStage(config.seed, those, load_reader(made_by("reader")), load_clip(made_by("clip"))),
        "video_vae": lambda: VideoVaeStage(config.seed, config.num_measured, load_reader(made_by("reader"))),
    }
    for name, make in makers.items():
        torch.manual_seed(config.seed)
        if config.steps(name) and not _train(make(), out, config, deadline):
            return False
    return True


def _train(stage: Stage, out: Path, config: TrainingConfig, deadline: float) -> bool:
    """Train one encoder from its newest state; return whether it is done."""
    network, num_steps = stage.network, config.steps(stage.name)
    averaged = copy.deepcopy(network).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(network.parameters(), lr=stage.learning_rate, betas=(0.9, 0.99), weight_decay=0.01)
    first, best, spent_sec = _resume(out, stage.name, network, averaged, optimizer)
    start = time.monotonic() - spent_sec
    for step in range(first, num_steps):
        for group in optimizer.param_groups:
            group["lr"] = stage.learning_rate * schedule(step, num_steps)
        loss, parts = stage.loss(step)
        if not torch.isfinite(loss):
            raise ValueError(f"{stage.name}: the loss is {loss.item()} at step {step}. Give another seed.")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), CLIP_NORM)
        optimizer.step()
        decay = min(EMA_DECAY, (1 + step) / (10 + step))  # smaller in the first steps
        torch._foreach_lerp_(list(averaged.parameters()), list(network.parameters()), 1 - decay)

        done = step + 1
        facts = {"stage": stage.name, "step": done, "seconds": round(time.monotonic() - start, 1)}
        if done % LOG_STEPS == 0:
            _log(out, {**facts, "loss": loss.item(), **{name: part.item() for name, part in parts.items()}})
        is_over = time.monotonic() > deadline
        if done % config.every_steps == 0 or done == num_steps or is_over:
            shipped = rounded(averaged)
            qualities = stage.measure(shipped)
            is_best = qualities["score"] >= best  # of equal ones the later, which has trained longer
            best = max(best, qualities["score"])
            _log(out, {**facts, "best": is_best, **qualities})
            if is_best:
                export(stage.name, shipped, qualities, out / "weights")
            state = {
                "network": network.state_dict(),
                "averaged": averaged.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            _save({**state, "step": done, "best": best, "seconds": time.monotonic() - start}, out / f"{stage.name}.pt")
            if is_over and done < num_steps:
                return False
    return True


def schedule(step: int, num_steps: int) -> float:
    """Return the factor of the learning rate: linear to 1 over 200 steps, then a half cosine down to 1 %."""
    warmup = min(200, num_steps // 10)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.01 + 0.99 * (1 + math.cos(math.pi * (step - warmup) / max(1, num_steps - warmup))) / 2


# --- state and log ---


def _resume(
    out: Path, name: str, network: nn.Module, averaged: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, float, float]:
    """Load the newest state, if there is one; return the next step, the best score and the seconds so far."""
    path, log = out / f"{name}.pt", out / "training.jsonl"
    state: dict[str, Any] = {"step": 0, "best": -math.inf, "seconds": 0.0}
    if path.exists():
        state = torch.load(path, weights_only=True)
        network.load_state_dict(state["network"])
        averaged.load_state_dict(state["averaged"])
        optimizer.load_state_dict(state["optimizer"])
    if log.exists():  # remove lines of steps that will be repeated
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
        kept = [line for line in lines if line["stage"] != name or line["step"] <= state["step"]]
        write_whole(log, "".join(json.dumps(line) + "\n" for line in kept).encode())
    return state["step"], state["best"], state["seconds"]


def _save(state: Mapping[str, Any], path: Path) -> None:
    with whole(path) as temporary, open(temporary, "wb") as file:  # of a path torch would keep the name
        torch.save(dict(state), file)


def _log(out: Path, line: Mapping[str, Any]) -> None:
    with open(out / "training.jsonl", "a") as file:
        file.write(json.dumps(_short(line)) + "\n")
    print(json.dumps(_short(line)), flush=True)


def _short(value: Any) -> Any:
    """Round numbers to five digits, in lists and dictionaries too."""
    if isinstance(value, Mapping):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


# --- shipped weights ---


def rounded(network: nn.Module) -> nn.Module:
    """Return a copy with its weights rounded to float16, as float32."""
    copied = copy.deepcopy(network).eval()
    for parameter in copied.parameters():
        parameter.data = parameter.data.half().float()
    return copied


def export(name: str, network: nn.Module, qualities: Mapping[str, Any], weights: Path) -> None:
    """Write a network's folder: tensors and configuration with a diffusers folder's names, and its metrics."""
    tensors = {key: tensor.half() for key, tensor in network.state_dict().items()}
    if name == "vae":
        config = {key: value for key, value in network.config.items() if not key.startswith("_")}
        config |= {"_class_name": "AutoencoderKL", "scaling_factor": round(1 / qualities["latent_std"], 4)}
        _write(weights / "vae", "diffusion_pytorch_model", tensors, config, qualities)
    elif name == "video_vae":
        config = {key: value for key, value in network.config.items() if not key.startswith("_")}
        statistics = {"latents_mean": "latent_mean_of_channels", "latents_std": "latent_std_of_channels"}
        config |= {key: _short(qualities[of]) for key, of in statistics.items()}
        config |= {"_class_name": "AutoencoderKLWan"}
        _write(weights / "video_vae", "diffusion_pytorch_model", tensors, config, qualities)
    elif name == "clip":
        text = {key: tensor for key, tensor in tensors.items() if key.startswith(TEXT_TOWER)}
        rest = {key: tensor for key, tensor in tensors.items() if key not in text}
        _write(weights / "text_encoder", "model", text, network.config.text_config.to_dict(), None)
        _write(weights / "clip", "model", rest, network.config.to_dict(), qualities)
    else:
        _write(weights / "reader", "model", tensors, {}, qualities)


def _write(folder: Path, stem: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any], qualities: Any) -> None:
    from safetensors.torch import save

    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"{stem}.safetensors", save({key: tensor.contiguous() for key, tensor in tensors.items()}))
    if config:
        plain = json.dumps(dict(config), indent=1, sort_keys=True, default=str)
        write_whole(folder / "config.json", plain.encode() + b"\n")
    if qualities is not None:
        write_whole(folder / "quality.json", json.dumps(_short(qualities), indent=1).encode() + b"\n")


def _load(network: nn.Module, *paths: Path) -> nn.Module:
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for path in paths:
        tensors |= load_file(path)
    network.load_state_dict({key: tensor.float() for key, tensor in tensors.items()})
    return network.eval().requires_grad_(False)


def load_reader(weights: Path) -> Reader:
    """Return the reader from a folder like OUT/weights, frozen."""
    return _load(Reader(), weights / "reader/model.safetensors")


def load_clip(weights: Path) -> nn.Module:
    """Return the whole pair, frozen; its text tower is read from text_encoder/."""
    return _load(build_clip(), weights / "clip/model.safetensors", weights / "text_encoder/model.safetensors")
