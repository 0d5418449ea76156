"""Guards on values: what a genuine sender may do to us, however wrong or hostile it is. No IO.

A guard looks at every transfer before it is credited. What is refused is answered "void", like any
transfer that a receiver cannot take: the sender's books stay right and it takes its mass back. What is
clipped is credited at the clipped value, so the swarm's sum changes by the part cut off; that is the
price, and `clipped` counts it. A sender that is refused again and again is put in quarantine: refused
unseen, until its time is over or somebody reinstates it. It stays a neighbour and is given its share: one
that was put there wrongly would else be cut off, and a peer all of whose neighbours are in quarantine would
take itself to be alone.

Guards bound what one sender can do with one message. They do not find a member who lies within the
bounds: see SECURITY.md. `guard` puts them between a gossiper and its books; `FirstOpinion` gives a newcomer
values to judge others by.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np

from ..gossiper import Gossiper
from ..pushsum import Array, is_finite
from ..wire import Give
from .identity import id_of

_log = logging.getLogger(__name__)

MAX_SENDERS: Final = 4096


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """The bounds. Norms are Euclidean and relative to the receiver's own value of the same vector."""

    distance: float = 0.5
    """How far from our value another may be, in lengths of ours. Sixteen peers that start equal stay
    below 0.25; raise it to 2 or more if peers start from values of their own."""
    outlier: float | None = 3.0
    """How much farther from us than the median sender another may be, once we have heard from
    `senders`. Follows the swarm as it comes together, where `distance` is only a ceiling. Raise it if
    honest peers with unusual data are refused; None turns it off."""
    senders: int = 5
    """How many senders it takes to know what is usual. Fewer than half of them may be hostile."""
    norm: float = 4.0
    """How much longer than ours another value may be. Binds before we have weight of our own."""
    beyond: Literal["refuse", "clip"] = "refuse"
    """What to do with a value beyond the bounds. Clip if honest peers are far apart for long: their pull
    then counts, shortened; a hostile one's does too."""
    floor: float = 1e-3
    """A value of ours shorter than this per coordinate (root mean square) is taken to be this long, or
    nothing could ever join a vector of zeros."""
    weight: float = 16.0
    """The most weight that one transfer may carry, in peers' worth of ours. Raise it if peers count by
    very different numbers of samples."""
    rate: float = 50.0
    """Messages per second that a sender may keep up. A message counts once if it takes up to 64 packets,
    and once for every 64 if it takes more. Raise it for very short rounds."""
    burst: float = 200.0
    """Messages that it may send at once."""
    strikes: int = 5
    """Refused transfers, less those credited in between, that lead to quarantine."""
    quarantine: float = 600.0
    """Seconds that it lasts."""

    def __post_init__(self) -> None:
        for name in ("distance", "norm", "floor", "weight", "rate", "burst", "quarantine"):
            if not getattr(self, name) > 0:
                raise ValueError(f"guards: {name} is {getattr(self, name)}, must be above 0")
        if self.outlier is not None and not self.outlier > 1:
            raise ValueError(f"guards: outlier is {self.outlier}, must be above 1")
        if self.strikes < 1 or self.senders < 3:
            raise ValueError(
                f"guards: strikes is {self.strikes} and senders {self.senders}: at least 1 and 3"
            )


@dataclass(slots=True)
class _Record:
    """What is remembered of one sender."""

    tokens: float
    filled: float
    strikes: int = 0
    released: float | None = None
    """When its quarantine ends."""


