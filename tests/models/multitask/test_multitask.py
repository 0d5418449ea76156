"""Federated multi-task learning: the objective falls, stragglers are borne, gossip equals the server."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.experiments import Arena
from gossamer.experiments.arena import Gossip
from gossamer.models import Learner, ModelError
from gossamer.models.multitask import (
    LinearTask,
    MultiTaskLearner,
    MultiTaskOptions,
    best_omega,
    coupling,
    descend,
    initial_omega,
    multitask,
    objective,
    safe_scale,
)


def dual_objective(alphas, omega, tasks, options):
    """The dual's value, never above F; the gap bounds how far W is from the best for this Ω."""
    sums = np.stack([task.x.T @ alpha for task, alpha in zip(tasks, alphas, strict=True)], axis=1)
    fit = sum(
        conjugate(alpha, task.y, options.loss) for task, alpha in zip(tasks, alphas, strict=True)
    )
    quadratic = 0.5 * float(np.einsum("dt,ts,ds->", sums, coupling(omega, options), sums))
    return options.relation * options.floor * float(np.trace(omega)) - fit - quadratic


def conjugate(alpha, y, loss):
    """Σ ℓ*(−α): for the hinge loss α·y must lie in [0, 1]."""
    if loss == "hinge":
        return -float((alpha * y).sum())
    return float((0.5 * alpha**2 - alpha * y).sum())


_EXACT = 200  # epochs that stand for an exact solution


def value(task, alpha, change, w, q, loss):
    """G(Δα)."""
    v = task.x.T @ change
    return conjugate(alpha + change, task.y, loss) + float(w @ v) + 0.5 * q * float(v @ v)


def theta(task, alpha, change, w, q, loss):
    """θ of eq (5), measured against a near-exact solution: costs far more than the step itself."""
    best, _ = descend(task, alpha, w, q, loss, _EXACT * len(task.y), np.random.default_rng(0))
    nothing = value(task, alpha, np.zeros_like(alpha), w, q, loss)
    least = min(value(task, alpha, best, w, q, loss), value(task, alpha, change, w, q, loss))
    gain = nothing - least
    return (value(task, alpha, change, w, q, loss) - least) / gain if gain > 1e-12 else 0.0


def make_tasks(
    seed: int, tasks: int = 5, samples: int = 12, features: int = 6, loss: str = "hinge"
):
    """Two groups of tasks: models of a group are alike, the other group's are their opposites."""
    random = np.random.default_rng(seed)
    centre = random.standard_normal(features)
    found = []
    for t in range(tasks):
        w = (1 if t % 2 else -1) * centre + 0.2 * random.standard_normal(features)
        x = random.standard_normal((samples, features))
        scores = x @ w + 0.1 * random.standard_normal(samples)
        found.append(LinearTask(x, np.sign(scores) if loss == "hinge" else scores))
    return found


@settings(max_examples=15)
@given(
    st.integers(0, 1000), st.sampled_from(["hinge", "squared"]),
    st.floats(1e-3, 3.0), st.floats(1e-3, 1.0), st.floats(0.0, 1.0),
)  # fmt: skip
def test_the_objective_never_rises_whatever_the_stragglers_do(seed, loss, relation, shrink, lazy):
    random = np.random.default_rng(seed)
    result = multitask(
        make_tasks(seed, tasks=4, samples=8, loss=loss),
        MultiTaskOptions(relation, shrink, loss=loss),
        alternations=3, rounds=3, max_rounds=20,
        effort=lambda round, task: float(random.random() * 2) if random.random() > lazy else 0.0,
        seed=seed,
    )  # fmt: skip
    steps = np.diff(result.objectives)
    assert (steps <= 1e-9 * abs(result.objectives[0])).all()
    assert result.objectives[-1] < result.objectives[0] or lazy > 0.9


def test_with_time_the_gap_closes_and_omega_is_the_best_for_its_weights():
    tasks, options = make_tasks(1), MultiTaskOptions(0.05, 0.05)
    result = multitask(tasks, options, alternations=4, rounds=60)
    # A coarse Ω move in any direction that keeps tr(Ω⁻¹) = 1 makes it worse.
    best = objective(result.weights, best_omega(result.weights, options.floor), tasks, options)
    random = np.random.default_rng(0)
    for _ in range(20):
        noise = random.standard_normal((5, 5))
        other = np.linalg.inv(result.omega) + 0.01 * noise @ noise.T
        other = np.linalg.inv(other / np.trace(other))
        assert objective(result.weights, other, tasks, options) >= best
    assert np.trace(np.linalg.inv(result.omega)) == pytest.approx(1.0)


