from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.topology import (
    Event,
    TopologyError,
    build,
    churn,
    draw_events,
    read_events,
    write_events,
)


def test_events_act_from_their_step_on() -> None:
    schedule = churn(
        nx.path_graph(4),
        [
            Event(5, "link-up", 2, 1),
            Event(2, "leave", 3),
            Event(3, "link-down", 1, 2),
            Event(6, "arrive", 3),
        ],
    )
    assert len(schedule.graph(0)) == len(schedule.graph(1)) == 4
    assert set(schedule.graph(2)) == {0, 1, 2}
    assert set(schedule.graph(3).edges) == {(0, 1)}
    assert set(schedule.graph(5).edges) == {(0, 1), (1, 2)}
    assert set(schedule.graph(99).edges) == {(0, 1), (1, 2), (2, 3)}


def test_absent_peers_keep_their_mass() -> None:
    schedule = churn(build("clique", 4), [Event(3, "arrive", 2)], away=[2])
    assert 2 not in schedule.graph(0)
    matrix = schedule.matrix(0).toarray()
    assert matrix[2, 2] == 1
    assert matrix[0, 1] == pytest.approx(1 / 3)
    assert schedule.matrix(3).toarray()[2, 2] == pytest.approx(1 / 4)


def test_directed_links_fail_one_way() -> None:
    graph = nx.DiGraph([(0, 1), (1, 0)])
    schedule = churn(graph, [Event(1, "link-down", 0, 1)])
    assert set(schedule.graph(1).edges) == {(1, 0)}


@settings(deadline=None)
@given(st.integers(0, 2**31), st.floats(0, 1), st.floats(0, 1), st.integers(1, 6))
def test_drawn_traces_are_valid_and_keep_some(
    seed: int, leave: float, arrive: float, keep: int
) -> None:
    graph = nx.cycle_graph(6)
    events = draw_events(graph, 20, leave, arrive, link_down=0.2, keep=keep, seed=seed)
    assert events == draw_events(graph, 20, leave, arrive, link_down=0.2, keep=keep, seed=seed)
    schedule = churn(graph, events)  # refuses impossible events
    assert min(len(schedule.graph(t)) for t in range(20)) >= keep


def test_long_run_presence() -> None:
    graph = nx.cycle_graph(300)
    schedule = churn(graph, draw_events(graph, 200, leave=0.05, arrive=0.15, seed=1))
    share = np.mean([len(schedule.graph(t)) for t in range(60, 200, 10)]) / 300
    assert share == pytest.approx(0.75, abs=0.04)


def test_traces_round_trip(tmp_path: Path) -> None:
    graph = build("regular:4", 20)
    events = draw_events(graph, 30, leave=0.1, link_down=0.1, seed=3)
    assert {event.kind for event in events} == {"arrive", "leave", "link-down", "link-up"}
    write_events(tmp_path / "trace.csv", events)
    assert read_events(tmp_path / "trace.csv") == events


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("3,leave", "2 fields"),
        ("x,leave,1", "invalid literal"),
        ("3,explode,1", "unknown event 'explode'"),
        ("3,leave,1,2", "leave names one peer"),
        ("3,link-down,1", "link-down names two peers"),
        ("-1,leave,1", "count from 0"),
    ],
)
def test_bad_lines_give_file_line_and_reason(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"# a comment\n1,leave,0\n\n{line}\n")
    with pytest.raises(TopologyError, match=rf"trace\.csv, line 4: .*{reason}"):
        read_events(path)


def test_missing_trace(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"none\.csv: cannot read"):
        read_events(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (Event(1, "leave", 9), "the graph has peers"),
        (Event(1, "arrive", 0), "there already"),
        (Event(1, "link-down", 0, 2), "no such link"),
        (Event(1, "link-up", 0, 1), "up already"),
    ],
)
def test_impossible_events(event: Event, reason: str) -> None:
    with pytest.raises(TopologyError, match=f"step 1: .*{reason}"):
        churn(nx.path_graph(3), [event])
