"""Draws a `History` with Bokeh: the graph, curves, a table of peers and a timeline of events.

`Panels` makes the figures once and fills them from a history as often as it changes. A report draws them
once, a page once a second. Clicks are handled in the browser, so that they work in a report too, which has no
server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from math import isfinite, log10, nan, sqrt
from typing import Any, TypeAlias

import networkx as nx
import numpy as np
from bokeh import layouts, models, plotting
from bokeh.palettes import Viridis256

from ..graphs.drawing import positions
from .history import NO_GROUP, Event, History, PeerState, natural

# The types of Bokeh's models describe their properties, not the values that these take.
bk: Any = models
Model: TypeAlias = Any
"""A model of Bokeh: a figure, widget, layout or data source."""

# Okabe and Ito's colours without black, which a dark page would hide.
COLOURS = (
    "#0a84c6", "#e06a1b", "#00a37a", "#cc79a7", "#e6a000", "#56b4e9", "#9d7bd8", "#8a9a2b",
    "#c0504d", "#5f9ea0", "#b8860b", "#708090",
)  # fmt: skip
INK = "#7b858f"
"""The colour of text and axes in figures: readable on a white page and on a dark one."""
MEAN = "#e0342b"
ALL_MODELS = "all partial models"
MOST_LABELS = 60
"""The most peers whose names are written into the graph."""
MOST_FULL_GRAPH = 24
"""The most peers whose links are drawn where every peer may reach every other."""
EVENT_ROWS = {
    "came": ("joined", "back", "rejoined", "restarted"),
    "took part": ("founded", "counted", "decided"),
    "warned": ("offline", "quarantined", "refused", "note"),
    "went": ("left", "lost", "dead"),
}
"""The rows of the timeline, from top to bottom, and the kinds of events in each."""
EVENT_COLOURS = dict(zip(EVENT_ROWS, ("#00a37a", "#0a84c6", "#e6a000", "#e0342b"), strict=True))
_ROW_OF = {kind: row for row, kinds in EVENT_ROWS.items() for kind in kinds}

WIDGET_STYLE = """
:host { color: var(--ink); font: inherit; }
.bk-input, select.bk-input, .bk-btn, .bk-btn-default {
  background: var(--panel); color: var(--ink); border-color: var(--line); font: inherit; }
.bk-btn.bk-active, .bk-btn-default.bk-active { background: var(--line); color: var(--ink); }
.bk-clearfix, .bk-clearfix * { color: inherit; }
"""
TABLE_STYLE = """
:host { min-width: var(--least, 560px); }
:host, .bk-data-table { color: var(--ink); background: var(--panel); font: inherit; }
.slick-header-columns, .slick-header-column.ui-state-default, .slick-headerrow-column {
  background: var(--panel) !important; color: var(--dim); border-color: var(--line) !important; }
