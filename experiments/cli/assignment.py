"""`gossamer assignment`: prints and draws what a swarm with `sharing = "auto"` has decided to share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..results import SHARING_FILE, find_run, write_csv
from . import console
from .console import Output, command, load_torch

if TYPE_CHECKING:
    from ...models import Slicing

Record = Mapping[str, Any]
HEADER = ["part", "cells", "V/σ²", "held-out loss", "shared", "round"]
NOTE = (
    "V/σ²: how much the values of these cells differ between peers, relative to the noise of samples. "
    "Held-out loss: how the change altered it, ± the standard error; for cells that all peers share, how the "
    "best change would have, when it was last compared."
)
SHARED, OWN = 0, 1
"""The numbers of the schemes of cells that all peers average, and that each peer keeps."""
MAX_LISTED_CELLS = 6
"""The most cells, or ranges of cells, that the table lists."""


@command("assignment", slow=True)
def assignment_command(results: Path, *, output: Output) -> None:
    """Print and draw which cells a swarm has decided to share, with whom, when and why.

    The picture has a panel for every decision. The table of all comparisons is written as CSV.

    Args:
        results: The folder of a simulation with sharing = "auto", such as results/auto.
    """
    folder = find_run(results)
    report, name = read_sharing(folder), _name(folder)
    written = output.results(f"results/assignment/{name}", "assignment")
    title = f"{name}: what peers {'would share' if report['dry_run'] else 'share'}"
    console.table(title, HEADER, list(rows(report)))
    console.say(NOTE)
    if groups := list(group_rows(report)):
        console.table("groups of peers", ["group", "peers", "cells of"], groups)
    for line in sentences(report):
        console.say(line)
    load_torch()
    with written.run_folder() as out:
        files = [out / "assignment.csv", out / "compared.csv"]
        write_csv(files[0], HEADER, rows(report))
        compared = report["compared"]
        header = ["round", "part", "change", "gain", "error", "ratio", "chosen"]
        write_csv(files[1], header, ([trial[key] for key in header] for trial in compared))
        console.print_written([*files, *draw(report, out / "assignment", title)])


def read_sharing(folder: Path) -> dict[str, Any]:
    """Read what was decided in a run; raises ConfigError if the run had nothing to decide."""
    try:
        return json.loads((folder / SHARING_FILE).read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"{folder}: has no {SHARING_FILE}: name the results of a simulation with "
            'sharing = "auto", such as results/auto'
        ) from None
    except ValueError as error:
        raise ConfigError(f"{folder / SHARING_FILE}: is not JSON: {error}") from None


def _name(folder: Path) -> str:
    """Return the name of a run's config."""
    try:
        return str(json.loads((folder / "config.json").read_text("utf-8"))["name"])
    except (OSError, ValueError, KeyError):
        return folder.resolve().name


# --- the table --------------------------------------------------------------------------------------


def rows(report: Record) -> Iterator[list[str]]:
    """Yield a row for every part and set of its cells that are shared in the same way."""
    cells = report["assignment"]["cells"]
    for part in report["network"]["parts"]:
        name = part["name"]
        label = part_in_words(report, name)
        if shared := cells[name].get(str(SHARED)):
            yield [label, cells_text(shared, part["cells"]), *_best_change(report, name)]
        for scheme, fixed_cells in _fixed_by_config(report, name):
            yield [label, cells_text(fixed_cells, part["cells"]), "", "", f"{scheme}, by hand", ""]
        for decision in _in_force(report):
            if decision["part"] == name:
                ratio = next(
                    trial["ratio"]
                    for trial in report["compared"]
                    if trial["chosen"] and trial["round"] == decision["round"]
                )
                change = _groups_text(decision["groups"])
                yield [
                    label, cells_text(decision["cells"], part["cells"]), f"{ratio:.1f}",
                    _loss(decision), f"{'would be ' * report['dry_run']}{change}", decision["round"],
                ]  # fmt: skip


def _in_force(report: Record) -> list[Record]:
    """Return the decisions that still hold: without cells that all peers share again."""
    decisions = report["decisions"]
    return [
        decision
        for index, decision in enumerate(decisions)
        if not decision["shared_again"]
        and not any(
            later["part"] == decision["part"] and set(later["cells"]) & set(decision["cells"])
            for later in decisions[index + 1 :]
        )
    ]


