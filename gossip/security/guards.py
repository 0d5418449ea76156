"""Guards: bounds on the values that an admitted but faulty or hostile sender can make us accept. No IO.

A guard checks every transfer before it is credited. A refused transfer is acknowledged as "void", like any
transfer that a receiver cannot credit, so the sender takes its mass back and nothing is lost. A transfer that
is clipped is credited at the clipped value, so the swarm's sum changes by the difference; the counters
`clipped-…` count these. Nobody is excluded for its values: honest peers with unusual data would be, and a
liar that knows the bounds would not. An operator bans a peer by hand (`banned` in the settings).

Guards bound the effect of one message. They do not detect a member whose false values stay within the bounds:
see SECURITY.md, and robust.py for a mode that withstands some of them.

`guard` attaches them to a gossiper; `InitialEstimate` gives a newcomer, whose own values are
untrained, values to compare transfers with.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from ..gossiper import Gossiper
from ..pushsum import Array, is_finite, norm
from ..wire import Give
from .identity import id_of

MAX_SENDERS: Final = 4096
"""The most senders that are remembered; the oldest are forgotten."""
MAX_VALUE: Final = 1e6
"""The largest accepted value of a model that is not `comparable`, such as one of what each peer measures."""


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """The bounds. Norms are Euclidean and relative to the norm of the receiver's value of the same model."""

    distance: float = 0.5
    """The largest distance of a received value from ours, relative to the norm of ours. Sixteen peers with
    equal starting values stay below 0.25; raise it to 2 or more if starting values differ."""
    outlier: float | None = 3.0
    """The largest distance of a received value from ours, as a multiple of the median distance of all
    senders, once there are `senders` of them. This bound tightens as the swarm converges; `distance` stays
    its upper limit. Raise it if honest peers with unusual data are refused; None turns it off."""
    senders: int = 5
    """Senders needed before `outlier` applies. Fewer than half of them may be hostile."""
    norm: float = 4.0
    """The largest norm of a received value, relative to ours. It applies even while we have no weight."""
    beyond: Literal["refuse", "clip"] = "refuse"
    """What to do with a value beyond the bounds. Choose "clip" if honest peers differ much for a long time:
    their values then count, moved to the bound; those of hostile peers do too."""
    floor: float = 1e-3
    """The least root mean square of our value that is used as reference: with a smaller one, no transfer to a
    vector of zeros would ever be accepted."""
    weight: float = 16.0
    """The most weight that one transfer may carry, relative to the weight that we count with. Raise it if
    peers count by very different numbers of samples."""
    rate: float = 50.0
    """Messages per second that a sender may send on average. A message of up to 64 packets counts once, a
    longer one once per 64 packets. Raise it for very short rounds."""
    burst: float = 200.0
    """Messages that a sender may send at once."""

    def __post_init__(self) -> None:
        for name in ("distance", "norm", "floor", "weight", "rate", "burst"):
            if not getattr(self, name) > 0:
                raise ValueError(f"guards: {name} is {getattr(self, name)}, must be above 0")
        if self.outlier is not None and not self.outlier > 1:
            raise ValueError(f"guards: outlier is {self.outlier}, must be above 1")
        if self.senders < 3:
            raise ValueError(f"guards: senders is {self.senders}, must be at least 3")


@dataclass(slots=True)
class _TokenBucket:
    """How many messages one sender may still send at once; `GuardSettings.rate` refills it."""

    tokens: float
    refilled: float
    """When tokens were last added."""


