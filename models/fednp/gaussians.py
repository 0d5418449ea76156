"""The Gaussians of FedNP: factors and sites, tilted moments, and a network that maps Gaussians to Gaussians.

*Factors.* A diagonal Gaussian N(m, s) is stored by its natural parameters (η, λ) = (m/s, 1/s), in float64.
The product of two factors is then a sum, their quotient a difference. A *site* is the factor of one peer's
data. It need not be a distribution: it may have λ = 0 (no information), so only cavities and products of
all factors are converted to a mean and a variance.

*Tilted moments.* A peer's cavity is the product of the prior and the sites of all other peers (learner.py).
The tilted distribution is N(z; mz, sz)·σ(f·z): the cavity times a sigmoid of the signal f. Its mean and
variance can be computed in three ways, all differentiable in f. With C = f·z ~ N(m, s), m = f·mz, s = f²·sz,
E_d = E[σ(C)^d] and r_d = E_d / E_1, Stein's lemma gives

    mean = mz + sz·f·(1 − r2)        variance = sz + (sz·f)²·(2·r3 − r2 − r2²)

without a division by f, which may be 0. (The paper's eqs (12), (25) and (40) lack terms of its eq (37).)

`quadrature`
    Gauss–Hermite nodes in z, weighted by σ(f·z): weights are positive, so the variance is positive for any
    number of nodes. The default.
`closed`
    The two formulas above with E_d ≈ σ(a(m + b)/√(1 + ζ²a²s)), a = 2d(1 − 2^(−1/d)), b = log(2^(1/d) − 1),
    ζ² = π/8: the paper's Theorem 2 with corrected signs and roots. Its variance is positive for |m| ≤ 8 and
    s ≤ 16; beyond, it may be ≤ 0, and then the site update must be skipped.
`probit`
    σ(C) ≈ Φ(ζ·C), whose tilted moments are exact: the variance is always positive.

The largest error of the mean of C for |m| ≤ 8, s ≤ 16 is 0.02 with 20 nodes, 3.0 closed and 1.8 probit; the
last two occur far in the left tail, where σ and Φ differ (for m ≥ −1 and s ≤ 2: 0.11 and 0.05).

*Natural-parameter network (NPN).* It maps the mean and variance of its inputs to those of its outputs,
without sampling; its weights are Gaussian too. The moments of a linear layer are exact, and so are those
of a ReLU of a Gaussian. The only approximation is that the outputs of ReLUs are treated as Gaussian and
independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ModelError
from .options import Moments


@dataclass(frozen=True, eq=False)
class Natural:
    """Gaussian factors exp(η·z − λ·z²/2), one per dimension of z.

    `a + b` is the product of two factors, `a - b` their quotient, `a * power` a power.
    """

    eta: Tensor
    precision: Tensor

    @classmethod
    def of(cls, mean: Tensor, variance: Tensor) -> Natural:
        """Return the natural parameters of the distribution N(mean, variance)."""
        if not bool((variance > 0).all()):
            raise ModelError(f"a Gaussian needs variances above 0, not {float(variance.min()):g}")
        precision = 1.0 / variance.double()
        return cls(mean.double() * precision, precision)

    @classmethod
    def flat(cls, dimensions: int) -> Natural:
        """Return the factor 1, without information: every site before its first update."""
        zero = torch.zeros(dimensions, dtype=torch.float64)
        return cls(zero, zero.clone())

    @classmethod
    def standard(cls, dimensions: int) -> Natural:
        """Return N(0, 1) in every dimension: the prior of z."""
        zero = torch.zeros(dimensions, dtype=torch.float64)
        return cls(zero, torch.ones_like(zero))

    def __add__(self, other: Natural) -> Natural:
        return Natural(self.eta + other.eta, self.precision + other.precision)

    def __sub__(self, other: Natural) -> Natural:
        return Natural(self.eta - other.eta, self.precision - other.precision)

    def __mul__(self, power: float) -> Natural:
        return Natural(power * self.eta, power * self.precision)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance; raise unless all values are finite and all precisions positive."""
        if not bool((torch.isfinite(self.stack()).all(0) & (self.precision > 0)).all()):
            lowest = float(self.precision.min())
            raise ModelError(
                f"a factor with precision {lowest:g} is no distribution and has no variance: "
                "multiply it with the others first"
            )
        return self.eta / self.precision, 1.0 / self.precision

    def where(self, mask: Tensor, other: Natural) -> Natural:
        """Return this factor in dimensions where the mask is true, the other one elsewhere."""
        return Natural(
            torch.where(mask, self.eta, other.eta),
            torch.where(mask, self.precision, other.precision),
        )

    def stack(self) -> Tensor:
        """Return η and λ as one tensor [2, dimensions]."""
        return torch.stack([self.eta, self.precision])

    @classmethod
    def unstack(cls, values: Tensor) -> Natural:
        """Return the inverse of `stack`, as a copy in float64."""
        eta, precision = values.detach().double().clone()
        return cls(eta, precision)


