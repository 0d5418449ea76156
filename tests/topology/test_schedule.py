from collections.abc import Callable
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.topology import (
    Event,
    Schedule,
    TopologyError,
    build,
    churn,
    contraction,
    draw_events,
    exchanges_to,
    log_errors,
    mixing_matrix,
    one_peer_exponential,
    random_matchings,
    read_events,
    rotating_rings,
    schedule_rate,
    spectral_gap,
    static,
    write_events,
)

RANDOM: list[Callable[..., Schedule]] = [random_matchings, rotating_rings]


@pytest.mark.parametrize("peers", [2, 8, 64, 1024])
def test_one_peer_exponential_is_exact_after_log2_n(peers: int) -> None:
    schedule = one_peer_exponential(peers)
    rounds = peers.bit_length() - 1
    assert schedule.period == rounds
    assert schedule_rate(schedule) == 0
    logs = log_errors(schedule.matrix, rounds)
    assert exchanges_to(logs, 1e-12) == rounds
    assert {d for _, d in schedule.graph(3).out_degree()} == {1}


def test_one_peer_exponential_of_another_size_still_mixes() -> None:
    rate = schedule_rate(one_peer_exponential(12))
    assert 0 < rate < 0.9


@pytest.mark.parametrize("make", RANDOM)
def test_graphs_are_a_function_of_the_step(make: Callable[..., Schedule]) -> None:
    one, two = make(20, seed=4), make(20, seed=4)
    forwards = [set(one.graph(t).edges) for t in range(6)]
    backwards = [set(two.graph(t).edges) for t in reversed(range(6))]
    assert forwards == backwards[::-1]
    assert forwards[0] != forwards[1]
    assert set(make(20, seed=5).graph(0).edges) != forwards[0]
    again = make(20, seed=np.random.default_rng(1))
    assert set(again.graph(2).edges) == set(again.graph(2).edges)
    periodic = make(20, period=3, seed=4)
    assert set(periodic.graph(1).edges) == set(periodic.graph(4).edges)


def test_shapes() -> None:
    assert sorted(d for _, d in random_matchings(7).graph(2).degree()) == [0] + [1] * 6
    ring = rotating_rings(9).graph(5)
    assert nx.is_isomorphic(ring, nx.cycle_graph(9))


@pytest.mark.parametrize("method", ["dense", "sparse"])
@pytest.mark.parametrize("make", RANDOM)
def test_rate_over_a_period_is_what_is_measured(make: Callable[..., Schedule], method) -> None:
    schedule = make(24, period=5, seed=1)
    rate = schedule_rate(schedule, method=method)
    period = [schedule.matrix(step) for step in range(5)]
    measured = contraction(lambda step: period[step % 5], 5 * 200)
    assert np.log(measured) == pytest.approx(np.log(rate), rel=0.05)


def test_rotating_beats_standing_still() -> None:
    ring = 1 - spectral_gap(mixing_matrix(build("ring", 64)))
    assert schedule_rate(static(build("ring", 64))) == pytest.approx(ring, abs=1e-9)
    assert schedule_rate(rotating_rings(64, seed=0), steps=20) < 0.8 < ring


def test_union_joins_what_single_steps_do_not() -> None:
    schedule = random_matchings(16, seed=2)
    assert not nx.is_connected(schedule.graph(0))
    assert nx.is_connected(schedule.union(0, 12))
    assert one_peer_exponential(8).union(0, 3).edges == build("exponential", 8).edges


def test_bad_schedules_say_why() -> None:
    with pytest.raises(TopologyError, match="give steps"):
        schedule_rate(random_matchings(8))
    with pytest.raises(TopologyError, match="at least 3 peers"):
        rotating_rings(2)
    with pytest.raises(TopologyError, match="period"):
        random_matchings(8, period=0)
    with pytest.raises(TopologyError, match="count from 0"):
        random_matchings(8).graph(-1)


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
    schedule = churn(build("clique", 4), [Event(3, "arrive", 2)], absent=[2])
    assert 2 not in schedule.graph(0)
    matrix = schedule.matrix(0).toarray()
    assert matrix[2, 2] == 1
    assert matrix[0, 1] == pytest.approx(1 / 3)
    assert schedule.matrix(3).toarray()[2, 2] == pytest.approx(1 / 4)


def test_directed_links_fail_one_way() -> None:
    graph = nx.DiGraph([(0, 1), (1, 0)])
    schedule = churn(graph, [Event(1, "link-down", 0, 1)])
    assert set(schedule.graph(1).edges) == {(1, 0)}


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
        (Event(1, "arrive", 0), "present already"),
        (Event(1, "link-down", 0, 2), "no such link"),
        (Event(1, "link-up", 0, 1), "up already"),
    ],
)
def test_impossible_events(event: Event, reason: str) -> None:
    with pytest.raises(TopologyError, match=f"step 1: .*{reason}"):
        churn(nx.path_graph(3), [event])
