"""Draws a graph as a map; the same graph has the same map every time.

Peers are drawn apart from each other and coloured by group. A link's grey is the share of its sender's mass
(push-sum's sum and weight) that it carries in one exchange. Links and peers whose loss splits the graph are
marked.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from matplotlib import colors
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch

from ..study.figures import BLUE, GREEN, MARKERS, ORANGE, PURPLE, SKY_BLUE, VERMILION
from .placement import Positions, smallest_distance

MAX_LABELS = 64
"""The most peers that are labelled. On larger maps no peer is, and directed links have no arrows."""
MAX_GROUPS = 16
"""The most groups that have their own colour and marker; if there are more, all groups look the same."""

PEER_COLOUR, WEAK_COLOUR, ADDED_COLOUR = BLUE, VERMILION, GREEN
"""The colours of peers without groups, of bridges and cut peers, and of links that bridging added."""
# Shares are drawn in greys, from light to nearly black, since colours stand for groups.
SHARE_COLOURS = colors.LinearSegmentedColormap.from_list("shares", ["#D0D0D0", "#202020"])
MAP_SIDE_POINTS = 5.6 * 72
"""The side, in points, at which the unit square of positions with its margins is assumed to be drawn. The
sizes of markers and labels are chosen for it. `show`, with pages of 8.2 inches, draws the square larger."""
MARGIN = 0.06
"""The margin around the positions, as a fraction of the unit square's side."""
MIN_EXTENT = 0.2
"""The least width and height of a map without margins, as such a fraction, for peers that are on one line."""

# Sizes in inches.
MAX_MAP_HEIGHT, MIN_PAGE_WIDTH = 6.9, 6.0
COLOUR_BAR_WIDTH, TITLE_HEIGHT, LEGEND_ROW_HEIGHT = 1.05, 0.8, 0.22


@dataclass(frozen=True)
class Map:
    """Everything that a picture of a graph shows; a peer's number is its row in `positions`.

    links: pairs (sender, receiver); of an undirected graph, one pair per link, in either order. `bridges` and
        `added` must have the same order of each pair as `links`: a reversed pair is not found in `links`.
    shares: for each link, the share of its sender's mass that it carries in one exchange; of an undirected
        link, the mean of both directions.
    bridges, cut_peers: links and peers whose loss splits the graph.
    added: links that were added to connect a partial model's peers (`bridge = true` in a config).
    labels: the text at each peer; by default its number. groups: the name of each peer's group, if any.
    """

    positions: Positions
    links: Sequence[tuple[int, int]]
    shares: Sequence[float]
    directed: bool = False
    labels: Sequence[str] = ()
    groups: Sequence[str] = ()
    bridges: frozenset[tuple[int, int]] = frozenset()
    cut_peers: frozenset[int] = frozenset()
    added: frozenset[tuple[int, int]] = frozenset()

    @property
    def peers(self) -> int:
        """How many peers there are."""
        return len(self.positions)


def marker_diameter(positions: Positions) -> float:
    """Return the diameter of a peer's marker in points: as large as fits without touching, from 1.6 to 24."""
    largest_diameter = 0.85 * smallest_distance(positions) * MAP_SIDE_POINTS / (1 + 2 * MARGIN)
    return min(24.0, max(1.6, largest_diameter))


def extent(positions: Positions) -> tuple[float, float]:
    """Return the width and height of a map with its margins, in units of positions."""
    width, height = np.ptp(positions, axis=0) if len(positions) else (0.0, 0.0)
    return max(float(width), MIN_EXTENT) + 2 * MARGIN, max(float(height), MIN_EXTENT) + 2 * MARGIN


def page_size(graph_map: Map, max_width: float) -> tuple[float, float]:
    """Return width and height in inches of a page with a map and its legend.

    The page is at most `max_width` wide, but never narrower than MIN_PAGE_WIDTH.
    """
    map_width, map_height = extent(graph_map.positions)
    bar_width = COLOUR_BAR_WIDTH if _needs_colour_bar(graph_map) else 0.0
    inches_per_unit = min((max_width - bar_width) / map_width, MAX_MAP_HEIGHT / map_height)
    entries, title_rows = len(_legend_entries(graph_map)), 1 if _has_group_legend(graph_map) else 0
    rows = title_rows + ceil(entries / _legend_columns(entries))
    height = inches_per_unit * map_height + TITLE_HEIGHT + LEGEND_ROW_HEIGHT * rows
    return max(inches_per_unit * map_width + bar_width, MIN_PAGE_WIDTH), height


