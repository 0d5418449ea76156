"""One part: costs against their definition, assignments against exhaustive search, sweeps that end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from math import lgamma, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.models import ModelError
from gossamer.models.matching import Cells, MatchOptions, match
from gossamer.models.matching.assignment import sum_atoms

JOINT = ["set", "efpf"]


def worth(
    members: list[tuple[np.ndarray, np.ndarray]], options: MatchOptions, mean: float
) -> float:
    """Q − λT of one atom, straight from the definition."""
    prior = 1 / options.prior_variance
    sums = sum(v * p for v, p in members)
    amount = sum(p for _, p in members)
    theta = (mean * prior + sums) / (prior + amount)
    q = ((mean * prior + sums) ** 2 / (prior + amount) - mean**2 * prior).sum()
    return float(q - options.kl * (amount * (theta - mean) ** 2).sum())


def posterior(
    peers: list[Cells], labels: list[np.ndarray], options: MatchOptions, mean: float = 0.0
) -> float:
    """The joint objective of a partition, straight from the definition."""
    atoms = sorted({int(a) for mine in labels for a in mine})
    total, count = 0.0, len(peers)
    for atom in atoms:
        members = [
            (peer.values[cell], peer.precision)
            for peer, mine in zip(peers, labels, strict=True)
            for cell in np.flatnonzero(mine == atom)
        ]
        m = len(members)
        total += 0.5 * worth(members, options, mean) + log(options.concentration)
        total += lgamma(m) + lgamma(count - m + 1) - lgamma(count + 1)
    return total - (lgamma(len(atoms) + 1) if options.kind == "efpf" else 0)


def partition(labels: list[np.ndarray] | tuple[np.ndarray, ...]) -> set[frozenset[tuple[int, int]]]:
    """Which cells are together: what is left of labels when their names are forgotten."""
    groups: dict[int, set[tuple[int, int]]] = {}
    for peer, mine in enumerate(labels):
        for cell, atom in enumerate(mine):
            groups.setdefault(int(atom), set()).add((peer, cell))
    return {frozenset(group) for group in groups.values()}


def placements(cells: int, atoms: int) -> Iterator[np.ndarray]:
    """Every way to give a peer's cells to atoms or to new ones of their own."""
    for choice in permutations(range(atoms + cells), cells):
        fresh = [c for c in choice if c >= atoms]
        if fresh == sorted(fresh) and fresh == list(range(atoms, atoms + len(fresh))):
            yield np.array(choice)


def random_peers(
    seed: int, sizes: list[int], columns: int, scale: float = 1.0, *, masked: bool = True
) -> list[Cells]:
    """Cells near common ones; precisions differ by peer and column, some are 0 if `masked`."""
    rng = np.random.default_rng(seed)
    planted = rng.normal(size=(max(sizes) + 1, columns)) * 2
    found = []
    for size in sizes:
        rows = planted[rng.permutation(len(planted))[:size]]
        precision = rng.choice([0.0 if masked else 0.5, 0.3, 1.0, 2.0], size=columns)
        found.append(Cells.of(rows + scale * rng.normal(size=rows.shape), precision))
    return found


@st.composite
def problems(draw: st.DrawFn, masked: bool = True) -> tuple[list[Cells], float]:
    sizes = draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    peers = random_peers(
        draw(st.integers(0, 10**6)),
        sizes,
        draw(st.integers(1, 6)),
        draw(st.sampled_from([0.1, 1.0, 3.0])),
        masked=masked,
    )
    return peers, draw(st.sampled_from([0.0, 0.5]))


options_of = st.builds(
    MatchOptions,
    prior_variance=st.sampled_from([0.5, 10.0, 1e4]),
    concentration=st.sampled_from([1e-3, 1.0, 20.0]),
    kind=st.sampled_from(["printed", "set", "efpf"]),
    kl=st.sampled_from([0.0, 0.1, 0.7, 1.0]),
    limit=st.sampled_from([None, 4, 700]),
)


