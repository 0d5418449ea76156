"""Frozen parameters belong to nobody: they are in no coordinates, keep their values, and are restored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gossamer.models import (
    Adam,
    ModelError,
    SgdLearner,
    SlicedNetwork,
    average,
    discover,
)
from gossamer.models.matching import align, permute_optimizer


class LowRank(nn.Module):
    """A frozen Linear layer and a product of two thin ones that is added to it; 0 at first."""

    def __init__(self, linear: nn.Linear, rank: int = 2):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(x))


class Transformer(nn.Module):
    """Attention, a feed-forward layer with an adapter, and a head; all but adapter and head are frozen."""

    def __init__(self, *, traceable: bool = True):
        super().__init__()
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(0)  # the backbone that all peers have
            self.embed = nn.Linear(3, 8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.norm, self.wide = nn.LayerNorm(8), nn.Linear(8, 8)
        self.requires_grad_(False)
        self.wide = LowRank(self.wide)
        self.head = nn.Linear(8, 4)
        self.traceable = traceable

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if not self.traceable and float(x.sum()) > 1e9:  # control flow that depends on data
            x = -x
        x = x + self.attention(x, x, x)[0]
        return self.head((x + self.wide(self.norm(x))).mean(1))


X = torch.randn(12, 5, 3, generator=torch.Generator().manual_seed(1))
Y = torch.arange(12) % 4
GLOBAL_ADAPTER = {"adapter": {"*": 1.0, "head": 0}}
ADAPTER = {"wide.down.weight", "wide.up.weight"}


def network(peer: str, module: nn.Module | None = None, **options) -> SlicedNetwork:
    module = module or Transformer()
    return SlicedNetwork(module, GLOBAL_ADAPTER, example=X[:2], peer=peer, seed=0, **options)


def test_only_what_trains_has_coordinates():
    one, two = network("a"), network("b")
    assert one.read("adapter").numel() == 2 * 8 * 2
    assert set(one.parameters) == ADAPTER | {"head.weight", "head.bias"}
    assert len(one.flat) == sum(value.numel() for value in one.parameters.values())
    assert set(one.parameters).isdisjoint(one.frozen)
    assert "attention.in_proj_weight" in one.frozen
    assert {name for name, _ in one.slicing.schema("adapter")} == ADAPTER
    # Parts that only frozen parameters have cells of are gone; the others have the backbone's order.
    anatomy = one.slicing.anatomy
    assert "input" not in anatomy.names
    assert not any("attention" in name for name in anatomy.names)
    assert anatomy.ends == {"embed", "wide.linear", "head"} & set(anatomy.names)
    assert torch.equal(one.read("adapter"), two.read("adapter"))
    assert not torch.equal(one.module.head.weight, two.module.head.weight)


def test_starting_values_leave_the_backbone_and_an_adapter_without_effect():
    plain, wrapped = Transformer(), network("a")
    for name, value in plain.named_parameters():
        if not value.requires_grad:
            assert torch.equal(value, wrapped.frozen[name]), name
    assert not wrapped.module.wide.up.weight.any()
    assert wrapped.module.wide.down.weight.any()


def test_training_and_averaging_leave_the_backbone_as_it_is():
    learners = [
        SgdLearner(network(peer), (X, Y), (X, Y), local_samples=24, rate=0.3, seed=seed)
        for seed, peer in enumerate("ab")
    ]
    before = {name: value.clone() for name, value in learners[0].network.frozen.items()}
    for _ in range(3):
        for learner in learners:
            learner.train(1)
        average([learner.network for learner in learners])
    one, two = (learner.network for learner in learners)
    assert all(torch.equal(value, before[name]) for name, value in one.frozen.items())
    assert one.module.wide.up.weight.any()
    assert torch.equal(one.read("adapter"), two.read("adapter"))
    assert not torch.equal(one.module.head.weight, two.module.head.weight)


def test_a_module_that_cannot_be_traced_is_shared_by_layers():
    with pytest.raises(ModelError, match="control flow"):
        SlicedNetwork(Transformer(traceable=False), {"adapter": 0.5}, example=X[:2])
    one = network("a", Transformer(traceable=False))
    assert one.slicing.anatomy.names == ["wide.down", "wide.up", "head"]
    assert {name for name, _ in one.slicing.schema("adapter")} == ADAPTER
    assert {name for name, _ in one.slicing.schema("local-a")} == {"head.weight", "head.bias"}
    with pytest.raises(ModelError, match=r"no part is called 'haed'; parts are wide.down, wide.up"):
        SlicedNetwork(Transformer(traceable=False), {"a": {"haed": 1}}, example=X[:2])
    whole = SlicedNetwork(Transformer(traceable=False), {"all": 1.0}, example=X[:2])
    assert len(whole.read("all")) == len(one.flat)


def test_a_frozen_first_layer_is_like_the_input():
    module = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    sliced = SlicedNetwork(module, {"global": 0.5})
    assert sliced.slicing.anatomy.names == ["0", "2", "4"]
    assert sliced.slicing.layout("global").as_slice() == "6-2-2"
    assert len(sliced.flat) == 6 * 4 + 4 + 4 * 2 + 2


def test_a_module_that_learns_without_gradients_is_shared_as_before():
    module = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)).requires_grad_(False)
    assert discover(module).names == ["input", "0", "2"]
    sliced = SlicedNetwork(module, {"all": 1.0})
    assert not sliced.frozen
    with pytest.raises(ModelError, match="all parameters of the network are frozen"):
        SgdLearner(sliced, (X[:, 0], Y % 2), (X[:, 0], Y % 2))


def test_matching_leaves_the_order_that_the_backbone_gives():
    def trained(peer: str, seed: int) -> SgdLearner:
        learner = SgdLearner(
            network(peer), (X, Y), (X, Y), local_samples=60, seed=seed,
            optimizer=lambda p: Adam(p, 0.02),
        )  # fmt: skip
        learner.train(3)
        return learner

    one, two = trained("a", 0), trained("b", 1)
    outputs = one.network(X).detach()
    alignment = align(one.network, two.network)
    assert set(alignment.moves["adapter"]) == {"wide.down"}
    alignment.apply(one.network)
    permute_optimizer(one.optimizer, one.network, alignment)
    torch.testing.assert_close(one.network(X), outputs)


def test_frozen_batch_norm_keeps_its_statistics():
    def make() -> nn.Sequential:
        layers = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4), nn.BatchNorm1d(4)
        module = nn.Sequential(*layers)
        module[0].requires_grad_(False)
        module[1].requires_grad_(False)
        return module

    sliced = SlicedNetwork(make(), {"all": 1.0}, example=X[:2, 0], seed=0)
    assert "1.running_mean" in sliced.own_buffers()
    assert "4.running_mean" not in sliced.own_buffers()
    assert "4.running_mean" in sliced.slicing.anatomy.spans
    learner = SgdLearner(sliced, (X[:, 0], Y), (X[:, 0], Y), local_samples=24, seed=0)
    learner.train(2)
    assert not sliced.module[1].running_mean.any()
    assert sliced.module[4].running_mean.any()
    sliced.recompute(X[:, 0])
    assert not sliced.module[1].running_mean.any()


def test_a_frozen_scalar_is_part_of_the_digest():
    """As the temperature of a network that compares pictures with texts."""

    def digest(temperature: float) -> str:
        module = nn.Sequential(nn.Linear(3, 4))
        module.register_parameter(
            "temperature", nn.Parameter(torch.tensor(temperature), requires_grad=False)
        )
        return SlicedNetwork(module, {"all": 1.0}, example=X[:2, 0], seed=0).frozen_digest()

    assert digest(0.5) == digest(0.5) != digest(0.7)


def test_a_restart_goes_on_where_it_was_and_refuses_another_backbone():
    def learner(module: nn.Module) -> SgdLearner:
        return SgdLearner(
            network("a", module), (X, Y), (X, Y), local_samples=20, seed=3,
            optimizer=lambda p: Adam(p, 0.01),
        )  # fmt: skip

    first = learner(Transformer())
    first.train(2)
    state, flat = first.state(), first.network.flat.clone()
    first.train(2)
    again = learner(Transformer())
    again.network.flat.copy_(flat)
    again.restore(state)
    again.train(2)
    assert torch.equal(again.network.flat, first.network.flat)
    other = Transformer()
    with torch.no_grad():
        other.embed.weight += 1
    with pytest.raises(
        ModelError, match=r"peer 'a': the network's frozen parameters are not those"
    ):
        learner(other).restore(state)


def test_an_anatomy_of_a_module_that_froze_more_is_refused():
    anatomy = discover(Transformer(), X[:2])
    module = Transformer()
    module.embed.requires_grad_(True)
    with pytest.raises(ModelError, match=r"'embed.weight' is trained, but the network's anatomy"):
        SlicedNetwork(module, GLOBAL_ADAPTER, anatomy=anatomy)
