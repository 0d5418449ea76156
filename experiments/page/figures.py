"""Draws a `History` with Bokeh: the graph, curves, a table of peers and a timeline of events.

`Panels` makes the figures once and fills them from a history as often as it changes. A report draws them
once, a page once a second. Clicks are handled in the browser, so that they work in a report too, which has no
server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from html import escape
from math import ceil, floor, isfinite, log10, nan
from typing import Any

from bokeh import layouts

from .history import NO_GROUP, Event, History, PeerState, natural_key
from .peer_map import Links, Names, PeerMap, Positions, models_text, peer_size, place_by_hops
from .style import (
    COLOURS,
    INK,
    MEAN_COLOUR,
    NO_DATA,
    PLAIN_CELL,
    STATE_CELL,
    TABLE_STYLE,
    WIDGET_STYLE,
    Model,
    bk,
    column,
    full_height,
    least_width,
    line_columns,
    line_figure,
    line_legend,
    log_range,
    named_lines,
    refill,
)  # fmt: skip

SMALL_HEIGHT = 230
"""The height of the smaller figures, in pixels."""
ROW_HEIGHT = 26
"""The height of a table's row, in pixels."""
MOST_ROWS, MOST_EVENT_ROWS = 9, 7
"""The most rows of the tables of peers and of events that are shown before they are scrolled."""
MOST_LABELS = 60
"""The most peers whose names are written into the graph."""
EVENT_ROWS = {
    "came": ("joined", "back", "rejoined", "restarted"),
    "took part": ("founded", "counted", "aligned", "fused", "decided"),
    "warned": ("offline", "banned", "refused", "note"),
    "went": ("left", "lost", "dead"),
}
"""The rows of the timeline, from top to bottom, and the kinds of events in each."""
MARKED = {
    "aligned": "a trained network was aligned", "fused": "a trained network was fused",
    "decided": "decided what to share", "dead": "a peer died", "lost": "a peer was lost",
}  # fmt: skip
"""The kinds of events that curves are marked with, since they may change what other peers learn, and the
legend's words for each."""
EVENT_COLOURS = dict(zip(EVENT_ROWS, ("#00a37a", "#0a84c6", "#e6a000", "#e0342b"), strict=True))
_ROW_OF = {kind: row for row, kinds in EVENT_ROWS.items() for kind in kinds}