def draw_map(axes: Axes, graph_map: Map) -> None:
    """Draw a graph with equal scales in x and y, without axes."""
    axes.set_axis_off()
    axes.set_aspect("equal", anchor="N")  # free space is at the bottom, for the legend
    width, height = extent(graph_map.positions)
    low, high = graph_map.positions.min(axis=0), graph_map.positions.max(axis=0)
    x, y = (low + high) / 2
    axes.set(xlim=(x - width / 2, x + width / 2), ylim=(y - height / 2, y + height / 2))
    _draw_links(axes, graph_map)
    _draw_peers(axes, graph_map)
    if graph_map.peers <= MAX_LABELS:
        _draw_labels(axes, graph_map)
    _draw_legend(axes, graph_map)


def _draw_links(axes: Axes, graph_map: Map) -> None:
    """Draw links in the grey of their share; then those between groups, added links and bridges."""
    if not graph_map.links:
        return
    ends = np.array([(graph_map.positions[u], graph_map.positions[v]) for u, v in graph_map.links])
    shares = np.array(graph_map.shares, dtype=float)
    scale = _share_scale(shares)
    # The more links, the thinner and more transparent, so that peers remain visible.
    count = max(len(ends), 1)
    width = float(np.clip(30.0 / np.sqrt(count), 0.25, 1.2))
    alpha = float(np.clip(12.0 / np.sqrt(count), 0.15, 0.9))
    greys = SHARE_COLOURS(scale(shares))
    between_groups = _links_between_groups(graph_map)
    unmarked = _unmarked_links(graph_map, between_groups)
    marked = (
        (between_groups, "#606060", "-"),
        (graph_map.added, ADDED_COLOUR, ":"),
        (graph_map.bridges, WEAK_COLOUR, "--"),
    )
    if graph_map.directed and graph_map.peers <= MAX_LABELS:
        gap = marker_diameter(graph_map.positions) / 2 + 1
        for i in unmarked:
            _draw_arrow(axes, ends[i], gap, color=greys[i], linewidth=width, zorder=1)
        for links, colour, style in marked:
            for i in _indices(graph_map, links):
                _draw_arrow(
                    axes, ends[i], gap, color=colour, linewidth=1.6, linestyle=style, zorder=2
                )
        return
    axes.add_collection(
        LineCollection(
            list(ends[unmarked]), colors=greys[unmarked], linewidths=width, alpha=alpha, zorder=1
        )
    )
    for links, colour, style in marked:
        axes.add_collection(
            LineCollection(
                list(ends[_indices(graph_map, links)]),
                colors=colour,
                linewidths=1.2 if style == "-" else 2.0,
                linestyles=style,
                zorder=2,
            )
        )


def _indices(graph_map: Map, links: Set[tuple[int, int]]) -> list[int]:
    """Return the indices of some of a map's links."""
    return [i for i, link in enumerate(graph_map.links) if link in links]


def _unmarked_links(
    graph_map: Map, between_groups: Set[tuple[int, int]] = frozenset()
) -> list[int]:
    """Return the indices of links that are not bridges, added or `between_groups`: drawn in grey, by
    share."""
    marked = {*graph_map.bridges, *graph_map.added, *between_groups}
    return [i for i, link in enumerate(graph_map.links) if link not in marked]


def _links_between_groups(graph_map: Map) -> set[tuple[int, int]]:
    """Return the links between groups, without bridges and added links, if they are to be drawn darker.

    They are if at most 100 of 500 or more links are between groups: thin grey lines would not be seen.
    """
    if not graph_map.groups or graph_map.directed or len(graph_map.links) < 500:
        return set()
    links = {(u, v) for u, v in graph_map.links if graph_map.groups[u] != graph_map.groups[v]}
    return links - graph_map.bridges - graph_map.added if len(links) <= 100 else set()


def _draw_arrow(axes: Axes, ends: Positions, gap: float, **style: Any) -> None:
    """Draw a directed link; gap: the distance, in points, that it keeps from the positions of its peers."""
    axes.add_patch(
        FancyArrowPatch(
            tuple(ends[0]), tuple(ends[1]), arrowstyle="-|>", mutation_scale=8, shrinkA=gap,
            shrinkB=gap, connectionstyle="arc3,rad=0.08", **style,
        )
    )  # fmt: skip


