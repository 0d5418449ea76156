"""When and to whom a peer pushes: a mode decides, the ledger below is the same for all.

A mode is a small object that a `Gossiper` is given. It is asked whether a received transfer may be
credited now, told what was credited and who is gone, and pushes from `step`. Its state is part of
the gossiper's snapshot, so that a restart continues where the last checkpoint was.

`PacedMode` pushes at the pace of training and never waits; `RoundsMode` averages in lockstep with the
neighbours, `ServerMode` through one server per partial model. The base, `Mode`, leaves all to the driver.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from .compress import Traffic
from .pushsum import FLOOR, Array, portion
from .wire import Give

if TYPE_CHECKING:
    from .gossiper import Gossiper

GATHER, RETURN = 0, 1
"""The two exchanges of a server's round: clients to server, server to clients."""


class Mode:
    """What a gossiper asks of its mode. This one credits everything and never pushes: its driver does."""

    def admit(self, give: Give) -> bool:
        """Return whether to credit this transfer now; if not, it is deferred, unanswered, until released."""
        return True

    def credited(self, give: Give) -> None:
        """Note that a transfer was credited."""

    def refused(self, give: Give) -> None:
        """Note that a transfer was refused: its sender takes the mass back and sends no other."""

    def returned(self, give: Give) -> None:
        """Note that an own transfer was taken back: refused, recalled, or its receiver is gone."""

    def gone(self, peer: str) -> None:
        """Note that a session of this peer is gone for good: nothing more will come from it."""

    def step(self, gossiper: Gossiper, now: float) -> None:
        """Push whatever is due."""

    def snapshot(self) -> dict[str, Any]:
        """Return the mode's state as plain data."""
        return {}

    def restore(self, data: dict[str, Any]) -> None:
        """Take over the state of a snapshot."""


# --- asynchronous, at the pace of training -------------------------------------------------------


def check_drift(bound: float | Mapping[str, float]) -> None:
    """Raise ValueError unless every bound is a number that a relative distance can be compared with."""
    for name, each in bound.items() if isinstance(bound, Mapping) else [("", bound)]:
        if not (math.isfinite(each) and each >= 0):
            where = f" of {name!r}" if name else ""
            raise ValueError(
                f"drift{where} is {each:g}: give a relative distance of 0 or more, as in 0.05"
            )


class Drift:
    """How far models have moved since they were last pushed.

    bound: the relative distance below which a push is skipped, for all models or each by name (others
        are always pushed). Raise it to save messages while values move little; too high, and peers
        learn from each other too late. It keeps one copy of each model.
    traffic: where skipped messages are counted.
    """

    def __init__(self, bound: float | Mapping[str, float], traffic: Mapping[str, Traffic]) -> None:
        check_drift(bound)
        self._bound, self._traffic = bound, traffic
        self._last: dict[str, Array] = {}

    def skips(self, model: str, value: Array, messages: int) -> bool:
        """Return whether a model has moved less than its bound, and count the messages that are not sent.

        If it has moved farther, its value is remembered as pushed.
        """
        bound = self._bound.get(model, 0.0) if isinstance(self._bound, Mapping) else self._bound
        if bound <= 0:
            return False
        last = self._last.get(model)
        if last is not None:
            moved = float(np.linalg.norm(value - last))
            if moved < bound * float(np.linalg.norm(last)):
                self._traffic[model].skip(messages, messages * 4 * value.size)  # as float32
                return True
        self._last[model] = np.array(value)
        return False


