"""Averaging among members of which some may be hostile, with values that carry no weight.

In push-sum a member that lies about its weight, or keeps weight that it was given, decides the average, and
no bound on values mends that. Here nobody gives weight away.

*Steady gossip*: a peer sends its neighbours its value, and each of them moves its own value x a little
towards it. For a value v from a neighbour:

    d = |v − x|                                    its distance
    e = max(0, loss of v − loss of x)              its excess loss on own samples that are not trained on, in
                                                   a network with the own private parts; the loss of x is
                                                   measured once a round
    τ = the (2b+1)-th largest d of all neighbours' last values
    q = USUAL_EXCESS times the (2b+1)-th largest e of them, and at least MIN_EXCESS
    x ← x + β·f·w·(v − x),   f = min(1, τ·g/d),   g = min(1, q/e)²,   β = 1/(F+1)

b is the number of hostile neighbours to withstand, and F the number of neighbours that a peer sends to in a
round. w is 1; if peers count by their samples, w = min(1, samples of the sender / own samples). The sender
states its number, but w is at most 1, so a lie gains nothing over w = 1. So one value moves x by β·τ at most,
however far it is: by a step that at least 2b+1 neighbours, b+1 of them honest, would also make. A
neighbour's values are *looked at* (scored and used) only as often as its *allowance* permits, however many it
sends: each value uses up 1 of it; it starts at 1, and grows by RATE·F/neighbours in each of our own rounds,
up to MAX_ALLOWANCE.
`limits` and `step_factor` are the rule; `SteadyMode` applies it and says when to send to whom.

*Robust means*, for the lockstep modes, are pure functions of the own value, those of the others, and b; they
return the value to continue with. Every value counts once. `RobustMean` makes a lockstep mode use one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from .modes import Mode
from .pushsum import Array, is_finite, norm
from .wire import Give

if TYPE_CHECKING:
    from .gossiper import Gossiper

# Chosen in simulations of 16 peers, 3 of them hostile, on graphs of degree 4 and more.
FANOUT = 4
"""Neighbours that a peer sends its value to in each of its rounds, if it has that many."""
RATE = 1.25
"""How fast an allowance grows, relative to how often an honest neighbour sends: above 1, so that a little
jitter costs honest neighbours nothing."""
MAX_ALLOWANCE = 2.0
"""The most values of a neighbour that are looked at in a row without a round of our own in between."""
MIN_EXCESS = 0.02
"""Excess losses up to this one never count against a value: they are noise of a few samples."""
USUAL_EXCESS = 2.0
"""Excess losses up to this multiple of the neighbours' (2b+1)-th largest are usual."""
FEW_NEIGHBOURS_MAX_EXCESS = 0.5
"""The largest excess loss that counts as usual while fewer than 2b+1 neighbours are known."""
EARLY_ROUNDS = 5
"""Own rounds in which a peer that knows fewer than 2b+1 neighbours also bounds steps by its own training."""
EARLY_MOVE = 1.5
"""In those rounds, the largest usual distance relative to the distance by which the last training moved x."""
MAX_RECORDS = 4096
"""The most neighbours that are remembered per partial model; the oldest are forgotten."""

Hostile: TypeAlias = int | Literal["auto"]
"""How many neighbours may be hostile; see `tolerated` for "auto"."""
Score: TypeAlias = Callable[[str, Array | None], float]
"""score(model, value) returns the mean loss on a few own samples, preferably some that are not trained on,
with this value of a partial model instead of the own one; None stands for the own one."""