class Guards:
    """The guards of one peer. `counters` counts what was refused or clipped, by cause."""

    def __init__(self, settings: GuardSettings | None = None) -> None:
        self.settings = settings or GuardSettings()
        self.counters: Counter[str] = Counter()
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._distances: dict[str, OrderedDict[str, float]] = {}
        """Per vector: how far each sender's last value was, in lengths of ours. Senders are remembered by
        the id in their name, so that another label washes nothing."""

    @property
    def remembered(self) -> int:
        """How many senders are remembered."""
        return len(self._records)

    # --- messages -------------------------------------------------------------------------------

    def allow(self, sender: str, now: float, share: float = 1.0) -> bool:
        """Whether one more packet of this sender may be looked at; if not, drop it unanswered.

        share: the part of a message that the packet is. Ask after it was opened and before it is
        decoded. Its sender repeats what was dropped.
        """
        record = self._record(sender, now)
        limits = self.settings
        gained = max(0.0, now - record.filled) * limits.rate
        record.tokens, record.filled = min(limits.burst, record.tokens + gained), now
        if record.tokens < share:
            self.counters["rate"] += 1
            return False
        record.tokens -= share
        return True

    def inspect(
        self,
        give: Give,
        own: Array,
        held: int,
        worth: int,
        now: float,
        *,
        counting: bool = True,
    ) -> Give | str:
        """The transfer as it may be credited, perhaps clipped; or the cause for which it is refused.

        own, held: the receiver's value and weight. worth: what it counts in the average (its injected
        weight), by which others' weights are judged. counting: whether the receiver counts in the average
        by now; before, what it refuses is no strike against the sender, for its values prove nothing.
        """
        if self.is_quarantined(give.sender, now):
            self.counters["quarantined"] += 1
            return "quarantined"
        verdict = self._judge(give, own, held, worth)
        record = self._record(give.sender, now)
        if isinstance(verdict, Give):
            record.strikes = max(0, record.strikes - 1)
            return verdict
        self.counters[verdict] += 1
        if not counting:
            return verdict
        record.strikes += 1
        if record.strikes >= self.settings.strikes:
            self._quarantine(give, verdict, record, now)
        return verdict

    def _judge(self, give: Give, own: Array, held: int, worth: int) -> Give | str:
        limits = self.settings
        if give.value.shape != own.shape:
            return "wrong-length"
        if not np.isfinite(give.value).all():
            return "not-finite"
        if not 0 < give.weight <= limits.weight * max(worth, 1):
            return "weight"
        length = max(_norm(own), limits.floor * np.sqrt(own.size))
        norm = _norm(give.value)
        if not norm <= limits.norm * length:
            return self._clip(give, np.zeros_like(own), limits.norm * length, norm, "norm")
        if held == 0:
            return give  # a newcomer has no opinion to be far from
        with np.errstate(over="ignore", invalid="ignore"):
            distance = _norm(np.subtract(give.value, own, dtype=np.result_type(own, np.float32)))
        allowed = self._allowed(give, distance / length) * length
        if not distance <= allowed:
            return self._clip(give, own, allowed, distance, "distance")
        return give

    def _allowed(self, give: Give, distance: float) -> float:
        """How far this value may be from ours, in lengths of ours, given how far others are."""
        limits, known = self.settings, self._distances.setdefault(give.model, OrderedDict())
        sender = id_of(give.sender)
        known[sender] = distance
        known.move_to_end(sender)
        if len(known) > MAX_SENDERS:
            known.popitem(last=False)
        if limits.outlier is None or len(known) < limits.senders:
            return limits.distance
        usual = max(float(np.median(list(known.values()))), limits.floor)
        return min(limits.distance, limits.outlier * usual)

    def _clip(
        self, give: Give, centre: Array, allowed: float, found: float, cause: str
    ) -> Give | str:
        if self.settings.beyond == "refuse" or not np.isfinite(found):
            return cause
        self.counters[f"clipped-{cause}"] += 1
        step = np.subtract(give.value, centre, dtype=np.float64) * (allowed / found)
        value = (centre + step).astype(give.value.dtype)
        return replace(give, value=value)

    # --- quarantine -----------------------------------------------------------------------------

    def is_quarantined(self, sender: str, now: float) -> bool:
        """Whether a sender is refused unseen; its time may be over just now."""
        record = self._records.get(id_of(sender))
        if record is None or record.released is None:
            return False
        if now < record.released:
            return True
        self.reinstate(sender, "its time is over")
        return False

    def quarantined(self, now: float) -> list[str]:
        """The senders in quarantine, by the id in their name."""
        return [sender for sender in list(self._records) if self.is_quarantined(sender, now)]

    def reinstate(self, sender: str, why: str = "it was asked for") -> bool:
        """Let a sender in again, on one strike less than would put it back; False if it was not out."""
        record = self._records.get(id_of(sender))
        if record is None or record.released is None:
            return False
        record.released, record.strikes = None, self.settings.strikes - 1
        _log.warning("peer %s is reinstated: %s", sender, why)
        return True

    def _quarantine(self, give: Give, cause: str, record: _Record, now: float) -> None:
        record.released = now + self.settings.quarantine
        for known in self._distances.values():
            known.pop(id_of(give.sender), None)  # it is no measure of what is usual
        _log.warning(
            "peer %s is in quarantine for %g s: %d transfers refused, the last (%s) for its %s",
            give.sender, self.settings.quarantine, record.strikes, give.model, cause,
        )  # fmt: skip

    def _record(self, sender: str, now: float) -> _Record:
        sender = id_of(sender)
        record = self._records.get(sender)
        if record is None:
            record = self._records[sender] = _Record(self.settings.burst, now)
            if len(self._records) > MAX_SENDERS:
                self._records.popitem(last=False)
        return record

    def snapshot(self, now: float) -> dict[str, Any]:
        """Who is in quarantine for how much longer: a restart does not let anybody out."""
        return {
            sender: record.released - now
            for sender, record in self._records.items()
            if record.released is not None and record.released > now
        }

    def restore(self, data: dict[str, Any], now: float) -> None:
        """Take over the quarantines of a former start of the peer."""
        for sender, seconds in data.items():
            self._record(sender, now).released = now + float(seconds)


