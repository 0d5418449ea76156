"""Ready networks in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from torch import nn

from .errors import ModelError
from .layout import Layout

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "none": nn.Identity,
}


def mlp(layout: str, *, activation: str = "sigmoid", output: str | None = None) -> nn.Sequential:
    """A multi-layer perceptron from its layout: `mlp("784=300=100=10")`.

    `output` is the last layer's activation: by default the hidden one's, as in the paper; pass "none"
    to train logits with cross-entropy. `prelu` gives every cell a slope of its own.
    """
    sizes = Layout.network(layout).cells
    layers: list[nn.Module] = []
    for index, (inputs, cells) in enumerate(pairwise(sizes), start=1):
        last = index == len(sizes) - 1
        layers.append(nn.Linear(inputs, cells))
        layers.append(_activation(output if last and output is not None else activation, cells))
    return nn.Sequential(*layers)


def _activation(name: str, cells: int) -> nn.Module:
    if name == "prelu":
        return nn.PReLU(num_parameters=cells)
    if name not in ACTIVATIONS:
        raise ModelError(f"unknown activation {name!r}: there are {', '.join(ACTIVATIONS)}, prelu")
    return ACTIVATIONS[name]()
