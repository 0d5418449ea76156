"""FedNP among the methods of the comparison."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gossamer.experiments.federated.fedavg import FedAvg
from gossamer.experiments.federated.fednp import FedNP
from gossamer.experiments.federated.method import Client, RoundContext
from gossamer.models import ModelError, SgdLearner, SlicedNetwork, mlp


def clients() -> list[Client]:
    found = []
    for k in range(3):
        module = mlp("4=6=3", activation="relu", output="none")
        network = SlicedNetwork(module, {"global": "4-6-3"}, peer=str(k), seed=0)
        random = torch.Generator().manual_seed(k)
        x, y = torch.randn(10 + k, 4, generator=random), torch.full((10 + k,), k)
        learner = SgdLearner(
            network,
            (x, y),
            (x, y),
            batch=5,
            rate=0.1,
            reduction="mean",
            loss="cross-entropy",
            seed=k,
        )
        found.append(Client(learner, epochs=2))
    return found


def after(method, rounds: int = 3):
    some = clients()
    state = method.start(some)
    for index in range(rounds):
        context = RoundContext(np.random.default_rng(index))
        state = method.round(state, some, context)
    return method, state, some


def test_without_a_pull_it_is_fedavg():
    (_, plain, some), (_, state, _) = after(FedAvg()), after(FedNP(strength=0.0, dimensions=2))
    size = len(some[0].values())
    torch.testing.assert_close(state.w[:size], plain.w)


def test_with_one_it_is_not_and_cavities_come_from_the_others():
    method, state, some = after(FedNP(strength=0.1, dimensions=2))
    plain = after(FedAvg())[1].w
    assert not torch.allclose(state.w[: len(plain)], plain)
    assert all(float(site.precision.sum()) > 0 for site in state.sites)
    assert len(method.test(state, some)) == 3


def test_not_everybody_need_take_part_and_knobs_have_ranges():
    _, state, _ = after(FedNP(participation=0.4, dimensions=2), rounds=1)
    assert sum(float(site.precision.sum()) > 0 for site in state.sites) == 1
    for knobs in ({"strength": -1.0}, {"damping": 0.0}, {"nodes": 1}, {"auxiliary_rate": 0.0}):
        with pytest.raises(ModelError, match=next(iter(knobs))):
            FedNP(**knobs)
