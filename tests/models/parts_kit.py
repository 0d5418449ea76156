"""What every found anatomy must pass: each test of it can fail for one wrong axis."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.models import Anatomy, SlicedNetwork, average, discover, permute


@torch.no_grad()
def shaken(module: nn.Module, seed: int = 0) -> nn.Module:
    """Values without structure, in float64: a gain of 1 would not show that it stayed behind."""
    module = copy.deepcopy(module).double().eval()
    generator = torch.Generator().manual_seed(seed)
    for value in module.parameters():
        value.add_(0.1 * torch.randn(value.shape, generator=generator, dtype=value.dtype))
    for value in module.buffers():
        if value.is_floating_point():
            value.add_(0.3 * torch.rand(value.shape, generator=generator, dtype=value.dtype))
    return module


@torch.no_grad()
def check_permutations(module: nn.Module, anatomy: Anatomy, x: Tensor, channels: int = 1) -> None:
    """Permuting any part leaves the function unchanged; inputs and outputs move along."""
    network = SlicedNetwork(shaken(module), {"all": 1.0}, anatomy=anatomy)
    x = x.double() if x.is_floating_point() else x
    expected = network(x)
    random = np.random.default_rng(1)
    for part in anatomy.parts:
        if part.cells == 1:
            continue
        before = network.flat.clone()
        order = random.permutation(part.cells)
        while (order == np.arange(part.cells)).all():
            order = random.permutation(part.cells)
        permute(network, part.name, order)
        assert not torch.equal(network.flat, before), part.name
        index = torch.from_numpy(order)
        given = x.index_select(channels, index) if part.name == "input" else x
        found = network(given)
        wanted = expected
        if part.name in anatomy.ends and part.name != "input":
            wanted = expected.index_select(1, index)
        assert float((found - wanted).abs().max()) <= 1e-5 * float(expected.abs().max()), part.name
        permute(network, part.name, np.argsort(order))
        assert torch.equal(network.flat, before)


def pair(module: nn.Module, anatomy: Anatomy, slices, **options) -> list[SlicedNetwork]:
    return [
        SlicedNetwork(shaken(module, seed).float(), slices, anatomy=anatomy, peer=name, **options)
        for seed, name in enumerate(("ann", "bob"))
    ]


def check_ownership(module: nn.Module, anatomy: Anatomy) -> None:
    """Every coordinate has one owner, and averaging changes only what is owned together."""
    networks = pair(module, anatomy, {"global": 0.6})
    slicing = networks[0].slicing
    owned = [slicing.coordinates(owner) for owner in slicing.averaged_models]
    everything = np.sort(np.concatenate([*owned, slicing.private]))
    assert np.array_equal(everything, np.arange(len(networks[0].flat)))
    count = sum(value.numel() for value in module.parameters())
    assert len(networks[0].flat) >= count
    before = [network.flat.clone() for network in networks]
    average(networks)
    shared = np.zeros(len(everything), dtype=bool)
    shared[slicing.coordinates("global")] = True
    for network, old in zip(networks, before, strict=True):
        changed = (network.flat != old).numpy()
        assert changed.any()
        assert not (changed & ~shared).any()


def check_fedavg(module: nn.Module, anatomy: Anatomy) -> None:
    """With every cell global, averaging is the plain mean of parameters and statistics."""
    networks = pair(module, anatomy, {"global": 1.0})
    states = [copy.deepcopy(network.module.state_dict()) for network in networks]
    average(networks)
    for name, value in networks[0].module.state_dict().items():
        if value.is_floating_point():
            mean = ((states[0][name].double() + states[1][name].double()) / 2).float()
            assert torch.equal(value, mean), name
            assert torch.equal(networks[1].module.state_dict()[name], mean), name


def check_all(module: nn.Module, x: Tensor, channels: int = 1, **options) -> Anatomy:
    anatomy = discover(module, x, **options)
    check_permutations(module, anatomy, x, channels)
    check_ownership(module, anatomy)
    check_fedavg(module, anatomy)
    return anatomy
