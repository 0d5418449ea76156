from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.gossip import HEADER_BYTES, MIN_PACKET_BYTES, Chunker, Reassembler, WireError

LIMIT = MIN_PACKET_BYTES


def cause_of(reassembler: Reassembler, payload: bytes) -> str:
    with pytest.raises(WireError) as error:
        reassembler.add(payload)
    return error.value.cause


@given(st.data())
def test_any_order_duplication_and_interleaving_gives_every_message_once(data):
    sizes = data.draw(st.lists(st.integers(0, 700), min_size=1, max_size=4))
    messages = [np.random.default_rng(size).bytes(size) for size in sizes]
    payloads = []
    for number, message in enumerate(messages):
        cut = data.draw(st.integers(0, len(message)))
        chunker = Chunker(f"peer{number % 2}", LIMIT, first_id=number)
        payloads += chunker.split([message[:cut], b"", memoryview(message)[cut:]])
    assert all(len(payload) <= LIMIT for payload in payloads)
    # A single-chunk message is handed on every time it comes: repeat only the others.
    several = [payload for payload in payloads if int.from_bytes(payload[28:32], "little") > 1]
    again = data.draw(st.lists(st.sampled_from(several), max_size=8)) if several else []
    order = data.draw(st.permutations(payloads + again))
    reassembler = Reassembler()
    whole = [bytes(got) for got in map(reassembler.add, order) if got is not None]
    assert sorted(whole) == sorted(messages)
    assert reassembler.dropped["duplicate"] == len(again)
    assert reassembler.held_bytes == 0
    assert reassembler.unfinished == 0


@given(st.integers(0, 60_000), st.integers(MIN_PACKET_BYTES, MIN_PACKET_BYTES + 200))
def test_every_size_fits_every_limit(size, limit):
    message = np.random.default_rng(size).bytes(size)
    payloads = list(Chunker("ann", limit).split([message]))
    assert max(map(len, payloads)) <= limit
    reassembler = Reassembler()
    *early, last = [reassembler.add(payload) for payload in payloads]
    assert set(early) <= {None}
    assert bytes(last) == message


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(200, 3000)), max_size=40))
def test_memory_stays_bounded_and_what_is_given_up_is_counted(openings):
    bounds = Reassembler(
        max_message_bytes=2500, max_sender_bytes=4000, max_total_bytes=6000, max_unfinished=5
    )
    chunkers = [Chunker(f"peer{number}", LIMIT) for number in range(4)]
    opened = refused = 0
    for sender, size in openings:
        first = next(chunkers[sender].split([bytes(size)]))
        if size > 2500:
            assert cause_of(bounds, first) == "too-large"
            refused += 1
        else:
            assert bounds.add(first) is None
            opened += 1
        assert bounds.held_bytes <= 6000
        assert bounds.unfinished <= 5
    assert opened + refused == len(openings)
    assert bounds.unfinished + sum(bounds.dropped.values()) == opened


def test_total_bytes_are_bounded_whoever_sends():
    bounds = Reassembler(max_total_bytes=5000)
    for number in range(10):
        bounds.add(next(Chunker(f"peer{number}", LIMIT).split([bytes(2000)])))
        assert bounds.held_bytes <= 5000
    assert bounds.unfinished == 2
    assert bounds.dropped == {"total-bytes": 8}


def test_one_greedy_sender_loses_its_own_messages_first():
    bounds = Reassembler(max_sender_bytes=2500, max_total_bytes=100_000)
    honest = list(Chunker("honest", LIMIT).split([bytes(range(200))]))
    bounds.add(honest[0])
    greedy = Chunker("greedy", LIMIT)
    for number in range(50):
        bounds.add(next(greedy.split([bytes((number,)) * 1000])))
    assert bounds.dropped == {"sender-bytes": 48}
    assert bytes(bounds.add(honest[1])) == bytes(range(200))


def test_a_message_in_one_chunk_is_handed_on_without_a_copy():
    payload = next(Chunker("ann").split([b"header--", np.arange(1000, dtype=np.float32).data]))
    got = Reassembler().add(payload)
    assert np.shares_memory(np.frombuffer(got, np.uint8), np.frombuffer(payload, np.uint8))
    assert got.readonly
    assert HEADER_BYTES % 8 == 0  # keeps what follows aligned


