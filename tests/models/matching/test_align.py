"""Alignment: function unchanged, permutations undone, models and parts kept apart."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gossamer.models import (
    Anatomy,
    AssociativeNetwork,
    ModelError,
    ModelGraph,
    ParameterMap,
    Part,
    SlicedNetwork,
    average,
    mlp,
)
from gossamer.models.matching import align

GRAPH = ModelGraph({"group": ["everyone"]})
SLICES = {"everyone": "6-5-4-0", "group": "0-3-3-2"}  # of 6=10=9=2; what is left is local


def sliced(peer: str, seed: int | None, module: nn.Module | None = None) -> SlicedNetwork:
    network = module or mlp("6=10=9=2", activation="tanh", output="none").double()
    return SlicedNetwork(network, SLICES, graph=GRAPH, peer=peer, seed=seed)


def scrambled(network: SlicedNetwork, rng: np.random.Generator, peer: str = "b") -> SlicedNetwork:
    """The same network with cells permuted inside every slice of every hidden part."""
    anatomy = network.slicing.anatomy
    take = np.arange(int(anatomy.first_cells[-1]))
    for cells in network.slicing.cells.values():
        for part in range(1, len(anatomy.parts) - 1):
            mine = anatomy.first_cells[part] + cells[part]
            take[mine] = rng.permutation(mine)
    other = sliced(peer, None, deepcopy(network.module))
    other.flat.copy_(network.flat[torch.from_numpy(anatomy.flat_order(take))])
    return other


def inputs() -> torch.Tensor:
    return torch.randn(50, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@settings(max_examples=30)
@given(st.integers(0, 1000), st.floats(0, 0.1), st.sampled_from(["weights", "activations"]))
def test_a_scrambled_copy_is_put_in_order(seed: int, noise: float, by: str) -> None:
    rng = np.random.default_rng(seed)
    reference = sliced("a", seed)
    other = scrambled(reference, rng)
    other.flat.add_(noise * torch.from_numpy(rng.normal(size=len(other.flat))) * 0.1)
    before, x = other(inputs()).detach(), inputs()
    found = align(other, reference, by=by, inputs=x if by == "activations" else None)  # type: ignore[arg-type]
    found.apply(other)
    assert torch.allclose(other(inputs()), before, atol=1e-9)  # the function is the same
    assert (np.diff(found.agreement) >= -1e-9).all()
    for owner in reference.averaged_models:
        if owner in other.averaged_models:
            gap = (reference.read(owner) - other.read(owner)).abs().max()
            assert float(gap) <= noise  # five deviations of the noise, and no more


def test_only_slices_of_the_reference_move_and_stay_inside_their_model() -> None:
    rng = np.random.default_rng(0)
    reference = sliced("a", 3)
    other = scrambled(reference, rng)
    found = align(other, {"everyone": reference.read("everyone")})
    assert set(found.moves) == {"everyone"}
    assert {part: len(move) for part, move in found.moves["everyone"].items()} == {"0": 5, "2": 4}
    outside = np.concatenate(
        [other.slicing.coordinates("group"), other.slicing.coordinates("local-b")]
    )
    found.apply(other)
    assert torch.allclose(other.read("everyone"), reference.read("everyone"))
    # What touches no cell of the model stays where it is; columns from its cells move along.
    inner = [c for c in outside if found.order[c] != c]
    assert inner
    assert sorted(found.order[outside].tolist()) == sorted(outside.tolist())


def test_dependencies_are_aligned_first_and_serve_the_others() -> None:
    reference = sliced("a", 4)
    other = scrambled(reference, np.random.default_rng(1))
    found = align(other, reference)
    assert list(found.moves) == ["everyone", "group"]
    found.apply(other)
    assert torch.allclose(other.read("group"), reference.read("group"))


def test_aligned_means_nothing_to_do() -> None:
    reference = sliced("a", 5)
    twin = sliced("b", None, deepcopy(reference.module))
    found = align(twin, reference)
    assert found.moved == 0
    assert (found.order == np.arange(len(found.order))).all()


def test_the_optimizers_state_moves_along() -> None:
    reference = sliced("a", 6)
    other = scrambled(reference, np.random.default_rng(2))
    found = align(other, reference)
    momentum = other.flat.clone() * 2
    found.apply(other)
    assert torch.equal(found.permute(momentum), other.flat * 2)
    with pytest.raises(ModelError, match="values, "):
        found.permute(momentum[:-1])


def test_averaging_needs_alignment() -> None:
    """Averaged with a scrambled copy of itself a network is ruined; aligned first, it is unharmed."""
    reference = sliced("a", 7)
    x = inputs()
    truth = reference(x).detach()

    def damage(*, aligned: bool) -> float:
        one = sliced("a", None, deepcopy(reference.module))
        two = scrambled(reference, np.random.default_rng(3))
        if aligned:
            align(two, one).apply(two)
        average([one, two])
        return float((one(x).detach() - truth).abs().max())

    assert damage(aligned=True) < 1e-9
    assert damage(aligned=False) > 0.1


def test_parts_of_an_associative_network_can_be_named() -> None:
    def make(peer: str) -> SlicedNetwork:
        return SlicedNetwork(AssociativeNetwork("6<>9"), {"all": "6-9"}, peer=peer, seed=1)

    one, two = make("a"), make("b")
    take = np.arange(15)
    take[6:] = np.random.default_rng(0).permutation(take[6:])
    two.flat.copy_(one.flat[torch.from_numpy(two.slicing.anatomy.flat_order(take))])
    assert align(two, one).moved == 0  # its last part is not permuted unless asked for
    align(two, one, parts=["hidden"]).apply(two)
    assert torch.equal(one.flat, two.flat)


class Flattened(nn.Module):
    """Three channels of four positions each, flattened into a dense layer: a cell stands four times."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 3, dtype=torch.float64)
        self.out = nn.Linear(12, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.conv(x)).flatten(1))

    def anatomy(self) -> Anatomy:
        parts = (Part("input", 2), Part("conv", 3), Part("out", 2))
        channels, outputs = np.array([2, 3, 4]), np.array([5, 6])
        return Anatomy(
            parts,
            (
                ParameterMap("conv.weight", (3, 2, 3), (channels, np.array([0, 1]), None)),
                ParameterMap("conv.bias", (3,), (channels,)),
                ParameterMap("out.weight", (2, 12), (outputs, np.repeat(channels, 4))),
                ParameterMap("out.bias", (2,), (outputs,)),
            ),
        )


