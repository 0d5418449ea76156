"""A broker's packet limit, as peers see it: it may become less while they run, or be too low."""

from __future__ import annotations

import asyncio

import pytest
from peer_kit import Nest, Still, consensus, flooded, held, injected, make_learner, quick

from gossamer.gossip import MemoryBroker, topics
from gossamer.peer.engine import InboundLimits
from gossamer.peer.exits import PeerError
from gossamer.peer.link import MAX_PENDING
from gossamer.peer.settings import MAX_PIECES, Limits

LOW = 4000


def fall(broker: MemoryBroker) -> None:
    """Called on the event loop, where a transport learns of its limit too."""
    broker.max_packet = LOW


@pytest.mark.parametrize("mode", ["async", "rounds"])
def test_a_limit_that_falls_while_peers_run_costs_no_mass(run, mode):
    async def scenario():
        nest = Nest(quick(rounds=6, mode=mode, expect=("a", "b")))
        whole, loop = nest.broker.max_packet, asyncio.get_running_loop()

        def lower(number: int) -> None:
            if number == 3:
                loop.call_soon_threadsafe(fall, nest.broker)

        learners = [
            Still(
                make_learner(name, {"global": "40-40-10"}, layout="40=40=10"), value, during=lower
            )
            for name, value in (("a", 0.0), ("b", 1.0))
        ]
        assert 4 * len(learners[0].network.read("global")) > LOW, "a message must be cut"
        for name, learner in zip("ab", learners, strict=True):
            nest.start(name, learner)
        reports = await nest.all()
        assert nest.broker.max_packet == LOW < whole
        assert held(reports) == injected(reports) == 2
        assert consensus(learners) < 1e-3

    run(scenario())


class Falling(MemoryBroker):
    """Its limit becomes less with the first packet that is larger than the new one."""

    def publish(self, sender: str, topic: str, payload: bytes, retain: bool) -> None:
        super().publish(sender, topic, payload, retain)
        if topics.is_gossip(topic) and len(payload) > LOW // 2:
            self.max_packet = LOW // 2


def test_packets_cut_before_the_limit_fell_are_not_sent(run):
    async def scenario():
        broker = Falling(max_packet=5000)
        nest = Nest(quick(rounds=3, mode="rounds", expect=("a", "b")), broker)
        for name in "ab":
            nest.start(name, make_learner(name, {"global": "40-40-10"}, layout="40=40=10"))
        reports = await nest.all()
        assert sum(report.transport.get("cut-too-large", 0) for report in reports) >= 1
        assert held(reports) == injected(reports) == 2

    run(scenario())


def test_a_limit_too_low_for_gossip_is_one_error(run):
    async def scenario():
        nest = Nest(quick(), MemoryBroker(max_packet=330))
        nest.start("a")
        with pytest.raises(PeerError, match="gossip needs 168: raise the broker's packet limit"):
            await nest.all()

    run(scenario())


# --- many small packets -----------------------------------------------------------------------------


def test_a_message_in_hundreds_of_packets_passes(run):
    async def scenario():
        nest = Nest(quick(rounds=3, mode="rounds", expect=("a", "b")), MemoryBroker(max_packet=600))
        slices, layout = {"global": "160-200-10"}, "160=200=10"
        learners = [
            Still(make_learner(n, slices, layout=layout), v) for n, v in (("a", 0), ("b", 1))
        ]
        assert 4 * len(learners[0].network.read("global")) > 256 * 450
        for name, learner in zip("ab", learners, strict=True):
            nest.start(name, learner)
        reports = await nest.all()
        assert held(reports) == injected(reports) == 2
        assert consensus(learners) < 1e-3
        assert not any(report.transport.get("busy") for report in reports)

    run(scenario())


def test_a_busy_peer_has_room_for_a_whole_message_but_not_for_everything(run):
    room = InboundLimits("a", {"global": 1_000_000}, "float32")
    pieces = [bytes(500)] * MAX_PIECES
    assert not run(flooded(room, pieces))
    empty = [b""] * MAX_PENDING
    assert run(flooded(room, [*pieces, *empty])) == {"busy": MAX_PIECES}
    large = [bytes(room.max_waiting_bytes(0) // 2)] * 3
    assert run(flooded(room, large)) == {"busy": 1}


def test_a_message_in_too_many_packets_is_refused_by_name(run):
    async def scenario():
        settings = quick(rounds=3, mode="rounds", expect=("a", "b"))
        nest = Nest(settings, MemoryBroker(max_packet=600), limits=Limits(max_pieces=8))
        for name in "ab":
            nest.start(name, make_learner(name, {"global": "40-40-10"}, layout="40=40=10"))
        return await asyncio.gather(*(life.task for life in nest.lives), return_exceptions=True)

    errors = run(scenario())
    told = [str(error) for error in errors if isinstance(error, PeerError)]
    assert told
    for text in told:
        assert "model global: a message has 8" in text
        assert "more than 8; raise max_packet and the broker's packet limit" in text