.slick-row { background: var(--panel) !important; color: var(--ink); }
.slick-row.odd { background: var(--page) !important; }
.slick-cell { border-color: var(--line) !important; color: inherit; }
.slick-cell.selected { background: var(--line) !important; }
.slick-viewport, .grid-canvas { background: var(--panel); }
"""


class Panels:
    """The figures of one history; `roots` are to be placed on the page, by name, in that order.

    whole: the history at its end, if that is known: what it says nothing about is left out.
    """

    def __init__(self, history: History, whole: History | None = None, *, height: int = 380):
        self._history, self._whole = history, whole
        self._positions: dict[str, tuple[float, float]] = {}
        self._placed: tuple[frozenset[str], frozenset[tuple[str, str]]] | None = None
        self._drawn: dict[str, int] = {}
        self._events_drawn = -1
        self.peers = bk.ColumnDataSource(_peer_columns([], {}, {}, history))
        # Apart from the other columns, since only lines that have grown are sent; a click selects in both.
        self.lines = bk.ColumnDataSource(_line_columns([], {}), selected=self.peers.selected)
        self.links = bk.ColumnDataSource(
            {name: [] for name in ("x0", "y0", "x1", "y1", "width", "a", "b", "models")}
        )
        self.groups = bk.ColumnDataSource(
            {name: [] for name in ("xs", "ys", "group", "colour", "width")}
        )
        self.models = bk.ColumnDataSource({name: [] for name in ("xs", "ys", "model", "colour")})
        self.sent = bk.ColumnDataSource({"x": [], "y": []})
        self.events = bk.ColumnDataSource(_event_columns([], None))
        self._mapper = bk.LinearColorMapper(
            palette=Viridis256, low=0.0, high=1.0, nan_color="#9aa3ab"
        )
        self.headline = bk.Div(stylesheets=[WIDGET_STYLE], sizing_mode="stretch_width")
        self._selected = bk.Div(stylesheets=[WIDGET_STYLE], margin=(9, 8, 0, 0))
        self._model = bk.Select(
            value=ALL_MODELS, options=[ALL_MODELS], width=190, stylesheets=[WIDGET_STYLE]
        )
        graph, colours = self._graph(height)
        curves = self._curves(height)
        self.x_range = curves.x_range
        disagreement = self._lines(
            self.models, "model", "disagreement per partial model", log=True, legend=True
        )
        sent = self._lines(self.sent, "", "bytes sent by all peers, MB")
        timeline = self._timeline()
        show_all = bk.Button(label="show all", width=80, stylesheets=[WIDGET_STYLE])
        show_all.js_on_click(
            bk.CustomJS(args={"peers": self.peers}, code="peers.selected.indices = []")
        )
        table, event_table = self._peer_table(), self._event_table()
        self._filter_on_click(table)
        controls: Model = layouts.row(
            colours, self._model, self._selected, show_all, sizing_mode="stretch_width",
            styles={"flex-wrap": "wrap"},
        )  # fmt: skip
        roots: dict[str, Model] = {
            "headline": self.headline,
            "controls": controls,
            "graph": graph,
            "curves": curves,
            "disagreement": disagreement,
            "sent": sent,
            "peers": table,
            "timeline": timeline,
            "events": event_table,
        }
        left_out = set() if whole is None else _without_data(whole)
        self.roots = {name: root for name, root in roots.items() if name not in left_out}
        self.update()

    # --- making the figures -------------------------------------------------------------------------

    def _graph(self, height: int) -> tuple[Model, Model]:
        plot = line_figure(
            "peers and links (thicker: more bytes sent)",
            height,
            tools="pan,wheel_zoom,reset",
            match_aspect=True,
        )
        self._graph_title = plot.title
        plot.axis.visible = False
        plot.grid.visible = False
        plot.x_range.range_padding, plot.y_range.range_padding = 0.12, 0.2
        links = bk.CDSView(filter=self._model_filter())
        plot.segment(
            "x0", "y0", "x1", "y1", source=self.links, view=links, line_width="width",
            line_color=INK, line_alpha=0.55,
        )  # fmt: skip
        by_accuracy = {"field": "accuracy", "transform": self._mapper}
        nodes = plot.scatter(
            "x", "y", source=self.peers, view=bk.CDSView(filter=self._model_filter()), size="size",
            marker="marker", fill_color=by_accuracy, fill_alpha="fill", line_color="edge",
            line_width=1.5, nonselection_fill_alpha=0.12, nonselection_line_alpha=0.25,
        )  # fmt: skip
        plot.text(
            "x", "y", text="label", source=self.peers, view=bk.CDSView(filter=self._model_filter()),
            text_color=INK, text_font_size="11px", text_align="center", text_baseline="bottom",
            y_offset="above", nonselection_text_alpha=0.3,
        )  # fmt: skip
        plot.add_tools(_hover(nodes), bk.TapTool(renderers=[nodes]))
        bar = bk.ColorBar(
            color_mapper=self._mapper, height=8, title="accuracy (hollow: not there any more)",
            ticker=bk.BasicTicker(desired_num_ticks=4), **_text("title"), **_text("major_label"),
            background_fill_alpha=0, padding=4, bar_line_color=None,
        )  # fmt: skip
        plot.add_layout(bar, "below")
        colours = bk.RadioButtonGroup(
            labels=["by accuracy", "by group"], active=0, stylesheets=[WIDGET_STYLE]
        )
        colours.js_on_change(
            "active",
            bk.CustomJS(
                args={
                    "glyph": nodes.glyph,
                    "faded": nodes.nonselection_glyph,
                    "mapper": self._mapper,
                },
                code="""
                const fill = cb_obj.active == 0 ? {field: "accuracy", transform: mapper} : {field: "colour"};
                glyph.fill_color = fill; faded.fill_color = fill;""",
            ),
        )
        return plot, colours

    def _model_filter(self) -> Model:
        """Keep what belongs to the partial model that is chosen above the graph."""
        chosen = bk.CustomJSFilter(
            args={"select": self._model, "all": ALL_MODELS},
            code="""
            const models = source.data.models;
            return select.value == all ? null
                : Array.from(models, names => names.includes("|" + select.value + "|"));""",
        )
        self._model.js_on_change("value", bk.CustomJS(args={"f": chosen}, code="f.change.emit()"))
        return chosen

    def _curves(self, height: int) -> Model:
        plot = line_figure(
            "accuracy on each peer's own task", height, x_label=self._history.x_label
        )
        lines = plot.multi_line(
            "xs", "ys", source=self.lines, line_color="colour", line_alpha="alpha",
            line_width=1.2, nonselection_line_alpha=0.05, selection_line_alpha=1.0,
            selection_line_width=2.5,
        )  # fmt: skip
        means = plot.multi_line(
            "xs", "ys", source=self.groups, line_color="colour", line_width="width"
        )
        plot.add_tools(
            bk.HoverTool(renderers=[lines], tooltips=[("peer", "@peer"), ("group", "@group")]),
            bk.TapTool(renderers=[lines]),
        )
        plot.add_layout(
            line_legend([bk.LegendItem(label={"field": "group"}, renderers=[means])]), "below"
        )
        return plot

    def _lines(
        self,
        source: Model,
        name: str,
        title: str,
        *,
        log: bool = False,
        legend: bool = False,
    ) -> Model:
        options: dict[str, Any] = {}
        if log:  # Bokeh cannot choose a logarithmic range for no data
            self._log_range = bk.Range1d(start=1e-4, end=1.0)
            options = {"y_axis_type": "log", "y_range": self._log_range}
        plot = line_figure(
            title, 230, x_label=self._history.x_label, x_range=self.x_range, **options
        )
        if not name:
            plot.line("x", "y", source=source, line_width=2, line_color=COLOURS[0])
            return plot
        lines = plot.multi_line("xs", "ys", source=source, line_color="colour", line_width=1.8)
        plot.add_tools(bk.HoverTool(renderers=[lines], tooltips=[(name, f"@{name}")]))
        if legend:
            plot.add_layout(
                line_legend([bk.LegendItem(label={"field": name}, renderers=[lines])]), "below"
            )
        return plot

    def _timeline(self) -> Model:
        plot = line_figure(
            "what happened", 200, x_label=self._history.x_label, y_range=list(reversed(EVENT_ROWS)),
            # Peers may have joined long before the page was opened: the curves keep a range of their own.
            **({"x_range": self.x_range} if self._history.origin is None else {}),
        )  # fmt: skip
        self._event_filter = bk.BooleanFilter(booleans=None)
        marks = plot.scatter(
            "time", "row", source=self.events, view=bk.CDSView(filter=self._event_filter), size=11,
            fill_color="colour", fill_alpha=0.75, line_color=None,
        )  # fmt: skip
        tips = [("when", "@when"), ("what", "@kind"), ("peer", "@peer"), ("", "@text")]
        plot.add_tools(bk.HoverTool(renderers=[marks], tooltips=tips))
        return plot

    def _peer_table(self) -> Model:
        shown = [
            ("peer", "peer", 70, None), ("group", "group", 110, None),
            ("state", "state", 90, _STATE), ("reason", "reason", 260, _PLAIN),
            ("round", "round", 60, "0,0"), ("accuracy", "accuracy", 80, "0.000"),
            ("gain", "gain over alone", 110, "+0.000"), ("disagreement", "disagreement", 150, _PLAIN),
            ("mb", "MB sent", 80, "0,0.0"), ("seen", "last heard", 90, None),
            ("checked", "signature", 80, _STATE),
        ]  # fmt: skip
        if self._whole is not None:
            states = list(self._whole.peers.values())
            values = _peer_columns(states, group_colours(states), {}, self._whole)
            empty = {name for name, column in values.items() if _is_empty(column)}
            shown = [each for each in shown if each[0] not in empty | {"seen", "checked"}]
        self._peer_filter = bk.BooleanFilter(booleans=None)
        return bk.DataTable(
            source=self.peers, view=bk.CDSView(filter=self._peer_filter),
            columns=[_column(*each) for each in shown], height=260, index_position=None,
            row_height=26, sizing_mode="stretch_width", stylesheets=[TABLE_STYLE],
        )  # fmt: skip

    def _event_table(self) -> Model:
        shown = [
            ("when", "when", 90, None), ("kind", "event", 90, _STATE), ("peer", "peer", 80, None),
            ("text", "what happened", 520, _PLAIN),
        ]  # fmt: skip
        self._event_table_filter = bk.BooleanFilter(booleans=None)
        return bk.DataTable(
            source=self.events, view=bk.CDSView(filter=self._event_table_filter),
            columns=[_column(*each, sortable=False) for each in shown], height=200,
            index_position=None, row_height=26, sizing_mode="stretch_width",
            stylesheets=[TABLE_STYLE], selectable=False,
        )  # fmt: skip

    def _filter_on_click(self, table: Model) -> None:
        """Let a click on a peer (in the graph, a curve or the table) show only what is about that peer."""
        arguments = {
            "peers": self.peers, "events": self.events, "text": self._selected,
            "row": self._peer_filter,
            "marks": self._event_filter, "rows": self._event_table_filter,
        }  # fmt: skip
        code = """
        const chosen = new Set(peers.selected.indices.map(i => peers.data.peer[i]));
        const only = names => chosen.size == 0 ? null : Array.from(names, name => chosen.has(name));
        row.booleans = only(peers.data.peer);
        marks.booleans = only(events.data.peer);
        rows.booleans = only(events.data.peer);
        text.text = chosen.size == 0 ? "click a peer to see it alone"
            : "only peer " + Array.from(chosen).join(", ");
        """
        callback = bk.CustomJS(args=arguments, code=code)
        self.peers.selected.js_on_change("indices", callback)
        # Bokeh's table does not redraw rows that have changed if they are as many as before.
        redraw = bk.CustomJS(args={"view": table.view}, code="view.change.emit()")
        self.peers.js_on_change("data", redraw)
        self.events.js_on_change("data", callback)
        self._selected.text = "click a peer to see it alone"

    # --- filling them from the history --------------------------------------------------------------

    def update(self, history: History | None = None) -> None:
        """Draw what has changed in the history since the last call. history: takes the place of the first."""
        self._history = history = history or self._history
        states = list(history.peers.values())
        colours = group_colours(states)
        place = self._place(states)
        columns = _peer_columns(states, colours, place, history)
        if any(list(self.peers.data[name]) != values for name, values in columns.items()):
            self.peers.data = columns
        lines = _line_columns(states, colours)
        if any(list(self.lines.data[name]) != lines[name] for name in ("peer", "colour")):
            self.lines.data = lines
        elif grown := [i for i, s in enumerate(states) if self._drawn.get(s.name) != _stamp(s)]:
            self.lines.patch({axis: [(i, lines[axis][i]) for i in grown] for axis in ("xs", "ys")})
        self._drawn = {state.name: _stamp(state) for state in states}
        self._update_lines(colours)
        self._update_events()
        accuracies = list(history.accuracies().values())
        if accuracies:
            low, high = min(accuracies), max(accuracies)
            self._mapper.update(low=low, high=max(high, low + 0.01))
        models = [ALL_MODELS, *history.shared_models]
        if list(self._model.options) != models:
            self._model.options = models
        self.headline.text = headline(history)
        known, sent = history.links is not None, bool(history.sent.y)
        self._graph_title.text = (
            "peers; every peer may reach every other" if not known
            else "peers and links; thicker: more bytes sent" if sent
            else "peers and links"
        )  # fmt: skip

    def _update_lines(self, colours: Mapping[str, str]) -> None:
        history = self._history
        groups = [
            (name, curve, colours.get(name, COLOURS[0]), 2.2)
            for name, curve in sorted(history.groups.items(), key=lambda item: natural(item[0]))
            if len(history.groups) > 1
        ]
        groups.append(("mean of all peers", history.mean, MEAN, 3.4))
        self.groups.data = {
            "xs": [list(c.x) for _, c, *_ in groups], "ys": [list(c.y) for _, c, *_ in groups],
            "group": [name for name, *_ in groups], "colour": [colour for _, _, colour, _ in groups],
            "width": [width for *_, width in groups],
        }  # fmt: skip
        models = list(history.disagreement.items())[: len(COLOURS)]
        self.models.data = {
            "xs": [list(curve.x) for _, curve in models], "ys": [list(curve.y) for _, curve in models],
            "model": [name for name, _ in models],
            "colour": [COLOURS[index] for index in range(len(models))],
        }  # fmt: skip
        if values := [y for _, curve in models for y in curve.y]:
            self._log_range.update(start=min(values) / 2, end=max(values) * 2)
        self.sent.data = {"x": list(history.sent.x) or [0.0], "y": list(history.sent.y) or [0.0]}

    def _update_events(self) -> None:
        events = self._history.events
        stamp = hash(tuple(events[-3:])) ^ len(events)
        if stamp != self._events_drawn:
            self._events_drawn = stamp
            self.events.data = _event_columns(events, self._history.origin)

    def _place(self, states: Sequence[PeerState]) -> dict[str, tuple[float, float]]:
        """Return a position for every peer; computes them again only if peers or links have changed."""
        names = frozenset(peer.name for peer in states)
        given = self._history.links
        links = frozenset(link for link in given or () if names.issuperset(link))
        if given is None and len(names) <= MOST_FULL_GRAPH:
            ordered = sorted(names, key=natural)
            links = frozenset((a, b) for i, a in enumerate(ordered) for b in ordered[i + 1 :])
        if self._placed != (names, links):
            self._placed = names, links
            self._positions = place(names, links if given is not None else ())
        self._draw_links(links)
        return self._positions

    def _draw_links(self, links: frozenset[tuple[str, str]]) -> None:
        peers, ordered = self._history.peers, sorted(links)
        degree: dict[str, int] = {}
        for link in ordered:
            for end in link:
                degree[end] = degree.get(end, 0) + 1
        # Peers do not publish bytes per link: what a peer has sent is divided over its links.
        traffic = [sum(peers[end].bytes / degree[end] for end in link) for link in ordered]
        least = min(traffic, default=0.0)
        spread = max(traffic, default=0.0) - least or 1.0
        widest = 3.3 if self._history.links is not None else 0.5
        thin = 0.8 if len(ordered) > 300 else 1.0
        at = self._positions
        columns = {
            "x0": [at[a][0] for a, _ in ordered], "y0": [at[a][1] for a, _ in ordered],
            "x1": [at[b][0] for _, b in ordered], "y1": [at[b][1] for _, b in ordered],
            "width": [thin * (0.7 + widest * (amount - least) / spread) for amount in traffic],
            "a": [a for a, _ in ordered], "b": [b for _, b in ordered],
            "models": [_models(set(peers[a].models) & set(peers[b].models)) for a, b in ordered],
        }  # fmt: skip
        if any(list(self.links.data[name]) != values for name, values in columns.items()):
            self.links.data = columns


def place(
    names: frozenset[str], links: frozenset[tuple[str, str]] | tuple[()]
) -> dict[str, tuple[float, float]]:
    """Return a position for every peer: on a circle if no links are given, else by distances in hops."""
    ordered = sorted(names, key=natural)
    if not links:
        angles = np.linspace(0, 2 * np.pi, len(ordered), endpoint=False)
        circle = np.stack([np.sin(angles), np.cos(angles)], axis=1)
        return {name: (float(x), float(y)) for name, (x, y) in zip(ordered, circle, strict=True)}
    numbers = {name: index for index, name in enumerate(ordered)}
    graph = nx.Graph()
    graph.add_nodes_from(range(len(ordered)))
    graph.add_edges_from((numbers[a], numbers[b]) for a, b in links)
    at = positions(graph)
    return {name: (float(at[i][0]), float(at[i][1])) for name, i in numbers.items()}


def group_colours(states: Sequence[PeerState]) -> dict[str, str]:
    """Return a colour for each group, in natural order of their names."""
    groups = sorted({peer.group for peer in states}, key=natural)
    return {group: COLOURS[index % len(COLOURS)] for index, group in enumerate(groups)}


def headline(history: History) -> str:
    """Say in one line how many peers there are, and how well they do."""
    present = [peer for peer in history.peers.values() if not peer.gone]
    gone = len(history.peers) - len(present)
    parts = [f"<b>{len(present)}</b> peers" + (f", {gone} gone" if gone else "")]
    accuracies = history.accuracies()
    if accuracies:
        worst = min(accuracies, key=lambda name: accuracies[name])
        mean = sum(accuracies.values()) / len(accuracies)
        parts.append(
            f"mean accuracy <b>{mean:.3f}</b>, worst {accuracies[worst]:.3f} "
            f"(peer {_escape(worst)}), best {max(accuracies.values()):.3f}"
        )
    rounds = [peer.round for peer in present]
    if rounds:
        low, high = min(rounds), max(rounds)
        parts.append(f"round {high}" if low == high else f"rounds {low} to {high}")
    if history.sent.y:
        parts.append(f"{history.sent.y[-1]:,.1f} MB sent")
    if history.x_label != "round":
        parts.append(f"at {history.now:,.0f} {history.x_label}")
    return " · ".join(parts)


def line_figure(title: str, height: int, x_label: str = "", **options: Any) -> Model:
    """Return an empty figure without a background, so that the page's own shows through."""
    options = {"tools": "pan,wheel_zoom,box_zoom,reset", **options}
    plot: Model = plotting.figure(
        title=title, height=height, sizing_mode="stretch_width", toolbar_location="right",
        active_scroll=None, min_border_left=45, background_fill_alpha=0, border_fill_alpha=0,
        outline_line_color=None, **options,
    )  # fmt: skip
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.title.text_color, plot.title.text_font_size = INK, "13px"
    for axis in plot.axis:
        axis.update(
            axis_line_color=INK, major_tick_line_color=INK, minor_tick_line_color=None,
            axis_line_alpha=0.5, major_tick_line_alpha=0.5, **_text("axis_label"), **_text("major_label"),
        )  # fmt: skip
    if x_label:
        plot.xaxis.axis_label = x_label
    plot.grid.grid_line_color, plot.grid.grid_line_alpha = INK, 0.2
    return plot


