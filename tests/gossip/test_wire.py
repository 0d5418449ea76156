from __future__ import annotations

import contextlib
import dataclasses
import struct

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gossamer.gossip import Ack, Give, Recall, WireError, decode, encode, wire

GIVE = Give(
    model="global",
    sender="ann",
    session="s1",
    sequence=7,
    receiver="bob",
    receiver_session="s2",
    weight=2**70 + 1,
    value=np.arange(5, dtype=np.float32),
    tag=(3, 4),
)
ACK = Ack("global", "bob", "s2", "ann", "s1", 7, "credited")
RECALL = Recall("global", "ann", "s1", "bob", "s2", 7)
names = st.text(min_size=1, max_size=64)
counts = st.integers(0, 2**63 - 1)


def joined(message, schema: str = "abcd", dtype="float32") -> bytes:
    return b"".join(encode(message, schema, dtype))


def cause_of(data: bytes, **options) -> str:
    with pytest.raises(WireError) as error:
        decode(data, **options)
    return error.value.cause


def with_header(**changes) -> bytes:
    """GIVE's bytes with fields of the header replaced (None: removed)."""
    data = joined(GIVE)
    length = struct.unpack_from("<H", data, 6)[0]
    header = msgpack.unpackb(data[8 : 8 + length]) | changes
    header = {key: value for key, value in header.items() if value is not ...}
    packed = msgpack.packb(header)
    start = 8 + length + -(8 + length) % 8
    padding = bytes(-(8 + len(packed)) % 8)
    return data[:6] + struct.pack("<H", len(packed)) + packed + padding + data[start:]


@settings(max_examples=40)
@given(
    names, names, names, names, names, counts,
    st.integers(0, 2**500), st.none() | st.tuples(counts, counts),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40),
)  # fmt: skip
def test_give_survives_the_wire(
    vector, sender, session, receiver, to_session, sequence, weight, tag, value
):
    give = Give(
        vector, sender, session, sequence, receiver, to_session, weight,
        np.array(value, dtype=np.float32), tag,
    )  # fmt: skip
    decoded = decode(joined(give, "feed"))
    assert decoded.schema == "feed"
    for field in dataclasses.fields(Give):
        ours, theirs = getattr(give, field.name), getattr(decoded.message, field.name)
        assert np.array_equal(ours, theirs) if field.name == "value" else ours == theirs


@pytest.mark.parametrize("message", [ACK, dataclasses.replace(ACK, verdict="void"), RECALL])
def test_small_messages_survive_the_wire(message):
    assert decode(joined(message)).message == message


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_value_is_what_as_sent_says(dtype):
    value = np.random.default_rng(1).normal(size=1001)
    sent = wire.as_sent(value, dtype)
    decoded = decode(joined(dataclasses.replace(GIVE, value=value), dtype=dtype))
    assert decoded.dtype == dtype
    assert decoded.message.value.dtype == sent.dtype == np.dtype(dtype)
    assert np.array_equal(decoded.message.value, sent)


def test_encoding_and_decoding_copy_nothing():
    value = np.arange(1000, dtype=np.float32)
    buffers = encode(dataclasses.replace(GIVE, value=value), "x")
    assert np.shares_memory(np.frombuffer(buffers[1], np.float32), value)
    data = b"".join(buffers)
    received = decode(data).message.value
    assert np.shares_memory(received, np.frombuffer(data, np.uint8))
    assert not received.flags.writeable
    assert received.flags.aligned


def test_strided_values_are_sent_right():
    value = np.arange(20, dtype=np.float32)[::2]
    got = decode(joined(dataclasses.replace(GIVE, value=value)))
    assert np.array_equal(got.message.value, value)


@pytest.mark.parametrize(("value", "dtype"), [(1e5, "float16"), (1e300, "float32")])
def test_values_too_large_for_the_wire_are_refused_by_the_sender(value, dtype):
    with pytest.raises(WireError) as error:
        encode(dataclasses.replace(GIVE, value=np.array([1.0, value])), "x", dtype)
    assert error.value.cause == "overflow"


def test_sender_refuses_what_receivers_would():
    with pytest.raises(WireError):
        encode(dataclasses.replace(GIVE, sender="x" * 65), "x")
    with pytest.raises(ValueError, match="negative"):
        encode(dataclasses.replace(GIVE, weight=-1), "x")
    with pytest.raises(ValueError, match="1-D"):
        encode(dataclasses.replace(GIVE, value=np.zeros((2, 2))), "x")
    with pytest.raises(ValueError, match="float32"):
        encode(GIVE, "x", "int8")  # type: ignore[arg-type]


