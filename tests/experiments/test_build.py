"""Peers built from a config: their data, tasks, models and starting values, and errors in configs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gossamer.experiments.build import Swarm
from gossamer.experiments.config.tables import ConfigError, parse_config
from gossamer.experiments.data import load
from gossamer.models import seeded_rng

torch.set_num_threads(1)

SPARSE = {"data": {"set": "sparse"}, "network": {"layout": "50<>40"}}
SWAPS = [
    {"kind": "swap", "labels": [8, 9], "peers": [2, 3]},
    {"kind": "swap", "labels": [6, 7], "peers": [3]},
]


def swarm(load_data: Any = load, **table: Any) -> Swarm:
    base = {"peers": 4, "data": {"samples": 30, "test": 20}, "network": {"layout": "64=8=10"}}
    return Swarm(parse_config(base | table), "swarm.toml", load_data)


def model(**table: Any) -> dict[str, Any]:
    return {"name": "global", "layout": "64-5-10"} | table


# Data, tasks, models and starting values of peers


def test_a_number_of_samples_is_drawn_from_all_of_a_peers_shards() -> None:
    data = {"partition": "shards", "shards": 2, "test": 20}
    whole = swarm(peers=16, data=data).members()
    some = swarm(peers=16, data=data | {"samples": 40}).members()
    again = swarm(peers=16, data=data | {"samples": 40}).members()
    for all_, few, same in zip(whole, some, again, strict=True):
        labels = few.learner.samples[1]  # type: ignore[attr-defined]
        assert len(labels) == few.samples == 40
        counts = all_.learner.samples[1].bincount()  # type: ignore[attr-defined]
        often = (counts > counts.sum() / 5).nonzero().flatten()  # a shard ends with few of a label
        assert set(often.tolist()) <= set(labels.tolist())
        assert torch.equal(labels, same.learner.samples[1])  # type: ignore[attr-defined]


def test_peers_hold_successive_digits_and_share_the_first_of_the_test_set() -> None:
    digits = load("digits")
    assert digits.test is not None
    for index, member in enumerate(swarm().members()):
        x, y = member.learner.samples  # type: ignore[attr-defined]
        assert torch.equal(x, digits.train.flat()[30 * index : 30 * (index + 1)])
        assert torch.equal(y, digits.train.y[30 * index : 30 * (index + 1)])
        x, y = member.learner.held_out  # type: ignore[attr-defined]
        assert torch.equal(x, digits.test.flat()[:20])
        assert torch.equal(y, digits.test.y[:20])


def test_training_and_test_labels_are_the_tasks() -> None:
    plain, swapped = swarm().member(3), swarm(tasks=SWAPS).member(3)
    for name in ("samples", "held_out"):
        before, after = getattr(plain.learner, name)[1], getattr(swapped.learner, name)[1]
        expected = torch.tensor([0, 1, 2, 3, 4, 5, 7, 6, 9, 8])[before]
        assert not torch.equal(before, after)
        assert torch.equal(after, expected)


def test_entries_that_name_the_same_peer_add_up() -> None:
    """The setting of V.3.e: peer 2 has one swap, peer 3 both."""
    tasks = [swarm(tasks=SWAPS).task(index, 10) for index in range(4)]
    straight = tuple(range(10))
    assert [task.labels for task in tasks] == [
        straight,
        straight,
        (*straight[:8], 9, 8),
        (*straight[:6], 7, 6, 9, 8),
    ]
    names = [member.task for member in swarm(tasks=SWAPS).members()]
    assert names == ["identity", "identity", "swap-8-9", "swap-8-9-swap-6-7"]


def test_symmetric_tasks_are_assigned_round_robin_to_the_named_peers() -> None:
    built = swarm(peers=14, tasks=[{"kind": "symmetric", "last": 3, "peers": [*range(2, 14)]}])
    names = [built.task_name(index) for index in range(14)]
    assert names[:2] == ["identity", "identity"]
    assert names[2:8] == names[8:]
    assert len(set(names[2:8])) == 6


def test_swaps_give_every_peer_a_different_pair() -> None:
    built = swarm(peers=45, data={"samples": 30}, tasks=[{"kind": "swaps"}])
    tasks = {built.task(index, 10).labels for index in range(45)}
    assert len(tasks) == 45
    assert all(sum(a != b for a, b in enumerate(labels)) == 2 for labels in tasks)


def test_a_number_as_peers_means_the_first_peers() -> None:
    built = swarm(models=[model(peers=2)], tasks=[{"kind": "cycle", "peers": 1}])
    assert ["global" in built.slices(index) for index in range(4)] == [True, True, False, False]
    assert [built.task_name(index) for index in range(4)] == ["cycle-3", *["identity"] * 3]


def test_names_of_models_may_contain_peer_and_task() -> None:
    built = swarm(
        tasks=SWAPS,
        models=[
            model(),
            model(name="{task}", layout="0-2-0", depends=["global"]),
            model(name="own-{peer}", layout="0-1-0", depends=["{task}"]),
        ],
    )
    assert built.slices(2) == {"global": "64-5-10", "swap-8-9": "0-2-0", "own-2": "0-1-0"}
    assert built.graph(2).dependencies("own-2") == {"global", "swap-8-9"}
    assert set(built.member(0).network.models) == {"global", "identity", "own-0"}


def test_sparse_peers_may_share_a_model_per_task() -> None:
    built = swarm(
        **SPARSE,
        tasks=[{"kind": "modified", "peers": [1]}],
        models=[{"name": "{task}", "layout": "50-30"}],
    )
    assert [list(built.slices(index)) for index in range(3)] == [["plain"], ["modified"], ["plain"]]
    plain, modified = built.member(0).learner, built.member(1).learner
    _, expected = plain.held_out  # type: ignore[attr-defined]
    _, changed = modified.held_out  # type: ignore[attr-defined]
    differs = (expected != changed).any(dim=1)
    assert 0.3 < float(differs.float().mean()) < 0.4  # one vector of three


def test_cells_without_a_model_are_private_and_start_from_different_values() -> None:
    one, two = swarm(models=[model()]).members()[:2]
    assert torch.equal(one.network.read("global"), two.network.read("global"))
    own, other = (m.network.flat[m.network.slicing.private.copy()] for m in (one, two))
    assert len(own) == len(other) == 3 * (64 + 10)  # weights of the three cells left over
    assert not torch.equal(own, other)


def test_shared_models_start_from_different_values_without_equal_starts() -> None:
    network = {"layout": "64=8=10", "equal_starts": False}
    one, two = swarm(models=[model()], network=network).members()[:2]
    assert not torch.equal(one.network.read("global"), two.network.read("global"))


def test_cross_lets_pairs_of_unrelated_models_own_weights() -> None:
    models = [model(layout="64-3-5", name="a"), model(layout="0-3-5", name="b")]
    without, crossed = (swarm(models=models, cross=cross).member(0) for cross in (False, True))
    pair = set(crossed.network.averaged_models) - set(without.network.averaged_models)
    assert any("a" in owner and "b" in owner for owner in pair)
    assert len(without.network.slicing.private) > len(crossed.network.slicing.private)


def test_a_total_of_samples_is_split_tested_on_own_classes_and_trained_by_epochs() -> None:
    data = {"total": 200, "partition": "shards", "tested": "own"}
    members = swarm(data=data, training={"epochs": 2}).members()
    assert sum(member.samples for member in members) == 200
    for member in members:
        learner: Any = member.learner
        assert learner.local_samples == 2 * member.samples
        assert {*learner.held_out[1].tolist()} <= {*learner.samples[1].tolist()}
    config = swarm(data=data, training={"epochs": 2}).config
    assert parse_config(config.model_dump(mode="json")) == config  # as sweeps and live peers get it
    with pytest.raises(ConfigError, match="key 'training': has epochs and local_samples"):
        swarm(training={"epochs": 2, "local_samples": 30})


def test_peers_with_one_task_share_one_copy_of_the_test_samples() -> None:
    learners: list[Any] = [member.learner for member in swarm().members()]
    assert len({id(learner.held_out[1]) for learner in learners}) == 1


def test_without_a_test_set_a_peer_with_two_samples_holds_out_one() -> None:
    digits = load("digits")
    few = replace(digits, train=digits.train.take(range(8)), test=None)
    learner = swarm(lambda *_, **__: few, data={}).member(0).learner
    assert [len(learner.samples[1]), len(learner.held_out[1])] == [1, 1]  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"key 'data': peer 0 has 1 sample, which leaves none"):
        swarm(lambda *_, **__: few, peers=8, data={})


def test_without_a_test_set_every_peer_holds_out_samples() -> None:
    without_test = replace(load("digits"), test=None)
    built = swarm(lambda *_, **__: without_test, data={"samples": 30, "test": 20})
    for member in built.members():
        (train, _), (test, _) = member.learner.samples, member.learner.held_out  # type: ignore[attr-defined]
        assert (len(train), len(test), member.samples) == (30, 20, 30)
        assert not {tuple(row) for row in train.tolist()} & {tuple(row) for row in test.tolist()}


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "shards"])
def test_partitions_follow_the_seed(partition: str) -> None:
    def sums_of_inputs(seed: int) -> list[float]:
        data = {"partition": partition}
        members = swarm(data=data, seed=seed).members()
        return [float(m.learner.samples[0].sum()) for m in members]  # type: ignore[attr-defined]

    assert sums_of_inputs(1) == sums_of_inputs(1)
    assert sums_of_inputs(1) != sums_of_inputs(2)


@pytest.mark.parametrize("kind", ["perceptron", "associative"])
def test_a_member_is_the_same_whether_or_not_others_are_built(kind: str) -> None:
    table: dict[str, Any] = {"models": [model()], "tasks": SWAPS, "seed": 3}
    if kind == "associative":
        table = SPARSE | {"models": [{"name": "global", "layout": "50-20"}]}
    among, alone = swarm(**table).members()[2], swarm(**table).member(2)
    assert torch.equal(among.network.flat, alone.network.flat)
    assert among.learner.train(3) == alone.learner.train(3)
    assert torch.equal(among.network.flat, alone.network.flat)
    assert (among.name, among.task, among.samples) == (alone.name, alone.task, alone.samples)


def test_the_seed_decides_starting_values_and_order() -> None:
    one, same, other = (swarm(models=[model()], seed=seed).member(0) for seed in (1, 1, 2))
    assert torch.equal(one.network.flat, same.network.flat)
    assert not torch.equal(one.network.flat, other.network.flat)
    orders = []
    for member in (one, same, other):
        member.learner.train(1)
        orders.append(member.learner.state()["order"].tolist())
    assert orders[0] == orders[1] != orders[2]


def test_the_partition_draws_from_its_own_stream_of_the_seed() -> None:
    chosen = seeded_rng(5, "partition").permutation(1437)[:30]
    member = swarm(seed=5, data={"partition": "iid", "samples": 30}).member(0)
    inputs, _ = member.learner.samples  # type: ignore[attr-defined]
    assert torch.equal(inputs, load("digits").train.flat()[chosen])


def test_each_optimizer_takes_steps_of_its_own() -> None:
    def moved(optimizer: str) -> torch.Tensor:
        training = {"optimizer": optimizer, "rate": 0.01, "local_samples": 20, "batch": 10}
        member = swarm(training=training).member(0)
        start = member.network.flat.clone()
        member.learner.train(1)
        return member.network.flat - start

    plain, momentum, adam = (moved(name) for name in ("sgd", "momentum", "adam"))
    # two steps: momentum repeats nine tenths of the first one; Adam's are as long as the rate
    assert float(momentum.norm()) > 1.3 * float(plain.norm())
    assert float(adam.abs().max()) == pytest.approx(0.02, rel=0.02)
    assert float(plain.abs().max()) != pytest.approx(0.02, rel=0.02)


# Configs that are refused, and the error messages


@pytest.mark.parametrize(
    ("table", "key", "text"),
    [
        (
            {"network": {"layout": "63=8=10"}},
            "network.layout",
            "the first layer has 63 cells, but digits has 64 features",
        ),
        (
            {"network": {"layout": "64=8=9"}},
            "network.layout",
            "the last layer has 9 cells, but digits has 10 classes",
        ),
        ({"network": {"layout": "64-8-10"}}, "network.layout", "'64-8-10' is not a network layout"),
        (
            {"data": {"set": "sparse"}, "network": {"layout": "50<>x"}},
            "network.layout",
            "'50<>x' is not an associative layout",
        ),
        (
            {"models": [model(depends=["glbal"])]},
            "models.0.depends",
            "unknown model 'glbal'; models are global",
        ),
        (
            {"models": [model(), model(name="b", layout="0-1-0", peers=[1, 4])]},
            "models.1.peers",
            "names peer 4, but peers are 0 to 3",
        ),
        (
            {"tasks": [{"kind": "cycle", "peers": 5}]},
            "tasks.0.peers",
            "names peer 4, but peers are 0 to 3",
        ),
        (
            {"models": [model(), model()]},
            "models.1.name",
            "peer 0 has two models named 'global'",
        ),
        ({"models": [model(depends=["global"])]}, "models", "peer 0: models depend on each other"),
        (
            {"models": [model(peers=[0]), model(name="b", layout="0-1-0", depends=["global"])]},
            "models",
            "peer 1: model 'b' depends on 'global', which this peer does not have",
        ),
        (
            {"models": [model(layout="64-9-10")]},
            "models",
            "peer 0: model 'global' wants 9 cells of part",
        ),
        ({"models": [model(layout="64-9")]}, "models", "peer 0: model 'global': layout 64-9 has 2"),
        ({"models": [model(layout="0-0-0")]}, "models", "peer 0: model 'global' is empty"),
        ({"models": [model(name="{pear}")]}, "models", "peer 0: '{pear}' cannot name a partial"),
        (
            {"tasks": [{"kind": "swap"}]},
            "tasks.0.labels",
            "a swap needs two labels, as in [8, 9]",
        ),
        (
            {"tasks": [{"kind": "swap", "labels": [8, 12]}]},
            "tasks.0",
            "swap: 8 and 12 must be two different labels of 0..9",
        ),
        (
            {"tasks": [{"kind": "symmetric", "last": 10}]},
            "tasks.0.last",
            "10 labels have too many permutations; at most 6",
        ),
        (
            {"tasks": [{"kind": "modified"}]},
            "tasks.0.kind",
            "'modified' can only be used with the sparse vectors",
        ),
        (
            SPARSE | {"tasks": [{"kind": "swap", "labels": [8, 9]}]},
            "tasks.0.kind",
            "the sparse vectors support only 'modified'",
        ),
        (
            {"data": {"set": "sparse"}},
            "network.layout",
            "the sparse vectors and the associative network (layout visible<>hidden) need each other",
        ),
        (
            {"network": {"layout": "50<>40"}},
            "network.layout",
            "the sparse vectors and the associative network (layout visible<>hidden) need each other",
        ),
        (
            {"data": {"set": "digts"}},
            "data.set",
            "no data set is called 'digts': did you mean 'digits'?",
        ),
        ({"data": {"samples": 1000}}, "data", "4 peers with 1000 samples each need 4000"),
        ({"data": {"partition": "natural"}}, "data", "by_group: this data set has no natural"),
    ],
)
def test_refusals_name_file_and_key(table: dict[str, Any], key: str, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        swarm(**table).members()
    assert str(error.value).startswith(f"swarm.toml: key {key!r}: {text}")
    assert "\n" not in str(error.value)