def _share_scale(shares: np.ndarray) -> colors.Normalize:
    """Return the function that maps shares to 0 … 1, for SHARE_COLOURS."""
    low, high = float(shares.min()), float(shares.max())
    if high - low < 1e-9:  # equal shares are drawn in the middle of the scale
        return colors.Normalize(low - 1, high + 1)
    return colors.Normalize(low, high)


def group_styles(groups: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return a colour and a marker for each group; the same for all if there are more than MAX_GROUPS."""
    names = sorted(set(groups), key=_sort_key)
    if len(names) > MAX_GROUPS:
        return dict.fromkeys(names, (PEER_COLOUR, "o"))
    # Without vermilion, which marks bridges and cut peers, and without black and grey, which links have.
    colours = (BLUE, ORANGE, GREEN, PURPLE, SKY_BLUE)
    return {
        name: (colours[i % len(colours)], MARKERS[i // len(colours) % len(MARKERS)])
        for i, name in enumerate(names)
    }


def _sort_key(name: str) -> tuple[int, str]:
    """Return a key that sorts numbers by value, before other names."""
    return (len(name), name) if name.isdecimal() else (10**6, name)


def _draw_peers(axes: Axes, graph_map: Map) -> None:
    """Draw the markers of peers, and rings around cut peers."""
    size = marker_diameter(graph_map.positions)
    groups = list(graph_map.groups) or ["peer"] * graph_map.peers
    outline_width = 0.0 if graph_map.peers > 2000 else 0.8
    for name, (colour, marker) in group_styles(groups).items():
        members = [i for i in range(graph_map.peers) if groups[i] == name]
        axes.scatter(
            graph_map.positions[members, 0], graph_map.positions[members, 1], s=size**2,
            c=colour, marker=marker, edgecolors="white", linewidths=outline_width, zorder=3,
        )  # fmt: skip
    x, y = graph_map.positions[sorted(graph_map.cut_peers)].T
    axes.scatter(
        x, y, s=(1.15 * size) ** 2, facecolors="none", edgecolors=WEAK_COLOUR,
        linewidths=2.2 if size > 8 else 1.2, zorder=4,
    )  # fmt: skip


def _draw_labels(axes: Axes, graph_map: Map) -> None:
    """Draw the labels of all peers, inside the markers or beside them."""
    size = marker_diameter(graph_map.positions)
    labels = list(graph_map.labels) or [str(i) for i in range(graph_map.peers)]
    if max(map(len, labels)) <= 3:  # short labels fit inside the peers
        styles, groups = group_styles(graph_map.groups), graph_map.groups or [""] * graph_map.peers
        for (x, y), label, group in zip(graph_map.positions, labels, groups, strict=True):
            axes.text(
                x, y, label, ha="center", va="center_baseline", fontsize=min(9.0, 0.46 * size),
                color=_text_colour(styles.get(group, (PEER_COLOUR, ""))[0]), fontweight="bold",
                zorder=5,
            )  # fmt: skip
        return
    # Longer labels stand beside their peers: of eight places around its peer, each label is drawn at the one
    # where it overlaps least with markers and other labels.
    occupied = [
        (x - size / 2, y - size / 2, x + size / 2, y + size / 2) for x, y in _in_points(graph_map)
    ]
    for (x, y), position, label in zip(
        _in_points(graph_map), graph_map.positions, labels, strict=True
    ):
        width, height, gap = 4.6 * len(label), 10.0, size / 2 + 2
        places = [
            (x - width / 2, y - gap - height), (x - width / 2, y + gap), (x + gap, y - height / 2),
            (x - gap - width, y - height / 2), (x + gap * 0.7, y - gap - height * 0.6),
            (x - gap * 0.7 - width, y - gap - height * 0.6), (x + gap * 0.7, y + gap * 0.6),
            (x - gap * 0.7 - width, y + gap * 0.6),
        ]  # fmt: skip
        boxes = [(left, low, left + width, low + height) for left, low in places]
        best = min(range(len(boxes)), key=lambda i: (_overlap(boxes[i], occupied), i))
        occupied.append(boxes[best])
        left, low = places[best]
        axes.annotate(
            label, position, xytext=(left - x, low - y + 1), textcoords="offset points", fontsize=8,
            zorder=5, bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.5},
        )  # fmt: skip


def _text_colour(background: str) -> str:
    """Return black or white, whichever has more contrast with the background."""
    red, green, blue = colors.to_rgb(background)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _in_points(graph_map: Map) -> Positions:
    """Return the positions of peers in points, for a map of the size MAP_SIDE_POINTS."""
    return graph_map.positions * MAP_SIDE_POINTS / (1 + 2 * MARGIN)


def _overlap(box: tuple[float, ...], occupied: Sequence[tuple[float, ...]]) -> float:
    """Return the area of a box that other boxes cover, plus a penalty if it extends left or right of the map.

    Labels may extend above and below the map.
    """
    left, low, right, high = box
    covered = sum(
        max(0.0, min(right, other_right) - max(left, other_left))
        * max(0.0, min(high, other_high) - max(low, other_low))
        for other_left, other_low, other_right, other_high in occupied
    )
    side = MAP_SIDE_POINTS / (1 + 2 * MARGIN)
    margin = MARGIN * side
    outside = max(0.0, -margin - left) + max(0.0, right - side - margin)
    return covered + 20 * outside


def _has_group_legend(graph_map: Map) -> bool:
    """Return whether the legend lists the groups."""
    return 0 < len(group_styles(graph_map.groups)) <= MAX_GROUPS


def _equal_shares(shares: Sequence[float]) -> bool:
    """Return whether all links carry the same share, which the legend can then name."""
    return len(shares) == 0 or float(np.ptp(shares)) < 1e-9


def _needs_colour_bar(graph_map: Map) -> bool:
    """Return whether shares differ and some link is drawn in the grey of its share."""
    return not _equal_shares(graph_map.shares) and bool(_unmarked_links(graph_map))


def _legend_columns(entries: int) -> int:
    """Return the number of columns of a legend."""
    return 1 if entries <= 3 else 2 if entries <= 8 else 4


def _legend_entries(graph_map: Map) -> list[Line2D]:
    """Return the entries of the legend: those of groups, links, bridges, cut peers and added links."""
    entries: list[Line2D] = []
    if _has_group_legend(graph_map):
        entries += [
            Line2D([], [], linestyle="", marker=marker, color=colour, markersize=8, label=name)
            for name, (colour, marker) in group_styles(graph_map.groups).items()
        ]
    else:
        entries.append(Line2D([], [], linestyle="", marker="o", color=PEER_COLOUR, label="peer"))
    if graph_map.links and _equal_shares(graph_map.shares):
        text = f"link, share {graph_map.shares[0]:.3g}"
        entries.append(Line2D([], [], color=SHARE_COLOURS(0.5), linewidth=1.2, label=text))
    if graph_map.bridges:
        text = f"bridge ({len(graph_map.bridges)}): its loss splits the swarm"
        entries.append(Line2D([], [], color=WEAK_COLOUR, linestyle="--", linewidth=2, label=text))
    if graph_map.cut_peers:
        text = f"cut peer ({len(graph_map.cut_peers)}): its loss splits the swarm"
        entries.append(
            Line2D([], [], linestyle="", marker="o", markerfacecolor="none", markeredgewidth=2,
                   color=WEAK_COLOUR, markersize=9, label=text)
        )  # fmt: skip
    if graph_map.added:
        text = f"link added to connect a model's peers ({len(graph_map.added)})"
        entries.append(Line2D([], [], color=ADDED_COLOUR, linestyle=":", linewidth=2, label=text))
    return entries


def _draw_legend(axes: Axes, graph_map: Map) -> None:
    """Draw the legend, and the colour bar of shares if it is needed."""
    entries = _legend_entries(graph_map)
    axes.legend(
        handles=entries, title="group" if _has_group_legend(graph_map) else None,
        loc="upper center", bbox_to_anchor=(0.5, 0.0), frameon=False, fontsize=9,
        ncols=_legend_columns(len(entries)),
    )  # fmt: skip
    if _needs_colour_bar(graph_map) and axes.figure is not None:
        is_tall = extent(graph_map.positions)[1] > 0.7  # enough for the colour bar's long label
        text = "share of its sender's mass that a link carries in one exchange"
        axes.figure.colorbar(
            ScalarMappable(_share_scale(np.array(graph_map.shares)), SHARE_COLOURS), ax=axes,
            shrink=0.7 if is_tall else 0.9, pad=0.01, aspect=30 if is_tall else 15,
            label=text if is_tall else "share of sender's mass",
            panchor=False,  # keeps the map at the top
        )  # fmt: skip
