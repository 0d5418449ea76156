"""The paper's associative network: thresholds and a local rule, no gradient (Algorithms 3 and 4).

A visible and a hidden layer of binary cells look at each other. Shown a whole vector, links between
cells that fire together grow and the others fade; shown half of one, the network completes it.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from .anatomy import Anatomy, ParameterMap, Part, dense_axes
from .errors import ModelError
from .learner import Metrics
from .network import SlicedNetwork
from .slicing import Start

# The paper does not say how weights start; this is the neutral reading of "weights in [−1, 1]".
UNIFORM = Start("uniform", 1.0, by_fan_in=False)


class AssociativeNetwork(nn.Module):
    """`AssociativeNetwork("50<>400")`: 50 visible and 400 hidden cells, each seeing all the others."""

    def __init__(self, layout: str, *, threshold: float = 0.5):
        super().__init__()
        match = re.fullmatch(r"([1-9]\d*)<>([1-9]\d*)", layout)
        if not match:
            raise ModelError(
                f"{layout!r} is not an associative layout: write visible<>hidden, as in 50<>400"
            )
        visible, hidden = int(match[1]), int(match[2])
        self.threshold = threshold
        self.hidden = nn.Parameter(torch.zeros(hidden, visible), requires_grad=False)
        self.visible = nn.Parameter(torch.zeros(visible, hidden), requires_grad=False)

    def anatomy(self) -> Anatomy:
        """Two parts; every weight runs from one to the other."""
        hidden, visible = self.hidden.shape
        parts = (Part("visible", visible), Part("hidden", hidden))
        return Anatomy(
            parts,
            (
                ParameterMap("hidden", (hidden, visible), dense_axes(parts, 1, 0)),
                ParameterMap("visible", (visible, hidden), dense_axes(parts, 0, 1)),
            ),
        )

    def fire(self, vectors: Tensor) -> Tensor:
        """What the hidden cells answer to visible vectors [n, visible]."""
        return (vectors @ self.hidden.T >= self.threshold).to(vectors.dtype)

    def forward(self, vectors: Tensor) -> Tensor:
        """Complete visible vectors (Algorithm 3)."""
        return (self.fire(vectors) @ self.visible.T >= self.threshold).to(vectors.dtype)

    @torch.no_grad()
    def learn(self, vector: Tensor, rate: float) -> None:
        """Associate what fires together in one whole vector (Algorithm 4)."""
        self.associate(
            self.hidden.data, self.visible.data, vector, self.fire(vector[None])[0], rate
        )

    @staticmethod
    def associate(
        hidden: Tensor, visible: Tensor, vector: Tensor, fires: Tensor, rate: float
    ) -> None:
        """Move the weights of one network, or of a stack of them, by what fires in both layers.

        Both branches of the paper's rule move a weight by rate/2 of its distance to ±1, the sign being
        whether the cell fires; only links from firing cells move.
        """
        half = rate / 2
        hidden += half * vector[..., None, :] * ((2 * fires - 1)[..., :, None] - hidden)
        visible += half * fires[..., None, :] * ((2 * vector - 1)[..., :, None] - visible)


class AssociativeLearner:
    """Shows vectors to an associative network in order, round and round.

    train
        Whole vectors [n, visible].
    test
        Partial vectors and the whole ones expected for them. One counts as right when the output
        matches at least as many 1s as it differs in bits, as in the paper.
    local_samples
        Vectors between two averagings (the paper's mini-batch).
    """

    def __init__(
        self,
        network: SlicedNetwork,
        train: Tensor,
        test: tuple[Tensor, Tensor],
        *,
        local_samples: int = 3,
        rate: float = 0.1,
    ):
        if not isinstance(network.module, AssociativeNetwork):
            raise ModelError(
                f"an associative learner needs an AssociativeNetwork, not {type(network.module).__name__}"
            )
        self.network, self.module = network, network.module
        self.samples, self.held_out = train, test
        self.local_samples, self.rate = local_samples, rate
        self._next = 0

    def train(self, steps: int = 1) -> Metrics:
        """Show `local_samples` vectors `steps` times; there is no loss to report."""
        for _ in range(steps * self.local_samples):
            self.module.learn(self.samples[self._next], self.rate)
            self._next = (self._next + 1) % len(self.samples)
        return Metrics(samples=steps * self.local_samples)

    @torch.no_grad()
    def test(self) -> Metrics:
        """How many held-out vectors are completed."""
        partial, expected = self.held_out
        output = self.module(partial)
        matching = (output * expected).sum(dim=1)
        differing = (output - expected).abs().sum(dim=1)
        return Metrics(float(differing.sum()), int((matching >= differing).sum()), len(expected))

    def state(self) -> dict[str, Any]:
        """Which vector comes next."""
        return {"next": self._next}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from where `state` was taken."""
        self._next = int(state["next"])


def sparse_vectors(
    first: int,
    count: int,
    *,
    bits: int = 50,
    ones: int = 8,
    noise: int = 2,
    period: int = 3,
    modified: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The paper's generator of sparse binary vectors (V.5), for k from `first` on.

    Returns (whole with noise, for training; partial with noise, for testing; whole and clean, expected).
    Vector k fills block k mod `period`, of 3·`ones` bits: the first third is always given, the second
    is to be guessed, or the last third where k mod `period` equals `modified`. Blocks wrap around the
    end, which they must at the paper's own size (3 blocks of 24 in 50 bits). Noise flips `noise` evenly
    spaced bits that move on by one every period.
    """
    index = torch.arange(first, first + count)
    block = index % period
    start = 3 * ones * block
    guess = torch.where(block == (-1 if modified is None else modified), 2 * ones, ones)
    offsets = torch.arange(ones)
    given = torch.zeros(count, bits)
    given.scatter_(1, (start[:, None] + offsets) % bits, 1.0)
    whole = given.clone()
    whole.scatter_(1, ((start + guess)[:, None] + offsets) % bits, 1.0)
    flips = torch.zeros(count, bits)
    if noise:
        spots = (index // period)[:, None] + torch.arange(noise) * (bits // noise)
        flips.scatter_(1, spots % bits, 1.0)
    return (whole - flips).abs(), (given - flips).abs(), whole
