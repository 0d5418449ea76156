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
from .method import Client, ServerMethod, Turn, mean


@dataclass(frozen=True)
class State:
    """The server's base layers, where they lie in a network, and the clients' networks."""

    base: Tensor
    where: Tensor
    own: tuple[Tensor, ...]


class FedPer(ServerMethod):
    """FedAvg below, personal layers above."""

    nearest_without = "gossamer"

    personal: Count = 1
    """K_P: how many of the last layers with parameters a client keeps to itself."""

    def start(self, clients: Sequence[Client]) -> State:
        where = base_coordinates(clients[0].network, self.personal)
        own = tuple(client.values() for client in clients)
        return State(own[0][where], where, own)

    def round(self, state: State, clients: Sequence[Client], turn: Turn) -> State:
        own, trained, n = list(state.own), [], []
        for k in turn.pick(clients, self.participation):
            client = clients[k]
            client.load(_joined(state.own[k], turn.to_client(state.base), state.where))
            client.train()
            own[k] = client.values()
            trained.append(turn.to_server(own[k][state.where], since=state.base))
            n.append(client.samples)
        return State(mean(trained, n), state.where, tuple(own))

    def test(self, state: State, clients: Sequence[Client]) -> list[Metrics]:
        for client, own in zip(clients, state.own, strict=True):
            client.load(_joined(own, state.base, state.where))
        return [client.test() for client in clients]


def base_coordinates(network: SlicedNetwork, personal: int) -> Tensor:
    """Places in the flat vector of all values but the parameters of the last `personal` layers."""
    module = network.module
    layers = [
        layer for layer in module.modules() if any(True for _ in layer.parameters(recurse=False))
    ]
    if personal >= len(layers):
        raise ModelError(
            f"fedper: {personal} personal layers of a network that has {len(layers)} with parameters "
            f"leave nothing to share; give at most {len(layers) - 1}"
        )
    kept = {id(value) for layer in layers[-personal:] for value in layer.parameters(recurse=False)}
    pieces, first = [], 0
    for parameter in module.parameters():
        if id(parameter) not in kept:
            pieces.append(torch.arange(first, first + parameter.numel()))
        first += parameter.numel()
    pieces.append(torch.arange(first, len(network.flat)))  # statistics that are averaged
    return torch.cat(pieces)


def _joined(own: Tensor, base: Tensor, where: Tensor) -> Tensor:
    joined = own.clone()
    joined[where] = base
    return joined
