"""FedPer (Arivazhagan et al. 2019): the base layers are averaged, the last layers are local to each client.

W_B ← Σ_k n_k/n · W_B,k        the base layers of client k, which has n_k of n samples
W_P,k                          the last ("personal") layers with their batch-norm statistics; they stay at k
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...gossip import Count
from ...models import ModelError
from .method import Client, RoundContext, ServerMethod, mean

if TYPE_CHECKING:  # so that a method's settings can be read and listed without importing torch
    from torch import Tensor

    from ...models import Metrics, SlicedNetwork


@dataclass(frozen=True)
class State:
    """The server's base layers, their coordinates in a network's flat vector, and the clients' flat vectors.

    Of a client's vector only the personal layers are used; `base` replaces the rest.
    """

    base: Tensor
    coordinates: Tensor
    networks: tuple[Tensor, ...]


class FedPer(ServerMethod):
    """FedAvg for all layers but the last few, which stay personal."""

    nearest_without_server = "gossamer"
    """The method `gossamer`: its peers can share the base layers, and keep the last ones to themselves."""

    personal: Count = 1
    """K_P: how many of the last layers with parameters (a batch norm is one, too), in order of definition, a
    client keeps to itself."""

    def start(self, clients: Sequence[Client]) -> State:
        coordinates = base_coordinates(clients[0].network, self.personal)
        networks = tuple(client.values() for client in clients)
        return State(networks[0][coordinates], coordinates, networks)

    def round(self, state: State, clients: Sequence[Client], context: RoundContext) -> State:
        networks, trained, n = list(state.networks), [], []
        for k in context.pick(clients, self.participation):
            client = clients[k]
            base = context.to_client(state.base)
            client.load(networks[k].index_copy(0, state.coordinates, base))
            client.train()
            networks[k] = client.values()
            trained.append(
                context.to_server(networks[k][state.coordinates], relative_to=state.base)
            )
            n.append(client.sample_count)
        return State(mean(trained, n), state.coordinates, tuple(networks))

    def test(self, state: State, clients: Sequence[Client]) -> list[Metrics]:
        for client, network in zip(clients, state.networks, strict=True):
            client.load(network.index_copy(0, state.coordinates, state.base))
        return [client.test() for client in clients]


def base_coordinates(network: SlicedNetwork, personal: int) -> Tensor:
    """Return the coordinates, in the flat vector, of all but the tensors of the last `personal` layers."""
    module = network.module
    modules = [*module.modules()]
    layers = [layer for layer in modules if [*layer.parameters(recurse=False)]]
    if personal >= len(layers):
        raise ModelError(
            f"fedper: personal is {personal}, but the network has only {len(layers)} layers with parameters, "
            f"so nothing would be shared; give at most {len(layers) - 1}"
        )
    personal_tensors = {
        id(tensor)
        for layer in modules[modules.index(layers[-personal]) :]
        for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
    }
    # The vector has buffers too: the running means and variances of batch norm.
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    is_shared = network.flat.new_ones(len(network.flat)).bool()
    for name, span in network.slicing.anatomy.spans.items():
        is_shared[span] = id(tensors[name]) not in personal_tensors
    return is_shared.nonzero().flatten()
