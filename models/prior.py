"""Log-priors: the logarithms of every peer's class shares, which a learner adds to its outputs.

Let peers differ only in how frequent their classes are: p_i(x, y) = p_i(y) p(x | y). Then

    p_i(y | x) ∝ exp(f_y(x) + log p_i(y)),      f_y(x) = log p(x | y) + a term without y

so one network f serves all peers if each adds its own log p_i(y) in training and in tests. Without it, each
peer's training pulls the shared outputs towards its own shares. A peer must meet the classes as often when
the network is used as in its training samples. Labels that mean something else to every peer are another
kind of difference, and a prior does nothing about it.

How the shares are estimated from n peers' counts x_ic of C classes, m_i = Σ_c x_ic:

    own     (x_ic + 1) / (m_i + C), from the peer's own labels alone
    auto    (x_ic + α π_c) / (m_i + α), with the shares π of all peers together and α = 1/ρ − 1, at least C;
            no prior if ρ is not above what chance allows

With few samples, the differences between peers that `own` sees are mostly chance. `auto` needs totals over
all peers, which live peers average (`class_summary`). α ≥ C adds at least as many pseudo-samples as `own`
does. The best estimate of strongly skewed shares has fewer, but it led to a lower accuracy: for digits of 16
peers with 20 samples each and shares from Dirichlet(0.3), where 1/ρ − 1 is about 3, .849 against .853 with
α ≥ C and .853 with `own` (means of 8 seeds).

This module does not import torch, so mistakes in a config are reported without waiting for it.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import ModelError

Prior = Literal["auto", "own", "none"]
"""How log-priors are estimated; `none` for no log-prior."""

MIN_STANDARD_ERRORS = 2.0
"""With `auto`, ρ must exceed 0 by this many standard errors, or there is no prior. If peers' shares are
equal, ρ exceeds two standard errors by chance in 2 to 5 of 100 swarms."""

Floats = NDArray[np.float64]


def log_priors(counts: ArrayLike, how: Prior) -> Floats | None:
    """Return every peer's log-prior, [peers, classes], from its counts of labels; None for no prior.

    All values are finite: a class without samples is rare, not impossible. A peer without samples gets the
    shares of all peers together with `auto`, and equal shares with `own`.
    """
    if how not in get_args(Prior):
        raise ModelError(f"unknown prior {how!r}: there are {', '.join(get_args(Prior))}")
    x = _counts_array(counts)
    if how == "none":
        return None
    if how == "own":
        return np.log((x + 1) / (x.sum(axis=1, keepdims=True) + x.shape[1]))
    totals = _totals(x)
    priors = [auto_log_prior(row, totals) for row in x]
    return None if priors[0] is None else np.stack([row for row in priors if row is not None])


def class_summary(counts: ArrayLike) -> Floats:
    """Return what a peer adds to the totals of all peers: 1, m², Σ_c x_c²/m, and its counts x_c.

    A peer without samples adds nothing. The totals tell all that `auto` needs of other peers.
    """
    x = _counts_array(np.asarray(counts)[None])[0]
    m = x.sum()
    if m == 0:
        return np.zeros(3 + len(x))
    return np.array([1.0, m**2, np.square(x).sum() / m, *x])


def auto_log_prior(counts: ArrayLike, totals: Floats) -> Floats | None:
    """Return a peer's log-prior from its own counts and the totals of all peers; None for no prior.

    totals: the sum of all peers' `class_summary`.
    """
    x = _counts_array(np.asarray(counts)[None])[0]
    rho, error = _correlation(totals)
    if not rho > MIN_STANDARD_ERRORS * error:
        return None
    classes, all_counts = len(x), totals[3:]
    alpha = max(1 / rho - 1, classes)
    # One more sample of every class keeps the shares of classes that no peer has above 0.
    common = (all_counts + 1) / (all_counts.sum() + classes)
    return np.log((x + alpha * common) / (x.sum() + alpha))


def class_correlation(counts: ArrayLike) -> tuple[float, float]:
    """Return ρ, how strongly class shares differ between peers, and its standard error if they do not.

    ρ is the intraclass correlation: 0 if two samples of one peer are no more alike in their class than two
    of different peers, 1 if each peer has a single class. If shares are drawn from Dirichlet(α π), counts
    are Dirichlet-multinomial with ρ = 1/(1 + α). The estimate is that of Weir and Hill (2002), from the
    variance of shares between peers and the variance of labels within them:

        MSB = Σ_i m_i Σ_c (x_ic/m_i − π_c)² / (n − 1)
        MSW = Σ_i m_i Σ_c (x_ic/m_i)(1 − x_ic/m_i) / Σ_i (m_i − 1)
        m̄   = (Σ_i m_i − Σ_i m_i² / Σ_i m_i) / (n − 1)
        ρ   = (MSB − MSW) / (MSB + (m̄ − 1) MSW)

    If all peers' shares are π, the deviations √m_i (x_i/m_i − π) have the covariance Σ = diag(π) − ππᵀ and
    n − 1 degrees of freedom, so MSB has the mean tr Σ and the variance 2 tr Σ² / (n − 1). Hence

        s.e. = √(2 tr Σ² / (n − 1)) / (m̄ tr Σ),     tr Σ = 1 − Σ_c π_c²,
                                                     tr Σ² = Σ_c π_c² − 2 Σ_c π_c³ + (Σ_c π_c²)²

    For two classes this is Weir and Hill's formula at ρ = 0. It answers whether chance alone explains the
    differences; it is not the error of a ρ that is above 0, which is larger.

    Peers without samples are left out. Returns (0, 0) if the counts cannot tell: fewer than two peers with
    samples, a single class in all of them, or not more than one sample at any peer.
    """
    return _correlation(_totals(_counts_array(counts)))


def _totals(counts: Floats) -> Floats:
    """Return the sum of all peers' class summaries."""
    return np.sum([class_summary(row) for row in counts], axis=0)


def _correlation(totals: Floats) -> tuple[float, float]:
    """Return ρ and its standard error, as `class_correlation` does, from the sum of peers' summaries."""
    peers, squared_sizes, squared_counts = totals[:3]
    samples = totals[3:].sum()
    if peers < 2 or samples <= peers:
        return 0.0, 0.0
    pi = totals[3:] / samples
    squares = np.square(pi).sum()
    trace = 1 - squares  # tr Σ
    if trace <= 0:
        return 0.0, 0.0
    between = (squared_counts - samples * squares) / (peers - 1)  # MSB
    within = (samples - squared_counts) / (samples - peers)  # MSW
    mean_size = (samples - squared_sizes / samples) / (peers - 1)  # m̄
    rho = (between - within) / (between + (mean_size - 1) * within)
    trace_of_square = squares - 2 * (pi**3).sum() + squares**2  # tr Σ²
    return float(rho), float(np.sqrt(2 * trace_of_square / (peers - 1)) / (mean_size * trace))


def _counts_array(counts: ArrayLike) -> Floats:
    """Return counts as an array [peers, classes]; raises ModelError for anything else."""
    x = np.asarray(counts, dtype=np.float64)
    if x.ndim != 2 or x.shape[1] < 2 or not np.isfinite(x).all() or (x < 0).any():
        raise ModelError(
            "counts of labels must be an array [peers, classes] of finite numbers that are 0 or more, with "
            f"two classes or more; its shape is {x.shape}"
        )
    return x