@settings(max_examples=60)
@given(problems(), options_of)
def test_every_matching_is_sound(problem: tuple[list[Cells], float], options: MatchOptions) -> None:
    peers, mean = problem
    found = match(peers, options, mean=mean)
    assert found.sweeps <= options.sweeps
    for peer, mine in zip(peers, found.assignments, strict=True):
        assert len(mine) == len(peer.values)
        assert len(np.unique(mine)) == len(mine)  # no two cells of a peer in one atom
    used = np.unique(np.concatenate(found.assignments))
    assert used.tolist() == list(range(len(found.atoms)))
    widest = max(len(peer.values) for peer in peers)
    assert widest <= len(found.atoms) <= sum(len(peer.values) for peer in peers)
    kind = "set" if options.kind == "printed" else options.kind
    yardstick = MatchOptions(**{**options.__dict__, "kind": kind})
    expected = posterior(peers, list(found.assignments), yardstick, mean)
    assert found.objective[-1] == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(problems(), options_of.filter(lambda options: options.kind in JOINT))
def test_the_joint_objective_never_falls(
    problem: tuple[list[Cells], float], options: MatchOptions
) -> None:
    found = match(problem[0], options, mean=problem[1])
    trace = np.array(found.objective)
    assert (np.diff(trace) >= -1e-9 * (1 + np.abs(trace[:-1]))).all()
    assert found.stop_reason in ("settled", "tolerance", "repeated")  # long before the limit


@pytest.mark.parametrize("kind", JOINT)
@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(6))
def test_a_step_equals_exhaustive_search(kind: str, kl: float, seed: int) -> None:
    """Where matching ends, no peer can be assigned better: all its assignments are tried."""
    options = MatchOptions(kind=kind, kl=kl)
    peers = random_peers(seed, [3, 2, 3], 2)
    found = match(peers, options, mean=0.2, seed=seed)
    reached = posterior(peers, list(found.assignments), options, 0.2)
    for j, peer in enumerate(peers):
        others = [mine for i, mine in enumerate(found.assignments) if i != j]
        known = np.unique(np.concatenate(others))
        for choice in placements(len(peer.values), len(known)):
            labels = np.where(
                choice < len(known), known[np.minimum(choice, len(known) - 1)], 100 + choice
            )
            tried = [labels if i == j else mine for i, mine in enumerate(found.assignments)]
            assert posterior(peers, tried, options, 0.2) <= reached + 1e-9


@pytest.mark.parametrize("kind", JOINT)
@pytest.mark.parametrize("seed", range(8))
def test_two_peers_find_the_best_of_all_partitions(kind: str, seed: int) -> None:
    """With two peers one step is the whole problem, so the result is the global optimum."""
    options = MatchOptions(kind=kind)
    peers = random_peers(seed, [4, 3], 2)
    found = match(peers, options)
    first = np.arange(4)
    best = max(posterior(peers, [first, choice], options) for choice in placements(3, 4))
    assert posterior(peers, list(found.assignments), options) == pytest.approx(best)


def test_the_printed_step_equals_exhaustive_search_of_its_cost() -> None:
    """The paper's rank: the t-th new atom costs 2 log t. There is no joint objective, but a step has."""
    peers = random_peers(3, [3, 3], 3)
    found = match(peers, MatchOptions(kind="printed", sweeps=0))
    first, second = found.assignments if found.assignments[0][0] == 0 else found.assignments[::-1]

    def cost(choice: np.ndarray) -> float:
        total, rank = 0.0, 0
        options = MatchOptions()
        for cell, atom in enumerate(choice):
            mine = (peers[1].values[cell], peers[1].precision)
            if atom < 3:
                held = (peers[0].values[atom], peers[0].precision)
                total -= worth([held, mine], options, 0) - worth([held], options, 0)
                total -= 2 * log(1 / 1)
            else:
                rank += 1
                total -= worth([mine], options, 0) + 2 * log(1 / 2) - 2 * log(rank)
        return total

    best = min(cost(choice) for choice in placements(3, 3))
    assert first.tolist() == [0, 1, 2]
    assert cost(second) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["printed", "set", "efpf"])
