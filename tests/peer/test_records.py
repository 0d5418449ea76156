"""Records of strangers: whatever is published where peers publish theirs, only peers' records count."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import pytest

from gossamer.gossip import topics
from gossamer.peer.process import PeerSpec
from gossamer.peer.settings import Settings
from gossamer.peer.spec import BrokerAddress
from gossamer.peer.summary import MAX_RECORD_BYTES, is_record, read_record
from gossamer.peer.swarm import LocalSwarm, SwarmSpec

NAMES = ("a", "b")
RECORD = {
    "peer": "a", "session": "s1", "time": 1.5, "round": 3, "phase": "training", "accuracy": 0.5,
    "loss": float("nan"), "disagreement": {"global": 0.1}, "received": 1, "counts": True,
    "packets": 2, "bytes": 3, "saved_bytes": 1, "distortion": {"global": [0.1, 0.2]}, "neighbours": 1,
}  # fmt: skip


def nested(depth: int) -> list:
    found: list = []
    for _ in range(depth):
        found = [found]
    return found


BAD = [
    {"peer": None}, {"peer": 3}, {"session": 3}, {"session": "[/b]"}, {"session": "\ud800"},
    {"time": "now"}, {"round": "3"}, {"round": 1.5}, {"round": -1}, {"round": 10**400},
    {"round": True}, {"phase": "[bold]"}, {"phase": []}, {"accuracy": "high"}, {"accuracy": None},
    {"accuracy": 10**400}, {"accuracy": [1]}, {"own_accuracy": {}}, {"loss": "low"},
    {"training_loss": []}, {"disagreement": []}, {"disagreement": {"global": "far"}},
    {"disagreement": {"[/x]": 0.1}}, {"disagreement": {"global": None}}, {"packets": None},
    {"bytes": 10**400}, {"bytes": 0.5}, {"received": "1"}, {"neighbours": []},
    {"more": nested(500)}, {"more": nested(3)}, {"more": 10**400}, {"more": "x" * MAX_RECORD_BYTES},
]  # fmt: skip


def read(record: object, peer: str = "a", names: tuple[str, ...] = NAMES):
    payload = record if isinstance(record, bytes) else json.dumps(record).encode()
    return read_record(topics.metrics("nest", peer), payload, names)


def test_a_peers_record_is_read():
    found = read(RECORD)
    assert found is not None
    assert json.dumps(found) == json.dumps(RECORD)
    named = RECORD | {"peer": "a@key"}
    assert read(named, "a@key") is not None


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: str(bad)[:40])
def test_a_field_of_another_kind_makes_it_none(bad):
    assert read(RECORD | bad) is None


OPTIONAL = {"accuracy", "loss", "counts", "saved_bytes", "distortion"}


@pytest.mark.parametrize("missing", sorted(RECORD.keys() - OPTIONAL))
def test_a_field_that_is_missing_makes_it_none(missing):
    assert not is_record({name: value for name, value in RECORD.items() if name != missing})


@pytest.mark.parametrize(
    "payload", [b"", b"{", b"\xff", b"[" * 200_000, b"null", b"[]", b"3", b'{"peer":"a"}']
)
def test_what_is_no_table_is_none(payload):
    assert read(payload) is None


def test_nobody_speaks_for_another_topic_and_strangers_do_not_count():
    assert read(RECORD, "b") is None
    assert read(RECORD | {"peer": "zz"}, "zz") is None
    assert read_record("elsewhere", json.dumps(RECORD).encode(), NAMES) is None


def test_a_swarm_hands_on_the_records_of_its_peers_alone(run, tmp_path):
    """The listener itself, with a broker that has only strangers' words and one record."""
    wire = [
        (topics.metrics("nest", "zz"), b'{"peer":"zz"}'),
        (topics.metrics("nest", "a"), b"[" * 200_000),
        (topics.metrics("nest", "a"), b'{"peer":"a"}'),
        (topics.metrics("nest", "zz"), json.dumps(RECORD).encode()),
        (topics.metrics("nest", "a"), json.dumps(RECORD).encode()),
    ]

    class Wire:
        async def subscribe(self, *_):
            pass

        async def messages(self):
            for topic, payload in wire:
                yield topic, payload, False

    @asynccontextmanager
    async def transport(*_args, **_options):
        yield Wire()

    peers = [PeerSpec(name, "none", {}, Settings(swarm="nest")) for name in NAMES]
    spec = SwarmSpec("nest", BrokerAddress("mqtt://127.0.0.1:1"), tmp_path, peers)
    records: list = []
    run(LocalSwarm(spec, on_record=records.append, connect=transport).receive_records())
    assert [record["round"] for record in records] == [3]