def server_cavities(prior: Natural, sites: Sequence[Natural]) -> list[Natural]:
    """Return for each client the prior times all other clients' sites: line 11 of the paper's Algorithm 1.

    The paper's line lacks the prior: with two clients, a site without information would then leave the other
    client without a proper cavity.
    """
    total = sum(sites, prior)
    return [total - site for site in sites]


def updated_site(site: Natural, factor: Natural, damping: float = 1.0) -> Natural:
    """Return a site moved by the fraction `damping` towards `factor`, with which it has the tilted moments.

    σ(f·z) is log-concave, so the exact precision of a site is never below 0. A negative one is an error of
    the approximation or of an outdated cavity; the site keeps its old value in such dimensions.
    """
    damped = site * (1.0 - damping) + factor * damping
    is_valid = (
        torch.isfinite(factor.eta) & torch.isfinite(factor.precision) & (factor.precision >= 0)
    )
    return damped.where(is_valid, site)


_ZETA2 = math.pi / 8
"""ζ² of the approximation σ(x) ≈ Φ(ζ·x)."""
_LARGE_VARIANCE = 0.25
"""Variance of f·z above which g and h (see `_tilt`) are computed from moments of z. At 0.5 both ways are
exact to 1e-11 with 20 nodes; below, the differences of moments cancel, and above, the direct sums need
more nodes."""


def tilted_moments(
    mean: Tensor, variance: Tensor, f: Tensor, method: Moments = "quadrature", nodes: int = 20
) -> tuple[Tensor, Tensor]:
    """Return mean and variance of z under cavity × σ(f·z), for each dimension separately.

    mean, variance: of the cavity. f: the signal, one number per dimension or one for all. nodes: number of
    quadrature nodes; 20 are accurate to 0.02, raise it where |f|·√variance is above 4.
    """
    if method == "quadrature":
        return _quadrature(mean, variance, f, nodes)
    g, h = _tilt(mean, variance, f, method, nodes)
    covariance = variance * f  # of z and f·z
    return mean + covariance * g, variance + covariance * covariance * h


def tilted_factor(
    mean: Tensor, variance: Tensor, f: Tensor, method: Moments = "quadrature", nodes: int = 20
) -> tuple[Tensor, Tensor]:
    """Return η and λ of the Gaussian factor by which the cavity gets the tilted moments.

    λ is 1 / tilted variance − 1 / variance, but computed without this subtraction: beside a cavity of
    precision 10^13, rounding would remove a factor of precision 0.1. Arguments are those of
    `tilted_moments`.
    """
    g, h = _tilt(mean, variance, f, method, nodes)
    variance_ratio = 1 + f * f * variance * h  # tilted variance / variance
    precision = -f * f * h / variance_ratio
    return mean * precision + f * g / variance_ratio, precision


def _tilt(
    mean: Tensor, variance: Tensor, f: Tensor, method: Moments, nodes: int
) -> tuple[Tensor, Tensor]:
    """Return g = 1 − r2 and h = 2·r3 − r2 − r2², as in the module's docstring."""
    match method:
        case "quadrature":
            return _quadrature_tilt(mean, variance, f, nodes)
        case "closed":
            return _closed_tilt(mean, variance, f)
        case "probit":
            return _probit_tilt(mean, variance, f)
    raise ModelError(f"unknown moments {method!r}: there are {', '.join(get_args(Moments))}")


def sigmoid_power_mean(mean: Tensor, variance: Tensor, power: int) -> Tensor:
    """Return E[σ(C)^power] for C ~ N(mean, variance), by the corrected closed form."""
    return torch.sigmoid(_probit_argument(mean, variance, power))


def _probit_argument(mean: Tensor, variance: Tensor, power: int) -> Tensor:
    """Return the x for which E[σ(C)^power] ≈ σ(x): see `closed` in the module's docstring."""
    a = 2 * power * (1 - 2 ** (-1 / power))
    b = math.log(2 ** (1 / power) - 1)
    return a * (mean + b) / torch.sqrt(1 + _ZETA2 * a * a * variance)


