"""Swarms of peers in memory: the three modes, weights, pairs, and a broker that misbehaves."""

from __future__ import annotations

import numpy as np
import pytest
from peer_kit import Nest, Still, consensus, held, injected, make_learner, quick
from waiting import until

from gossamer.gossip import ONE, FaultPlan, MemoryBroker
from gossamer.models import average

NAMES = ("a", "b", "c", "d")
FAULTS = FaultPlan(loss=0.1, duplicate=0.1, reorder=0.2, delay=(0, 3))
SERVERS = {"global": "b"}


async def live(mode, *, broker=None, learners=None, names=NAMES, samples=(1,) * 4, **changes):
    learners = learners or [make_learner(name) for name in names]
    nest = Nest(
        quick(mode=mode, expect=names, founder=True, servers=SERVERS, **changes),
        broker or MemoryBroker(),
    )
    for name, learner, count in zip(names, learners, samples, strict=True):
        nest.start(name, learner, samples=count)
    return learners, await nest.all()


@pytest.mark.parametrize("mode", ["async", "rounds", "server"])
def test_every_mode_ends_in_agreement_with_all_weight(run, mode):
    learners, reports = run(live(mode))
    assert [r.rounds for r in reports] == [6] * 4
    assert consensus(learners) < 1e-3
    assert held(reports) == injected(reports) == 4
    assert all(sum(r.dropped.values()) == 0 for r in reports)


@pytest.mark.parametrize("mode", ["async", "rounds", "server"])
def test_faults_lose_and_double_nothing(run, mode):
    broker = MemoryBroker(FAULTS, seed=3)
    learners, reports = run(live(mode, broker=broker))
    assert broker.counters["lost"]
    assert broker.counters["duplicated"]
    assert held(reports) == injected(reports) == 4
    assert consensus(learners) < 1e-3


@pytest.mark.parametrize("mode", ["rounds", "server"])
def test_a_liar_does_not_decide_a_robust_mean(run, mode):
    names = (*NAMES, "e")
    values = (1.0, 1.1, 0.9, 1.0, -1000.0)
    learners = [Still(make_learner(n), v) for n, v in zip(names, values, strict=True)]
    _, reports = run(
        live(
            mode, learners=learners, names=names, samples=(1,) * 5, robust="trimmed", hostile=1,
            broker=MemoryBroker(FAULTS, seed=5),
        )
    )  # fmt: skip
    for learner in learners[:4]:
        np.testing.assert_allclose(learner.network.read("global"), 1.0, atol=0.11)
    assert held(reports) == injected(reports) == 5


@pytest.mark.parametrize("mode", ["rounds", "server"])
def test_lockstep_modes_compute_what_the_arena_computes(run, mode):
    learners, _ = run(live(mode, broker=MemoryBroker(FAULTS, seed=5)))
    twins = [make_learner(name) for name in NAMES]
    for _ in range(6):
        for twin in twins:
            twin.train(1)
        average([twin.network for twin in twins])
    for learner, twin in zip(learners, twins, strict=True):
        np.testing.assert_allclose(learner.network.flat, twin.network.flat, atol=1e-5)


@pytest.mark.parametrize("mode", ["async", "rounds", "server"])
def test_weights_by_samples_give_the_weighted_mean(run, mode):
    learners = [Still(make_learner(n), v) for n, v in zip(NAMES, (0.0, 1.0, 2.0, 5.0), strict=True)]
    samples = (1, 2, 3, 4)
    _, reports = run(
        live(mode, learners=learners, samples=samples, weights="samples", settle_tolerance=1e-6)
    )
    assert held(reports) == 10
    expected = (0 * 1 + 1 * 2 + 2 * 3 + 5 * 4) / 10
    for learner in learners:
        np.testing.assert_allclose(learner.network.read("global"), expected, rtol=1e-4)


def test_float16_on_the_wire_still_agrees_and_keeps_the_mean(run):
    learners = [Still(make_learner(n), v) for n, v in zip(NAMES, (0.1, 1.7, 2.3, 5.9), strict=True)]
    _, reports = run(live("async", learners=learners, dtype="float16", settle_tolerance=1e-3))
    assert held(reports) == 4
    values = np.stack([learner.network.read("global").numpy() for learner in learners])
    weights = np.array([r.weight["global"][0] / ONE for r in reports])
    assert abs(weights @ values[:, 0] / 4 - 2.5) < 1e-3


