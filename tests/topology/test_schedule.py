from collections.abc import Callable

import networkx as nx
import numpy as np
import pytest

from gossamer.topology import (
    Schedule,
    TopologyError,
    build,
    contraction,
    exchanges_to,
    log_errors,
    mixing_matrix,
    one_peer_exponential,
    random_matchings,
    rotating_rings,
    schedule_rate,
    spectral_gap,
    static,
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
