"""FedNP (Wu et al. 2023) with a server: the paper's Algorithm 1, corrected, as a method of comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...models.fednp import FedNPOptions
from .method import Client, RoundContext, ServerMethod, mean

if TYPE_CHECKING:  # so that reading a config and `gossamer explain` do not import torch
    from torch import Tensor

    from ...models.fednp import FedNPLearner, Natural


@dataclass(frozen=True, eq=False)
class State:
    """The server's parameters, the clients' FedNP learners, and their sites (see models/fednp/learner.py).

    w includes f and the natural-parameter network. A site is the Gaussian factor that stands for a client's
    data in the approximate posterior (expectation propagation); the cavity of a client is the product of the
    prior and all other clients' sites.
    """

    w: Tensor
    learners: tuple[FedNPLearner, ...]
    sites: tuple[Natural, ...]


class FedNP(ServerMethod, FedNPOptions):
    """FedAvg whose clients also estimate the distribution of all clients' data, and regularise with it.

    Its settings are those of `[fednp]` in a swarm's config; the paper uses `features = "last"`.
    """

    def start(self, clients: Sequence[Client]) -> State:
        from ...models.fednp import FedNPLearner

        learners = tuple(FedNPLearner(client.learner, self) for client in clients)
        return State(clients[0].values(), learners, tuple(learner.site for learner in learners))

    def round(self, state: State, clients: Sequence[Client], context: RoundContext) -> State:
        from ...models.fednp import server_cavities

        sites, trained, n = list(state.sites), [], []
        cavities = server_cavities(state.learners[0].prior, sites)
        for k, client in self.participants(clients, context, state.w):
            learner = state.learners[k]
            learner.receive(cavities[k], peers=len(clients))
            learner.train(client.epochs)
            sites[k] = learner.site
            trained.append(context.to_server(client.values(), relative_to=state.w))
            n.append(client.sample_count)
        return State(mean(trained, n), state.learners, tuple(sites))
