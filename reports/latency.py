"""Show a record of bench.latency: as a table, as a picture, and in a page.

    python -m reports.latency RECORD.json                           # for the terminal
    python -m reports.latency RECORD.json OUT.png PAGE.md           # a picture; the table between a page's marks

A page says by marks where the table goes (reports/marks.py).

The picture has the seconds by batch, of diffusers' pipeline and of each way to compute, and over each bar how many times as
fast as the pipeline it is. Nothing here needs a GPU. Pages and pictures of the project: `make report`.
Exit code: 0, or 2 where a file cannot be read, is no such record, or a page has no marks.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.command import command
from cli.errors import Refused
from cli.files import read_json
from cli.table import as_table
from reports.marks import rewrite

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Contest = Mapping[str, Any]

PIPELINE = "pipeline"
"""The contestant that is diffusers' own."""
MODELS = {"stock": "SD2", "sd15": "SD 1.5", "mlperf": "SD2 as in MLPerf", "shapes": "the miniature"}
MODELS |= {"sdxl": "SDXL", "flux": "FLUX.1 dev"}
HEAD = (
    *("model", "sampler", "precision", "batch", "how", "s (median)", "least", "p95"),
    *("times as fast as eager", "times as fast as the pipeline", "in processor time"),
    *("text, denoiser, VAE, %", "first call, s"),
)
ALIGN = "lllrlrrrlllrr"
RATIOS = ("speedup_vs_eager", f"speedup_vs_{PIPELINE}", f"cpu_speedup_vs_{PIPELINE}")
OF_GROUP = ("preset", "image_size", "steps", "guidance", "channels_last", "rounds")
"""What has a table of its own, with `processes`, which older records do not name."""
COLOURS = ("#666666", "#31688e", "#d95f02", "#35864a", "#a6368c", "#8a6d1d")
DPI = 120


# --- the table ---


def groups_of(record: Mapping[str, Any]) -> list[list[Contest]]:
    """Return the contests that stand in one table, in the record's order."""
    found: dict[tuple[Any, ...], list[Contest]] = {}
    for contest in record["contests"]:
        found.setdefault((*(contest[key] for key in OF_GROUP), contest.get("processes")), []).append(contest)
    return list(found.values())


def heading(contests: Sequence[Contest]) -> str:
    """Say what the contests of one table have in common, and how busy the machine was."""
    one, loads = contests[0], [contest["load_average_before"] for contest in contests]
    size, nhwc = one["image_size"], ", NHWC" if one["channels_last"] else ""
    what = f"Preset {one['preset']}, {size} x {size} px, {one['steps']} steps, guidance {one['guidance']:g}{nhwc}"
    apart = "; each in a process of its own" if one.get("processes") else ""
    return f"{what}; {one['rounds']} rounds{apart}; load average {min(loads):g} to {max(loads):g}:"


def rows_of(contests: Sequence[Contest]) -> Iterator[tuple[str | None, ...]]:
    """Yield a row for each contestant that was not skipped."""
    for contest in contests:
        case = (MODELS[contest["variant"]], contest["sampler"], contest["precision"], str(contest["batch_size"]))
        for name, status in contest["status"].items():
            if status == "skipped":
                continue
            how = "diffusers' pipeline" if name == PIPELINE else name
            if status != "ok":
                yield (*case, how, status.replace("_", " "), *[None] * 7)
                continue
            shares = [contest.get(f"{name}_{part}_frac") for part in ("text", "denoiser", "vae")]
            yield (
                *case,
                how,
                *(f"{contest[f'{name}_sec{end}']:.3g}" for end in ("", "_min", "_p95")),
                *(_ratio(contest, f"{name}_{key}") for key in RATIOS),
                None if None in shares else ", ".join(f"{100 * share:.0f}" for share in shares),
                f"{contest[f'{name}_first_sec']:.3g}",
            )


def _ratio(contest: Contest, key: str) -> str | None:
    if key not in contest:
        return None
    return f"{contest[key]:.2f} ({contest[f'{key}_min']:.2f} to {contest[f'{key}_max']:.2f})"


