"""Gossip modes: they decide when and to whom a peer pushes.

A partial model's value and its weight at a peer are the peer's *mass*. In push-sum (pushsum.py) peers send
each other shares of their mass. A share on its way is a *transfer*, and `Give` is its message. The sender has
debited it; the receiver *credits* it, which adds it to its own mass, or refuses it, and the sender takes it
back. A transfer's *tag* is its (round, exchange); transfers of asynchronous gossip, and those by which a
leaving peer hands its mass over, have none.

A `Gossiper` has one mode. It asks the mode whether a received transfer may be credited now, tells it which
transfers were credited and which peers are gone, and calls its `step` to push. The mode's state is part of
the gossiper's snapshot, so that a restart continues from the last checkpoint. The *driver* is the code that
owns the gossiper: a live peer or a simulator. It trains, tells the mode when to average, and calls
`Gossiper.tick` again and again.

`PacedMode` pushes at the pace of training, and no peer waits for another one's transfers. In the *lockstep*
modes peers do, round by round: `RoundsMode` averages with the neighbours, `ServerMode` through one server per
partial model. `SteadyMode`, in robust.py, exchanges values without weight, as the lockstep modes do with a
`RobustMean`. The base class, `Mode`, never pushes: with it, the driver calls `Gossiper.push` itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .compress import Traffic
from .pushsum import MIN_WEIGHT, Array, portion
from .wire import Give, Tag

if TYPE_CHECKING:
    from .gossiper import Gossiper

MAX_WAITING = 2
"""The most pushes of a partial model that wait in asynchronous gossip."""
GATHER, RETURN = 0, 1
"""The exchange in the tag of a transfer from a client to its server, and of one with the mean back."""


class ValueMean(Protocol):
    """How a lockstep mode averages values without weight, not by push-sum: `RobustMean` in robust.py.

    add: keeps a received value; returns the own one, or the reason for refusing the received one.
    combine: replaces the own value by the mean of it and the values kept of this model, and drops those.
    rows, restore: the kept values as plain data for a snapshot, and back.
    """

    def add(self, gossiper: Gossiper, give: Give) -> Array | str: ...
    def combine(self, gossiper: Gossiper, model: str) -> None: ...
    def rows(self) -> list[list[Any]]: ...
    def restore(self, rows: Sequence[Sequence[Any]]) -> None: ...


class Mode:
    """The interface of a mode. This base class credits every transfer at once and never pushes."""

    weightless: bool = False
    """Whether transfers carry a value and weight 0. To credit one is then to replace the own value by what
    `value_after` returns; weights stay as they are."""

    def admit(self, give: Give) -> bool:
        """Return True to credit this transfer now; if False, it is deferred until `Gossiper.release`."""
        return True

    def value_after(self, gossiper: Gossiper, give: Give) -> Array | str:
        """Return the new own value, given a received one, or in a word why the received one is refused.

        Only called if the mode is `weightless`; the received value has the right length.
        """
        raise NotImplementedError

    def credited(self, give: Give) -> None:
        """Note that a received transfer was credited."""

    def refused(self, give: Give) -> None:
        """Note that a received transfer was refused: its sender takes the mass back, and repeats nothing."""

    def taken_back(self, give: Give) -> None:
        """Note that one of our transfers was taken back.

        Its receiver refused it, did not credit it in time, or is gone.
        """

    def peer_gone(self, peer: str) -> None:
        """Note that a session of this peer is gone for good and will send nothing more."""

    def update_models(self, models: Collection[str]) -> None:
        """Note which partial models the gossiper has from now on.

        In a lockstep mode, the driver changes them only between two rounds.
        """

    def step(self, gossiper: Gossiper, now: float) -> None:
        """Push whatever is due."""

    def snapshot(self) -> dict[str, Any]:
        """Return the mode's state as plain data."""
        return {}

    def restore(self, data: dict[str, Any]) -> None:
        """Restore the state of a snapshot."""


