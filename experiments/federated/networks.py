"""The clients' networks: a perceptron by its layout, or a ready network for images by its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...models import NETWORKS, ModelError, SlicedNetwork, discover, mlp
from ..data import Dataset, Samples
from .config import Comparison
from .partial import MODEL


def maker(config: Comparison, data: Dataset) -> Callable[[str, int], SlicedNetwork]:
    """(peer, seed) → its network, whole and shared; equal seeds give equal values at every peer."""
    shape = data.train.x.shape[1:]
    example = torch.zeros(1, *shape) if config.network.kind != "mlp" else None
    # Parts are searched for once, and are then the same for all.
    anatomy = discover(_module(config, data), example)

    def make(peer: str, seed: int) -> SlicedNetwork:
        return SlicedNetwork(
            _module(config, data), {MODEL: 1.0}, peer=peer, anatomy=anatomy, seed=seed
        )

    return make


def inputs_of(config: Comparison, samples: Samples) -> Tensor:
    """What the network reads: flat features for a perceptron, images as they are for the others."""
    return samples.flat() if config.network.kind == "mlp" else samples.x


def _module(config: Comparison, data: Dataset) -> nn.Module:
    network = config.network
    if network.kind == "mlp":
        if network.options:
            raise ModelError(
                "network.options are for the ready networks; a perceptron has a layout"
            )
        # Cross-entropy wants logits; the squared error an activation, as in the paper.
        output = "none" if config.training.loss == "cross-entropy" else network.activation
        return mlp(network.layout, activation=network.activation, output=output)
    shape = tuple(data.train.x.shape[1:])
    if len(shape) != 3:
        raise ModelError(
            f"network.kind {network.kind!r} reads images, and samples of {data.name} have the shape "
            f"{'×'.join(map(str, shape))}; use kind = 'mlp'"
        )
    build = NETWORKS[network.kind]
    known = inspect.signature(build).parameters
    given = {"channels": shape[0], "size": shape[-1], "classes": data.classes}
    own = [name for name in known if name not in given]
    if unknown := [name for name in network.options if name not in own]:
        raise ModelError(
            f"network.options: {network.kind!r} has no {unknown[0]!r}; it has {', '.join(own)}"
        )
    return build(**{k: v for k, v in given.items() if k in known}, **network.options)
