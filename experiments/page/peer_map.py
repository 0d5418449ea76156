"""The map of a swarm: its peers where the graph puts them, coloured, and the links between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import sqrt
from typing import Any, TypeAlias

import networkx as nx
import numpy as np
from bokeh.palettes import Viridis256

from ..graphs.placement import positions
from .history import History, natural_key
from .style import INK, WIDGET_STYLE, Model, bk, line_figure, refill, text_style

Names: TypeAlias = frozenset[str]
Links: TypeAlias = frozenset[tuple[str, str]]
Positions: TypeAlias = dict[str, tuple[float, float]]

ALL_MODELS = "all partial models"
MOST_FULL_GRAPH = 24
"""The most peers of a full graph (every peer may reach every other) whose links are drawn."""
FULL_WIDTH = 480
"""The width in pixels at which peers are drawn at their full size."""
PALETTE = Viridis256[50:]
"""The colours of accuracies; without the darkest, which cannot be told from a dark page."""
PADDING_PER_LETTER = 0.024
"""How much wider than its peers the map is, as a share, per letter of the longest name."""
NARROW_PIXELS = (400.0, 280.0)
"""The width and height in pixels of the map in a narrow window, in which names must not overlap either."""
LETTER_PIXELS, LINE_PIXELS = 6.5, 13.0
"""The width of a letter of a name, and the height of a name, in pixels."""


class PeerMap:
    """Draws peers and links; `figure` is the map, `colours` chooses what colours mean, `model` what is shown.

    peers: the data source with a row for each peer, and its position. place: returns the positions of peers,
    from their names and links. spread: whether peers may be coloured by `PeerState.spread` too.
    """

    def __init__(
        self, peers: Model, height: int, place: Callable[[Names, Links], Positions], spread: bool
    ):
        self.peers, self._find_places = peers, place
        self._positions: Positions = {}
        self._placed: tuple[Names, Links] | None = None
        self.below: Names = frozenset()
        """The peers whose names are written below them; see `find_names_below`."""
        self.links = bk.ColumnDataSource(
            {name: [] for name in ("x0", "y0", "x1", "y1", "width", "a", "b", "models")}
        )
        self._mapper = bk.LinearColorMapper(palette=PALETTE, low=0.0, high=1.0, nan_color="#9aa3ab")
        self.model = bk.Select(
            value=ALL_MODELS, options=[ALL_MODELS], width=190, stylesheets=[WIDGET_STYLE]
        )
        self.figure, self.colours = self._draw(height, spread)

    def _draw(self, height: int, spread: bool) -> tuple[Model, Model]:
        plot = line_figure(
            "peers and links",
            height,
            tools="pan,wheel_zoom,reset",
            match_aspect=True,
        )
        plot.axis.visible = False
        plot.min_border_left = 5
        plot.grid.visible = False
        plot.x_range.range_padding, plot.y_range.range_padding = 0.12, 0.3
        links = bk.CDSView(filter=self._model_filter())
        plot.segment(
            "x0", "y0", "x1", "y1", source=self.links, view=links, line_width="width",
            line_color=INK, line_alpha=0.55,
        )  # fmt: skip
        # In a narrow window peers are closer to each other, and must be smaller.
        fit = bk.CustomJSTransform(
            args={"plot": plot, "width": FULL_WIDTH},
            v_func="""
            let shown = width;
            try { shown = plot.inner_width; } catch {}  // not known before it is drawn
            return xs.map(x => x * Math.min(1, shown / width));""",
        )
        plot.js_on_change(
            "inner_width", bk.CustomJS(args={"peers": self.peers}, code="peers.change.emit()")
        )
        by_accuracy = {"field": "accuracy", "transform": self._mapper}
        nodes = plot.scatter(
            "x", "y", source=self.peers, view=bk.CDSView(filter=self._model_filter()),
            size={"field": "size", "transform": fit}, marker="marker", fill_color=by_accuracy,
            fill_alpha="fill", line_color="edge", line_width=1.5, nonselection_fill_alpha=0.12,
            nonselection_line_alpha=0.25,
        )  # fmt: skip
        plot.text(
            "x", "y", text="label", source=self.peers, view=bk.CDSView(filter=self._model_filter()),
            text_color=INK, text_font_size="11px", text_align="center", text_baseline={"field": "baseline"},
            y_offset={"field": "offset", "transform": fit}, nonselection_text_alpha=0.3,
        )  # fmt: skip
        tips = [
            ("peer", "@peer"), ("group", "@group"), ("state", "@state @reason"), ("round", "@round"),
            ("accuracy", "@accuracy{0.000}"), ("MB sent", "@mb{0,0.0}"),
        ]  # fmt: skip
        plot.add_tools(
            bk.HoverTool(renderers=[nodes], tooltips=tips), bk.TapTool(renderers=[nodes])
        )
        fills: list[Any] = [by_accuracy, {"field": "colour"}]
        self._bar = _colour_bar(self._mapper, "accuracy")
        bars: list[Model] = [self._bar]
        labels = ["by accuracy", "by group"]
        if spread:
            mapper = bk.LinearColorMapper(palette=PALETTE, low=0.0, high=1.0)
            fills.append({"field": "spread", "transform": mapper})
            bars.append(
                _colour_bar(mapper, "what has arrived of one peer's value (1: the average)")
            )
            labels.append("by spread")
        for bar in bars:
            plot.add_layout(bar, "below")
        colours = bk.RadioButtonGroup(labels=labels, active=0, stylesheets=[WIDGET_STYLE])
        colours.js_on_change(
            "active",
            bk.CustomJS(
                args={
                    "glyphs": [nodes.glyph, nodes.nonselection_glyph], "fills": fills, "bars": bars,
                },
                code="""
                for (const glyph of glyphs) glyph.fill_color = fills[cb_obj.active];
                const shown = [0, null, 1][cb_obj.active];  // the legend of curves names groups' colours
                bars.forEach((bar, index) => { bar.visible = index === shown; });""",
            ),
        )  # fmt: skip
        for bar in bars[1:]:
            bar.visible = False
        return plot, colours

    def _model_filter(self) -> Model:
        """Keep what belongs to the partial model that is chosen above the graph."""
        chosen = bk.CustomJSFilter(
            args={"select": self.model, "all": ALL_MODELS},
            code="""
            const models = source.data.models;
            return select.value == all ? null
                : Array.from(models, names => names.includes("|" + select.value + "|"));""",
        )
        self.model.js_on_change("value", bk.CustomJS(args={"f": chosen}, code="f.change.emit()"))
        return chosen

    def update(self, history: History) -> None:
        """Bring title, colours and the list of partial models up to date."""
        if accuracies := list(history.accuracies().values()):
            low, high = min(accuracies), max(accuracies)
            # Almost equal accuracies get a colour from the middle of the palette, not the worst one's.
            margin = max(0.0, 0.005 - (high - low) / 2)
            self._mapper.update(low=low - margin, high=high + margin)
        models = [ALL_MODELS, *history.shared_models]
        if list(self.model.options) != models:
            self.model.options = models
        self.figure.title.text = _graph_title(history)
        gone = any(peer.gone for peer in history.peers.values())
        self._bar.title = "accuracy (crossed out: gone)" if gone else "accuracy"
        self.figure.x_range.range_padding = range_padding(history.peers)

    def place(self, history: History) -> Positions:
        """Draw the links, and return a position for every peer: the same as before if no link has changed."""
        names = frozenset(history.peers)
        known_links = history.links
        links = frozenset(link for link in known_links or () if names.issuperset(link))
        if known_links is None and len(names) <= MOST_FULL_GRAPH:
            ordered = sorted(names, key=natural_key)
            links = frozenset((a, b) for i, a in enumerate(ordered) for b in ordered[i + 1 :])
        if self._placed != (names, links):
            self._placed = names, links
            known = links if known_links is not None else frozenset()
            self._positions = self._find_places(names, known)
            self.below = find_names_below(self._positions, links)
        self._draw_links(history, links)
        return self._positions

    def _draw_links(self, history: History, links: Links) -> None:
        peers, ordered = history.peers, sorted(links)
        degree: dict[str, int] = {}
        for link in ordered:
            for end in link:
                degree[end] = degree.get(end, 0) + 1
        # Where a peer's bytes per link are not known, what it has sent is divided over its links.
        traffic = [
            sum(
                peers[end].bytes_to.get(other, peers[end].bytes / degree[end])
                for end, other in (link, link[::-1])
            )
            for link in ordered
        ]
        least = min(traffic, default=0.0)
        spread = max(traffic, default=0.0) - least or 1.0
        widest = 3.3 if history.links is not None else 0.5
        scale = 0.8 if len(ordered) > 300 else 1.0  # thinner if there are many
        places = self._positions
        columns = {
            "x0": [places[a][0] for a, _ in ordered], "y0": [places[a][1] for a, _ in ordered],
            "x1": [places[b][0] for _, b in ordered], "y1": [places[b][1] for _, b in ordered],
            "width": [scale * (0.7 + widest * (amount - least) / spread) for amount in traffic],
            "a": [a for a, _ in ordered], "b": [b for _, b in ordered],
            "models": [models_text(set(peers[a].models) & set(peers[b].models)) for a, b in ordered],
        }  # fmt: skip
        refill(self.links, columns)


def _graph_title(history: History) -> str:
    if history.links is None:
        return "peers; every peer may reach every other"
    if not history.megabytes_sent.y:
        return "peers and links"
    counted = all(peer.bytes_to for peer in history.peers.values() if peer.bytes)
    return f"peers and links; width: bytes sent{'' if counted else ', estimated'}"


def place_by_hops(names: Names, links: Links) -> Positions:
    """Return a position for every peer: on a circle if no links are given, else by distances in hops."""
    ordered = sorted(names, key=natural_key)
    if not links:
        angles = np.linspace(0, 2 * np.pi, len(ordered), endpoint=False)
        circle = np.stack([np.sin(angles), np.cos(angles)], axis=1)
        return {name: (float(x), float(y)) for name, (x, y) in zip(ordered, circle, strict=True)}
    numbers = {name: index for index, name in enumerate(ordered)}
    graph = nx.Graph()
    graph.add_nodes_from(range(len(ordered)))
    graph.add_edges_from((numbers[a], numbers[b]) for a, b in links)
    points = positions(graph).tolist()
    return {name: (points[i][0], points[i][1]) for name, i in numbers.items()}


def find_names_below(places: Positions, links: Links = frozenset()) -> Names:
    """Return the peers whose names overlap fewer peers and names if they are written below, not above.

    Where both sides are equal, the one through which fewer of the peer's own links go.
    """
    if not places:
        return frozenset()
    names = sorted(places, key=natural_key)
    centres = np.array([places[name] for name in names])
    spans = np.maximum(np.ptp(centres, axis=0), 1e-9)
    padding = 1 + np.array([range_padding(names), 0.3])
    pixels = centres * (np.array(NARROW_PIXELS) / (padding * spans)).min()
    radius = peer_size(len(names)) / 2 * NARROW_PIXELS[0] / FULL_WIDTH
    # Boxes of peers, and of names that have their place: left, low, right, high.
    taken = np.hstack([pixels - radius, pixels + radius])
    pixel_of = dict(zip(names, pixels, strict=True))
    neighbours: dict[str, list[str]] = {}
    for a, b in (*links, *(link[::-1] for link in links)):
        neighbours.setdefault(a, []).append(b)
    below = set()
    for name, (x, y) in pixel_of.items():
        half, edge = LETTER_PIXELS * len(name) / 2, radius + 2
        ways = np.array([pixel_of[other] for other in neighbours.get(name, ())]).reshape(-1, 2)
        ways -= (x, y)
        boxes, overlaps = [], []
        for side, bottom in ((1, y + edge), (-1, y - edge - LINE_PIXELS)):
            box = np.array([x - half, bottom, x + half, bottom + LINE_PIXELS])
            apart = (taken[:, :2] >= box[2:]).any(1) | (taken[:, 2:] <= box[:2]).any(1)
            boxes.append(box)
            height = edge + LINE_PIXELS / 2
            crossing = abs(ways[:, 0]) * height < half * side * ways[:, 1]
            overlaps.append((int((~apart).sum()), int(crossing.sum())))
        is_below = overlaps[1] < overlaps[0]
        if is_below:
            below.add(name)
        taken = np.vstack([taken, boxes[is_below]])
    return frozenset(below)


def range_padding(names: Iterable[str]) -> float:
    """Return how much wider than its peers the map is, so that no name is cut."""
    return min(max(0.12, PADDING_PER_LETTER * max(map(len, names), default=0)), 0.8)


def peer_size(peers: int) -> float:
    """Return the diameter in pixels of each of so many peers."""
    return min(max(120 / sqrt(max(peers, 1)), 8), 30)


def _colour_bar(mapper: Model, title: str) -> Model:
    return bk.ColorBar(
        color_mapper=mapper, height=8, title=title, ticker=bk.BasicTicker(desired_num_ticks=4),
        **text_style("title"), **text_style("major_label"), background_fill_alpha=0, padding=4,
        bar_line_color=None,
    )  # fmt: skip


def models_text(names: Iterable[str]) -> str:
    """Return the names of partial models as one text, for a filter in the browser."""
    return "|" + "|".join(sorted(names)) + "|"