def tolerated(hostile: Hostile, neighbours: int) -> int:
    """Return b, the hostile neighbours to withstand; "auto": fewer than a third of them, and at least one."""
    return max(1, (neighbours - 1) // 3) if hostile == "auto" else hostile


def needed_neighbours(hostile: Hostile) -> int:
    """Return the fewest neighbours with which a peer withstands so many hostile ones among them.

    2b+1 of which b are hostile leave a majority that is honest. One hostile neighbour takes four: with three,
    the bound is the least distance of all, and peers hardly learn from each other.
    """
    return 4 if hostile == "auto" else max(2 * hostile + 1, 4 if hostile else 1)


def limits(
    distances: Sequence[float], excesses: Sequence[float], b: int, early_move: float | None
) -> tuple[float, float]:
    """Return the largest usual distance τ and excess loss q, from those of all known neighbours' last values.

    early_move: in a peer's first rounds, how far its last training moved its value; None later.
    """
    rank = 2 * b
    if len(distances) > rank:
        tau = sorted(distances, reverse=True)[rank]
        return tau, max(MIN_EXCESS, USUAL_EXCESS * sorted(excesses, reverse=True)[rank])
    tau = min(distances)
    if early_move is not None:
        tau = min(tau, EARLY_MOVE * early_move)
    return tau, max(MIN_EXCESS, min(FEW_NEIGHBOURS_MAX_EXCESS, USUAL_EXCESS * min(excesses)))


def step_factor(distance: float, excess: float, tau: float, q: float) -> float:
    """Return f: the fraction of the way to a value that is within both limits; 0 if it is not measurable."""
    if not (math.isfinite(distance) and math.isfinite(excess)):
        return 0.0
    if distance == 0.0:
        return 1.0
    g = 1.0 if excess <= q else (q / excess) ** 2
    return min(1.0, tau * g / distance)


@dataclass(slots=True)
class NeighbourRecord:
    """What a peer remembers of one neighbour's values of one partial model."""

    allowance: float = 1.0
    """How many more of its values are looked at."""
    distance: float | None = None
    """The distance of its last value that was looked at; None before the first."""
    excess: float = 0.0
    """The excess loss of that value."""


class SteadyMode(Mode):
    """Steady gossip; see the module's docstring for the rule.

    The driver calls `request` after every round of training, as with `PacedMode`.

    fanout: neighbours that a peer sends to after each of its rounds, those first that have waited longest.
        Raise it with many neighbours if peers disagree too much, at that many more messages.
    hostile: hostile neighbours to withstand, or "auto": a third of the neighbours, and at least one. Raise
        it if more of them may be hostile; peers then learn more slowly from each other.
    score: measures the loss of a value; without it distances alone bound values.
    key_of: the identity of a sender by its name. It must not change with a new name of the same member.

    A peer without weight of its own (a newcomer that the driver let `inject(…, after_first_transfer=True)`)
    collects the values of 2b+1 neighbours, or what it has at the end of its next round, and starts from their
    coordinate-wise median.
    """

    weightless = True

    def __init__(
        self,
        fanout: int = FANOUT,
        *,
        hostile: Hostile = "auto",
        score: Score | None = None,
        key_of: Callable[[str], str] = lambda name: name,
    ) -> None:
        if fanout < 1:
            raise ValueError(f"steady mode: fanout is {fanout}, must be at least 1")
        if hostile != "auto" and hostile < 0:
            raise ValueError(f"steady mode: hostile is {hostile}, must be 0 or more, or 'auto'")
        self.fanout, self.score = fanout, score
        self.hostile: Hostile = hostile
        self._key_of = key_of
        self._records: dict[str, dict[str, NeighbourRecord]] = {}
        """By partial model and identity; kept when a neighbour leaves: its return resets no allowance."""
        self._collected: dict[str, dict[str, Array]] = {}
        """By partial model: the first values that a newcomer received, by the identity of their sender."""
        self._requests = 0
        self._rounds: Counter[str] = Counter()
        """Own rounds so far, by partial model."""
        self._waiting: set[str] = set()
        """Partial models that could not be sent at the last request, because no neighbour was free."""
        self._served: dict[tuple[str, str], int] = {}
        """The own round in which a neighbour was last sent a partial model."""
        self._welcomes: set[tuple[str, str]] = set()
        self._value_before_training: dict[str, Array] = {}
        """In the first rounds, by partial model: the own value before training, moved only by gossip."""
        self._training_move: dict[str, float] = {}
        """In the first rounds, by partial model: how far the last training moved the own value."""
        self._own_losses: dict[str, float] = {}
        """The own loss, by partial model: measured only once a round, which halves the work of scoring."""

    # --- sending --------------------------------------------------------------------------------

    def request(self, *, ignore_drift: bool = False) -> None:
        """Note that a round of training is over: send every model once, and let allowances grow.

        ignore_drift: without effect, because this mode never skips a model.
        """
        self._requests += 1

    def welcome(self, model: str, peer: str) -> None:
        """Send to a newcomer as soon as it is free, without waiting for the next request."""
        self._welcomes.add((model, peer))

    def caught_up(self, gossiper: Gossiper) -> bool:
        """Return False while more neighbours than may be hostile have not acknowledged the last value.

        So training is not far ahead of gossip on slow links, and hostile neighbours cannot delay it.
        """
        in_flight = gossiper.in_flight()
        return all(
            in_flight[model] <= tolerated(self.hostile, len(gossiper.neighbours(model)))
            for model in gossiper.models
        )

    def step(self, gossiper: Gossiper, now: float) -> None:
        """Send what was requested, as far as neighbours are free."""
        for _ in range(self._requests):
            self.end_round(gossiper)
        for model in gossiper.models:
            if not gossiper.injected(model):
                continue
            if (self._requests or model in self._waiting) and self._send(gossiper, model, now):
                self._waiting.discard(model)
            elif self._requests:
                self._waiting.add(model)
            if model not in self._value_before_training:
                self._remember_value(gossiper, model)
        self._requests = 0
        for model, peer in sorted(self._welcomes):
            if peer not in gossiper.reachable_neighbours(model) or (
                gossiper.injected(model)
                and peer in gossiper.free_neighbours(model)
                and gossiper.send_values(model, [peer], now)
            ):
                self._welcomes.discard((model, peer))

    def end_round(self, gossiper: Gossiper) -> None:
        """Count a round of own training, without sending: allowances grow, and a newcomer starts.

        `step` calls it for every request; a driver that decides itself when values are sent calls it instead.
        """
        for model in gossiper.models:
            self._rounds[model] += 1
            self._own_losses.pop(model, None)
            if neighbours := len(gossiper.neighbours(model)):
                growth = RATE * min(self.fanout, neighbours) / neighbours
                for record in self._records.get(model, {}).values():
                    record.allowance = min(MAX_ALLOWANCE, record.allowance + growth)
            if (before := self._value_before_training.get(model)) is not None:
                self._training_move[model] = norm(gossiper.value(model) - before)
                self._remember_value(gossiper, model)
            if self._collected.get(model) and not gossiper.injected(model):
                self._start_from_median(gossiper, model)

    def _send(self, gossiper: Gossiper, model: str, now: float) -> bool:
        """Send the own value to the free neighbours that have waited longest.

        Returns False if there are neighbours, but none is free; then it is tried again.
        """
        free = gossiper.free_neighbours(model)
        if not free:
            return not gossiper.reachable_neighbours(model)
        shuffled = [free[index] for index in gossiper.rng.permutation(len(free))]
        chosen = sorted(shuffled, key=lambda peer: self._served.get((model, peer), 0))
        chosen = sorted(chosen[: self.fanout])
        for peer in chosen:
            self._served[model, peer] = self._rounds[model]
        gossiper.send_values(model, chosen, now)
        return True

    def _remember_value(self, gossiper: Gossiper, model: str) -> None:
        """In the first rounds, keep a copy of the own value, to measure how far training moves it."""
        if self._rounds[model] < EARLY_ROUNDS:
            self._value_before_training[model] = np.array(gossiper.value(model))
        else:
            self._value_before_training.pop(model, None)

    # --- receiving ------------------------------------------------------------------------------

    def value_after(self, gossiper: Gossiper, give: Give) -> Array | str:
        """Return the own value after a received one has moved it, or why the received one is void."""
        model, key = give.model, self._key_of(give.sender)
        if defect := self._defect(gossiper, give):
            return defect
        if not gossiper.injected(model):
            return self._collect(gossiper, model, key, give.value)
        records = self._records.setdefault(model, {})
        record = records.setdefault(key, NeighbourRecord())
        if len(records) > MAX_RECORDS:
            del records[next(iter(records))]
        if record.allowance < 1:
            return "allowance"
        record.allowance -= 1
        record.distance, record.excess, step = self._judge(gossiper, give, key)
        if step is None:
            return gossiper.value(model)
        if self._rounds[model] < EARLY_ROUNDS and model in self._value_before_training:
            # Then the distance to the value after training is that by which training alone moved it.
            self._value_before_training[model] += step
        return gossiper.value(model) + step

    def would_move(self, gossiper: Gossiper, give: Give) -> Array | str:
        """Return what `value_after` would return if it were called now, but change nothing.

        For studies of hostile peers; "allowance" also while our own value does not count yet.
        """
        if defect := self._defect(gossiper, give):
            return defect
        if not gossiper.injected(give.model) or self.allowance(give.model, give.sender) < 1:
            return "allowance"
        *_, step = self._judge(gossiper, give, self._key_of(give.sender))
        own = gossiper.value(give.model)
        return own if step is None else own + step

    def _defect(self, gossiper: Gossiper, give: Give) -> str | None:
        """Return why a value is void before it is looked at, or None."""
        if give.sender not in gossiper.neighbours(give.model):
            return "no-neighbour"
        if give.weight:
            return "weight"
        return None if is_finite(give.value) else "not-finite"

    def _judge(self, gossiper: Gossiper, give: Give, key: str) -> tuple[float, float, Array | None]:
        """Return a value's distance and excess loss, and the step towards it; None for no step."""
        model = give.model
        own, neighbours = gossiper.value(model), gossiper.neighbours(model)
        with np.errstate(over="ignore", invalid="ignore"):
            step = np.subtract(give.value, own, dtype=own.dtype, casting="same_kind")
        distance, excess = norm(step), self._excess(model, give.value)
        present = {self._key_of(peer) for peer in neighbours} - {key}
        distances, excesses = [distance], [excess]
        for sender, record in self._records.get(model, {}).items():
            if sender in present and record.distance is not None:
                distances.append(record.distance)
                excesses.append(record.excess)
        b = tolerated(self.hostile, len(neighbours))
        is_early = self._rounds[model] <= EARLY_ROUNDS
        early_move = self._training_move.get(model, 0.0) if is_early else None
        tau, q = limits(distances, excesses, b, early_move)
        factor = step_factor(distance, excess, tau, q)
        factor *= min(1.0, gossiper.claimed_weight(give.sender) / gossiper.injected(model))
        if not factor:
            return distance, excess, None
        step *= factor / (min(self.fanout, len(neighbours)) + 1)
        return distance, excess, step

    def _excess(self, model: str, value: Array) -> float:
        """Return the excess loss of a value, infinite if it is NaN; 0 if this peer cannot measure any."""
        if self.score is None:
            return 0.0
        if model not in self._own_losses:
            self._own_losses[model] = self.score(model, None)
        own_loss = self._own_losses[model]
        if not math.isfinite(own_loss):
            return 0.0  # a peer without samples, or one that has diverged, cannot judge
        excess = self.score(model, value) - own_loss
        return math.inf if math.isnan(excess) else max(0.0, excess)

    def _collect(self, gossiper: Gossiper, model: str, key: str, value: Array) -> Array | str:
        """Keep a newcomer's first values; return the value to start from once they are enough."""
        collected = self._collected.setdefault(model, {})
        neighbours = gossiper.reachable_neighbours(model)
        enough = min(2 * tolerated(self.hostile, len(neighbours)) + 1, len(neighbours))
        collected[key] = np.array(value)
        if len(collected) < enough:
            return "collected"
        return self._start_from_median(gossiper, model)

    def _start_from_median(self, gossiper: Gossiper, model: str) -> Array:
        """Start from the coordinate-wise median of the collected values, with the promised weight."""
        own = gossiper.value(model)
        median = np.median(list(self._collected.pop(model).values()), axis=0).astype(own.dtype)
        gossiper.set_value(model, median)
        if promised := gossiper.promised(model):
            gossiper.inject(model, promised)
        return median

    # --- state ----------------------------------------------------------------------------------

    def allowance(self, model: str, sender: str) -> float:
        """Return how many more values of a partial model are looked at from this sender."""
        return self._records.get(model, {}).get(self._key_of(sender), NeighbourRecord()).allowance

    def update_models(self, models: Collection[str]) -> None:
        """Forget partial models that have ended."""
        for table in (
            self._records, self._collected, self._value_before_training, self._training_move, self._own_losses
        ):  # fmt: skip
            for model in table.keys() - set(models):
                del table[model]

    def snapshot(self) -> dict[str, Any]:
        """Return what is known of neighbours, and the number of own rounds."""
        return {
            "rounds": dict(self._rounds),
            "known": [
                [model, key, record.allowance, record.distance, record.excess]
                for model, records in self._records.items()
                for key, record in records.items()
            ],
        }

    def restore(self, data: dict[str, Any]) -> None:
        self._rounds = Counter(data["rounds"])
        for model, key, allowance, distance, excess in data["known"]:
            self._records.setdefault(model, {})[key] = NeighbourRecord(allowance, distance, excess)


# --- robust means in lockstep --------------------------------------------------------------------

RobustRule: TypeAlias = Callable[[Array, Sequence[Array], int], Array]
"""rule(own value, values of the others, b) returns the value to continue with."""


def clipped_mean(own: Array, others: Sequence[Array], b: int) -> Array:
    """Return the mean of the own value and the others, each first moved to within a radius of the own one.

    The radius is the (2b+1)-th largest distance, so that at least b+1 honest values are as far or farther;
    with fewer than 2b+1 others, the own value stays as it is.
    """
    differences = [np.subtract(value, own, dtype=np.float64) for value in others]
    distances = [float(np.linalg.norm(difference)) for difference in differences]
    radius = sorted(distances, reverse=True)[2 * b] if len(distances) > 2 * b else 0.0
    step = np.zeros(own.shape)
    for difference, distance in zip(differences, distances, strict=True):
        if np.isfinite(distance):
            step += difference * min(1.0, radius / distance if distance else 1.0)
    return (own + step / (len(others) + 1)).astype(own.dtype)


def trimmed_mean(own: Array, others: Sequence[Array], b: int) -> Array:
    """Return, per coordinate, the mean of all values without the b largest and the b smallest.

    Of fewer than 2b+1 values the middle ones are left.
    """
    values = np.sort(_stack_finite(own, others), axis=0)
    cut = min(b, (len(values) - 1) // 2)
    return values[cut : len(values) - cut].mean(axis=0, dtype=np.float64).astype(own.dtype)


def median(own: Array, others: Sequence[Array], b: int) -> Array:
    """Return the coordinate-wise median of all values; b is not used."""
    return np.median(_stack_finite(own, others), axis=0).astype(own.dtype)


def _stack_finite(own: Array, others: Sequence[Array]) -> Array:
    """Stack the own value and those of the others that are finite."""
    return np.stack([own, *(value for value in others if np.isfinite(value).all())])


ROBUST: Mapping[str, RobustRule] = MappingProxyType(
    {"clipped": clipped_mean, "trimmed": trimmed_mean, "median": median}
)


class RobustMean:
    """Lets `RoundsMode` and `ServerMode` take a robust mean of values without weight, not the exact mean.

    It holds the values that arrived in the present exchange, by partial model and sender.

    rule: "clipped", "trimmed" or "median". hostile: how many neighbours may be hostile, or "auto".
    """

    def __init__(self, rule: str, hostile: Hostile = "auto") -> None:
        self._rule = ROBUST[rule]
        self._hostile: Hostile = hostile
        self._values: dict[str, dict[str, Array]] = {}

    def add(self, gossiper: Gossiper, give: Give) -> Array | str:
        """Keep a value; return the own one, which stays as it is until the end of the exchange."""
        if give.weight:
            return "weight"
        if not np.isfinite(give.value).all():
            return "not-finite"
        self._values.setdefault(give.model, {})[give.sender] = np.array(give.value)
        return gossiper.value(give.model)

    def combine(self, gossiper: Gossiper, model: str) -> None:
        """Replace the own value by the robust mean of all that arrived."""
        values = self._values.pop(model, {})
        if values:
            b = tolerated(self._hostile, len(values))
            others = [values[sender] for sender in sorted(values)]
            gossiper.set_value(model, self._rule(gossiper.value(model), others, b))

    def rows(self) -> list[list[Any]]:
        """Return the values that it holds as rows of model, sender, value, for a snapshot."""
        return [
            [model, sender, value]
            for model, values in self._values.items()
            for sender, value in values.items()
        ]

    def restore(self, rows: Sequence[Sequence[Any]]) -> None:
        for model, sender, value in rows:
            self._values.setdefault(model, {})[sender] = value
