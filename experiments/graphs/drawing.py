"""Drawing a graph: where peers stand, never on top of each other and the same every time.

Peers are coloured by group, links by what they carry, weak spots marked.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from math import pi
from typing import Any

import networkx as nx
import numpy as np
from matplotlib import colors
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra
from scipy.spatial import KDTree

from ..study.figures import COLOURS, MARKERS

Places = NDArray[np.float64]

LABELLED = 64
"""Peers up to which each is named on the picture."""
GROUPS = 16
"""Groups up to which each has a colour and marker of its own in the legend."""

PEER, WEAK, ADDED = COLOURS[0], COLOURS[1], COLOURS[2]
# Greys from light to black: shares are told apart without colour, and group colours stay free.
SHARES = colors.LinearSegmentedColormap.from_list("shares", ["#D0D0D0", "#202020"])
SIDE = 5.6 * 72  # the map's side in points (it is never drawn smaller)
MARGIN = 0.06
LEAST = 0.2
"""A map is never drawn flatter or narrower than this, however its peers stand in line."""

# Inches: the highest map, the narrowest page, and what stands beside, above and below the map.
HIGHEST, NARROWEST, BAR, TITLE, ROW = 6.9, 6.0, 1.05, 0.8, 0.22


@dataclass(frozen=True)
class Map:
    """Everything a picture of a graph shows; peers are numbered by their place in `places`."""

    places: Places
    links: Sequence[tuple[int, int]]
    shares: Sequence[float]
    directed: bool = False
    labels: Sequence[str] = ()
    groups: Sequence[str] = ()
    cut_links: frozenset[tuple[int, int]] = frozenset()
    bridge_peers: frozenset[int] = frozenset()
    added: frozenset[tuple[int, int]] = frozenset()

    @property
    def peers(self) -> int:
        """How many peers there are."""
        return len(self.places)


def diameter(places: Places) -> float:
    """A peer's size in points: the largest at which no two touch."""
    return min(24.0, max(1.6, 0.85 * nearest(places) * SIDE / (1 + 2 * MARGIN)))


def extent(places: Places) -> tuple[float, float]:
    """How wide and how high a map is, in sides of the square that its places are in."""
    width, height = np.ptp(places, axis=0) if len(places) else (0.0, 0.0)
    return max(float(width), LEAST) + 2 * MARGIN, max(float(height), LEAST) + 2 * MARGIN