def _text(prefix: str) -> dict[str, Any]:
    style: dict[str, Any] = {
        "text_color": INK,
        "text_font_size": "11px",
        "text_font_style": "normal",
    }
    return {f"{prefix}_{name}": value for name, value in style.items()}


def line_legend(items: list[Model]) -> Model:
    """Return a legend for the space below a figure."""
    return bk.Legend(
        items=items, orientation="horizontal", ncols=3, background_fill_alpha=0, border_line_color=None,
        label_text_color=INK, label_text_font_size="11px", glyph_width=18, spacing=6, padding=2, margin=0,
    )  # fmt: skip


def _hover(renderer: Any) -> Model:
    tips = [
        ("peer", "@peer"), ("group", "@group"), ("state", "@state @reason"), ("round", "@round"),
        ("accuracy", "@accuracy{0.000}"), ("MB sent", "@mb{0,0.0}"),
    ]  # fmt: skip
    return bk.HoverTool(renderers=[renderer], tooltips=tips)


_PLAIN = '<span title="<%- value %>"><%- value %></span>'
_STATE = """<span style="color: <%= ["left", "dead", "lost", "refused", "offline", "quarantined"]
    .includes(value) ? "var(--bad)" : "inherit" %>"><%- value %></span>"""


def _column(field: str, title: str, width: int, form: Any = None, **options: Any) -> Model:
    """Return a column of a table. form: a format of numbers, or the HTML of a cell."""
    if form is not None:
        numeric = not form.startswith("<")
        options["formatter"] = (
            bk.NumberFormatter(format=form, nan_format="")
            if numeric
            else bk.HTMLTemplateFormatter(template=form)
        )
    return bk.TableColumn(field=field, title=title, width=width, **options)


