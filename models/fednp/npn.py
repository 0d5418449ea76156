"""A natural-parameter network: a Gaussian goes in, a Gaussian comes out, and nothing is sampled.

Weights are Gaussian too. A linear layer's moments are exact; a ReLU's are as well, for a Gaussian input;
the only approximation is that what leaves a ReLU is taken for Gaussian and its cells for independent.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
