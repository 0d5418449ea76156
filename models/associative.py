"""The paper's associative network: binary threshold cells and a local learning rule (Algorithms 3 and 4).

A visible and a hidden layer of binary cells are connected in both directions. Trained on a complete vector,
weights between cells that fire together grow and other weights shrink. Given a part of a vector, the network
completes it.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from .anatomy import Anatomy, ParameterMap, Part, dense_axes
from .errors import ModelError
from .metrics import Metrics
from .network import SlicedNetwork
from .slicing import Start

# The paper says only "weights in [−1, 1]", not how they are drawn: here uniformly.
UNIFORM = Start("uniform", 1.0, by_fan_in=False)


class AssociativeNetwork(nn.Module):
    """`AssociativeNetwork("50<>400")`: 50 visible and 400 hidden cells, connected in both directions."""

    def __init__(self, layout: str, *, threshold: float = 0.5):
        super().__init__()
        match = re.fullmatch(r"([1-9]\d*)<>([1-9]\d*)", layout)
        if not match:
            raise ModelError(
                f"{layout!r} is not an associative layout: write visible<>hidden, as in 50<>400"
            )
        visible, hidden = int(match[1]), int(match[2])
        self.threshold = threshold
        # The weights into the cells of each layer; cells fire if their weighted sum reaches the threshold.
        self.hidden = nn.Parameter(torch.zeros(hidden, visible), requires_grad=False)
        self.visible = nn.Parameter(torch.zeros(visible, hidden), requires_grad=False)

    def anatomy(self) -> Anatomy:
        """Return the two parts, and the weights from each to the other."""
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
        """Return which hidden cells fire (1 or 0) for visible vectors [n, visible]."""
        return (vectors @ self.hidden.T >= self.threshold).to(vectors.dtype)

    def forward(self, vectors: Tensor) -> Tensor:
        """Complete visible vectors (Algorithm 3)."""
        return (self.fire(vectors) @ self.visible.T >= self.threshold).to(vectors.dtype)

    @torch.no_grad()
    def learn(self, vector: Tensor, rate: float) -> None:
        """Learn one complete vector (Algorithm 4)."""
        self.associate(
            self.hidden.data, self.visible.data, vector, self.fire(vector[None])[0], rate
        )

    @staticmethod
    def associate(
        hidden: Tensor, visible: Tensor, vector: Tensor, fires: Tensor, rate: float
    ) -> None:
        """Apply the learning rule to one network, or to a stack of networks, in place.

        `vector` and `fires` say which visible and hidden cells fire. Only weights from firing cells change.
        Both branches of the paper's rule move a weight by rate/2 of its distance to +1 if the target cell
        fires, and to −1 if it does not.
        """
        half = rate / 2
        hidden += half * vector[..., None, :] * ((2 * fires - 1)[..., :, None] - hidden)
        visible += half * fires[..., None, :] * ((2 * vector - 1)[..., :, None] - visible)


class AssociativeLearner:
    """Trains an associative network on its vectors in order, starting again after the last.

    train
        Complete vectors [n, visible].
    test
        Partial vectors and the complete vectors expected for them. An output is correct, as in the paper, if
        it shares at least as many 1s with the expected vector as it differs from it in bits.
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
        """Train on `local_samples` vectors, `steps` times; the metrics have no loss."""
        for _ in range(steps * self.local_samples):
            self.module.learn(self.samples[self._next], self.rate)
            self._next = (self._next + 1) % len(self.samples)
        return Metrics(samples=steps * self.local_samples)

    def test(self) -> Metrics:
        """Count the held-out vectors that are completed correctly; the loss is the number of wrong bits."""
        differing, correct = self.test_samples()
        return Metrics(float(differing.sum()), int(correct.sum()), len(correct))

    @torch.no_grad()
    def test_samples(self) -> tuple[Tensor, Tensor]:
        """Return the number of wrong bits of each held-out vector, and whether it is completed correctly."""
        partial, expected = self.held_out
        output = self.module(partial)
        matching = (output * expected).sum(dim=1)
        differing = (output - expected).abs().sum(dim=1)
        return differing, (matching >= differing).to(differing.dtype)

    def state(self) -> dict[str, Any]:
        """Return the index of the next vector."""
        return {"next": self._next}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
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
    """Generate the sparse binary vectors of the paper's section V.5, numbers `first` to `first + count − 1`.

    Returns complete vectors with noise, for training; partial vectors with noise, for testing; and complete
    vectors without noise, the expected outputs. Vector k has its 1s in block k mod `period`, of 3·`ones`
    bits. The first third of the block is set in all of them. Complete vectors also have the second third, or
    the last third in the block with index `modified`. Blocks wrap around the end, as they must at the
    paper's own size (3 blocks of 24 in 50 bits). Noise flips `noise` evenly spaced bits; they move by one
    bit every period.
    """
    index = torch.arange(first, first + count)
    block = index % period
    start = 3 * ones * block
    second_start = torch.where(block == (-1 if modified is None else modified), 2 * ones, ones)
    offsets = torch.arange(ones)
    partial = torch.zeros(count, bits)
    partial.scatter_(1, (start[:, None] + offsets) % bits, 1.0)
    complete = partial.clone()
    complete.scatter_(1, ((start + second_start)[:, None] + offsets) % bits, 1.0)
    flips = torch.zeros(count, bits)
    if noise:
        flipped = (index // period)[:, None] + torch.arange(noise) * (bits // noise)
        flips.scatter_(1, flipped % bits, 1.0)
    return (complete - flips).abs(), (partial - flips).abs(), complete
