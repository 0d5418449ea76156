"""A session that has said goodbye is over: who returns from its checkpoint begins a new one."""

from __future__ import annotations

import pytest
import torch
from peer_kit import (
    Gate,
    Nest,
    Still,
    begin,
    consensus,
    held,
    injected,
    last_seen,
    make_learner,
    quick,
)
from waiting import until

from gossamer.gossip import ONE
from gossamer.peer.engine import Engine
from gossamer.peer.exits import PeerError

PAIR = ("a", "b")
MODES = {
    "async": quick(expect=PAIR),
    "founders": quick(expect=PAIR, founder=True),
    "rounds": quick(expect=PAIR, mode="rounds"),
    "server": quick(expect=PAIR, mode="server", servers={"global": "a"}),
}


def start(nest, folder, names=PAIR, **changes):
    settings = nest.settings.updated(**changes)
    for name in names:
        nest.start(name, settings=settings, checkpoint=folder / f"{name}.checkpoint")
    return nest


@pytest.mark.parametrize("mode", MODES)
def test_after_a_failed_start_a_peer_counts_as_if_nothing_had_been(run, tmp_path, mode):
    async def swarm():
        first = start(Nest(MODES[mode]), tmp_path, ("a",), start_timeout=0.1)
        with pytest.raises(PeerError, match="b did not come online"):
            await first.all()
        second = start(Nest(MODES[mode], first.broker), tmp_path)
        return second, await second.all()

    nest, reports = run(swarm())
    assert [r.weight["global"][2] for r in reports] == [ONE, ONE]
    assert held(reports) == 2
    assert [r.rounds for r in reports] == [6, 6]
    assert consensus([life.peer.learner for life in nest.lives]) < 1e-3


@pytest.mark.parametrize("mode", MODES)
def test_finished_peers_leave_no_checkpoint_and_their_names_are_free(run, tmp_path, mode):
    async def swarm():
        first = start(Nest(MODES[mode]), tmp_path)
        before = await first.all()
        assert not list(tmp_path.glob("*.checkpoint"))
        second = start(Nest(MODES[mode], first.broker), tmp_path, rounds=4)
        return second, before, await second.all()

    nest, before, after = run(swarm())
    assert {r.session for r in before}.isdisjoint(r.session for r in after)
    assert [r.rounds for r in after] == [4, 4]  # afresh
    assert held(after) == injected(after) == 2
    assert not any(r.gossip.get("gone-session-online") for r in after)
    assert consensus([life.peer.learner for life in nest.lives]) < 1e-3


@pytest.mark.parametrize("mode", ["rounds", "server"])
def test_lockstep_rounds_are_counted_from_the_start_of_the_session(run, tmp_path, mode):
    """One has trained more than the other: else each would wait for a round that is over there."""
    settings = MODES[mode]

    async def swarm():
        nest, before = Nest(settings), {"a": 3, "b": 1}
        for name, rounds in before.items():
            gate, checkpoint = Gate(rounds - 1), tmp_path / f"{name}.checkpoint"
            alone = Nest(settings.updated(expect=(), servers={}))
            one = alone.start(name, Still(make_learner(name), 1.0, gate), checkpoint=checkpoint)
            await gate.wait()
            one.peer.leave("for lunch")  # after the round that has begun
            gate.open()
            assert (await one.task).rounds == rounds
            again = settings.updated(rounds=rounds + 3)
            nest.start(name, Still(make_learner(name), 1.0), again, checkpoint=checkpoint)
        return await nest.all()

    reports = run(swarm())
    assert [r.rounds for r in reports] == [6, 4]
    assert held(reports) == injected(reports) == 2
    assert all(r.gossip["credited"] for r in reports)


def test_who_left_a_running_swarm_returns_as_a_newcomer(run, tmp_path):
    """What it handed over stays with the others, and its new life brings weight of its own."""

    async def swarm():
        nest = start(Nest(quick(rounds=10**9, expect=PAIR, leave_timeout=9e3)), tmp_path)
        stays, goes = nest.lives
        await until(lambda: goes.trains() and goes.peer.link.view.round > 2)
        goes.peer.leave("for lunch")
        gone = await goes.task
        again = Nest(nest.settings, nest.broker)
        start(again, tmp_path, ("b",))
        back = again.lives[0]
        await until(back.counts)
        round_of = back.peer.link.view.round
        for life in (stays, back):
            life.go_on_for(3)
        return gone, round_of, await stays.task, await back.task

    gone, round_of, *reports = run(swarm())
    assert gone.weight["global"] == [0, 0, ONE]
    assert round_of >= gone.rounds  # it goes on learning where it stopped
    assert reports[1].session != gone.session
    assert [r.weight["global"][2] for r in reports] == [ONE, ONE]
    assert held(reports) == 3  # of two peers, one of which came twice


def test_when_all_come_back_after_their_lease_their_weight_counts(run, tmp_path):
    async def swarm():
        first = start(Nest(quick(rounds=10**9, expect=PAIR)), tmp_path)
        await until(lambda: all(life.trains() for life in first.lives))
        for life in first.lives:
            await life.crash()
        for name in PAIR:
            last_seen(tmp_path / f"{name}.checkpoint", 10_000)
        second = start(Nest(first.settings, first.broker), tmp_path, rounds=10**9)
        await until(lambda: all(life.trains() for life in second.lives))
        return await second.finish(more=3)

    reports = run(swarm())
    assert held(reports) == injected(reports) == 2


def test_a_newcomer_whom_nobody_could_tell_anything_counts_once(run):
    """It adds its weight when it finds itself alone, and not again when somebody comes after all."""

    async def swarm():
        nest = Nest(quick(rounds=10**9))
        one = nest.start("a", settings=quick(rounds=10**9, founder=False))
        await until(one.counts)
        two = nest.start("b")
        await until(two.counts)
        await until(lambda: one.peer.link.engine.gossiper.counters["credited"] > 0)
        return await nest.finish(more=3)

    reports = run(swarm())
    assert [r.weight["global"][2] for r in reports] == [ONE, ONE]
    assert held(reports) == 2


@pytest.mark.parametrize(
    "settings", [quick(), quick(mode="rounds", lease=1e-9)], ids=["soon", "late"]
)
def test_a_checkpoint_of_a_session_that_is_over_keeps_values_and_rounds_alone(tmp_path, settings):
    path = tmp_path / "a.checkpoint"
    one = Engine("a", Still(make_learner("a"), 0.25), settings, checkpoint=path)
    begin(one)
    one.train()
    one.end("left", "for lunch", "training", {})
    assert one.ending is not None
    told = one.ending.report
    one.finish()
    two = Engine("a", Still(make_learner("a"), 7.0), settings, checkpoint=path)
    assert not two.restored
    assert two.returning
    assert two.ending is None
    assert two.session != told["session"]
    assert two.view.round == 1
    assert torch.equal(two.network.flat, one.network.flat)
    assert two.report()["weight"]["global"] == [0, 0, 0]
    begin(two)
    settings = settings.updated(lease=600.0)
    three = Engine("a", Still(make_learner("a"), 7.0), settings, checkpoint=path)
    assert three.restored  # its second life did not say goodbye
    assert three.session == two.session
