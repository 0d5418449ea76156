"""A swarm that decides by itself what to share: it finds groups where tasks differ, and nothing where not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import nn

from gossamer.experiments.arena import Arena, AutoSharing, ExactMean, Gossip, Mixing
from gossamer.experiments.data import load
from gossamer.models import (
    ModelError,
    ModelGraph,
    SgdLearner,
    SlicedNetwork,
    average,
    mlp,
)
from gossamer.models.sharing import (
    OWN,
    Assignment,
    AutoOptions,
    Memory,
    Planner,
    SharingMember,
    Statistics,
)

torch.set_num_threads(1)
PEERS = 10


def perceptron() -> nn.Module:
    return mlp("64=30=10")


def learners(
    permuted: bool,
    peers: int = PEERS,
    samples: int = 120,
    make: Callable[[], nn.Module] = perceptron,
) -> list[SgdLearner]:
    """Peers with the digits of scikit-learn; every second one has other labels if `permuted`."""
    digits = load("digits")
    order = torch.randperm(len(digits.train.y), generator=torch.Generator().manual_seed(0))
    x, y = (
        digits.train.x.flatten(1)[order],
        digits.train.y[order],
    )  # the file is in order of writers
    tests = digits.test.x.flatten(1), digits.test.y
    other = torch.tensor([3, 4, 5, 6, 7, 8, 9, 0, 1, 2])
    result = []
    for index in range(peers):
        own = slice(index * samples, (index + 1) * samples)
        relabel = other if permuted and index % 2 else torch.arange(10)
        network = SlicedNetwork(make(), {"all": 1.0}, peer=f"peer{index}", rest=None, seed=0)
        data = (x[own], relabel[y[own]]), (tests[0], relabel[tests[1]])
        result.append(SgdLearner(network, *data, local_samples=120, rate=0.1, seed=index))
    return result


def run(
    members: list[SgdLearner], rounds: int, mixing: Mixing | None = None, **options: Any
) -> tuple[AutoSharing, float]:
    sharing = AutoSharing(**options)
    arena = Arena(members, sharing=sharing, mixing=mixing)
    return sharing, list(arena.run(rounds))[-1].accuracy


def test_it_finds_the_groups_of_peers_with_other_labels_and_learns_better() -> None:
    sharing, accuracy = run(learners(permuted=True), 14)
    assert sharing.decisions, "peers whose labels contradict each other must part"
    groupings = set(sharing.assignment.schemes[2:])
    assert (0, 1) * 5 in groupings
    shared = list(Arena(learners(permuted=True)).run(14))[-1].accuracy
    assert accuracy > shared + 0.2


def test_a_network_may_be_a_single_layer() -> None:
    sharing, _ = run(learners(permuted=True, make=lambda: nn.Linear(64, 10)), 10)
    assert [one.candidate.scheme for one in sharing.decisions] == [(0, 1) * 5]


def test_it_changes_nothing_where_tasks_are_equal_and_gives_held_out_samples_back() -> None:
    members = learners(permuted=False)
    sharing, _ = run(members, 14)
    assert not sharing.decisions
    assert not sharing.plan.deciding
    assert [len(member.samples[1]) for member in members] == [120] * PEERS


def test_it_finds_them_by_gossip_on_a_sparse_graph_too() -> None:
    """What peers measure goes through the links, all of which join the two tasks; groups do without."""
    graph = nx.circulant_graph(PEERS, [1, 3])
    members = learners(permuted=True)
    sharing, accuracy = run(members, 20, mixing=Gossip(graph))
    groups = sharing.assignment.schemes[2]
    for group in set(groups):
        tasks = {peer % 2 for peer in range(PEERS) if groups[peer] == group}
        assert len(tasks) == 1, groups
    assert len(set(groups)) < PEERS - 2
    averaged: dict[str, torch.Tensor] = {}
    for member in members:
        for model in set(member.network.averaged_models):
            if model.startswith("group"):
                value = member.network.read(model)
                assert torch.allclose(averaged.setdefault(model, value), value, atol=1e-5)
    assert averaged
    shared = list(Arena(learners(permuted=True), mixing=Gossip(graph)).run(20))[-1].accuracy
    assert accuracy > shared + 0.2


def test_exchanges_are_counted_on_when_slices_change() -> None:
    """A schedule of graphs goes on where it was: it does not begin again with each decision."""
    asked: list[int] = []

    class Counting(ExactMean):
        def matrices(self, model: str, members: Sequence[int], step: int, weights: np.ndarray):
            if model:
                asked.append(step)
            return None, weights

    sharing, _ = run(learners(permuted=True), 11, mixing=Counting())
    assert sharing.decisions
    assert sorted(set(asked)) == list(range(11))


def test_after_a_decision_the_networks_average_as_the_assignment_says() -> None:
    members = learners(permuted=True)
    sharing, _ = run(members, 11)
    assert sharing.decisions
    networks = [member.network for member in members]
    rows = np.stack([network.flat.numpy().copy() for network in networks])
    average(networks)
    every = np.arange(rows.shape[1])
    expected = sharing.assignment.average(rows, every)
    np.testing.assert_allclose(
        np.stack([network.flat.numpy() for network in networks]), expected, atol=1e-6
    )


def test_a_dry_run_reports_and_changes_nothing() -> None:
    members = learners(permuted=True)
    sharing, _ = run(members, 11, dry_run=True)
    assert sharing.decisions
    assert all(member.network.models == ("global",) for member in members)


@pytest.mark.parametrize(
    ("layer", "frozen"), [("0", {"input", "0"}), ("2", {"2"})], ids=["hidden", "outputs"]
)
def test_parts_that_are_not_trained_are_never_candidates(layer: str, frozen: set[str]) -> None:
    members = learners(permuted=True)
    for member in members:
        member.network.module.get_submodule(layer).requires_grad_(False)
    start = members[0].network.module.get_submodule(layer).weight.clone()
    sharing, _ = run(members, 14)
    assert sharing.decisions
    assert not frozen & {one.part for one in sharing.compared}
    for member in members:
        torch.testing.assert_close(member.network.module.get_submodule(layer).weight, start)


def test_a_network_that_is_not_trained_decides_nothing() -> None:
    members = learners(permuted=True, peers=4)
    for member in members:
        member.network.module.requires_grad_(False)
    sharing = AutoSharing()
    Arena(members, sharing=sharing)
    assert "no part is both trained and shared" in sharing.reason
    assert all(len(member.samples[1]) == 120 for member in members)


def test_partial_models_that_not_all_peers_share_stay_as_they_are() -> None:
    members = learners(permuted=True)
    for index, member in enumerate(members):
        slices = {"global": {"*": 1.0, "2": 0.5}, f"task{index % 2}": {"2": 0.5}}
        graph = ModelGraph({"global": [], f"task{index % 2}": ["global"]})
        member.network.reslice(slices, graph, cross=False)
    sharing, _ = run(members, 14, keep_models=True)
    assert sharing.decisions
    outputs = sharing.as_record()["history"][0]["assignment"]["cells"]["2"]
    assert outputs == {"0": [0, 1, 2, 3, 4], "2": [5, 6, 7, 8, 9]}
    assert sharing.assignment.schemes[2] == (0, 1) * 5
    assert set(range(5, 10)) <= set(sharing.assignment.cells("2", 2).tolist())
    assert all(
        not set(range(5, 10)) & set(one.candidate.cells)
        for one in sharing.decisions
        if one.candidate.part == "2"
    )


def own_part(members: Sequence[SgdLearner], part: str) -> Assignment:
    """The assignment under which every peer keeps a part for itself."""
    anatomy = members[0].network.slicing.anatomy
    shared = Assignment.shared(anatomy, [member.network.peer for member in members])
    return shared.change(part, range(anatomy.parts[anatomy.find(part)].cells), OWN)


def test_what_was_given_by_hand_stays_even_where_sharing_would_be_better() -> None:
    members = learners(permuted=False, samples=60)
    for member in members:
        member.network.reslice(*own_part(members, "2").slices(member.network.peer))
    sharing, _ = run(members, 25, keep_models=True)
    assert not sharing.decisions


@pytest.mark.parametrize(
    ("part", "in_words"), [("2", "the outputs (2)"), ("0", "part 0")], ids=["outputs", "hidden"]
)
def test_a_wrong_decision_is_taken_back_and_accuracy_returns(part: str, in_words: str) -> None:
    """Equal tasks, but a decision has made a part each peer's own: it is shared again."""

    def start() -> list[SgdLearner]:
        members = learners(permuted=False, samples=60)
        list(Arena(members).run(5))
        return members

    def last_accuracy(members: Sequence[SgdLearner]) -> float:
        return float(np.mean([member.test().accuracy for member in members]))

    members, options = start(), AutoOptions()
    wrong = own_part(members, part)
    moved = np.flatnonzero(wrong.scheme_of == OWN)
    planner = Planner(options, Memory(steps=1, moved=moved.tolist()))
    plan = planner.first(wrong)
    followers = [SharingMember(member, plan, options) for member in members]
    for round_number in range(1, 41):
        vectors = [follower.before_averaging(follower.learner.train()) for follower in followers]
        average([member.network for member in members])
        mean = np.asarray(np.mean(vectors, axis=0, dtype=np.float32))
        for follower in followers:
            follower.after_averaging(mean)
        if round_number >= plan.until:
            plan = planner.next(plan, Statistics(plan.layout, mean))
            for follower in followers:
                follower.follow(plan)
    assert [str(one.candidate) for one in planner.decisions] == [
        f"all cells of {in_words}: shared by all peers again"
    ]
    assert not plan.assignment.scheme_of.any()
    assert planner.memory.moved == []
    for_good = start()
    for member in for_good:
        member.network.reslice(*wrong.slices(member.network.peer))
    list(Arena(for_good).run(40))
    never = start()
    list(Arena(never).run(40))
    right, own = last_accuracy(never), last_accuracy(for_good)
    assert own < right - 0.02
    assert last_accuracy(members) > (right + own) / 2


