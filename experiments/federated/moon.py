"""MOON (Li, He and Song 2021): FedAvg with a contrastive term between models.

    ℓ = ℓ_sup + μ · ℓ_con
    ℓ_con = −log( e^{sim(z, z_glob)/τ} / (e^{sim(z, z_glob)/τ} + e^{sim(z, z_prev)/τ}) )

z is what the network being trained makes of a sample, z_glob what the server's makes of it, z_prev what
the client's own network made of it after its last training; sim is the cosine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from ...gossip import Positive
from ...models import ModelError
from .method import Client, RoundContext, ServerMethod, Strength, mean


@dataclass(frozen=True)
class State:
    """The server's network, and every client's own of the last round in which it took part."""

    w: Tensor
    previous: tuple[Tensor, ...]


class Moon(ServerMethod):
    """Pulls a client's representation towards the server's and away from its own former one."""

    mu: Strength = 1.0
    """μ: the weight of the contrastive term; 0 is FedAvg."""
    temperature: Positive = 0.5
    """τ: lower it to tell representations apart more sharply."""

    def start(self, clients: Sequence[Client]) -> State:
        w = clients[0].values()
        last_linear(clients[0].network.module)  # refuse now what cannot work
        return State(w, tuple(w for _ in clients))

    def round(self, state: State, clients: Sequence[Client], context: RoundContext) -> State:
        w, previous, trained, n = state.w, list(state.previous), [], []
        for k, client in self.participants(clients, context, w):
            with contrasting(client, w, previous[k], self.mu, self.temperature):
                client.train()
            previous[k] = client.values()
            trained.append(context.to_server(previous[k], since=w))
            n.append(client.samples)
        return State(mean(trained, n), tuple(previous))


@contextmanager
def contrasting(client: Client, w: Tensor, before: Tensor, mu: float, tau: float) -> Iterator[None]:
    """While inside, the client's loss has the contrastive term."""
    learner, module = client.learner, client.network.module
    supervised = learner.loss
    with _watching(module) as seen:

        def loss(outputs: Tensor, labels: Tensor) -> Tensor:
            x, z = seen["x"], seen["z"]
            with torch.no_grad():
                functional_call(module, _named(module, w), (x,))
                z_glob = seen["z"]
                functional_call(module, _named(module, before), (x,))
                z_prev = seen["z"]
            return supervised(outputs, labels) + mu * contrastive(z, z_glob, z_prev, tau)

        learner.loss = loss
        try:
            yield
        finally:
            learner.loss = supervised


def contrastive(z: Tensor, z_glob: Tensor, z_prev: Tensor, tau: float) -> Tensor:
    """ℓ_con, one number per sample."""
    near = F.cosine_similarity(z, z_glob, dim=1) / tau
    far = F.cosine_similarity(z, z_prev, dim=1) / tau
    return F.softplus(far - near)  # −log(e^near / (e^near + e^far))


def last_linear(module: nn.Module) -> nn.Linear:
    """The classifier; what goes into it is the representation."""
    found = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    if not found:
        raise ModelError(
            f"{type(module).__name__} has no Linear layer: moon takes the input of the last one for a "
            "sample's representation"
        )
    return found[-1]


@contextmanager
def _watching(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """What the module was last given, and its representation of it."""
    seen: dict[str, Tensor] = {}

    def inputs(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        seen["x"] = arguments[0]

    def representation(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        seen["z"] = arguments[0].flatten(1)

    handles = [
        module.register_forward_pre_hook(inputs),
        last_linear(module).register_forward_pre_hook(representation),
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _named(module: nn.Module, values: Tensor) -> dict[str, Tensor]:
    """A flat vector as the module's parameters, and copies of its statistics, which stay as they are."""
    found, first = {name: value.clone() for name, value in module.named_buffers()}, 0
    for name, parameter in module.named_parameters():
        found[name] = values[first : first + parameter.numel()].view_as(parameter)
        first += parameter.numel()
    return found
