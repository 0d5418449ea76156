"""Push-sum in virtual time: mass is conserved, the seed decides everything, arrays keep to the rules."""

from __future__ import annotations

from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.experiments.arena import (
    Conditions,
    TimeError,
    Timetable,
    VectorisedPushSum,
    VirtualTime,
    World,
    parse,
)
from gossamer.gossip import ONE, DictStore, Partition
from gossamer.topology import Event, TopologyError, draw_events

PEERS = 30
GRAPH = nx.random_regular_graph(4, PEERS, seed=1)


def values(peers: int = PEERS, coordinates: int = 3) -> np.ndarray:
    return np.random.default_rng(7).normal(size=(peers, coordinates))


def conditions(**changed: Any) -> Conditions:
    given: dict[str, Any] = {"training": parse("exponential:1"), "delay": parse("exponential:0.4")}
    return Conditions(**(given | changed))


def trouble(seed: int = 0, **changed: Any) -> Conditions:
    """Everything at once: loss, stragglers, churn, failing links, a partition."""
    events = draw_events(GRAPH, 30, leave=0.03, arrive=0.3, link_down=0.02, seed=seed)
    given: dict[str, Any] = {
        "stragglers": 0.2,
        "slowdown": 5.0,
        "loss": 0.2,
        "timeout": 2.0,
        "events": tuple(events),
        "partitions": (Partition(5.0, 9.0, frozenset(range(10))),),
    }
    return conditions(**(given | changed))


def run(world: Conditions, seconds: float = 30.0, **options: Any) -> VectorisedPushSum:
    swarm = VectorisedPushSum(values(), GRAPH, world, **options)
    for _ in swarm.run(seconds):
        pass
    return swarm


def through_gossipers(
    world: Conditions, vectors: dict[str, np.ndarray], seed: int = 0, **options: Any
) -> VirtualTime:
    """The same peers as gossipers, with one row of each array."""
    stores = [DictStore({name: v[peer] for name, v in vectors.items()}) for peer in range(PEERS)]
    owners = {name: range(PEERS) for name in vectors}
    return VirtualTime(World(world, GRAPH, seed), GRAPH, owners, stores, [ONE] * PEERS, **options)


def assert_conserved(swarm: VectorisedPushSum) -> None:
    balance = swarm.balance()
    injected, weight = balance["injected"]
    assert balance["total"][1] + balance["died"][1] == weight
    drift = balance["total"][0] + balance["died"][0] - injected
    assert np.abs(drift).max() / weight < 1e-13


