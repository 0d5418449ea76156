"""Small swarms of trusting peers, without a network: cards, statuses and keys are handed around."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gossamer.gossip import topics
from gossamer.gossip.chunks import Chunker, Reassembler
from gossamer.gossip.messages import Give
from gossamer.gossip.security import Admission, Identity, Trust, invite
from gossamer.gossip.wire import encode

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
class Person:
    """One peer: who it is, its paper, and its present life."""

    identity: Identity
    admission: Admission
    trust: Trust
    session: str
    models: tuple[str, ...]
    captured: list[tuple[str, str, bytes]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.identity.name

    def give(
        self, to: Person, model: str = "global", sequence: int = 1, size: int = 50, seed: int = 0
    ) -> Give:
        value = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
        return Give(model, self.name, self.session, sequence, to.name, to.session, 1 << 32, value)

    def chunks(self, give: Give, limit: int = 4096) -> list[bytes]:
        chunker = Chunker(f"{self.name}/{self.session}", limit)
        return list(chunker.split(encode(give, SCHEMA)))

    def packets(self, to: Person, model: str = "global", **options: int) -> list[bytes]:
        """Sealed packets of one message."""
        limit = options.pop("limit", 4096)
        give = self.give(to, model, **options)
        sealed = [self.trust.seal(to.name, model, chunk) for chunk in self.chunks(give, limit)]
        return [packet for packet in sealed if packet is not None]


def wake(
    identity: Identity,
    admission: Admission,
    clock: Clock,
    models: tuple[str, ...] = ("global",),
    session: str = "",
    **options: object,
) -> Person:
    session = session or f"s-{identity.label}"
    trust = Trust(
        identity, admission, OWNER.public,
        swarm=SWARM, session=session, models=models, since=clock.wall(),
        wall=clock.wall, clock=clock.monotonic, **options,
    )  # fmt: skip
    return Person(identity, admission, trust, session, models)


def papers(
    label: str, models: tuple[str, ...] | None = None, owner: Identity = OWNER, swarm: str = SWARM
) -> tuple[Identity, Admission]:
    identity = Identity.generate(label)
    return identity, Admission(
        invite(owner, swarm, label, identity.public, models=models, days=30_000)
    )


def person(label: str, clock: Clock, models: tuple[str, ...] = ("global",)) -> Person:
    return wake(*papers(label, models), clock, models)


def introduce(people: list[Person], body: bytes = b"{}") -> None:
    """Everybody hears everybody's card and status."""
    for one in people:
        card, status = one.trust.card(body), one.trust.status(ONLINE)
        for other in people:
            if other is not one:
                other.trust.hear(topics.card(SWARM, one.name), card)
                other.trust.hear(topics.status(SWARM, one.name), status)


def settle(people: list[Person], clock: Clock, rounds: int = 12, seconds: float = 1.0) -> None:
    """Let keys travel until nobody has anything to say."""
    by_name = {one.name: one for one in people}
    quiet = 0
    for _ in range(rounds):
        sent = 0
        for one in people:
            keys, _ = one.trust.tick()
            for receiver, model, packet in keys:
                sent += 1
                if receiver in by_name:
                    by_name[receiver].trust.open(model, packet)
        quiet = 0 if sent else quiet + 1
        if quiet == 3:
            return
        clock.now += seconds


def group(*labels: str, models: tuple[str, ...] = ("global",)) -> tuple[list[Person], Clock]:
    """People of one group who know each other and have its keys."""
    clock = Clock()
    people = []
    for label in labels:
        people.append(person(label, clock, models))
        clock.now += 0.01  # the first is the eldest
    introduce(people)
    settle(people, clock)
    return people, clock


def received(person: Person, packets: list[bytes], model: str = "global") -> list[bytes]:
    """Whole messages that a receive path without guards would decode."""
    reassembler, found = Reassembler(), []
    for packet in packets:
        opened = person.trust.open(model, packet)
        whole = None if opened is None else reassembler.add(opened.packet)
        if whole is not None:
            found.append(bytes(whole))
    return found
