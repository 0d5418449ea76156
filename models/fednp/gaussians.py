"""Gaussians: factors and sites, tilted moments, and networks through which they pass.

A diagonal Gaussian N(m, s) is held as (η, λ) = (m/s, 1/s), in float64: a product of factors is a sum, a
quotient a difference, and a *site*, which is a factor and no distribution, may have λ = 0 (it says
nothing) without anything being divided by zero. Variances are only ever made from cavities and products.

Moments of the tilted distribution N(z; mz, sz)·σ(f·z), three ways, all differentiable in f.

With C = f·z ~ N(m, s), m = f·mz, s = f²·sz, E_d = E[σ(C)^d] and r_d = E_d / E_1, Stein's lemma gives

    mean = mz + sz·f·(1 − r2)        variance = sz + (sz·f)²·(2·r3 − r2 − r2²)

without a division by f, which may be 0. (The paper's eqs (12), (25) and (40) lost terms of its (37).)

`quadrature`
    Gauss–Hermite nodes in z, weighted by σ(f·z): positive weights, so the variance is positive whatever
    the number of nodes. The default.
`closed`
    The two lines above with E_d ≈ σ(a(m + b)/√(1 + ζ²a²s)), a = 2d(1 − 2^(−1/d)), b = log(2^(1/d) − 1),
    ζ² = π/8: the paper's Theorem 2 with the signs and roots put right. Its variance is positive for
    |m| ≤ 8 and s ≤ 16; beyond, it may come out ≤ 0, and then the site update must be skipped.
`probit`
    σ(C) ≈ Φ(ζ·C), whose tilted moments are exact: the variance is always positive.

The largest error of the mean of C for |m| ≤ 8, s ≤ 16: 0.02 with 20 nodes, 3.0 closed, 1.8 probit, the
last two where σ is far out in its left tail, which it does not share with Φ (for m ≥ −1 and s ≤ 2: 0.11
and 0.05).

A natural-parameter network: a Gaussian goes in, a Gaussian comes out, and nothing is sampled.

Weights are Gaussian too. A linear layer's moments are exact; a ReLU's are as well, for a Gaussian input;
the only approximation is that what leaves a ReLU is taken for Gaussian and its cells for independent.
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
    """A Gaussian factor exp(η·z − λ·z²/2), one per dimension; `a + b` is the product of two."""

    eta: Tensor
    precision: Tensor

    @classmethod
    def of(cls, mean: Tensor, variance: Tensor) -> Natural:
        """The factor that is the distribution N(mean, variance)."""
        if not bool((variance > 0).all()):
            raise ModelError(f"a Gaussian needs variances above 0, not {float(variance.min()):g}")
        precision = 1.0 / variance.double()
        return cls(mean.double() * precision, precision)

    @classmethod
    def flat(cls, dimensions: int) -> Natural:
        """The factor that says nothing: every site before its first update."""
        zero = torch.zeros(dimensions, dtype=torch.float64)
        return cls(zero, zero.clone())

    @classmethod
    def standard(cls, dimensions: int) -> Natural:
        """N(0, 1) in every dimension: the prior of z."""
        zero = torch.zeros(dimensions, dtype=torch.float64)
        return cls(zero, torch.ones_like(zero))

    def __add__(self, other: Natural) -> Natural:
        return Natural(self.eta + other.eta, self.precision + other.precision)

    def __sub__(self, other: Natural) -> Natural:
        return Natural(self.eta - other.eta, self.precision - other.precision)

    def __mul__(self, power: float) -> Natural:
        return Natural(power * self.eta, power * self.precision)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance; every dimension must be proper."""
        if not bool((torch.isfinite(self.stack()).all(0) & (self.precision > 0)).all()):
            worst = float(self.precision.min())
            raise ModelError(
                f"a factor with precision {worst:g} is no distribution and has no variance: "
                "multiply it with the others first"
            )
        return self.eta / self.precision, 1.0 / self.precision

    def where(self, mask: Tensor, other: Natural) -> Natural:
        """This factor where the mask is true, the other one elsewhere."""
        return Natural(
            torch.where(mask, self.eta, other.eta),
            torch.where(mask, self.precision, other.precision),
        )

    def stack(self) -> Tensor:
        """One tensor [2, dimensions]: η, then λ."""
        return torch.stack([self.eta, self.precision])

    @classmethod
    def unstack(cls, values: Tensor) -> Natural:
        """The inverse of `stack`, always in float64 and in memory of its own."""
        eta, precision = values.detach().double().clone()
        return cls(eta, precision)


