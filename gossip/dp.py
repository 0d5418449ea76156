"""Differential privacy for a peer's updates: clipping, Gaussian noise, and accounting of epsilon.

Off by default. A *release* is the update of one round of training as other peers see it: the change of a
model, clipped to a norm of at most `clip`, plus Gaussian noise with a standard deviation of `noise` · `clip`.
All of the peer's data together can then change a release by at most `clip`, so n releases are a composition
of n Gaussian mechanisms, whose epsilon the accountant computes. Noise protects against all peers, and also
in the final average; masks (see masking.py) only hide which peer contributed what.

The accountant is Google's `dp-accounting` (an extra: `pip install gossamer[dp]`).
"""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from gossamer.errors import GossamerError

from .pushsum import Array


class PrivacyError(GossamerError, ValueError):
    """Differential privacy is not possible with these settings or values; the message says what to do."""


@dataclass(frozen=True, slots=True)
class ReleasePlan:
    """How a peer releases its updates."""

    clip: float
    """The largest Euclidean norm of an update that is released unclipped. Start with the median norm of your
    updates (`Releases.norms`); lower it for less noise at the same privacy, raise it if nearly all updates
    are clipped (the counter "clipped")."""
    noise: float
    """The standard deviation of the noise on every coordinate, as a multiple of `clip`. Use about 1 or more
    for a meaningful epsilon; lower it when accuracy matters more."""
    delta: float = 1e-5
    """The probability with which the epsilon may not hold; well below 1 / number of samples."""
    limit: float | None = None
    """The largest epsilon; a release that would exceed it is refused. None never refuses."""

    def __post_init__(self) -> None:
        if not (np.isfinite(self.clip) and self.clip > 0):
            raise PrivacyError(f"differential privacy: clip is {self.clip}, must be above 0")
        if not (np.isfinite(self.noise) and self.noise > 0):
            raise PrivacyError(f"differential privacy: noise is {self.noise}, must be above 0")
        if not 0 < self.delta < 1:
            raise PrivacyError(f"differential privacy: delta is {self.delta}, not within 0..1")
        if self.limit is not None and not self.limit > 0:
            raise PrivacyError(f"differential privacy: limit is {self.limit}, must be above 0")


class Releases:
    """The releases of one peer so far, and their epsilon.

    releases: the number of releases in former sessions (`count`), which count towards epsilon too.
    seed: only for tests; by default the generator is seeded by the operating system, because predictable
        noise protects nothing.

    `counters` has "released" and "clipped"; `norms` holds the norms of the last 100 updates before clipping.
    """

    def __init__(
        self, plan: ReleasePlan, *, releases: int = 0, seed: int | np.random.Generator | None = None
    ) -> None:
        _accounting()  # raises now, not after training, if the package is missing
        self.plan = plan
        self.count = releases
        self.counters: Counter[str] = Counter()
        self.norms: list[float] = []
        self._rng = np.random.default_rng(secrets.randbits(256) if seed is None else seed)
        self._epsilons: dict[int, float] = {}
        """Cache of the last computed epsilon, by number of releases."""

    def release(self, before: Array, after: Array) -> Array:
        """Return the value to use instead of `after`, when training changed the model from `before` to it.

        Every call is one release: call it once per model and round, and write the result back to the model,
        so that no update without noise is ever pushed. Raise PrivacyError, and release nothing, if the limit
        would be exceeded or the update is not finite.
        """
        if before.shape != after.shape:
            raise PrivacyError(
                f"differential privacy: {before.size} values before training, {after.size} after"
            )
        if self.plan.limit is not None and self.epsilon(self.count + 1) > self.plan.limit:
            raise PrivacyError(
                f"differential privacy: one more release would exceed epsilon {self.plan.limit:g} "
                f"(now {self.epsilon():.3g} after {self.count}); stop here, or raise noise or limit"
            )
        update = np.subtract(after, before, dtype=np.float64)
        norm = float(np.linalg.norm(update))
        if not np.isfinite(norm):
            raise PrivacyError(
                "differential privacy: the update is not finite; nothing is released"
            )
        self.norms = [*self.norms[-99:], norm]
        if norm > self.plan.clip:
            update *= self.plan.clip / norm
            self.counters["clipped"] += 1
        update += self._rng.normal(0.0, self.plan.noise * self.plan.clip, update.shape)
        self.count += 1
        self.counters["released"] += 1
        return (before + update).astype(after.dtype)

    def epsilon(self, releases: int | None = None) -> float:
        """Return the epsilon, at the plan's delta, of all releases so far, or of this many."""
        count = self.count if releases is None else releases
        if count == 0:
            return 0.0
        if count not in self._epsilons:
            accounting = _accounting()
            accountant = accounting.rdp.RdpAccountant()
            accountant.compose(accounting.GaussianDpEvent(self.plan.noise), count)
            self._epsilons = {count: float(accountant.get_epsilon(self.plan.delta))}
        return self._epsilons[count]

    def report(self) -> dict[str, float]:
        """Return epsilon and the counters, for the peer's report."""
        return {
            "epsilon": self.epsilon(),
            "delta": self.plan.delta,
            "releases": self.count,
            "clipped": self.counters["clipped"],
        }


def _accounting() -> Any:
    try:
        import dp_accounting  # an optional dependency that takes two seconds to import
    except ImportError:
        raise PrivacyError(
            "differential privacy needs the package dp-accounting: pip install 'gossamer[dp]'"
        ) from None
    return dp_accounting
