from pathlib import Path

import networkx as nx
import pytest

from gossamer.topology import Schedule, TopologyError, build, build_schedule, graphs, parse


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
        ("ring", None, "how many peers"),
        ("random-matchings", 8, "it is a schedule"),
        ({"kind": "file"}, 8, "path"),
        ({"kind": "function"}, 8, "module:function"),
        (nx.path_graph(5), 8, "fewer peers than the swarm: 5, not 8"),
        (nx.path_graph(9), 8, "more peers than the swarm: 9, not 8"),
    ],
)
def test_bad_specs_say_what_to_do(spec, peers: int | None, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        build(spec, peers)