def test_cells_that_stand_several_times_on_an_axis_move_whole() -> None:
    one = SlicedNetwork(Flattened(), {"all": "2-3-2"}, peer="a", seed=1)
    two = SlicedNetwork(Flattened(), {"all": "2-3-2"}, peer="b", seed=None)
    order = one.slicing.anatomy.flat_order(np.array([0, 1, 3, 4, 2, 5, 6]))
    two.flat.copy_(one.flat[torch.from_numpy(order)])
    x = torch.randn(5, 2, 6, dtype=torch.float64)
    assert torch.allclose(one(x), two(x))
    assert not torch.equal(one.flat, two.flat)
    assert torch.equal(align(two, one).permute(two.flat), one.flat)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda n: align(n, {"everyone": torch.zeros(3)}),
            "peers of other widths need a common width",
        ),
        (lambda n: align(n, {"nobody": torch.zeros(3)}), "'nobody' averages nothing here"),
        (lambda n: align(n, {}), "shares nothing with peer 'a'"),
        (lambda n: align(n, n, by="magic"), "there are weights, activations"),
        (lambda n: align(n, n, by="activations"), "needs inputs"),
        (lambda n: align(n, n, parts=["9"]), "no part '9'; parts are input, 0, 2, 4"),
        (lambda n: align(n, n, models=["x"]), "no model 'x' here"),
        (
            lambda n: align(n, {"everyone": n.read("everyone") * np.nan}),
            "values that are not finite",
        ),
    ],
)
def test_bad_references_are_refused(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ModelError, match=message):
        call(sliced("a", 1))


def test_networks_of_half_the_precision_align_with_each_other():
    a = sliced("a", 1, mlp("6=10=9=2").bfloat16())
    align(a, sliced("b", 2, mlp("6=10=9=2").bfloat16())).apply(a)
    assert a.flat.dtype == torch.bfloat16
    assert align(a, a).moved == 0
