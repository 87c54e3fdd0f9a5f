"""Make the dashboard of a project at W&B: a workspace view with the figures of run_folder/metric_names.py.

    python -m reports.wandb_dashboard ENTITY/PROJECT
    python -m reports.wandb_dashboard ENTITY/PROJECT grouped=true

    grouped     true: a line for each group of runs, as those of several seeds, with its range

It needs wandb-workspaces (requirements/dashboard.lock), and a login at W&B. Each call makes another view.
Exit code: 0, or 2 where a word is not known, the package is missing or W&B does not take the view.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.command import command
from common.errors import Refused
from reports.formatting import read_words
from run_folder.metric_names import IMAGES, SAMPLES, VIDEOS, bins_named

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace


SECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "Quality": {
        "FID": ("eval/fid",),
        "CLIP score": ("eval/clip",),
        "CMMD": ("eval/cmmd",),
        "Samples": (SAMPLES, VIDEOS),
        "Images to the target": ("result/images_to_target",),
        "Training seconds to the target": ("result/seconds_to_target",),
    },
    "Loss": {
        "Training loss, windows": ("train/loss",),
        "Training loss, batches": ("train/batch_loss",),
        "Validation loss": ("val/loss",),
        "Validation loss by timestep": (*bins_named([0.0] * 10),),
        "Loss of each stream": ("streams/NAME/loss",),
        "Gradient norm": ("train/gradient_norm",),
        "Learning rate": ("train/lr",),
    },
    "Speed": {
        "Images/s": ("speed/images_per_sec", "speed/images_per_sec_wall"),
        "Waiting for data, fraction": ("speed/data_wait_frac",),
        "Seconds of a window": tuple(f"time/{clock}_sec" for clock in ("train", "data_wait", "eval", "other")),
        "Peak memory, GiB": ("memory/peak_mem_gib",),
        "Images/s of the run": ("result/images_per_sec",),
    },
    "Run": {
        "Starts": ("progress/start",),
        "Epochs": ("progress/epoch",),
        "Unusable samples": ("data/bad_samples",),
        "Seconds of an evaluation": ("eval/eval_sec",),
    },
}
"""Section -> title of a panel -> its metrics; one with NAME is each stream's. What a run came to is bars, all else lines."""


def metrics() -> Iterator[str]:
    """Yield each metric that the dashboard names."""
    yield IMAGES
    for panels in SECTIONS.values():
        for names in panels.values():
            yield from names


def _panel(title: str, names: Sequence[str]) -> Any:
    from wandb_workspaces.reports import v2 as panels

    if SAMPLES in names:
        return panels.MediaBrowser(title=title, media_keys=list(names), gallery_axis="step")
    if names[0].startswith("result/"):
        return panels.BarPlot(title=title, metrics=list(names))
    lines = {"title": title, "x": IMAGES, "title_x": "images", "smoothing_type": "none"}
    if "NAME" in names[0]:
        return panels.LinePlot(metric_regex=names[0].replace("NAME", ".+"), **lines)
    return panels.LinePlot(y=list(names), plot_type="stacked-area" if names[0].startswith("time/") else "line", **lines)


def workspace(entity: str, project: str, *, grouped: bool = False) -> Workspace:
    """Build the view; asks no server."""
    from wandb_workspaces import workspaces
    from wandb_workspaces.expr import Metric

    return workspaces.Workspace(
        name="Easel",
        entity=entity,
        project=project,
        sections=[
            workspaces.Section(name=name, panels=[_panel(*panel) for panel in panels.items()], is_open=True)
            for name, panels in SECTIONS.items()
        ],
        settings=workspaces.WorkspaceSettings(x_axis=IMAGES),
        runset_settings=workspaces.RunsetSettings(groupby=[Metric("Group")] if grouped else []),
    )


@dataclass(frozen=True)
class DashboardKeys:
    """The keys of this command."""

    grouped: bool = False
    """A line for each group of runs."""


@command(keys=DashboardKeys)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    text = f"command line: '{' '.join(argv)}'. Possible: ENTITY/PROJECT, then grouped=true."
    is_name = re.compile(r"[^/=\s]+/[^/=\s]+").fullmatch
    projects, keys = read_words(
        argv, DashboardKeys, lambda projects: [] if len(projects) == 1 and is_name(projects[0]) else [text]
    )
    if importlib.util.find_spec("wandb_workspaces") is None:
        todo = "Run: pip install --no-deps -r requirements/dashboard.lock"
        raise Refused(f"wandb-workspaces is not installed, which the dashboard is made with. {todo}.")
    view = workspace(*projects[0].split("/"), grouped=keys.grouped)
    try:
        print(f"made: {view.save().url}")
    except Exception as error:  # of W&B's client, requests, GraphQL
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        todo = "Look at `wandb login` and at the name"
        raise Refused(f"{projects[0]}: W&B has not taken the view: {why.rstrip('.')}. {todo}.") from error
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
