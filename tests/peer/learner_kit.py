"""A tiny learner: what processes of tests are pointed at as well, which find this folder alone."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Event

import torch

from gossamer.models import Metrics, ModelGraph, SgdLearner, SlicedNetwork, mlp

GLOBAL: dict[str, str] = {"global": "4-4-2"}


def make_learner(
    name: str,
    slices: Mapping[str, str] = GLOBAL,
    *,
    layout: str = "4=6=2",
    seed: int = 0,
    samples: int = 20,
    local_samples: int = 10,
    cross: bool = False,
    depends: Mapping[str, list[str]] | None = None,
) -> SgdLearner:
    """A tiny learner whose data depend on its name."""
    graph = ModelGraph({model: (depends or {}).get(model, []) for model in slices})
    network = SlicedNetwork(
        mlp(layout, activation="sigmoid", output="sigmoid"),
        dict(slices),
        graph=graph,
        peer=name,
        cross=cross,
        seed=seed,
    )
    inputs, outputs = (int(part) for part in (layout.split("=")[0], layout.split("=")[-1]))
    random = torch.Generator().manual_seed(sum(name.encode()))
    x = torch.randn(samples, inputs, generator=random)
    y = torch.randint(0, outputs, (samples,), generator=random)
    return SgdLearner(
        network,
        (x, y),
        (x, y),
        local_samples=local_samples,
        batch=5,
        rate=0.2,
        loss="squared",
        reduction="sum",
        seed=1,
    )


class Resting(SgdLearner):
    """A learner that leaves most of the processor to others: for peers that train until they are stopped."""

    def train(self, steps: int) -> Metrics:
        Event().wait(0.05)
        return super().train(steps)


def make_resting(name: str) -> SgdLearner:
    """A learner that trains slowly."""
    network = make_learner(name).network
    data = torch.zeros(4, 4), torch.zeros(4, dtype=torch.long)
    return Resting(network, data, data)


class Mistaken(SgdLearner):
    """A learner with a mistake in its code."""

    def train(self, steps: int) -> Metrics:
        raise ZeroDivisionError


def make_mistaken(name: str) -> SgdLearner:
    """A learner that cannot train."""
    fine = make_learner(name)
    data = torch.zeros(4, 4), torch.zeros(4, dtype=torch.long)
    return Mistaken(fine.network, data, data)
