"""Large models: what a peer takes in, what may wait for it, and what it says when nothing gets through."""

from __future__ import annotations

import logging
import struct
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from peer_kit import Nest, Still, consensus, flooded, held, injected, make_learner, quick

from gossamer.gossip import MAX_MESSAGE_BYTES, Chunker, Give, MemoryBroker, Recall, topics
from gossamer.gossip.security import NullSecurity
from gossamer.peer.engine import Engine
from gossamer.peer.exits import PeerError
from gossamer.peer.traffic import (
    MAX_WAITING_BYTES,
    MIN_WAITING_BYTES,
    WARN_AFTER_TRIES,
    Dispatch,
    InboundLimits,
)

# --- room ---------------------------------------------------------------------------------------


def test_the_room_fits_the_peers_own_models():
    values = 17_500_000  # 70 MB
    reassembler = InboundLimits("a", {"global": values}, "float32").make_reassembler()
    assert reassembler.add(next(Chunker("b", 16_000).split([bytes(4 * values)]))) is None
    assert reassembler.unfinished == 1


def test_a_hub_has_room_for_a_message_of_each_of_its_neighbours():
    limits = InboundLimits("a", {"v": 10_000, "w": 10_000}, "float32")
    reassembler = limits.make_reassembler()
    limits.adjust(reassembler, 200)
    chunks = [list(Chunker(f"p{n}", 30_000).split([bytes(40_000)])) for n in range(200)]
    for first, _ in chunks:
        assert reassembler.add(first) is None
    assert all(reassembler.add(second) is not None for _, second in chunks)
    assert not reassembler.dropped


def test_a_peer_keeps_no_room_for_what_it_has_no_use_for():
    engine = Engine("a", make_learner("a"), quick())
    chunk = next(Chunker("b", 16_000).split([bytes(10_000_000)]))
    engine.turn([("global", chunk)], [], 0.0, 16_000)
    assert engine.dropped == {"too-large": 1}


def test_a_message_of_a_model_that_peers_have_just_begun_to_share_is_no_warning(
    caplog: pytest.LogCaptureFixture,
):
    """However large it is: this peer does not follow the plan yet, and the sender repeats it."""
    learner = make_learner("a")
    learner.network.reslice({"all": 1.0})
    engine = Engine("a", learner, quick(sharing="auto"))
    caplog.clear()
    chunk = next(Chunker("b", 16_000).split([bytes(10_000_000)]))
    engine.turn([("statistics-0123abcd-8", chunk)], [], 0.0, 16_000)
    assert engine.dropped == {"unknown-model": 1}
    assert not caplog.records


def test_a_model_too_large_for_any_message_is_refused_by_name():
    values = MAX_MESSAGE_BYTES // 4
    with pytest.raises(PeerError, match=rf"model global: its {values} values .* or send float16"):
        InboundLimits("a", {"local": 10, "global": values}, "float32")
    InboundLimits("a", {"global": values}, "float16")
    with pytest.raises(PeerError, match=r"several partial models$"):
        InboundLimits("a", {"global": 2 * values}, "float16")


def test_what_may_wait_grows_with_models_and_neighbours():
    small, large = (InboundLimits("a", {"v": size}, "float32") for size in (100, 10_000_000))
    assert small.max_waiting_bytes(1) == small.max_waiting_bytes(8) == MIN_WAITING_BYTES
    assert 160_000_000 <= large.max_waiting_bytes(1) < large.max_waiting_bytes(4) <= 500_000_000
    assert large.max_waiting_bytes(10_000) == MAX_WAITING_BYTES
    assert (
        InboundLimits("a", {"v": 60_000_000}, "float32").max_waiting_bytes(10_000)
        >= 2 * 240_000_000
    )


LARGE = InboundLimits("a", {"global": 1_000_000}, "float32")


class Wary(NullSecurity):
    """Expects packets of one kind."""

    def expects(self, model: str, packet: Any) -> bool:
        return bytes(packet[:7]) == b"genuine"