def _peer_columns(
    states: Sequence[PeerState],
    colours: Mapping[str, str],
    place: Mapping[str, tuple[float, float]],
    history: History,
) -> dict[str, list[Any]]:
    """Return the columns of the peers' source: one row for each peer."""
    count = max(len(states), 1)
    size = min(max(150 / sqrt(count), 8), 30)
    named = len(states) <= MOST_LABELS
    return {
        "peer": [s.name for s in states],
        "label": [s.name if named else "" for s in states],
        "above": [-size / 2 - 1 for _ in states],
        "group": [s.group for s in states],
        "colour": [colours[s.group] for s in states],
        "x": [place.get(s.name, (0.0, 0.0))[0] for s in states],
        "y": [place.get(s.name, (0.0, 0.0))[1] for s in states],
        "size": [size for _ in states],
        "marker": ["circle_x" if s.gone else "circle" for s in states],
        "fill": [0.0 if s.gone else 0.3 if s.state == "offline" else 0.95 for s in states],
        "edge": ["#e0342b" if s.gone else INK for s in states],
        "state": [s.state for s in states],
        "reason": [s.reason for s in states],
        "round": [s.round for s in states],
        "accuracy": [s.accuracy for s in states],
        "gain": [s.gain for s in states],
        "checked": [s.checked for s in states],
        "disagreement": [_disagreement(s) for s in states],
        "mb": [s.bytes / 1e6 if s.bytes else nan for s in states],
        "seen": ["" if history.x_label == "round" else _ago(s.seen, history.now) for s in states],
        "models": [_models(s.models) for s in states],
    }


