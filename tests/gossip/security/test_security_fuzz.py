"""Mutated messages, by the thousand, over the whole receive path: nothing raises, nothing grows.

`GOSSAMER_FUZZ=200000 pytest --timeout 1800 tests/gossip/security/test_security_fuzz.py` runs that many
(about a minute). The seed is fixed: what fails, fails again.
"""

from __future__ import annotations

import logging
import os
import resource
from collections import Counter

import numpy as np
from security_kit import OWNER, SCHEMA, SWARM, Person, exchange, group, person

from gossamer.gossip import ONE, Ack, Chunker, DictStore, Gossiper, Recall, encode, topics
from gossamer.gossip.pushsum import MAX_WEIGHT
from gossamer.gossip.security import (
    Death,
    Guards,
    GuardSettings,
    Intake,
    Revocations,
    guard,
    revocation_topic,
    sign_death,
)

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
        self.guards = Guards(GuardSettings(distance=10, norm=10, outlier=None, rate=1e9, burst=1e9))
        guard(self.gossiper, self.guards)
        self.intake = Intake(
            self.ben.security, {"global": SCHEMA}, guards=self.guards,
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
            self.ben.security.receive(at, statement)
        exchange([self.anna, self.ben, self.carl], self.clock, rounds=6)  # all have the list now

    def _statements(self) -> list[tuple[str, bytes]]:
        found = [(revocation_topic(SWARM), Revocations().add(["x@y"]).sign(OWNER, SWARM))]
        for one in (self.anna, self.carl):
            found.append((topics.card(SWARM, one.name), one.security.card(b'{"session": "s"}')))
            found.append(
                (topics.status(SWARM, one.name), one.security.status(b'{"state": "online"}'))
            )
            death = Death(one.session, "a test", "owner", 0.0)
            found.append((topics.death(SWARM, one.name), sign_death(OWNER, SWARM, one.name, death)))
        dora = person("dora", self.clock)  # who has left, and whose card nobody knows
        found.append((topics.status(SWARM, dora.name), dora.security.status(b'{"state": "left"}')))
        return found

    def state(self) -> tuple[object, ...]:
        """Everything that a message could change."""
        security = self.ben.security
        return (
            self.gossiper.value("global").tobytes(),
            self.gossiper.weight("global"),
            repr(sorted(self.gossiper.ledger.verdicts())),
            dict(security.register.members),
            security.register.revocations,
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
        self.ben.security.receive(at, mutate(self.rng, data, others))

    def member(self) -> None:
        """Carl, who can seal what he likes: broken chunks, broken messages, broken lists."""
        carl, ben = self.carl, self.ben
        inside = self._member_packets(carl)
        if self.rng.random() < 0.1:
            _, data = self.statements[0]
            inside = [mutate(self.rng, data, [data])]
        packets = [carl.security.seal(ben.name, "global", packet) for packet in inside]
        for packet in packets:
            message = self.intake.take("global", packet, self.clock.now)
            if message is not None:
                self.gossiper.handle(message, self.clock.now)
                self.gossiper.poll()
        ben.security.tick()

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


MESSAGES = int(os.environ.get("GOSSAMER_FUZZ", "4000"))
SHARES = {"outsider": 0.55, "publisher": 0.15, "member": 0.3}
GROWTH_KILOBYTES = 32 << 10


def test_no_mutated_message_raises_changes_or_fills_anything():
    logging.disable(logging.WARNING)
    target = Target(seed=1)
    target.deliver()
    kinds = list(SHARES)
    order = target.rng.choice(len(kinds), size=MESSAGES, p=list(SHARES.values()))
    done, start = dict.fromkeys(kinds, 0), 0
    try:
        for number, kind in enumerate(order):
            if number == MESSAGES // 4:  # caches are full by now
                start = peak()
            name = kinds[kind]
            before = target.state() if name != "member" else None
            getattr(target, name)()
            done[name] += 1
            if before is not None:
                assert target.state() == before, (number, name)
            else:
                check_sound(target)
    finally:
        logging.disable(logging.NOTSET)
    assert peak() - start < GROWTH_KILOBYTES
    assert target.intake.reassembler.held_bytes < 64 * 2000  # its bounds on unfinished messages
    assert target.intake.reassembler.unfinished <= 64
    assert min(done.values()) > MESSAGES // 20
    # It reached everything: security, chunks, the wire format, guards, and the books.
    causes = {cause.removeprefix("untrusted-") for cause in target.ben.security.counters}
    assert causes >= {"malformed", "unknown-sender", "forged", "replayed", "stale", "signature"}
    assert set(target.dropped) >= {"garbage", "truncated", "trailing", "checksum", "too-large"}
    assert target.gossiper.counters["credited"] > 0


def peak() -> int:
    """Kilobytes that the process has held at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def check_sound(target: Target) -> None:
    """A member can be credited; what it cannot do is make values that are not, or a broken book."""
    value = target.gossiper.value("global")
    assert np.isfinite(value).all()
    assert 0 < target.gossiper.weight("global") <= MAX_WEIGHT
    assert set(target.ben.security.register.members) == {target.anna.name, target.carl.name}
    assert target.ben.list_number == 1


def test_the_untouched_messages_would_have_passed():
    """Or the fuzzer would only show that nothing ever gets through."""
    target = Target(seed=2)
    taken = [target.intake.take("global", packet, 0.0) for packet in target.captured]
    messages = [message for message in taken if message is not None]
    assert [message.sequence for message in messages] == list(range(1, 9))
    for at, statement in target.statements[1:3]:
        target.clock.now += 1
        assert target.ben.security.receive(at, statement) is not None
    assert not target.ben.security.counters
