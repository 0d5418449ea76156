"""A client: an ordinary learner, trained by epochs, with places where a method adds terms of its own."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

from torch import Tensor

from ...models import (
    GradientTerm,
    Metrics,
    ModelError,
    SgdLearner,
    SlicedNetwork,
    adding_to_gradient,
)


class Client:
    """One peer of a federation: its learner and how many epochs it trains in a round.

    The learner's local samples become one pass over its samples, so that `train()` is deck 001's
    ClientUpdate: E epochs of batches of B, in the learner's own order.
    """

    def __init__(self, learner: SgdLearner, epochs: int = 1):
        if epochs < 1:
            raise ModelError(f"{epochs} local epochs: a client trains at least one")
        self.learner, self.epochs = learner, epochs
        learner.local_samples = self.samples

    @property
    def name(self) -> str:
        """The peer's name."""
        return self.learner.network.peer

    @property
    def network(self) -> SlicedNetwork:
        """The client's network."""
        return self.learner.network

    @property
    def samples(self) -> int:
        """n_k, the number of its training samples."""
        return len(self.learner.samples[1])

    @property
    def steps(self) -> int:
        """Gradient steps of one `train()`."""
        return self.epochs * math.ceil(self.samples / self.learner.batch)

    def values(self) -> Tensor:
        """The network's parameters as one vector (a copy)."""
        return self.network.flat.detach().clone()

    def load(self, values: Tensor) -> None:
        """Replace the network's parameters."""
        self.network.flat.copy_(values)

    def train(self) -> Metrics:
        """E epochs over the client's own samples."""
        return self.learner.train(self.epochs)

    def train_some(self, samples: int) -> Metrics:
        """Go on with the next so many samples of the epoch."""
        self.learner.local_samples = samples
        try:
            return self.learner.train(1)
        finally:
            self.learner.local_samples = self.samples

    def test(self) -> Metrics:
        """The network on the client's own test samples."""
        return self.learner.test()

    def adding(self, term: GradientTerm) -> AbstractContextManager[None]:
        """While inside, every step descends along gradient + term(parameters).

        Papers write terms beside the *mean* loss of a batch: give the learner `reduction="mean"`.
        """
        return adding_to_gradient(self.learner, term)
