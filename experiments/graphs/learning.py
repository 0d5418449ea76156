"""The same swarm learns on each graph and may send the same bytes: which graph spends them best?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ...models import SgdLearner, SlicedNetwork, mlp, stream
from ...topology import Rule
from ..arena import Arena, Gossip
from ..data import Dataset, load, partition
from .given import Given

LAYOUT = "64=24=10"
PEERS = 128
"""Peers up to which a learning run is worth its time."""


@dataclass(frozen=True)
class Learning:
    """A swarm of perceptrons on the built-in digits.

    Peers start equal and hold few labels each (`shards` of the sorted digits), so that whoever mixes
    badly knows less. Raise `rounds` for a longer run, `local_samples` for more drift between exchanges.
    """

    rounds: int = 40
    local_samples: int = 80
    rate: float = 0.3
    shards: int = 2
    seed: int = 0

    @property
    def parameters(self) -> int:
        """Values in one message."""
        return sum(p.numel() for p in mlp(LAYOUT).parameters())

    @property
    def message(self) -> int:
        """Bytes of one message: its values as float32."""
        return 4 * self.parameters


@dataclass(frozen=True)
class Step:
    """After a round: megabytes that the swarm has sent, mean accuracy and that of its worst peer."""

    megabytes: float
    accuracy: float
    worst: float


@dataclass(frozen=True, eq=False)
class Paid(Gossip):
    """Gossip that makes, after each round, the exchanges which the bytes allowed so far pay for."""

    cost: float = 1.0
    """Bytes of one exchange."""
    allowance: float = 1.0
    """Bytes per round."""

    def exchanges_before(self, step: int) -> int:
        return int(step * self.allowance / self.cost * (1 + 1e-9))


def learn(given: Given, learning: Learning, budget: float, rule: Rule = "push") -> list[Step]:
    """Train in rounds; whenever the bytes allowed so far pay for it, the graph makes an exchange.

    `budget` is what the whole swarm may send in all rounds together. Push-sum's weights go on from
    exchange to exchange, so that few exchanges forget nobody.
    """
    paid = Paid(
        given.schedule,
        rule=rule,
        cost=given.messages() * learning.message,
        allowance=budget / learning.rounds,
    )
    steps = []
    for round in Arena(_learners(len(given.graph), learning), mixing=paid).run(learning.rounds):
        found = [test.accuracy for test in round.tests]
        sent = paid.exchanges_before(round.index) * paid.cost / 1e6
        steps.append(Step(sent, float(np.mean(found)), float(min(found))))
    return steps


def reached(steps: list[Step]) -> float:
    """The accuracy of a run: its last quarter's mean.

    The last round alone would flatter graphs with rare, dear exchanges when one falls on it.
    """
    last = steps[-max(1, len(steps) // 4) :]
    return float(np.mean([step.accuracy for step in last]))


def _learners(peers: int, learning: Learning) -> list[SgdLearner]:
    data = _digits()
    shares = partition.shards(
        data.train.y, peers, learning.shards, stream(learning.seed, "partition")
    )
    assert data.test is not None  # the built-in digits have one
    held = data.test.flat(), data.test.y
    learners = []
    for peer, share in enumerate(shares):
        network = SlicedNetwork(
            mlp(LAYOUT, activation="sigmoid", output="sigmoid"),
            {"everybody": LAYOUT.replace("=", "-")},
            peer=str(peer),
            seed=learning.seed,
        )
        own = data.train.take(share)
        learners.append(
            SgdLearner(
                network,
                (own.flat(), own.y),
                held,
                local_samples=learning.local_samples,
                rate=learning.rate,
                loss="squared",
                reduction="sum",
                seed=int(stream(learning.seed, "order", peer).integers(2**31)),
            )
        )
    return learners


@lru_cache(maxsize=1)
def _digits() -> Dataset:
    return load("digits")
