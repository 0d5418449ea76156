import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.experiments.data import DataError, Task


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


@pytest.mark.parametrize("last", [1, 2, 3, 4])
def test_symmetric_lists_each_permutation_once(last: int) -> None:
    found = Task.symmetric(10, last)
    assert len({task.labels for task in found}) == len(found) == math.factorial(last)
    assert len({task.name for task in found}) == len(found)
    assert found[0].labels == Task.identity(10).labels
    assert all(task.labels[: 10 - last] == tuple(range(10 - last)) for task in found)


@given(st.permutations(range(6)), st.permutations(range(6)))
def test_then_applies_one_after_the_other(first: list[int], second: list[int]) -> None:
    a, b = Task("a", tuple(first)), Task("b", tuple(second))
    y = np.arange(6)
    assert np.array_equal(a.then(b).apply(y), b.apply(a.apply(y)))


def test_errors_name_what_was_wrong() -> None:
    with pytest.raises(DataError, match=r"'odd'.*not a permutation"):
        Task("odd", (0, 0, 2))
    with pytest.raises(DataError, match=r"knows labels 0\.\.9, not 3\.\.10"):
        Task.identity(10).apply(torch.tensor([3, 10]))
    with pytest.raises(DataError, match="two different labels"):
        Task.swap(10, 4, 4)
    with pytest.raises(DataError, match="last must be"):
        Task.symmetric(2, 3)
    with pytest.raises(DataError, match="at least one class"):
        Task.identity(0)