def _norm(value: Array) -> float:
    """The Euclidean length; infinite, without a warning, if it does not fit."""
    flat = value if value.dtype == np.float64 else value.astype(np.float32, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.sqrt(np.dot(flat, flat)))


# --- guards at work ----------------------------------------------------------------------------------


def guard(gossiper: Gossiper, guards: Guards, clock: Callable[[], float]) -> None:
    """Let `guards` decide what `gossiper` credits, from now on. Call it once, after a restore too.

    clock: the one whose time is handed to the gossiper's `tick`.
    """

    def admit(give: Give) -> Give | str:
        injected = gossiper.injected(give.model)
        worth = injected or gossiper.promised(give.model)
        own, held = gossiper.value(give.model), gossiper.weight(give.model)
        return guards.inspect(give, own, held, worth, clock(), counting=bool(injected))

    gossiper.admit = admit


# --- newcomers ---------------------------------------------------------------------------------------

ENOUGH: Final = 5
"""Elders whose values make an opinion. More bear more liars (fewer than half), and cost memory: each is a
whole value."""
WAIT: Final = 30.0
"""Seconds after the first value for which the other elders are waited for. Raise it if rounds take longer:
elders give when they have trained."""
_COLUMNS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Formed:
    """An opinion, and the transfers that were held back for it."""

    value: Array
    gives: tuple[Give, ...]


@dataclass(slots=True)
class _Heard:
    since: float
    gives: dict[str, Give]
    """The newest transfer of every elder, by its id."""


class FirstOpinion:
    """The first opinion of a newcomer: the median of what several elders hold, formed before it judges any.

    A newcomer's own values are untrained. Judged by them, a trained elder looks like an attacker, and the
    first value that comes in would be followed whoever sent it. So a newcomer holds the first transfers back,
    as if they were still under way, until enough elders were heard or a wait is over. The coordinate-wise
    median of their values is its own value from then on: fewer than half of the elders cannot move it beyond
    the others'. Then the transfers are handed on, and guards judge them by it.

        opinion = FirstOpinion({"global": 7850})
        if opinion.hold(give, now): …                    # do not handle it yet: its sender is not answered
        formed = opinion.form("global", elders=5, now)   # None while there is something to wait for
        write formed.value, count at it, and handle formed.gives

    sizes: the length of each of them.
    """

    def __init__(
        self, sizes: Mapping[str, int], *, enough: int = ENOUGH, wait: float = WAIT
    ) -> None:
        if enough < 1 or not wait >= 0:
            raise ValueError(f"first opinion: enough is {enough} and wait {wait}: at least 1 and 0")
        self._sizes, self._enough, self._wait = dict(sizes), enough, wait
        self._heard: dict[str, _Heard] = {}

    @property
    def open(self) -> list[str]:
        """The partial models of which no opinion was formed yet."""
        return sorted(self._sizes)

    def hold(self, give: Give, now: float) -> bool:
        """Whether a transfer must not be handled yet, because the opinion it belongs to is not formed.

        Transfers that can be no opinion (of another length, not finite) are for the guards to refuse.
        """
        size = self._sizes.get(give.model)
        if size is None or give.value.shape != (size,) or not is_finite(give.value):
            return False
        heard = self._heard.setdefault(give.model, _Heard(now, {}))
        elder = id_of(give.sender)
        if elder in heard.gives or len(heard.gives) < self._enough:
            heard.gives[elder] = (
                give  # of others nothing is kept: they repeat it until it is answered
            )
        return True

    def form(self, model: str, elders: int, now: float) -> Formed | None:
        """Return the opinion of a partial model if enough elders were heard, or the wait is over.

        elders: how many neighbours count in it, so that nobody waits for more than there are. None while
        there is something to wait for, and for a model of which nobody has been heard.
        """
        heard = self._heard.get(model)
        if heard is None:
            return None
        if len(heard.gives) < min(self._enough, elders) and now - heard.since < self._wait:
            return None
        gives = tuple(heard.gives.values())
        del self._heard[model], self._sizes[model]
        return Formed(_median([give.value for give in gives]), gives)

    def drop(self, model: str) -> tuple[Give, ...]:
        """Form no opinion of a partial model; returns the transfers that were held back for it."""
        self._sizes.pop(model, None)
        heard = self._heard.pop(model, None)
        return () if heard is None else tuple(heard.gives.values())


def _median(values: list[Array]) -> Array:
    """The coordinate-wise median, in pieces: a stack of whole models would double their memory."""
    found = np.empty_like(values[0])
    for start in range(0, found.size, _COLUMNS):
        piece = slice(start, start + _COLUMNS)
        found[piece] = np.median([value[piece] for value in values], axis=0)
    return found
