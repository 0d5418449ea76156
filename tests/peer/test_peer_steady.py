"""Live peers in steady mode, on a broker in memory."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from papers_kit import Papers
from peer_kit import Nest, Still, consensus, held, injected, make_learner, quick
from waiting import until

from gossamer.gossip import ONE, FaultPlan, MemoryBroker
from gossamer.peer.exits import PeerError

NAMES = ("a", "b", "c", "d", "e")


def test_peers_come_nearer_to_each_other_and_keep_their_weight(run):
    alone = [make_learner(name) for name in NAMES]
    for _ in range(20):
        for learner in alone:
            learner.train(1)

    async def swarm():
        broker = MemoryBroker(FaultPlan(loss=0.1, duplicate=0.1, reorder=0.2, delay=(0, 3)), seed=3)
        nest = Nest(quick(mode="steady", rounds=10**9, expect=NAMES, founder=True), broker)
        learners = [make_learner(name) for name in NAMES]
        lives = [nest.start(name, learner) for name, learner in zip(NAMES, learners, strict=True)]
        await until(lambda: all(life.trains() for life in lives))
        counters = [life.peer.link.engine.gossiper.counters for life in lives]
        await until(lambda: all(each["credited"] > 20 for each in counters))
        await until(lambda: consensus(learners) < 0.5 * consensus(alone))
        return await nest.finish(3)

    reports = run(swarm())
    assert held(reports) == injected(reports) == 5


def test_a_hostile_member_far_away_is_hardly_followed_and_nobody_is_excluded(run, tmp_path, caplog):
    papers = Papers(tmp_path)
    names = papers.names(*NAMES)
    settings = quick(mode="steady", rounds=10**9, expect=names, founder=True)

    async def scenario():
        nest = Nest(settings)
        values = dict.fromkeys(NAMES, 1.0) | {"e": 50.0}
        learners = {label: Still(make_learner(label), value) for label, value in values.items()}
        for label, learner in learners.items():
            nest.start(label, learner, papers.settings(label, settings))
        await until(lambda: all(life.trains() and life.view.round > 20 for life in nest.lives))
        return learners, await nest.finish(3)

    with caplog.at_level(logging.WARNING):
        learners, reports = run(scenario())
    for label in NAMES[:4]:
        np.testing.assert_allclose(learners[label].network.read("global"), 1.0, atol=0.01)
    assert held(reports) == injected(reports) == 5
    assert "its learner has no method score" in caplog.text
    assert "quarantine" not in caplog.text


def test_peers_know_how_many_samples_their_neighbours_say_that_they_have(run):
    settings = quick(mode="steady", rounds=10**9, weights="samples", expect=NAMES, founder=True)

    async def scenario():
        nest = Nest(settings)
        for samples, name in enumerate(NAMES, 1):
            nest.start(name, samples=samples)
        await until(lambda: all(life.trains() for life in nest.lives))
        gossiper = nest.lives[0].peer.link.engine.gossiper
        weights = [gossiper.claimed_weight(name) for name in NAMES[1:]]
        await nest.finish(3)
        return weights

    assert run(scenario()) == [samples * ONE for samples in (2, 3, 4, 5)]


def test_a_newcomer_starts_from_the_median_and_one_liar_does_not_choose_it(run):
    settings = quick(mode="steady", rounds=10**9)

    async def scenario():
        nest = Nest(settings)
        values = {"a": 1.0, "b": 1.1, "c": 0.9, "d": -100.0}
        founders = settings.updated(expect=tuple(values), founder=True)
        for label, value in values.items():
            nest.start(label, Still(make_learner(label), value), founders)
        await until(lambda: all(life.trains() for life in nest.lives))
        newcomer = Still(make_learner("e"), 7.0)
        life = nest.start("e", newcomer)
        await until(life.counts)
        return newcomer, await nest.finish(3)

    newcomer, _ = run(scenario())
    # All have followed the liar a little, the further the later it came; a mean of all would be -19.
    assert abs(float(newcomer.network.read("global").mean()) - 1.0) < 0.6


def test_a_killed_peer_continues_from_its_checkpoint(run, tmp_path):
    settings = quick(mode="steady", rounds=10**9, expect=NAMES, founder=True)

    async def scenario():
        nest = Nest(settings)
        for name in NAMES:
            nest.start(name, checkpoint=tmp_path / f"{name}.checkpoint")
        await until(lambda: all(life.trains() and life.view.round > 3 for life in nest.lives))
        await nest.lives[0].crash()
        again = nest.start("a", checkpoint=tmp_path / "a.checkpoint")
        await until(lambda: again.trains() and again.view.round > 6)
        reports = [life for life in nest.lives if not life.crashed]
        for life in reports:
            life.go_on_for(3)
        return await nest.all()

    reports = run(scenario())
    assert held(reports) == injected(reports) == 5


@pytest.mark.parametrize("mode", ["steady", "async"])
def test_a_banned_peer_is_neither_heard_nor_sent_to(run, tmp_path, mode):
    papers = Papers(tmp_path)
    names = papers.names(*NAMES)
    settings = quick(mode=mode, rounds=10**9, expect=names, founder=True, settle_timeout=0.5)

    async def scenario():
        nest = Nest(settings.updated(guards="off"))
        learners = {label: Still(make_learner(label), 1.0) for label in NAMES}
        for label, learner in learners.items():
            own = settings.updated(guards="off", banned=() if label == "e" else (names[4],))
            if label == "e":
                learner.network.flat.fill_(50.0)
            nest.start(label, learner, papers.settings(label, own))
        await until(lambda: all(life.trains() and life.view.round > 20 for life in nest.lives))
        link = nest.lives[0].peer.link
        await until(lambda: link.engine.gossiper.counters["refused-banned"])
        refused = link.summary().refused
        return learners, refused, await nest.finish(3)

    learners, refused, reports = run(scenario())
    for label in NAMES[:4]:
        np.testing.assert_array_equal(learners[label].network.read("global"), 1.0)
    assert refused == {names[4]: "banned here"}
    assert held(reports) == injected(reports) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress": "int8"}, "leave compress out"),
        ({"drift": 0.1}, "leave drift out"),
        ({"sharing": "auto"}, "one hostile member could decide what all share"),
        ({"trained": True}, "leave matching and trained out"),
        ({"turns": (("b",), ("c",))}, "leave turns out"),
        ({"neighbours": ("b",), "sources": ("c",)}, "directed graph"),
        ({"neighbours": ("b", "c"), "hostile": 1}, "needs 4, and it has 2"),
    ],
)
def test_what_does_not_go_with_it_is_one_line_before_training(run, changes, message):
    async def start():
        return await Nest(quick(mode="steady", **changes)).start("a").task

    with pytest.raises(PeerError, match=message):
        run(start())
