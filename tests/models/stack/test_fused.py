"""The compiled kernel trains and scores networks as torch's kernel does."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gossamer.models import SgdLearner, SlicedNetwork, cross_entropy, squared_error
from gossamer.models.optimizers import MomentumRule, PlainRule
from gossamer.models.stack import score
from gossamer.models.stack.engines import (
    ChainEngine,
    TrainingJob,
    draw_orders,
    fused_kernel,
    read_chain,
)

pytest.importorskip("numba", reason="the compiled kernel needs numba")

ACTIVATIONS = (nn.Identity, nn.Sigmoid, nn.Tanh, nn.ReLU)


@st.composite
def chains(draw: st.DrawFn) -> nn.Sequential:
    """One to three layers with any activations; layers narrower and wider than a vector."""
    cells = draw(st.lists(st.integers(1, 40), min_size=2, max_size=4))
    cells[-1] = max(cells[-1], 2)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(cells):
        layers.append(nn.Linear(inputs, outputs, bias=draw(st.booleans())))
        layers.append(draw(st.sampled_from(ACTIVATIONS))())
    return nn.Sequential(*layers)


def job(module: nn.Sequential, peers: int, batch: int, steps: int, seed: int) -> TrainingJob:
    """Steps of some peers on random samples, all or some or hardly any inputs of which are not 0.

    The last batch is shorter.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = [tuple(value.shape) for value in module.parameters() if value.ndim == 2]
    inputs, classes = shapes[0][1], shapes[-1][0]
    samples = batch * steps - batch // 2
    index = torch.randint(0, 50, (peers, samples), generator=generator)
    labels = torch.randint(0, classes, (peers, samples), generator=generator)
    ends = [min(batch * (step + 1), samples) for step in range(steps)]
    pool = torch.rand(50, inputs, generator=generator)
    pool *= torch.rand(50, inputs, generator=generator) < (1.0, 0.2, 0.01)[seed // 2 % 3]
    priors = torch.randn(peers, classes, generator=generator) if seed % 2 else None
    # A small rate: where training diverges, rounding grows without limit.
    return TrainingJob(pool, index, labels, ends, PlainRule(0.01), seed % 3 > 0, 0, priors)


@settings(max_examples=60)
@given(
    chains(), st.integers(1, 3), st.integers(1, 20), st.integers(1, 4), st.integers(0, 99),
    st.sampled_from([squared_error, cross_entropy]),
)  # fmt: skip
def test_the_compiled_kernel_trains_like_torch(module, peers, batch, steps, seed, loss) -> None:
    work = job(module, peers, batch, steps, seed)
    chain = read_chain(module, loss)
    assert chain is not None
    engine = ChainEngine(chain, loss)
    parameters = sum(value.numel() for value in module.parameters())
    values = torch.randn(2 * peers, parameters, generator=torch.Generator().manual_seed(seed)) / 6
    rows = list(range(0, 2 * peers, 2))
    by_torch, compiled = values[rows].clone(), values.clone()
    assert engine.is_fused(compiled, work.pool, work.rule)
    metrics = engine.train_fused(compiled, rows, work)
    wanted = score(engine.train(by_torch, [], work), work.labels, loss)
    assert float((compiled[rows] - by_torch).norm()) <= 3e-6 * float(by_torch.norm())
    assert torch.equal(compiled[1::2], values[1::2]), "rows that were not given changed"
    for found, like in zip(metrics, wanted, strict=True):
        assert found.loss == pytest.approx(like.loss, rel=1e-5, abs=1e-6)
        assert found.samples == like.samples


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("loss", [squared_error, cross_entropy])
def test_equal_and_odd_outputs_are_scored_as_torch_scores_them(odd: float, loss) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Identity())
    chain = read_chain(module, loss)
    assert chain is not None
    engine, values = ChainEngine(chain, loss), torch.zeros(3, 9)
    values[1, 7], values[2, 6:] = odd, odd  # biases: of one class, and of all of them
    labels = torch.tensor([[0, 1, 2]]).expand(3, 3)
    pool, index = torch.zeros(1, 2), torch.zeros(3, 3, dtype=torch.int64)
    work = TrainingJob(pool, index, labels, [3], PlainRule(0.0), False, 0)
    wanted = score(engine.train(values.clone(), [], work), labels, loss)
    found = engine.train_fused(values, range(3), work)
    assert [each.correct for each in found] == [each.correct for each in wanted]