class PacedMode(Mode):
    """Every request is one push of each model, in equal parts to a few random neighbours.

    It keeps to the work done, not to a clock: a slow machine gossips as often per training step as a fast
    one. What cannot be pushed now (no neighbour is free) is pushed later,
    but no more than `backlog` pushes per model pile up.

    fanout: neighbours that share in one push. Raise it if peers disagree too much while training:
        four in one push mix better than four pushes to one, because weights stay more even.
    fraction: the share of the held weight that one push gives away, between 0 and 1 exclusive; by
        default an equal part for each of the neighbours and for the peer itself.
    ahead: transfers of one model that may be on their way before `caught_up` is false. Training moves
        only the weight that is held, so what is on its way learns nothing: raise it from 0 only where
        links are slow and training is not.
    floor: do not push while a share or the rest would fall below this weight.
    turns: for graphs that change over time: the neighbours that push after push may be given to, over and
        over. A turn in which nobody can be reached passes.
    drift: skips a push of what has hardly moved since the last one.
    """

    def __init__(
        self,
        fanout: int = 1,
        *,
        fraction: float | None = None,
        ahead: int = 0,
        backlog: int = 2,
        floor: int = FLOOR,
        turns: Sequence[Collection[str]] = (),
        drift: Drift | None = None,
    ) -> None:
        if fanout < 1:
            raise ValueError(f"paced mode: fanout is {fanout}, must be at least 1")
        if fraction is not None and not 0 < fraction < 1:
            raise ValueError(f"paced mode: fraction is {fraction}, must lie between 0 and 1")
        self.fanout, self.fraction = fanout, fraction
        self.ahead = ahead
        self.backlog, self.floor = backlog, floor
        self._requested = 0
        self._owed: Counter[str] = Counter()
        self._turns = [frozenset(turn) for turn in turns]
        self._turn: Counter[str] = Counter()
        self._drift = drift
        self._welcomes: set[tuple[str, str]] = set()

    def welcome(self, model: str, peer: str) -> None:
        """Push to a neighbour that counts for nothing yet as soon as it is free, not after training."""
        self._welcomes.add((model, peer))

    def request(self, *, anyway: bool = False) -> None:
        """Ask for one more push of every model; `anyway`, from now on, however little they moved."""
        self._requested += 1
        if anyway:
            self._drift = None

    def caught_up(self, gossiper: Gossiper) -> bool:
        """Return whether neighbours keep up with what is pushed to them; if not, a driver trains later.

        It is no barrier: whoever answers lets the peer go on, and who cannot be reached is not
        waited for.
        """
        return all(gossiper.in_flight(model) <= self.ahead for model in gossiper.models)

    def step(self, gossiper: Gossiper, now: float) -> None:
        """Push what is owed, as far as neighbours are free."""
        for model in gossiper.models:
            self._owed[model] = min(self._owed[model] + self._requested, self.backlog)
            while self._owed[model] and self._push(gossiper, model, now):
                self._owed[model] -= 1
        self._requested = 0
        for model, peer in sorted(self._welcomes):
            weight = gossiper.weight(model)
            share = portion(weight, Fraction(1, self.fanout + 1))
            # Below the floor too: a newcomer that hears nothing never gives, and nobody else may be there
            # to lift a weight that was lost to somebody who died.
            if min(share, weight - share) < 1:
                continue
            if peer not in gossiper.reachable_neighbours(model):
                self._welcomes.discard((model, peer))
            elif peer in gossiper.free_neighbours(model):
                self._welcomes.discard((model, peer))
                gossiper.push(model, {peer: share}, now)

    def _push(self, gossiper: Gossiper, model: str, now: float) -> bool:
        free = gossiper.free_neighbours(model)
        if self._turns:
            whose = self._turns[self._turn[model] % len(self._turns)]
            free = [peer for peer in free if peer in whose]
            if not free and not whose.intersection(gossiper.reachable_neighbours(model)):
                self._turn[model] += 1
                return True
        if not free:
            return False
        chosen = gossiper.rng.permutation(len(free))[: self.fanout]
        weight = gossiper.weight(model)
        if self.fraction is None:
            share = portion(weight, Fraction(1, len(chosen) + 1))
        else:
            share = portion(weight, self.fraction) // len(chosen)
        if min(share, weight - share * len(chosen)) < self.floor:
            return False
        self._turn[model] += 1
        if self._drift and self._drift.skips(model, gossiper.value(model), len(chosen)):
            return True
        return gossiper.push(model, {free[index]: share for index in chosen}, now)


# --- rounds in lockstep --------------------------------------------------------------------------


@dataclass(slots=True)
class _Course:
    """How far one model has come: exchange `at` of round `round`; idle after the last exchange."""

    round: int = -1
    at: int = 0
    pushed: bool = False
    idle: bool = True
    sources: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)


