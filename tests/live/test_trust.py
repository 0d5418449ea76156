"""On a real mosquitto: what outsiders, other groups and revoked peers cannot do to live peers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from swarm_kit import wait_for
from trusting import PAIR, Gate, Outsider, Patient, Swarmlet, config_of, keys_of, windows

from gossamer.gossip import ONE, Chunker, Give, encode, topics
from gossamer.gossip.trust import (
    Admission,
    Claim,
    Edition,
    Identity,
    ModelKey,
    TrustError,
    invite,
    sign_card,
    sign_status,
)
from gossamer.peer import PeerError, Status, schema_hashes
from gossamer.peer import outgoing as outgoing_module
from gossamer.peer import peer as peer_module


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

    monkeypatch.setattr(outgoing_module, "encode", recording)
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
            await wait_for(lambda: sum("/inbox/" in topic for topic, _ in eve.heard) > 20)
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
    return list(chunker.split(encode(give, schema_hashes(network)["global"])))


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
            (topic, before[:40] + packet[40:]),  # one message's head, another's body
            (topic, packet[:40] + before[40:]),
        ]

    def _lies(self, peer: str) -> list[tuple[str, bytes]]:
        """In the peer's own name: that it left, that it holds 99s; and that we are a member."""
        swarm, eve = self._swarm.swarm, self._eve
        session = self._sessions[peer]
        left = Status("left", session, reason="a lie").encode()
        lies = [
            (topics.status(swarm, peer), left),
            (topics.status(swarm, peer), sign_status(eve, swarm, bytes(16), 10_000, left)),
        ]
        for other, their_session in self._sessions.items():
            if other != peer:
                packets = forged_give(self._swarm, peer, session, other, their_session)
                lies += [(topics.inbox(swarm, other, "global"), packet) for packet in packets]
        paper = Admission(invite(eve, swarm, eve.label, eve.public))  # not the owner's hand
        keys = bytes(range(32)), bytes(range(32))
        claim = Claim(Edition(1.0, bytes(16), 1), *keys, "session", 1.0, frozenset({"global"}))
        card = sign_card(eve, swarm, paper, claim, b"{}")
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


@pytest.mark.parametrize("claims", ["honestly", "more than its paper says"])
def test_a_member_of_one_group_cannot_read_another_groups_model(
    mosquitto, run, tmp_path, monkeypatch, claims
):
    config = config_of(3, 4, PAIR)
    begin = peer_module.begin_trust

    def cheating(credentials, name, *args, **kwargs):
        """Peer 2 says on its card that it shares the pair's model too."""
        trust = begin(credentials, name, *args, **kwargs)
        if name.startswith("2@") and claims != "honestly":
            trust._models |= {"pair"}
            trust.keyring._models["pair"] = ModelKey("pair", name, 0.0)
        return trust

    monkeypatch.setattr(peer_module, "begin_trust", cheating)

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
    curious, first, second = swarm.trust(2), swarm.trust(0), swarm.trust(1)
    assert keys_of(first, "pair") & keys_of(second, "pair")
    if claims != "honestly":
        assert not keys_of(curious, "pair") & (keys_of(first, "pair") | keys_of(second, "pair"))
        assert sum(r.dropped.get("untrusted-not-a-member", 0) for r in reports[:2]) > 0
    for packet in packets:
        with pytest.raises(TrustError):
            curious.keyring.open("pair", packet, 0.0)


def test_a_peer_that_is_revoked_is_out_and_its_keys_open_nothing_more(mosquitto, run, tmp_path):
    config = config_of(3, 8)

    async def scenario():
        swarm = Swarmlet(config, tmp_path, mosquitto.url)
        gate = Gate(swarm.members[0].learner, at=3)
        swarm.start_all({0: gate})
        await wait_for(gate.reached.is_set)
        out = swarm.names[2]
        before = set.union(*(keys_of(swarm.trust(index), "global") for index in range(3)))
        await swarm.publish_revocations(swarm.revoke(2))
        remaining = [swarm.trust(index) for index in (0, 1)]
        await wait_for(lambda: all(out not in each.register.members for each in remaining))
        gate.open.set()
        with pytest.raises(PeerError, match=f"peer {out}: may take part no longer"):
            await swarm.tasks.pop(2)
        last = keys_of(swarm.trust(2), "global")
        reports = await swarm.reports()
        current = [each.keyring._models["global"] for each in remaining]
        # Who leaves last draws another key yet, when the other is gone.
        assert all(each.keys[each.current] not in before | last for each in current)
        shared = keys_of(remaining[0], "global") & keys_of(remaining[1], "global")
        assert shared - before - last
        swarm.start(2)  # it tries again: the broker still has the list
        with pytest.raises(PeerError, match="no longer"):
            await swarm.tasks[2]
        return reports

    reports = run(scenario())
    assert [report.rounds for report in reports] == [8, 8]


def test_the_keeper_of_the_key_may_crash_and_come_back(mosquitto, run, tmp_path):
    config = config_of(3, 8, checkpoint=True)

    async def scenario():
        swarm = Swarmlet(config, tmp_path, mosquitto.url)
        swarm.start(0, checkpoint=True)
        await wait_for(lambda: swarm.is_introduced(0))  # the eldest
        gate = Gate(swarm.members[1].learner, at=3)
        swarm.start(1, gate, checkpoint=True)
        swarm.start(2, checkpoint=True)
        await wait_for(gate.reached.is_set)
        keeper = swarm.trust(1).keyring._models["global"].keeper
        assert keeper == swarm.names[0]
        await swarm.crash(0)
        swarm.start(0, checkpoint=True)
        others = [swarm.trust(index).keyring._models["global"] for index in (1, 2)]
        await wait_for(lambda: all(each.keeper != keeper for each in others))
        gate.open.set()
        reports = await swarm.reports()
        # To the other two it is now the youngest, so the key in use is another's.
        assert all(each.current.keeper != keeper for each in others)
        return reports

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
