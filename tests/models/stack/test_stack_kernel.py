"""Pieces of the stacked arena, each against the plain words for it: scores, orders, cuts."""

from __future__ import annotations

from math import ceil, inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gossamer.models import SgdLearner, SlicedNetwork, cross_entropy, mlp, squared_error
from gossamer.models.stack import engines, plan, score


def learner(samples: int, seed: int) -> SgdLearner:
    network = SlicedNetwork(mlp("3=4"), {"global": "3-4"}, peer=str(seed), seed=1)
    data = torch.rand(samples, 3), torch.zeros(samples, dtype=torch.int64)
    return SgdLearner(network, data, data, seed=seed)


def plainly(outputs: Tensor, labels: Tensor) -> list[tuple[float, int]]:
    """Loss and right answers of each peer; of equal outputs the first counts."""
    found = []
    for own, goals in zip(outputs, labels, strict=True):
        right = 0
        for row, goal in zip(own.tolist(), goals.tolist(), strict=True):
            best = next((i for i, value in enumerate(row) if value != value), None)
            right += (row.index(max(row)) if best is None else best) == goal
        found.append((float(squared_error(own, goals).sum()), right))
    return found


@given(st.data())
def test_scores_are_the_learners_own_with_equal_outputs_too(data: st.DataObject) -> None:
    peers, samples, classes = 2, 3, 3
    value = st.sampled_from([0.0, 0.25, 1.0, -1.0])
    count = peers * samples * classes
    values = data.draw(st.lists(value, min_size=count, max_size=count))
    labels = data.draw(
        st.lists(st.integers(0, classes - 1), min_size=peers * samples, max_size=peers * samples)
    )
    outputs = torch.tensor(values).view(peers, samples, classes)
    goals = torch.tensor(labels).view(peers, samples)
    wanted = plainly(outputs, goals)
    for laid_out in (outputs, outputs.mT.contiguous().mT):
        found = score(laid_out, goals, squared_error)
        assert [(m.loss, m.correct) for m in found] == wanted


@pytest.mark.parametrize("odd", [nan, inf, -inf])
def test_outputs_that_are_not_numbers_are_counted_as_torch_counts_them(odd: float) -> None:
    outputs = torch.tensor([[[0.1, odd, 0.3], [0.9, 0.1, 0.2], [odd, odd, 0.5]]])
    labels = torch.tensor([[1, 0, 0]])
    wanted = int((outputs.argmax(dim=-1) == labels).sum())
    for loss in (squared_error, cross_entropy):
        assert score(outputs, labels, loss)[0].correct == wanted


def test_scores_of_steps_are_those_of_all_samples() -> None:
    outputs, labels = torch.rand(4, 2, 5, 3), torch.randint(0, 3, (2, 20))
    whole = outputs.transpose(0, 1).reshape(2, 20, 3)
    for a, b in zip(
        score(outputs, labels, squared_error), score(whole, labels, squared_error), strict=True
    ):
        assert (a.correct, a.samples) == (b.correct, b.samples)
        assert a.loss == pytest.approx(b.loss)


@given(st.integers(1, 3000), st.integers(1, 5000), st.integers(1, 50_000))
def test_tasks_fit_the_cache(peers: int, parameters: int, activations: int) -> None:
    size = plan.peers_per_task(peers, parameters, activations)
    assert 1 <= size <= max(1, plan.TASK_BYTES // (4 * (parameters + activations)))


def test_a_large_swarm_is_cut_for_threads_that_end_together() -> None:
    size = plan.peers_per_task(1024, 2410, 32 * 148)  # 73 would fit: 14 tasks and a rest of 2 peers
    assert size == 64
    assert ceil(1024 / size) % plan.TASKS == 0


def test_a_layer_is_the_same_either_way() -> None:
    """Just below and above what is multiplied transposed."""
    for samples in (15, 16):
        for cells in (15, 16):
            x, weight, bias = (
                torch.rand(3, samples, 5),
                torch.rand(3, cells, 5),
                torch.rand(3, 1, cells),
            )
            wanted = torch.einsum("psi,pci->psc", x, weight) + bias
            torch.testing.assert_close(engines.affine(x, weight, bias), wanted)
            one = engines.affine(x[0], weight[0], bias[0])
            torch.testing.assert_close(one, wanted[0])
            bare = engines.affine(x[0], weight[0], torch.empty(0))
            torch.testing.assert_close(bare, wanted[0] - bias[0])