@pytest.mark.parametrize(
    ("peers", "samples", "reason"),
    [(3, 100, "3 peers are too few"), (4, 9, "9 training samples")],
)
def test_it_says_why_it_will_not_decide(peers: int, samples: int, reason: str) -> None:
    members = learners(permuted=True, peers=peers, samples=samples)
    sharing, _ = run(members, 6)
    assert reason in sharing.reason
    assert not sharing.can_decide
    assert not sharing.decisions
    assert all(len(member.samples[1]) == samples for member in members)
    Arena(learners(permuted=True, peers=4), sharing=sharing)
    assert sharing.can_decide, sharing.reason


def test_what_it_cannot_work_with_is_refused() -> None:
    members = learners(permuted=False, peers=4)
    members[0].proximal = 0.1
    with pytest.raises(ModelError, match=r"proximal term of 0\.1"):
        Arena(members, sharing=AutoSharing())
    members = learners(permuted=False, peers=4)
    network = SlicedNetwork(mlp("64=20=10"), {"all": 1.0}, peer="other", rest=None)
    members[0] = SgdLearner(network, members[0].samples, members[0].held_out)
    with pytest.raises(ModelError, match="one architecture for all peers; there are 2"):
        Arena(members, sharing=AutoSharing())


def test_held_out_losses_include_the_log_prior() -> None:
    """With a prior that rules out all classes but one, other changes gain than without."""
    members = learners(permuted=True)
    for member in members:
        member.log_prior = torch.tensor([0.0, *[-1e4] * 9])
    sharing, _ = run(members, 12)
    plain, _ = run(learners(permuted=True), 12)
    assert plain.decisions
    assert [str(one) for one in sharing.decisions] != [str(one) for one in plain.decisions]