# --- asynchronous, at the pace of training -------------------------------------------------------


def check_drift(bound: float | Mapping[str, float]) -> None:
    """Raise ValueError unless every bound is a finite number of 0 or more."""
    for model, distance in bound.items() if isinstance(bound, Mapping) else [("", bound)]:
        if not (math.isfinite(distance) and distance >= 0):
            of_model = f" of {model!r}" if model else ""
            raise ValueError(
                f"drift{of_model} is {distance:g}: give a relative distance of 0 or more, as in 0.05"
            )


class Drift:
    """Skips pushes of models that have changed little since they were last pushed.

    It keeps a copy of the last pushed value of each model.

    bound: the relative distance from the last pushed value below which a push is skipped: one for all models,
        or by model name (models without one are always pushed). Raise it to save messages while values change
        little; if it is too high, peers learn from each other too late.
    traffic: where the messages that skipping saves are counted, by model.
    exempt: returns True for a model of which no push may be skipped.
    """

    def __init__(
        self,
        bound: float | Mapping[str, float],
        traffic: Mapping[str, Traffic],
        exempt: Callable[[str], bool] = lambda _model: False,
    ) -> None:
        check_drift(bound)
        self._bound, self._traffic, self._exempt = bound, traffic, exempt
        self._last_pushed: dict[str, Array] = {}

    def skips(self, model: str, value: Array, messages: int) -> bool:
        """Return True, and count the messages that are not sent, if a model has changed less than its bound.

        Otherwise remember its value as pushed and return False.
        """
        bound = self._bound.get(model, 0.0) if isinstance(self._bound, Mapping) else self._bound
        if bound <= 0 or self._exempt(model):
            return False
        last = self._last_pushed.get(model)
        if last is not None:
            distance = float(np.linalg.norm(value - last))
            if distance < bound * float(np.linalg.norm(last)):
                float32_bytes = messages * 4 * value.size
                self._traffic[model].count_skipped(messages, float32_bytes)
                return True
        self._last_pushed[model] = np.array(value)
        return False

    def update_models(self, models: Collection[str]) -> None:
        """Forget the values of models that are no longer there."""
        self._last_pushed = {m: value for m, value in self._last_pushed.items() if m in models}

    def forget(self, model: str) -> None:
        """Forget the last pushed value, whose push has failed: the next push of the model is not skipped."""
        self._last_pushed.pop(model, None)