def test_planted_cells_are_recovered(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    planted = rng.normal(size=(20, 30)) * 3
    chosen = [rng.permutation(20)[: rng.integers(8, 19)] for _ in range(6)]
    peers = [Cells.of(planted[mine] + 0.1 * rng.normal(size=(len(mine), 30))) for mine in chosen]
    found = match(peers, MatchOptions(kind=kind), seed=seed)
    assert partition(found.assignments) == partition(chosen)
    for mine, labels in zip(chosen, found.assignments, strict=True):
        assert np.abs(found.values[labels] - planted[mine]).max() < 1.5  # noise, and the shrinkage


@settings(max_examples=60)
@given(problems(masked=False), options_of, st.integers(0, 1000))
def test_permuting_cells_changes_labels_only(
    problem: tuple[list[Cells], float], options: MatchOptions, seed: int
) -> None:
    peers, mean = problem
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(len(peer.values)) for peer in peers]
    moved = [
        Cells(peer.values[order], peer.precision) for peer, order in zip(peers, orders, strict=True)
    ]
    one, two = match(peers, options, mean=mean), match(moved, options, mean=mean)
    back: list[np.ndarray] = []
    for labels, order in zip(two.assignments, orders, strict=True):
        original = np.empty_like(labels)
        original[order] = labels
        back.append(original)
    assert partition(one.assignments) == partition(back)
    assert two.objective[-1] == pytest.approx(one.objective[-1], rel=1e-9, abs=1e-9)


def test_one_peer_is_itself_up_to_the_priors_shrinkage() -> None:
    values = np.random.default_rng(0).normal(size=(5, 4))
    found = match([Cells.of(values, 2.0)], MatchOptions(prior_variance=10), mean=0.3)
    assert len(found.atoms) == 5
    expected = (0.3 / 10 + 2 * values) / (1 / 10 + 2)
    assert np.allclose(found.values[found.assignments[0]], expected, atol=1e-12)
    plain = match([Cells.of(values, 2.0)], MatchOptions(shrink=False), mean=0.3)
    assert np.allclose(plain.values[plain.assignments[0]], values, atol=1e-12)


def test_cells_match_only_inside_their_group() -> None:
    values = np.random.default_rng(1).normal(size=(6, 8)) * 3
    left, right = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 0, 1, 1, 1, 0])
    free = match([Cells.of(values, 9.0), Cells.of(values, 9.0)])
    bound = match([Cells.of(values, 9.0, left), Cells.of(values, 9.0, right)])
    assert len(free.atoms) == 6
    together = free.assignments[0] == free.assignments[1]
    assert together.all()
    assert len(bound.atoms) >= 6
    for atom in range(len(bound.atoms)):
        labels = {*left[bound.assignments[0] == atom], *right[bound.assignments[1] == atom]}
        assert len(labels) == 1
    assert (bound.assignments[0] == bound.assignments[1])[left == right].all()
    assert (bound.assignments[0] != bound.assignments[1])[left != right].all()


def test_masked_columns_are_not_zeros() -> None:
    """Two peers that each see half of the same cells: masked they merge, zero-filled they split."""
    rng = np.random.default_rng(2)
    planted = rng.normal(size=(10, 30)) * 4
    seen = [np.arange(30) < 20, np.arange(30) >= 10]
    masked = [Cells.of(planted, np.where(mask, 4.0, 0.0)) for mask in seen]
    zeros = [Cells.of(np.where(mask, planted, 0), 4.0) for mask in seen]
    assert len(match(masked).atoms) == 10
    assert len(match(zeros).atoms) > 10


@pytest.mark.parametrize("kind", ["printed", "set", "efpf"])
def test_growth_stops_at_the_limit_or_the_widest_peer(kind: str) -> None:
    rng = np.random.default_rng(3)
    peers = [Cells.of(rng.normal(size=(10, 20)) * 9, 9.0) for _ in range(6)]
    sizes = [
        len(match(peers, MatchOptions(kind=kind, limit=limit)).atoms)  # type: ignore[arg-type]
        for limit in (None, 25, 3)
    ]
    assert sizes == [60, 25, 10]


def test_groups_share_a_limit_and_each_keeps_room_for_its_widest_peer() -> None:
    rng = np.random.default_rng(4)
    labels = [np.repeat([0, 1], counts) for counts in ((6, 1), (2, 5), (4, 4))]
    peers = [Cells.of(rng.normal(size=(len(own), 20)) * 9, 9.0, own) for own in labels]
    for limit, most in ((None, 22), (15, 15), (3, 6 + 5)):
        found = match(peers, MatchOptions(kind="set", limit=limit))
        assert len(found.atoms) == most
        for own, atoms in zip(labels, found.assignments, strict=True):
            assert len(np.unique(atoms)) == len(own)
        for atom in range(most):
            inside = [
                own[atoms == atom] for own, atoms in zip(labels, found.assignments, strict=True)
            ]
            assert len(set(np.concatenate(inside).tolist())) == 1


