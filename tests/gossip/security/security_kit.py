"""Small swarms of peers with security, without a network: cards, statuses and lists are handed around."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gossamer.gossip import topics
from gossamer.gossip.chunks import Chunker, Reassembler
from gossamer.gossip.security import (
    Admission,
    CardHead,
    Identity,
    SecurityEvent,
    SwarmSecurity,
    invite,
    sign_card,
)
from gossamer.gossip.wire import Give, encode

SWARM = "garden"
SCHEMA = "0" * 16
OWNER = Identity.generate("owner")
ONLINE = b'{"state": "online"}'


@dataclass
class Clock:
    """Time that stands still until it is moved."""

    now: float = 0.0
    epoch: float = 1_800_000_000.0

    def wall(self) -> float:
        return self.epoch + self.now

    def monotonic(self) -> float:
        return self.now


@dataclass
class WrongClock:
    """A clock whose time of day is `by` seconds ahead."""

    clock: Clock
    by: float

    def wall(self) -> float:
        return self.clock.wall() + self.by

    def monotonic(self) -> float:
        return self.clock.monotonic()


@dataclass
class Person:
    """One peer: who it is, its invitation, and its present start."""

    identity: Identity
    admission: Admission
    security: SwarmSecurity
    session: str
    models: tuple[str, ...]
    clock: Clock | WrongClock
    heard: list[SecurityEvent] = field(default_factory=list)
    """What `exchange` made it hear."""

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def list_number(self) -> int:
        return self.security.register.revocations.number

    def give(
        self, to: Person, model: str = "global", sequence: int = 1, size: int = 50, seed: int = 0
    ) -> Give:
        value = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
        return Give(model, self.name, self.session, sequence, to.name, to.session, 1 << 32, value)

    def chunks(self, give: Give, limit: int = 4096) -> list[bytes]:
        chunker = Chunker(f"{self.name}/{self.session}", limit)
        return list(chunker.split(encode(give, SCHEMA)))

    def packets(self, to: Person, model: str = "global", **options: int) -> list[bytes]:
        """Sealed packets of one message; none, if they cannot be sealed."""
        limit = options.pop("limit", 4096)
        give = self.give(to, model, **options)
        sealed = [self.security.seal(to.name, model, chunk) for chunk in self.chunks(give, limit)]
        return [packet for packet in sealed if packet is not None]

    def forged_card(
        self,
        *,
        identity: Identity | None = None,
        admission: Admission | None = None,
        swarm: str = SWARM,
        **changes: Any,
    ) -> bytes:
        """A card on which this peer, which is hostile, says what it likes."""
        keyring = self.security.keyring
        admission = admission or self.admission
        head = CardHead(
            self.clock.wall(), keyring.incarnation, 1000, keyring.exchange, keyring.mask_public,
            self.session, self.clock.wall(), frozenset(self.models),
            admission.invitation, admission.endorsement,
        )  # fmt: skip
        return sign_card(identity or self.identity, swarm, replace(head, **changes), b"{}")


def wake(
    identity: Identity,
    admission: Admission,
    clock: Clock | WrongClock,
    models: tuple[str, ...] = ("global",),
    session: str = "",
    **options: Any,
) -> Person:
    session = session or f"s-{identity.label}"
    security = SwarmSecurity(
        identity, admission, OWNER.public,
        swarm=SWARM, session=session, models=models, since=clock.wall(),
        wall=clock.wall, clock=clock.monotonic, **options,
    )  # fmt: skip
    return Person(identity, admission, security, session, models, clock)


def restarted(person: Person, clock: Clock) -> Person:
    """The same peer after a crash, with what its checkpoint kept."""
    clock.now += 1
    return wake(
        person.identity, person.admission, clock, person.models, person.session,
        memory=person.security.snapshot(),
    )  # fmt: skip


def invited(
    label: str, models: tuple[str, ...] | None = None, owner: Identity = OWNER, swarm: str = SWARM
) -> tuple[Identity, Admission]:
    identity = Identity.generate(label)
    return identity, Admission(
        invite(owner, swarm, label, identity.public, models=models, days=30_000)
    )


def person(
    label: str, clock: Clock | WrongClock, models: tuple[str, ...] = ("global",), **options: Any
) -> Person:
    return wake(*invited(label, models), clock, models, **options)


def introduce(people: Sequence[Person], body: bytes = b"{}") -> None:
    """Everybody hears everybody's card and status."""
    for one in people:
        card, status = one.security.card(body), one.security.status(ONLINE)
        for other in people:
            if other is not one:
                other.security.receive(topics.card(SWARM, one.name), card)
                other.security.receive(topics.status(SWARM, one.name), status)


def group(*labels: str, models: tuple[str, ...] = ("global",)) -> tuple[list[Person], Clock]:
    """People of one group who know each other."""
    clock = Clock()
    people = []
    for label in labels:
        people.append(person(label, clock, models))
        clock.now += 0.01
    introduce(people)
    return people, clock


def exchange(
    people: Sequence[Person],
    clock: Clock,
    rounds: int = 3,
    seconds: float = 1.0,
    carries: Callable[[str, str], bool] = lambda _sender, _receiver: True,
) -> int:
    """Let packets of `tick` travel, as far as the broker carries them; returns how many were sent."""
    by_name = {one.name: one for one in people}
    sent = 0
    for _ in range(rounds):
        for one in people:
            packets, heard = one.security.tick()
            one.heard += heard
            for receiver, model, packet in packets:
                sent += 1
                if receiver in by_name and carries(one.name, receiver):
                    by_name[receiver].security.open(model, packet)
        clock.now += seconds
    return sent


def received(person: Person, packets: Sequence[bytes], model: str = "global") -> list[bytes]:
    """Whole messages that a receive path without guards would decode."""
    reassembler, found = Reassembler(), []
    for packet in packets:
        opened = person.security.open(model, packet)
        whole = None if opened is None else reassembler.add(opened.packet)
        if whole is not None:
            found.append(bytes(whole))
    return found


def hears_card(listener: Person, speaker: Person, card: bytes | None = None) -> bool:
    card = speaker.security.card(b"{}") if card is None else card
    return bool(listener.security.receive(topics.card(SWARM, speaker.name), card))


def understand(one: Person, other: Person, model: str = "global") -> bool:
    """Whether both take what the other sends."""
    return all(received(b, a.packets(b, model), model) for a, b in ((one, other), (other, one)))