def server_cavities(prior: Natural, sites: Sequence[Natural]) -> list[Natural]:
    """For each client the prior times everybody else's site: Algorithm 1's line 11, with the prior kept.

    As printed the prior is dropped, so that one silent client leaves another without any cavity.
    """
    total = sum(sites, prior)
    return [total - site for site in sites]


def updated_site(site: Natural, fresh: Natural, damping: float = 1.0) -> Natural:
    """Move a site towards `fresh`, the factor that gives the tilted moments, by a share `damping`.

    σ(f·z) is log-concave, so the exact site precision is never below 0. One that comes out so is an error
    of the approximation, or of a cavity that is out of date: there the site stays what it was.
    """
    mixed = site * (1.0 - damping) + fresh * damping
    usable = torch.isfinite(fresh.eta) & torch.isfinite(fresh.precision) & (fresh.precision >= 0)
    return mixed.where(usable, site)


_ZETA2 = math.pi / 8
_WIDE = 0.25
"""Variance of f·z from which on g and h are taken from moments. At 0.5 either way is exact to 1e-11 with 20
nodes; below, moments cancel, and above, the other form loses accuracy sooner."""


def tilted_moments(
    mean: Tensor, variance: Tensor, f: Tensor, method: Moments = "quadrature", nodes: int = 20
) -> tuple[Tensor, Tensor]:
    """Mean and variance of z under cavity × σ(f·z), for each dimension by itself.

    mean, variance: the cavity's. f: one number per dimension, or one for all. nodes: of the quadrature;
    20 are accurate to 0.02, raise them where |f|·√variance is above 4.
    """
    if method == "quadrature":
        return _quadrature(mean, variance, f, nodes)
    g, h = _tilt(mean, variance, f, method, nodes)
    reach = variance * f
    return mean + reach * g, variance + reach * reach * h


def tilted_factor(
    mean: Tensor, variance: Tensor, f: Tensor, method: Moments = "quadrature", nodes: int = 20
) -> tuple[Tensor, Tensor]:
    """η and λ of the Gaussian factor that turns the cavity into one with the tilted moments.

    It is 1 / tilted variance − 1 / variance, computed without that subtraction: beside a cavity of precision
    10^13 a factor of precision 0.1 would be lost to rounding. Arguments are those of `tilted_moments`.
    """
    g, h = _tilt(mean, variance, f, method, nodes)
    narrowing = 1 + f * f * variance * h  # tilted variance / variance
    precision = -f * f * h / narrowing
    return mean * precision + f * g / narrowing, precision


def _tilt(
    mean: Tensor, variance: Tensor, f: Tensor, method: Moments, nodes: int
) -> tuple[Tensor, Tensor]:
    """g = 1 − r2 and h = 2·r3 − r2 − r2² of the module's docstring."""
    match method:
        case "quadrature":
            return _quadrature_tilt(mean, variance, f, nodes)
        case "closed":
            return _closed_tilt(mean, variance, f)
        case "probit":
            return _probit_tilt(mean, variance, f)
    raise ModelError(f"unknown moments {method!r}: there are {', '.join(get_args(Moments))}")


def sigmoid_power_mean(mean: Tensor, variance: Tensor, power: int) -> Tensor:
    """E[σ(C)^power] for C ~ N(mean, variance), by the corrected closed form."""
    return torch.sigmoid(_probit_argument(mean, variance, power))


def _probit_argument(mean: Tensor, variance: Tensor, power: int) -> Tensor:
    a = 2 * power * (1 - 2 ** (-1 / power))
    b = math.log(2 ** (1 / power) - 1)
    return a * (mean + b) / torch.sqrt(1 + _ZETA2 * a * a * variance)


