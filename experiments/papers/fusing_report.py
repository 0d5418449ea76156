"""Tables and figures of a study of matching, drawn from its records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from scipy.special import stdtrit

from ..cli import console
from ..results import Record, write_csv, write_json
from ..study.figures import Line, draw_lines
from .fusing_study import Difference, FusionStudy, Mark, differences, marks

_LABELS = {"accuracy": "accuracy", "cells": "hidden cells", "parameters": "parameters"}


def write_report(
    study: FusionStudy, records: Sequence[Record], out: Path, *, full: bool
) -> list[Path]:
    """summary.csv, differences.csv where there is something to compare, and the figures."""
    found = marks(records)
    summary = out / "summary.csv"
    header = [
        "panel", study.x_label, "method", "seeds", "accuracy", "standard error", "cells",
        "parameters", f"accuracy, {study.printed_by}",
    ]  # fmt: skip
    write_csv(summary, header, (_row(study, mark) for mark in found))
    files = [summary]
    if paired := differences(records):
        files.append(out / "differences.csv")
        write_csv(
            files[-1],
            ["panel", study.x_label, "method", "less", "seeds", "points", "standard error"],
            ([d.panel, f"{d.x:g}", d.method, d.less, d.seeds, f"{d.points:.2f}", f"{d.error:.2f}"]
             for d in paired),
        )  # fmt: skip
    write_json(out / "study.json", {"name": study.name, "full": full, "section": study.section})
    seeds = min(mark.seeds for mark in found)
    caption = (
        f"{study.section}; mean of {seeds} seeds, bars: standard error.\n{study.caption(full)}"
    )
    for panel in _panels(study, found):
        for group, methods in study.groups.items():
            shown = [m for m in found if m.method in methods] if methods else found
            for measure in study.measures:
                files += _draw(study, (panel, group), shown, measure, out, caption)
    return files


def show(study: FusionStudy, records: Sequence[Record]) -> None:
    """The same on the terminal, in percent, with what was printed elsewhere beside it."""
    found = marks(records)
    rows = []
    for mark in found:
        printed = study.printed.get((mark.panel, mark.x, mark.method))
        rows.append(
            (
                mark.panel, f"{mark.x:g}", mark.method, mark.seeds, f"{100 * mark.accuracy:.1f}",
                f"{100 * mark.error:.1f}", f"{mark.cells:.0f}", f"{mark.parameters:.0f}",
                "" if printed is None else f"{printed:.1f}",
            )
        )  # fmt: skip
    header = [
        "panel", study.x_label, "method", "seeds", "accuracy %", "± s.e.", "cells", "parameters",
        study.printed_by,
    ]  # fmt: skip
    if not study.printed:
        rows, header = [row[:-1] for row in rows], header[:-1]
    console.table(f"{study.title} ({study.section})", header, rows)
    if paired := differences(records):
        console.table(
            "paired differences in accuracy, same seeds",
            ["panel", study.x_label, "method", "less", "seeds", "points", "± s.e.", "verdict"],
            [
                (d.panel, f"{d.x:g}", d.method, d.less, d.seeds, f"{d.points:+.2f}",
                 f"{d.error:.2f}", _verdict(d))
                for d in paired
            ],
        )  # fmt: skip
    if study.name == "pfnm-table":
        _claims(study, found)


def _claims(study: FusionStudy, found: Sequence[Mark]) -> None:
    """What the table is to show, and whether it does."""
    by = {(mark.panel, mark.method): mark for mark in found}
    panels = list(dict.fromkeys(mark.panel for mark in found))
    rows, gaps = [], []
    for panel in panels:
        matched = 100 * by[panel, "PFNM"].accuracy
        least = study.printed[panel, 10, "PFNM"] - 4
        rows.append(
            (f"{panel}: PFNM, %", f"{matched:.1f}", f"at least {least:.1f}", matched >= least)
        )
        gaps.append(matched - 100 * by[panel, "FedAvg, own starts"].accuracy)
        near = 100 * by[panel, "MAGI λ=0.1"].accuracy - matched
        rows.append((f"{panel}: MAGI λ=0.1 less PFNM", f"{near:+.1f}", "within 3", abs(near) <= 3))
        sizes = [by[panel, name].cells for name in ("PFNM", "MAGI λ=0.1", "MAGI λ=0.5", "MAGI λ=1")]
        falls = all(a >= b for a, b in pairwise(sizes)) and sizes[-1] < sizes[0]
        shown = " → ".join(f"{size:.0f}" for size in sizes)
        rows.append((f"{panel}: cells by λ = 0, 0.1, 0.5, 1", shown, "falls", falls))
    gap = sum(gaps) / len(gaps)
    rows.append(("mean gap to FedAvg with own starts", f"{gap:.1f}", "at least 25", gap >= 25))
    console.table(
        "claims",
        ["what", "measured", "wanted", "met"],
        [(*row[:3], "yes" if row[3] else "NO") for row in rows],
    )


def _verdict(difference: Difference) -> str:
    """Student's t at 95 %: with a handful of seeds two standard errors are not enough."""
    if difference.seeds < 2:
        return "one seed"
    if abs(difference.points) <= stdtrit(difference.seeds - 1, 0.975) * difference.error:
        return "not told apart"
    return "better" if difference.points > 0 else "worse"


