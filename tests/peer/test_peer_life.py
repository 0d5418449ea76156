"""How peers come and go: newcomers, leavers, crashes, leases, names."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from peer_kit import (
    ASK_BACK_SOON,
    Gate,
    Life,
    Nest,
    Still,
    consensus,
    held,
    injected,
    last_seen,
    make_learner,
    quick,
)
from waiting import turns, until

from gossamer.gossip import ONE, FaultPlan, MemoryBroker
from gossamer.peer.exits import PeerError
from gossamer.peer.settings import Limits

TRIO = ("a", "b", "c")
quick_nest = partial(Nest, limits=ASK_BACK_SOON)


class Paced:
    """A real learner behind a gate."""

    def __init__(self, inner, gate):
        self._inner, self._gate, self.network, self._count = inner, gate, inner.network, 0

    def train(self, steps):
        self._count += 1
        self._gate(self._count)
        return self._inner.train(steps)

    def test(self):
        return self._inner.test()

    def state(self):
        return {"inner": self._inner.state(), "count": self._count}

    def restore(self, state):
        self._inner.restore(state["inner"])
        self._count = state["count"]


@dataclass
class Start:
    """Three founders, each behind its own gate."""

    nest: Nest
    limit: int = 0
    folder: Path | None = None
    lives: dict[str, Life] = field(default_factory=dict)
    gates: dict[str, Gate] = field(default_factory=dict)

    def __post_init__(self):
        for name in TRIO:
            self.begin(name, Gate(self.limit))

    def begin(self, name, gate):
        settings = self.nest.settings.updated(expect=TRIO, founder=True)
        checkpoint = None if self.folder is None else self.folder / f"{name}.checkpoint"
        self.gates[name] = gate
        self.lives[name] = self.nest.start(
            name, Paced(make_learner(name), gate), settings, checkpoint=checkpoint
        )

    async def wait(self):
        for gate in self.gates.values():
            await gate.wait()

    async def crash(self, name):
        self.gates[name].open()  # a thread cannot be killed, only let go
        await self.lives[name].crash()

    def engine(self, name):
        return self.lives[name].peer.link.engine

    async def finish(self, more: int = 0):
        """Open the gates; `more` ends an endless training after so many rounds."""
        for gate in self.gates.values():
            gate.open()
        for life in self.lives.values():
            if more:
                life.go_on_for(more)
        return await self.nest.all()

    @property
    def learners(self):
        return [life.peer.learner for life in self.lives.values()]

    async def outlive(self, name):
        """The lease of one who is offline is over, as far as the others can tell."""
        for other in set(TRIO) - {name}:
            await self.lives[other].outlive(name)

    async def given_up(self, name):
        await self.outlive(name)
        others = [self.lives[other].peer.link.roster for other in set(TRIO) - {name}]
        await until(lambda: all(one._entries[name].announced_session is None for one in others))


def test_a_newcomer_counts_only_after_hearing(run):
    async def swarm():
        nest, gates = quick_nest(quick(rounds=8)), []
        settings = nest.settings.updated(expect=TRIO, founder=True)
        for name in TRIO:
            gates.append(Gate(3))
            nest.start(name, Still(make_learner(name), 1.0, gates[-1]), settings)
        for gate in gates:
            await gate.wait()
        gates.append(Gate())
        nest.start("d", Still(make_learner("d"), 1000.0, gates[-1]))
        await gates[-1].wait()
        for gate in gates:
            gate.open()
        return nest, await nest.all()

    nest, reports = run(swarm())
    assert held(reports) == injected(reports) == 4
    assert [r.weight["global"][2] for r in reports] == [ONE] * 4
    for life in nest.lives:  # its own 1000 never reached anybody
        np.testing.assert_allclose(life.peer.learner.network.read("global"), 1.0, rtol=1e-5)


def test_a_leaver_hands_over_all_its_mass(run):
    async def swarm():
        start = Start(quick_nest(quick(rounds=8)), limit=3)
        await start.wait()
        start.lives["a"].peer.leave("going home")
        return start, await start.finish()

    start, (gone, *stayed) = run(swarm())
    assert gone.weight["global"][:2] == [0, 0]
    assert gone.rounds < 8
    assert held(stayed) == 3
    assert consensus(start.learners[1:]) < 1e-3


@pytest.mark.parametrize("mode", ["async", "rounds", "server"])
def test_a_crashed_peer_goes_on_from_its_checkpoint(run, tmp_path, mode, caplog):
    caplog.set_level(logging.INFO)

    async def swarm():
        broker = MemoryBroker(FaultPlan(loss=0.1, duplicate=0.1, reorder=0.1), seed=1)
        nest = quick_nest(quick(rounds=16, mode=mode, servers={"global": "b"}), broker)
        start = Start(nest, folder=tmp_path)
        for victim, after in (("a", 3), ("b", 7), ("a", 11)):  # b is the server
            for gate in start.gates.values():  # or all might be through before the last crash
                gate.limit = after
            await until(lambda v=victim, n=after: start.gates[v].reached >= n)
            session = start.engine(victim).session
            await start.crash(victim)
            start.begin(victim, Gate(after))
            await until(lambda v=victim: start.lives[v].peer.link is not None)
            assert start.engine(victim).session == session
        return start, await start.finish()

    start, reports = run(swarm())
    assert held(reports) == injected(reports) == 3
    assert consensus(start.learners) < 1e-3
    assert all(r.rounds == 16 for r in reports)
    for name, least in (("a", 2), ("b", 6), ("a", 10)):
        rounds = re.findall(rf"peer {name} continues after round (\d+) of 16", caplog.text)
        # What was saved last. In lockstep every round sends, and saves before; else a peer whose
        # neighbours have not answered yet trains on without sending.
        assert any(int(found) >= (1 if mode == "async" else least) for found in rounds)
    assert all(f"peer {name}: round 16 of 16, accuracy " in caplog.text for name in TRIO)


def test_who_is_through_first_tells_for_whom_it_stays(run, caplog):
    caplog.set_level(logging.INFO)

    async def swarm():
        start = Start(quick_nest(quick(rounds=6)), limit=3)
        await start.wait()
        start.gates["a"].open()
        line = "peer a has trained all its rounds; it waits until these peers have, too: b, c"
        await until(lambda: line in caplog.text)
        await start.finish()

    run(swarm())


def test_a_peer_that_dies_for_good_is_given_up_and_takes_only_what_it_held(run, caplog):
    caplog.set_level(logging.INFO)

    async def swarm():
        start = Start(quick_nest(quick(rounds=10)), limit=4)
        await start.wait()
        await start.crash("c")
        lost = start.engine("c").gossiper.account("global")
        await start.outlive("c")
        return start, await start.finish(), lost

    start, reports, lost = run(swarm())
    assert 3 * ONE - lost.held - lost.open <= round(held(reports) * ONE) <= 3 * ONE
    assert consensus(start.learners[:2]) < 1e-3
    assert all(r.weight["global"][1] == 0 for r in reports)  # nothing stays open to the dead
    assert "peer c is offline: connection lost" in caplog.text


def test_away_for_longer_than_the_lease_a_checkpoint_comes_back_as_a_newcomer(run, tmp_path):
    async def swarm():
        start = Start(quick_nest(quick(rounds=10**6)), limit=10**6, folder=tmp_path)
        await until(lambda: start.gates["c"].reached > 3)
        session = start.engine("c").session
        await start.crash("c")
        lost = start.engine("c").gossiper.account("global")
        await start.given_up("c")
        last_seen(tmp_path / "c.checkpoint", 10 * start.nest.settings.lease)
        start.begin("c", Gate(10**9))
        await until(lambda: start.lives["c"].trains())
        assert start.engine("c").session != session
        return await start.finish(more=5), lost

    reports, lost = run(swarm())
    # The old session's mass is gone, and the new one brought its own.
    assert 4 * ONE - lost.held - lost.open <= round(held(reports) * ONE) <= 4 * ONE
    assert reports[2].weight["global"][2] == ONE


def test_a_peer_out_of_touch_for_too_long_takes_a_new_session_by_itself(run, caplog):
    async def swarm():
        start = Start(quick_nest(quick(rounds=10**6)), limit=10**6)
        await until(lambda: start.gates["c"].reached > 3)
        lone = start.lives["c"]
        session, transport = start.engine("c").session, lone.transports[-1]
        start.nest.broker.disconnect(transport, transport.will)
        transport.lose("the cable was pulled")
        lone.peer.link.last_contact -= 10 * start.nest.settings.lease
        lost = start.engine("c").gossiper.account("global")
        await start.given_up("c")
        await transport.reconnect()
        await until(lambda: start.engine("c").session != session)
        await until(lambda: start.engine("c").gossiper.weight("global") > 0)
        return start, await start.finish(more=5), lost

    start, reports, lost = run(swarm())
    assert 4 * ONE - lost.held - lost.open <= round(held(reports) * ONE) <= 4 * ONE
    assert consensus(start.learners) < 1e-3
    assert "peer c: lease expired (" in caplog.text
    assert "rejoining with a new session" in caplog.text


def test_packets_for_a_broker_that_is_away_do_not_count_as_sent(run):
    async def swarm():
        nest = Nest(quick(rounds=10**9, expect=("a", "b"), founder=True))
        one, _ = (nest.start(name) for name in "ab")
        await until(lambda: one.peer.link is not None and one.peer.link.packets)
        nest.broker.stop()
        link, trained = one.peer.link, one.view.round
        sent = link.packets, link.bytes
        counters = one.transports[-1].counters
        await until(lambda: one.view.round > trained + 3 and counters["outbound-offline"])
        assert (link.packets, link.bytes) == sent
        await nest.broker.start([life.transports[-1] for life in nest.lives])
        await nest.finish(3)

    run(swarm())


def test_an_outage_shorter_than_the_lease_costs_nothing(run):
    async def swarm():
        nest = quick_nest(quick(rounds=8))
        start = Start(nest, limit=2)
        for _ in range(2):
            await start.wait()
            nest.broker.stop()
            await turns(50)
            await nest.broker.start([life.transports[-1] for life in nest.lives])
            for gate in start.gates.values():
                gate.limit += 2
        return start, await start.finish()

    start, reports = run(swarm())
    assert held(reports) == injected(reports) == 3
    assert consensus(start.learners) < 1e-3


def test_who_died_while_the_broker_was_away_is_missed_and_given_up(run, caplog):
    """No last will tells of it: the broker was not there to publish one, and has forgotten the rest."""
    caplog.set_level(logging.INFO)

    async def swarm():
        nest = quick_nest(quick(rounds=10))
        start = Start(nest, limit=4)
        await start.wait()
        lost = start.engine("c").gossiper.account("global")
        nest.broker.stop()
        await start.crash("c")
        await nest.broker.start([start.lives[name].transports[-1] for name in "ab"])
        for name, other in ("ab", "ba"):
            entries = start.lives[name].peer.link.roster._entries
            await until(lambda e=entries, o=other: e[o].unconfirmed_since is None)
            start.lives[name].set_back("c", "unconfirmed_since")
        return start, await start.finish(), lost

    start, reports, lost = run(swarm())
    assert 3 * ONE - lost.held - lost.open <= round(held(reports) * ONE) <= 3 * ONE
    assert consensus(start.learners[:2]) < 1e-3
    assert caplog.text.count("peer c is offline: it did not reconnect after the broker did") == 2
    assert caplog.text.count("peer c is given up") == 2
    assert "peer a is offline" not in caplog.text
    for name in TRIO:  # each is greeted once by each of the others
        assert caplog.text.count(f"peer {name} is online") == 2
    assert "stopped settling" not in caplog.text


def test_a_name_that_is_online_is_refused_and_its_owner_goes_on(run):
    async def swarm():
        nest = quick_nest(quick(rounds=4))
        start = Start(nest)
        await start.wait()
        double = Nest(nest.settings, nest.broker, limits=Limits(name_grace=0.3)).start("a")
        with pytest.raises(PeerError, match=r"peer a: the name is already online.*session"):
            await double.task
        return start, await start.finish()

    start, reports = run(swarm())
    assert held(reports) == 3
    assert consensus(start.learners) < 1e-3


def test_a_name_is_free_again_after_an_error(run):
    async def swarm():
        nest = quick_nest(quick(rounds=2, expect=("a", "nobody"), start_timeout=0.2))
        with pytest.raises(PeerError, match="nobody did not come online"):
            await nest.start("a").task
        return await nest.start("a", settings=quick(rounds=2)).task

    assert run(swarm()).rounds == 2


def test_a_crash_inside_training_speaks_through_the_last_will(run):
    class Broken(Still):
        def train(self, steps):
            raise ZeroDivisionError("bad data")

    async def swarm():
        nest = quick_nest(quick(rounds=2))
        with pytest.raises(ZeroDivisionError, match="bad data"):
            await nest.start("a", Broken(make_learner("a"), 0.0)).task
        return nest.broker.retained["gossamer/v1/nest/peer/a/status"]

    assert b'"offline"' in run(swarm())


@pytest.mark.parametrize(
    ("mode", "layout", "message"),
    [
        ("rounds", "4-6-2", "already training in rounds mode"),
        ("server", "4-6-2", "already training in server mode"),
        ("async", "4-5-2", r"average with peer .*model 'global' is not the same: field"),
    ],
)
def test_who_comes_late_to_lockstep_or_with_another_network_gives_up_alone(
    run, mode, layout, message
):
    async def swarm():
        nest = quick_nest(quick(rounds=4, mode=mode, servers={"global": "a"}))
        start = Start(nest)
        await start.wait()
        late = make_learner("d", {"global": layout})
        with pytest.raises(PeerError, match=message):
            await quick_nest(nest.settings, nest.broker).start("d", late).task
        return await start.finish()

    assert held(run(swarm())) == 3


def test_a_peer_alone_just_learns(run):
    async def swarm():
        return await quick_nest(quick(rounds=3)).start("a").task

    report = run(swarm())
    assert report.rounds == 3
    assert report.weight["global"] == [ONE, 0, ONE]
