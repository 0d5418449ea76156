"""FedNP (Wu et al. 2023) with a server: the paper's Algorithm 1, corrected, as a method of comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ...models.fednp import FedNPLearner, FedNPOptions, Natural, server_cavities
from .method import Client, RoundContext, ServerMethod, mean


@dataclass(frozen=True, eq=False)
class State:
    """The server's parameters, the clients' FedNP learners, and their sites.

    w includes f and the natural-parameter network. A site is a client's factor of the approximate posterior
    (expectation propagation).
    """

    w: Tensor
    learners: tuple[FedNPLearner, ...]
    sites: tuple[Natural, ...]


class FedNP(ServerMethod, FedNPOptions):
    """FedAvg whose clients also estimate the distribution of all clients' data, and regularise with it.

    Its knobs are those of `[fednp]` in a swarm's config; the paper uses `features = "last"`.
    """

    def start(self, clients: Sequence[Client]) -> State:
        learners = tuple(FedNPLearner(client.learner, self) for client in clients)
        return State(clients[0].values(), learners, tuple(one.site for one in learners))

    def round(self, state: State, clients: Sequence[Client], context: RoundContext) -> State:
        sites, trained, n = list(state.sites), [], []
        cavities = server_cavities(state.learners[0].prior, sites)
        for k, client in self.participants(clients, context, state.w):
            learner = state.learners[k]
            learner.receive(cavities[k], peers=len(clients))
            learner.train(client.epochs)
            sites[k] = learner.site
            trained.append(context.to_server(client.values(), since=state.w))
            n.append(client.samples)
        return State(mean(trained, n), state.learners, tuple(sites))
