"""Differential privacy for what a peer releases: clipped updates with Gaussian noise, and their price.

Off unless asked for. A *release* is what others get to see of one round of training: the change of a
model, shortened to a length of at most `clip`, plus noise of `noise` times that length. Whether the
peer's data (all of it) was there then makes a difference of at most `clip`, so n releases of it are n
Gaussian mechanisms, which the accountant adds up. Noise protects against everybody, group members and
the final average included; that is its difference from masks, which only hide who said what.

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
    """Differential privacy that cannot be had this way; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class ReleasePlan:
    """How a peer releases its updates.

    clip: the longest update (Euclidean) that is released whole. Start at the median length of the
        updates you see (`Releases.lengths`); lower it for less noise at the same privacy, raise it if
        `Releases.clipped` counts nearly all of them.
    noise: standard deviation of the noise on every coordinate, in clips. Around 1 and above for an
        epsilon that means something; lower it when accuracy matters more.
    delta: the probability with which the promise may fail; well below 1 over the number of samples.
    limit: an epsilon at which releases are refused; None never refuses.
    """

    clip: float
    noise: float
    delta: float = 1e-5
    limit: float | None = None

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
    """One peer's releases so far, and what they cost.

    releases: how many former sessions made (`count`), so that a restart forgets no cost.
    seed: for tests alone; by default the noise comes from the operating system's randomness, because
        noise that can be predicted protects nothing.

    `counters` has "released" and "clipped"; `lengths` the lengths of the last updates, unclipped.
    """

    def __init__(
        self, plan: ReleasePlan, *, releases: int = 0, seed: int | np.random.Generator | None = None
    ) -> None:
        _accounting()  # missing at the start is better than missing at the end
        self.plan = plan
        self.count = releases
        self.counters: Counter[str] = Counter()
        self.lengths: list[float] = []
        self._rng = np.random.default_rng(secrets.randbits(256) if seed is None else seed)
        self._known: dict[int, float] = {}

    def release(self, before: Array, after: Array) -> Array:
        """Return what to keep and gossip instead of `after`, when training moved the model from `before`.

        Every call is one release: call it once per model and round, and write the result back to
        the model, so that nothing un-noised is ever pushed.
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
        length = float(np.linalg.norm(update))
        if not np.isfinite(length):
            raise PrivacyError(
                "differential privacy: the update is not finite; nothing is released"
            )
        self.lengths = [*self.lengths[-99:], length]
        if length > self.plan.clip:
            update *= self.plan.clip / length
            self.counters["clipped"] += 1
        update += self._rng.normal(0.0, self.plan.noise * self.plan.clip, update.shape)
        self.count += 1
        self.counters["released"] += 1
        return (before + update).astype(after.dtype)

    def epsilon(self, releases: int | None = None) -> float:
        """Return the epsilon, at the plan's delta, of the releases so far, or of a number of them."""
        count = self.count if releases is None else releases
        if count == 0:
            return 0.0
        if count not in self._known:
            accounting = _accounting()
            accountant = accounting.rdp.RdpAccountant()
            accountant.compose(accounting.GaussianDpEvent(self.plan.noise), count)
            self._known = {count: float(accountant.get_epsilon(self.plan.delta))}
        return self._known[count]

    def report(self) -> dict[str, float]:
        """Return what a peer's report should say."""
        return {
            "epsilon": self.epsilon(),
            "delta": self.plan.delta,
            "releases": self.count,
            "clipped": self.counters["clipped"],
        }


def _accounting() -> Any:
    try:
        import dp_accounting  # two seconds, and an extra: only for those who asked
    except ImportError:
        raise PrivacyError(
            "differential privacy needs the package dp-accounting: pip install 'gossamer[dp]'"
        ) from None
    return dp_accounting