def _best_change(report: Record, part: str) -> list[str]:
    """Return the last columns for the cells of a part that all peers share."""
    trials = [t for t in report["compared"] if t["part"] == part and not t["chosen"]]
    if not trials:
        return ["", "", "by all", ""]
    last = max(trial["round"] for trial in trials)
    best = max((trial for trial in trials if trial["round"] == last), key=itemgetter("gain"))
    return [f"{best['ratio']:.1f}", _loss(best), "by all", str(last)]


def _fixed_by_config(report: Record, part: str) -> Iterator[tuple[str, list[int]]]:
    """Yield how the cells are shared that the config's partial models fix, and these cells."""
    first = report["history"][0]["assignment"]
    for scheme, cells in first["cells"][part].items():
        if int(scheme) != SHARED:
            groups = None if int(scheme) == OWN else _groups(first, int(scheme))
            yield _groups_text(groups), cells


def _groups(assignment: Record, scheme: int) -> list[list[str]]:
    """Return the names of the peers in every group of a scheme."""
    labels = assignment["schemes"][scheme]
    groups: list[list[str]] = [[] for _ in range(max(labels) + 1)]
    for peer, label in zip(assignment["peers"], labels, strict=True):
        groups[label].append(peer)
    return groups


def _groups_text(groups: Sequence[Sequence[str]] | None) -> str:
    return "each peer's own" if groups is None else f"in {len(groups)} groups"


def _loss(change: Record) -> str:
    """Return the gain of a decision or trial as a change of the loss: a fall is negative."""
    from ...models.sharing import percent

    size, error = percent(abs(change["gain"])), percent(change["error"])
    sign = "" if size == percent(0) else "+" if change["gain"] < 0 else "−"
    return f"{sign}{size} ± {error}"


def part_in_words(report: Record, part: str) -> str:
    """Name a part as the tables do: inputs, outputs, norms, or the part's own name."""
    if part == report["network"]["outputs"]:
        return f"{part} (outputs)"
    return part.replace("norm-statistics", "norm statistics")


def cells_text(cells: Sequence[int], total: int) -> str:
    """Write cells of a part that has `total`: as numbers and ranges, `0–7, 9`, or as a count if too long."""
    if len(cells) == total:
        return f"all {total}" if total > 1 else "all"
    ranges: list[list[int]] = []
    for cell in cells:
        if ranges and cell == ranges[-1][1] + 1:
            ranges[-1][1] = cell
        else:
            ranges.append([cell, cell])
    if len(ranges) > MAX_LISTED_CELLS:
        return f"{len(cells)} of {total}"
    return ", ".join(f"{a}" if a == b else f"{a}–{b}" for a, b in ranges)


def group_rows(report: Record) -> Iterator[list[str]]:
    """Yield a row for every group of peers: its number, its peers, and the parts whose cells it averages."""
    parts: dict[str, tuple[list[list[str]], list[str]]] = {}
    for decision in _in_force(report):
        if (groups := decision["groups"]) is not None:
            # Peers that joined later are in the last assignment only.
            last = report["assignment"]
            for scheme, cells in last["cells"].get(decision["part"], {}).items():
                if int(scheme) > OWN and set(decision["cells"]) <= set(cells):
                    groups = _groups(last, int(scheme))
            _, part_labels = parts.setdefault(json.dumps(groups), (groups, []))
            part_labels.append(part_in_words(report, decision["part"]))
    for groups, part_labels in parts.values():
        for number, group in enumerate(groups, 1):
            cells = ", ".join(dict.fromkeys(part_labels))
            yield [f"{number} of {len(groups)}", ", ".join(group), cells]


def sentences(report: Record) -> list[str]:
    """Return a sentence for every decision, or why there is none."""
    if report["reason"]:
        return [f"nothing was decided: {report['reason']}"]
    decided = [decision["sentence"] for decision in report["decisions"]]
    return decided or ["nothing was changed: no change lowered the loss on held-out samples enough"]


# --- the picture ------------------------------------------------------------------------------------