class RoundsMode(Mode):
    """Synchronous push-sum, the paper's "train, then average": rounds of a fixed number of exchanges.

    In every exchange each peer splits its mass over itself and its out-neighbours, and goes on when it
    has credited the mass of all its in-neighbours. Mass of a later exchange is deferred until its turn,
    so that the result is that of a matrix power, whatever the network drops, repeats or reorders.

    The driver calls `begin_round(gossiper, r)` with r = 0, 1, 2, … after training, ticks until
    `finished(r)`, and trains again. All peers of a model use the same numbers.

    exchanges: exchanges per round. Raise it for a better average, at that many messages per edge.
    sources: per model, the in-neighbours to wait for; by default the peers it is pushed to, which
        is right for undirected graphs.
    shares: per model, the fraction given to each out-neighbour (the peer's column of a
        column-stochastic matrix, itself left out); by default equal parts for all and itself.
    """

    def __init__(
        self,
        exchanges: int,
        *,
        sources: Mapping[str, Collection[str]] | None = None,
        shares: Mapping[str, Mapping[str, float | Fraction]] | None = None,
    ) -> None:
        if exchanges < 1:
            raise ValueError(f"rounds mode: exchanges is {exchanges}, must be at least 1")
        self.exchanges = exchanges
        self._sources = sources
        self._shares = shares
        self._courses: dict[str, _Course] = {}

    def begin_round(self, gossiper: Gossiper, number: int) -> None:
        """Start averaging all models; every one must have weight and the last round be finished."""
        for model in gossiper.models:
            course = self._courses.setdefault(model, _Course())
            if not course.idle or number <= course.round:
                raise ValueError(
                    f"round {number} of {model!r} cannot begin: round {course.round} is "
                    f"{'over' if course.idle else 'not finished'}"
                )
            if gossiper.weight(model) == 0:
                raise ValueError(
                    f"round {number}: peer {gossiper.peer!r} holds no weight of {model!r}, and its "
                    f"neighbours would wait in vain; inject some first"
                )
            neighbours = gossiper.neighbours(model)
            sources = neighbours if self._sources is None else self._sources.get(model, ())
            self._courses[model] = _Course(number, 0, False, False, set(sources))

    def finished(self, number: int) -> bool:
        """Return whether this round is over for every model."""
        return bool(self._courses) and all(
            c.round > number or (c.round == number and c.idle) for c in self._courses.values()
        )

    def admit(self, give: Give) -> bool:
        """Defer what belongs to a later exchange. Late or untagged mass (a leaver's) joins at once."""
        if give.tag is None:
            return True
        course = self._courses.get(give.model, _Course())
        if course.idle:
            return give.tag[0] <= course.round
        now = (course.round, course.at)
        return give.tag < now or (give.tag == now and course.pushed)

    def credited(self, give: Give) -> None:
        """Strike the sender off the list of those still to come in this exchange."""
        course = self._courses.get(give.model)
        if course is not None and give.tag == (course.round, course.at):
            course.missing.discard(give.sender)

    def refused(self, give: Give) -> None:
        """Wait for its sender no longer: nothing else will come from it in this exchange."""
        self.credited(give)

    def gone(self, peer: str) -> None:
        """Wait for this peer no longer, in this round."""
        for course in self._courses.values():
            course.sources.discard(peer)
            course.missing.discard(peer)

    def step(self, gossiper: Gossiper, now: float) -> None:
        """Go on, in every model, as far as what has arrived allows."""
        for model, course in self._courses.items():
            while not course.idle and self._advance(gossiper, model, course, now):
                pass

    def snapshot(self) -> dict[str, Any]:
        """Return how far every model has come."""
        return {
            model: [c.round, c.at, c.pushed, c.idle, sorted(c.sources), sorted(c.missing)]
            for model, c in self._courses.items()
        }

    def restore(self, data: dict[str, Any]) -> None:
        """Take over how far every model had come."""
        for model, (number, at, pushed, idle, sources, missing) in data.items():
            self._courses[model] = _Course(number, at, pushed, idle, set(sources), set(missing))

    def _advance(self, gossiper: Gossiper, model: str, course: _Course, now: float) -> bool:
        """Push, or end an exchange that is complete; say whether anything moved."""
        if not course.pushed:
            if not self._push(gossiper, model, (course.round, course.at), now):
                return False
            course.pushed = True
            course.missing = set(course.sources)
            gossiper.release(model)
            return True
        if course.missing:
            return False
        course.at += 1
        course.pushed = False
        course.idle = course.at == self.exchanges
        return True

    def _push(self, gossiper: Gossiper, model: str, tag: tuple[int, int], now: float) -> bool:
        """Split the mass over the out-neighbours at once; not while one of the edges is busy."""
        neighbours = gossiper.neighbours(model)
        if len(gossiper.free_neighbours(model, online_only=False)) < len(neighbours):
            return False
        weight = gossiper.weight(model)
        if self._shares is None:
            part = weight // (len(neighbours) + 1)
            shares = dict.fromkeys(neighbours, part)
        else:
            column = self._shares[model]
            shares = {p: portion(weight, column[p]) for p in neighbours if p in column}
        if not shares:
            return True
        if min(shares.values()) < 1:
            gossiper.counters["starved"] += 1
            return False
        # What cannot be written stays here: neighbours that know this need not wait for it.
        return gossiper.push(model, shares, now, tag) or gossiper.skip(model, shares, now, tag)


