"""Tiny clients in float64, and the same network written by hand in numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from gossamer.experiments.federated import Client, RoundContext
from gossamer.models import Buffers, SgdLearner, SlicedNetwork, mlp

LAYOUT, INPUTS, HIDDEN, CLASSES = "3=4=2", 3, 4, 2
RATE = 0.3
SIZE = HIDDEN * INPUTS + HIDDEN + CLASSES * HIDDEN + CLASSES


def make_clients(
    sizes: Sequence[int] = (4, 6, 5),
    *,
    batch: int = 100,
    epochs: int = 1,
    equal: bool = False,
    rate: float = RATE,
    norm: Buffers | None = None,
) -> list[Client]:
    """Clients with data of their own (or the same for all), one full batch per epoch by default.

    norm: adds batch norm, and says what becomes of its statistics.
    """
    clients = []
    for place, count in enumerate(sizes):
        random = torch.Generator().manual_seed(0 if equal else 100 + place)
        x = torch.randn(count, INPUTS, generator=random, dtype=torch.float64)
        y = torch.randint(0, CLASSES, (count,), generator=random)
        module: nn.Module = mlp(LAYOUT, activation="tanh", output="none")
        if norm is not None:
            first, last = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, CLASSES)
            module = nn.Sequential(first, nn.BatchNorm1d(HIDDEN), nn.Tanh(), last)
        network = SlicedNetwork(
            module.double(), {"everyone": 1.0}, peer=str(place), seed=7, example=x,
            buffers=norm or "average",
        )  # fmt: skip
        learner = SgdLearner(
            network, (x, y), (x, y),
            batch=batch, reduction="mean", rate=rate, loss="cross-entropy",
            seed=1 if equal else 1 + place,
        )  # fmt: skip
        clients.append(Client(learner, epochs))
    return clients


def round_context(seed: int = 0) -> RoundContext:
    return RoundContext(np.random.default_rng(seed))


def values(client: Client) -> np.ndarray:
    return client.values().numpy()


def data(client: Client) -> tuple[np.ndarray, np.ndarray]:
    x, y = client.learner.samples
    return x.numpy(), y.numpy()


def unpack(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    a = HIDDEN * INPUTS
    b = a + HIDDEN
    c = b + CLASSES * HIDDEN
    return (
        w[:a].reshape(HIDDEN, INPUTS),
        w[a:b],
        w[b:c].reshape(CLASSES, HIDDEN),
        w[c:],
    )


def hidden(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    first, bias, _, _ = unpack(w)
    return np.tanh(x @ first.T + bias)


def gradient(
    w: np.ndarray, x: np.ndarray, y: np.ndarray, above: np.ndarray | None = None
) -> np.ndarray:
    """∇ of the mean cross-entropy; `above` is a further slope on the hidden activations."""
    _, _, second, bias = unpack(w)
    h = hidden(w, x)
    outputs = h @ second.T + bias
    p = np.exp(outputs - outputs.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    p /= len(y)
    slope = p @ second + (0 if above is None else above)
    slope = slope * (1 - h**2)
    return np.concatenate([(slope.T @ x).ravel(), slope.sum(0), (p.T @ h).ravel(), p.sum(0)])
