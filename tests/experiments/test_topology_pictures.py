"""Pictures of graphs: nobody on top of anybody, every word inside, colours that all can tell apart."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch
from matplotlib.text import Text
from scipy.spatial.distance import pdist

from gossamer.experiments.graphs import load_graph
from gossamer.experiments.graphs.drawing import group_styles, marker_diameter
from gossamer.experiments.graphs.placement import positions
from gossamer.experiments.graphs.show import examine, figure_of, map_of, redraw, show
from gossamer.experiments.study.figures import COLOURS, VERMILION
from gossamer.topology import build

KINDS = [
    "regular:4",
    "clusters:4",
    "barabasi-albert:1",
    "star",
    "clique",
    "exponential",
    "geographic",
]


def drawn(name: str, peers: int | None) -> tuple[Figure, dict[str, Any]]:
    """A graph's picture, and the record that it was drawn from."""
    record = examine(load_graph(name, peers)).record
    figure = figure_of(record)
    figure.draw_without_rendering()
    return figure, record


def scattered(axes: Axes) -> list[PathCollection]:
    """The dots of a picture: one collection per group, then the rings around cut peers."""
    return [c for c in axes.collections if isinstance(c, PathCollection)]


def test_bridges_of_a_directed_graph_have_arrows(tmp_path: Path) -> None:
    rings = nx.DiGraph([(0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3), (2, 3), (3, 2)])
    nx.write_graphml(rings, tmp_path / "rings.graphml")
    figure, record = drawn(str(tmp_path / "rings.graphml"), None)
    arrows = [each for each in figure.axes[0].patches if isinstance(each, FancyArrowPatch)]
    bridges = [each for each in arrows if to_hex(each.get_edgecolor()).upper() == VERMILION]
    assert len(arrows) == rings.number_of_edges()
    assert len(bridges) == len(map_of(record).bridges) > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("peers", [16, 128])
def test_peers_and_labels_never_overlap(kind: str, peers: int) -> None:
    figure, _ = drawn(kind, peers)
    axes = figure.axes[0]
    spots = np.concatenate([np.asarray(dots.get_offsets()) for dots in scattered(axes)])
    spots = np.unique(np.asarray(spots).round(5), axis=0)
    assert len(spots) == peers
    pixels = axes.transData.transform(spots)
    smallest_distance = pdist(pixels).min()
    size = marker_diameter(positions(build(kind, peers))) * figure.dpi / 72
    assert size <= smallest_distance + 1  # a peer is no wider than the way to its neighbour
    assert size >= 4  # and still to be seen
    if peers > 64:
        assert not axes.texts
        return
    assert {text.get_text() for text in axes.texts} == {str(peer) for peer in range(peers)}
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))


def test_names_stand_beside_their_peers() -> None:
    figure, _ = drawn("networkx:florentine_families_graph", None)
    axes = figure.axes[0]
    assert "Medici" in {text.get_text() for text in axes.texts}
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 15
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    for box in boxes:
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width


@pytest.mark.parametrize("peers", [16, 256])
def test_title_and_legend_are_inside(peers: int) -> None:
    figure, _ = drawn("barabasi-albert:1", peers)
    legend = figure.axes[0].get_legend()
    assert legend is not None
    told = " ".join(text.get_text() for text in legend.get_texts())
    assert "bridge (" in told
    assert "cut peer (" in told
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.y0 >= -1  # half a pixel is rounding
    title = figure.get_suptitle()
    assert f"{peers} peers" in title
    words = [text for text in figure.findobj(Text) if text.get_text() == title]
    assert words
    assert all(text.get_window_extent().x0 >= 0 for text in words)


@pytest.mark.parametrize(
    "name", ["networkx:karate_club_graph", "path", "ring", "star", "clusters:2"]
)
def test_a_page_is_as_high_as_its_map(name: str) -> None:
    figure, record = drawn(name, None if ":k" in name else 12)
    axes = figure.axes[0]
    y = axes.transData.transform(record["places"])[:, 1]
    assert figure.bbox.height - np.ptp(y) <= 2.6 * figure.dpi  # title, legend and a margin
    legend = axes.get_legend()
    assert legend is not None
    assert 0 <= legend.get_window_extent().y0 < legend.get_window_extent().y1 < y.min()


def test_a_scale_is_drawn_only_for_links_that_have_it() -> None:
    tree, _ = drawn("barabasi-albert:1", 16)
    assert len(tree.axes) == 1  # every link is a bridge, and has that colour
    club, _ = drawn("networkx:karate_club_graph", None)
    assert len(club.axes) == 2


def test_weak_spots_are_the_ones_known() -> None:
    figure, record = drawn("networkx:karate_club_graph", None)
    rings = scattered(figure.axes[0])[-1]
    assert to_hex(rings.get_edgecolor()[0]).upper() == VERMILION
    assert np.allclose(rings.get_offsets(), [record["places"][0]])  # peer 0, nobody else


def test_added_links_are_marked_in_whichever_direction_they_were_recorded() -> None:
    record = examine(load_graph("ring", 6)).record
    u, v = record["links"][0]
    for added in ([u, v], [v, u]):
        assert map_of(record | {"added": [added]}).added == {(u, v)}


def test_groups_have_safe_styles_of_their_own() -> None:
    found = group_styles([str(i) for i in range(12)])
    assert len(set(found.values())) == 12
    assert {colour for colour, _ in found.values()} <= set(COLOURS) - {VERMILION}
    assert (
        len(set(group_styles([str(i) for i in range(40)]).values())) == 1
    )  # too many for a legend


def test_the_same_graph_is_the_same_picture(tmp_path: Path) -> None:
    for name in ("one", "two"):
        show(examine(load_graph("watts-strogatz", 30)), tmp_path / name)
    assert (tmp_path / "one/topology.svg").read_bytes() == (
        tmp_path / "two/topology.svg"
    ).read_bytes()
    before = (tmp_path / "one/topology.png").read_bytes()
    redraw(tmp_path / "one", "topology", figure_of)  # from the file alone
    assert (tmp_path / "one/topology.png").read_bytes() == before
    words = set(re.findall(r"<!-- (.*?) -->", (tmp_path / "one/topology.svg").read_text()))
    assert "watts-strogatz" in words


def test_places_follow_the_graphs_own_or_its_hops() -> None:
    own = build("geographic", 40, seed=2)
    want = np.array([own.nodes[i]["pos"] for i in range(40)])
    found = positions(own)
    assert np.corrcoef(want[:, 0], found[:, 0])[0, 1] > 0.95
    ring = positions(build("ring", 24))
    steps = np.linalg.norm(ring - np.roll(ring, 1, axis=0), axis=1)
    assert steps.max() < 1.5 * steps.min()  # a ring is drawn as one
    wide, tall = np.ptp(positions(nx.barbell_graph(6, 4)), axis=0)
    assert tall < 0.6 * wide  # what is long lies
    apart = positions(nx.disjoint_union(nx.cycle_graph(5), nx.cycle_graph(5)))
    assert np.isfinite(apart).all()
    assert ring.min() >= -1e-9
    assert ring.max() <= 1 + 1e-9
