"""Exchanges in lockstep through the gossipers of live peers, for wires that change what they carry.

Slower than the arena's products: every value is written, and read, as a live peer would.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..gossip import FLOOR, ONE, Gossiper, Message, ServerMode, Store, is_finite
from ..gossip.compress import ROOM, SENT_KEPT, CompressError, Shapes, Traffic, parse
from ..models import ModelError
from .virtual.wire import Wire

NOW = 0.0
"""In lockstep everything arrives at once: nothing is ever waited for, repeated or asked back."""


class Lockstep:
    """One gossiper for each peer, as live peers have it; all of them count from the start.

    names: what peers are called, in order of their places. stores: their vectors. weights: how much each
        counts, 1 for a peer like any other. servers: per vector the place of the peer that averages it,
        for `serve`.
    """

    def __init__(
        self,
        names: Sequence[str],
        stores: Sequence[Store],
        weights: Sequence[float],
        wire: Wire,
        *,
        servers: Mapping[str, int] | None = None,
    ) -> None:
        self._names, self._stores = list(names), list(stores)
        self._places = {name: place for place, name in enumerate(names)}
        self._ends = [wire.end() for _ in names]
        self._modes = [] if servers is None else _modes(names, stores, servers)
        self._gossipers = [
            Gossiper(
                name, f"{name}/1", store,
                mode=self._modes[place] if self._modes else None,
                seed=place, lossy=wire.lossy, links=self._ends[place].links,
            )
            for place, (name, store) in enumerate(zip(names, stores, strict=True))
        ]  # fmt: skip
        for gossiper, weight in zip(self._gossipers, weights, strict=True):
            for vector in gossiper.vectors:
                gossiper.inject(vector, round(ONE * weight))
        self._met: set[tuple[int, int]] = set()
        self._round = 0
        self.bytes: Counter[str] = Counter()
        """Of the values that were sent so far, by vector."""
        for vector, server in (servers or {}).items():
            for place, gossiper in enumerate(self._gossipers):
                if place != server and vector in gossiper.vectors:
                    self._meet(place, server)

    @property
    def sent(self) -> int:
        """Bytes of all values that were sent so far."""
        return self.bytes.total()

    def traffic(self, vector: str) -> Traffic:
        """What compression and skipped pushes saved and distorted of one vector, over all peers."""
        return sum((end.traffic(vector) for end in self._ends), Traffic())

    def counted(self) -> list[tuple[str, int, Traffic]]:
        """Per vector that was sent, or kept back: its bytes, and what was saved of it."""
        seen = {vector for end in self._ends for vector in end.links.traffic}
        return [(v, self.bytes[v], self.traffic(v)) for v in sorted(seen | self.bytes.keys())]

    def weight(self, place: int, vector: str) -> float:
        """The weight that a peer holds, in peers."""
        return self._gossipers[place].weight(vector) / ONE

    def exchange(self, vector: str, targets: Mapping[int, Sequence[int]]) -> None:
        """Let peers give at once, equal parts to their targets and to themselves; then credit it all."""
        given: list[Message] = []
        for place, others in targets.items():
            if others:
                given += self._push(place, vector, others)
        self._deliver(given)

    def serve(self) -> None:
        """One round of every vector through its server."""
        for place, gossiper in enumerate(self._gossipers):
            for vector in gossiper.vectors:
                self._refuse_not_finite(place, vector)
            self._modes[place].begin_round(gossiper, self._round)
        while True:
            for gossiper in self._gossipers:
                gossiper.tick(NOW)
            given = [m for place in range(len(self._names)) for m in self._leaving(place)]
            if not given:
                break
            self._deliver(given)
        self._round += 1

    def _push(self, place: int, vector: str, others: Sequence[int]) -> list[Message]:
        gossiper, end = self._gossipers[place], self._ends[place]
        for other in others:
            self._meet(place, other)
        share = gossiper.weight(vector) // (len(others) + 1)
        if share < FLOOR:
            return []  # too little to split: the push is let pass
        if end.drift is not None and end.skips(vector, gossiper.value(vector), len(others)):
            return []
        shares = dict.fromkeys(sorted(self._names[other] for other in others), share)
        if not gossiper.push(vector, shares, NOW):
            self._refuse_not_finite(place, vector)
        return self._leaving(place)

    def _leaving(self, place: int) -> list[Message]:
        """What a gossiper sends, its bytes counted."""
        messages = self._gossipers[place].poll()
        for message in messages:
            self.bytes[message.vector] += self._ends[place].sent([message])
        return messages

    def _deliver(self, given: Sequence[Message]) -> None:
        """All transfers first, then the answers, as in a swarm whose links are equally fast."""
        receivers = [self._gossipers[self._places[give.receiver]] for give in given]
        for give, receiver in zip(given, receivers, strict=True):
            receiver.handle(give, NOW)
        for receiver in dict.fromkeys(receivers):
            for answer in receiver.poll():
                self._gossipers[self._places[answer.receiver]].handle(answer, NOW)

    def _meet(self, one: int, other: int) -> None:
        if (one, other) in self._met:
            return
        self._met |= {(one, other), (other, one)}
        for here, there in ((one, other), (other, one)):
            known = self._gossipers[there]
            self._gossipers[here].peer_online(known.peer, known.session, known.vectors)

    def _refuse_not_finite(self, place: int, vector: str) -> None:
        """Name the peer whose value is no number; live peers would go on without it."""
        if not is_finite(self._stores[place].read(vector)):
            raise ModelError(
                f"peer {self._names[place]!r}, model {vector!r}: values are not finite; lower the learning "
                "rate or look at the peer's data"
            )


def with_shapes(wire: Wire, shapes: Mapping[str, Shapes], sizes: Mapping[str, int]) -> Wire:
    """The wire for vectors made of these blocks; ModelError if its compressor does not fit one of them.

    Blocks that do not make up their vector are of no use to anybody, here as with live peers.
    """
    fit = {
        vector: each
        for vector, each in shapes.items()
        if sum(math.prod(shape) for shape in each) == sizes[vector]
    }
    if wire.compress is not None:
        if wire.dtype != "float32":
            raise ModelError(
                f"compress = {wire.compress!r} and dtype = {wire.dtype!r} exclude each other: leave one out"
            )
        for vector, each in fit.items():
            try:
                parse(wire.compress).fit(each)
            except CompressError as error:
                raise ModelError(f"model {vector!r}: {error}") from None
    return replace(wire, shapes=fit)


def references(peers: int, links: int, coordinates: int) -> int:
    """Bytes that compressed links will remember, at most: both ends share what they have in common."""
    return min(peers * ROOM, SENT_KEPT * links * 4 * coordinates)


def _modes(
    names: Sequence[str], stores: Sequence[Store], servers: Mapping[str, int]
) -> list[ServerMode]:
    """What servers and their clients follow; a vector without a server is averaged by its peer alone."""
    who = {vector: names[place] for vector, place in servers.items()}
    return [
        ServerMode(name, {vector: who.get(vector, name) for vector in store.names()})
        for name, store in zip(names, stores, strict=True)
    ]