@pytest.mark.parametrize("mode", ["async", "rounds", "server"])
def test_pairs_of_unrelated_models_gossip_too(run, mode):
    slices = {"left": "2-3-1", "right": "2-3-1"}
    learners = [make_learner(name, slices, cross=True) for name in NAMES]
    pair = next(owner for owner in learners[0].network.averaged_models if "&" in owner)
    servers = {"left": "a", "right": "b", pair: "c"}
    nest = Nest(quick(mode=mode, expect=NAMES, founder=True, servers=servers))

    async def swarm():
        for name, learner in zip(NAMES, learners, strict=True):
            nest.start(name, learner)
        return await nest.all()

    reports = run(swarm())
    for vector in ("left", "right", pair):
        assert consensus(learners, vector) < 1e-3
        assert held(reports, vector) == injected(reports, vector) == 4


def test_a_model_of_two_is_averaged_by_those_two_alone(run):
    shared = {"global": "4-4-0"}
    group = {**shared, "group": "0-2-2"}
    learners = [make_learner(n, group if n in "ab" else shared) for n in NAMES]
    _, reports = run(live("async", learners=learners))
    assert held(reports[:2], "group") == 2
    assert consensus(learners[:2], "group") < 1e-3
    assert "group" not in reports[2].weight


def test_a_ring_agrees_in_rounds_mode(run):
    learners = [make_learner(name) for name in NAMES]

    async def swarm():
        nest = Nest(quick())
        for place, name in enumerate(NAMES):
            around = (NAMES[place - 1], NAMES[(place + 1) % 4])
            settings = quick(
                mode="rounds", expect=NAMES, founder=True, exchanges=20, neighbours=around
            )
            nest.start(name, learners[place], settings)
        return await nest.all()

    reports = run(swarm())
    assert held(reports) == 4
    assert consensus(learners) < 1e-5


def test_what_reaches_a_founder_before_it_starts_does_not_replace_its_values(run):
    """b still waits for c while a, who expects only b, trains and gives to it."""
    learners = {n: Still(make_learner(n), v) for n, v in (("a", 1.0), ("b", 3.0), ("c", 5.0))}

    async def swarm():
        nest = Nest(quick(founder=True, settle_tolerance=1e-6))
        nest.start("a", learners["a"], quick(founder=True, expect=("b",), settle_tolerance=1e-6))
        waiting = nest.start(
            "b", learners["b"], quick(founder=True, expect=("c",), settle_tolerance=1e-6)
        )
        await until(lambda: waiting.peer.link and waiting.peer.link.view.received)
        assert not waiting.trains()
        nest.start("c", learners["c"], quick(founder=True, expect=("b",), settle_tolerance=1e-6))
        return await nest.all()

    reports = run(swarm())
    assert held(reports) == 3
    values = np.array([learner.network.read("global")[0].item() for learner in learners.values()])
    weights = np.array([r.weight["global"][0] / ONE for r in reports])
    np.testing.assert_allclose(weights @ values / 3, 3.0, atol=1e-4)


def test_on_a_directed_graph_nobody_waits_for_a_peer_that_has_left_or_lacks_the_model(run):
    """All are linked to all, but directed; c has no part in the model of a and b, and leaves early."""
    semi_local = {"global": "4-3-2", "pair": "0-3-0"}
    learners = {
        "a": make_learner("a", semi_local, depends={"pair": ["global"]}),
        "b": make_learner("b", semi_local, depends={"pair": ["global"]}),
        "c": make_learner("c", {"global": "4-3-2", "own": "0-3-0"}, depends={"own": ["global"]}),
    }

    async def scenario():
        nest = Nest(quick(mode="rounds", rounds=10**6, expect=tuple(learners), founder=True))
        lives = {}
        for name, learner in learners.items():
            others = tuple(set(learners) - {name})
            settings = nest.settings.updated(neighbours=others, sources=others)
            lives[name] = nest.start(name, learner, settings)
        await until(lambda: all(life.trains() and life.view.round >= 2 for life in lives.values()))
        lives["c"].peer.leave("it was asked to")
        await lives["c"].task
        reached = lives["a"].view.round
        await until(lambda: lives["a"].view.round > reached + 3, "rounds without c")
        return await nest.finish(3)

    reports = run(scenario())
    for model in ("global", "pair"):
        weights = [report.weight[model] for report in reports if model in report.weight]
        assert sum(held + open_ - injected for held, open_, injected in weights) == 0
