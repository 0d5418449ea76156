"""A seeded mutator and a whole receive path to throw its products at."""

from __future__ import annotations

from collections import Counter

import msgpack
import numpy as np
from trust_kit import OWNER, SCHEMA, SWARM, Person, group, person

from gossamer.gossip import DictStore, topics
from gossamer.gossip.chunks import Chunker
from gossamer.gossip.gossiper import Gossiper
from gossamer.gossip.messages import Ack, Recall
from gossamer.gossip.pushsum import ONE
from gossamer.gossip.trust import (
    Death,
    Guards,
    GuardSettings,
    Revocations,
    revocation_topic,
    sign_death,
)
from gossamer.gossip.trust.guarded import guard
from gossamer.gossip.trust.intake import Intake
from gossamer.gossip.trust.keyring import _NO_EPOCH
from gossamer.gossip.wire import encode

SIZE = 300
WIDE = bytes([0xFF] * 4)
INTERESTING = [b"\x00", b"\xff", b"\x7f", b"\x80", b"\xc1", b"\x93", b"\xdd" + WIDE, b"\xdf" + WIDE]


def mutate(rng: np.random.Generator, data: bytes, others: list[bytes]) -> bytes:
    """`data` with one to four things wrong with it."""
    out = bytearray(data)
    for _ in range(rng.integers(1, 5)):
        at = int(rng.integers(0, len(out) + 1))
        match rng.integers(0, 8):
            case 0 if out:
                out[at % len(out)] ^= 1 << int(rng.integers(8))
            case 1 if out:
                out[at % len(out)] = int(rng.integers(256))
            case 2:
                del out[at:]
            case 3:
                out[at:at] = rng.bytes(int(rng.integers(1, 64)))
            case 4:
                del out[at : at + int(rng.integers(1, 32))]
            case 5:
                other = others[rng.integers(len(others))]
                out[at:] = other[at:]
            case 6:
                out[at : at + 8] = INTERESTING[rng.integers(len(INTERESTING))]
            case _:
                number = (0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)[rng.integers(6)]
                out[at : at + 8] = number.to_bytes(8, "little")
    return bytes(out)


class Target:
    """Ben, with everything that a live peer has between the broker and its parameters."""

    def __init__(self, seed: int) -> None:
        (self.anna, self.ben, self.carl), self.clock = group("anna", "ben", "carl")
        self.rng = np.random.default_rng(seed)
        self.dropped: Counter[str] = Counter()
        store = DictStore({"global": np.linspace(-1, 1, SIZE).astype(np.float32)})
        self.gossiper = Gossiper(self.ben.name, self.ben.session, store, seed=0)
        self.gossiper.inject("global", ONE)
        for other in (self.anna, self.carl):
            self.gossiper.peer_online(other.name, other.session, ["global"])
        self.guards = Guards(
            GuardSettings(distance=10, norm=10, outlier=None, rate=1e9, burst=1e9, strikes=10**9)
        )
        guard(self.gossiper, self.guards, self.clock.monotonic)
        self.intake = Intake(
            self.ben.trust, {"global": SCHEMA}, guards=self.guards,
            drop=lambda cause, _: self.dropped.update([cause]),
        )  # fmt: skip
        self.captured = [
            packet
            for sequence in range(8)
            for packet in self.anna.packets(self.ben, size=SIZE, sequence=sequence + 1, limit=500)
        ]
        self.statements = self._statements()

    def deliver(self) -> None:
        """Take in the true messages, so that what the attackers have captured is not news."""
        for packet in self.captured:
            message = self.intake.take("global", packet, self.clock.now)
            if message is not None:
                self.gossiper.handle(message, self.clock.now)
        self.gossiper.poll()
        for at, statement in self.statements:
            self.ben.trust.hear(at, statement)

    def _statements(self) -> list[tuple[str, bytes]]:
        found = [(revocation_topic(SWARM), Revocations().add(["x@y"]).sign(OWNER, SWARM))]
        for one in (self.anna, self.carl):
            found.append((topics.card(SWARM, one.name), one.trust.card(b'{"session": "s"}')))
            found.append((topics.status(SWARM, one.name), one.trust.status(b'{"state": "online"}')))
            death = Death(one.session, "a test", "owner", 0.0)
            found.append((topics.death(SWARM, one.name), sign_death(OWNER, SWARM, one.name, death)))
        dora = person("dora", self.clock)  # who has left, and whose card nobody knows
        found.append((topics.status(SWARM, dora.name), dora.trust.status(b'{"state": "left"}')))
        return found

    def state(self) -> tuple[object, ...]:
        """Everything that a message could change."""
        trust = self.ben.trust
        key = trust.keyring._models["global"]
        return (
            self.gossiper.value("global").tobytes(),
            {v: self.gossiper.weight(v) for v in self.gossiper.models},
            repr(sorted(self.gossiper.ledger.lines())),
            dict(trust.register.members),
            trust.register.revocations,
            key.current,
            dict(key.keys),
        )

    # --- three kinds of attackers -----------------------------------------------------------------

    def outsider(self) -> None:
        """Anything at all into the inbox, made from what was captured."""
        data = self.captured[self.rng.integers(len(self.captured))]
        message = self.intake.take("global", mutate(self.rng, data, self.captured), self.clock.now)
        assert message is None

    def publisher(self) -> None:
        """Anything at all on the topics of cards, statuses and revocations."""
        at, data = self.statements[self.rng.integers(len(self.statements))]
        others = [statement for _, statement in self.statements]
        self.ben.trust.hear(at, mutate(self.rng, data, others))

    def member(self) -> None:
        """Carl, who can seal what he likes: broken chunks, broken messages, broken key messages."""
        carl, ben = self.carl, self.ben
        keyring = carl.trust.keyring
        channel = keyring._channels.get(ben.name)
        assert channel is not None
        if self.rng.random() < 0.1:
            inside = {"kind": "key", "number": 1, "keeper": carl.name, "key": bytes(32)}
            plain = bytes(msgpack.packb(inside) or b"")
            packets = [
                keyring._seal(channel, "global", _NO_EPOCH, mutate(self.rng, plain, [plain]))
            ]
        else:
            packets = [
                carl.trust.seal(ben.name, "global", packet) for packet in self._member_packets(carl)
            ]
        for packet in packets:
            message = self.intake.take("global", packet, self.clock.now)
            if message is not None:
                self.gossiper.handle(message, self.clock.now)
                self.gossiper.poll()

    def _member_packets(self, carl: Person) -> list[bytes]:
        sequence = int(self.rng.integers(1, 2**40))
        give = carl.give(self.ben, sequence=sequence, size=SIZE, seed=sequence % 100)
        ends = (carl.name, carl.session, self.ben.name, self.ben.session)
        message = [
            give,
            Recall("global", *ends, sequence),
            Ack("global", *ends, sequence, "void"),
        ][self.rng.choice(3, p=[0.8, 0.1, 0.1])]
        if self.rng.random() < 0.5:  # a sound envelope around a broken message
            data = b"".join(bytes(buffer) for buffer in encode(message, SCHEMA))
            broken = mutate(self.rng, data, [data])
            return list(Chunker(f"{carl.name}/{carl.session}", 500).split([broken]))
        chunks = list(carl.chunks(give, limit=500))
        at = int(self.rng.integers(len(chunks)))
        tail = mutate(self.rng, chunks[at][16:], [chunk[16:] for chunk in chunks])
        chunks[at] = chunks[at][:16] + tail
        return chunks