def _nodes(mean: Tensor, variance: Tensor, f: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes of a standard normal, f·z at each of them, and the weights that they have under the tilt."""
    points, log_weights = (values.to(mean) for values in _hermite(nodes))
    signal = f[..., None] * (mean[..., None] + torch.sqrt(variance)[..., None] * points)
    # In logarithms: far out on the wrong side σ underflows at every node at once.
    return points, signal, torch.softmax(log_weights + F.logsigmoid(signal), dim=-1)


def _quadrature(mean: Tensor, variance: Tensor, f: Tensor, nodes: int) -> Gaussian:
    points, _, weights = _nodes(mean, variance, f, nodes)
    z = mean[..., None] + torch.sqrt(variance)[..., None] * points
    first = (weights * z).sum(-1)
    return first, (weights * (z - first[..., None]).square()).sum(-1)


def _quadrature_tilt(
    mean: Tensor, variance: Tensor, f: Tensor, nodes: int
) -> tuple[Tensor, Tensor]:
    points, signal, weights = _nodes(mean, variance, f, nodes)
    spread = torch.sqrt(variance)
    up, down = torch.sigmoid(signal), torch.sigmoid(-signal)
    middle = (weights * up).sum(-1)
    g = (weights * down).sum(-1)
    h = (weights * ((up - middle[..., None]).square() - up * down)).sum(-1)
    # From the moments of z where they differ from the cavity's: there the lines above need more nodes.
    first = (weights * points).sum(-1)
    second = (weights * (points - first[..., None]).square()).sum(-1)
    wide = f * f * variance > _WIDE
    reach = torch.where(wide, f * spread, torch.ones_like(spread))
    return torch.where(wide, first / reach, g), torch.where(wide, (second - 1) / reach.square(), h)


def _closed_tilt(mean: Tensor, variance: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    m, s = f * mean, f * f * variance
    # In logarithms, as above.
    e1, e2, e3 = (F.logsigmoid(_probit_argument(m, s, power)) for power in (1, 2, 3))
    r2, r3 = torch.exp(e2 - e1), torch.exp(e3 - e1)
    return 1 - r2, 2 * r3 - r2 - r2 * r2


def _probit_tilt(mean: Tensor, variance: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    m, s = f * mean, f * f * variance
    scale = 1 + _ZETA2 * s
    t = math.sqrt(_ZETA2) * m / torch.sqrt(scale)
    # φ(t)/Φ(t), in logarithms for the left tail.
    ratio = torch.exp(-0.5 * t * t - 0.5 * math.log(2 * math.pi) - torch.special.log_ndtr(t))
    return math.sqrt(_ZETA2) * ratio / torch.sqrt(scale), -_ZETA2 * ratio * (t + ratio) / scale


@cache
def _hermite(nodes: int) -> tuple[Tensor, Tensor]:
    """Nodes of the standard normal and the logarithms of their weights."""
    if not 2 <= nodes <= 100:
        raise ModelError(f"{nodes} quadrature nodes: give 2 to 100")
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    return torch.from_numpy(points), torch.from_numpy(np.log(weights / weights.sum()))


Gaussian = tuple[Tensor, Tensor]
"""Mean and variance, one of each per cell."""

_UNSURE = -5.0  # softplus(−5) = 0.0067: weights begin almost certain


class GaussianLinear(nn.Module):
    """y = W·x + b with W and b Gaussian: mean and variance of y from those of x."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(outputs, inputs))
        self.raw = nn.Parameter(torch.full((outputs, inputs), _UNSURE))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.raw_bias = nn.Parameter(torch.full((outputs,), _UNSURE))

    def forward(self, mean: Tensor, variance: Tensor) -> Gaussian:
        """Moments of y; a cell's variance adds up what is unsure about x, about W, and about both."""
        spread = F.softplus(self.raw)
        out = F.linear(mean, self.mean, self.bias)
        doubt = F.linear(variance, self.mean.square()) + F.linear(variance + mean.square(), spread)
        return out, doubt + F.softplus(self.raw_bias)


def relu_moments(mean: Tensor, variance: Tensor) -> Gaussian:
    """Exact mean and variance of max(x, 0) for x ~ N(mean, variance)."""
    deviation = torch.sqrt(variance)
    t = mean / deviation
    below = torch.special.ndtr(t)
    density = torch.exp(-0.5 * t * t) / math.sqrt(2 * math.pi)
    first = mean * below + deviation * density
    second = (mean.square() + variance) * below + mean * deviation * density
    # Rounding may leave a hair less than nothing where all of x is below 0.
    return first, (second - first.square()).clamp_min(torch.finfo(mean.dtype).tiny)


class NPN(nn.Module):
    """One hidden part of ReLU cells between two Gaussian linear layers."""

    def __init__(self, inputs: int, hidden: int, outputs: int):
        super().__init__()
        self.first = GaussianLinear(inputs, hidden)
        self.last = GaussianLinear(hidden, outputs)

    def forward(self, mean: Tensor, variance: Tensor) -> Gaussian:
        """The distribution of the outputs."""
        return self.last(*relu_moments(*self.first(mean, variance)))


def gaussian_kl(one: Gaussian, other: Gaussian) -> Tensor:
    """KL[one ‖ other] of diagonal Gaussians, summed over dimensions."""
    (mean, variance), (at, spread) = one, other
    ratio = variance / spread
    return 0.5 * (ratio + (mean - at).square() / spread - 1 - torch.log(ratio)).sum()
