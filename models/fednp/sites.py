"""Gaussian factors in natural parameters: products, cavities and site updates of expectation propagation.

A diagonal Gaussian N(m, s) is held as (η, λ) = (m/s, 1/s), in float64: a product of factors is a sum, a
quotient a difference, and a *site*, which is a factor and no distribution, may have λ = 0 (it says
nothing) without anything being divided by zero. Variances are only ever made from cavities and products.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ModelError


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

    @property
    def proper(self) -> Tensor:
        """Per dimension, whether the factor is a distribution."""
        finite = torch.isfinite(self.eta) & torch.isfinite(self.precision)
        return finite & (self.precision > 0)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance; every dimension must be proper."""
        if not bool(self.proper.all()):
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


def product(factors: Iterable[Natural], dimensions: int) -> Natural:
    """The product of any number of factors."""
    total = Natural.flat(dimensions)
    for factor in factors:
        total = total + factor
    return total


def server_cavities(prior: Natural, sites: Sequence[Natural]) -> list[Natural]:
    """For each client the prior times everybody else's site: Algorithm 1's line 11, with the prior kept.

    As printed the prior is dropped, so that one silent client leaves another without any cavity.
    """
    total = prior + product(sites, len(prior.eta))
    return [total - site for site in sites]


def updated_site(site: Natural, fresh: Natural, damping: float = 1.0) -> Natural:
    """Move a site towards `fresh`, the factor that gives the tilted moments, by a share `damping`.

    σ(f·z) is log-concave, so the exact site precision is never below 0. One that comes out so is an error
    of the approximation, or of a cavity that is out of date: there the site stays what it was.
    """
    mixed = site * (1.0 - damping) + fresh * damping
    usable = torch.isfinite(fresh.eta) & torch.isfinite(fresh.precision) & (fresh.precision >= 0)
    return mixed.where(usable, site)
