"""The knobs of FedNP."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import ModelError
from .moments import Method


@dataclass(frozen=True)
class FedNPOptions:
    """How strongly, and by which auxiliary task, a learner is held to the global view.

    strength
        λ of eq (19): how much the KL loss weighs beside the learner's own loss, as the learner reduces it.
        Raise it when peers drift apart between averagings; the paper tried 0.001 to 1.
    dimensions
        Of the latent z.
    hidden
        Cells in the hidden part of f, and in that of the NPN.
    rate
        The learning rate of f and the NPN. They minimise the KL loss at a pace of their own, or a small
        `strength` would also keep them from learning.
    spread
        ε of eq (18), the variance that a parameter's own distribution is given. Smaller pulls harder.
    damping
        How far a site moves towards its update, in (0, 1]. Lower it when cavities are out of date.
    moments, nodes
        See `tilted_moments`; nodes are those of the quadrature.
    signals
        `each`: f has an output for each dimension of z. `one`: a single number, as in the paper; all
        dimensions of z, which start alike, then stay alike for ever.
    batch
        The samples that f looks at in one step. 0: all of them.
    freeze_z
        The control: z stays at the prior, so that only the averaged NPN is left of the method.
    """

    strength: float = 0.01
    dimensions: int = 10
    hidden: int = 16
    rate: float = 0.01
    spread: float = 0.1
    damping: float = 0.5
    moments: Method = "quadrature"
    nodes: int = 20
    signals: Literal["each", "one"] = "each"
    batch: int = 32
    freeze_z: bool = False

    def __post_init__(self) -> None:
        _check(self.strength, "strength (λ)", lowest=True)
        _check(self.rate, "rate")
        _check(self.spread, "spread (ε)")
        if not 0 < self.damping <= 1:
            raise ModelError(f"FedNP's damping must lie in (0, 1], not {self.damping}")
        for name, least in (("dimensions", 1), ("hidden", 1), ("batch", 0)):
            if getattr(self, name) < least:
                raise ModelError(
                    f"FedNP's {name} must be at least {least}, not {getattr(self, name)}"
                )
        if not 2 <= self.nodes <= 100:
            raise ModelError(f"FedNP's nodes must lie in 2 to 100, not {self.nodes}")
        if self.moments not in get_args(Method):
            known = ", ".join(get_args(Method))
            raise ModelError(f"FedNP's moments are {known}, not {self.moments!r}")
        if self.signals not in ("each", "one"):
            raise ModelError(f"FedNP's signals are each, one, not {self.signals!r}")


def _check(value: float, name: str, *, lowest: bool = False) -> None:
    if not math.isfinite(value) or value < 0 or (value == 0 and not lowest):
        least = "at least 0" if lowest else "above 0"
        raise ModelError(f"FedNP's {name} must be {least} and finite, not {value}")
