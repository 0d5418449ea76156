import json
from pathlib import Path

import networkx as nx
import numpy as np
import pytest

from gossamer.topology import (
    Schedule,
    TopologyError,
    build,
    build_schedule,
    from_function,
    graphs,
    load,
    normalize_graph,
    parse,
)


def test_short_and_long_forms_agree() -> None:
    assert parse("regular:4") == ("regular", {"degree": 4})
    assert parse("watts-strogatz:6:0.2") == ("watts-strogatz", {"degree": 6, "p": 0.2})
    assert parse("torus:3") == ("torus", {"rows": 3})
    assert parse({"kind": "regular", "degree": 4}) == ("regular", {"degree": 4})
    long = build({"kind": "regular", "degree": 6}, 20, seed=3)
    assert long.edges == build("regular:6", 20, seed=3).edges == graphs.regular(20, 6, seed=3).edges
    assert (
        build({"kind": "geographic", "radius": 1}, 5).number_of_edges() >= 4
    )  # an int for a float


def test_a_graph_or_a_path_is_a_spec(tmp_path: Path) -> None:
    assert len(build(nx.karate_club_graph(), 34)) == 34
    (tmp_path / "two.edges").write_text("0 1\n")
    assert len(build(tmp_path / "two.edges")) == 2
    long = {"kind": "file", "path": str(tmp_path / "two.edges"), "format": "edges"}
    assert len(build(long, 2)) == 2


def test_links_are_listed_in_the_spec() -> None:
    links = [[2, 0], [1, 2]]
    graph = build({"kind": "links", "links": links}, 4)
    assert list(graph) == [0, 1, 2, 3]
    assert {frozenset(link) for link in graph.edges} == {frozenset(link) for link in links}
    one_way = build({"kind": "links", "links": links, "directed": True})
    assert set(one_way.edges) == {(2, 0), (1, 2)}


def test_schedules() -> None:
    assert build_schedule("one-peer-exponential", 16).period == 4
    assert build_schedule("random-matchings:5", 16).period == 5
    still = build_schedule("ring", 6)
    assert (still.period, still.graph(7).edges) == (1, graphs.ring(6).edges)
    assert isinstance(build_schedule(still), Schedule)