# --- rounds through servers ----------------------------------------------------------------------


@dataclass(slots=True)
class _Client:
    """A model that another peer averages; `given` while its mass is with the server."""

    server: str
    round: int = -1
    done: int = -1
    given: bool = False

    def end(self, number: int) -> None:
        """Note that round `number` is over."""
        self.given, self.done = False, number


@dataclass(slots=True)
class _Server:
    """A model that this peer averages; `pot` is what each client put in and shall get back."""

    round: int = -1
    done: int = -1
    closed: bool = False
    pot: dict[str, int] = field(default_factory=dict)

    def end(self) -> None:
        """Note that the round is over."""
        self.closed, self.done = False, self.round


class ServerMode(Mode):
    """Rounds through a server: clients give it all they have, it gives back the mean.

    Both are plain transfers. Different models may have different servers.

    The driver calls `begin_round(gossiper, r)` with r = 0, 1, 2, … after training, on clients and
    servers alike, and ticks until `finished(r)`. A server closes a round when all its neighbours for
    that model have given, or when its driver calls `close_round` because it waited long enough; so
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
        """Peers of which a session was declared gone; nobody waits for those that are not back."""

    def begin_round(self, gossiper: Gossiper, number: int) -> None:
        """Start averaging all models; training should pause until `finished(number)`."""
        named = self._clients.keys() | self._own.keys()
        if named != set(gossiper.models):
            raise ValueError(
                f"server mode: servers are named for {sorted(named)}, but peer {gossiper.peer!r} "
                f"has the partial models {list(gossiper.models)}"
            )
        for client in self._clients.values():
            client.round = max(client.round, number)
        for model, server in self._own.items():
            server.round = max(server.round, number)
            gossiper.release(model)

    def finished(self, number: int) -> bool:
        """Return whether this round is over: the means are back, or will never be (a server is gone)."""
        states = [*self._clients.values(), *self._own.values()]
        return all(state.done >= number for state in states)

    def close_round(self, model: str) -> None:
        """Wait no longer: average what has arrived (a driver's deadline, on the server)."""
        server = self._own[model]
        server.closed = server.round > server.done

    def admit(self, give: Give) -> bool:
        """Defer clients' mass while no round of theirs is open; untagged mass joins at once."""
        server = self._own.get(give.model)
        if give.tag is None or give.tag[1] != GATHER or server is None:
            return True
        return server.round > server.done and give.tag[0] <= server.round and not server.closed

    def credited(self, give: Give) -> None:
        """Note a client's stake, or that the mean came back."""
        self._heard(give, give.weight)

    def refused(self, give: Give) -> None:
        """Average without a refused client; do without a refused mean, whose mass the server keeps."""
        self._heard(give, 0)

    def _heard(self, give: Give, stake: int) -> None:
        if give.tag is None:
            return
        number, exchange = give.tag
        if exchange == GATHER and give.model in self._own:
            pot = self._own[give.model].pot
            pot[give.sender] = pot.get(give.sender, 0) + stake
        elif exchange == RETURN and give.model in self._clients:
            client = self._clients[give.model]
            client.end(max(client.done, number))

    def returned(self, give: Give) -> None:
        """End a client's round without a mean: the server refused its mass, or is gone.

        A server keeps what a client refused for it: it goes back with the next round's mean.
        """
        server = self._own.get(give.model)
        if server is not None and give.weight and give.tag is not None and give.tag[1] == RETURN:
            server.pot[give.receiver] = server.pot.get(give.receiver, 0) + give.weight
        client = self._clients.get(give.model)
        if client is not None and client.given and give.receiver == client.server:
            client.end(client.round)

    def gone(self, peer: str) -> None:
        """Keep a lost client's stake in the average; expect nothing from a lost server."""
        self._gone.add(peer)
        for server in self._own.values():
            server.pot.pop(peer, None)
        for client in self._clients.values():
            if client.server == peer and client.given:
                client.end(client.round)

    def step(self, gossiper: Gossiper, now: float) -> None:
        """Give to the servers, and give back as a server, whatever is due."""
        for model, client in self._clients.items():
            if client.round > client.done:
                self._step_client(gossiper, model, client, now)
        for model, server in self._own.items():
            if server.round > server.done:
                self._step_server(gossiper, model, server, now)

    def snapshot(self) -> dict[str, Any]:
        """Return how far every model has come."""
        return {
            "clients": {v: [c.round, c.done, c.given] for v, c in self._clients.items()},
            "own": {v: [s.round, s.done, s.closed, dict(s.pot)] for v, s in self._own.items()},
            "gone": sorted(self._gone),
        }

    def restore(self, data: dict[str, Any]) -> None:
        """Take over how far every model had come."""
        self._gone = set(data.get("gone", ()))
        for model, (number, done, given) in data["clients"].items():
            server = self._clients[model].server
            self._clients[model] = _Client(server, number, done, given)
        for model, (number, done, closed, pot) in data["own"].items():
            self._own[model] = _Server(number, done, closed, dict(pot))

    def _step_client(self, gossiper: Gossiper, model: str, client: _Client, now: float) -> None:
        weight = gossiper.weight(model)
        if client.given:
            return
        if weight == 0:
            gossiper.counters["nothing-to-give"] += 1
            client.done = client.round
        elif client.server in gossiper.free_neighbours(model, online_only=False):
            tag = (client.round, GATHER)
            given = gossiper.push(model, {client.server: weight}, now, tag, whole=True)
            # What cannot be written stays here: a server that knows this averages without it.
            client.given = given or gossiper.skip(model, [client.server], now, tag)
        elif client.server in self._gone.difference(gossiper.neighbours(model)):
            client.done = client.round  # it went while we trained: go on with what we have

    def _step_server(self, gossiper: Gossiper, model: str, server: _Server, now: float) -> None:
        if not server.closed:
            server.closed = server.pot.keys() >= set(gossiper.neighbours(model))
        if server.closed:
            # Mass may come from somebody who is no more: its stake, too, stays in the average.
            for peer in self._gone.difference(gossiper.neighbours(model)):
                server.pot.pop(peer, None)
            free = gossiper.free_neighbours(model, online_only=False)
            server.pot = {peer: stake for peer, stake in server.pot.items() if stake}
            shares = {peer: server.pot[peer] for peer in free if peer in server.pot}
            back = (server.round, RETURN)
            if shares and gossiper.push(model, shares, now, back, whole=True):
                for peer in shares:
                    del server.pot[peer]
            elif shares and len(shares) == len(server.pot):
                # No mean that can be written: what they put in stays here, and is theirs when there is.
                gossiper.skip(model, shares, now, back)
                server.end()
            if not server.pot:
                server.end()
