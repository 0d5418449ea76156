"""Training the peers' networks apart, and asking networks for their answers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...models import mlp
from ...models.matching import Chain, Layer
from .fusing_setting import Share

RATE, BATCH, DECAY = 0.01, 32, 1e-6
START_DEVIATION, START_BIAS = 0.1, 0.1


def fresh(layout: str, seed: int) -> nn.Sequential:
    """A ReLU network with the paper's starting values: weights N(0, 0.1²), biases 0.1."""
    module = mlp(layout, activation="relu", output="none")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in module.named_parameters():
            if name.endswith("bias"):
                value.fill_(START_BIAS)
            else:
                value.normal_(0, START_DEVIATION, generator=generator)
    return module


def train(
    module: nn.Sequential,
    share: Share,
    *,
    epochs: int,
    seed: int,
    targets: Tensor | None = None,
    proximal: float = 0.0,
) -> nn.Sequential:
    """Train in place with Adam (amsgrad) in batches of 32.

    targets
        Class probabilities to imitate instead of the labels (distillation).
    proximal
        FedProx's pull towards the starting values.
    """
    parameters = list(module.parameters())
    start = [value.detach().clone() for value in parameters] if proximal else []
    optimizer = torch.optim.Adam(parameters, RATE, weight_decay=DECAY, amsgrad=True, fused=True)
    generator = torch.Generator().manual_seed(seed)
    wanted = share.y if targets is None else targets
    for _ in range(epochs):
        order = torch.randperm(len(share.y), generator=generator)
        for batch in order.split(BATCH):
            loss = F.cross_entropy(module(share.x[batch]), wanted[batch])
            if proximal:
                loss = loss + proximal / 2 * sum(
                    (value - first).square().sum()
                    for value, first in zip(parameters, start, strict=True)
                )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    return module


def chain_of(module: nn.Module, name: str = "the network") -> Chain:
    """The network as arrays."""
    return Chain.read({key: value.numpy() for key, value in module.state_dict().items()}, name)


def logits(chain: Chain, x: Tensor, activation: str = "relu") -> Tensor:
    """A chain's outputs before any last activation."""
    hidden = {"relu": torch.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "none": lambda h: h}
    h = x.double()
    for index, layer in enumerate(chain.layers):
        own = {name.rpartition(".")[2]: value for name, value in layer.own.items()}
        h = h @ torch.from_numpy(layer.weight).T
        if "bias" in own:
            h = h + torch.from_numpy(own["bias"])
        if index < chain.hidden:
            slopes = _slopes(layer)
            h = hidden[activation](h) if slopes is None else torch.where(h > 0, h, slopes * h)
    return h


def accuracy(outputs: Tensor, labels: Tensor) -> float:
    """The share of samples whose most active output is the label; a lone output says yes above 0."""
    if outputs.shape[1] == 1:
        return float(((outputs[:, 0] > 0) == (labels > 0)).double().mean())
    return float((outputs.argmax(dim=1) == labels).double().mean())


def has_slopes(chain: Chain) -> bool:
    """Whether hidden cells have slopes of their own (PReLU), which says what they compute."""
    return all(_slopes(layer) is not None for layer in chain.layers[:-1])


def _slopes(layer: Layer) -> Tensor | None:
    """PReLU keeps its slopes under the name `weight`, one per cell."""
    found = next((v for name, v in layer.own.items() if not name.endswith("bias")), None)
    return None if found is None else torch.from_numpy(found)