def test_estimates_agree_on_the_average() -> None:
    swarm = VectorisedPushSum(values(), GRAPH, conditions(), seed=3)
    samples = list(swarm.run(seconds=100, every=20))
    assert [sample.time for sample in samples] == [20, 40, 60, 80, 100]
    errors = [sample.error for sample in samples]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3
    np.testing.assert_allclose(swarm.average(), values().mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(
        swarm.estimates, np.tile(values().mean(axis=0), (PEERS, 1)), atol=0.01
    )
    assert_conserved(swarm)


def test_weights_weigh() -> None:
    weights = ONE * np.arange(1, PEERS + 1)
    swarm = run(conditions(), 120, weights=weights)
    expected = np.average(values(), axis=0, weights=np.arange(1, PEERS + 1))
    np.testing.assert_allclose(swarm.average(), expected, atol=1e-12)
    assert swarm.error() < 1e-2


@settings(max_examples=25)
@given(
    st.integers(0, 10_000),
    st.sampled_from(["constant:1", "uniform:0.1:2", "lognormal:1:1", "gamma:1:0.5"]),
    st.sampled_from(["constant:0.5", "uniform:0.1:3", "exponential:0.5", "lognormal:0.5:2"]),
    st.integers(1, 5),
    st.sampled_from([None, 0.5, 0.3]),
)
def test_mass_is_conserved_whatever_happens(
    seed: int, training: str, delay: str, fanout: int, fraction: float | None
) -> None:
    world = trouble(seed, training=parse(training), delay=parse(delay))
    swarm = VectorisedPushSum(values(), GRAPH, world, seed=seed, fanout=fanout, fraction=fraction)
    for _ in swarm.run(30, every=4.7):
        assert_conserved(swarm)
        assert (swarm.weights >= 0).all()
        assert np.isfinite(swarm.estimates).all()


def test_trouble_is_made() -> None:
    """The properties above would say little of a world in which nothing happens."""
    swarm = run(trouble())
    balance = swarm.balance()
    assert swarm.counters["push"] > 300
    assert swarm.counters["arrival"] > 150
    assert swarm.counters["return"] > 50
    assert balance["died"][1] > ONE
    assert balance["injected"][1] > PEERS * ONE  # newcomers have added theirs


@pytest.mark.parametrize("world", [conditions(), trouble()], ids=["calm", "trouble"])
def test_threads_and_windows_change_no_bit(world: Conditions) -> None:
    whole = run(world, seed=5)
    for options in ({"threads": 2}, {"window": 0.17}, {"window": 11.0, "threads": 3}):
        other = run(world, seed=5, **options)
        assert np.array_equal(other.weights, whole.weights)
        assert np.array_equal(other.estimates, whole.estimates)
        assert other.counters == whole.counters
    assert not np.array_equal(run(world, seed=6).estimates, whole.estimates)


def test_threads_share_large_waves_and_change_no_bit() -> None:
    graph = nx.random_regular_graph(4, 2000, seed=0)
    start = np.random.default_rng(0).normal(size=(2000, 200))

    def estimates(threads: int) -> np.ndarray:
        swarm = VectorisedPushSum(start, graph, conditions(), threads=threads)
        for _ in swarm.run(3):
            pass
        return swarm.estimates

    assert np.array_equal(estimates(1), estimates(2))


@pytest.mark.parametrize(("seed", "delay"), [(0, "constant:0.5"), (1, "gamma:0.5:2")])
@pytest.mark.parametrize(("fanout", "fraction"), [(1, None), (3, None), (2, 0.3)])
def test_arrays_do_what_gossipers_do(
    seed: int, delay: str, fanout: int, fraction: float | None
) -> None:
    """The same timetable through the objects that live peers drive, one message at a time."""
    world = trouble(seed, delay=parse(delay))
    swarm = run(world, seed=seed, fanout=fanout, fraction=fraction)
    vectors = {"v": values()}
    events = through_gossipers(world, vectors, seed=seed, fanout=fanout, fraction=fraction)
    events.run(30)
    assert [events.units(peer, "v") for peer in range(PEERS)] == swarm.weights.tolist()
    here = np.flatnonzero(swarm.weights)
    assert len(here) > PEERS / 2
    for peer in here:
        np.testing.assert_allclose(events.stores[peer].read("v"), swarm.estimates[peer], atol=1e-9)


def test_vectors_of_one_peer_do_not_disturb_each_other() -> None:
    world = conditions(loss=0.2, timeout=2.0, delay=parse("uniform:0.1:1.5"))
    alone = through_gossipers(world, {"a": values()})
    beside = through_gossipers(world, {"a": values(), "b": 2 * values()})
    for events in (alone, beside):
        events.run(20)
    assert beside.bytes["a"] == alone.bytes["a"] > 0 < beside.bytes["b"]
    for peer in range(PEERS):
        assert beside.units(peer, "a") == alone.units(peer, "a")
        assert np.array_equal(beside.stores[peer].read("a"), alone.stores[peer].read("a"))


def test_at_most_one_transfer_per_link_is_open() -> None:
    world = World(conditions(loss=0.3, timeout=4.0), GRAPH, 0)
    table = Timetable(world, GRAPH, fanout=2)
    open_until: dict[tuple[int, int], float] = {}
    pushed = 0
    for end in (5.0, 11.0, 30.0):
        plan = table.until(end)
        moments = plan.time[plan.transfers.push]
        for place in np.argsort(moments, kind="stable"):
            link = (int(plan.transfers.sender[place]), int(plan.transfers.receiver[place]))
            assert GRAPH.has_edge(*link)
            assert open_until.get(link, 0.0) <= moments[place]
            open_until[link] = plan.transfers.closes[place]
            pushed += 1
    assert pushed > 500


def test_a_lost_message_returns_after_its_timeout() -> None:
    graph = nx.path_graph(2)
    world = conditions(
        training=parse("constant:1"), delay=parse("constant:0.1"), loss=1.0, timeout=3.0
    )
    swarm = VectorisedPushSum(np.array([[0.0], [1.0]]), graph, world)
    seen = {sample.time: swarm.weights.tolist() for sample in swarm.run(4.5, every=0.5)}
    assert seen[1.5] == [ONE // 2, ONE // 2]
    assert seen[3.5] == [ONE // 2, ONE // 2]
    # At 4 it comes back, and at the same moment the next push, now that the link is free, leaves.
    assert seen[4.5] == [ONE // 2, ONE // 2]
    assert swarm.counters["return"] == 2
    assert swarm.counters["idle"] == 4
    assert swarm.counters["arrival"] == 0
    assert swarm.estimates.tolist() == [[0.0], [1.0]]


def test_nothing_passes_a_partition() -> None:
    sides = (frozenset(range(15)), frozenset(range(15, 30)))
    graph = nx.complete_graph(PEERS)
    world = conditions(partitions=(Partition(0.0, 50.0, sides[0]),))
    swarm = VectorisedPushSum(values(), graph, world, seed=1)
    list(swarm.run(50))
    for side in sides:
        mine = swarm.estimates[sorted(side)]
        assert np.abs(mine - mine.mean(axis=0)).max() < 0.1
    apart = np.abs(swarm.estimates[:15].mean(axis=0) - swarm.estimates[15:].mean(axis=0)).max()
    assert apart > 0.3
    list(swarm.run(60))
    assert swarm.error() < 0.02
    assert_conserved(swarm)


def test_who_dies_takes_its_mass_and_who_returns_starts_from_its_neighbours() -> None:
    graph = nx.complete_graph(3)
    events = (Event(10, "leave", 0), Event(20, "arrive", 0))
    swarm = VectorisedPushSum(
        np.array([[0.0], [0.0], [30.0]]), graph, conditions(events=events), seed=2
    )
    list(swarm.run(15))
    assert swarm.weights[0] == 0
    died = swarm.balance()["died"][1]
    assert died > 0
    assert swarm.total()[1] == 3 * ONE - died
    list(swarm.run(25))
    assert swarm.weights[0] > 0
    assert swarm.balance()["injected"][1] == 4 * ONE
    assert swarm.total()[1] == 4 * ONE - died
    np.testing.assert_allclose(swarm.estimates, np.full((3, 1), swarm.average()[0]), rtol=0.05)


def test_stragglers_are_slow() -> None:
    world = World(conditions(training=parse("constant:1"), stragglers=0.2, slowdown=10), GRAPH, 0)
    plan = Timetable(world, GRAPH).until(30.5)
    counts = np.bincount(plan.peer, minlength=PEERS)
    assert sorted(set(counts.tolist())) == [3, 30]
    assert (counts == 3).sum() == PEERS // 5


def test_fixed_durations_are_kept() -> None:
    spec = {"kind": "exponential", "mean": 1.0, "fixed": True}
    world = World(conditions(training=parse(spec), delay=parse(spec)), GRAPH, 0)
    peers = np.arange(PEERS)
    once, again = (world.training(peers, np.full(PEERS, count)) for count in (0, 9))
    assert np.array_equal(once, again)
    assert len(set(once.tolist())) == PEERS
    there = world.delay(0, peers[:-1], peers[1:], peers[:-1], "give")
    back = world.delay(3, peers[1:], peers[:-1], peers[1:], "answer")
    assert np.array_equal(there, back)


@pytest.mark.parametrize(
    ("spec", "mean", "spread"),
    [
        ("constant:2", 2.0, 0.0),
        ("uniform:1:3", 2.0, 2 / np.sqrt(12)),
        ("exponential:2", 2.0, 2.0),
        ("lognormal:2:0.5", 2 * np.exp(0.125), 2 * np.exp(0.125) * np.sqrt(np.exp(0.25) - 1)),
        ("gamma:2:4", 2.0, 1.0),
    ],
)
def test_distributions_have_their_moments(spec: str, mean: float, spread: float) -> None:
    found = parse(spec)
    assert found.mean == pytest.approx(mean)
    assert str(found) == spec
    drawn = found.at((np.arange(200_000) + 0.5) / 200_000)
    assert drawn.mean() == pytest.approx(mean, rel=1e-3)
    assert drawn.std() == pytest.approx(spread, rel=1e-2, abs=1e-12)


def test_draws_are_even_and_independent() -> None:
    world = World(conditions(), GRAPH, 0)
    who = np.arange(100_000)
    one = world.draws.uniform("a", who, who * 0)
    others = [
        world.draws.uniform("b", who, who * 0),
        world.draws.uniform("a", who * 0, who),
        world.draws.uniform("a", who, who * 0 + 1),
        World(conditions(), GRAPH, 1).draws.uniform("a", who, who * 0),
    ]
    counts, _ = np.histogram(one, bins=100, range=(0, 1))
    assert np.abs(counts - 1000).max() < 160  # five standard deviations
    for other in others:
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.02


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("expnential:1", "unknown distribution 'expnential'; did you mean 'exponential'?"),
        ("normal:1", "unknown distribution 'normal'"),
        ("exponential", "write exponential:mean"),
        ("exponential:-1", "mean is -1, it must be positive"),
        ("gamma:1:x", "shape is 'x', not a number"),
        ("uniform:2:1", "low, 2, is above its high, 1"),
        ("lognormal:1:1000", "sigma is 1000: give at most 30"),
        (-0.5, "value is -0.5, it must be positive"),
        ("-0.5", "value is -0.5, it must be positive"),
        ({"kind": "gamma", "mean": 1, "shap": 2}, "did you mean 'shape'?"),
        ({"kind": "gamma", "mean": 1}, "gamma needs 'shape'"),
        ({"mean": 1}, "needs a kind"),
        ({"kind": "constant", "value": 1, "fixed": 1}, "not true or false"),
        ([1], "write a number"),
    ],
)
def test_bad_durations_say_what_to_write(spec: Any, message: str) -> None:
    with pytest.raises(TimeError) as caught:
        parse(spec, "delay")
    assert message in str(caught.value)
    assert str(caught.value).startswith("delay")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss": 1.5}, "loss is a share"),
        ({"stragglers": -0.1}, "stragglers is a share"),
        ({"slowdown": 0.5}, "slowdown is 0.5"),
        ({"timeout": -1.0}, "timeout is -1"),
        ({"partitions": (Partition(3.0, 2.0, frozenset()),)}, "a partition from 3 to 2"),
        (
            {"partitions": (Partition(0.0, 2.0, frozenset([99])),)},
            "names peer 99, but peers are 0 to 29",
        ),
    ],
)
def test_bad_conditions_are_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(TimeError, match=message):
        World(conditions(**changed), GRAPH, 0)


def test_churn_that_makes_no_sense_is_named() -> None:
    with pytest.raises(TopologyError, match="step 3: leave 0: it is absent already"):
        World(conditions(events=(Event(1, "leave", 0), Event(3, "leave", 0))), GRAPH, 0)


def test_values_must_fit_the_graph() -> None:
    with pytest.raises(ValueError, match="one row for each of the 30 peers"):
        VectorisedPushSum(np.zeros((3, 2)), GRAPH, conditions())