class PacedMode(Mode):
    """Asynchronous gossip: each request is one push of every model to a few random neighbours.

    The driver makes requests per local training step, not per second, so a slow machine gossips as often per
    training step as a fast one. A push that is not possible now, because no neighbour is free or too little
    weight would be sent or kept, is made later; at most two pushes per model wait.

    fanout: how many neighbours each receive a share in one push. Raise it if peers disagree too much while
        training: one push to four neighbours mixes better than four pushes to one each, because weights stay
        more even.
    fraction: the fraction of the held weight that one push sends, between 0 and 1 exclusive; by default the
        weight is divided equally among the receivers and the peer itself.
    neighbours_by_push: the schedule of a graph that changes over time: the neighbours to which the 1st,
        2nd, … push of a model may go, repeated cyclically. A push is left out if none of them can be reached.
    drift: skips pushes of models that have changed little.
    """

    def __init__(
        self,
        fanout: int = 1,
        *,
        fraction: float | None = None,
        neighbours_by_push: Sequence[Collection[str]] = (),
        drift: Drift | None = None,
    ) -> None:
        if fanout < 1:
            raise ValueError(f"paced mode: fanout is {fanout}, must be at least 1")
        if fraction is not None and not 0 < fraction < 1:
            raise ValueError(f"paced mode: fraction is {fraction}, must lie between 0 and 1")
        self.fanout, self.fraction = fanout, fraction
        self._requests = 0
        """Pushes of every model that were requested since the last `step`."""
        self._waiting_pushes: Counter[str] = Counter()
        self._neighbours_by_push = [frozenset(peers) for peers in neighbours_by_push]
        self._schedule_positions: Counter[str] = Counter()
        """How many pushes of the schedule are over, by model."""
        self._drift = drift
        self._welcomes: set[tuple[str, str]] = set()
        """(model, peer): the newcomers that have not been sent a model yet."""

    def welcome(self, model: str, peer: str) -> None:
        """Push to a newcomer as soon as it is free, without waiting for the next request."""
        self._welcomes.add((model, peer))

    def update_models(self, models: Collection[str]) -> None:
        """Forget the pushes of models that are no longer there."""
        for counts in (self._waiting_pushes, self._schedule_positions):
            for model in counts.keys() - {*models}:
                del counts[model]
        if self._drift:
            self._drift.update_models(models)

    def request(self, *, ignore_drift: bool = False) -> None:
        """Request one more push of every model.

        ignore_drift: from now on, no push is skipped.
        """
        self._requests += 1
        if ignore_drift:
            self._drift = None

    def caught_up(self, gossiper: Gossiper) -> bool:
        """Return False if the driver should not train yet, because transfers wait for their acknowledgement.

        Training changes only the mass that is held, so mass on its way misses it. Nobody waits for long:
        overdue transfers, and those to neighbours that cannot be reached, do not count.
        """
        return gossiper.in_flight().keys().isdisjoint(gossiper.models)

    def step(self, gossiper: Gossiper, now: float) -> None:
        """Make the pushes that were requested, as far as neighbours are free."""
        for model in gossiper.models:
            waiting = self._waiting_pushes[model] + self._requests
            self._waiting_pushes[model] = min(waiting, MAX_WAITING)
            while self._waiting_pushes[model] and self._push(gossiper, model, now):
                self._waiting_pushes[model] -= 1
                self._schedule_positions[model] += 1
        self._requests = 0
        for model, peer in sorted(self._welcomes):
            if model not in gossiper.models:  # the model has ended
                self._welcomes.discard((model, peer))
                continue
            weight = gossiper.weight(model)
            share = portion(weight, Fraction(1, self.fanout + 1))
            # Even if it is below MIN_WEIGHT: the newcomer sends nothing before it has received something, so
            # if nobody else gives us weight, both of us would wait for ever.
            if min(share, weight - share) < 1:
                continue
            if peer in gossiper.reachable_neighbours(model):
                is_free = peer in gossiper.free_neighbours(model)
                if not (is_free and gossiper.push(model, {peer: share}, now)):
                    continue
            self._welcomes.discard((model, peer))

    def snapshot(self) -> dict[str, Any]:
        """Return the pushes that wait, and the position in the schedule, of every model.

        Newcomers are left out, because they are announced again after a restart, and so are the last pushed
        values: after a restart, the first push of each model is not skipped.
        """
        return {"waiting": dict(self._waiting_pushes), "positions": dict(self._schedule_positions)}

    def restore(self, data: dict[str, Any]) -> None:
        """Restore the state of a snapshot."""
        self._waiting_pushes = Counter(data.get("waiting"))
        self._schedule_positions = Counter(data.get("positions"))

    def _push(self, gossiper: Gossiper, model: str, now: float) -> bool:
        """Make the next push of the schedule, or leave it out; return False if it must wait."""
        free = gossiper.free_neighbours(model)
        if self._neighbours_by_push:
            position = self._schedule_positions[model] % len(self._neighbours_by_push)
            allowed = self._neighbours_by_push[position]
            free = [peer for peer in free if peer in allowed]
            if not free and not allowed.intersection(gossiper.reachable_neighbours(model)):
                return True
        if not free:
            return False
        chosen = gossiper.rng.permutation(len(free))[: self.fanout]
        weight = gossiper.weight(model)
        if self.fraction is None:
            share = portion(weight, Fraction(1, len(chosen) + 1))
        else:
            share = portion(weight, self.fraction) // len(chosen)
        if min(share, weight - share * len(chosen)) < MIN_WEIGHT:
            return False
        if self._drift and self._drift.skips(model, gossiper.value(model), len(chosen)):
            return True
        is_sent = gossiper.push(model, {free[index]: share for index in chosen}, now)
        if self._drift and not is_sent:
            self._drift.forget(model)
        return is_sent


