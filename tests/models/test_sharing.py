"""Assignments average what their slices say, and the planner takes the smallest step that explains a gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgpack
import numpy as np
import pytest
import torch
from torch import nn

from gossamer.models import ModelError, SgdLearner, SlicedNetwork, average, mlp
from gossamer.models.sharing import (
    GLOBAL,
    OWN,
    Assignment,
    AutoOptions,
    Candidate,
    Memory,
    Plan,
    Planner,
    SharingMember,
    Statistics,
    levels,
    propose,
)

PEERS = ("anna", "ben", "carl", "dora", "emil", "fay")
NONE = np.empty(0, int)


def perceptrons(module: str = "6=5=4=3") -> list[SlicedNetwork]:
    """One network per peer, all cells shared, with different values."""
    networks = [SlicedNetwork(mlp(module), {"all": 1.0}, peer=peer, rest=None) for peer in PEERS]
    generator = torch.Generator().manual_seed(0)
    for network in networks:
        network.flat.copy_(torch.rand(len(network.flat), generator=generator))
    return networks


def reslice(networks: Sequence[SlicedNetwork], assignment: Assignment) -> None:
    for network in networks:
        slices, graph = assignment.slices(network.peer)
        network.reslice(slices, graph, anatomy=assignment.anatomy)


def values(networks: Sequence[SlicedNetwork]) -> np.ndarray:
    return np.stack([network.flat.numpy().copy() for network in networks])


def random_assignment(seed: int, networks: Sequence[SlicedNetwork]) -> Assignment:
    """Some cells own, some in one grouping, some in another, the rest shared by all."""
    generator = np.random.default_rng(seed)
    assignment = Assignment.shared(networks[0].slicing.anatomy, PEERS)
    for _ in range(3):
        part = generator.choice(assignment.anatomy.names)
        cells = np.flatnonzero(generator.random(len(assignment.cells(part, GLOBAL))) < 0.6)
        groups = tuple(generator.integers(1 + int(generator.integers(3)), size=len(PEERS)).tolist())
        scheme = OWN if generator.random() < 0.3 else groups
        assignment = assignment.change(part, cells, scheme)
    return assignment


@pytest.mark.parametrize("seed", range(12))
def test_an_assignment_averages_as_networks_with_its_slices_do(seed: int) -> None:
    networks = perceptrons()
    assignment = random_assignment(seed, networks)
    before = values(networks)
    reslice(networks, assignment)
    assert np.array_equal(values(networks), before), "new slices must not change values"
    average(networks)
    every = np.arange(before.shape[1])
    np.testing.assert_allclose(values(networks), assignment.average(before, every), atol=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_the_assignment_of_sliced_networks_is_found(seed: int) -> None:
    networks = perceptrons()
    assignment = random_assignment(seed, networks)
    reslice(networks, assignment)
    found = Assignment.of(networks, assignment.anatomy)
    assert averages_alike(found, assignment)


def test_models_that_no_assignment_describes_are_refused() -> None:
    def networks(cross: bool) -> list[SlicedNetwork]:
        slices = {"one": {"*": 0.5}, "two": {"*": 0.5}}
        return [
            SlicedNetwork(mlp("6=4=2"), slices, peer=peer, rest=None, cross=cross) for peer in PEERS
        ]

    anatomy = networks(cross=True)[0].slicing.anatomy
    found = Assignment.of(networks(cross=True), anatomy)
    assert averages_alike(found, Assignment.shared(anatomy, PEERS))
    with pytest.raises(ModelError, match="average across models"):
        Assignment.of(networks(cross=False), anatomy)
    moved = networks(cross=True)
    slices = {"one": [[5, 4, 3, 2, 1, 0], [0, 1], [0]], "two": [[], [2, 3], [1]]}
    moved[0] = SlicedNetwork(mlp("6=4=2"), slices, peer=PEERS[0], rest=None, cross=True)
    with pytest.raises(ModelError, match="gives other cells to partial model 'one'"):
        Assignment.of(moved, anatomy)


def averages_alike(one: Assignment, other: Assignment) -> bool:
    every = np.arange(one.anatomy.size)
    rows = np.random.default_rng(0).random((len(one.peers), len(every)))
    return np.array_equal(one.average(rows, every), other.average(rows, every))


@pytest.mark.parametrize("seed", range(12))
def test_a_candidate_changes_who_averages_at_its_coordinates_and_nowhere_else(seed: int) -> None:
    networks = perceptrons()
    present, generator = random_assignment(seed, networks), np.random.default_rng(seed)
    part = generator.choice(present.anatomy.names)
    cells = np.flatnonzero(
        generator.random(present.anatomy.parts[present.anatomy.find(part)].cells) < 0.7
    )
    groups = tuple(generator.integers(3, size=len(PEERS)).tolist())
    candidate = Candidate.of(present, part, cells, OWN if seed % 3 == 0 else groups)
    rows, every = values(networks), np.arange(networks[0].flat.numel())
    old, new = present.average(rows, every), candidate.assignment.average(rows, every)
    mixed = old.copy()
    for labels, columns in candidate.changes:
        assert (old[:, columns] != new[:, columns]).any(axis=0).all()
        for group in set(labels):
            among = np.flatnonzero(np.array(labels) == group)
            mixed[np.ix_(among, every[columns])] = rows[among][:, columns].mean(axis=0)
    np.testing.assert_allclose(mixed, new, rtol=1e-6)


def test_own_cells_keep_their_values_and_shared_ones_agree() -> None:
    networks = perceptrons("4=3")
    assignment = Assignment.shared(networks[0].slicing.anatomy, PEERS).change("0", [2], OWN)
    before = values(networks)
    reslice(networks, assignment)
    average(networks)
    weight = [network.module.state_dict()["0.weight"].numpy() for network in networks]
    assert all(np.allclose(one[:2], weight[0][:2]) for one in weight)
    rows = before[:, :12].reshape(-1, 3, 4)
    assert all(np.array_equal(one[2], row[2]) for one, row in zip(weight, rows, strict=True))
    assert assignment.distinct_values == 10 + 5 * len(PEERS)


def normed() -> list[SlicedNetwork]:
    def module() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))

    networks = [
        SlicedNetwork(module(), {"all": 1.0}, peer=peer, rest=None, example=torch.zeros(2, 4))
        for peer in PEERS
    ]
    generator = torch.Generator().manual_seed(1)
    for network in networks:
        network.flat.copy_(torch.rand(len(network.flat), generator=generator))
    return networks


@pytest.mark.parametrize(
    ("part", "own"),
    [
        ("norm-statistics", {"1.running_mean", "1.running_var"}),
        ("norms", {"1.weight", "1.bias"}),
    ],
)
def test_norms_can_be_shared_apart_from_their_cells(part: str, own: set[str]) -> None:
    networks = normed()
    anatomy = networks[0].slicing.anatomy.with_norm_parts({"1"})
    assignment = Assignment.shared(anatomy, PEERS).change(part, [0], OWN)
    reslice(networks, assignment)
    average(networks)
    for name in anatomy.spans:
        agree = all(
            torch.allclose(network.module.state_dict()[name], networks[0].module.state_dict()[name])
            for network in networks
        )
        assert agree == (name not in own), name


def test_norms_come_before_outputs_and_outputs_before_lower_parts() -> None:
    anatomy = normed()[0].slicing.anatomy.with_norm_parts({"1"})
    order = [part for _, part in levels(anatomy)]
    assert order[:2] == ["norm-statistics", "norms"]
    assert [level for level, _ in levels(anatomy)] == [-2, -1, 0, 1, 2]
    assert order[-1] == anatomy.names[0]


def test_candidates_follow_groups_that_sketches_show() -> None:
    networks = [SlicedNetwork(mlp("6=5=3"), {"all": 1.0}, peer=peer, rest=None) for peer in PEERS]
    assignment = Assignment.shared(networks[0].slicing.anatomy, PEERS)
    generator = np.random.default_rng(0)
    directions = generator.standard_normal((2, 32))
    sketch = directions[[0, 1, 0, 1, 0, 1]] + 0.1 * generator.standard_normal((6, 32))
    sketches = dict.fromkeys(assignment.anatomy.names, sketch)
    ratios = np.zeros(assignment.anatomy.first_cells[-1])
    ratios[-1] = 5.0
    candidates = propose(assignment, sketches, ratios)
    texts = [str(one) for one in candidates if one.level == 0]
    assert "all cells of the outputs (2): each peer's own" in texts
    assert "cell 2 of the outputs (2): averaged in 2 groups" in texts
    two = next(one for one in candidates if one.level == 0 and one.groups == 2)
    assert two.assignment.schemes[-1] == (0, 1, 0, 1, 0, 1)


def test_cells_that_a_decision_moved_can_be_shared_again_and_no_others() -> None:
    anatomy = perceptrons()[0].slicing.anatomy
    given = Assignment.shared(anatomy, PEERS).change("2", range(4), OWN)
    present = given.change("4", [0, 2], (0, 1, 0, 1, 0, 1))
    first = int(anatomy.first_cells[anatomy.find("4")])
    sketches = {part: np.zeros((6, 32)) for part in anatomy.names}
    candidates = propose(
        present, sketches, np.zeros(anatomy.first_cells[-1]), moved=[first, first + 2]
    )
    [back] = [one for one in candidates if one.shares_again]
    assert (back.part, back.cells) == ("4", (0, 2))
    assert back.assignment.codes.tolist() == given.codes.tolist()
    assert "cells 0, 2 of the outputs (4): shared by all peers again" in str(back)


def test_sketches_without_a_direction_give_no_groups() -> None:
    networks = perceptrons()
    assignment = Assignment.shared(networks[0].slicing.anatomy, PEERS)
    sketches = {part: np.zeros((6, 32)) for part in assignment.anatomy.names}
    candidates = propose(assignment, sketches, np.zeros(assignment.anatomy.first_cells[-1]))
    assert all(one.groups == 0 for one in candidates)


def test_bad_changes_are_refused() -> None:
    assignment = Assignment.shared(perceptrons()[0].slicing.anatomy, PEERS)
    with pytest.raises(ModelError, match="no part 'nose'"):
        assignment.change("nose", [0], OWN)
    with pytest.raises(ModelError, match="2 groups were given for 6 peers"):
        assignment.change("4", [0], (0, 1))


# --- decisions ----------------------------------------------------------------------------------


def candidate(level: int, values: int = 0) -> Candidate:
    """A candidate whose assignment matters only by the cells of the inputs that it makes own."""
    assignment = Assignment.shared(perceptrons()[0].slicing.anatomy, PEERS)
    assignment = assignment.change("input", list(range(values)), OWN)
    part = {-1: "input", 0: "4", 1: "2", 2: "0"}[level]
    return Candidate(part, level, (0,), OWN, assignment, NONE)


def measured(*gains: float, noise: float = 0.01) -> tuple[np.ndarray, np.ndarray]:
    """Losses of 1 and the changes that candidates with these gains bring, with noise over peers."""
    spread = noise * np.array([-1, 1, -1, 1, -1, 1])
    return np.ones(6), np.stack([spread - gain for gain in gains])


def decide(planner: Planner, candidates: Sequence[Candidate], *gains: float, noise: float = 0.01):
    return planner.decide(7, candidates, *measured(*gains, noise=noise))


def test_a_gain_that_noise_could_explain_is_not_taken() -> None:
    planner = Planner(AutoOptions())
    assert decide(planner, [candidate(0)], 0.01, noise=0.02) is None
    assert decide(planner, [candidate(0)], 0.004, noise=1e-4) is None, "below the smallest gain"
    assert planner.should_stop
    found = decide(Planner(AutoOptions()), [candidate(0)], 0.05)
    assert found is not None
    assert found.gain == pytest.approx(0.05)
    assert "held-out loss fell by 5.0%" in str(found)


def test_the_outputs_come_first_unless_a_lower_part_gains_far_more() -> None:
    both = [candidate(0), candidate(2)]
    first = decide(Planner(AutoOptions()), both, 0.05, 0.1)
    assert first is not None
    assert first.candidate.level == 0
    second = decide(Planner(AutoOptions()), both, 0.02, 0.1)
    assert second is not None
    assert second.candidate.level == 2


def test_norms_need_less_evidence_and_lower_parts_more() -> None:
    assert decide(Planner(AutoOptions()), [candidate(0)], 0.02, noise=0.02) is None
    assert decide(Planner(AutoOptions()), [candidate(-1)], 0.02, noise=0.02) is not None
    assert decide(Planner(AutoOptions()), [candidate(0)], 0.02, noise=0.01) is not None
    assert decide(Planner(AutoOptions()), [candidate(1)], 0.02, noise=0.01) is None


def test_norms_come_first_however_much_a_lower_part_gains() -> None:
    found = decide(Planner(AutoOptions()), [candidate(-1), candidate(2)], 0.02, 0.5)
    assert found is not None
    assert found.candidate.level == -1


def test_own_norm_statistics_are_preferred_to_those_of_groups() -> None:
    """Grouped ones gain enough for norms, own ones perhaps more: they cost hardly any samples."""
    shared = Assignment.shared(normed()[0].slicing.anatomy.with_norm_parts({"1"}), PEERS)
    grouped, own = (
        Candidate.of(shared, "norm-statistics", [0], scheme) for scheme in ((0, 0, 0, 1, 1, 1), OWN)
    )
    noise = np.array([-1, 1, -1, 1, -1, 1])
    changes = np.stack([0.014 * noise - 0.02, 0.1 * noise - 0.03])
    found = Planner(AutoOptions()).decide(7, [grouped, own], np.ones(6), changes)
    assert found is not None
    assert found.candidate is own
    changes[0] = 0.001 * noise - 0.02
    found = Planner(AutoOptions()).decide(7, [grouped, own], np.ones(6), changes)
    assert found is not None
    assert found.candidate is grouped, "there are groups for certain"
    changes[0], changes[1] = 0.014 * noise - 0.02, changes[1] + 0.2
    found = Planner(AutoOptions()).decide(7, [grouped, own], np.ones(6), changes)
    assert found is not None
    assert found.candidate is grouped


def test_a_second_step_must_gain_more() -> None:
    planner = Planner(AutoOptions())
    assert decide(planner, [candidate(0)], 0.03) is not None
    assert decide(planner, [candidate(1)], 0.03) is None, "what the first step left behind"
    assert decide(planner, [candidate(1)], 0.06) is not None


def test_more_cells_may_join_groups_that_exist_for_a_small_gain() -> None:
    groups = (0, 0, 0, 1, 1, 1)
    shared = Assignment.shared(perceptrons()[0].slicing.anatomy, PEERS)
    grouped = shared.change("4", [0, 1, 2], groups)
    own, joining, others = (
        Candidate.of(grouped, "0", [0, 1], scheme) for scheme in (OWN, groups, (0, 1, 0, 1, 0, 1))
    )
    joining_more = Candidate.of(grouped, "2", [0], groups)
    assert [each.is_small for each in (own, joining, others)] == [False, True, False]
    planner, noise = Planner(AutoOptions(), Memory(steps=1)), 0.001
    assert decide(planner, [own, others], 0.03, 0.03, noise=noise) is None
    assert decide(planner, [joining], 0.004, noise=noise) is None, "below the smallest gain"
    found = decide(planner, [own, joining_more, joining], 0.03, 0.01, 0.02, noise=noise)
    assert found is not None
    assert found.candidate is joining, "the largest gain of the small changes"
    found = decide(planner, [own, joining], 0.06, 0.02, noise=noise)
    assert found is not None
    assert found.candidate is own, "a change that gains enough comes first"


def test_norms_become_own_for_a_small_gain_too() -> None:
    anatomy = normed()[0].slicing.anatomy.with_norm_parts({"1"})
    own_statistics = Assignment.shared(anatomy, PEERS).change("norm-statistics", [0], OWN)
    own = Candidate.of(own_statistics, "norms", [0], OWN)
    found = decide(Planner(AutoOptions(), Memory(steps=1)), [own], 0.01, noise=0.005)
    assert found is not None
    assert found.candidate is own


def test_only_the_round_in_which_losses_are_measured_leaves_samples_out() -> None:
    network = perceptrons()[0]
    shared = Assignment.shared(network.slicing.anatomy, PEERS)
    samples = torch.rand(30, 6, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 3
    learner = SgdLearner(network, samples, samples, local_samples=20, batch=5)
    member = SharingMember(learner, Plan(shared, until=2), AutoOptions())

    def round_of(member: SharingMember) -> tuple[int, bool]:
        count = len(learner.samples[1])
        return count, member.after_averaging(member.before_averaging(learner.train()))

    assert round_of(member) == (30, False), "nothing is compared yet"
    compared = Plan(shared, 1, 2, 4, candidates=(Candidate.of(shared, "0", [0], OWN),))
    assert member.follow(compared)
    assert round_of(member) == (21, True)
    assert member.has_measured
    assert round_of(member) == (30, False)
    assert member.follow(Plan(shared.change("0", [0], OWN), 2, 4, 6))
    assert round_of(member) == (21, False), "own cells would remember the held-out samples"
    assert member.follow(Plan(shared.change("0", [0], OWN), 3, 6, 8, deciding=False))
    assert round_of(member) == (30, False)
    newcomer = Plan(Assignment.shared(network.slicing.anatomy, PEERS[1:]), 4, 8, 10)
    assert member.follow(newcomer), (
        "a peer without a place compares its values with those of groups"
    )
    assert round_of(member) == (21, False)


def test_sharing_again_takes_no_more_than_a_first_step() -> None:
    planner = Planner(AutoOptions(), Memory(steps=1))
    own = Assignment.shared(perceptrons()[0].slicing.anatomy, PEERS).change("4", [1], OWN)
    back = Candidate.of(own, "4", [1], GLOBAL)
    found = decide(planner, [candidate(0), back], 0.03, 0.02)
    assert found is not None
    assert found.candidate is back


def test_it_waits_for_a_gain_that_is_not_certain_yet_but_not_for_ever() -> None:
    hoping, sure = Planner(AutoOptions()), Planner(AutoOptions())
    for date in range(AutoOptions().patience):
        assert sure.should_stop == (date >= AutoOptions().max_without_hint)
        assert not hoping.should_stop
        assert decide(sure, [candidate(0)], -0.01) is None
        assert decide(hoping, [candidate(0)], 0.02, noise=0.018) is None
    assert hoping.should_stop


def test_of_equal_gains_the_one_that_shares_most_is_taken() -> None:
    wide, narrow = candidate(0, 5), candidate(0, 1)
    noise = 0.01 * np.array([-1, 1, -1, 1, -1, 1])
    losses = np.ones(6)
    equal = Planner(AutoOptions()).decide(
        7, [wide, narrow], losses, np.stack([noise - 0.052, -noise - 0.05])
    )
    assert equal is not None
    assert equal.candidate is narrow
    better = Planner(AutoOptions()).decide(
        7, [wide, narrow], losses, np.stack([noise - 0.1, -noise - 0.05])
    )
    assert better is not None
    assert better.candidate is wide


# --- plans and what peers tell each other ---------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_can_be_sent(seed: int) -> None:
    assignment = random_assignment(seed, perceptrons())
    groups = (0, 1, 0, 1, 1, 0)
    candidates = (
        Candidate.of(assignment, "4", [0, 2], groups),
        Candidate.of(assignment, "0", [1], OWN),
        Candidate.of(assignment, "2", [0], GLOBAL),
    )
    planner = Planner(AutoOptions(), Memory(steps=2, comparisons=3, recent_losses=[1.0], moved=[7]))
    plan = Plan(assignment, 3, 17, 20, candidates, chosen=1, memory=vars(planner.memory))
    data = msgpack.unpackb(msgpack.packb(plan.as_record()))
    copy = Plan.from_record(assignment.anatomy, data)
    assert copy.as_record() == plan.as_record()
    assert np.array_equal(copy.assignment.codes, assignment.codes)
    assert [str(one) for one in copy.candidates] == [str(one) for one in candidates]
    assert copy.layout.size == plan.layout.size
    assert Memory(**copy.memory) == planner.memory


def test_an_assignment_of_another_network_is_refused() -> None:
    record = random_assignment(0, perceptrons()).as_record()
    other = perceptrons("6=4=3")[0].slicing.anatomy
    with pytest.raises(ModelError, match=r"not for the cells of this network|has no part"):
        Assignment.from_record(other, record)


def test_means_of_rows_and_groups_are_exact_however_far_gossip_has_come() -> None:
    """Peers whose words have reached us with any weights: rows are whole, groups weighted means."""
    assignment = random_assignment(1, perceptrons())
    groups = (0, 1, 0, 1, 1, 0)
    plan = Plan(assignment, candidates=(Candidate.of(assignment, "0", [0, 1], groups),))
    layout, generator = plan.layout, np.random.default_rng(0)
    losses = generator.random((6, layout.losses))
    sketches = generator.random((6, len(layout.parts), 32))
    values = generator.random((6, assignment.anatomy.size))
    cells = generator.random((2, layout.cells))
    vectors = [
        layout.pack(
            peer, 2.0, cells[0], cells[1], losses[peer], sketches[peer],
            {"values": values[peer], "copies": values[peer]},
        )
        for peer in range(6)
    ]  # fmt: skip
    weights = np.array([0.4, 0.1, 0.2, 0.0, 0.2, 0.1])
    heard = weights @ np.stack(vectors)
    statistics = Statistics(layout, heard)
    assert statistics.training_loss == pytest.approx(2.0)
    assert statistics.present.tolist() == [True, True, True, False, True, True]
    for peers, is_complete in (([1, 2, 4, 5], True), ([0, 1], False), ([1, 3], False)):
        assert layout.is_complete(heard, peers) == is_complete, (
            "0.4 counts too much, 0 is not there"
        )
    np.testing.assert_allclose(
        statistics.losses[statistics.present], losses[weights > 0], rtol=1e-5
    )
    for index, part in enumerate(layout.parts):
        np.testing.assert_allclose(statistics.sketches[part][0], sketches[0, index], rtol=1e-5)
    centred = Statistics(layout, heard, spread=1).sketches
    heard_of = np.flatnonzero(weights)
    for index, part in enumerate(layout.parts):
        expected = sketches[heard_of, index] - sketches[heard_of, index].mean(axis=0)
        np.testing.assert_allclose(centred[part][heard_of], expected, atol=1e-5)
    assert layout.groups
    for trial, (_, groups) in enumerate(layout.trials):
        for number, (group, columns) in enumerate(groups):
            if len(group) > 1:
                members = [peer for peer in group if weights[peer] > 0]
                expected = np.average(values[members][:, columns], axis=0, weights=weights[members])
                mean = layout.group_mean(heard, trial, number)
                np.testing.assert_allclose(mean, expected, rtol=1e-5)


def test_samples_are_given_back_when_nothing_is_left_to_change() -> None:
    assignment = Assignment.shared(perceptrons()[0].slicing.anatomy, PEERS)
    for part in assignment.anatomy.parts:
        assignment = assignment.change(part.name, list(range(part.cells)), OWN)
    planner = Planner(AutoOptions())
    plan = Plan(assignment, 4, 10, 12, memory={})
    vector = np.ones(plan.layout.size, np.float32)
    following = planner.next(plan, Statistics(plan.layout, vector))
    assert not following.deciding
    assert not following.candidates


@pytest.mark.parametrize(("complete_from", "measured_at"), [(1, 1), (3, 3), (99, 5)])
def test_losses_are_measured_once_all_values_are_there_or_when_it_takes_too_long(
    complete_from: int, measured_at: int
) -> None:
    network = perceptrons()[0]
    shared = Assignment.shared(network.slicing.anatomy, PEERS)
    plan = Plan(shared, until=99, candidates=(Candidate.of(shared, "0", [0], OWN),), spread=2)
    samples = torch.rand(30, 6, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 3
    learner = SgdLearner(network, samples, samples, local_samples=20, batch=5)
    member = SharingMember(learner, plan, AutoOptions())
    measured = []
    for number in range(1, 8):
        vector = member.before_averaging(learner.train())
        if number == 1:  # something arrives from others, and nothing in later rounds
            network.flat.mul_(0.9)
        member.after_averaging(vector, complete=number >= complete_from)
        measured.append(member.has_measured)
    assert measured.index(True) == measured_at - 1
    assert member.is_slow == (complete_from > 1)


def test_own_norm_statistics_begin_as_if_they_had_never_been_averaged() -> None:
    """Training does not use them, so peers with own statistics from the start have the same weights."""

    def run(own_from_start: bool) -> list[SgdLearner]:
        generator = torch.Generator().manual_seed(3)
        learners = [
            SgdLearner(
                network,
                (torch.rand(30, 4, generator=generator) + 3 * peer, torch.arange(30) % 2),
                (torch.rand(2, 4), torch.arange(2)), local_samples=20, batch=5, seed=peer,
            )
            for peer, network in enumerate(normed())
        ]  # fmt: skip
        shared = Assignment.shared(normed()[0].slicing.anatomy.with_norm_parts({"1"}), PEERS)
        own = Candidate.of(shared, "norm-statistics", [0], OWN)
        plan = Plan(shared, until=9, candidates=(own,))
        if own_from_start:  # with another candidate, so that both runs train on the same samples
            other = Candidate.of(own.assignment, "norms", [0], OWN)
            plan = replace(plan, assignment=own.assignment, candidates=(other,))
        members = [SharingMember(learner, plan, AutoOptions()) for learner in learners]
        networks = [learner.network for learner in learners]
        average(networks)
        for network in networks:  # the same first values in both runs
            network.flat.copy_(torch.linspace(0.1, 1, len(network.flat)))
        for _ in range(4):
            vectors = [member.before_averaging(member.learner.train()) for member in members]
            average(networks)
            mean = np.mean(vectors, axis=0, dtype=np.float32)
            for member in members:
                member.after_averaging(mean)
        if not own_from_start:
            after = Plan(own.assignment, version=1, round=9, until=10, chosen=0)
            for member in members:
                assert member.follow(after)
        return learners

    for changed, own in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(changed.network.flat, own.network.flat, rtol=1e-4, atol=1e-5)
        means = changed.network.module.state_dict()["1.running_mean"]
        assert float(means.abs().max()) > 0.1


class Tied(nn.Module):
    """Tokens in, scores of tokens out, through the same matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.scores = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.scores.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.scores(self.embedding(tokens).mean(1))


def test_outputs_that_are_tied_to_an_embedding_are_measured_without_a_copy() -> None:
    samples = torch.arange(40).reshape(20, 2) % 5, torch.arange(20) % 5
    network = SlicedNetwork(Tied(), {"all": 1.0}, example=samples[0], peer="anna", rest=None)
    assignment = Assignment.shared(network.slicing.anatomy, PEERS)
    learner = SgdLearner(network, samples, samples, local_samples=10)
    member = SharingMember(learner, Planner(AutoOptions()).first(assignment), AutoOptions())
    contribution = member.before_averaging(learner.train())
    member.after_averaging(contribution)
    assert np.isfinite(contribution).all()
    assert member.has_measured
