"""What the peers of a swarm hold, as arrays: estimates, weights, and the books of the whole swarm."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from ...gossip import ONE
from .draws import Floats, Ints
from .pool import Pool
from .rows import Rows
from .world import Flags


class Tally:
    """A sum of masses: weight · value, and weight."""

    def __init__(self, coordinates: int):
        self.vector = np.zeros(coordinates)
        self.weight = 0

    def add(self, values: Floats, weights: Ints, sign: int = 1) -> None:
        """Add mass; with sign −1 take it away."""
        self.vector += sign * (weights.astype(np.float64) @ values)
        self.weight += sign * int(weights.sum())


class Holdings:
    """Estimates and integer weights of all peers, and the pool of values on their way."""

    def __init__(self, values: Floats, own: Ints, present: Flags, threads: int):
        self.estimates = np.array(values, dtype=np.float64)
        self.own = own
        self.weights = np.where(present, own, 0)
        self.present = present.copy()
        self.pool = Pool(values.shape[1])
        self.injected, self.died = Tally(values.shape[1]), Tally(values.shape[1])
        self.injected.add(self.estimates, self.weights)
        self._rows = Rows(self.estimates, threads)

    def push(
        self, peer: Ints, fan: Ints, uses: Ints, rule: ShareRule, floor: int
    ) -> tuple[Ints, Ints]:
        """Take a share for each of `fan` neighbours; returns (share, row of the value) per push.

        A peer whose weight is too small to be split gives nothing: its share is 0.
        """
        weight = self.weights[peer]
        share = rule(weight, fan)
        share[np.minimum(share, weight - share * fan) < floor] = 0
        self.weights[peer] = weight - share * fan
        rows = self.pool.take(uses)
        self._rows.copy(peer, self.pool.values, rows)
        return share, rows

    def absorb(self, peer: Ints, rows: Ints, share: Ints) -> None:
        """Credit mass to peers, all different. A newcomer then adds its own weight at that value."""
        before = self.weights[peer]
        after = before + share
        self._rows.mix(peer, self.pool.values, rows, share / after)
        self.weights[peer] = after
        new = before == 0
        if new.any():
            who = peer[new]
            self.estimates[who] = self.pool.values[rows[new]]
            self.weights[who] += self.own[who]
            self.injected.add(self.estimates[who], self.own[who])

    def leave(self, peer: Ints) -> None:
        """Peers die, with what they hold."""
        self.died.add(self.estimates[peer], self.weights[peer])
        self.weights[peer] = 0
        self.present[peer] = False

    def arrive(self, peer: Ints) -> None:
        """Peers come, without weight until they hear from a neighbour."""
        self.present[peer] = True

    def average_distance(self, average: Floats) -> float:
        """Root mean square distance from an average, over peers that are there and have a say."""
        voices = self.present & (self.weights > 0)
        if not voices.any():
            return 0.0
        total = 0.0
        for part in np.array_split(np.flatnonzero(voices), max(1, voices.sum() // 4096)):
            total += float(np.square(self.estimates[part] - average).sum())
        return float(np.sqrt(total / voices.sum()))


ShareRule = Callable[[Ints, Ints], Ints]
"""(weights, neighbours in the push) → the units that each neighbour is given."""


def share_rule(fraction: float | None) -> ShareRule:
    """Equal parts for neighbours and peer, or a fraction of the weight, split among neighbours.

    All in whole units. The fraction is taken as a ratio of numbers small enough that products of
    weights never overflow.
    """
    if fraction is None:
        return lambda weight, fan: weight // (fan + 1)
    if not 0 < fraction < 1:
        raise ValueError(f"fraction is {fraction}, it must lie between 0 and 1")
    top, bottom = Fraction(fraction).limit_denominator(1 << 20).as_integer_ratio()
    return lambda weight, fan: (weight // bottom * top + weight % bottom * top // bottom) // fan


def whole_weights(peers: int, weights: Ints | None) -> Ints:
    """Units per peer: ONE each, or as given."""
    return np.full(peers, ONE, np.int64) if weights is None else np.array(weights, np.int64)
