"""The arena: a whole swarm in one process, train, average, repeat; one seed, one result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..models import Learner, Metrics, ModelError, average


@dataclass(frozen=True)
class Round:
    """What the swarm knew after a round; `tests` has one entry per peer, or none if not tested."""

    index: int
    training: tuple[Metrics, ...]
    tests: tuple[Metrics, ...]

    @property
    def accuracy(self) -> float:
        """The mean over peers of the accuracy on their own tests (NaN if not tested)."""
        return (
            float(np.mean([test.accuracy for test in self.tests])) if self.tests else float("nan")
        )


class Arena:
    """Runs learners round by round.

        for round in Arena(learners).run(30):
            print(round.index, round.accuracy)

    every
        Stretches that each learner trains between two averagings.
    weights
        One number per learner (sample counts, say); by default all count the same.
    test_every
        Rounds between two tests. The last round is always tested.
    """

    def __init__(
        self,
        learners: Sequence[Learner],
        *,
        every: int = 1,
        weights: Sequence[float] | None = None,
        test_every: int = 1,
    ):
        if not learners:
            raise ModelError("an arena needs at least one learner")
        names = [learner.network.peer for learner in learners]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ModelError(
                f"two networks are those of peer {twice[0]!r}: give each its own peer= name, or they "
                "would average what is private"
            )
        self._learners = list(learners)
        self._every, self._weights, self._test_every = every, weights, test_every

    def run(self, rounds: int) -> Iterator[Round]:
        """Train and average `rounds` times, yielding after each; stop iterating to stop early."""
        for index in range(1, rounds + 1):
            training = tuple(learner.train(self._every) for learner in self._learners)
            average([learner.network for learner in self._learners], self._weights)
            tested = index % self._test_every == 0 or index == rounds
            tests = tuple(learner.test() for learner in self._learners) if tested else ()
            yield Round(index, training, tests)
