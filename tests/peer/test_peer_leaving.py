"""Whatever a peer is busy with, and whatever became of the broker: asked to leave, it leaves."""

from __future__ import annotations

import asyncio
import json
import logging

import numpy as np
import pytest
from peer_kit import MEMORY, Gate, Nest, Still, make_learner, quick
from waiting import turns, until

from gossamer.gossip import ONE, DictStore, Gossiper, MemoryBroker, MemoryTransport, topics
from gossamer.peer.exits import GoodbyeNotDelivered
from gossamer.peer.lifecycle import State
from gossamer.peer.settings import Limits

PAIR = ("a", "b")
COMING = (State.CONNECTING, State.CLAIMING)


def in_phase(nest, phase):
    members = [life.peer.link for life in nest.lives]
    return all(member is not None and member.phase == phase for member in members)


CASES = {
    "waiting for others": ("starting", {"expect": ("nobody",)}),
    "training": ("training", {"rounds": 10**9, "expect": PAIR}),
    "averaging in lockstep": ("training", {"rounds": 10**9, "mode": "rounds", "expect": PAIR}),
    "averaging by a server": (
        "training",
        {"rounds": 10**9, "mode": "server", "servers": {"global": "a"}, "expect": PAIR},
    ),
    "settling": ("settling", {"rounds": 1, "settle_tolerance": -1.0, "expect": PAIR}),
}


@pytest.mark.parametrize("case", CASES)
def test_with_the_broker_gone_a_peer_still_leaves(run, caplog, case):
    caplog.set_level(logging.INFO)
    phase, changes = CASES[case]

    async def swarm():
        # Only the time to leave can end this: all other limits are hours away.
        limits = quick(leave_timeout=0.5, start_timeout=9e3, settle_timeout=9e3, founder=True)
        # Unchecked: a tolerance below 0, which settings refuse, is never reached.
        nest = Nest(limits.model_copy(update=changes))
        for name in PAIR:
            nest.start(name, Still(make_learner(name), 1.0))
        await until(lambda: in_phase(nest, phase))
        await until(lambda: all(life.peer.state not in COMING for life in nest.lives))
        await turns(50)
        nest.broker.stop()
        await turns(50)
        for life in nest.lives:
            life.peer.leave("it was told to stop")
        return await nest.all()

    run(swarm())
    for name in PAIR:
        line = f"peer {name} left swarm nest: it was told to stop; the broker did not accept its goodbye"
        assert line in caplog.text


class Unanswered(MemoryTransport):
    """A connection to an address that does not answer."""

    async def __aenter__(self):
        self._set("connecting")
        await asyncio.Event().wait()
        return self


def test_a_peer_leaves_while_it_waits_for_the_answer_of_a_broker(run, tmp_path, caplog):
    """And what a former process had to say stays in the checkpoint."""
    caplog.set_level(logging.INFO)
    path = tmp_path / "a.checkpoint"
    impatient = Limits(retry=MEMORY, name_grace=0.0)

    def start(transport):
        settings = quick(rounds=1, leave_timeout=0.1, settle_timeout=0.1)
        nest = Nest(settings, transport=transport, limits=impatient)
        return nest, nest.start("a", Still(make_learner("a"), 1.0), checkpoint=path)

    async def scenario():
        _, life = start(Unanswered)
        await until(lambda: life.transports and life.transports[0].connection.state == "connecting")
        life.peer.leave("it was told to stop")
        assert "peer a is about to leave: it was told to stop" in caplog.text  # at once
        report = await life.task
        assert (report.ended, report.reason) == ("left", "it was told to stop")
        assert life.peer.state is State.ABORTED
        nest, life = start(MemoryTransport)
        await until(lambda: life.peer.state not in COMING)
        nest.broker.stop()
        with pytest.raises(GoodbyeNotDelivered):
            await life.task
        _, life = start(Unanswered)
        life.peer.leave("it was told to stop")
        with pytest.raises(GoodbyeNotDelivered, match=r"told to stop.*start the peer again"):
            await life.task

    run(scenario())


def test_a_broker_that_is_away_holds_up_nothing_but_the_news(run):
    """Phases change, rounds are trained, and when the broker is back the newest status is there."""

    async def swarm():
        gate = Gate()
        nest = Nest(quick(rounds=3, leave_timeout=9e3))
        life = nest.start("a", Still(make_learner("a"), 1.0, gate))
        await gate.wait()
        nest.broker.stop()
        gate.open()
        await until(lambda: life.peer.link.phase == "done")
        await nest.broker.start([life.transports[-1]])
        report = await life.task
        return report, nest.broker.retained["gossamer/v1/nest/peer/a/status"]

    report, status = run(swarm())
    assert report.rounds == 3
    assert b'"left"' in status
    assert b'"done"' in status


def test_who_leaves_after_agreement_keeps_what_it_agreed_upon(run):
    """The other one never stops training, so that the first waits for it, closed."""

    async def swarm():
        nest = Nest(quick(expect=PAIR, founder=True, leave_timeout=9e3))
        one = nest.start("a", settings=nest.settings.updated(rounds=2))
        two = nest.start("b", settings=nest.settings.updated(rounds=10**9))
        await until(lambda: one.peer.link is not None and one.peer.link.phase == "settling")
        two.peer.leave("enough")
        gone = await two.task
        return gone, await one.task

    gone, stayed = run(swarm())
    assert gone.weight["global"][:2] == [0, 0]
    assert stayed.weight["global"][:2] == [2 * ONE, 0]