class Panels:
    """The figures of one history; `roots` are to be placed on the page, by name, in that order.

    final: the history of the finished run, if it is finished; figures that it has no data for are left out.
    place: returns the positions of peers on the map, from their names and links.
    spread: whether peers may be coloured by `PeerState.spread` too.
    """

    def __init__(
        self,
        history: History,
        final: History | None = None,
        *,
        height: int = 380,
        place: Callable[[Names, Links], Positions] = place_by_hops,
        spread: bool = False,
    ):
        self._history, self._final = history, final
        self._final_columns: dict[str, list[Any]] | None = None
        if final is not None:
            states = _ordered(final)
            self._final_columns = _peer_columns(states, group_colours(states), {}, final)
        self._height = height
        self._drawn: dict[str, int] = {}
        """By peer, the `_curve_hash` of the curve that is drawn."""
        self._drawn_events = -1
        self.peers = bk.ColumnDataSource(_peer_columns([], {}, {}, history))
        # Apart from the other columns, since only lines that have grown are sent; a click selects in both.
        self.lines = bk.ColumnDataSource(_line_columns([], {}), selected=self.peers.selected)
        self.groups = bk.ColumnDataSource(
            {name: [] for name in ("xs", "ys", "group", "colour", "width")}
        )
        self.models = bk.ColumnDataSource(line_columns("model", {}))
        self.metrics = bk.ColumnDataSource(line_columns("metric", {}))
        self.sent = bk.ColumnDataSource({"x": [], "y": []})
        self.events = bk.ColumnDataSource(_event_columns([], None))
        self.marks = bk.ColumnDataSource({name: [] for name in ("time", "colour", "text", "what")})
        self._event_range = bk.Range1d(start=0.0, end=1.0)
        self.headline = bk.Div(stylesheets=[WIDGET_STYLE], sizing_mode="stretch_width")
        self._selected = bk.Div(stylesheets=[WIDGET_STYLE], margin=(9, 8, 0, 0))
        self.map = PeerMap(self.peers, height, place, spread)
        self._curve_plot = curves = self._curves(height)
        self.x_range = curves.x_range
        self._model_plot, self._metric_plot = self._disagreement(), self._metrics()
        sent, timeline = self._sent(), self._timeline()
        show_all = bk.Button(label="show all", width=80, stylesheets=[WIDGET_STYLE])
        show_all.js_on_click(
            bk.CustomJS(args={"peers": self.peers}, code="peers.selected.indices = []")
        )
        self._peer_list, self._event_list = self._peer_table(), self._event_table()
        self._filter_on_click(self._peer_list)
        controls: Model = layouts.row(
            self.map.colours, self.map.model, self._selected, show_all, sizing_mode="stretch_width",
            styles={"flex-wrap": "wrap"},
        )  # fmt: skip
        roots: dict[str, Model] = {
            "headline": self.headline,
            "controls": controls,
            "graph": self.map.figure,
            "curves": curves,
            "metrics": self._metric_plot,
            "disagreement": self._model_plot,
            "sent": sent,
            "peers": self._peer_list,
            "timeline": timeline,
            "events": self._event_list,
        }
        left_out = set() if final is None else _without_data(final)
        self.roots = {name: root for name, root in roots.items() if name not in left_out}
        self.update()

    # --- making the figures -------------------------------------------------------------------------

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
        marks = self._mark(plot)
        fields = ("group", means), ("what", marks)
        items = [bk.LegendItem(label={"field": name}, renderers=[lines]) for name, lines in fields]
        plot.add_layout(line_legend(items), "below")
        return plot

    def _mark(self, plot: Model) -> Model:
        """Mark the times of events that may have changed what peers learn."""
        marks = plot.vspan(
            "time", source=self.marks, line_color="colour", line_dash="dashed", line_width=1.5
        )
        plot.add_tools(bk.HoverTool(renderers=[marks], tooltips=[("", "@text")]))
        return marks

    def _disagreement(self) -> Model:
        self._log_range = log_range()
        plot = named_lines(
            self.models, "model", "disagreement per partial model", SMALL_HEIGHT,
            x_label=self._history.x_label, x_range=self.x_range, y_axis_type="log", y_range=self._log_range,
        )  # fmt: skip
        self._mark(plot)
        return plot

    def _metrics(self) -> Model:
        return named_lines(
            self.metrics, "metric", "other metrics, mean over peers", SMALL_HEIGHT,
            x_label=self._history.x_label, x_range=self.x_range,
        )  # fmt: skip

    def _sent(self) -> Model:
        plot = line_figure(
            "bytes sent by all peers, MB", SMALL_HEIGHT, self._history.x_label, x_range=self.x_range
        )
        plot.line("x", "y", source=self.sent, line_width=2, line_color=COLOURS[0])
        return plot

    def _timeline(self) -> Model:
        kinds = None if self._final is None else {event.kind for event in self._final.events}
        rows = [r for r, row_kinds in EVENT_ROWS.items() if kinds is None or kinds & {*row_kinds}]
        # Peers may have joined long before the page was opened: the curves keep a range of their own.
        recorded = self._history.origin is None
        x_label = self._history.x_label if recorded else "seconds since watching began"
        plot = line_figure(
            "what happened", 100 + 25 * len(rows), x_label=x_label, y_range=rows[::-1],
            x_range=self.x_range if recorded else self._event_range,
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
        # What matters most is first: a narrow window shows only that before it is scrolled.
        shown = [
            ("peer", "peer", self._name_width(), PLAIN_CELL), ("state", "state", 90, STATE_CELL),
            ("round", "round", 60, "0,0"), ("accuracy", "accuracy", 75, "0.000"),
            ("loss", "loss", 75, "0.0000"), ("reason", "reason", 270, PLAIN_CELL),
            ("checked", "signature", 80, STATE_CELL), ("gain", "gain over alone", 120, "+0.000"),
            ("group", "group", 90, PLAIN_CELL), ("disagreement", "disagreement", 130, PLAIN_CELL),
            ("metrics", "other metrics", 200, PLAIN_CELL), ("mb", "MB sent", 75, "0,0.0"),
            ("seen", "last heard", 85, None),
        ]  # fmt: skip
        self._columns = [column(*arguments) for arguments in shown]
        self._peer_filter = bk.BooleanFilter(booleans=None)
        return bk.DataTable(
            source=self.peers, view=bk.CDSView(filter=self._peer_filter), columns=self._columns,
            height=_table_height(0, MOST_ROWS), index_position=None, row_height=ROW_HEIGHT,
            sizing_mode="stretch_width",
            stylesheets=[TABLE_STYLE],
        )  # fmt: skip

    def _name_width(self) -> int:
        """The width of a column of peers' names, in pixels."""
        names = (self._history if self._final is None else self._final).peers
        return min(max(70, 22 + 8 * max(map(len, names), default=0)), 200)

    def _show_columns(self, values: Mapping[str, Sequence[Any]]) -> None:
        """Show the columns of the table of peers that are not empty. values: the data of the columns."""
        left_out = set() if self._final is None else {"seen", "checked"}
        for shown in self._columns:
            is_empty = shown.field not in ("peer", "state") and _is_empty(values[shown.field])
            if shown.visible != (visible := not is_empty and shown.field not in left_out):
                shown.visible = visible
        style = least_width(self._columns)
        if self._peer_list.stylesheets[1:] != [style]:
            self._peer_list.stylesheets = [TABLE_STYLE, style]

    def _event_table(self) -> Model:
        shown = [
            ("when", "when", 90, None), ("kind", "event", 80, STATE_CELL),
            ("peer", "peer", self._name_width(), PLAIN_CELL), ("text", "what happened", 420, PLAIN_CELL),
        ]  # fmt: skip
        self._event_table_filter = bk.BooleanFilter(booleans=None)
        columns = [column(*arguments, sortable=False) for arguments in shown]
        return bk.DataTable(
            source=self.events, view=bk.CDSView(filter=self._event_table_filter),
            columns=columns, height=_table_height(0, MOST_EVENT_ROWS),
            index_position=None, row_height=ROW_HEIGHT, sizing_mode="stretch_width",
            stylesheets=[TABLE_STYLE, least_width(columns)], selectable=False,
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
        """Draw what has changed since the last call. history: replaces the one that is drawn."""
        self._history = history = history or self._history
        states = _ordered(history)
        colours = group_colours(states)
        place = self.map.place(history)
        columns = _peer_columns(states, colours, place, history, self.map.below)
        chosen = {self.peers.data["peer"][i] for i in self.peers.selected.indices}
        if refill(self.peers, columns):
            # The rows of clicked peers may have moved, as a new peer is inserted in order of names.
            self.peers.selected.indices = [i for i, s in enumerate(states) if s.name in chosen]
            self._show_columns(self._final_columns or columns)
            self._peer_list.height = _table_height(len((self._final or history).peers), MOST_ROWS)
        lines = _line_columns(states, colours)
        if any(list(self.lines.data[name]) != lines[name] for name in ("peer", "colour")):
            self.lines.data = lines
        elif grown := [
            i for i, s in enumerate(states) if self._drawn.get(s.name) != _curve_hash(s)
        ]:
            self.lines.patch({axis: [(i, lines[axis][i]) for i in grown] for axis in ("xs", "ys")})
        self._drawn = {state.name: _curve_hash(state) for state in states}
        self._update_events()
        self._update_lines(colours)
        self.map.update(history)
        self.headline.text = headline(history)
        hidden = _without_data(self._final or history)
        for name, root in self.roots.items():
            if root.css_classes != (classes := [NO_DATA] if name in hidden else []):
                root.css_classes = classes
        self._curve_plot.xaxis.axis_label = history.x_label

    def _update_lines(self, colours: Mapping[str, str]) -> None:
        history = self._history
        groups = [
            (name, curve, colours.get(name, COLOURS[0]), 2.2)
            for name, curve in sorted(history.groups.items(), key=lambda item: natural_key(item[0]))
            if len(colours) > 1 and name in colours  # a peer's group may have changed
        ]
        groups.append(("mean of the peers present", history.mean_accuracy, MEAN_COLOUR, 3.4))
        self.groups.data = {
            "xs": [list(c.x) for _, c, *_ in groups], "ys": [list(c.y) for _, c, *_ in groups],
            "group": [name for name, *_ in groups], "colour": [colour for _, _, colour, _ in groups],
            "width": [width for *_, width in groups],
        }  # fmt: skip
        marked = len(set(self.marks.data["what"]))
        self._curve_plot.height = full_height(self._height, len(groups) + marked)
        models = list(history.disagreement.items())[: len(COLOURS)]
        self._model_plot.height = full_height(SMALL_HEIGHT, len(models))
        self.models.data = line_columns("model", {name: (c.x, c.y) for name, c in models})
        if values := [y for _, curve in models for y in curve.y]:
            low, high = floor(log10(min(values))), ceil(log10(max(values)))
            self._log_range.update(start=10.0**low, end=10.0 ** max(high, low + 1))
        metrics = dict(list(history.metrics.items())[: len(COLOURS)])
        self._metric_plot.height = full_height(SMALL_HEIGHT, len(metrics))
        self.metrics.data = line_columns("metric", {n: (c.x, c.y) for n, c in metrics.items()})
        self.sent.data = {
            "x": list(history.megabytes_sent.x) or [0.0],
            "y": list(history.megabytes_sent.y) or [0.0],
        }

    def _update_events(self) -> None:
        events = self._history.events
        events_hash = hash(tuple(events[-3:])) ^ len(events)
        if events_hash != self._drawn_events:
            self._drawn_events = events_hash
            self.events.data = _event_columns(events, self._history.origin)
            # During a playback, room for the events of the whole run, so that what is below does not move.
            count = len((self._final or self._history).events)
            self._event_list.height = _table_height(count, MOST_EVENT_ROWS)
            # A curve begins when the page is opened, and need not be drawn from an earlier event on.
            marked = [event for event in events if event.kind in MARKED and event.time >= 0]
            self.marks.data = {
                "time": [event.time for event in marked],
                "colour": [EVENT_COLOURS[_ROW_OF[event.kind]] for event in marked],
                "text": [": ".join(filter(None, (event.peer, event.text))) for event in marked],
                "what": [MARKED[event.kind] for event in marked],
            }
        first = min((event.time for event in events if event.time < 0), default=0.0)
        last = max(self._history.now, 1.0)
        margin = 0.02 * (last - first)  # so that the first and the last mark are not cut in two
        self._event_range.update(start=first - margin, end=last + margin)


def _table_height(rows: int, most: int) -> int:
    """Return the height of a table with so many rows, of which `most` are shown at once."""
    return ROW_HEIGHT * (1 + min(max(rows, 1), most)) + 20  # with the header and a scroll bar


def _ordered(history: History) -> list[PeerState]:
    """Return all peers in natural order of their names."""
    return sorted(history.peers.values(), key=lambda peer: natural_key(peer.name))


def group_colours(states: Sequence[PeerState]) -> dict[str, str]:
    """Return a colour for each group, in natural order of their names."""
    groups = sorted({peer.group for peer in states}, key=natural_key)
    return {group: COLOURS[index % len(COLOURS)] for index, group in enumerate(groups)}


def headline(history: History) -> str:
    """Say in one line how many peers there are, and how well they do."""
    present = [peer for peer in history.peers.values() if not peer.gone]
    gone = len(history.peers) - len(present)
    peers = "peer" if len(present) == 1 else "peers"
    parts = [f"<b>{len(present)}</b> {peers}" + (f", {gone} gone" if gone else "")]
    accuracies = history.accuracies()
    if accuracies:
        worst = min(accuracies, key=lambda name: accuracies[name])
        mean = sum(accuracies.values()) / len(accuracies)
        parts.append(
            f"mean accuracy <b>{mean:.3f}</b>, worst {accuracies[worst]:.3f} "
            f"(peer {escape(worst)}), best {max(accuracies.values()):.3f}"
        )
    rounds = [peer.round for peer in present]
    if rounds:
        low, high = min(rounds), max(rounds)
        parts.append(f"round {high}" if low == high else f"rounds {low} to {high}")
    if history.megabytes_sent.y:
        parts.append(f"{history.megabytes_sent.y[-1]:,.1f} MB sent")
    if history.x_label != "round":
        parts.append(f"at {history.now:,.0f} {history.x_label}")
    return " · ".join(parts)


def _peer_columns(
    states: Sequence[PeerState],
    colours: Mapping[str, str],
    place: Positions,
    history: History,
    below: Names = frozenset(),
) -> dict[str, list[Any]]:
    """Return the columns of the peers' source: one row for each peer. below: see `PeerMap.below`."""
    size = peer_size(len(states))
    named = len(states) <= MOST_LABELS
    return {
        "peer": [s.name for s in states],
        "label": [s.name if named else "" for s in states],
        "offset": [(size / 2 + 3) * (1 if s.name in below else -1) for s in states],
        "baseline": ["top" if s.name in below else "bottom" for s in states],
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
        "loss": [nan if isfinite(s.accuracy) else s.loss for s in states],
        "spread": [s.spread for s in states],
        "gain": [s.gain for s in states],
        "checked": [s.checked for s in states],
        "disagreement": [_disagreement(s) for s in states],
        "mb": [s.bytes / 1e6 if s.bytes else nan for s in states],
        "seen": [
            "" if history.x_label == "round" else f"{max(history.now - s.last_seen, 0):.0f} s ago"
            for s in states
        ],
        "models": [models_text(s.models) for s in states],
        "metrics": [_metrics(s) for s in states],
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
        "disagreement": history.disagreement, "sent": history.megabytes_sent.y, "timeline": history.events,
        "events": history.events, "metrics": history.metrics, "graph": history.peers,
        "curves": history.mean_accuracy.y, "peers": history.peers,
    }  # fmt: skip
    return {name for name, data in has.items() if not data}


def _is_empty(column: Sequence[Any]) -> bool:
    """Whether a column of the table of peers has no data."""
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


def _curve_hash(state: PeerState) -> int:
    """Return a number that changes whenever a peer's curve does."""
    curve = state.curve
    return hash((len(curve.x), curve.x[-1], curve.y[-1])) if curve.x else 0


def _metrics(state: PeerState) -> str:
    """The peer's named metrics."""
    return ", ".join(f"{name} {value:.3f}" for name, value in state.metrics.items())


def _disagreement(state: PeerState) -> str:
    """The peer's largest disagreement, and in which partial model."""
    finite = {m: d for m, d in state.disagreement.items() if isfinite(d) and d > 0}
    if not finite:
        return ""
    model = max(finite, key=lambda name: finite[name])
    return f"{10 ** round(log10(finite[model]), 1):.1e} {model}"