# --- rounds in lockstep --------------------------------------------------------------------------


@dataclass(slots=True)
class _Progress:
    """How far one model is in its round."""

    round: int = -1
    """The last round that has begun."""
    exchange: int = 0
    """The exchange of that round that is going on."""
    pushed: bool = False
    """Whether this peer has pushed in this exchange."""
    idle: bool = True
    """Whether the round's last exchange is over (or no round has begun)."""
    sources: set[str] = field(default_factory=set)
    """In-neighbours that send in every exchange of this round."""
    missing: set[str] = field(default_factory=set)
    """In-neighbours whose transfer of this exchange has not arrived."""


class RoundsMode(Mode):
    """Synchronous push-sum: all peers train, then all average, in a fixed number of exchanges per round.

    In one exchange each peer divides its mass among itself and the neighbours that it sends to (its
    *out-neighbours*); for a peer it is over when it has credited the transfers of all neighbours that send to
    it (its *in-neighbours*). A transfer of a later exchange is deferred. So a round multiplies the values by
    the mixing matrix, once per exchange, whatever messages are lost, repeated or reordered.

    The driver calls `begin_round(gossiper, r)` with r = 0, 1, 2, … after training, then `Gossiper.tick`
    until `finished(r)`, and trains again. All peers of a model use the same round numbers.

    exchanges: exchanges per round. Raise it for a better average, at that many messages per edge.
    sources: given a model, return the in-neighbours that take part in a round that begins now; by default
        the out-neighbours, which is right for undirected graphs.
    shares: per model, the fraction of the weight sent to each out-neighbour (the peer's column of a
        column-stochastic matrix, without the diagonal); by default the weight is divided equally among the
        out-neighbours and the peer itself.
    robust: take a robust mean of the own value and the neighbours' in every exchange, without weights.
    """

    def __init__(
        self,
        exchanges: int,
        *,
        sources: Callable[[str], Collection[str]] | None = None,
        shares: Mapping[str, Mapping[str, float | Fraction]] | None = None,
        robust: ValueMean | None = None,
    ) -> None:
        if exchanges < 1:
            raise ValueError(f"rounds mode: exchanges is {exchanges}, must be at least 1")
        self.exchanges = exchanges
        self._sources = sources
        self._shares = shares
        self._robust, self.weightless = robust, robust is not None
        self._progress: dict[str, _Progress] = {}
        self._last_round = -1
        """The last round that has begun."""

    def begin_round(self, gossiper: Gossiper, number: int) -> None:
        """Start a round for all models; each must have weight, and have finished the round before."""
        if self._shares is not None and (missing := set(gossiper.models) - self._shares.keys()):
            raise ValueError(
                f"rounds mode: shares has no entry for {sorted(missing)}; give every partial model one"
            )
        begun = {}
        for model in gossiper.models:
            progress = self._progress.get(model, _Progress())
            if not progress.idle or number <= progress.round:
                raise ValueError(
                    f"round {number} of {model!r} cannot begin: round {progress.round} is "
                    f"{'over' if progress.idle else 'not finished'}"
                )
            if gossiper.weight(model) == 0:
                raise ValueError(
                    f"round {number}: peer {gossiper.peer!r} holds no weight of {model!r}, and its "
                    f"neighbours would wait in vain; inject some first"
                )
            sources = (self._sources or gossiper.neighbours)(model)
            begun[model] = _Progress(round=number, idle=False, sources=set(sources))
        self._progress, self._last_round = begun, number

    def update_models(self, models: Collection[str]) -> None:
        """Forget the rounds of models that are no longer there; new ones take part from the next round on."""
        self._progress = {
            model: self._progress.get(model, _Progress(round=self._last_round)) for model in models
        }

    def finished(self, number: int) -> bool:
        """Return whether this round is over for every model."""
        return self._last_round >= number and all(
            p.round > number or p.idle for p in self._progress.values()
        )

    def admit(self, give: Give) -> bool:
        """Defer a transfer of a later exchange.

        Transfers of earlier exchanges, and those of leaving peers (without a tag), are credited at once.
        """
        if give.tag is None:
            return True
        progress = self._progress.get(give.model, _Progress())
        if progress.idle:
            number, _ = give.tag
            return number <= progress.round
        current = (progress.round, progress.exchange)
        return give.tag < current or (give.tag == current and progress.pushed)

    def value_after(self, gossiper: Gossiper, give: Give) -> Array | str:
        """Keep a value of this exchange until all have arrived; refuse one of an earlier exchange."""
        assert self._robust is not None
        progress = self._progress.get(give.model)
        if progress is None or give.tag != (progress.round, progress.exchange):
            return "late"
        if give.sender not in progress.sources:
            return "no-neighbour"
        return self._robust.add(gossiper, give)

    def credited(self, give: Give) -> None:
        """Note that the sender's transfer of this exchange has arrived."""
        progress = self._progress.get(give.model)
        if progress is not None and give.tag == (progress.round, progress.exchange):
            progress.missing.discard(give.sender)

    def refused(self, give: Give) -> None:
        """Stop waiting for the sender: it sends nothing else in this exchange."""
        self.credited(give)

    def peer_gone(self, peer: str) -> None:
        """Stop waiting for this peer in this round."""
        for progress in self._progress.values():
            progress.sources.discard(peer)
            progress.missing.discard(peer)

    def step(self, gossiper: Gossiper, now: float) -> None:
        """Advance every model as far as the transfers that have arrived allow."""
        for model, progress in self._progress.items():
            while not progress.idle and self._advance(gossiper, model, progress, now):
                pass

    def snapshot(self) -> dict[str, Any]:
        progress = {
            model: [p.round, p.exchange, p.pushed, p.idle, sorted(p.sources), sorted(p.missing)]
            for model, p in self._progress.items()
        }
        if self._robust is None:
            return progress
        return {"progress": progress, "collected": self._robust.rows()}

    def restore(self, data: dict[str, Any]) -> None:
        if self._robust is not None:
            self._robust.restore(data["collected"])
            data = data["progress"]
        for model, (number, exchange, pushed, idle, sources, missing) in data.items():
            self._progress[model] = _Progress(
                number, exchange, pushed, idle, set(sources), set(missing)
            )
            self._last_round = max(self._last_round, number)

    def _advance(self, gossiper: Gossiper, model: str, progress: _Progress, now: float) -> bool:
        """Push, or end the exchange if nothing is missing; return whether either was possible."""
        if not progress.pushed:
            if not self._push(gossiper, model, (progress.round, progress.exchange), now):
                return False
            progress.pushed = True
            progress.missing = set(progress.sources)
            gossiper.release(model)
            return True
        if progress.missing:
            return False
        if self._robust is not None:
            self._robust.combine(gossiper, model)
        progress.exchange += 1
        progress.pushed = False
        progress.idle = progress.exchange == self.exchanges
        return True

    def _push(self, gossiper: Gossiper, model: str, tag: tuple[int, int], now: float) -> bool:
        """Push to all out-neighbours at once; return False while a transfer to one of them is open."""
        neighbours = gossiper.neighbours(model)
        if len(gossiper.free_neighbours(model, online_only=False)) < len(neighbours):
            return False
        # If the value cannot be sent (it is not finite, or too large), tell neighbours not to wait for it.
        if self._robust is not None:
            sent = gossiper.send_values(model, neighbours, now, tag)
            return sent or gossiper.skip(model, neighbours, now, tag)
        weight = gossiper.weight(model)
        if self._shares is None:
            share = weight // (len(neighbours) + 1)
            shares = dict.fromkeys(neighbours, share)
        else:
            column = self._shares[model]
            shares = {peer: portion(weight, column[peer]) for peer in neighbours if peer in column}
        if starved := [peer for peer, share in shares.items() if share < 1]:
            # Too little weight to divide: tell them not to wait, and push in a later exchange.
            gossiper.counters["starved"] += 1
            gossiper.skip(model, starved, now, tag)
            shares = {peer: share for peer, share in shares.items() if share >= 1}
        if not shares:
            return True
        return gossiper.push(model, shares, now, tag) or gossiper.skip(model, shares, now, tag)