def left_out(contests: Sequence[Contest]) -> list[str]:
    """Say what was skipped or lost and why, each reason once."""
    found: dict[str, None] = {}
    for contest in contests:
        for name, reason in contest["reasons"].items():
            status = contest["status"][name].replace("_", " ")
            # A precision that a machine does not have takes all contestants with it, and says its own name.
            of_all = len(set(contest["reasons"].values())) == 1 and len(contest["reasons"]) == len(contest["status"])
            where = contest["precision"] if of_all else name
            found.setdefault(f"{where}, {status}: {reason}" if status != "skipped" else f"{where}: {reason}")
    return list(found)


def largest_difference(contests: Sequence[Contest]) -> float | None:
    """Return how far an image in fp32 is from the pipeline's at most, of values in [0, 1]; None where none was compared."""
    values = [
        value
        for contest in contests
        if contest["precision"] == "fp32"
        for key, value in contest.items()
        if key.endswith("_max_abs_difference") and value is not None
    ]
    return max(values, default=None)


def _overviews(contests: Sequence[Contest]) -> Iterator[str]:
    """Yield what the contests say of a way together, where it was in several."""
    kinds = {"": "times as fast as the pipeline", "cpu_": "times in processor time"}
    for way in dict.fromkeys(name for contest in contests for name in contest["status"]):
        for kind, what in kinds.items():
            key = f"{way}_{kind}speedup_vs_{PIPELINE}"
            speeds = [contest[key] for contest in contests if key in contest]
            if len(speeds) > 1:
                middle, ends = statistics.median(speeds), f"{min(speeds):.2f} to {max(speeds):.2f}"
                yield f"{way}, over {len(speeds)} contests: {middle:.2f} {what} ({ends})."


def notes_of(contests: Sequence[Contest]) -> list[str]:
    """Return what stands below a table."""
    said, difference = list(_overviews(contests)), largest_difference(contests)
    if difference is not None:
        said.append(f"fp32 images differ from the pipeline's by {difference:.2g} at most, of 0 to 1.")
    return said + left_out(contests)


def text_of(record: Mapping[str, Any]) -> str:
    """Format a record for the terminal."""
    parts = [f"{record['device']}, commit {record['commit']}"]
    for contests in groups_of(record):
        parts += ["", heading(contests), as_table(HEAD, rows_of(contests), ALIGN), *notes_of(contests)]
    return "\n".join(parts)


def markdown_of(record: Mapping[str, Any]) -> str:
    """Format a record for a page."""
    parts = [f"{record['device']}, torch {record['torch_version']}, diffusers {record['diffusers_version']}."]
    for contests in groups_of(record):
        rows = [HEAD, tuple("---:" if side == "r" else "---" for side in ALIGN), *rows_of(contests)]
        lines = ["| " + " | ".join("-" if cell is None else cell for cell in row) + " |" for row in rows]
        parts += [heading(contests), "\n".join(lines), "\n".join(f"- {_marked(note)}" for note in notes_of(contests))]
    return "\n" + "\n\n".join(part for part in parts if part) + "\n\n"


def _marked(note: str) -> str:
    """Return a note that cannot be anything but text in a page: an exception may say what it likes."""
    return re.sub(r"([<>*_`|\[\]])", r"\\\1", note)


# --- the picture ---


