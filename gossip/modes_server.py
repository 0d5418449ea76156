"""One averaging server per vector: clients give it all they have, it gives back the mean.

The same peers and the same ledger as gossip without a server: giving everything to the server and
getting one's own weight back at the mean are two transfers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .messages import Give

if TYPE_CHECKING:
    from .gossiper import Gossiper

GATHER, RETURN = 0, 1
"""The two exchanges of a round: clients to server, server to clients."""


@dataclass(slots=True)
class _Client:
    """A vector that another peer averages; `given` while its mass is with the server."""

    server: str
    round: int = -1
    done: int = -1
    given: bool = False


@dataclass(slots=True)
class _Server:
    """A vector that this peer averages; `pot` is what each client put in and shall get back."""

    round: int = -1
    done: int = -1
    closed: bool = False
    pot: dict[str, int] = field(default_factory=dict)


class ServerMode:
    """Rounds through a server. Different vectors may have different servers.

    The driver calls `begin_round(gossiper, r)` with r = 0, 1, 2, … after training, on clients and
    servers alike, and ticks until `finished(r)`. A server closes a round when all its neighbours for
    that vector have given, or when its driver calls `close_round` because it waited long enough; so
    tell it of its clients (`peer_online`) before the round. A client that comes too late takes part
    in the server's next round, and is then finished with that.

    While its mass is with the server a client holds no weight: training in that time is lost. A
    server may learn too: what it holds itself is part of the mean. Peers inject their weight at
    the start; a client without weight has nothing to give and is not averaged.
    """

    def __init__(self, peer: str, servers: Mapping[str, str]) -> None:
        self._clients = {v: _Client(s) for v, s in servers.items() if s != peer}
        self._own = {v: _Server() for v, s in servers.items() if s == peer}
        self._gone: set[str] = set()
        """Whose session was gone for good once: where they are not back, nobody waits for them."""

    def begin_round(self, gossiper: Gossiper, number: int) -> None:
        """Start averaging all vectors; training should pause until `finished(number)`."""
        named = self._clients.keys() | self._own.keys()
        if named != set(gossiper.vectors):
            raise ValueError(
                f"server mode: servers are named for {sorted(named)}, but peer {gossiper.peer!r} "
                f"has the vectors {list(gossiper.vectors)}"
            )
        for client in self._clients.values():
            client.round = max(client.round, number)
        for vector, server in self._own.items():
            server.round = max(server.round, number)
            gossiper.release(vector)

    def finished(self, number: int) -> bool:
        """Whether this round is over: the means are back, or will never be (a server is gone)."""
        states = [*self._clients.values(), *self._own.values()]
        return all(state.done >= number for state in states)

    def close_round(self, vector: str) -> None:
        """Wait no longer: average what has arrived (a driver's deadline, on the server)."""
        server = self._own[vector]
        server.closed = server.round > server.done

    def admit(self, give: Give) -> bool:
        """Hold clients' mass while no round of theirs is open; untagged mass joins at once."""
        server = self._own.get(give.vector)
        if give.tag is None or give.tag[1] != GATHER or server is None:
            return True
        return server.round > server.done and give.tag[0] <= server.round and not server.closed

    def credited(self, give: Give) -> None:
        """Note a client's stake, or that the mean came back."""
        if give.tag is None:
            return
        number, exchange = give.tag
        if exchange == GATHER and give.vector in self._own:
            pot = self._own[give.vector].pot
            pot[give.sender] = pot.get(give.sender, 0) + give.weight
        elif exchange == RETURN and give.vector in self._clients:
            client = self._clients[give.vector]
            client.given = False
            client.done = max(client.done, number)

    def refused(self, give: Give) -> None:
        """Average without a refused client; do without a refused mean, whose mass the server keeps."""
        if give.tag is None:
            return
        number, exchange = give.tag
        if exchange == GATHER and give.vector in self._own:
            self._own[give.vector].pot.setdefault(give.sender, 0)
        elif exchange == RETURN and give.vector in self._clients:
            client = self._clients[give.vector]
            client.given = False
            client.done = max(client.done, number)

    def returned(self, give: Give) -> None:
        """End a client's round without a mean: the server refused its mass, or is gone.

        A server keeps what a client refused for it: it goes back with the next round's mean.
        """
        server = self._own.get(give.vector)
        if server is not None and give.weight and give.tag is not None and give.tag[1] == RETURN:
            server.pot[give.receiver] = server.pot.get(give.receiver, 0) + give.weight
        client = self._clients.get(give.vector)
        if client is not None and client.given and give.receiver == client.server:
            client.given = False
            client.done = client.round

    def gone(self, peer: str) -> None:
        """Keep a lost client's stake in the average; expect nothing from a lost server."""
        self._gone.add(peer)
        for server in self._own.values():
            server.pot.pop(peer, None)
        for client in self._clients.values():
            if client.server == peer and client.given:
                client.given = False
                client.done = client.round

    def step(self, gossiper: Gossiper, now: float) -> None:
        """Give to the servers, and give back as a server, whatever is due."""
        for vector, client in self._clients.items():
            if client.round > client.done:
                self._step_client(gossiper, vector, client, now)
        for vector, server in self._own.items():
            if server.round > server.done:
                self._step_server(gossiper, vector, server, now)

    def snapshot(self) -> dict[str, Any]:
        """Return how far every vector has come."""
        return {
            "clients": {v: [c.round, c.done, c.given] for v, c in self._clients.items()},
            "own": {v: [s.round, s.done, s.closed, dict(s.pot)] for v, s in self._own.items()},
            "gone": sorted(self._gone),
        }

    def restore(self, data: dict[str, Any]) -> None:
        """Take over how far every vector had come."""
        self._gone = set(data.get("gone", ()))
        for vector, (number, done, given) in data["clients"].items():
            server = self._clients[vector].server
            self._clients[vector] = _Client(server, number, done, given)
        for vector, (number, done, closed, pot) in data["own"].items():
            self._own[vector] = _Server(number, done, closed, dict(pot))

    def _step_client(self, gossiper: Gossiper, vector: str, client: _Client, now: float) -> None:
        weight = gossiper.weight(vector)
        if client.given:
            return
        if weight == 0:
            gossiper.counters["nothing-to-give"] += 1
            client.done = client.round
        elif client.server in gossiper.free_neighbours(vector, online_only=False):
            tag = (client.round, GATHER)
            given = gossiper.push(vector, {client.server: weight}, now, tag, whole=True)
            # What cannot be written stays here: a server that knows this averages without it.
            client.given = given or gossiper.skip(vector, [client.server], now, tag)
        elif client.server in self._gone.difference(gossiper.neighbours(vector)):
            client.done = client.round  # it went while we trained: go on with what we have

    def _step_server(self, gossiper: Gossiper, vector: str, server: _Server, now: float) -> None:
        if not server.closed:
            server.closed = server.pot.keys() >= set(gossiper.neighbours(vector))
        if server.closed:
            # Mass may come from somebody who is no more: its stake, too, stays in the average.
            for peer in self._gone.difference(gossiper.neighbours(vector)):
                server.pot.pop(peer, None)
            free = gossiper.free_neighbours(vector, online_only=False)
            server.pot = {peer: stake for peer, stake in server.pot.items() if stake}
            shares = {peer: server.pot[peer] for peer in free if peer in server.pot}
            back = (server.round, RETURN)
            if shares and gossiper.push(vector, shares, now, back, whole=True):
                for peer in shares:
                    del server.pot[peer]
            elif shares and len(shares) == len(server.pot):
                # No mean that can be written: what they put in stays here, and is theirs when there is.
                gossiper.skip(vector, shares, now, back)
                server.closed = False
                server.done = server.round
            if not server.pot:
                server.closed = False
                server.done = server.round
