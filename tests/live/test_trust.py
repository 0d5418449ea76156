"""On a real mosquitto: what outsiders, other groups and revoked peers cannot do to live peers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from relay import withholding
from trusting import PAIR, Gate, Outsider, Patient, Swarmlet, config_of, windows
from waiting import until

from gossamer.gossip import ONE, Chunker, Give, encode, schema_hash, topics
from gossamer.gossip.security import (
    CardHead,
    Identity,
    StatusHead,
    TrustError,
    invite,
    sign_card,
    sign_status,
)
from gossamer.peer import PeerError, Status, schema_entries, traffic


def weight(reports, vector="global"):
    return sum(sum(report.weight[vector][:2]) for report in reports if vector in report.weight)


@pytest.fixture
def sent(monkeypatch):
    """Every value that a peer means to send, as bytes, by vector."""
    values: dict[str, list[bytes]] = {}

    def recording(message, schema, dtype):
        if isinstance(message, Give):
            values.setdefault(message.model, []).append(message.value.tobytes())
        return encode(message, schema, dtype)

    monkeypatch.setattr(traffic, "encode", recording)
    return values


def found(sent, heard):
    """How many 8-byte windows of parameters stand in what was heard, and how many there are."""
    said = set().union(*(windows(payload) for _, payload in heard))
    meant = set().union(*(windows(value, step=4) for values in sent.values() for value in values))
    return len(said & meant), len(meant)


@pytest.mark.parametrize("trust", ["swarm", "none"])
def test_an_outsider_reads_no_parameter(mosquitto, run, tmp_path, sent, trust):
    config = config_of(3, 4, PAIR, trust=trust)

    async def scenario():
        swarm = Swarmlet(config, tmp_path, mosquitto.url)
        async with Outsider(mosquitto.url, swarm.swarm) as eve:
            swarm.start_all()
            reports = await swarm.reports()
            await until(lambda: sum("/inbox/" in topic for topic, _ in eve.heard) > 20)
        return reports, eve.heard

    reports, heard = run(scenario())
    assert weight(reports) == 3 * ONE
    count, total = found(sent, heard)
    assert total > 500
    if trust == "swarm":
        assert count == 0
    else:
        assert count > total / 2  # the search finds what is there


def forged_give(swarm, sender, session, receiver, receiver_session):
    """A transfer that anybody would believe if nothing were sealed."""
    network = swarm.members[0].network
    value = np.full(network.read("global").numel(), 99.0, np.float32)
    give = Give("global", sender, session, 10_000, receiver, receiver_session, ONE, value)
    chunker = Chunker(f"{sender}/{session}")
    return list(chunker.split(encode(give, schema_hash(schema_entries(network, "global")))))


class Attack:
    """Answers everything that is said with replays, changes, forgeries and lies."""

    def __init__(self, swarm: Swarmlet):
        self._swarm, self.counts = swarm, dict.fromkeys(("packets", "cards", "statuses"), 0)
        self._sessions: dict[str, str] = {}
        self._before: dict[str, bytes] = {}
        self._eve = Identity.generate("eve")

    def __call__(self, topic: str, payload: bytes) -> list[tuple[str, bytes]]:
        where = topics.parse(topic)
        if where.kind == "metrics":
            self._sessions[where.peer] = json.loads(payload)["session"]
            return self._lies(where.peer)
        if not payload:
            return []
        if where.kind == "inbox":
            return self._packets(topic, payload)
        self.counts["cards" if where.kind == "card" else "statuses"] += 1
        changed = payload[:-1] + bytes([payload[-1] ^ 1])
        return [(topic, changed), *([(topic, payload + b" ")] if where.kind == "card" else [])]

    def _packets(self, topic: str, packet: bytes) -> list[tuple[str, bytes]]:
        self.counts["packets"] += 1
        before = self._before.get(topic, packet)
        self._before[topic] = packet
        others = [topics.inbox(self._swarm.swarm, name, "global") for name in self._swarm.names]
        return [
            (topic, packet),  # replayed
            *((other, packet) for other in others if other != topic),  # redirected
            (topic, packet[:-1] + bytes([packet[-1] ^ 1])),  # changed
            (topic, packet[:16] + (1 << 40).to_bytes(8, "little") + packet[24:]),  # numbered anew
            (topic, before[:32] + packet[32:]),  # one message's head, another's body
            (topic, packet[:32] + before[32:]),
            (topic, packet[:24] + (7).to_bytes(8, "little") + packet[32:]),  # of another list
        ]

    def _lies(self, peer: str) -> list[tuple[str, bytes]]:
        """In the peer's own name: that it left, that it holds 99s; and that we are a member."""
        swarm, eve = self._swarm.swarm, self._eve
        session = self._sessions[peer]
        left, head = (
            Status("left", session, reason="a lie").encode(),
            StatusHead(bytes(16), 10_000, 0),
        )
        lies = [
            (topics.status(swarm, peer), left),
            (topics.status(swarm, peer), sign_status(eve, swarm, head, left)),
        ]
        for other, their_session in self._sessions.items():
            if other != peer:
                packets = forged_give(self._swarm, peer, session, other, their_session)
                lies += [(topics.inbox(swarm, other, "global"), packet) for packet in packets]
        forged = invite(eve, swarm, eve.label, eve.public)  # not the owner's hand
        keys = bytes(range(32)), bytes(range(32))
        claim = CardHead(
            1.0, bytes(16), 1, *keys, "session", 1.0, frozenset({"global"}), forged, b""
        )  # fmt: skip
        card = sign_card(eve, swarm, claim, b"{}")
        return [*lies, (topics.card(swarm, eve.name), card)]


