"""Rates count messages: a large model in many packets is no flood, and a flood is none the less."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from trust_kit import SCHEMA, group

from gossamer.gossip.chunks import Chunker
from gossamer.gossip.security import Guards, GuardSettings
from gossamer.gossip.security.intake import MIN_SHARE, Intake, message_share


def intake(person, **settings):
    dropped = Counter()
    made = Intake(
        person.trust, {"global": SCHEMA}, guards=Guards(GuardSettings(**settings)),
        drop=lambda cause, _: dropped.update([cause]),
    )  # fmt: skip
    return made, dropped


def test_a_message_of_more_packets_than_the_burst_comes_through():
    """With the bounds as they are: a broker that takes small packets only, and a large vector."""
    (anna, ben), _ = group("anna", "ben")
    way_in, dropped = intake(ben)
    taken = []
    for sequence in range(1, 11):
        packets = anna.packets(ben, size=60_000, sequence=sequence, limit=1000)
        assert len(packets) > GuardSettings().burst
        taken += [way_in.take("global", packet, 0.0) for packet in packets]
    assert [message.sequence for message in taken if message is not None] == list(range(1, 11))
    assert not dropped


@pytest.mark.parametrize(("limit", "chunks"), [(4096, 1), (1000, 4)])
def test_messages_beyond_the_burst_are_dropped_however_they_are_cut(limit, chunks):
    (anna, ben), _ = group("anna", "ben")
    way_in, dropped = intake(ben, rate=1, burst=4.5)
    taken = []
    for sequence in range(1, 9):
        packets = anna.packets(ben, size=900, sequence=sequence, limit=limit)
        assert len(packets) == chunks
        taken += [way_in.take("global", packet, 0.0) for packet in packets]
    assert [message.sequence for message in taken if message is not None] == [1, 2, 3, 4]
    assert dropped["rate"] >= 4


def test_the_share_agrees_with_the_chunker():
    for size in (10, 5000, 50_000):
        packets = list(Chunker("anna@x/s", 1000).split([bytes(size)]))
        assert sum(map(message_share, packets)) == pytest.approx(max(1, len(packets) / 64))
    assert message_share(b"short") == 1.0
    assert message_share(bytes(40)) == 1.0  # of no chunks at all
    assert message_share(b"\xff" * 40) == MIN_SHARE  # of four thousand million


@pytest.mark.parametrize("bound", ["messages", "bytes"])
def test_a_flood_of_unfinished_messages_keeps_nobody_elses_from_completing(bound):
    """One member opens messages that it never finishes, within its rate, between others' packets."""
    (ben, eve, *others), _ = group("ben", "eve", "anna", "carl", "dora")
    way_in, dropped = intake(ben)
    if bound == "bytes":
        way_in.reassembler.max_total_bytes = way_in.reassembler.max_sender_bytes = 400_000
    streams = [other.packets(ben, size=4000, limit=500) for other in others]
    chunker, numbers = Chunker(f"{eve.name}/{eve.session}", 500), count()
    taken = []
    for turn in zip(*streams, strict=True):
        for packet in turn:
            taken.append(way_in.take("global", packet, 0.0))
            for _ in range(80):
                first = next(chunker.split([next(numbers).to_bytes(8, "big"), bytes(40_000)]))
                taken.append(way_in.take("global", eve.trust.seal(ben.name, "global", first), 0.0))
    assert "rate" not in dropped
    finished = [message.sender for message in taken if message is not None]
    assert sorted(finished) == sorted(other.name for other in others)
