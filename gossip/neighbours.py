"""Who a peer may push to: each neighbour's session, whether it can be reached, how long its answers take."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any


@dataclass(frozen=True, slots=True)
class Neighbour:
    """What presence says of one neighbour; `models` are those that may be pushed to it.

    leaving: it hands over its own mass and takes nothing any more.
    """

    session: str
    models: frozenset[str]
    online: bool = True
    leaving: bool = False


class Neighbours:
    """The neighbours known now, and the sessions that are gone for good."""

    def __init__(self) -> None:
        self._known: dict[str, Neighbour] = {}
        self._lists: dict[tuple[str, bool], list[str]] = {}
        """What `sharing` returned, until a neighbour comes or goes: it is asked at every turn."""
        self.gone: set[tuple[str, str]] = set()
        self.left: set[tuple[str, str]] = set()
        """Those of them that said goodbye; the others were given up, and may live after all."""
        self.returned: set[tuple[str, str]] = set()
        """Those of them that were online again, although they were given up."""
        self.muted: set[str] = set()
        """Neighbours to which nothing is pushed for now."""

    def get(self, peer: str) -> Neighbour | None:
        """Return what is known of a peer."""
        return self._known.get(peer)

    def online(
        self, peer: str, session: str, models: Iterable[str], *, leaving: bool = False
    ) -> None:
        """Note a neighbour that is online."""
        self._lists.clear()
        self._known[peer] = Neighbour(session, frozenset(models), leaving=leaving)

    def offline(self, peer: str) -> None:
        """Note that a neighbour, if it is known, cannot be reached for now."""
        if peer in self._known:
            self._lists.clear()
            self._known[peer] = replace(self._known[peer], online=False)

    def retire(self, peer: str, session: str, *, left: bool) -> None:
        """Note that a session will never come back; left: it said so itself."""
        self._lists.clear()
        self.gone.add((peer, session))
        if left:
            self.left.add((peer, session))
        known = self._known.get(peer)
        if known is not None and known.session == session:
            del self._known[peer]

    def sessions(self) -> dict[str, str]:
        """Return the session of every neighbour."""
        return {peer: known.session for peer, known in self._known.items()}

    def snapshot(self) -> dict[str, Any]:
        """Return the neighbours and the sessions that are gone as plain rows."""
        return {
            "gone": sorted(map(list, self.gone)),
            "left": sorted(map(list, self.left)),
            "neighbours": [[peer, n.session, sorted(n.models)] for peer, n in self._known.items()],
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over the rows of a snapshot; whether neighbours are online must be heard again."""
        self._lists.clear()
        self.gone = {(peer, session) for peer, session in data["gone"]}
        self.left = {(peer, session) for peer, session in data["left"]}
        for peer, session, models in data.get("neighbours", []):
            self._known[peer] = Neighbour(session, frozenset(models), online=False)

    def reachable(self, peer: str) -> bool:
        """Return whether it makes sense to send: unknown peers are given the benefit of the doubt."""
        known = self._known.get(peer)
        return known is None or known.online

    def sharing(self, model: str, *, online_only: bool = False) -> list[str]:
        """Return the neighbours that a model may be pushed to, sorted by name."""
        at = model, online_only
        if at not in self._lists:
            self._lists[at] = sorted(
                peer
                for peer, known in self._known.items()
                if model in known.models and (known.online or not online_only)
            )
        return list(self._lists[at])

    def shares(self, peer: str, model: str) -> bool:
        """Return whether a model may be pushed to a peer, online or not."""
        return peer in self._known and model in self._known[peer].models

    def staying(self, model: str) -> list[str]:
        """Return those of them that are not about to leave themselves."""
        return [peer for peer in self.sharing(model) if not self._known[peer].leaving]


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