# --- rounds through servers ----------------------------------------------------------------------


@dataclass(slots=True)
class _ClientRound:
    """The progress of a model that another peer, its server, averages."""

    server: str
    round: int = -1
    """The last round that has begun."""
    done: int = -1
    """The last round that is over."""
    sent: bool = False
    """Whether this peer has sent its mass, or word that it sends none, and waits for the server."""

    def end(self, number: int) -> None:
        """Note that round `number` is over."""
        self.sent, self.done = False, number


@dataclass(slots=True)
class _ServerRound:
    """The progress of a model that this peer averages, as its server."""

    round: int = -1
    """The last round that has begun."""
    done: int = -1
    """The last round that is over."""
    closed: bool = False
    """Whether the server waits for no more clients, and sends the mean."""
    weights: dict[str, int] = field(default_factory=dict)
    """The weight that each client has sent and will get back with the mean."""

    def end(self) -> None:
        """Note that the round is over."""
        self.closed, self.done = False, self.round


class ServerMode(Mode):
    """Rounds through a server: clients send it all their mass, and it sends the mean back.

    Both are ordinary transfers. Different models may have different servers.

    The driver calls `begin_round(gossiper, r)` with r = 0, 1, 2, … after training, on clients and servers,
    then `Gossiper.tick` until `finished(r)`. A server closes a round when all its neighbours for that model
    have sent their mass, or when its driver calls `close_round` after a timeout; so the server must be told
    of its clients (`peer_online`) before the round. A client whose mass arrives after that is part of the
    mean of the server's next round, and waits for that one.

    While its mass is at the server a client holds no weight, and whatever it trains in that time is lost. A
    server may train too: the mass that it holds is part of the mean. Peers inject their weight at the start;
    a client without weight tells the server so, and gets no mean.

    servers: the server of each model. server_of: returns the server of a model that begins later.
    robust: the server, which is trusted, takes a robust mean of its clients' values and its own; then clients
        send values without weight.
    """

    def __init__(
        self,
        peer: str,
        servers: Mapping[str, str],
        server_of: Callable[[str], str] | None = None,
        *,
        robust: ValueMean | None = None,
    ) -> None:
        self._peer, self._server_of = peer, server_of
        self._robust, self.weightless = robust, robust is not None
        self._client_rounds = {
            model: _ClientRound(server) for model, server in servers.items() if server != peer
        }
        self._server_rounds = {
            model: _ServerRound() for model, server in servers.items() if server == peer
        }
        self._gone: set[str] = set()
        """Peers that have ever ended a session. One that is a neighbour again has begun a new session."""

    def begin_round(self, gossiper: Gossiper, number: int) -> None:
        """Start a round for all models; training should pause until `finished(number)`."""
        models = self._client_rounds.keys() | self._server_rounds.keys()
        if models != set(gossiper.models):
            raise ValueError(
                f"server mode: servers are named for {sorted(models)}, but peer {gossiper.peer!r} "
                f"has the partial models {list(gossiper.models)}"
            )
        for client in self._client_rounds.values():
            client.round = max(client.round, number)
        for model, server in self._server_rounds.items():
            server.round = max(server.round, number)
            gossiper.release(model)

    def update_models(self, models: Collection[str]) -> None:
        """Forget the rounds of models that are no longer there; new ones take part from the next round on."""
        known = {**self._client_rounds, **self._server_rounds}
        done = max((state.done for state in known.values()), default=-1)
        for model in known.keys() - set(models):
            self._client_rounds.pop(model, None)
            self._server_rounds.pop(model, None)
        for model in [model for model in models if model not in known]:
            server = self._peer if self._server_of is None else self._server_of(model)
            if server == self._peer:
                self._server_rounds[model] = _ServerRound(round=done, done=done)
            else:
                self._client_rounds[model] = _ClientRound(server, round=done, done=done)

    def finished(self, number: int) -> bool:
        """Return whether this round is over for every model.

        As a client, the mean has arrived, or none will: the server is gone, or this peer's mass came back. As
        a server, the mean is sent to all whose mass was credited.
        """
        states = [*self._client_rounds.values(), *self._server_rounds.values()]
        return all(state.done >= number for state in states)

    def close_round(self, model: str) -> None:
        """Stop waiting for clients and average what has arrived: called on a server after a timeout."""
        server = self._server_rounds[model]
        server.closed = server.round > server.done

    def admit(self, give: Give) -> bool:
        """As a server, defer a client's transfer unless it is of the round that is open, or an earlier one.

        All other transfers are credited at once.
        """
        server = self._server_rounds.get(give.model)
        if give.tag is None or server is None:
            return True
        number, exchange = give.tag
        if exchange != GATHER:
            return True
        is_open = server.round > server.done and not server.closed
        return is_open and number <= server.round

    def value_after(self, gossiper: Gossiper, give: Give) -> Array | str:
        """As a server keep a client's value until all have arrived; as a client adopt the mean."""
        assert self._robust is not None
        if give.tag is None:
            return "late"
        if give.tag[1] == GATHER and give.model in self._server_rounds:
            return self._robust.add(gossiper, give)
        client = self._client_rounds.get(give.model)
        if give.tag[1] != RETURN or client is None or give.sender != client.server:
            return "no-server"
        return np.array(give.value) if np.isfinite(give.value).all() else "not-finite"

    def credited(self, give: Give) -> None:
        """Note the weight that a client has sent, or that the mean has arrived."""
        # Without weights, 1 marks a client to which the mean is owed.
        self._note_arrival(give, give.weight if self._robust is None else 1)

    def refused(self, give: Give) -> None:
        """Note a refused transfer: as a server average without that client; as a client end the round."""
        self._note_arrival(give, 0)

    def _note_arrival(self, give: Give, weight: int) -> None:
        """Note that a transfer was credited or refused.

        weight: what the server owes to the client for it, and sends back with the mean.
        """
        if give.tag is None:
            return
        number, exchange = give.tag
        if exchange == GATHER and give.model in self._server_rounds:
            server = self._server_rounds[give.model]
            # A late "I send nothing" is of an earlier round: the client may still send its mass in this one.
            if weight or number >= server.round:
                server.weights[give.sender] = server.weights.get(give.sender, 0) + weight
        elif exchange == RETURN and give.model in self._client_rounds:
            client = self._client_rounds[give.model]
            # A mean of an earlier round, from a server that has died since, does not end this one.
            if number >= client.round:
                client.end(number)

    def taken_back(self, give: Give) -> None:
        """As a client, end the round without a mean: the server refused the mass, or is gone.

        As a server, keep the weight of a client that refused the mean, for the next round's mean.
        """
        server = self._server_rounds.get(give.model)
        if server is not None and give.weight and give.tag is not None and give.tag[1] == RETURN:
            weight = server.weights.get(give.receiver, 0) + give.weight
            server.weights[give.receiver] = weight
        client = self._client_rounds.get(give.model)
        if client is not None and client.sent and give.receiver == client.server:
            client.end(client.round)

    def peer_gone(self, peer: str) -> None:
        """Send nothing back to a client that is gone; expect no mean from a server that is gone."""
        self._gone.add(peer)
        for server in self._server_rounds.values():
            server.weights.pop(peer, None)
        for client in self._client_rounds.values():
            if client.server == peer and client.sent:
                client.end(client.round)

    def step(self, gossiper: Gossiper, now: float) -> None:
        """As a client, send to the servers; as a server, send the means back: whatever is due."""
        for model, client in self._client_rounds.items():
            if client.round > client.done:
                self._step_client(gossiper, model, client, now)
        for model, server in self._server_rounds.items():
            if server.round > server.done:
                self._step_server(gossiper, model, server, now)

    def snapshot(self) -> dict[str, Any]:
        return {
            "clients": {
                model: [client.round, client.done, client.sent]
                for model, client in self._client_rounds.items()
            },
            "own": {  # the models that this peer averages, as their server; the key stays for old checkpoints
                model: [server.round, server.done, server.closed, dict(server.weights)]
                for model, server in self._server_rounds.items()
            },
            "gone": sorted(self._gone),
            **({} if self._robust is None else {"collected": self._robust.rows()}),
        }

    def restore(self, data: dict[str, Any]) -> None:
        if self._robust is not None:
            self._robust.restore(data["collected"])
        self._gone = set(data.get("gone", ()))
        self.update_models([*data["clients"], *data["own"]])
        for model, (number, done, sent) in data["clients"].items():
            server = self._client_rounds[model].server
            self._client_rounds[model] = _ClientRound(server, number, done, sent)
        for model, (number, done, closed, weights) in data["own"].items():
            self._server_rounds[model] = _ServerRound(number, done, closed, dict(weights))

    def _send(
        self, gossiper: Gossiper, model: str, shares: Mapping[str, int], now: float, tag: Tag
    ) -> bool:
        """Send to each receiver its share: all mass to the server, or the mean to clients.

        Each client gets the mean with the weight that it had sent. With a robust mean shares are without
        meaning, because values have no weight.
        """
        if self._robust is not None:
            return gossiper.send_values(model, sorted(shares), now, tag)
        return gossiper.push(model, shares, now, tag, exact_shares=True)

    def _step_client(
        self, gossiper: Gossiper, model: str, client: _ClientRound, now: float
    ) -> None:
        if client.sent:
            return
        if client.server in gossiper.free_neighbours(model, online_only=False):
            tag = (client.round, GATHER)
            if weight := gossiper.weight(model):
                client.sent = self._send(gossiper, model, {client.server: weight}, now, tag)
            else:
                gossiper.counters["nothing-to-give"] += 1
            # Without weight, or if the value cannot be sent, tell the server to average without it.
            client.sent = client.sent or gossiper.skip(model, [client.server], now, tag)
        elif client.server in self._gone.difference(gossiper.neighbours(model)):
            client.done = client.round  # the server left while we trained: continue without a mean

    def _step_server(
        self, gossiper: Gossiper, model: str, server: _ServerRound, now: float
    ) -> None:
        if not server.closed:
            server.closed = server.weights.keys() >= set(gossiper.neighbours(model))
        if server.closed:
            # A client may be gone after its transfer was credited: its mass stays in the average.
            for peer in self._gone.difference(gossiper.neighbours(model)):
                server.weights.pop(peer, None)
            free = gossiper.free_neighbours(model, online_only=False)
            server.weights = {peer: weight for peer, weight in server.weights.items() if weight}
            shares = {peer: server.weights[peer] for peer in free if peer in server.weights}
            tag = (server.round, RETURN)
            # Without a robust mean, the mass that this peer holds is the mean.
            if self._robust is not None:
                self._robust.combine(gossiper, model)
            if shares and self._send(gossiper, model, shares, now, tag):
                for peer in shares:
                    del server.weights[peer]
            elif shares and len(shares) == len(server.weights):
                # The mean cannot be sent: the server keeps the clients' weights for the next round's mean.
                # Clients of a robust mean have kept theirs, and send their values again.
                gossiper.skip(model, shares, now, tag)
                if self._robust is not None:
                    server.weights.clear()
                server.end()
            if not server.weights:
                server.end()
