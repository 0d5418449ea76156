"""How long to wait for the answer to a transfer, by the delays seen so far and by its size."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from math import inf

MAX_FAILED_RECALLS = 6
"""Failed recalls in a row after which the wait for the next grows no longer."""
LARGE_VALUE_BYTES = 1 << 20
"""Size from which on a value's transfer time is governed by its size."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When to repeat an unacknowledged transfer, and when to ask for it back.

    Waiting times follow the acknowledgement delays that were seen, not fixed constants.
    """

    first: float = 1.0
    """Delay in seconds assumed before any was seen. Raise it on slow links to avoid a burst of
    repeats at the start; lower it for simulations."""
    rate: float = 40e6
    """Bytes per second at which a large value is assumed to travel before any of its size was
    answered. Lower it on slow links, for the same reason."""
    resend_quantile: float = 0.95
    """Quantile of delays on which repeating is based. Lower it if messages are lost often and
    bandwidth is plentiful."""
    resend_factor: float = 1.5
    """Repeat after this many times that quantile. Raise it if `counters["repeat"]` is large
    although little is lost."""
    backoff: float = 2.0
    """Each repeat of one transfer waits this many times longer than the one before."""
    recall_quantile: float = 0.99
    """Quantile of delays on which recalling is based."""
    recall_factor: float = 20.0
    """Ask for the mass back after this many times that quantile. Raise it if neighbours pause for
    long and the recalls are answered "credited" anyway; lower it if mass is locked up by peers that
    vanish."""
    recall_longest: float = inf
    """Ask for the mass back after this many seconds at the latest. Lower it where neighbours are known to
    stall: what they have credited by then is not counted twice, for they say so."""
    shortest: float = 0.02
    """Never repeat faster than this, in seconds."""
    longest: float = 30.0
    """Never wait longer than this between two repeats, in seconds."""
    remembered: int = 256
    """How many delays are remembered. Lower it to follow changing links faster."""


class Delays:
    """The acknowledgement delays seen lately, and the timeouts that follow from them.

    size: bytes of the values that were sent.
    """

    def __init__(self, retry: RetryPolicy, size: int = 0) -> None:
        self._policy = retry
        self._first = retry.first + (size / retry.rate if size >= LARGE_VALUE_BYTES else 0.0)
        self._failed_recalls = 0
        """Recalls in a row that found their transfer not arrived."""
        self._seen: deque[float] = deque()
        self._sorted: list[float] = []
        self._scale = 1.0

    def acknowledged(self, delay: float, attempts: int) -> None:
        """Learn from an acknowledgement that came `delay` after the transfer was first sent.

        After a repeat nobody knows which copy was answered, so such a delay is not learnt; instead
        the backed-off wait stays in force until a transfer is answered at its first attempt.
        """
        if attempts == 1:
            self._remember(max(0.0, delay))
            self._scale = 1.0
        else:
            self._scale = max(self._scale, self._policy.backoff ** (attempts - 1))

    def recalled(self, arrived: bool) -> None:
        """Learn from the answer to a recall whether the transfer had arrived, or was asked back too early.

        Without this, a transfer that takes longer than its timeout would be recalled for ever.
        """
        self._failed_recalls = 0 if arrived else min(self._failed_recalls + 1, MAX_FAILED_RECALLS)

    def ack_timeout(self, attempts: int) -> float:
        """Return how long to wait for an answer to the latest of `attempts` copies before repeating it."""
        p = self._policy
        base = p.resend_factor * self._quantile(p.resend_quantile)
        scale = max(self._scale, p.backoff ** min(max(attempts - 1, 0), 64))
        return min(max(base, p.shortest) * scale, p.longest)

    def transfer_timeout(self) -> float:
        """Return the age at which an open transfer is recalled."""
        age = self.silence_timeout() * self._policy.backoff**self._failed_recalls
        return min(age, self._policy.recall_longest)

    def silence_timeout(self) -> float:
        """Return the age at which nobody should wait for the answer to an open transfer any longer."""
        p = self._policy
        return p.recall_factor * max(self._quantile(p.recall_quantile), p.shortest)

    def _remember(self, delay: float) -> None:
        self._seen.append(delay)
        insort(self._sorted, delay)
        if len(self._seen) > self._policy.remembered:
            del self._sorted[bisect_left(self._sorted, self._seen.popleft())]

    def _quantile(self, q: float) -> float:
        """Return the quantile, interpolated; asked for at every tick, so the delays are kept in order."""
        if not self._sorted:
            return self._first
        place = q * (len(self._sorted) - 1)
        low = int(place)
        high = min(low + 1, len(self._sorted) - 1)
        return self._sorted[low] + (place - low) * (self._sorted[high] - self._sorted[low])


class DelaysBySize:
    """Delays by the size of the values sent: what is slow for a small one is not for a large one.

    All small values share one `Delays`; large ones share it if they differ by less than a factor of two.
    """

    def __init__(self, retry: RetryPolicy) -> None:
        self._policy = retry
        self._classes: dict[int, Delays] = {}

    def of(self, size: int) -> Delays:
        """Return the delays of values of so many bytes."""
        at = (size // LARGE_VALUE_BYTES).bit_length()
        if at not in self._classes:
            self._classes[at] = Delays(self._policy, size)
        return self._classes[at]
