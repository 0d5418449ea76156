"""FedPer (Arivazhagan et al. 2019): base layers are averaged, the last layers are each client's own.

W_B ← Σ_k n_k/n · W_B,k        W_P,k never leaves client k
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...gossip import Count
from ...models import Metrics, ModelError, SlicedNetwork
from .method import Client, RoundContext, ServerMethod, mean


@dataclass(frozen=True)
class State:
    """The server's base layers, where they lie in a network, and the clients' networks."""

    base: Tensor
    where: Tensor
    own: tuple[Tensor, ...]


class FedPer(ServerMethod):
    """FedAvg below, personal layers above."""

    nearest_without_server = "gossamer"

    personal: Count = 1
    """K_P: how many of the last layers with parameters a client keeps to itself."""

    def start(self, clients: Sequence[Client]) -> State:
        where = base_coordinates(clients[0].network, self.personal)
        own = tuple(client.values() for client in clients)
        return State(own[0][where], where, own)

    def round(self, state: State, clients: Sequence[Client], context: RoundContext) -> State:
        own, trained, n = list(state.own), [], []
        for k in context.pick(clients, self.participation):
            client = clients[k]
            client.load(own[k].index_copy(0, state.where, context.to_client(state.base)))
            client.train()
            own[k] = client.values()
            trained.append(context.to_server(own[k][state.where], since=state.base))
            n.append(client.samples)
        return State(mean(trained, n), state.where, tuple(own))

    def test(self, state: State, clients: Sequence[Client]) -> list[Metrics]:
        for client, own in zip(clients, state.own, strict=True):
            client.load(own.index_copy(0, state.where, state.base))
        return [client.test() for client in clients]


def base_coordinates(network: SlicedNetwork, personal: int) -> Tensor:
    """Places in the flat vector of all values but the parameters of the last `personal` layers."""
    module = network.module
    layers = [layer for layer in module.modules() if [*layer.parameters(recurse=False)]]
    if personal >= len(layers):
        raise ModelError(
            f"fedper: {personal} personal layers of a network that has {len(layers)} with parameters "
            f"leave nothing to share; give at most {len(layers) - 1}"
        )
    own = {id(value) for layer in layers[-personal:] for value in layer.parameters(recurse=False)}
    shared = torch.ones(len(network.flat), dtype=torch.bool)  # statistics that are averaged, too
    first = 0
    for parameter in module.parameters():
        shared[first : first + parameter.numel()] = id(parameter) not in own
        first += parameter.numel()
    return shared.nonzero().flatten()
