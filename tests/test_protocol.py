"""The protocol as its page describes it: test vectors, and a peer in one file that talks to a real one."""

from __future__ import annotations

import asyncio
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import house
import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from golden import vectors
from papers_kit import Papers
from torch import nn

from gossamer.gossip import ONE, Give, Reassembler, decode
from gossamer.gossip.security import TrustError, public_text, signed
from gossamer.models import Metrics, SlicedNetwork
from gossamer.peer import (
    Broker,
    BrokerAddress,
    Peer,
    Report,
    Settings,
    mqtt_connect,
    schema_entries,
)

ROOT = Path(__file__).parents[1]
MINIMAL = ROOT / "docs" / "examples" / "minimal_peer.py"


class Still:
    """A learner that never moves, so that values change by gossip alone."""

    def __init__(self, name: str) -> None:
        net = nn.Linear(2, 1, bias=False)
        self.network = SlicedNetwork(net, {"all": 1.0}, peer=name, seed=0)

    def train(self, steps: int) -> Metrics:
        return Metrics()

    def test(self) -> Metrics:
        return Metrics(samples=1)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None: ...


async def together(
    broker: Broker, name: str, settings: Settings, arguments: list[str]
) -> tuple[Report, list[float], dict[str, Any]]:
    """Run a real peer, ben, and the one-file peer; return ben's report and values, and the other's output."""
    learner = Still("ben")
    fields = json.dumps(schema_entries(learner.network, "all"))
    port = broker.url.rpartition(":")[2]
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(MINIMAL), "127.0.0.1", port, "nest", name, "all",
        fields, "[3.0, 5.0]", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    peer = Peer("ben", learner, settings, mqtt_connect(BrokerAddress(broker.url)))
    report, (out, err) = await asyncio.gather(peer.run(), process.communicate())
    assert process.returncode == 0, err.decode()
    return report, learner.network.read("all").tolist(), json.loads(out)


@pytest.mark.parametrize("trust", [False, True], ids=["plain", "sealed"])
def test_a_peer_in_one_file_exchanges_transfers_with_a_real_one(
    trust: bool, empty_broker: Broker, tmp_path: Path, run: Callable[..., Any]
) -> None:
    settings, name, arguments = Settings(swarm="nest", rounds=3), "anna", list[str]()
    if trust:
        papers = Papers(tmp_path)
        name, _ = papers.names("anna", "ben")
        settings = papers.settings("ben", settings)
        key, invitation = tmp_path / "anna.key", tmp_path / "anna.invitation"
        arguments = [str(key), str(invitation), public_text(papers.owner.public)]
    settings = settings.updated(expect=(name,), guards="off")
    report, values, printed = run(together(empty_broker, name, settings, arguments))
    # anna founded the model at 3, 5; ben took these values over and counted there.
    assert values == pytest.approx([3.0, 5.0])
    assert printed["value"] == pytest.approx([3.0, 5.0])
    # anna has handed everything over: ben holds its own weight and anna's.
    assert report.weight["all"] == [2 * ONE, 0, ONE]
    assert report.gossip["credited"] == 2
    assert report.gossip["acknowledged-credited"] >= 1


def test_the_peer_in_one_file_is_short_and_stands_alone() -> None:
    text = MINIMAL.read_text("utf-8")
    assert house.Source(MINIMAL).code() <= 200
    assert "import gossamer" not in text
    assert "from gossamer" not in text


# --- test vectors -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    return vectors.read()


def minimal(name: str) -> Any:
    """A function of the peer in one file."""
    return runpy.run_path(str(MINIMAL))[name]


def test_the_vectors_are_what_this_version_writes(known: dict[str, Any]) -> None:
    now = json.loads(json.dumps(vectors.make()))
    assert now == known, "if that is meant: python -m tests.golden.make vectors"


def test_messages_are_read_as_the_vectors_say(known: dict[str, Any]) -> None:
    for vector in known["messages"]:
        data, header = bytes.fromhex(vector["bytes"]), vector["header"]
        message = decode(data).message
        assert (message.sender, message.session) == (header["from"], header["session"])
        assert message.sequence == header["seq"]
        read, value = minimal("decode")(data)
        if vector["value"] is not None:
            assert isinstance(message, Give)
            assert message.value.tolist() == value == vector["value"]
            assert message.weight == int(header["weight"], 16)
            read["weight"] = read["weight"].hex()
        assert read == header
        assert decode(minimal("encode")(*minimal("decode")(data))).message.sequence == 7


def test_chunks_are_joined_to_the_message(known: dict[str, Any]) -> None:
    counts = []
    for vector in known["chunks"]:
        reassembler = Reassembler()
        packets = [bytes.fromhex(packet) for packet in vector["packets"]]
        joined = [reassembler.add(packet) for packet in packets]
        assert joined[:-1] == [None] * (len(packets) - 1)
        assert joined[-1] == bytes.fromhex(vector["message"])
        counts.append(len(packets))
    assert counts[0] == 1
    assert counts[1] > 1
    whole = known["chunks"][0]
    packet = minimal("chunk")(whole["sender"], bytes.fromhex(whole["message"]), whole["message_id"])
    assert packet.hex() == whole["packets"][0]


def test_the_signature_of_the_statement_is_valid(known: dict[str, Any]) -> None:
    vector = known["statement"]
    public = bytes.fromhex(vector["public"])
    data = bytes.fromhex(vector["bytes"])
    head, body = signed.read(data, vector["context"], lambda _: public)
    assert head["number"] == vector["head"]["number"]
    assert body.decode() == vector["body"]
    private = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(vector["private"]))
    assert minimal("statement")(private, vector["context"], head, body) == data
    assert minimal("peer_name")(vector["label"], public) == vector["name"]
    with pytest.raises(TrustError):
        signed.read(data, vector["context"] + "x", lambda _: public)


def test_the_sealed_packet_is_opened_by_its_receiver_alone(known: dict[str, Any]) -> None:
    vector = known["sealed"]
    sender, receiver = vector["sender"], vector["receiver"]
    ends = [(each["name"], bytes.fromhex(each["public"])) for each in (sender, receiver)]
    keys = [
        X25519PrivateKey.from_private_bytes(bytes.fromhex(each["private"]))
        for each in (sender, receiver)
    ]
    context = (
        vector["model"], sender["name"], sender["session"], receiver["name"], receiver["session"]
    )  # fmt: skip
    owner, packet = bytes.fromhex(vector["owner"]), bytes.fromhex(vector["packet"])
    sealed = minimal("seal")(
        keys[0], owner, vector["swarm"], *ends, vector["number"], context, packet,
        vector["revocations"],
    )  # fmt: skip
    assert sealed.hex() == vector["bytes"]
    unseal = minimal("unseal")
    arguments = (owner, vector["swarm"], *ends[::-1], context, sealed)
    assert unseal(keys[1], *arguments) == packet
    with pytest.raises(InvalidTag):
        unseal(X25519PrivateKey.generate(), *arguments)