def test_chunks_of_different_messages_are_told_apart():
    first = list(Chunker("ann", LIMIT, first_id=5).split([b"a" * 250]))
    other = list(Chunker("ann", LIMIT, first_id=5).split([b"b" * 250]))
    reassembler = Reassembler()
    assert reassembler.add(first[0]) is None
    assert cause_of(reassembler, other[1]) == "checksum"
    assert bytes(reassembler.add(first[1])) == b"a" * 250


def test_changed_bytes_are_noticed_and_their_memory_freed():
    first, second = Chunker("ann", LIMIT).split([b"a" * 250])
    reassembler = Reassembler()
    reassembler.add(first)
    assert cause_of(reassembler, second[:-1] + b"!") == "checksum"
    assert reassembler.held_bytes == 0


def test_causes():
    good = next(Chunker("ann", LIMIT).split([bytes(500)]))
    reassembler = Reassembler()
    assert cause_of(reassembler, b"") == "garbage"
    assert cause_of(reassembler, b"x" * 100) == "garbage"
    assert cause_of(reassembler, good[:20]) == "truncated"
    assert cause_of(reassembler, good[:-1]) == "truncated"
    assert cause_of(reassembler, good + b"x") == "trailing"
    assert cause_of(reassembler, good[:4] + b"\x07" + good[5:]) == "version"
    assert cause_of(Reassembler(max_message_bytes=400), good) == "too-large"


@given(st.binary(max_size=120), st.booleans())
def test_any_bytes_raise_nothing_but_wire_errors(data, dressed):
    reassembler = Reassembler(max_total_bytes=10_000)
    with contextlib.suppress(WireError):
        reassembler.add(b"GSMC\x01\x00\x00\x00" + data if dressed else data)
    assert reassembler.held_bytes <= 10_000


def test_senders_are_told_what_is_wrong():
    with pytest.raises(ValueError, match="at least"):
        Chunker("ann", MIN_PACKET_BYTES - 1)


# --- repetition ---------------------------------------------------------------------------------


def test_a_repetition_completes_what_has_arrived():
    chunker, reassembler = Chunker("ann", LIMIT), Reassembler()
    message = [b"header of one transfer", bytes(range(256)) * 10]
    first, second = list(chunker.split(message)), list(chunker.split(message))
    assert len(first) > 10
    assert all(reassembler.add(payload) is None for payload in first[::2])
    got = [reassembler.add(payload) for payload in second[1::2]]
    assert [bytes(whole) for whole in got if whole is not None] == [b"".join(message)]
    assert reassembler.unfinished == 0


def test_a_repetition_of_what_was_complete_is_handed_on_again_but_a_duplicate_is_not():
    chunker, reassembler = Chunker("ann", LIMIT), Reassembler()
    message = [b"header", bytes(1000)]
    for _ in range(3):  # whoever repeats has heard no answer
        payloads = list(chunker.split(message))
        found = [reassembler.add(payload) for payload in payloads]
        assert found[-1] is not None
        assert [reassembler.add(payload) for payload in payloads] == [None] * len(payloads)
    assert reassembler.unfinished == 0


def test_other_messages_and_other_sizes_are_no_repetition():
    message = [b"header 1", bytes(1000)]
    narrow, wide = Chunker("ann", LIMIT), Chunker("ann", LIMIT + 40)
    payloads = [next(c.split(message)) for c in (wide, narrow)]
    payloads.append(next(wide.split([b"header 2", bytes(1000)])))
    reassembler = Reassembler()
    for payload in payloads:
        assert reassembler.add(payload) is None
    assert reassembler.unfinished == 3


def test_a_message_that_makes_progress_is_given_up_last():
    reassembler = Reassembler(max_unfinished=2)
    slow, left, new = (list(Chunker(name, LIMIT).split([bytes(500)])) for name in "abc")
    for payload in (slow[0], left[0], slow[1], new[0]):
        reassembler.add(payload)
    assert [reassembler.add(payload) for payload in slow[2:]][-1] is not None