def test_an_outsider_injects_replays_reorders_and_impersonates_in_vain(mosquitto, run, tmp_path):
    """In lockstep the outcome is known: that of peers whom nobody disturbs."""
    quiet = config_of(4, 5, mode="rounds", trust="none")
    loud = quiet.model_copy(update={"name": quiet.name + "x", "trust": config_of(1, 1).trust})

    async def scenario(config, attack):
        swarm = Swarmlet(config, tmp_path / config.name, mosquitto.url)
        async with Outsider(mosquitto.url, swarm.swarm) as eve:
            learners, counts = {}, {}
            if attack:  # every round waits for its share of attacks
                eve.react = Attack(swarm)
                counts = eve.react.counts
                for index, member in enumerate(swarm.members):
                    ready = lambda rounds: counts["packets"] >= 20 * rounds  # noqa: E731
                    learners[index] = Patient(member.learner, ready)
            swarm.start_all(learners)
            return swarm, await swarm.reports(), counts

    calm, _, _ = run(scenario(quiet, attack=False))
    swarm, reports, counts = run(scenario(loud, attack=True))
    assert min(counts.values()) >= 4, counts
    assert counts["packets"] >= 80
    assert [report.rounds for report in reports] == [5] * 4
    assert weight(reports) == 4 * ONE
    for member, twin in zip(swarm.members, calm.members, strict=True):
        np.testing.assert_allclose(member.network.flat, twin.network.flat, atol=1e-5)
    dropped = {cause for report in reports for cause in report.dropped}
    for cause in ("replayed", "forged", "malformed", "signature", "identity", "uninvited"):
        assert f"untrusted-{cause}" in dropped, dropped
    for report in reports:  # one transfer from each of three others in every round, once
        assert report.gossip["credited"] == 3 * 5


def test_a_member_of_one_group_cannot_read_another_groups_model(mosquitto, run, tmp_path):
    config = config_of(3, 4, PAIR)

    async def scenario():
        swarm = Swarmlet(config, tmp_path, mosquitto.url)
        async with Outsider(mosquitto.url, swarm.swarm) as eve:
            swarm.start_all()
            reports = await swarm.reports()
        return swarm, reports, [data for topic, data in eve.heard if topic.endswith("/pair")]

    swarm, reports, packets = run(scenario())
    assert weight(reports) == 3 * ONE
    assert weight(reports, "pair") == 2 * ONE
    assert len(packets) >= 8
    curious = swarm.trust(2).keyring
    for packet in packets:
        for model in ("pair", "global"):
            with pytest.raises(TrustError):
                curious.open(model, packet, 0.0)