def test_the_first_reason_to_leave_is_the_one_that_is_told(run, caplog):
    caplog.set_level(logging.INFO)

    async def swarm():
        life = Nest(quick(rounds=10**9)).start("a")
        await until(life.trains)
        life.peer.leave("the battery is low")
        life.peer.leave("asked again")
        return await life.task

    run(swarm())
    assert "peer a left swarm nest: the battery is low" in caplog.text
    assert "asked again" not in caplog.text


@pytest.mark.parametrize("mode", ["async", "rounds"])
def test_who_all_leave_at_once_wait_for_nobody(run, caplog, mode):
    """Nobody stays to take their mass: they keep it, long before their time to leave is over."""
    caplog.set_level(logging.INFO)
    names = ("a", "b", "c")

    async def swarm():
        nest = Nest(quick(rounds=10**9, mode=mode, leave_timeout=9e3, expect=names, founder=True))
        for name in names:
            nest.start(name)
        await until(lambda: in_phase(nest, "training"))
        await until(lambda: all(life.view.round > 3 for life in nest.lives))
        for life in nest.lives:
            life.peer.leave("it was told to stop")
        return await nest.all()

    reports = run(swarm())
    assert sum(sum(report.weight["global"][:2]) for report in reports) == 3 * ONE
    assert [report.weight["global"][1] for report in reports] == [0, 0, 0]
    assert "no neighbour stays that could take it" in caplog.text


def test_of_two_who_leave_at_once_the_one_who_stays_inherits_all(run):
    names = ("a", "b", "c")

    async def swarm():
        nest = Nest(quick(rounds=10**9, leave_timeout=9e3, expect=names, founder=True))
        lives = [nest.start(name) for name in names]
        await until(lambda: in_phase(nest, "training"))
        for life in lives[:2]:
            life.peer.leave("it was told to stop")
        gone = [await life.task for life in lives[:2]]
        lives[2].peer.leave("the last one")
        return gone, await lives[2].task

    gone, last = run(swarm())
    assert [report.weight["global"][:2] for report in gone] == [[0, 0], [0, 0]]
    assert last.weight["global"][:2] == [3 * ONE, 0]


@pytest.mark.parametrize("mode", ["async", "rounds"])
def test_nobody_waits_for_a_peer_that_was_told_to_stop_while_it_waited(run, mode):
    async def swarm():
        nest = Nest(quick(rounds=2, mode=mode, expect=("a", "b", "c", "late"), start_timeout=9e3))
        for name in "abc":
            nest.start(name)
        await until(lambda: all(life.peer.state is State.WAITING for life in nest.lives))
        stopped = nest.lives[-1]
        await until(lambda: topics.status("nest", "c") in nest.broker.retained)
        stopped.peer.leave("it was told to stop")
        await stopped.task
        nest.start("late", settings=nest.settings.updated(expect=("a", "b")))
        return await nest.all()

    reports = run(swarm())
    assert [(each.peer, each.ended, each.rounds) for each in reports] == [
        ("a", "finished", 2), ("b", "finished", 2), ("c", "left", 0), ("late", "finished", 2),
    ]  # fmt: skip


def test_nobody_waits_for_a_peer_that_was_told_to_stop_before_it_connected(run):
    async def swarm():
        nest = Nest(quick(rounds=2, expect=("a", "b", "c"), start_timeout=9e3))
        for name in "ab":
            nest.start(name)
        await until(lambda: all(life.peer.state is State.WAITING for life in nest.lives))
        nest.start("c").peer.leave("it was told to stop")
        return await nest.all()

    reports = run(swarm())
    assert [(each.peer, each.ended, each.rounds) for each in reports] == [
        ("a", "finished", 2), ("b", "finished", 2), ("c", "left", 0),
    ]  # fmt: skip


def test_a_restarted_peer_that_is_told_to_stop_at_once_hands_over_what_it_held(run, tmp_path):
    async def swarm():
        nest = Nest(quick(rounds=10**9, expect=PAIR, founder=True, leave_timeout=9e3))
        one, two = [nest.start(name, checkpoint=tmp_path / name) for name in PAIR]
        await until(lambda: one.counts() and two.counts())
        await two.crash()
        again = nest.start("b", checkpoint=tmp_path / "b")
        again.peer.leave("it was told to stop")
        left = await again.task
        one.go_on_for(1)
        return left, await one.task

    left, stayed = run(swarm())
    assert left.ended == "left"
    assert left.weight["global"][:2] == [0, 0]
    assert stayed.weight["global"][:2] == [2 * ONE, 0]


def test_a_goodbye_that_is_too_long_is_shortened(run, caplog):
    """The first lines are left out: those who came first are the likeliest to be gone."""

    async def swarm():
        nest = Nest(quick(rounds=10**9, leave_timeout=9e3), MemoryBroker(max_packet=5000))
        life = nest.start("a")
        await until(life.trains)
        books = life.peer.link.engine.gossiper.ledger
        for number in range(1000):
            books.decide(f"guest{number}", "s", "global", 1, "credited")
        life.peer.leave("enough")
        await life.task
        return json.loads(nest.broker.retained["gossamer/v1/nest/peer/a/status"])

    told = run(swarm())
    assert told["state"] == "left"
    assert told["statement"][-1] == ["guest999", "s", "global", 1, "credited"]
    assert "peer a: its goodbye is too large" in caplog.text


def test_a_goodbye_says_nothing_to_those_who_have_left():
    peer = Gossiper("a", "sa", DictStore({"v": np.zeros(1)}))
    for guest in PAIR:
        peer.ledger.decide(guest, "s", "v", 1, "credited")
    peer.peer_gone("b", "s", [])
    peer.peer_gone("a", "an older session", [])
    assert peer.statement() == [["a", "s", "v", 1, "credited"]]
