"""A node's own subproblem, solved as far as the node has time: MOCHA's θ.

Given w_t, the node looks for Δα that minimises

    G(Δα) = Σ ℓ*(−α − Δα) + w_t·v + q/2·‖v‖²,    v = X_tᵀΔα,    q = σ'·K_tt

by coordinate steps over its own samples. θ is what is left of the possible gain: 0 for an exact solution,
1 for a node that did nothing this round. Any θ < 1 on average is enough for the whole to converge, so a
straggler hands in what it has.
"""

from __future__ import annotations

import numpy as np

from .problem import Array, LinearTask, LossName, conjugate

_EXACT = 200  # epochs that stand for an exact solution


def improve(
    task: LinearTask,
    alpha: Array,
    w: Array,
    q: float,
    loss: LossName,
    steps: int,
    rng: np.random.Generator,
) -> tuple[Array, Array]:
    """`steps` coordinate steps in random order: (Δα, v)."""
    x, y, change, local = task.x, task.y, np.zeros(len(task.y)), w.astype(np.float64, copy=True)
    curvature = q * (x**2).sum(axis=1)
    done = 0
    while done < steps:
        for i in rng.permutation(len(y))[: steps - done]:
            score, now = float(x[i] @ local), alpha[i] + change[i]
            if loss == "hinge":
                if curvature[i] == 0.0:
                    best = y[i]  # an empty sample always loses; its multiplier is at its bound
                else:
                    free = y[i] * now + (1.0 - y[i] * score) / curvature[i]
                    best = y[i] * min(max(free, 0.0), 1.0)
            else:
                best = now + (y[i] - score - now) / (1.0 + curvature[i])
            if best != now:
                change[i] += best - now
                local += q * (best - now) * x[i]
        done += min(len(y), steps - done)
    return change, x.T @ change


def value(
    task: LinearTask, alpha: Array, change: Array, w: Array, q: float, loss: LossName
) -> float:
    """G(Δα)."""
    v = task.x.T @ change
    return conjugate(alpha + change, task.y, loss) + float(w @ v) + 0.5 * q * float(v @ v)


def theta(
    task: LinearTask, alpha: Array, change: Array, w: Array, q: float, loss: LossName
) -> float:
    """θ of eq (5), measured against a near-exact solution: costs far more than the step itself."""
    best, _ = improve(task, alpha, w, q, loss, _EXACT * len(task.y), np.random.default_rng(0))
    nothing = value(task, alpha, np.zeros_like(alpha), w, q, loss)
    least = min(value(task, alpha, best, w, q, loss), value(task, alpha, change, w, q, loss))
    gain = nothing - least
    return (value(task, alpha, change, w, q, loss) - least) / gain if gain > 1e-12 else 0.0
