"""Terms added to a learner's gradient, and FedProx as a learner: for the arena and for live peers alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ModelError
from .learner import Metrics
from .network import SlicedNetwork
from .sgd import SgdLearner

GradientTerm = Callable[[Tensor], Tensor]
"""From a network's flat parameters to what is added to their gradient."""


@contextmanager
def adding_to_gradient(learner: SgdLearner, term: GradientTerm) -> Iterator[None]:
    """While inside, every step of the learner descends along gradient + term(parameters)."""
    optimizer = learner.optimizer
    learner.optimizer = _Corrected(optimizer, learner.network, term)  # type: ignore[assignment]
    try:
        yield
    finally:
        learner.optimizer = optimizer


class Proximal:
    """A learner that is held near what it got from the last averaging (FedProx, Li et al. 2020).

        h(w) = F(w) + μ/2 · ‖w − w_t‖²,    w_t: the values when training began

    In `server` mode with one model of all cells this is FedProx. In the other modes, and for partial
    models, it is the same pull without a server: w_t is what gossip has left in the network.

    mu
        Raise it when peers' data differ and training drifts apart, lower it to learn faster. It stands
        beside the mean loss of a batch, also where the learner sums.
    """

    def __init__(self, learner: SgdLearner, mu: float):
        if not 0 <= mu < float("inf"):
            raise ModelError(f"the proximal term's strength must be 0 or more, not {mu}")
        self.network, self._learner = learner.network, learner
        self._pull = mu * (learner.batch if learner.reduction == "sum" else 1)

    def train(self, steps: int) -> Metrics:
        """Train `steps` times, pulled back to where training began."""
        w = self.network.flat.detach().clone()
        with adding_to_gradient(self._inner(), lambda y: self._pull * (y - w)):
            return self._learner.train(steps)

    def test(self) -> Metrics:
        """The learner's own test."""
        return self._inner().test()

    def state(self) -> dict[str, Any]:
        """The learner's own state: between two trainings there is no other."""
        return self._learner.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from where `state` was taken."""
        self._learner.restore(state)

    def _inner(self) -> SgdLearner:
        """The learner, on the network that this one has now: it may have been replaced from outside."""
        self._learner.network = self.network
        return self._learner


class _Corrected:
    """An optimizer that adds a term to the gradients before each of its steps."""

    def __init__(self, inner: Any, network: SlicedNetwork, term: GradientTerm):
        self._inner, self._network, self._term = inner, network, term
        self._parameters: list[nn.Parameter] = list(network.module.parameters())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self._inner.zero_grad(set_to_none=set_to_none)

    @torch.no_grad()
    def step(self) -> None:
        """Add the term, then descend."""
        addition, first = self._term(self._network.flat), 0
        for parameter in self._parameters:
            piece = addition[first : first + parameter.numel()].view_as(parameter)
            parameter.grad = piece.clone() if parameter.grad is None else parameter.grad + piece
            first += parameter.numel()
        self._inner.step()