def test_the_printed_prior_ends_although_it_may_run_in_circles() -> None:
    """Over many random problems some repeat a partition; all stop, and say why."""
    endings: list[str] = []
    for seed in range(60):
        peers = random_peers(seed, [4, 4, 4, 4], 2, 2.0)
        found = match(
            peers, MatchOptions(kind="printed", concentration=3.0, sweeps=1000), seed=seed
        )
        endings.append(found.stop_reason)
    assert {"settled", "repeated"} <= set(endings)  # circles are there to be met
    assert "sweep limit" not in endings


def test_a_sweep_limit_is_kept() -> None:
    found = match(random_peers(0, [4, 4, 4], 2), MatchOptions(sweeps=0))
    assert (found.sweeps, found.stop_reason, len(found.objective)) == (0, "sweep limit", 1)


def test_a_larger_kl_gives_fewer_atoms() -> None:
    rng = np.random.default_rng(5)
    peers = [Cells.of(rng.normal(size=(20, 30))) for _ in range(6)]
    sizes = [len(match(peers, MatchOptions(kl=kl)).atoms) for kl in (0.0, 0.2, 0.5, 1.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0]


def test_without_a_prior_kl_is_a_larger_variance() -> None:
    """With a flat prior MAGI is PFNM at σ²/(1−λ): the same partition."""
    peers = random_peers(7, [6, 5, 6], 8)
    flat = MatchOptions(prior_variance=1e9, concentration=1e-4)
    magi = match(peers, MatchOptions(**{**flat.__dict__, "kl": 0.4}))
    scaled = [Cells(peer.values, peer.precision * 0.6) for peer in peers]
    assert partition(magi.assignments) == partition(match(scaled, flat).assignments)


def test_atoms_of_two_halves_add_to_those_of_the_whole() -> None:
    """Sums travel, the prior is added on reading: a tree of merges equals the batch."""
    peers = random_peers(8, [5, 5, 5, 5], 6)
    whole = match(peers)
    size = len(whole.atoms)
    left = sum_atoms(peers[:2], whole.assignments[:2], size)
    right = sum_atoms(peers[2:], whole.assignments[2:], size)
    both = left.plus(right)
    assert np.allclose(both.read(0.1, np.zeros(6)), whole.values, atol=1e-12)
    assert both.counts.tolist() == whole.atoms.counts.tolist()


GOOD = np.ones((2, 3))


@pytest.mark.parametrize(
    ("peers", "message"),
    [
        (lambda: [Cells.of(GOOD), Cells.of(np.ones((2, 4)))], "peer 1 have 4 columns"),
        (list, "no peers"),
        (lambda: [Cells.of(GOOD), Cells.of(GOOD, 1.0, np.zeros(2))], "every peer or to none"),
        (lambda: [Cells.of(GOOD, 1.0, np.zeros(3))], "2 cells were given 3 group labels"),
        (lambda: [Cells.of(np.ones((0, 3)))], "without a cell"),
        (lambda: [Cells.of(np.array([[np.nan]]))], "a value is not finite"),
        (lambda: [Cells.of(GOOD, -1.0)], "precision is negative"),
        (lambda: [Cells(GOOD, np.ones(2))], "one precision per column"),
    ],
)
def test_bad_cells_are_refused(peers: Callable[[], list[Cells]], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        match(peers())


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("kl", -0.1, r"kl \(λ\) is -0.1; it must lie between 0 and 1"),
        ("kl", 1.5, "between 0 and 1"),
        ("kl", float("nan"), "between 0 and 1"),
        ("variance", 0.0, r"variance \(σ²\) is 0.0"),
        ("variance", float("inf"), "finite number above 0"),
        ("prior_variance", -1.0, "σ0²"),
        ("concentration", 0.0, "γ0"),
        ("kind", "best", "there are printed, set, efpf"),
        ("limit", 0, "None for no limit"),
        ("sweeps", -1, "0 or more"),
    ],
)
def test_options_out_of_range_are_refused(option: str, value: object, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        MatchOptions(**{option: value})  # type: ignore[arg-type]
