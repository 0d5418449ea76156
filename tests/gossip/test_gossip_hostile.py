"""What must not end a peer: rows, nesting, weights and values that nobody should have sent."""

from __future__ import annotations

import logging

import msgpack
import numpy as np
import pytest

from gossamer.gossip import (
    ONE,
    Ack,
    DictStore,
    Give,
    Gossiper,
    Packed,
    PackError,
    WireError,
    as_sent,
    decode,
    encode,
    introduce,
)
from gossamer.gossip.compress import unpack
from gossamer.gossip.pushsum import MAX_WEIGHT
from gossamer.gossip.wire import _PREFIX, MAGIC, VERSION


def make(name: str, value: float = 0.0, weight: int = ONE, **options) -> Gossiper:
    peer = Gossiper(name, f"s{name}", DictStore({"v": np.full(3, value, np.float32)}), **options)
    if weight:
        peer.inject("v", weight)
    return peer


def give(weight: int, sequence: int = 1) -> Give:
    return Give("v", "b", "sb", sequence, "a", "sa", weight, np.ones(3, np.float32))


# --- statements -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [["a", "sa", ["v"], 1, "credited"], ["a", "sa", {}, 1, "credited"], ["a", "sa", "v", 1],
     ["a", "sa", "v", "1", "credited"], ["a", "sa", "v", 1, None], [], "asave", 3, None,
     {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}],
)  # fmt: skip
def test_a_bad_row_of_a_statement_is_counted_and_the_others_are_heard(row) -> None:
    a, b = make("a"), make("b")
    introduce([a, b])
    assert a.push("v", {"b": ONE // 2}, 0.0)
    a.peer_gone("b", "sb", [row, ["a", "sa", "v", 1, "credited"]])
    assert a.counters["bad-statement"] == 1
    assert a.counters["settled-by-statement"] == 1
    assert a.weight("v") == ONE // 2


# --- weights --------------------------------------------------------------------------------------


def test_no_weight_is_credited_that_leaves_no_room_for_what_may_come_back() -> None:
    a, b = make("a"), make("b")
    introduce([a, b])
    assert a.push("v", {"b": ONE // 2}, 0.0)
    a.handle(give(MAX_WEIGHT - a.weight("v")), 0.0)
    assert a.counters["refused-weight"] == 1
    a.handle(give(MAX_WEIGHT - ONE, sequence=2), 0.0)
    assert a.counters["credited"] == 1
    a.handle(Ack("v", "b", "sb", "a", "sa", 1, "void"), 0.0)
    assert a.weight("v") == MAX_WEIGHT


def test_who_has_not_counted_yet_keeps_room_for_its_own_weight() -> None:
    a = make("a", weight=0)
    a.handle(give(MAX_WEIGHT), 0.0)
    assert a.counters["refused-weight"] == 1
    a.handle(give(MAX_WEIGHT // 2, sequence=2), 0.0)
    assert a.counters["credited"] == 1
    a.inject("v", ONE)
    assert a.weight("v") == MAX_WEIGHT // 2 + ONE


# --- values that do not fit -----------------------------------------------------------------------


def test_an_own_value_beyond_float16_is_counted_told_once_and_not_pushed(caplog) -> None:
    a = make("a", 7e4, lossy=lambda _, value: as_sent(value, "float16"))
    introduce([a, make("b")])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert not a.push("v", {"b": ONE // 2}, 0.0)
        a.hand_over(0.0)
    assert a.counters["own-value-too-large"] == 4
    assert a.weight("v") == ONE
    assert not a.ledger.open
    told = [record.message.rpartition("(")[2] for record in caplog.records]
    assert told == ["1 so far)", "2 so far)", "4 so far)"]
    assert "peer a cannot share model v" in caplog.text
    assert "largest magnitude is 70000: use dtype float32" in caplog.text
    a.set_value("v", np.ones(3, np.float32))
    a.leaving = False
    assert a.push("v", {"b": ONE // 2}, 0.0)


# --- nesting --------------------------------------------------------------------------------------

DEEP = b"\x91" * 1010 + b"\x90"
"""Lists in lists: msgpack still reads so many, and Python does not write them out."""


def packed(value: object) -> bytes:
    return bytes(msgpack.packb(value) or b"")


@pytest.mark.parametrize("field", ["seq", "vector", "weight", "tag", "length", "dtype"])
def test_a_header_nested_deep_is_garbage(field) -> None:
    whole = b"".join(bytes(part) for part in encode(give(ONE), "0" * 16))
    end = _PREFIX.size + _PREFIX.unpack_from(whole)[3]
    header = msgpack.unpackb(whole[_PREFIX.size : end])
    pairs = [packed(k) + (DEEP if k == field else packed(v)) for k, v in header.items()]
    data = bytes([0x80 + len(pairs)]) + b"".join(pairs)
    data = _PREFIX.pack(MAGIC, VERSION, 0, len(data)) + data
    with pytest.raises(WireError, match=f"field '{field}' cannot be a list"):
        decode(data + bytes(-len(data) % 8) + bytes(12))


def test_facts_nested_deep_are_garbage() -> None:
    data = b"".join(bytes(part) for part in Packed(3, (["top-k", 1], ["float32"]), ()).buffers())
    facts = data[14:].replace(packed("top-k") + b"\x01", packed("top-k") + DEEP)
    data = len(facts).to_bytes(2, "little") + data[2:14] + facts
    with pytest.raises(PackError, match="top-k: the number of values is a list"):
        unpack(Packed.parse(memoryview(data), 3), 3)