@pytest.mark.parametrize(
    ("spec", "peers", "message"),
    [
        ("regulr:4", 8, "did you mean 'regular'"),
        ({"kind": "zzz"}, 8, "known are ring, path"),
        ({"kind": "regular", "degre": 4}, 8, "no parameter 'degre': did you mean 'degree'"),
        ({"kind": "ring", "size": 4}, 8, "known are none"),
        ({"kind": "regular", "degree": "4"}, 8, "degree is '4', not int"),
        ({"kind": "regular", "degree": True}, 8, "degree is True, not int"),
        ({"degree": 4}, 8, "needs a kind"),
        ("regular:x", 8, "degree is 'x', not a whole number"),
        ("regular:4:5", 8, "write regular:degree"),
        ("ring", None, "give the number of peers"),
        ("random-matchings", 8, "it is a schedule"),
        ({"kind": "file"}, 8, "file needs 'path'"),
        ({"kind": "function"}, 8, "module:function"),
        ({"kind": "links"}, 3, "links needs 'links'"),
        ({"kind": "links", "links": [[0, 1, 2]]}, 3, r"\[0, 1, 2\] is not a pair of peers"),
        ({"kind": "links", "links": [[0, 3]]}, 3, "3 peers have the numbers 0 … 2"),
        ({"kind": "links", "links": [[1, 1]]}, 3, "self-loops at"),
        (nx.path_graph(5), 8, "fewer peers than the swarm: 5, not 8"),
        (nx.path_graph(9), 8, "more peers than the swarm: 9, not 8"),
    ],
)
def test_bad_specs_say_what_to_do(spec, peers: int | None, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        build(spec, peers)


def same(a: nx.Graph, b: nx.Graph) -> bool:
    def links(graph: nx.Graph) -> set:
        return {edge if graph.is_directed() else frozenset(edge) for edge in graph.edges}

    return a.is_directed() == b.is_directed() and set(a) == set(b) and links(a) == links(b)


@pytest.mark.parametrize("kind", ["torus", "exponential"])
def test_every_format_round_trips(tmp_path: Path, kind: str) -> None:
    graph = build(kind, 12)
    head = "# directed\n" if graph.is_directed() else ""
    nx.write_graphml(graph, tmp_path / "g.graphml")
    (tmp_path / "g.edges").write_text(head + "".join(f"{u} {v}\n" for u, v in graph.edges))
    matrix = nx.to_numpy_array(graph)
    np.savetxt(tmp_path / "g.csv", matrix, delimiter=",", fmt="%g")
    np.save(tmp_path / "g.npy", matrix)
    (tmp_path / "g.json").write_text(json.dumps(nx.node_link_data(graph, edges="edges")))
    for name in ("g.graphml", "g.edges", "g.csv", "g.npy", "g.json"):
        assert same(load(tmp_path / name), graph), name
        assert same(build(f"file:{tmp_path / name}", 12), graph), name


def test_labels_and_weights_survive(tmp_path: Path) -> None:
    path = tmp_path / "friends.txt"
    path.write_text("ann bob 0.25\nbob,cid,0.5  # comment\n")
    graph = load(path)
    assert dict(graph.nodes(data="label")) == {0: "ann", 1: "bob", 2: "cid"}
    assert list(graph.edges(data="weight")) == [(0, 1, 0.25), (1, 2, 0.5)]
    families = normalize_graph(nx.florentine_families_graph())
    assert list(families.nodes) == list(range(15))
    assert families.nodes[0]["label"] == "Acciaiuoli"


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("g.edges", "0 1\n1 1\n", r"line 2: '1 1': a self-loop"),
        ("g.edges", "0 1\n\n2\n", r"line 3: '2': 1 fields"),
        ("g.edges", "0 1 x\n", r"line 1: .*'x' is not a number"),
        ("g.edges", "0 1 nan\n", r"line 1: .*not a finite number"),
        ("g.edges", "0 1 1\n1 0 2\n", r"line 2: .*another weight"),
        ("g.edges", "# nothing\n", "no peers"),
        ("g.csv", "0,1\n1,0,1\n", r"line 2: 3 columns where line 1 has 2"),
        ("g.csv", "0,1\n1,a\n", r"line 2, column 2: 'a' is not a number"),
        ("g.csv", "0,1,0\n1,0,0\n", r"square, not of shape \(2, 3\)"),
        ("g.csv", "1,1\n1,0\n", r"self-loops at \{0\}"),
        ("g.json", '{"nodes": [\n}', r"line 2: not JSON"),
        ("g.json", "[]", "needs `nodes` and `edges`"),
        (
            "g.json",
            '{"nodes": [{"id": 0}], "edges": [{"source": 0, "target": 7}]}',
            r"edges\[0\]: no node has the id 7",
        ),
        ("g.graphml", "<graphml>\n<oops\n", r"line \d: not XML"),
        ("g.graphml", "<graphml></graphml>", "not GraphML"),
        ("g.npy", "hello", "not a plain .npy"),
        ("g.xyz", "", r"unknown format '\.xyz': .*name its format: topology = \{kind"),
    ],
)
def test_bad_files_say_where_and_why(tmp_path: Path, name: str, text: str, reason: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TopologyError, match=reason) as caught:
        load(tmp_path / name)
    assert name in str(caught.value)


def test_missing_binary_and_negative(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="there is no such file"):
        load(tmp_path / "none.edges")
    (tmp_path / "b.edges").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TopologyError, match="cannot read"):
        load(tmp_path / "b.edges")
    np.save(tmp_path / "n.npy", np.array([[0.0, -1.0], [1.0, 0.0]]))
    with pytest.raises(TopologyError, match=r"entry \(0, 1\): -1"):
        load(tmp_path / "n.npy")
    np.save(tmp_path / "o.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(TopologyError, match="not a plain"):
        load(tmp_path / "o.npy")


def test_parallel_links_are_refused() -> None:
    with pytest.raises(TopologyError, match="parallel links 0–1"):
        normalize_graph(nx.MultiGraph([(0, 1), (0, 1)]))


def test_users_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_graphs.py").write_text(
        "import networkx as nx\n"
        "def wheel(peers, extra=0):\n    return nx.wheel_graph(peers + extra)\n"
        "def seeded(peers, seed):\n    return nx.gnp_random_graph(peers, 0.5, seed=seed)\n"
        "def club():\n    return nx.karate_club_graph()\n"
        "def wrong():\n    return 5\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert same(build("function:my_graphs:wheel", 7), nx.wheel_graph(7))
    assert same(from_function("my_graphs:seeded", 9, seed=4), nx.gnp_random_graph(9, 0.5, seed=4))
    assert len(build({"kind": "function", "name": "my_graphs:club"})) == 34
    assert len(from_function("my_graphs:wheel", 5, extra=2)) == 7
    for name, reason in [
        ("my_graphs:wrong", "returned int"),
        ("my_graphs:none", "has no function or class"),
        ("no_such_module_x:f", "there is no module 'no_such_module_x' in "),
        ("my_graphs", "write module:function"),
        ("my_graphs:wheel", "cannot be called"),
    ]:
        with pytest.raises(TopologyError, match=reason):
            from_function(name)


def test_a_bare_name_with_a_suffix_is_a_file():
    with pytest.raises(TopologyError, match=r"graph\.gml: unknown format '\.gml'"):
        build("graph.gml", 4)
