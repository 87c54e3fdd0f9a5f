"""Show a record of bench.latency as a table, and in a page.

    python -m reports.latency RECORD.json                           # for the terminal
    python -m reports.latency RECORD.json PAGE.md                   # the table between a page's marks

A page says by marks where the table goes (reports/marks.py).

Nothing here needs a GPU. Pages of the project: `make report`.
Exit code: 0, or 2 where a file cannot be read, is no such record, or a page has no marks.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cli.command import command
from reports.marks import Table, in_markdown, in_text, show_record

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


def _table(contests: Sequence[Contest]) -> Table:
    return Table(heading(contests), HEAD, ALIGN, list(rows_of(contests)))


def text_of(record: Mapping[str, Any]) -> str:
    """Format a record for the terminal."""
    parts = [f"{record['device']}, commit {record['commit']}"]
    for contests in groups_of(record):
        parts += ["", in_text(_table(contests)), *notes_of(contests)]
    return "\n".join(parts)


def markdown_of(record: Mapping[str, Any]) -> str:
    """Format a record for a page."""
    parts = [f"{record['device']}, torch {record['torch_version']}, diffusers {record['diffusers_version']}."]
    for contests in groups_of(record):
        notes = "\n".join(f"- {_marked(note)}" for note in notes_of(contests))
        parts += [in_markdown(_table(contests)).rstrip("\n"), notes]
    return "\n" + "\n\n".join(part for part in parts if part) + "\n\n"


def _marked(note: str) -> str:
    """Return a note that cannot be anything but text in a page: an exception may say what it likes."""
    return re.sub(r"([<>*_`|\[\]])", r"\\\1", note)


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    return show_record(argv, "bench.latency", text_of, markdown_of)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
