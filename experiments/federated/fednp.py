"""FedNP (Wu et al. 2023) with a server, as a method of the comparison: the paper's Algorithm 1, corrected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import Tensor

from ...models.fednp import FedNPLearner, FedNPOptions, Natural, server_cavities
from ..config.tables import Count, Positive
from .client import Client
from .method import ServerMethod, Share, Strength, Turn, mean


@dataclass(frozen=True, eq=False)
class State:
    """The server's parameters (f and the NPN among them), clients' wrapped learners, and their sites."""

    w: Tensor
    learners: tuple[FedNPLearner, ...]
    sites: tuple[Natural, ...]


class FedNP(ServerMethod):
    """FedAvg whose clients also estimate the whole federation's data, and are held to what it suggests."""

    strength: Strength = 0.01
    """λ: raise it when clients drift apart in local training; 0 is FedAvg."""
    dimensions: Count = 10
    """Of the latent z."""
    hidden: Count = 16
    """Hidden cells of f and of the NPN."""
    spread: Positive = 0.1
    """ε: smaller pulls harder."""
    auxiliary_rate: Positive = 0.01
    """The learning rate of f and the NPN."""
    damping: Share = 0.5
    """How far a site moves in one update."""
    nodes: Annotated[int, Field(ge=2, le=100)] = 20
    """Of the quadrature."""
    freeze_z: bool = False
    """The control: z stays at its prior."""
    features: str = "last"
    """What f looks at: `last` for what enters the classifier, as in the paper, or `input`."""

    def start(self, clients: Sequence[Client]) -> State:
        options = FedNPOptions(
            strength=self.strength, dimensions=self.dimensions, hidden=self.hidden,
            spread=self.spread, rate=self.auxiliary_rate, damping=self.damping, nodes=self.nodes,
            freeze_z=self.freeze_z,
        )  # fmt: skip
        learners = tuple(
            FedNPLearner(client.learner, options, features=self.features) for client in clients
        )
        return State(clients[0].values(), learners, tuple(one.site for one in learners))

    def round(self, state: State, clients: Sequence[Client], turn: Turn) -> State:
        sites, trained, n = list(state.sites), [], []
        cavities = server_cavities(state.learners[0].prior, sites)
        for k in turn.pick(clients, self.participation):
            client, learner, w = clients[k], state.learners[k], turn.to_client(state.w)
            client.load(w)
            learner.receive(cavities[k], peers=len(clients))
            learner.train(client.epochs)
            sites[k] = learner.site
            trained.append(turn.to_server(client.values(), since=w))
            n.append(client.samples)
        return State(mean(trained, n), state.learners, tuple(sites))

    def server_values(self, state: State) -> Tensor:
        return state.w
