"""Makes a report: one HTML file, without anything from the network, about one or several results folders."""

from __future__ import annotations

import base64
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from math import isfinite
from pathlib import Path

from bokeh.embed import file_html
from bokeh.resources import INLINE

from ..results import write_bytes
from .figures import Panels
from .folders import RunFolder, StudyFolder, read_folders
from .history import History, natural_key
from .style import (
    COLOURS,
    MEAN_COLOUR,
    TEMPLATE,
    Model,
    Section,
    bk,
    html_table,
    line_columns,
    line_figure,
    named_lines,
    variables,
)

MOST_ROWS = 16
"""The most rows of a table, other than that of the results, that are shown without a click."""

TABLE_TITLES = {
    "summary": "results",
    "differences": "differences between methods, with the same seeds; low and high: the 95 % interval",
}
"""The headings of a study's tables, by their files' names, where these are not their headings."""


def write_report(paths: Sequence[Path], out: Path) -> list[str]:
    """Write the report about results folders to a file; returns what a reader must know of them, in lines.

    Raises ConfigError if a folder holds no results.
    """
    folders = read_folders(paths)
    problems = [line for folder in folders for line in folder.problems]
    title = " · ".join(dict.fromkeys(folder.name for folder in folders))
    sections = list(_sections(folders, problems))
    if not any(section.models for section in sections):  # Bokeh writes no document without a model
        sections[0].place({"nothing": bk.Div(visible=False)})
        sections[0].roots["nothing"] = "bare"
    models = [model for section in sections for model in section.models.values()]
    html = file_html(
        models, INLINE, title=title, template=TEMPLATE, suppress_callback_warning=True,
        template_variables=variables(_subtitle(folders), sections),
    )  # fmt: skip
    write_bytes(out, html.encode())
    return problems


def _subtitle(folders: Sequence[RunFolder | StudyFolder]) -> str:
    commands = ", ".join(dict.fromkeys(f"gossamer {f.command}" for f in folders if f.command))
    return f"a report of {len(folders)} run{'s' * (len(folders) > 1)}" + (
        f" of {commands}" if commands else ""
    )


def _sections(folders: Sequence[RunFolder | StudyFolder], problems: Sequence[str]) -> list[Section]:
    runs = [folder for folder in folders if isinstance(folder, RunFolder)]
    histories = [run.history() for run in runs]
    warning = "".join(f'<p class="problem">{escape(line)}</p>' for line in problems)
    first = Section("", warning)
    if len(folders) > 1:
        first.html += "<h3>what differs between the runs</h3>" + _differences(folders)
    if runs:
        first.html += "<h3>accuracy at the end</h3>" + _outcomes(runs, histories)
    if len(runs) > 1:
        first.place({"compared": _compared(runs)})
        first.roots["compared"] = "box wide"
    sections, history_of_next_run = [first], iter(histories)
    for index, folder in enumerate(folders):
        if isinstance(folder, StudyFolder):
            sections.append(_study(folder, index))
        else:
            sections.append(_run(folder, next(history_of_next_run), index))
    return sections


# --- several runs ---------------------------------------------------------------------------------------


def _differences(folders: Sequence[RunFolder | StudyFolder]) -> str:
    """The keys of the configs whose values are not the same in all runs, and have an effect in one."""
    keys = dict.fromkeys(key for folder in folders for key in folder.changed)
    rows = [[key, *(folder.settings.get(key, "") for folder in folders)] for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1 and row[0] != "name"]
    commands = ["command", *(folder.command for folder in folders)]
    differing = [commands, *differing] if len(set(commands[1:])) > 1 else differing
    if not differing:
        return '<p class="note">nothing: the configs are the same</p>'
    table = html_table(["key", *(folder.name for folder in folders)], differing)
    if len(differing) <= MOST_ROWS:
        return table
    return f"<details><summary>{len(differing)} keys of the configs</summary>{table}</details>"