def panels_of(record: Mapping[str, Any]) -> list[tuple[str, list[Contest]]]:
    """Return (title, contests) for each panel: one model and precision, in the first sampler, with something to draw."""
    found: dict[str, list[Contest]] = {}
    for contests in groups_of(record):
        for contest in contests:
            if contest["sampler"] == contests[0]["sampler"] and "ok" in contest["status"].values():
                size = f"{contest['preset']}, {contest['image_size']} px, {contest['steps']} {contest['sampler']} steps"
                title = f"{MODELS[contest['variant']]}, {contest['precision']}\n{size}"
                found.setdefault(title, []).append(contest)
    return list(found.items())


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw seconds over the batch, a panel a model and precision, with the speed over diffusers' pipeline on each bar.

    Raises ValueError: nothing was measured.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = panels_of(record)
    if not panels:
        raise ValueError("nothing in it was measured, so there is nothing to draw. Measure again.")
    names = list(dict.fromkeys(name for _, contests in panels for each in contests for name in each["status"]))
    drawn = [name for name in names if any(_is_in(contests, name) for _, contests in panels)]
    colours = dict(zip(drawn, itertools.cycle(COLOURS), strict=False))
    columns = min(3, len(panels))
    down = math.ceil(len(panels) / columns)
    with matplotlib.rc_context(matplotlib.rcParamsDefault):
        figure = Figure(figsize=(4.6 * columns, 3.4 * down + 0.7), layout="constrained")
        FigureCanvasAgg(figure)
        for number, (title, contests) in enumerate(panels, 1):
            axes = figure.add_subplot(down, columns, number)
            _draw_panel(axes, contests, {name: colour for name, colour in colours.items() if _is_in(contests, name)})
            axes.set_title(title, fontsize=9)
        handles = {}
        for axes in figure.axes:
            handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(drawn), fontsize=8)
        what = "Seconds from captions to images: median, least to p95; over a bar: times as fast as diffusers' pipeline"
        figure.suptitle(f"{what}\n{record['device']}", fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DPI, metadata={"Software": None})


def _is_in(contests: Sequence[Contest], name: str) -> bool:
    """True where a contestant was measured in one of the contests."""
    return any(f"{name}_sec" in contest for contest in contests)


def _draw_panel(axes: Axes, contests: Sequence[Contest], colours: Mapping[str, str]) -> None:
    batches = list(dict.fromkeys(contest["batch_size"] for contest in contests))
    width = 0.8 / len(colours)
    for number, (name, colour) in enumerate(colours.items()):
        there = {contest["batch_size"]: contest for contest in contests if f"{name}_sec" in contest}
        at = [batches.index(batch) + (number - (len(colours) - 1) / 2) * width for batch in there]
        seconds = [contest[f"{name}_sec"] for contest in there.values()]
        ends = [[contest[f"{name}_sec{end}"] for contest in there.values()] for end in ("_min", "_p95")]
        away = [[abs(end - middle) for end, middle in zip(side, seconds, strict=True)] for side in ends]
        label = "diffusers' pipeline" if name == PIPELINE else name
        style = {"color": colour, "ecolor": "#303030", "error_kw": {"linewidth": 0.8}}
        bars = axes.bar(at, seconds, 0.92 * width, yerr=away, label=label, **style)
        speeds = [contest.get(f"{name}_speedup_vs_{PIPELINE}") for contest in there.values()]
        axes.bar_label(bars, ["" if speed is None else f"x{speed:.2f}" for speed in speeds], fontsize=7, padding=2)
    axes.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
    axes.set_ylabel("s")
    axes.margins(y=0.15)
    axes.grid(alpha=0.3, axis="y")
    axes.set_axisbelow(True)


# --- the command ---


def read_record(place: str) -> dict[str, Any]:
    """Read a record. Raises ValueError: it is none."""
    try:
        record = read_json(Path(place))
        text_of(record), markdown_of(record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{place}: is no record of bench.latency ({type(error).__name__}: {error}).") from error
    if not record["contests"]:
        raise ValueError(f"{place}: has no contest. Run python -m bench.latency results={place}.")
    return record


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    kinds = {suffix: [word for word in argv if word.endswith(suffix)] for suffix in (".json", ".png", ".md")}
    if len(kinds[".json"]) != 1 or sum(map(len, kinds.values())) != len(argv):
        raise Refused(f"command line: {' '.join(argv)}. Possible: RECORD.json, OUT.png, PAGE.md. Give one record.")
    [place] = kinds[".json"]
    try:
        record = read_record(place)
        rewrite(kinds[".md"], place, markdown_of(record))
        for path in kinds[".png"]:
            draw(record, Path(path))
            print(f"written: {path}")
    except OSError as error:
        raise Refused(f"{error.filename}: {error.strerror}. Check the path.") from error
    except ValueError as error:
        raise Refused(str(error)) from error
    if len(argv) == 1:
        print(text_of(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