def _line_columns(states: Sequence[PeerState], colours: Mapping[str, str]) -> dict[str, list[Any]]:
    """Return the columns of the source of the peers' curves, in the order of `_peer_columns`."""
    alpha = min(0.9, 0.25 + 5 / max(len(states), 1))
    return {
        "peer": [s.name for s in states],
        "group": [s.group for s in states],
        "colour": [colours[s.group] for s in states],
        "alpha": [alpha for _ in states],
        "xs": [list(s.curve.x) for s in states],
        "ys": [list(s.curve.y) for s in states],
    }


def _without_data(history: History) -> set[str]:
    """The names of the figures that a history has nothing for."""
    has = {
        "disagreement": history.disagreement, "sent": history.sent.y, "timeline": history.events,
        "events": history.events,
    }  # fmt: skip
    return {name for name, data in has.items() if not data}


def _is_empty(column: Sequence[Any]) -> bool:
    """Whether a table's column tells nothing."""
    return all(value in ("", NO_GROUP) or value != value for value in column)


def _event_columns(events: Sequence[Event], origin: float | None) -> dict[str, list[Any]]:
    """Return the columns of the events' source, the newest first. origin: see History."""
    newest = sorted(events, key=lambda event: -event.time)
    return {
        "time": [event.time for event in newest],
        "when": [_when(event.time, origin) for event in newest],
        "row": [_ROW_OF[event.kind] for event in newest],
        "kind": [event.kind for event in newest],
        "colour": [EVENT_COLOURS[_ROW_OF[event.kind]] for event in newest],
        "peer": [event.peer for event in newest],
        "text": [event.text for event in newest],
    }


def _when(time: float, origin: float | None) -> str:
    """The time of an event: by the wall clock, if it is about now."""
    if origin is None:
        return f"{time:,.1f}".removesuffix(".0")
    today = abs(time) < 12 * 3600
    return f"{datetime.fromtimestamp(origin + time):{'%H:%M:%S' if today else '%d %b %H:%M'}}"


def _stamp(state: PeerState) -> int:
    """Change whenever a peer's curve does."""
    curve = state.curve
    return hash((len(curve.x), curve.x[-1], curve.y[-1])) if curve.x else 0


def _models(names: Any) -> str:
    return "|" + "|".join(sorted(names)) + "|"


def _disagreement(state: PeerState) -> str:
    """The peer's largest disagreement, and in which partial model."""
    finite = {m: d for m, d in state.disagreement.items() if isfinite(d) and d > 0}
    if not finite:
        return ""
    model = max(finite, key=lambda name: finite[name])
    return f"{10 ** round(log10(finite[model]), 1):.1e} {model}"


def _ago(seen: float, now: float) -> str:
    if not isfinite(seen) or not isfinite(now):
        return ""
    return f"{max(now - seen, 0):.0f} s ago"


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
