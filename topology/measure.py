"""Synchronous push-sum, run: what the spectrum predicts, measured.

The state is kept as distance from the mean, s − x̄·w, and rescaled as it shrinks, so that thousands
of exchanges can be measured without sinking into rounding.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from .errors import TopologyError
from .graphs import Seed

Vector = NDArray[np.float64]
Exchange = csr_array | Callable[[int], csr_array]
"""One column-stochastic matrix, or a function of the step that gives one (a schedule)."""


def log_errors(
    exchange: Exchange, exchanges: int, start: Vector | None = None, seed: Seed = 0
) -> Vector:
    """Natural log of the error after 0 … `exchanges` exchanges, relative to the first error.

    The error is the root mean square of x − x̄ weighted by w. `start` holds one value per peer (drawn
    from a normal distribution when left out); all weights start at 1. −inf where it is exact.
    """
    first = exchange(0) if callable(exchange) else exchange
    peers = len(first.indptr) - 1
    value = (
        np.random.default_rng(seed).standard_normal(peers)
        if start is None
        else np.array(start, float)
    )
    if value.shape != (peers,):
        raise TopologyError(
            f"start has shape {value.shape}: give one value for each of {peers} peers"
        )
    offset = value - value.mean()
    weight = np.ones(peers)
    size = float(np.sqrt(np.mean(offset**2)))
    if size == 0:
        return np.full(exchanges + 1, -np.inf)
    logs = np.full(exchanges + 1, -np.inf)
    logs[0] = 0.0
    for step in range(exchanges):
        matrix = exchange(step) if callable(exchange) else exchange
        offset = matrix @ (offset / size)
        weight = matrix @ weight
        offset -= weight * (offset.sum() / weight.sum())  # rounding only: the sum is conserved at 0
        size = float(np.sqrt(np.sum(offset**2 / weight) / peers))
        if size < 1e-14:  # this exchange averaged exactly
            break
        logs[step + 1] = logs[step] + np.log(size)
    return logs


def consensus_errors(
    exchange: Exchange, exchanges: int, start: Vector | None = None, seed: Seed = 0
) -> Vector:
    """`log_errors` as plain numbers, for pictures: 1 at the start, falling."""
    return np.exp(log_errors(exchange, exchanges, start, seed))


def contraction(
    exchange: Exchange, exchanges: int, start: Vector | None = None, seed: Seed = 0
) -> float:
    """Measured |λ2|: mean factor per exchange over the second half of a run.

    Give several times 1 / gap exchanges, so that only the slowest mode is left by half-time.
    """
    logs = log_errors(exchange, exchanges, start, seed)
    half = exchanges // 2
    if exchanges < 2 or not np.isfinite(logs[half]):
        return 0.0
    return float(np.exp((logs[-1] - logs[half]) / (exchanges - half)))


def exchanges_to(logs: Vector, tolerance: float) -> int | None:
    """First exchange after which the error stays at or under `tolerance`; None when never."""
    above = np.flatnonzero(logs > np.log(tolerance))
    first = int(above[-1]) + 1 if above.size else 0
    return first if first < len(logs) else None