def _row(study: FusionStudy, mark: Mark) -> list[object]:
    printed = study.printed.get((mark.panel, mark.x, mark.method))
    return [
        mark.panel, f"{mark.x:g}", mark.method, mark.seeds, f"{mark.accuracy:.4f}",
        f"{mark.error:.4f}", f"{mark.cells:.1f}", f"{mark.parameters:.0f}",
        "" if printed is None else f"{printed / 100:.4f}",
    ]  # fmt: skip


def _panels(study: FusionStudy, found: Sequence[Mark]) -> list[str]:
    """Panels with a curve; rows of a table stand side by side in one figure."""
    if study.name in ("pfnm-table", "magi-figure2"):
        return [""]
    return list(dict.fromkeys(mark.panel for mark in found))


def _draw(
    study: FusionStudy,
    place: tuple[str, str],
    found: Sequence[Mark],
    measure: str,
    out: Path,
    caption: str,
) -> list[Path]:
    panel, group = place
    ticks: Mapping[float, str] | None = None
    x_label = study.x_label
    if study.name == "pfnm-table":
        names = list(dict.fromkeys(mark.panel for mark in found))
        lines = _by(found, "method", lambda mark: names.index(mark.panel), measure)
        ticks = {i: name.replace(", ", "\n") for i, name in enumerate(names)}
        x_label = ""
    elif study.name == "magi-figure2":
        lines = _by(found, "panel", lambda mark: _lambda(mark.method), measure)
        x_label = "λ"
    else:
        mine = [mark for mark in found if mark.panel == panel]
        lines = _by(mine, "method", lambda mark: mark.x, measure)
        ticks = {x: f"{x:g}" for x in sorted({mark.x for mark in mine})}
    words = ["figure", panel.replace(" ", "-").lower(), group, measure]
    return draw_lines(
        out / "-".join(word for word in words if word), lines,
        title=study.title + (f", {panel}" if panel else ""),
        x_label=x_label, y_label=_LABELS[measure], caption=caption, ticks=ticks,
    )  # fmt: skip


def _lambda(method: str) -> float:
    return float(method.partition("λ=")[2] or 0)


def _by(found: Sequence[Mark], line: str, x: Callable[[Mark], float], measure: str) -> list[Line]:
    lines = []
    for label in dict.fromkeys(getattr(mark, line) for mark in found):
        mine = sorted((m for m in found if getattr(m, line) == label), key=x)
        values = [getattr(mark, measure) for mark in mine]
        error = [mark.error if measure == "accuracy" else 0.0 for mark in mine]
        lines.append(
            Line(
                label,
                [x(mark) for mark in mine],
                values,
                [v - e for v, e in zip(values, error, strict=True)],
                [v + e for v, e in zip(values, error, strict=True)],
            )
        )
    return lines