def draw(report: Record, path: Path, title: str) -> list[Path]:
    """Draw the network at the start and after every decision, as PNG and SVG; return the files."""
    from matplotlib.lines import Line2D

    from ..study.figures import panels, save
    from .slices import MAX_DRAWN_CELLS, NetworkPicture, drawn_parts

    history, parts = report["history"], report["network"]["parts"]
    shown, left_out = drawn_parts(len(parts))
    caption = (
        "Rows are parts (layers) with the number of their cells, from the inputs down to the outputs. A line "
        "has the colour of the cell at its ends that fewer peers share."
    )
    if any(part["cells"] > MAX_DRAWN_CELLS for part in parts):
        caption += (
            f" Parts with more than {MAX_DRAWN_CELLS} cells are drawn with about {MAX_DRAWN_CELLS}."
        )
    if left_out:
        caption += f" {left_out} parts in the middle are not drawn."
    caption = "\n".join([caption, *sentences(report)])
    columns = min(3, len(history))
    count = -(-len(history) // columns)
    width = {1: 8.5, 2: 11.0}.get(columns, 14.0)
    height = (0.45 * len(shown) + 0.75) * count + 0.6
    figure, grid = panels(count, columns, caption, width, height)
    all_axes = [axes for row in grid for axes in row]
    colours = scheme_colours(report)
    heights = {part: -float(row) for row, part in enumerate(shown)}
    for axes in all_axes:
        axes.set_axis_off()
    for axes, entry in zip(all_axes, history, strict=False):
        text = f"after round {entry['round']}" if entry["round"] else "at the start"
        axes.set_title(text, loc="left", fontsize=9)
        slicing = _slicing_by_scheme(report, entry["assignment"])
        NetworkPicture(slicing, axes, heights, colours).draw(legend=False)
    handles = [
        Line2D([], [], color=colours[_key(scheme)], marker="o", linewidth=1.4, label=name)
        for scheme, name in scheme_names(report).items()
    ]
    figure.legend(
        handles=handles, loc="outside upper right", ncols=min(len(handles), 4), frameon=False, fontsize=8.5
    )  # fmt: skip
    figure.suptitle(title, x=0.02, ha="left", fontsize=11)
    return save(figure, path)


def scheme_names(report: Record) -> dict[int, str]:
    """Return the names of the ways in which cells are shared at any time of a run."""
    assignment = report["assignment"]
    used = {
        int(scheme)
        for entry in report["history"]
        for cells in entry["assignment"]["cells"].values()
        for scheme in cells
    }
    names = {SHARED: "shared by all peers", OWN: "each peer's own"}
    for scheme in range(OWN + 1, len(assignment["schemes"])):
        sizes = "+".join(str(len(group)) for group in _groups(assignment, scheme))
        name = f"in groups of {sizes} peers"
        names[scheme] = f"{name} ({scheme})" if name in names.values() else name
    return {scheme: names[scheme] for scheme in sorted(used)}


def _key(scheme: int) -> str:
    """Return the name of the partial model that stands for a way of sharing in the picture."""
    return f"scheme{scheme}"


def scheme_colours(report: Record) -> dict[str, str]:
    """Return the colours of the picture's models, and of weights between cells of two groupings."""
    from ...models import pair_name
    from ..study.figures import BLUE, COLOURS, VERMILION

    schemes, others = list(scheme_names(report)), COLOURS[2:-1]
    colours = {_key(SHARED): BLUE, _key(OWN): VERMILION}
    groupings = [scheme for scheme in schemes if scheme > OWN]
    for scheme in groupings:
        colours[_key(scheme)] = others[(scheme - OWN - 1) % len(others)]
    pairs = ((a, b) for a in groupings for b in groupings if a < b)
    return colours | {pair_name((_key(a), _key(b))): colours[_key(b)] for a, b in pairs}


def _slicing_by_scheme(report: Record, assignment: Record) -> Slicing:
    """Return the network's parts, sliced by the way in which cells are shared: for the picture only.

    Every two connected parts have one weight between any two of their cells.
    """
    from ...models import Anatomy, ModelGraph, ParameterMap, Part, Slicing, dense_axes

    parts = tuple(Part(part["name"], part["cells"]) for part in report["network"]["parts"])
    pairs = [tuple(pair) for pair in report["network"]["connections"]]
    unconnected = set(range(len(parts))) - {part for pair in pairs for part in pair}
    between = [*pairs, *((part,) for part in sorted(unconnected))]
    parameters = tuple(
        ParameterMap(str(axes), tuple(parts[axis].cells for axis in axes), dense_axes(parts, *axes))
        for axes in between
    )
    slices: dict[str, dict[str, list[int]]] = {}
    for part, by_scheme in assignment["cells"].items():
        for scheme, cells in by_scheme.items():
            slices.setdefault(_key(int(scheme)), {})[part] = cells
    shared = [_key(SHARED)] if _key(SHARED) in slices else []
    depends = {key: shared for key in slices if key not in (_key(SHARED), _key(OWN))}
    depends |= {key: [] for key in shared}
    if _key(OWN) in slices:
        depends[_key(OWN)] = list(depends)
    return Slicing(Anatomy(parts, parameters), slices, graph=ModelGraph(depends), cross=True)