def _outcomes(runs: Sequence[RunFolder], histories: Sequence[History]) -> str:
    """One row for each run: mean, spread, worst peer and group, bytes and time."""
    rows = []
    for run, history in zip(runs, histories, strict=True):
        values = history.accuracies()
        if not values:
            rows.append([run.name, len(history.peers), *[""] * 7])
            continue
        worst = min(values, key=lambda name: values[name])
        groups = {name: curve.y[-1] for name, curve in history.groups.items() if curve.y}
        lowest = min(groups, key=lambda name: groups[name])
        rows.append(
            [
                run.name, f"{len(values)} of {len(history.peers)}",
                f"{statistics.fmean(values.values()):.3f}",
                f"{statistics.stdev(values.values()):.3f}" if len(values) > 1 else "",
                f"{values[worst]:.3f} (peer {worst})", f"{max(values.values()):.3f}",
                f"{groups[lowest]:.3f} ({lowest})" if len(groups) > 1 else "",
                f"{_bytes(run, history) / 1e6:,.1f}" if _bytes(run, history) else "not counted",
                f"{run.end:,.0f} {run.x_label}{'s' * (run.x_label == 'round')}",
            ]
        )  # fmt: skip
    header = [
        "run", "peers present", "mean", "sd over peers", "worst", "best", "worst group", "MB sent", "length",
    ]  # fmt: skip
    filled = [i for i in range(len(header)) if any(row[i] != "" for row in rows)]
    return html_table([header[i] for i in filled], [[row[i] for i in filled] for row in rows])


def _bytes(run: RunFolder, history: History) -> float:
    """Bytes that all peers sent: counted live, or by the simulator's table of traffic."""
    sent = sum(peer.bytes for peer in history.peers.values())
    return sent or sum(float(row["bytes"]) for row in run.traffic)


def _compared(runs: Sequence[RunFolder]) -> Model:
    """The mean accuracy of all runs by round."""
    curves = {run.name: run.accuracy_by_round for run in runs}
    lines = {name: (list(curve), list(curve.values())) for name, curve in curves.items()}
    return _curve_figure("mean accuracy of all runs, by round", "round", lines, "run")


def _curve_figure(
    title: str,
    x_label: str,
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    name: str,
    **options: str,
) -> Model:
    source = bk.ColumnDataSource(line_columns(name, lines))
    return named_lines(source, name, title, 340, x_label=x_label, **options)


# --- one run --------------------------------------------------------------------------------------------


def _run(run: RunFolder, history: History, index: int) -> Section:
    section = Section(run.name)
    section.place(Panels(history, history).roots, f"run{index}-")
    section.after = _final_table(history) + _traffic(run) + _about(run)
    return section


def _final_table(history: History) -> str:
    """By group (or task): how many peers, their mean, spread and worst peer."""
    members: dict[str, dict[str, float]] = {}
    for name, accuracy in history.accuracies().items():
        members.setdefault(history.peers[name].group, {})[name] = accuracy
    rows = []
    for group, values in sorted(members.items(), key=lambda item: natural_key(item[0])):
        worst = min(values, key=lambda name: values[name])
        spread = f"{statistics.stdev(values.values()):.3f}" if len(values) > 1 else ""
        mean = f"{statistics.fmean(values.values()):.3f}"
        rows.append([group, len(values), mean, spread, f"{values[worst]:.3f}", worst])
    header = ["task or group", "peers", "mean accuracy", "sd over peers", "worst", "worst peer"]
    gains = [peer.gain for peer in history.peers.values() if isfinite(peer.gain)]
    gain = (
        f'<p class="note">gain over learning alone, by the {len(gains)} peers with a lone twin: '
        f"{statistics.fmean(gains):+.3f} on average, {min(gains):+.3f} at the least</p>"
        if gains
        else ""
    )
    if len(rows) == 1:  # the table of all runs says the same
        return gain
    return f"<h3>accuracy at the end, by task or group</h3>{html_table(header, rows)}{gain}"


def _traffic(run: RunFolder) -> str:
    if not run.traffic:
        return ""
    header = list(run.traffic[0])
    rows = [list(row.values()) for row in run.traffic]
    return f"<h3>bytes per partial model</h3>{html_table(header, rows)}"


def _about(folder: RunFolder | StudyFolder) -> str:
    """Warnings, command, versions, and the config where it is not at its defaults."""
    info, html = folder.info, ""
    if warnings := info.get("warnings"):
        html += "<h3>notes and warnings of the run</h3>"
        html += "".join(f'<p class="note">{escape(str(line))}</p>' for line in warnings)
    if folder.repeat:
        html += f"<h3>the command that repeats it</h3><pre>{escape(folder.repeat)}</pre>"
    versions = info.get("versions") or {}
    facts = [f"{name} {version}" for name, version in versions.items()]
    facts += [f"{word} {info[word]}" for word in ("started", "written") if info.get(word)]
    html += f'<p class="note">{escape("; ".join([str(folder.path), *facts]))}</p>'
    if not folder.changed:
        return html
    table = html_table(["key", "value"], folder.changed.items())
    summary = "the config: what is not at its default and has an effect"
    return f"{html}<details><summary>{summary}</summary>{table}</details>"