def test_causes():
    data = joined(GIVE)
    assert cause_of(b"") == "garbage"
    assert cause_of(b"hello, is this the way to the broker?") == "garbage"
    assert cause_of(data[:-1]) == "truncated"
    assert cause_of(data[:20]) == "truncated"
    assert cause_of(data[:6]) == "truncated"
    assert cause_of(data + b"x") == "trailing"
    assert cause_of(joined(ACK) + bytes(8)) == "trailing"
    assert cause_of(data[:4] + b"\x09" + data[5:]) == "version"
    assert cause_of(data, max_bytes=50) == "too-large"
    assert cause_of(with_header(kind="gift")) == "unknown-kind"
    assert cause_of(with_header(kind=...)) == "unknown-kind"
    assert cause_of(data[:6] + b"\xff\xff" + bytes(70_000)) == "too-large"
    bad = dataclasses.replace(GIVE, value=np.array([0, np.nan], np.float32))
    assert cause_of(joined(bad)) == "non-finite"


@pytest.mark.parametrize(
    "change",
    [
        {"seq": -1}, {"seq": True}, {"seq": 2**64 - 1}, {"seq": 1.5}, {"vector": ""},
        {"vector": b"raw"}, {"from": "x" * 65}, {"weight": 3}, {"weight": b""}, {"tag": [1]},
        {"tag": [1, "2"]}, {"dtype": "object"}, {"dtype": "float8"}, {"length": "5"},
        {"kind": 5}, {"kind": ["give"]}, {"session": ...}, {str(i): i for i in range(40)},
    ],
)  # fmt: skip
def test_senseless_headers_are_garbage(change):
    assert cause_of(with_header(**change)) == "garbage"


def test_fields_of_a_later_version_are_ignored():
    decoded = decode(with_header(colour="red", later=[1, 2], verdict="credited"))
    assert decoded.message.sequence == GIVE.sequence
    assert np.array_equal(decoded.message.value, GIVE.value)


def test_absurd_length_allocates_nothing():
    assert cause_of(with_header(length=2**62)) == "truncated"


@given(st.binary(max_size=300))
@example(b"GSMR")
@example(b"GSMR\x01\x00\x00\x00")
def test_any_bytes_raise_nothing_but_wire_errors(data):
    with pytest.raises(WireError):
        decode(data)


@given(st.binary(max_size=200))
def test_any_header_raises_nothing_but_wire_errors(header):
    with pytest.raises(WireError):
        decode(b"GSMR\x01\x00" + struct.pack("<H", len(header)) + header + bytes(8))


@given(st.data())
def test_any_damage_raises_nothing_but_wire_errors(data):
    good = joined(data.draw(st.sampled_from([GIVE, ACK, RECALL])))
    raw = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        decode(memoryview(raw)[: data.draw(st.integers(0, len(raw)))])


SCHEMA = [("w", (3, 4), "float32"), ("b", (4,), "float32")]


def test_schema_hash_is_stable_and_sees_every_field():
    assert wire.schema_hash(SCHEMA) == wire.schema_hash([("w", [3, 4], "float32"), SCHEMA[1]])
    # A fixed value: peers of different versions must agree on it.
    assert wire.schema_hash(SCHEMA) == "14c8d041551ee51b"
    others = [
        [("v", (3, 4), "float32"), SCHEMA[1]],
        [("w", (4, 3), "float32"), SCHEMA[1]],
        [("w", (3, 4), "float64"), SCHEMA[1]],
        SCHEMA[:1],
        SCHEMA[::-1],
    ]
    hashes = {wire.schema_hash(other) for other in [SCHEMA, *others]}
    assert len(hashes) == 6
    assert all(len(one) == 16 for one in hashes)


def test_schema_difference_names_the_field():
    assert wire.schema_difference(SCHEMA, SCHEMA) is None
    difference = wire.schema_difference(SCHEMA, [("w", (3, 5), "float32"), SCHEMA[1]])
    assert difference == "field 'w' has shape (3, 4) here and (3, 5) there"
    assert "float64" in wire.schema_difference(SCHEMA, [("w", (3, 4), "float64")])
    assert "'v'" in wire.schema_difference(SCHEMA, [("v", (3, 4), "float32")])
    assert wire.schema_difference(SCHEMA, SCHEMA[:1]) == "field 'b' is missing there"
    assert wire.schema_difference(SCHEMA[:1], SCHEMA) == "field 'b' is missing here"


def test_foreign_schema_is_refused_with_both_hashes():
    decoded = decode(joined(GIVE, "theirs"))
    wire.require_schema(decoded, "theirs")
    with pytest.raises(WireError, match=r"theirs.*ours-1") as error:
        wire.require_schema(decoded, "ours-1")
    assert error.value.cause == "schema"
