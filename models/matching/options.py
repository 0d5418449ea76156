"""The knobs of matching, checked once, with errors that say which one is out of range."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import ModelError

Kind = Literal["printed", "set", "efpf"]

MAGI = 0.1
"""The `kl` with which MAGI is run unless somebody chose another."""


@dataclass(frozen=True)
class MatchOptions:
    """How cells are matched. The defaults are those of the PFNM paper.

    variance
        How far a cell of one peer lies from its atom (σ²), when peers do not bring a variance of their
        own. Lower it (0.1) for larger, usually more accurate networks; raise it to merge more.
    prior_variance
        How far atoms lie from the prior mean (σ0²). It shrinks what is read: weights seen once are
        multiplied by σ0²/(σ0² + σ²).
    mass
        γ0 of the Beta process: raise it for more atoms. 1e-5 makes a network as wide as the widest peer.
    kind
        What a new atom costs beside the data. `set` and `efpf` are joint distributions: every step
        raises the objective; `set` barely merges, `efpf` barely grows. `printed` is the paper's own,
        lies between, and belongs to no joint distribution, so that its sweeps may run in circles; they
        are stopped when a partition comes back.
    kl
        MAGI's λ, from 0 (PFNM) to 1: raise it for smaller networks. Above 0.5 even equal cells may be
        kept apart; measured accuracy falls from about 0.7.
    limit
        The capacity: a fused part is never wider than this, or than the widest network if that is wider
        (with groups: than the widest of each together), however many networks a stream brings. Cells that
        find no room are forced into the atoms that fit them best, which blurs those. Raise it when
        accuracy falls as more networks come; None lets the network grow freely.
    sweeps
        Passes over the peers after the first; matching usually settles before.
    tolerance
        Under `set` and `efpf`, a sweep that raises the objective by less than this share is the last.
    shrink
        Whether the prior counts when atoms are read. False gives the plain weighted mean of the cells.
    """

    variance: float = 1.0
    prior_variance: float = 10.0
    mass: float = 1.0
    kind: Kind = "printed"
    kl: float = 0.0
    limit: int | None = 700
    sweeps: int = 20
    tolerance: float = 1e-12
    shrink: bool = True

    def __post_init__(self) -> None:
        for name, meaning in (
            ("variance", "σ²"),
            ("prior_variance", "σ0²"),
            ("mass", "γ0"),
        ):
            check_positive(f"{name} ({meaning})", getattr(self, name))
        if self.kind not in get_args(Kind):
            raise ModelError(
                f"matching: kind {self.kind!r} is unknown; there are {', '.join(get_args(Kind))}"
            )
        if not 0 <= self.kl <= 1:
            raise ModelError(f"matching: kl (λ) is {self.kl}; it must lie between 0 and 1")
        if self.limit is not None and self.limit < 1:
            raise ModelError(
                f"matching: limit is {self.limit}; give at least 1 atom, or None for no limit"
            )
        if self.sweeps < 0:
            raise ModelError(f"matching: sweeps is {self.sweeps}; give 0 or more")
        if not self.tolerance >= 0:
            raise ModelError(f"matching: tolerance is {self.tolerance}; give 0 or more")

    @property
    def prior_precision(self) -> float:
        """1/σ0²."""
        return 1 / self.prior_variance


def check_positive(what: str, value: float) -> None:
    """Refuse a number that is not above 0 and finite."""
    if not (math.isfinite(value) and value > 0):
        raise ModelError(f"matching: {what} is {value}; it must be a finite number above 0")