def test_a_peer_that_is_revoked_is_out_and_is_given_nothing_more(mosquitto, run, tmp_path):
    config = config_of(3, 8)

    async def scenario():
        swarm = Swarmlet(config, tmp_path, mosquitto.url)
        gate = Gate(swarm.members[0].learner, at=3)
        swarm.start_all({0: gate})
        await until(gate.reached.is_set)
        out = swarm.names[2]
        await swarm.publish_revocations(swarm.revoke(2))
        remaining = [swarm.trust(index) for index in (0, 1)]
        await until(lambda: all(out not in each.register.members for each in remaining))
        assert all(each.seal(out, "global", b"chunk") is None for each in remaining)
        gate.open.set()
        with pytest.raises(PeerError, match=f"peer {out}: its invitation was revoked"):
            await swarm.tasks.pop(2)
        reports = await swarm.reports()
        swarm.start(2)  # it tries again: the broker still has the list
        with pytest.raises(PeerError, match="its invitation was revoked"):
            await swarm.tasks[2]
        return reports

    reports = run(scenario())
    assert [report.rounds for report in reports] == [8, 8]


def test_a_list_that_the_broker_hides_from_two_reaches_them_through_the_third(
    mosquitto, run, tmp_path
):
    """The revoked peer never hears of it either, and learns nothing more all the same."""
    config = config_of(4, 12)

    async def scenario():
        connect = withholding(mosquitto.url, shown_to="0@")
        swarm = Swarmlet(config, tmp_path, mosquitto.url, connect)
        gates = {index: Gate(swarm.members[index].learner, at=3) for index in range(4)}
        swarm.start_all(gates)
        for gate in gates.values():
            await until(gate.reached.is_set)
        out = swarm.names[3]
        await swarm.publish_revocations(swarm.revoke(3))
        remaining = [swarm.trust(index).register for index in range(3)]
        await until(lambda: remaining[0].revocations.number == 1)
        for gate in gates.values():
            gate.open.set()
        await until(lambda: all(out not in each.members for each in remaining))
        assert swarm.trust(3).register.revocations.number == 0
        assert all(swarm.trust(i).seal(out, "global", b"chunk") is None for i in range(3))
        revoked = swarm.tasks.pop(3)
        reports = await swarm.reports()
        revoked.cancel()
        return reports

    reports = run(scenario())
    assert [report.rounds for report in reports] == [12] * 3


def test_a_peer_may_crash_and_come_back(mosquitto, run, tmp_path):
    config = config_of(3, 8, checkpoint=True)

    async def scenario():
        swarm = Swarmlet(config, tmp_path, mosquitto.url)
        gate = Gate(swarm.members[1].learner, at=3)
        for index, learner in ((0, None), (1, gate), (2, None)):
            swarm.start(index, learner, checkpoint=True)
        await until(gate.reached.is_set)
        await swarm.crash(0)
        before = swarm.trust(1).register.members[swarm.names[0]].incarnation
        swarm.start(0, checkpoint=True)
        others = [swarm.trust(index).register for index in (1, 2)]
        await until(
            lambda: all(each.members[swarm.names[0]].incarnation != before for each in others)
        )
        gate.open.set()
        return await swarm.reports()

    reports = run(scenario())
    assert [report.rounds for report in reports] == [8] * 3
    assert weight(reports) == 3 * ONE


@pytest.mark.parametrize("mode", ["rounds", "server"])
def test_a_swarm_learns_with_trust_as_without(mosquitto, run, tmp_path, mode):
    trusting = config_of(4, 5, mode=mode)
    plain = trusting.model_copy(
        update={"name": trusting.name + "x", "trust": config_of(1, 1, trust="none").trust}
    )

    async def scenario(config):
        swarm = Swarmlet(config, tmp_path / config.name, mosquitto.url)
        swarm.start_all()
        return swarm, await swarm.reports()

    (one, reports), (two, others) = run(scenario(trusting)), run(scenario(plain))
    assert weight(reports) == weight(others) == 4 * ONE
    for member, twin in zip(one.members, two.members, strict=True):
        np.testing.assert_allclose(member.network.flat, twin.network.flat, atol=1e-5)