class Guards:
    """The guards of one peer. `counters` counts refused and clipped transfers, by cause."""

    def __init__(self, settings: GuardSettings | None = None) -> None:
        self.settings = settings or GuardSettings()
        self.counters: Counter[str] = Counter()
        self._buckets: OrderedDict[str, _TokenBucket] = OrderedDict()
        """By the id in a sender's name, so that a sender cannot get a full bucket by a new label."""
        self._distances: dict[str, OrderedDict[str, float]] = {}
        """By model and sender id: the relative distance of the sender's last value from ours."""

    @property
    def remembered(self) -> int:
        """Number of senders that are remembered."""
        return len(self._buckets)

    # --- messages -------------------------------------------------------------------------------

    def allow(self, sender: str, now: float, share: float = 1.0) -> bool:
        """Return True if the sender's rate allows one more packet; if not, drop the packet unanswered.

        share: the fraction of a message that the packet is. Call it after the packet was opened and before it
        is decoded. The sender repeats dropped transfers.
        """
        limits = self.settings
        bucket = self._buckets.setdefault(id_of(sender), _TokenBucket(limits.burst, now))
        if len(self._buckets) > MAX_SENDERS:
            self._buckets.popitem(last=False)
        gained = max(0.0, now - bucket.refilled) * limits.rate
        bucket.tokens, bucket.refilled = min(limits.burst, bucket.tokens + gained), now
        if bucket.tokens < share:
            self.counters["rate"] += 1
            return False
        bucket.tokens -= share
        return True

    def inspect(
        self,
        give: Give,
        own: Array,
        weight: int,
        injected: int,
        *,
        comparable: bool = True,
    ) -> Give | str:
        """Return the transfer to credit, perhaps clipped, or the cause for which it is refused.

        own, weight: the value and weight that the receiver holds. injected: the weight with which it counts
        in the average, the reference for the weights of transfers. comparable: whether honest peers have
        similar values; if not, only their size is bounded, by MAX_VALUE.
        """
        result = self._check(give, own, weight, injected, comparable=comparable)
        if isinstance(result, str):
            self.counters[result] += 1
        return result

    def forget_models(self, present: Collection[str]) -> None:
        """Forget the distances of partial models that have ended: of all that are not in `present`."""
        self._distances = {model: d for model, d in self._distances.items() if model in present}

    def _check(
        self, give: Give, own: Array, weight: int, injected: int, *, comparable: bool
    ) -> Give | str:
        limits = self.settings
        if give.value.shape != own.shape:
            return "wrong-length"
        if not is_finite(give.value):
            return "not-finite"
        if not 0 < give.weight <= limits.weight * max(injected, 1):
            return "weight"
        if not comparable:
            return give if np.abs(give.value).max(initial=0.0) <= MAX_VALUE else "norm"
        own_norm = max(norm(own), limits.floor * np.sqrt(own.size))
        size = norm(give.value)
        if not size <= limits.norm * own_norm:
            clipped = self._clip(give, np.zeros_like(own), limits.norm * own_norm, size, "norm")
            if isinstance(clipped, str):
                return clipped
            give = clipped  # its distance is bounded too
        if weight == 0:
            return give  # a newcomer holds no value yet to measure the distance from
        with np.errstate(over="ignore", invalid="ignore"):
            distance = norm(np.subtract(give.value, own, dtype=np.result_type(own, np.float32)))
        allowed = self._allowed_distance(give, distance / own_norm) * own_norm
        if not distance <= allowed:
            return self._clip(give, own, allowed, distance, "distance")
        return give

    def _allowed_distance(self, give: Give, distance: float) -> float:
        """Note the relative distance of a value from ours; return the largest that is accepted."""
        limits, distances = self.settings, self._distances.setdefault(give.model, OrderedDict())
        sender = id_of(give.sender)
        distances[sender] = distance
        distances.move_to_end(sender)
        if len(distances) > MAX_SENDERS:
            distances.popitem(last=False)
        if limits.outlier is None or len(distances) < limits.senders:
            return limits.distance
        median = max(float(np.median(list(distances.values()))), limits.floor)
        return min(limits.distance, limits.outlier * median)

    def _clip(
        self, give: Give, centre: Array, allowed: float, distance: float, cause: str
    ) -> Give | str:
        """Return the transfer with its value moved to `allowed` from `centre`, or `cause` to refuse it."""
        if self.settings.beyond == "refuse" or not np.isfinite(distance):
            return cause
        self.counters[f"clipped-{cause}"] += 1
        step = np.subtract(give.value, centre, dtype=np.float64) * (allowed / distance)
        value = (centre + step).astype(give.value.dtype)
        return replace(give, value=value)


# --- attach guards to a gossiper ---------------------------------------------------------------------


def guard(
    gossiper: Gossiper,
    guards: Guards,
    comparable: Callable[[str], bool] = lambda _model: True,
    *,
    weight_to_come: int = 0,
) -> None:
    """Let `guards` decide which transfers `gossiper` credits. Call it again after a restore.

    comparable: whether honest peers have similar values of a model. weight_to_come: the weight that the peer
    will inject, with which weights are compared while its own does not count yet.
    """

    def admit(give: Give) -> Give | str:
        injected = gossiper.injected(give.model)
        reference = injected or gossiper.promised(give.model) or weight_to_come
        own, weight = gossiper.value(give.model), gossiper.weight(give.model)
        return guards.inspect(give, own, weight, reference, comparable=comparable(give.model))

    gossiper.admit = admit


