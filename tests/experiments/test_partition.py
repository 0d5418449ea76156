"""Who holds which samples, and what their labels are called."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.experiments.data import DataError, Task, load, partition

seeds = st.integers(0, 2**32)
labels = st.lists(st.integers(0, 5), min_size=1, max_size=200)


def disjoint(parts: list[np.ndarray]) -> np.ndarray:
    joined = np.concatenate(parts)
    assert len(np.unique(joined)) == len(joined)
    return np.sort(joined)


@given(n=st.integers(1, 300), peers=st.integers(1, 20), seed=seeds)
def test_iid_and_successive_deal_everything_evenly(n: int, peers: int, seed: int) -> None:
    for make in (
        lambda: partition.iid(n, peers, seed=seed),
        lambda: partition.successive(n, peers),
    ):
        if n < peers:
            with pytest.raises(DataError, match=f"there are {n}"):
                make()
            continue
        parts = make()
        sizes = [len(part) for part in parts]
        assert len(parts) == peers
        assert max(sizes) - min(sizes) <= 1
        assert (disjoint(parts) == np.arange(n)).all()


def test_successive_is_the_papers_sequences() -> None:
    parts = partition.successive(60000, 16, 3500)
    assert [(part[0], part[-1]) for part in parts[:2]] == [(0, 3499), (3500, 6999)]
    assert {len(part) for part in parts} == {3500}


def test_iid_is_random_but_repeats_for_a_seed() -> None:
    first, again = partition.iid(1000, 4, 50, seed=3), partition.iid(1000, 4, 50, seed=3)
    other = partition.iid(1000, 4, 50, seed=4)
    generator = partition.iid(1000, 4, 50, seed=np.random.default_rng(3))
    assert np.array_equal(first, again)
    assert np.array_equal(first, generator)
    assert not np.array_equal(first, other)
    assert len(disjoint(first)) == 200


def test_too_many_samples_says_how_many() -> None:
    with pytest.raises(DataError, match=r"17 peers with 3500 samples each need 59500.* are 50000"):
        partition.successive(50000, 17, 3500)
    with pytest.raises(
        DataError, match=r"3 peers with 1 samples each need 3, there are 2: use fewer"
    ):
        partition.iid(2, 3)
    with pytest.raises(DataError, match="at least one peer"):
        partition.iid(10, 0)


@given(
    y=labels,
    peers=st.integers(1, 10),
    alpha=st.sampled_from([1e-3, 0.1, 0.5, 100.0]),
    minimum=st.integers(0, 5),
    seed=seeds,
)
def test_dirichlet_deals_everything_and_keeps_the_minimum(
    y: list[int], peers: int, alpha: float, minimum: int, seed: int
) -> None:
    if peers * minimum > len(y):
        with pytest.raises(DataError, match=f"need {peers * minimum}, there are {len(y)}"):
            partition.dirichlet(y, peers, alpha, seed, minimum)
        return
    parts = partition.dirichlet(y, peers, alpha, seed, minimum)
    assert len(parts) == peers
    assert min(len(part) for part in parts) >= minimum
    assert (disjoint(parts) == np.arange(len(y))).all()


def test_dirichlet_is_more_skewed_for_a_smaller_alpha() -> None:
    y = np.repeat(np.arange(10), 200)

    def skew(alpha: float) -> float:  # mean share of a peer's commonest class
        parts = partition.dirichlet(y, 10, alpha, seed=1)
        return float(np.mean([np.bincount(y[part]).max() / len(part) for part in parts]))

    assert skew(0.1) > skew(1.0) + 0.1 > skew(100.0) + 0.2
    assert skew(100.0) < 0.2


def test_dirichlet_refuses_an_alpha_without_meaning() -> None:
    for alpha in (0.0, -1.0, float("nan")):
        with pytest.raises(DataError, match="alpha must be above 0"):
            partition.dirichlet([0, 1], 2, alpha)


@given(y=labels, peers=st.integers(1, 8), per_peer=st.integers(1, 4), seed=seeds)
def test_shards_deal_everything(y: list[int], peers: int, per_peer: int, seed: int) -> None:
    if peers * per_peer > len(y):
        with pytest.raises(DataError, match=f"need {peers * per_peer} samples or more"):
            partition.shards(y, peers, per_peer, seed)
        return
    parts = partition.shards(y, peers, per_peer, seed)
    assert len(parts) == peers
    assert (disjoint(parts) == np.arange(len(y))).all()


def test_two_shards_leave_at_most_two_classes_when_they_fit() -> None:
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 20))
    for part in partition.shards(torch.from_numpy(y), 10, 2, seed=5):
        assert len(part) == 20
        assert len(np.unique(y[part])) <= 2


@given(group=labels, peers=st.integers(1, 6), seed=seeds)
def test_by_group_takes_the_largest_groups_cut_to_one_size(
    group: list[int], peers: int, seed: int
) -> None:
    ids = np.array(group)
    values, counts = np.unique(ids, return_counts=True)
    if peers > len(values):
        with pytest.raises(DataError, match=f"there are {len(values)}"):
            partition.by_group(ids, peers, seed=seed)
        return
    parts = partition.by_group(ids, peers, seed=seed)
    largest = np.sort(counts)[::-1]
    assert [len(part) for part in parts] == [largest[peers - 1]] * peers
    owners = [np.unique(ids[part]).tolist() for part in parts]
    assert all(len(owner) == 1 for owner in owners)
    assert len({owner[0] for owner in owners}) == peers
    sizes = [int(counts[values == owner[0]][0]) for owner in owners]
    assert sizes == largest[:peers].tolist()


def test_by_group_shuffles_before_it_truncates() -> None:
    ids = torch.tensor([7] * 100 + [3] * 80)
    first, second = partition.by_group(ids, 2, 10, seed=0)
    assert len(first) == len(second) == 10
    assert not np.array_equal(first, np.sort(first))
    assert first.max() >= 10  # not simply the first ten
    assert second.min() >= 100
    with pytest.raises(DataError, match="2 groups of 90 samples, but 1 groups have"):
        partition.by_group(ids, 2, 90)
    with pytest.raises(DataError, match="no natural groups"):
        partition.by_group(load("digits").train.group, 2)


@given(n=st.integers(2, 100), share=st.floats(0, 0.9), seed=seeds)
def test_split_divides_and_keeps_order(n: int, share: float, seed: int) -> None:
    own = np.random.default_rng(1).permutation(1000)[:n]
    count = round(share * n)
    if count == n:
        return
    for test in (count, share):
        train, kept_back = partition.split(own, test, seed)
        assert len(kept_back) == count
        assert sorted([*train, *kept_back]) == sorted(own)
        place = {index: i for i, index in enumerate(own)}
        for part in (train, kept_back):
            assert [place[i] for i in part] == sorted(place[i] for i in part)


def test_split_must_leave_something_to_train_on() -> None:
    for test in (5, 6, 1.0, -1, -0.1, 0.99):
        with pytest.raises(DataError, match="were asked of 5"):
            partition.split(np.arange(5), test)


# --- tasks -------------------------------------------------------------------------------------------


def test_swap_renames_two_labels_and_no_other() -> None:
    task = Task.swap(10, 8, 9)
    assert task.permutation.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9, 8]
    y = torch.tensor([8, 9, 1])
    assert task.apply(y).tolist() == [9, 8, 1]
    assert y.tolist() == [8, 9, 1]
    assert task.apply(np.array([8, 9, 1])).tolist() == [9, 8, 1]
    assert task.apply(y).dtype == torch.int64


@given(classes=st.integers(2, 20), data=st.data())
def test_cycle_moves_exactly_the_last_r_labels(classes: int, data: st.DataObject) -> None:
    r = data.draw(st.sampled_from([0, *range(2, classes + 1)]))
    p = Task.cycle(classes, r).permutation
    moved = np.flatnonzero(p != np.arange(classes))
    assert moved.tolist() == list(range(classes - r, classes))
    at, visited = classes - 1, set()  # one cycle: following it from one label visits all r
    while at not in visited:
        visited.add(at)
        at = int(p[at])
    assert len(visited) == max(r, 1)


def test_cycle_of_the_paper() -> None:
    assert Task.cycle(10, 3).labels == (0, 1, 2, 3, 4, 5, 6, 8, 9, 7)
    assert Task.cycle(10, 0).labels == Task.identity(10).labels
    for r in (1, -1, 11):
        with pytest.raises(DataError, match=r"r must be 0 or 2\.\.10"):
            Task.cycle(10, r)


@pytest.mark.parametrize("moved", [1, 2, 3, 4])
def test_all_permutations_lists_each_permutation_once(moved: int) -> None:
    tasks = Task.all_permutations(10, moved)
    assert len({task.labels for task in tasks}) == len(tasks) == math.factorial(moved)
    assert len({task.name for task in tasks}) == len(tasks)
    assert tasks[0].labels == Task.identity(10).labels
    assert all(task.labels[: 10 - moved] == tuple(range(10 - moved)) for task in tasks)


@given(st.permutations(range(6)), st.permutations(range(6)))
def test_then_applies_one_after_the_other(first: list[int], second: list[int]) -> None:
    a, b = Task("a", tuple(first)), Task("b", tuple(second))
    y = np.arange(6)
    assert np.array_equal(a.then(b).apply(y), b.apply(a.apply(y)))


def test_errors_name_what_was_wrong() -> None:
    with pytest.raises(DataError, match=r"'odd'.*not a permutation"):
        Task("odd", (0, 0, 2))
    with pytest.raises(DataError, match=r"is for labels 0\.\.9, not 3\.\.10"):
        Task.identity(10).apply(torch.tensor([3, 10]))
    with pytest.raises(DataError, match="two different labels"):
        Task.swap(10, 4, 4)
    with pytest.raises(DataError, match="moved must be"):
        Task.all_permutations(2, 3)
    with pytest.raises(DataError, match="at least one class"):
        Task.identity(0)