@pytest.mark.parametrize("loss", ["hinge", "squared"])
def test_the_duality_gap_is_never_negative_and_closes(loss):
    tasks, options = make_tasks(2, loss=loss), MultiTaskOptions(0.1, 0.05, loss=loss)
    omega = initial_omega(len(tasks))
    matrix = coupling(omega, options)
    scale, random = safe_scale(matrix), np.random.default_rng(0)
    alphas = [np.zeros(len(task.y)) for task in tasks]
    gaps = []
    for _ in range(150):
        sums = np.stack([t.x.T @ a for t, a in zip(tasks, alphas, strict=True)], axis=1)
        weights = sums @ matrix
        gaps.append(
            objective(weights, omega, tasks, options)
            - dual_objective(alphas, omega, tasks, options)
        )
        for t, task in enumerate(tasks):
            q = scale * matrix[t, t]
            alphas[t] = alphas[t] + descend(task, alphas[t], weights[:, t], q, loss, 12, random)[0]
    assert min(gaps) >= -1e-9
    assert gaps[-1] < 1e-4 * gaps[0]


def test_theta_is_one_for_nothing_and_falls_with_effort():
    task = make_tasks(3, samples=30)[0]
    alpha, w = np.zeros(30), np.zeros(6)
    found = []
    for epochs in (0, 1, 5, 100):
        change, _ = descend(task, alpha, w, 2.0, "hinge", 30 * epochs, np.random.default_rng(0))
        found.append(theta(task, alpha, change, w, 2.0, "hinge"))
    assert found[0] == pytest.approx(1.0)
    assert found[0] > found[1] > found[2] > found[3]
    assert found[3] < 1e-2


def test_stragglers_only_slow_it_down():
    tasks, options = make_tasks(4), MultiTaskOptions(0.1, 0.05)
    whole = multitask(tasks, options, alternations=6, rounds=40)
    lazy = multitask(
        tasks, options, alternations=6, rounds=40, effort=lambda r, t: 0.0 if (r + t) % 3 else 0.5
    )
    assert lazy.objectives[-1] == pytest.approx(whole.objectives[-1], rel=0.02)


def test_related_tasks_are_found_to_be_related():
    tasks = make_tasks(5, tasks=6, samples=40)
    result = multitask(tasks, MultiTaskOptions(0.1, 0.01), alternations=5, rounds=20)
    sigma = np.linalg.inv(result.omega)
    scale = np.sqrt(np.diag(sigma))
    correlation = sigma / scale[:, None] / scale
    same = [correlation[a, b] for a in range(6) for b in range(a) if (a - b) % 2 == 0]
    other = [correlation[a, b] for a in range(6) for b in range(a) if (a - b) % 2]
    assert min(same) > 0.3
    assert max(other) < -0.3


def learners(tasks, options, **kwargs):
    return [
        MultiTaskLearner(task, task, t, len(tasks), options, **kwargs)
        for t, task in enumerate(tasks)
    ]


def test_gossip_that_has_converged_computes_what_the_server_computes():
    tasks, options = make_tasks(6), MultiTaskOptions(0.1, 0.05)
    server = multitask(tasks, options, alternations=3, rounds=30, max_rounds=30)
    assert (np.diff(server.objectives[::2]) < 0).all()  # no step was refused: gossip refuses none
    for mixing in (None, Gossip(nx.cycle_graph(len(tasks)), exchanges=60)):
        nodes = learners(tasks, options, every=30)
        assert all(isinstance(node, Learner) for node in nodes)
        rounds = list(Arena(nodes, mixing=mixing, threads=1).run(90))
        for node in nodes:
            node.omega = best_omega(node.weights(), options.floor)
            np.testing.assert_allclose(node.omega, server.omega, rtol=1e-6, atol=1e-6)
        assert rounds[-1].accuracy > 0.9


def test_a_restored_node_goes_on_as_if_nothing_had_happened():
    tasks, options = make_tasks(7), MultiTaskOptions()
    one, two = (learners(tasks, options, every=2)[1] for _ in range(2))
    for _ in range(3):
        one.train(1)
    state, flat = one.state(), one.network.flat.clone()
    one.train(2)
    two.network.flat.copy_(flat)
    two.restore(state)
    two.train(2)
    np.testing.assert_allclose(one.weights(), two.weights(), rtol=1e-12)


def test_bad_input_is_named():
    task = make_tasks(0)[0]
    for knobs, text in (
        ({"relation": -1.0}, "λ1"),
        ({"shrink": 0.0}, "λ2"),
        ({"floor": float("inf")}, "µ"),
        ({"loss": "logistic"}, "hinge, squared"),
    ):
        with pytest.raises(ModelError, match=text):
            MultiTaskOptions(**knobs)
    with pytest.raises(ModelError, match="no tasks"):
        multitask([])
    with pytest.raises(ModelError, match=r"targets −1 and 1"):
        multitask([LinearTask(task.x, task.y * 2)])
    with pytest.raises(ModelError, match="task 1 has 5 features"):
        multitask([task, LinearTask(task.x[:, :5], task.y)])
    with pytest.raises(ModelError, match="not finite"):
        LinearTask(task.x * np.nan, task.y)
    with pytest.raises(ModelError, match="as many targets"):
        LinearTask(task.x, task.y[:3])
    with pytest.raises(ModelError, match="numbered from 0 to 1"):
        MultiTaskLearner(task, task, 2, 2)
    with pytest.raises(ModelError, match="at least 1"):
        multitask([task], rounds=0)
