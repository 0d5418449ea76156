"""Alignment of networks that are no chains: coupled channels, recurrent cells, heads, batch statistics."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gossamer.models import (
    Anatomy,
    ModelError,
    SlicedNetwork,
    average,
    discover,
    lstm_classifier,
    permute,
    resnet,
    small_cnn,
    unet,
    vit,
)
from gossamer.models.matching import align

torch.set_num_threads(1)

MAKERS = {
    "unet": (lambda: unet(1, 2, widths=(5, 6)), (1, 8, 8)),
    "small-cnn": (lambda: small_cnn(1, 8, 4, widths=(5, 6), hidden=7), (1, 8, 8)),
    "resnet": (lambda: resnet(1, 4, widths=(5, 6)), (1, 8, 8)),
    "lstm": (lambda: lstm_classifier(3, 4, hidden=7), (5, 3)),
    "vit": (lambda: vit(1, 8, 4, patch=4, width=8, depth=2, heads=2), (1, 8, 8)),
}


def inputs(name: str) -> Tensor:
    shape = MAKERS[name][1]
    return torch.randn(6, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def sliced(name: str, peer: str, buffers: str = "average", share: float = 0.8) -> SlicedNetwork:
    module = MAKERS[name][0]().double()
    found: Anatomy = discover(module, inputs(name))
    network = SlicedNetwork(
        module,
        {"global": share},
        anatomy=found,
        peer=peer,
        seed=3,
        buffers=buffers,  # type: ignore[arg-type]
    )
    generator = torch.Generator().manual_seed(2)
    for key, value in module.named_buffers():  # statistics that tell cells apart, and silence none
        drawn = torch.rand(value.shape, generator=generator, dtype=torch.float64)
        if key.endswith("mean"):
            value.copy_(0.1 * drawn)
        elif key.endswith("var"):
            value.copy_(0.5 + drawn)
    module.eval()
    return network


def scrambled(network: SlicedNetwork, name: str) -> SlicedNetwork:
    """The same network, its cells permuted inside the slices of every hidden part."""
    anatomy = network.slicing.anatomy
    twin = SlicedNetwork(
        deepcopy(network.module), {"global": 0.8}, peer=network.peer, buffers=network.buffers,
        anatomy=discover(network.module, inputs(name)),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    for index, part in enumerate(anatomy.parts):
        if part.name in (anatomy.ends or ()):
            continue
        order = np.arange(part.cells)
        for cells in network.slicing.cells.values():
            order[cells[index]] = rng.permutation(cells[index])
        permute(twin, part.name, order)
    return twin


@pytest.mark.parametrize(
    ("name", "buffers"),
    [*((name, "average") for name in MAKERS), ("resnet", "local"), ("resnet", "recompute")],
)
def test_a_scrambled_network_is_put_in_order(name: str, buffers: str) -> None:
    x = inputs(name)
    reference = sliced(name, "a", buffers)
    other = scrambled(reference, name)
    truth = reference(x).detach()
    assert torch.allclose(other(x), truth, atol=1e-9)
    assert not torch.allclose(other.read("global"), reference.read("global"))
    found = align(other, reference)
    assert found.moved
    found.apply(other)
    assert torch.allclose(other(x), truth, atol=1e-9)
    assert torch.allclose(other.read("global"), reference.read("global"))
    average([reference, other])
    assert torch.allclose(other(x), truth, atol=1e-9)


@pytest.mark.parametrize("buffers", ["average", "recompute"])
@pytest.mark.parametrize("name", ["small-cnn", "resnet", "unet"])  # unet: transposed ones too
def test_convolutions_are_put_in_order_by_what_they_answer(name: str, buffers: str) -> None:
    x = inputs(name)
    reference = sliced(name, "a", buffers)
    other = scrambled(reference, name)
    found = align(other, reference, by="activations", inputs=x)
    found.apply(other)
    assert torch.allclose(other.read("global"), reference.read("global"))
    assert found.agreement[-1] > found.agreement[0]


def test_statistics_do_not_count_as_agreement() -> None:
    """One huge variance would otherwise decide where its cell goes."""
    reference = sliced("resnet", "a")
    other = scrambled(reference, "resnet")
    with torch.no_grad():
        for key, value in other.module.named_buffers():
            if key.endswith("var"):
                value.copy_(torch.linspace(1, 1e6, len(value), dtype=value.dtype))
    align(other, reference).apply(other)
    weights = torch.cat([p.detach().reshape(-1) for p in other.module.parameters()])
    expected = torch.cat([p.detach().reshape(-1) for p in reference.module.parameters()])
    where = other.slicing.coordinates("global")
    shared = torch.from_numpy(where[where < len(weights)])
    assert torch.allclose(weights[shared], expected[shared])


def test_parts_that_answer_otherwise_are_refused_by_activations() -> None:
    network = sliced("lstm", "a")
    with pytest.raises(ModelError, match="a dense layer or a convolution, which 'lstm' is not"):
        align(network, network, by="activations", inputs=inputs("lstm"))
    private = sliced("resnet", "a", "local")
    with pytest.raises(ModelError, match="norms are private"):
        align(private, private, by="activations", inputs=inputs("resnet"))


def test_the_module_itself_is_not_touched_by_listening() -> None:
    network = sliced("resnet", "a", "recompute")
    before = {name: value.clone() for name, value in network.module.state_dict().items()}
    align(network, network, by="activations", inputs=inputs("resnet"))
    for name, value in network.module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not any(isinstance(m, nn.BatchNorm2d) and m.training for m in network.module.modules())
