"""Assignments average what their slices say, and the decider takes the smallest step that explains a gain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from gossamer.models import (
    GLOBAL,
    OWN,
    Assignment,
    AutoOptions,
    Candidate,
    Decider,
    ModelError,
    SlicedNetwork,
    average,
    levels,
    mlp,
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


@pytest.mark.parametrize("seed", range(6))
def test_only_coordinates_that_differ_change_between_two_assignments(seed: int) -> None:
    networks = perceptrons()
    old, new = random_assignment(seed, networks), random_assignment(seed + 100, networks)
    rows, every = values(networks), np.arange(networks[0].flat.numel())
    changed = (old.average(rows, every) != new.average(rows, every)).any(axis=0)
    assert np.array_equal(np.flatnonzero(changed), old.differs(new))


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
    candidates = propose(assignment, sketches, ratios, AutoOptions())
    texts = [str(one) for one in candidates if one.level == 0]
    assert "all cells of the outputs (2): each peer's own" in texts
    assert "cell 2 of the outputs (2): averaged in 2 groups" in texts
    two = next(one for one in candidates if one.level == 0 and one.groups == 2)
    assert two.assignment.schemes[-1] == (0, 1, 0, 1, 0, 1)


def test_sketches_without_a_direction_give_no_groups() -> None:
    networks = perceptrons()
    assignment = Assignment.shared(networks[0].slicing.anatomy, PEERS)
    sketches = {part: np.zeros((6, 32)) for part in assignment.anatomy.names}
    candidates = propose(
        assignment, sketches, np.zeros(assignment.anatomy.first_cells[-1]), AutoOptions()
    )
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
    return Candidate(f"part {level}", level, "all cells", 0, assignment, NONE)


def measured(*gains: float, noise: float = 0.01) -> tuple[np.ndarray, np.ndarray]:
    """Losses of 1 and the changes that candidates with these gains bring, with noise over peers."""
    spread = noise * np.array([-1, 1, -1, 1, -1, 1])
    return np.ones(6), np.stack([spread - gain for gain in gains])


def decide(decider: Decider, candidates: Sequence[Candidate], *gains: float, noise: float = 0.01):
    return decider.decide(7, candidates, *measured(*gains, noise=noise))


def test_a_gain_that_noise_could_explain_is_not_taken() -> None:
    decider = Decider(AutoOptions())
    assert decide(decider, [candidate(0)], 0.01, noise=0.02) is None
    assert decide(decider, [candidate(0)], 0.004, noise=1e-4) is None, "below the smallest gain"
    assert decider.quiet
    found = decide(Decider(AutoOptions()), [candidate(0)], 0.05)
    assert found is not None
    assert found.gain == pytest.approx(0.05)
    assert "held-out loss fell by 5.0%" in str(found)


def test_the_outputs_come_first_unless_a_lower_part_gains_far_more() -> None:
    both = [candidate(0), candidate(2)]
    first = decide(Decider(AutoOptions()), both, 0.05, 0.1)
    assert first is not None
    assert first.candidate.level == 0
    second = decide(Decider(AutoOptions()), both, 0.02, 0.1)
    assert second is not None
    assert second.candidate.level == 2


def test_norms_need_less_evidence() -> None:
    assert decide(Decider(AutoOptions()), [candidate(0)], 0.02, noise=0.02) is None
    assert decide(Decider(AutoOptions()), [candidate(-1)], 0.02, noise=0.02) is not None


def test_a_second_step_must_last_or_be_beyond_doubt() -> None:
    decider = Decider(AutoOptions())
    assert decide(decider, [candidate(0)], 0.03) is not None
    assert decide(decider, [candidate(1)], 0.03) is None, "seen once"
    assert not decider.quiet
    assert decide(decider, [candidate(1)], 0.01, noise=0.001) is None, "it fades"
    assert decide(decider, [candidate(1)], 0.01, noise=0.001) is not None, "it lasts"
    assert decide(decider, [candidate(2)], 0.2) is not None, "beyond doubt"


def test_of_equal_gains_the_one_that_shares_most_is_taken() -> None:
    wide, narrow = candidate(0, 5), candidate(0, 1)
    noise = 0.01 * np.array([-1, 1, -1, 1, -1, 1])
    losses = np.ones(6)
    equal = Decider(AutoOptions()).decide(
        7, [wide, narrow], losses, np.stack([noise - 0.052, -noise - 0.05])
    )
    assert equal is not None
    assert equal.candidate is narrow
    better = Decider(AutoOptions()).decide(
        7, [wide, narrow], losses, np.stack([noise - 0.1, -noise - 0.05])
    )
    assert better is not None
    assert better.candidate is wide