# --- newcomers ---------------------------------------------------------------------------------------

MAX_ELDERS: Final = 5
"""The most elders (peers that already count in the average) whose values enter a newcomer's estimate. With
more, it tolerates more hostile ones (fewer than half); each costs the memory of a whole value."""
WAIT: Final = 30.0
"""Seconds after the first value for which a newcomer waits for other elders. Raise it if rounds take longer:
elders send a value only after they have trained."""
_MEDIAN_BLOCK: Final = 1 << 20
"""Coordinates of which the median is computed at a time."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A newcomer's initial value of a partial model, and the transfers from which it was computed."""

    value: Array
    gives: tuple[Give, ...]


@dataclass(slots=True)
class _HeldTransfers:
    since: float
    """When the first of them arrived."""
    gives: dict[str, Give]
    """The newest transfer of every elder, by its id."""


class InitialEstimate:
    """A newcomer's initial values: for each partial model the median of several elders' values.

    A newcomer's own values are untrained. Compared with them, the value of a trained elder looks like an
    attack; and if the newcomer simply adopted the first value that arrives, a hostile sender could choose it.
    So a newcomer holds the first transfers back, unacknowledged, until they come from enough elders or a
    timeout is over. From then on its own value is their coordinate-wise median, which lies between the values
    of honest elders if more than half are honest. Then the transfers are handled, and guards compare them
    with this value.

        initial = InitialEstimate({"global": 7850})
        if initial.hold(give, now): …                          # do not handle the transfer yet
        estimate = initial.estimate("global", elders=5, now)   # None while more transfers should arrive
        write estimate.value, start to count with it, and handle estimate.gives

    sizes: the number of coordinates of each partial model. max_elders: transfers of that many are enough.
    wait: seconds to wait for them after the first.
    """

    def __init__(
        self, sizes: Mapping[str, int], *, max_elders: int = MAX_ELDERS, wait: float = WAIT
    ) -> None:
        if max_elders < 1 or not wait >= 0:
            raise ValueError(
                f"initial estimate: max_elders is {max_elders} and wait {wait}: at least 1 and 0"
            )
        self._sizes, self._max_elders, self._wait = dict(sizes), max_elders, wait
        self._held: dict[str, _HeldTransfers] = {}

    @property
    def pending(self) -> list[str]:
        """The partial models that have no estimate yet."""
        return sorted(self._sizes)

    def hold(self, give: Give, now: float) -> bool:
        """Return True if a transfer must not be handled yet, because its model has no estimate.

        Unusable transfers (of another length, or not finite) are not held: the guards refuse them.
        """
        size = self._sizes.get(give.model)
        if size is None or give.value.shape != (size,) or not is_finite(give.value):
            return False
        held = self._held.setdefault(give.model, _HeldTransfers(now, {}))
        elder = id_of(give.sender)
        if elder in held.gives or len(held.gives) < self._max_elders:
            held.gives[elder] = give  # further elders' are dropped: their senders repeat them
        return True

    def estimate(self, model: str, elders: int, now: float) -> Estimate | None:
        """Return the estimate of a partial model once enough elders have sent a value, or the wait is over.

        elders: how many neighbours count in the model, because no more can send a value. Return None while
        more values should arrive, and for a model of which none has arrived.
        """
        held = self._held.get(model)
        if held is None:
            return None
        if len(held.gives) < min(self._max_elders, elders) and now - held.since < self._wait:
            return None
        gives = tuple(held.gives.values())
        del self._held[model], self._sizes[model]
        return Estimate(_median([give.value for give in gives]), gives)

    def drop(self, model: str) -> tuple[Give, ...]:
        """Give up the estimate of a partial model; return the transfers that were held back for it."""
        self._sizes.pop(model, None)
        held = self._held.pop(model, None)
        return () if held is None else tuple(held.gives.values())


def _median(values: list[Array]) -> Array:
    """Return the coordinate-wise median, block by block: stacking whole models would double the memory."""
    median = np.empty_like(values[0])
    for start in range(0, median.size, _MEDIAN_BLOCK):
        block = slice(start, start + _MEDIAN_BLOCK)
        median[block] = np.median([value[block] for value in values], axis=0)
    return median
