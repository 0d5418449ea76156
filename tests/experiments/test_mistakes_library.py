"""Mistakes in programs: what a constructor or function was given wrongly is one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import inf
from typing import Any

import networkx as nx
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from gossamer.experiments.arena import Arena, Gossip
from gossamer.experiments.config.tables import ConfigError, parse_config
from gossamer.experiments.data import DataError, from_torch
from gossamer.experiments.federated.comparison import parse_comparison
from gossamer.models import Learner, ModelError, SgdLearner, SlicedNetwork, mlp

torch.set_num_threads(1)


def learners(
    peers: int = 3, make: Callable[[], nn.Module] | None = None, share: float = 1.0, **knobs: Any
) -> list[Learner]:
    """Peers with samples of their own; share 0: everybody alone."""
    found: list[Learner] = []
    for peer in range(peers):
        generator = torch.Generator().manual_seed(peer)
        data = torch.rand(12, 6, generator=generator), torch.arange(12) % 4
        module = make() if make else mlp("6=8=4")
        slices = {"all": share} if share else {}
        network = SlicedNetwork(module, slices, peer=str(peer), seed=1)
        found.append(SgdLearner(network, data, data, local_samples=8, batch=4, seed=peer, **knobs))
    return found


class OwnSgd(SgdLearner):
    """A user's own kind: it is not stacked."""


def with_prelu() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.PReLU(8), nn.Linear(8, 4))


@pytest.mark.parametrize("kind", [SgdLearner, OwnSgd])
@pytest.mark.parametrize("make", [lambda: mlp("6=8=4"), with_prelu])
@pytest.mark.parametrize(
    "knobs", [{"rate": 0}, {"optimizer": lambda p: torch.optim.SGD(p, lr=0.0)}]
)
def test_rate_zero_trains_nothing(
    kind: type[SgdLearner], make: Callable[[], nn.Module], knobs: dict[str, Any]
) -> None:
    swarm = learners(make=make, share=0, **knobs)
    for learner in swarm:
        learner.__class__ = kind
    before = [learner.network.flat.clone() for learner in swarm]
    arena = Arena(swarm)
    assert ("one by one" in repr(arena)) == (kind is OwnSgd)
    *_, last = arena.run(2)
    assert all(metrics.samples == 8 and metrics.loss > 0 for metrics in last.training)
    for learner, values in zip(swarm, before, strict=True):
        assert torch.equal(learner.network.flat, values)


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf"), "0.1", True, None])
def test_what_is_no_rate_is_refused(rate: Any) -> None:
    with pytest.raises(
        ModelError, match=rf"rate {re.escape(repr(rate))}: give a number of at least 0"
    ):
        learners(rate=rate)


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("kind", [SgdLearner, OwnSgd])
def test_a_peer_whose_values_are_no_numbers_is_named(kind: type[SgdLearner], share: float) -> None:
    def relus() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    calm, wild = learners(make=relus, share=share), learners(make=relus, share=share, rate=1e30)
    swarm = [*calm[:2], wild[2]]
    for learner in swarm:
        learner.__class__ = kind
    with pytest.raises(ModelError, match=r"peer '2'.* values are not finite.*lower the learning"):
        list(Arena(swarm).run(2))


def test_a_loss_that_is_not_finite_is_shown_where_values_are() -> None:
    swarm = learners(share=0, rate=0, loss=lambda outputs, _: 0 * outputs.sum(dim=1) + inf)
    *_, last = Arena(swarm).run(1)
    assert not torch.isfinite(torch.tensor([test.loss for test in last.tests])).any()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"test_every": 0}, "test_every=0: give a whole number"),
        ({"every": 0}, "every=0: give a whole number"),
        ({"test_every": 1.5}, "test_every=1.5: give a whole number"),
        (
            {"mixing": nx.cycle_graph(3)},
            r"must be ExactMean\(\), Gossip\(graph\) or Server\(\), not a Graph",
        ),
    ],
)
def test_an_arena_says_what_it_was_given(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        Arena(learners(), **options)


def test_gossip_wants_a_graph() -> None:
    with pytest.raises(ModelError, match=r"Gossip\('ring'\): give a networkx graph"):
        Gossip("ring")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("module", "slices", "words"),
    [
        (5, {"all": 1.0}, "wraps a torch module, not 5"),
        (nn.Linear(2, 2), ["all"], r"slices: give a dict .*, not \['all'\]"),
    ],
)
def test_a_sliced_network_says_what_it_was_given(module: Any, slices: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        SlicedNetwork(module, slices)


@pytest.mark.parametrize("parse", [parse_config, parse_comparison])
def test_a_files_name_is_no_table(parse: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"give a table \(a dict\), not 'x.toml'; load_\w+ reads"):
        parse("x.toml")


def test_an_index_beyond_a_dataset_is_named() -> None:
    dataset = TensorDataset(torch.rand(3, 2), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(DataError, match="no sample 5 in the dataset, which has 3"):
        from_torch(dataset, [5])


@pytest.mark.parametrize(
    ("example", "words"),
    [
        (torch.rand(2, 5), r"example input of shape \(2, 5\) does not fit the network"),
        ((torch.rand(2, 6), torch.rand(2, 6)), "does not fit the network"),
        ([1.0], "give the example input as a tensor"),
    ],
)
def test_an_example_that_a_chain_cannot_take_is_refused(example: Any, words: str) -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 4))
    module[1].eval()
    with pytest.raises(ModelError, match=words):
        SlicedNetwork(module, {"all": 1.0}, example=example)
    SlicedNetwork(module, {"all": 1.0}, example=torch.rand(2, 6))
    assert [module.training, module[0].training, module[1].training] == [True, True, False]