@pytest.mark.parametrize("loss", [squared_error, cross_entropy])
def test_a_network_that_diverges_does_not_change_the_next_ones(loss) -> None:
    module = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2))  # narrower than vectors
    chain = read_chain(module, loss)
    assert chain is not None
    engine, work = ChainEngine(chain, loss), job(module, 3, 4, 3, 0)
    alone = torch.randn(3, 26, generator=torch.Generator().manual_seed(0))
    behind = alone.clone()
    behind[0] = float("inf")
    wanted = engine.train_fused(alone, range(3), work)
    found = engine.train_fused(behind, range(3), work)
    assert behind[0].isnan().any(), "the first network did not diverge"
    assert torch.equal(behind[1:], alone[1:])
    assert found[1:] == wanted[1:]


def test_torch_trains_what_the_compiled_kernel_cannot() -> None:
    assert fused_kernel() is not None
    plain, values, pool = PlainRule(0.1), torch.zeros(1, 9), torch.zeros(1, 2)
    three = nn.Sequential(nn.Linear(2, 3))
    for module, rule, stack, inputs, is_fused in (
        (three, plain, values, pool, True),
        (three, plain, values.double(), pool, False),
        (three, plain, values, pool.double(), False),
        (three, MomentumRule(0.1, 0.9, 0, False), values, pool, False),
        (nn.Sequential(nn.Linear(2, 3), nn.PReLU()), plain, values, pool, False),
        (nn.Sequential(nn.Linear(2, 1)), plain, values, pool, False),
    ):
        chain = read_chain(module, cross_entropy)
        assert chain is not None
        assert ChainEngine(chain, cross_entropy).is_fused(stack, inputs, rule) == is_fused
    chain = read_chain(three, cross_entropy)
    assert chain is not None
    engine, labels = ChainEngine(chain, cross_entropy), torch.arange(3)
    assert [engine.are_classes(labels + k) for k in (-1, 0, 1)] == [False, True, False]


def test_inputs_may_be_columns_of_a_larger_tensor() -> None:
    module = nn.Sequential(nn.Linear(37, 3))
    chain = read_chain(module, squared_error)
    assert chain is not None
    engine, work = ChainEngine(chain, squared_error), job(module, 2, 4, 3, 0)
    wide, turned = torch.rand(50, 45), work.pool.T.contiguous().T
    wide[:, 5:42] = work.pool
    wanted = torch.randn(2, 114, generator=torch.Generator().manual_seed(0))
    for pool in (wide[:, 5:42], turned):
        values = wanted.clone()
        engine.train_fused(values, range(2), replace(work, pool=pool))
        expected = wanted.clone()
        engine.train_fused(expected, range(2), work)
        assert torch.equal(values, expected)


@given(
    st.lists(st.integers(1, 130), min_size=1, max_size=4), st.lists(st.integers(1, 400), max_size=3)
)
def test_samples_are_drawn_in_the_same_order_by_all(sizes, counts) -> None:
    net = SlicedNetwork(nn.Linear(2, 2), {"all": 1.0}, example=torch.zeros(1, 2))
    samples = [(torch.zeros(n, 2), torch.zeros(n).long()) for n in sizes]
    learners = [[SgdLearner(net, each, each, seed=1) for each in samples] for _ in range(3)]
    for count in counts:
        alone = torch.stack([learner.draw(count) for learner in learners[0]])
        assert torch.equal(draw_orders(learners[1], count), alone)
        assert torch.equal(draw_orders(learners[2], count, fused=True), alone)
        for one, *others in zip(*learners, strict=True):
            for other in others:
                assert (one.order == other.order).all()
                assert torch.equal(one.generator.get_state(), other.generator.get_state())
