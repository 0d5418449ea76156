"""What a device learns: a small network on its own samples; the entry point my_device:make_learner."""

import secrets

import torch

from gossamer.models import SgdLearner, SlicedNetwork, mlp


def make_learner() -> SgdLearner:
    """Return the device's learner: here its samples are drawn, yours come from its sensors."""
    seed = secrets.randbits(32)
    x = torch.randn(200, 8, generator=torch.Generator().manual_seed(seed))
    y = (x[:, :4].sum(1) > 0).long()
    network = SlicedNetwork(mlp("8=16=2"), {"global": "8-16-2"}, seed=0)
    return SgdLearner(network, (x[:150], y[:150]), (x[150:], y[150:]), local_samples=50)