# --- a study --------------------------------------------------------------------------------------------


def _study(study: StudyFolder, index: int) -> Section:
    section = Section(study.name)
    figures: dict[str, Model] = {}
    if study.curves:
        figures["rounds"] = _method_curves(study, "round", "mean accuracy by round")
        figures["bytes"] = _method_curves(study, "bytes", "mean accuracy by bytes sent, MB", 1e6)
    elif study.command == "sweep" and study.outcomes:  # a paper has a figure of its own
        figures["outcomes"] = _outcome_figure(study)
    section.place(figures, f"study{index}-")
    for name, (header, *rows) in study.tables.items():
        title = TABLE_TITLES.get(name, name)
        table = html_table(header, rows)
        if name != "summary" and len(rows) > MOST_ROWS:
            table = f"<details><summary>{len(rows)} rows</summary>{table}</details>"
        section.html += f"<h3>{escape(title)}</h3>{table}"
    # The study's own pictures show the same as Bokeh's figures.
    for picture in () if figures else study.pictures:
        data = base64.b64encode(picture.read_bytes()).decode()
        section.after += (
            f'<p><img alt="{escape(picture.stem)}" src="data:image/png;base64,{data}"></p>'
        )
    section.after += f'<p class="note">{len(study.records)} runs</p>' + _about(study)
    return section


def _method_curves(study: StudyFolder, x: str, title: str, unit: float = 1.0) -> Model:
    """The mean over clients and seeds of each method; by bytes, only of those that send any."""
    lines: dict[str, tuple[list[float], list[float]]] = {}
    silent = {
        method
        for method, curves in study.curves.items()
        if not any(curve[-1]["bytes"] for curve in curves)
    }
    # Those that send nothing come last: then the others have the same colours in both figures.
    for method in sorted(study.curves, key=lambda name: name in silent):
        if x == "bytes" and method in silent:
            continue
        curves = study.curves[method]
        points = list(zip(*curves, strict=False))  # a point: the tests of all seeds after a round
        xs = [statistics.fmean(float(test[x]) for test in point) / unit for point in points]
        ys = [statistics.fmean(statistics.fmean(_accuracies(t)) for t in point) for point in points]
        if x == "bytes":  # a logarithmic axis has no place for 0 bytes
            xs, ys = xs[xs.count(0.0) :], ys[xs.count(0.0) :]
        lines[method] = xs, ys
    # Some methods send a hundred times as many bytes as others.
    options = {"x_axis_type": "log"} if x == "bytes" else {}
    return _curve_figure(title, "MB" if x == "bytes" else x, lines, "method", **options)


def _accuracies(test: dict[str, object]) -> list[float]:
    values = test["accuracy"]
    return [float(v) for v in values] if isinstance(values, list) else [float(str(values))]


def _outcome_figure(study: StudyFolder) -> Model:
    """A dot for every run, in a row for each combination of settings."""
    outcomes = study.outcomes
    names = sorted(outcomes, key=natural_key)
    plot = line_figure(
        "accuracy: a dot for every seed, a line for their mean", 90 + 26 * len(names), "accuracy",
        y_range=list(reversed(names)),
    )  # fmt: skip
    dots = [(name, value) for name, values in outcomes.items() for value in values]
    source = bk.ColumnDataSource({"name": [n for n, _ in dots], "value": [v for _, v in dots]})
    drawn = plot.scatter("value", "name", source=source, size=9, fill_alpha=0.6, color=COLOURS[0])
    means = {name: statistics.fmean(values) for name, values in outcomes.items()}
    plot.scatter(
        list(means.values()), list(means), marker="dash", angle=1.5708, size=22, line_width=2.5,
        color=MEAN_COLOUR,
    )  # fmt: skip
    plot.add_tools(
        bk.HoverTool(renderers=[drawn], tooltips=[("", "@name"), ("accuracy", "@value{0.0000}")])
    )
    return plot