def _nodes(mean: Tensor, variance: Tensor, f: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the nodes of a standard normal, f·z at each node, and the nodes' weights after tilting."""
    points, log_weights = (values.to(mean) for values in _hermite(nodes))
    fz = f[..., None] * (mean[..., None] + torch.sqrt(variance)[..., None] * points)
    # In logarithms: σ(f·z) underflows at every node if f·z is far below 0.
    return points, fz, torch.softmax(log_weights + F.logsigmoid(fz), dim=-1)


def _quadrature(mean: Tensor, variance: Tensor, f: Tensor, nodes: int) -> Gaussian:
    """Return the tilted mean and variance by quadrature."""
    points, _, weights = _nodes(mean, variance, f, nodes)
    z = mean[..., None] + torch.sqrt(variance)[..., None] * points
    tilted_mean = (weights * z).sum(-1)
    return tilted_mean, (weights * (z - tilted_mean[..., None]).square()).sum(-1)


def _quadrature_tilt(
    mean: Tensor, variance: Tensor, f: Tensor, nodes: int
) -> tuple[Tensor, Tensor]:
    """Return g and h (see `_tilt`) by quadrature."""
    points, fz, weights = _nodes(mean, variance, f, nodes)
    deviation = torch.sqrt(variance)
    sigmoid, complement = torch.sigmoid(fz), torch.sigmoid(-fz)
    sigmoid_mean = (weights * sigmoid).sum(-1)
    g = (weights * complement).sum(-1)
    h = (weights * ((sigmoid - sigmoid_mean[..., None]).square() - sigmoid * complement)).sum(-1)
    # Where the variance of f·z is large, these sums need more nodes: use the tilted moments of z instead.
    tilted_mean = (weights * points).sum(-1)
    tilted_variance = (weights * (points - tilted_mean[..., None]).square()).sum(-1)
    is_large = f * f * variance > _LARGE_VARIANCE
    scale = torch.where(is_large, f * deviation, torch.ones_like(deviation))
    g = torch.where(is_large, tilted_mean / scale, g)
    return g, torch.where(is_large, (tilted_variance - 1) / scale.square(), h)


def _closed_tilt(mean: Tensor, variance: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """Return g and h (see `_tilt`) by the closed form."""
    m, s = f * mean, f * f * variance
    # In logarithms, because the sigmoids may underflow.
    e1, e2, e3 = (F.logsigmoid(_probit_argument(m, s, power)) for power in (1, 2, 3))
    r2, r3 = torch.exp(e2 - e1), torch.exp(e3 - e1)
    return 1 - r2, 2 * r3 - r2 - r2 * r2


def _probit_tilt(mean: Tensor, variance: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """Return g and h (see `_tilt`) by σ(C) ≈ Φ(ζ·C)."""
    m, s = f * mean, f * f * variance
    scale = 1 + _ZETA2 * s
    t = math.sqrt(_ZETA2) * m / torch.sqrt(scale)
    # φ(t)/Φ(t), in logarithms for the left tail.
    ratio = torch.exp(-0.5 * t * t - 0.5 * math.log(2 * math.pi) - torch.special.log_ndtr(t))
    return math.sqrt(_ZETA2) * ratio / torch.sqrt(scale), -_ZETA2 * ratio * (t + ratio) / scale


@cache
def _hermite(nodes: int) -> tuple[Tensor, Tensor]:
    """Return the quadrature nodes of the standard normal, and the logarithms of their weights."""
    if not 2 <= nodes <= 100:
        raise ModelError(f"{nodes} quadrature nodes: give 2 to 100")
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    return torch.from_numpy(points), torch.from_numpy(np.log(weights / weights.sum()))


Gaussian = tuple[Tensor, Tensor]
"""Means and variances of independent Gaussians."""

_START_RAW = -5.0
"""Starting value of raw variances. The variance is softplus(−5) = 0.0067, small beside that of the means."""


class GaussianLinear(nn.Module):
    """Computes mean and variance of y = W·x + b from those of x; W and b are Gaussian.

    Their variances are softplus(raw) and softplus(raw_bias), so they are positive.
    """

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(outputs, inputs))
        self.raw = nn.Parameter(torch.full((outputs, inputs), _START_RAW))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.raw_bias = nn.Parameter(torch.full((outputs,), _START_RAW))

    def forward(self, mean: Tensor, variance: Tensor) -> Gaussian:
        """Return mean and variance of y; the variance has terms of x, of W, and of both."""
        weight_variance = F.softplus(self.raw)
        y_mean = F.linear(mean, self.mean, self.bias)
        variance_from_x = F.linear(variance, self.mean.square())
        y_variance = variance_from_x + F.linear(variance + mean.square(), weight_variance)
        return y_mean, y_variance + F.softplus(self.raw_bias)


def relu_moments(mean: Tensor, variance: Tensor) -> Gaussian:
    """Return the exact mean and variance of max(x, 0) for x ~ N(mean, variance)."""
    deviation = torch.sqrt(variance)
    t = mean / deviation
    positive = torch.special.ndtr(t)  # P(x > 0)
    density = torch.exp(-0.5 * t * t) / math.sqrt(2 * math.pi)
    relu_mean = mean * positive + deviation * density
    relu_square = (mean.square() + variance) * positive + mean * deviation * density
    # Rounding may make the variance slightly negative where almost all of x is below 0.
    smallest = torch.finfo(mean.dtype).tiny
    return relu_mean, (relu_square - relu_mean.square()).clamp_min(smallest)


class NPN(nn.Module):
    """A natural-parameter network: two Gaussian linear layers with ReLUs between them."""

    def __init__(self, inputs: int, hidden: int, outputs: int):
        super().__init__()
        self.first = GaussianLinear(inputs, hidden)
        self.last = GaussianLinear(hidden, outputs)

    def forward(self, mean: Tensor, variance: Tensor) -> Gaussian:
        """Return mean and variance of the outputs."""
        return self.last(*relu_moments(*self.first(mean, variance)))


def gaussian_kl(p: Gaussian, q: Gaussian) -> Tensor:
    """Return KL[p ‖ q] of diagonal Gaussians, summed over dimensions."""
    (mean, variance), (other_mean, other_variance) = p, q
    ratio = variance / other_variance
    distance = (mean - other_mean).square() / other_variance
    return 0.5 * (ratio + distance - 1 - torch.log(ratio)).sum()