def test_outsiders_fill_no_memory_of_a_busy_peer(run):
    junk = bytes(1 << 20)
    assert run(flooded(InboundLimits("a", {"global": 1000}, "float32"), [junk] * 100)) == {
        "packet-too-large": 100
    }
    dropped = run(flooded(LARGE, [junk] * 100))
    assert dropped.keys() == {"busy"}
    assert 2 * 4_000_000 <= (100 - dropped["busy"]) * len(junk) <= 20_000_000


def test_what_trust_does_not_expect_takes_up_no_room(run):
    junk = bytes(1 << 20)
    assert not run(flooded(LARGE, [junk] * 100, Wary("a")))
    assert run(flooded(LARGE, [b"genuine" + junk] * 100, Wary("a"))).keys() == {"busy"}


INDEX_AND_COUNT = struct.Struct("<II")  # in a chunk's header

# --- lost packets -------------------------------------------------------------------------------


class Leaky(MemoryBroker):
    """Loses every other packet of messages in many: of a copy the even ones, of the next the odd."""

    def __init__(self) -> None:
        super().__init__(max_packet=600)
        self._copies: Counter[str] = Counter()
        self.lost = 0

    def publish(self, sender: str, topic: str, payload: bytes, retain: bool) -> None:
        if topics.is_gossip(topic):
            index, count = INDEX_AND_COUNT.unpack_from(payload, 24)
            self._copies[topic] += count > 1 and index == 0
            if count > 1 and (index + self._copies[topic]) % 2:
                self.lost += 1
                return
        super().publish(sender, topic, payload, retain)


def test_a_message_of_which_every_copy_is_damaged_arrives(run):
    async def scenario():
        broker = Leaky()
        nest = Nest(quick(rounds=1, mode="rounds", exchanges=1, expect=("a", "b")), broker)
        learners = [
            Still(make_learner(name, {"global": "40-40-10"}, layout="40=40=10"), value)
            for name, value in (("a", 0.0), ("b", 1.0))
        ]
        for name, learner in zip("ab", learners, strict=True):
            nest.start(name, learner)
        reports = await nest.all()
        assert broker.lost > 10
        assert held(reports) == injected(reports) == 2
        assert consensus(learners) < 1e-3

    run(scenario())


def dispatch() -> Dispatch:
    links = SimpleNamespace(is_exact=lambda _: False)
    counted = SimpleNamespace(count_sent=lambda *_: None, links=links)
    return Dispatch("a", {"v": "0" * 16}, "float32", counted, NullSecurity("a"))  # type: ignore[arg-type]


def give(sequence: int, values: int = 5000) -> Give:
    return Give("v", "a", "sa", sequence, "b", "sb", 1, np.zeros(values, np.float32))


def test_one_warning_says_to_whom_nothing_gets_through(caplog):
    sending = dispatch()
    recall = Recall("v", "a", "sa", "b", "sb", 1)
    with caplog.at_level(logging.WARNING):
        for message in (give(1), give(1), recall, give(2), *[give(2)] * WARN_AFTER_TRIES):
            sending.pack([message], "sa", 1000)
    (record,) = caplog.records
    text = record.getMessage()
    assert "model v: a message of 20" in text
    assert f"in 21 packets was sent to b {WARN_AFTER_TRIES} times" in text
    assert "raise max_packet and the broker's packet limit" in text


def test_no_warning_while_messages_are_acknowledged_or_fit_one_packet(caplog):
    sending, small = dispatch(), dispatch()
    with caplog.at_level(logging.WARNING):
        for sequence in range(1, 4 * WARN_AFTER_TRIES):
            sending.pack([give(sequence)], "sa", 1000)
            sending.pack([give(sequence)], "sa", 1000)
            small.pack([give(1, values=10)], "sa", 1000)
    assert not caplog.records