def page(shown: Map, width: float) -> tuple[float, float]:
    """Width and height in inches that a map needs with its legend, on paper that is so wide at most."""
    wide, tall = extent(shown.places)
    bar = BAR if _scaled(shown) else 0.0
    scale = min((width - bar) / wide, HIGHEST / tall)  # inches per side of the square
    entries, title = len(_entries(shown)), 1 if _in_groups(shown) else 0
    rows = title + -(-entries // _columns(entries))
    return max(scale * wide + bar, NARROWEST), scale * tall + TITLE + ROW * rows


def draw_map(axes: Axes, shown: Map) -> None:
    """Draw a graph, in its own proportions, on axes without ticks."""
    axes.set_axis_off()
    axes.set_aspect("equal", anchor="N")  # what room is left is left below, for the legend
    wide, tall = extent(shown.places)
    low, high = shown.places.min(axis=0), shown.places.max(axis=0)
    x, y = (low + high) / 2
    axes.set(xlim=(x - wide / 2, x + wide / 2), ylim=(y - tall / 2, y + tall / 2))
    _draw_links(axes, shown)
    _draw_peers(axes, shown)
    if shown.peers <= LABELLED:
        _draw_labels(axes, shown)
    _draw_legend(axes, shown)


def _draw_links(axes: Axes, shown: Map) -> None:
    if not shown.links:
        return
    ends = np.array([(shown.places[u], shown.places[v]) for u, v in shown.links])
    shares = np.array(shown.shares, dtype=float)
    norm = _norm(shares)
    # many links: thinner and fainter, so that the peers still stand out
    crowd = max(len(ends), 1)
    width = float(np.clip(30.0 / np.sqrt(crowd), 0.25, 1.2))
    faint = float(np.clip(12.0 / np.sqrt(crowd), 0.15, 0.9))
    tints = SHARES(norm(shares))
    between = _between_groups(shown)
    plain = _plain(shown, between)
    if shown.directed and shown.peers <= LABELLED:
        for i in plain:
            _arrow(axes, ends[i], tints[i], diameter(shown.places) / 2 + 1, width)
    else:
        axes.add_collection(
            LineCollection(
                list(ends[plain]), colors=tints[plain], linewidths=width, alpha=faint, zorder=1
            )
        )
    styles = ((between, "#606060", "-"), (shown.added, ADDED, ":"), (shown.cut_links, WEAK, "--"))
    for marks, colour, style in styles:
        chosen = [i for i, link in enumerate(shown.links) if link in marks]
        axes.add_collection(
            LineCollection(
                list(ends[chosen]),
                colors=colour,
                linewidths=1.2 if style == "-" else 2.0,
                linestyles=style,
                zorder=2,
            )
        )


def _plain(shown: Map, between: Set[tuple[int, int]] = frozenset()) -> list[int]:
    """Which links are drawn in the grey of their share."""
    marked = {*shown.cut_links, *shown.added, *between}
    return [i for i, link in enumerate(shown.links) if link not in marked]


def _between_groups(shown: Map) -> set[tuple[int, int]]:
    """Links that join groups, when they are few among many: the picture must not lose them."""
    if not shown.groups or shown.directed or len(shown.links) < 500:
        return set()
    found = {(u, v) for u, v in shown.links if shown.groups[u] != shown.groups[v]}
    return found - shown.cut_links - shown.added if len(found) <= 100 else set()


def _arrow(axes: Axes, ends: Places, tint: Any, gap: float, width: float) -> None:
    axes.add_patch(
        FancyArrowPatch(
            tuple(ends[0]), tuple(ends[1]), arrowstyle="-|>", mutation_scale=8, shrinkA=gap,
            shrinkB=gap, linewidth=width, color=tint, connectionstyle="arc3,rad=0.08", zorder=1,
        )
    )  # fmt: skip


def _norm(shares: np.ndarray) -> colors.Normalize:
    low, high = float(shares.min()), float(shares.max())
    if high - low < 1e-9:  # all equal: the middle of the scale
        return colors.Normalize(low - 1, high + 1)
    return colors.Normalize(low, high)


def looks(groups: Sequence[str]) -> dict[str, tuple[str, str]]:
    """A colour and a marker for each group; more groups than the legend can hold share one look."""
    names = sorted(set(groups), key=_natural)
    if len(names) > GROUPS:
        return dict.fromkeys(names, (PEER, "o"))
    # vermilion marks weak spots, black and grey are links: five colours are left
    free = [COLOURS[i] for i in (0, 4, 2, 3, 5)]
    return {
        name: (free[i % len(free)], MARKERS[i // len(free) % len(MARKERS)])
        for i, name in enumerate(names)
    }


def _natural(name: str) -> tuple[int, str]:
    return (len(name), name) if name.isdecimal() else (10**6, name)


def _draw_peers(axes: Axes, shown: Map) -> None:
    size = diameter(shown.places)
    groups = list(shown.groups) or ["peer"] * shown.peers
    edge = 0.0 if shown.peers > 2000 else 0.8
    for name, (colour, marker) in looks(groups).items():
        mine = [i for i in range(shown.peers) if groups[i] == name]
        axes.scatter(
            shown.places[mine, 0], shown.places[mine, 1], s=size**2, c=colour, marker=marker,
            edgecolors="white", linewidths=edge, zorder=3,
        )  # fmt: skip
    weak = sorted(shown.bridge_peers)
    axes.scatter(
        shown.places[weak, 0], shown.places[weak, 1], s=(1.15 * size) ** 2, facecolors="none",
        edgecolors=WEAK, linewidths=2.2 if size > 8 else 1.2, zorder=4,
    )  # fmt: skip


def _draw_labels(axes: Axes, shown: Map) -> None:
    size = diameter(shown.places)
    labels = list(shown.labels) or [str(i) for i in range(shown.peers)]
    if max(map(len, labels)) <= 3:  # numbers stand inside
        known, groups = looks(shown.groups), shown.groups or [""] * shown.peers
        for (x, y), label, group in zip(shown.places, labels, groups, strict=True):
            axes.text(
                x, y, label, ha="center", va="center_baseline", fontsize=min(9.0, 0.46 * size),
                color=_readable(known.get(group, (PEER, ""))[0]), fontweight="bold", zorder=5,
            )  # fmt: skip
        return
    taken = [(x - size / 2, y - size / 2, x + size / 2, y + size / 2) for x, y in _points(shown)]
    for (x, y), place, label in zip(_points(shown), shown.places, labels, strict=True):
        wide, tall, away = 4.6 * len(label), 10.0, size / 2 + 2
        spots = [
            (x - wide / 2, y - away - tall), (x - wide / 2, y + away), (x + away, y - tall / 2),
            (x - away - wide, y - tall / 2), (x + away * 0.7, y - away - tall * 0.6),
            (x - away * 0.7 - wide, y - away - tall * 0.6), (x + away * 0.7, y + away * 0.6),
            (x - away * 0.7 - wide, y + away * 0.6),
        ]  # fmt: skip
        boxes = [(left, low, left + wide, low + tall) for left, low in spots]
        best = min(range(len(boxes)), key=lambda i: (_clashes(boxes[i], taken), i))
        taken.append(boxes[best])
        left, low = spots[best]
        axes.annotate(
            label, place, xytext=(left - x, low - y + 1), textcoords="offset points", fontsize=8,
            zorder=5, bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.5},
        )  # fmt: skip


def _readable(background: str) -> str:
    """Black or white, whichever stands out."""
    red, green, blue = colors.to_rgb(background)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _points(shown: Map) -> Places:
    return shown.places * SIDE / (1 + 2 * MARGIN)


def _clashes(box: tuple[float, ...], taken: Sequence[tuple[float, ...]]) -> float:
    """How much of a box others cover already, and how far it sticks out of the map."""
    left, low, right, high = box
    over = sum(
        max(0.0, min(right, r) - max(left, x)) * max(0.0, min(high, h) - max(low, y))
        for x, y, r, h in taken
    )
    side = SIDE / (1 + 2 * MARGIN)
    rim = MARGIN * side
    out = max(0.0, -rim - left) + max(0.0, right - side - rim)
    return over + 20 * out


def _in_groups(shown: Map) -> bool:
    return 0 < len(looks(shown.groups)) <= GROUPS


def _even(shares: Sequence[float]) -> bool:
    """Whether all links carry the same, so that the legend can say it."""
    return len(shares) == 0 or float(np.ptp(shares)) < 1e-9


def _scaled(shown: Map) -> bool:
    """Whether the picture needs a scale of shares: only if greys differ and some link has one."""
    return not _even(shown.shares) and bool(_plain(shown))


def _columns(entries: int) -> int:
    return 1 if entries <= 3 else 2 if entries <= 8 else 4


def _entries(shown: Map) -> list[Line2D]:
    entries: list[Line2D] = []
    if _in_groups(shown):
        entries += [
            Line2D([], [], linestyle="", marker=marker, color=colour, markersize=8, label=name)
            for name, (colour, marker) in looks(shown.groups).items()
        ]
    else:
        entries.append(Line2D([], [], linestyle="", marker="o", color=PEER, label="peer"))
    if shown.links and _even(shown.shares):
        text = f"link, share {shown.shares[0]:.3g}"
        entries.append(Line2D([], [], color=SHARES(0.5), linewidth=1.2, label=text))
    if shown.cut_links:
        text = f"cut link ({len(shown.cut_links)}): its loss splits the swarm"
        entries.append(Line2D([], [], color=WEAK, linestyle="--", linewidth=2, label=text))
    if shown.bridge_peers:
        text = f"bridge peer ({len(shown.bridge_peers)}): its loss splits the swarm"
        entries.append(
            Line2D([], [], linestyle="", marker="o", markerfacecolor="none", markeredgewidth=2,
                   color=WEAK, markersize=9, label=text)
        )  # fmt: skip
    if shown.added:
        text = f"link added by bridging ({len(shown.added)})"
        entries.append(Line2D([], [], color=ADDED, linestyle=":", linewidth=2, label=text))
    return entries


def _draw_legend(axes: Axes, shown: Map) -> None:
    entries = _entries(shown)
    axes.legend(
        handles=entries, title="group" if _in_groups(shown) else None,
        loc="upper center", bbox_to_anchor=(0.5, 0.0), frameon=False, fontsize=9,
        ncols=_columns(len(entries)),
    )  # fmt: skip
    if _scaled(shown) and axes.figure is not None:
        high = extent(shown.places)[1] > 0.7  # else the words are longer than the map is high
        words = "share of a peer's mass that a link carries per exchange"
        axes.figure.colorbar(
            ScalarMappable(_norm(np.array(shown.shares)), SHARES), ax=axes, shrink=0.7 if high else 0.9,
            pad=0.01, aspect=30 if high else 15, label=words if high else "share per exchange",
            panchor=False,  # the map stays at the top
        )  # fmt: skip


# --- places in a unit square ----------------------------------------------------------------------

STRESSED = 600
"""Peers up to which distances between all pairs are worth their time and memory."""


def places(graph: nx.Graph) -> Places:
    """One place per peer, in the order of the sorted peers, inside the unit square.

    The graph's own `pos` if every peer has one; else distances on paper follow distances in hops.
    """
    nodes = sorted(graph.nodes)
    own = [graph.nodes[node].get("pos") for node in nodes]
    if all(place is not None and len(place) == 2 for place in own):
        return spread(_square(np.array(own, dtype=float), keep_shape=True))
    plain = nx.Graph(graph.subgraph(nodes))  # directions do not matter on paper
    for *_, data in plain.edges(data=True):
        data.clear()
    links = csr_array(nx.to_scipy_sparse_array(plain, nodelist=nodes, dtype=float))
    found = spread(_square(_by_pivots(links)))
    if 2 < len(nodes) <= STRESSED:
        found = spread(_square(_lying(_by_stress(links, found)), keep_shape=True))
    return found


def spread(points: Places, rounds: int = 200) -> Places:
    """Push apart whoever stands too near; the least distance falls with the number of peers."""
    count = len(points)
    if count < 2:
        return np.full((count, 2), 0.5)
    apart = least_distance(count)
    rng = np.random.default_rng(3)
    points = points + rng.normal(0, apart / 100, points.shape)  # nobody on the very same spot
    for _ in range(rounds):
        pairs = KDTree(points).query_pairs(apart, output_type="ndarray")
        if not len(pairs):
            break
        line = points[pairs[:, 0]] - points[pairs[:, 1]]
        length = np.linalg.norm(line, axis=1, keepdims=True)
        push = line / length * (1.05 * apart - length) / 2
        np.add.at(points, pairs[:, 0], push)
        np.add.at(points, pairs[:, 1], -push)
    low, high = points.min(axis=0), points.max(axis=0)
    if low.min() < 0 or high.max() > 1:  # a crowd may have pushed some over the border
        points = (points - (low + high) / 2) / max(float((high - low).max()), 1e-9) + 0.5
    return points


def least_distance(count: int) -> float:
    """How near two of `count` peers should stand; a square holds them all with room to spare."""
    return 0.55 / np.sqrt(count)


def nearest(points: Places) -> float:
    """How near the two nearest peers stand."""
    if len(points) < 2:
        return 1.0
    return float(KDTree(points).query(points, k=2)[0][:, 1].min())


def _square(points: Places, keep_shape: bool = False) -> Places:
    low, high = points.min(axis=0), points.max(axis=0)
    size = np.full(2, (high - low).max()) if keep_shape else high - low
    size = np.where(size > 1e-9, size, 1.0)
    return (points - (low + high) / 2) / size + 0.5


def _lying(points: Places) -> Places:
    """Turned so that the longer way runs across, as pages do; left alone if no way is much longer."""
    centred = points - points.mean(axis=0)
    _, sizes, ways = np.linalg.svd(centred, full_matrices=False)
    if sizes[0] < 1.2 * sizes[1]:
        return points
    (x, y), _ = ways if ways[0, np.abs(ways[0]).argmax()] > 0 else -ways
    return centred @ np.array([[x, -y], [y, x]])  # a turn, never a mirror


def _by_pivots(links: csr_array, pivots: int = 50) -> Places:
    """Classical scaling on the hops to a few far-apart peers; a circle when hops tell little."""
    count = len(links.indptr) - 1
    angle = 2 * pi * np.arange(count) / max(count, 1)
    circle = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    if count < 4:
        return circle
    hops = np.empty((min(pivots, count), count))
    closest = np.full(count, np.inf)
    pivot = 0
    for row in range(len(hops)):
        hops[row] = _finite(dijkstra(links, indices=pivot, unweighted=True))
        closest = np.minimum(closest, hops[row])
        pivot = int(closest.argmax())
    squares = hops**2
    centred = squares - squares.mean(axis=0) - squares.mean(axis=1, keepdims=True) + squares.mean()
    _, values, axes = np.linalg.svd(centred, full_matrices=False)
    if values[1] < 1e-6 * max(values[0], 1e-12):
        return circle
    found = axes[:2].T
    crowded = len(np.unique(found.round(6), axis=0)) < 0.7 * count
    return circle if crowded and count <= pivots else found


def _by_stress(links: csr_array, start: Places, rounds: int = 80) -> Places:
    """Distances on paper as near to distances in hops as they get, near pairs first (majorization)."""
    hops = _finite(np.asarray(dijkstra(links, unweighted=True)))
    np.fill_diagonal(hops, 1.0)
    weight = hops**-2.0
    np.fill_diagonal(weight, 0.0)
    laplacian = np.diag(weight.sum(axis=1)) - weight
    inverse = np.linalg.pinv(laplacian, hermitian=True)
    points = start * hops.max()
    for _ in range(rounds):
        apart = np.linalg.norm(points[:, None] - points[None], axis=2)
        pull = -weight * hops / np.maximum(apart, 1e-9)
        np.fill_diagonal(pull, 0.0)
        np.fill_diagonal(pull, -pull.sum(axis=1))
        points = inverse @ (pull @ points)
    return points


def _finite(hops: Places) -> Places:
    """Parts that no path joins lie side by side."""
    known = hops[np.isfinite(hops)]
    return np.where(np.isfinite(hops), hops, known.max() + 2)
