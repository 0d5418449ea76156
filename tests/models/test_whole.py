"""Networks whose parts nobody can find: shared whole or not at all they need none."""

import pytest
import torch
from torch import nn

from gossamer.models import ModelError, SlicedNetwork, discover
from gossamer.models.discovery import is_whole


def tokens(norm=False):
    """Flattened embeddings: the places of tokens and the cells of one are mixed up."""
    return nn.Sequential(
        nn.Embedding(10, 8), nn.Flatten(), nn.Linear(40, 16),
        nn.BatchNorm1d(16) if norm else nn.ReLU(), nn.Linear(16, 3),
    )  # fmt: skip


EXAMPLE = torch.arange(10).view(2, 5)


@pytest.mark.parametrize("slices", [{"all": 1.0}, {"all": {"*": 1}}])
def test_all_is_shared_and_starts_equal(slices):
    one, two = (
        SlicedNetwork(tokens(), slices, example=EXAMPLE, peer=peer, seed=3) for peer in "ab"
    )
    assert one.averaged_models == ("all",)
    assert len(one.read("all")) == sum(value.numel() for value in one.module.parameters())
    assert torch.equal(one.flat, two.flat)
    wide = one.module[2].weight.detach()
    assert float(wide.std()) == pytest.approx(40**-0.5, rel=0.2)  # drawn by its fan-in
    assert not one.module[2].bias.any()


def test_nothing_is_shared():
    one, two = (SlicedNetwork(tokens(), {}, example=EXAMPLE, peer=p, seed=3) for p in "ab")
    assert one.averaged_models == ("local-a",)
    assert not torch.equal(one.flat, two.flat)


def test_statistics_follow_or_stay():
    averaged = SlicedNetwork(tokens(norm=True), {"all": 1.0}, example=EXAMPLE)
    own = SlicedNetwork(tokens(norm=True), {"all": 1.0}, example=EXAMPLE, buffers="local")
    gains = 2 * 16
    assert len(averaged.read("all")) == len(own.read("all")) + gains + 2 * 16
    assert set(own.own_buffers()) == {"3.running_mean", "3.running_var", "3.num_batches_tracked"}


def test_a_part_of_it_is_refused_as_before():
    with pytest.raises(ModelError, match="was traced wrongly"):
        SlicedNetwork(tokens(), {"all": 0.5}, example=EXAMPLE)
    with pytest.raises(ModelError, match="was traced wrongly"):
        SlicedNetwork(tokens(), {"a": 1.0, "b": 0.0}, example=EXAMPLE)
    with pytest.raises(ModelError, match="names no axis"):
        SlicedNetwork(tokens(), {"all": 1.0}, example=EXAMPLE, parts={"x": ["nothing:0"]})


def test_an_example_that_does_not_fit_is_still_a_mistake():
    with pytest.raises(ModelError, match=r"the example input of shape \(2, 7\) does not fit"):
        SlicedNetwork(tokens(), {"all": 1.0}, example=torch.zeros(2, 7, dtype=torch.int64))


def test_lazy_layers_are_named_with_the_way_out():
    module = nn.Sequential(nn.Flatten(), nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
    for call in (discover, lambda m, x: SlicedNetwork(m, {"all": 1.0}, example=x)):
        with pytest.raises(ModelError, match=r"'1.weight' has no shape yet.* call the module once"):
            call(module, torch.rand(2, 3))
    module(torch.rand(2, 3))
    assert [part.cells for part in discover(module, torch.rand(2, 3)).parts] == [3, 4, 2]


@pytest.mark.parametrize(
    ("spec", "whole"),
    [(1.0, True), (1, True), ({"*": 1.0}, True), (0.5, False), ({"*": 1.0, "out": 0}, False),
     ("3-2", False), ([[0], [0]], False), ({"*": [0]}, False)],
)  # fmt: skip
def test_what_is_whole(spec, whole):
    assert is_whole(spec) is whole
