"""How far each peer is trusted: a variance of its own, and its share of every class."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import ModelError
from .chain import Chain
from .options import MatchOptions, check_positive


def peer_variances(
    chains: Sequence[Chain],
    options: MatchOptions,
    variances: Sequence[float] | None,
    names: Sequence[str] | None,
) -> np.ndarray:
    """σ² of every peer."""
    if variances is None:
        return np.full(len(chains), options.variance)
    if len(variances) != len(chains):
        raise ModelError(
            f"fuse: {len(variances)} variances were given for {len(chains)} networks; give one each"
        )
    for index, value in enumerate(variances):
        check_positive(f"variance (σ²) of {names[index] if names else f'network {index}'}", value)
    return np.asarray(variances, dtype=np.float64)


def class_shares(chains: Sequence[Chain], counts: np.ndarray | None) -> np.ndarray:
    """Each peer's share of each class; a class that nobody saw is shared evenly."""
    peers, outputs = len(chains), chains[0].widths[-1]
    if counts is None:
        return np.ones((peers, outputs))
    counts = np.asarray(counts, dtype=np.float64)
    if counts.shape != (peers, outputs):
        raise ModelError(
            f"fuse: counts of shape {counts.shape} were given; {peers} networks with {outputs} outputs "
            f"need {(peers, outputs)}"
        )
    if not (np.isfinite(counts) & (counts >= 0)).all():
        raise ModelError("fuse: a sample count is negative or not finite")
    total = counts.sum(axis=0)
    return np.where(total > 0, counts / np.where(total > 0, total, 1), 1 / peers)
