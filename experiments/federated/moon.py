"""MOON (Li, He and Song 2021): FedAvg with a contrastive term between models.

    ℓ = ℓ_sup + μ · ℓ_con
    ℓ_con = −log( e^{sim(z, z_glob)/τ} / (e^{sim(z, z_glob)/τ} + e^{sim(z, z_prev)/τ}) )

z is a sample's representation by the network being trained, z_glob by the server's network, z_prev by the
client's network after the last round in which it took part; sim is the cosine similarity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...gossip import Positive
from ...models import ModelError
from .method import Client, RoundContext, ServerMethod, Strength, mean

if TYPE_CHECKING:  # so that reading a config and `gossamer explain` do not import torch
    from torch import Tensor, nn

    from ...models import SlicedNetwork


@dataclass(frozen=True)
class State:
    """The server's network, and every client's network after the last round in which it took part."""

    w: Tensor
    previous: tuple[Tensor, ...]


class Moon(ServerMethod):
    """Pulls a client's representations towards the server's and away from those of its previous network."""

    mu: Strength = 1.0
    """μ: the weight of the contrastive term; 0 is FedAvg."""
    temperature: Positive = 0.5
    """τ: lower it to make the term react to smaller differences between representations."""

    def start(self, clients: Sequence[Client]) -> State:
        w = clients[0].values()
        last_linear(clients[0].network.module)  # raises for a network without a linear layer
        return State(w, tuple(w for _ in clients))

    def round(self, state: State, clients: Sequence[Client], context: RoundContext) -> State:
        w, previous, trained, n = state.w, list(state.previous), [], []
        for k, client in self.participants(clients, context, w):
            with adding_contrastive_term(client, w, previous[k], self.mu, self.temperature):
                client.train()
            previous[k] = client.values()
            trained.append(context.to_server(previous[k], relative_to=w))
            n.append(client.sample_count)
        return State(mean(trained, n), tuple(previous))


@contextmanager
def adding_contrastive_term(
    client: Client, w: Tensor, previous: Tensor, mu: float, tau: float
) -> Iterator[None]:
    """Return a context in which the contrastive term is added to the client's loss.

    w: the server's network. previous: the client's, after the last round in which it took part.
    """
    import torch
    from torch.func import functional_call

    learner, module = client.learner, client.network.module
    supervised = learner.loss
    with _recording_last_call(module) as recorded:

        def loss(outputs: Tensor, labels: Tensor) -> Tensor:
            x, z = recorded["x"], recorded["z"]
            with torch.no_grad():
                functional_call(module, _tensors_by_name(learner.network, w), (x,))
                z_glob = recorded["z"]
                functional_call(module, _tensors_by_name(learner.network, previous), (x,))
                z_prev = recorded["z"]
            return supervised(outputs, labels) + mu * contrastive_loss(z, z_glob, z_prev, tau)

        learner.loss = loss
        try:
            yield
        finally:
            learner.loss = supervised


def contrastive_loss(z: Tensor, z_glob: Tensor, z_prev: Tensor, tau: float) -> Tensor:
    """Return ℓ_con, one number per sample."""
    from torch.nn import functional as F

    to_global = F.cosine_similarity(z, z_glob, dim=1) / tau
    to_previous = F.cosine_similarity(z, z_prev, dim=1) / tau
    # With a = to_global and b = to_previous: −log(e^a / (e^a + e^b)).
    return F.softplus(to_previous - to_global)


def last_linear(module: nn.Module) -> nn.Linear:
    """Return the last linear layer, the classifier; its input is a sample's representation."""
    from torch import nn

    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    if not layers:
        raise ModelError(
            f"{type(module).__name__} has no Linear layer: moon uses the input of the last one as a "
            "sample's representation"
        )
    return layers[-1]


@contextmanager
def _recording_last_call(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Return a context with a dict of the input "x" and representation "z" of the module's latest call."""
    recorded: dict[str, Tensor] = {}

    def record_input(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        recorded["x"] = arguments[0]

    def record_representation(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        recorded["z"] = arguments[0].flatten(1)

    handles = [
        module.register_forward_pre_hook(record_input),
        last_linear(module).register_forward_pre_hook(record_representation),
    ]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def _tensors_by_name(network: SlicedNetwork, values: Tensor) -> dict[str, Tensor]:
    """Return the parameters that a flat vector holds, and copies of the network's buffers, by name."""
    tensors, start = {name: value.clone() for name, value in network.module.named_buffers()}, 0
    for name, parameter in network.parameters.items():
        tensors[name] = values[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return tensors
