"""How a peer's own weight comes to count, for each partial model by itself.

A partial model is waiting until the peer's weight counts in it. The peer decides from what others publish:

- somebody who counts was heard live: wait for the first value, and add the own weight at that value;
- nobody who counts is known: found the model at the peer's own values. With equal starts all who wait do so
  at once; else the one that came first does, and the others then hear from it, or do so themselves if it
  takes too long. So nobody waits for ever for somebody who waits.

Nobody founds before it was silent for a while (`settings.silence`), because the broker or the others may
just be restarting; unless everybody who is expected is there, or the settings say so (`founder`).

A peer whose network was trained before keeps it: it stages what it hears beside the network until every
model was heard or may be founded, has its cells put into the neighbours' order, and adds its weight at its
own values. The sum of all mass is then what it was, plus the newcomer's weight times its values.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors import SafetensorError

from ..gossip import Array, Give, Gossiper, Mass, absorb
from ..gossip.security import Guards
from ..models import Learner, ModelError, SlicedNetwork
from .presence import Event, Gone, Offline, Online
from .settings import Settings
from .store import MatchedStore

_log = logging.getLogger(__name__)

WARN_AFTER = 10.0
"""Seconds after which a partial model in which nobody is known to count is worth a warning."""


FIRST_FOUNDER = 1.5
"""After so many times `silence` a peer founds a model, whatever the broker has stored of others: they may
have died while it was down, and their statuses say that they are online for as long as their lease lasts.
Whoever lives and counts answers a peer that waits with a new status."""


class Others:
    """What presence said of the other peers, as one peer's worker thread knows it."""

    def __init__(self) -> None:
        self.known: dict[str, Online] = {}
        self._offline: set[str] = set()

    def apply(self, event: Event) -> None:
        """Take in an event."""
        match event:
            case Online():
                self.known[event.peer] = event
                self._offline.discard(event.peer)
            case Offline():
                self._offline.add(event.peer)
            case Gone():
                if event.peer in self.known and self.known[event.peer].session == event.session:
                    del self.known[event.peer]
                    self._offline.discard(event.peer)

    def clear(self) -> None:
        """Forget everybody."""
        self.known.clear()
        self._offline.clear()

    def online(self, model: str) -> list[Online]:
        """Return the peers that are online, stay, and may push this model to us."""
        return [
            other
            for peer, other in self.known.items()
            if peer not in self._offline and model in other.heard and not other.leaving
        ]


class Bootstrap:
    """What a peer still waits for before its weight counts.

    weight: what the peer counts.
    """

    def __init__(
        self, name: str, settings: Settings, store: MatchedStore, learner: Learner, weight: int
    ):
        self._name, self._settings = name, settings
        self._store, self._learner, self._weight = store, learner, weight
        self.waiting: set[str] = set()
        """Partial models in which the peer's own weight does not count yet."""
        self._begun = self._complete = False
        self._began = self._since = 0.0
        self._quiet_since: dict[str, float] = {}
        """Per partial model: since when nobody who counts in it is online."""
        self._starts: dict[str, str] = {}
        self._warned: set[str] = set()
        if settings.trained:
            store.keep_apart()  # from the first moment: others give as soon as they see a new name

    def open(self, gossiper: Gossiper, since: float) -> dict[str, str]:
        """Begin a session; returns digests of the values that it starts from, for the card."""
        self._since = since
        self._starts = {v: digest(self._store.read(v)) for v in gossiper.models}
        self.waiting = {v for v in gossiper.models if not gossiper.injected(v)}
        self._begun = self._complete = False
        self._quiet_since.clear()
        self._warned.clear()
        return dict(self._starts)

    def begin(self, gossiper: Gossiper, now: float, *, found: bool, complete: bool) -> None:
        """Start deciding: everybody who was expected is there (`complete`), or nobody in particular was.

        found: let the peer's weight count at once, at its own values.
        """
        self._begun, self._complete, self._began = True, complete, now
        self._quiet_since = dict.fromkeys(self._starts, now) | self._quiet_since
        # A network of its own is matched first, if somebody was quicker and gave it something to match.
        if found and not (self._store.apart and any(map(gossiper.weight, self.waiting))):
            self._count(gossiper, lambda _: True)

    def restart_silence(self, now: float) -> None:
        """Wait for the others anew: the connection was lost, and they may be coming back too."""
        self._began = now
        self._quiet_since = dict.fromkeys(self._starts, now)

    def look(self, gossiper: Gossiper, others: Others, now: float) -> None:
        """Decide what can be decided; called in every turn."""
        for model in self.waiting:
            if any(model in other.counts and other.heard_live for other in others.online(model)):
                self._quiet_since[model] = now
        if not self._begun or not self.waiting:
            return
        self._count(gossiper, lambda model: self._may_found(model, others, now))
        for model in sorted(self.waiting - self._warned):
            if now - self._began >= WARN_AFTER:
                self._warned.add(model)
                count = sum(model in other.counts for other in others.known.values())
                _log.warning(
                    "peer %s: its weight does not count in model %s after %.0f s; counts: %d of %d others",
                    self._name, model, now - self._began, count, len(others.online(model)),
                )  # fmt: skip

    def _may_found(self, model: str, others: Others, now: float) -> bool:
        """Return whether to count at the peer's own values, because nobody known does."""
        quiet = now - self._quiet_since[model]
        if quiet >= FIRST_FOUNDER * self._settings.silence:
            return True
        online = others.online(model)
        if any(model in other.counts for other in online):
            return False
        silent = quiet >= self._settings.silence
        if not silent and (self._settings.founder is False or not self._complete):
            return False
        start, me = self._starts[model], (self._since, self._name)
        return all(other.starts.get(model) == start for other in online) or all(
            me < (other.since, other.peer) for other in online
        )

    def _count(self, gossiper: Gossiper, may_found: Callable[[str], bool]) -> None:
        """Let the own weight count where a value was heard, or where the model may be founded."""
        ready = {m for m in self.waiting if gossiper.weight(m) or may_found(m)}
        if self._store.apart:
            if self.waiting and ready == self.waiting:
                self._bring_in(gossiper)
            return
        for model in sorted(ready):
            founded = not gossiper.weight(model)
            self.count(gossiper, model)
            if founded and gossiper.neighbours(model):
                _log.info("peer %s founds model %s at its own values", self._name, model)

    def count_everywhere(self, gossiper: Gossiper) -> None:
        """Stop waiting: let the own weight count in all models, at the peer's own values if need be."""
        self._count(gossiper, lambda _: True)

    def count(self, gossiper: Gossiper, model: str) -> None:
        """Let the own weight count at the value that the model has now."""
        gossiper.inject(model, self._weight)
        self.waiting.discard(model)

    def renew(self) -> None:
        """Prepare for a new session. A peer that counted before brings nothing new along."""
        self.waiting.clear()
        if self._store.apart:
            self._store.keep_apart()  # what it heard counts no more

    def _bring_in(self, gossiper: Gossiper) -> None:
        waiting = sorted(self.waiting)
        heard = {v: Mass(self._store.read(v), gossiper.weight(v)) for v in waiting}
        moved = self._store.put_in_order(self._learner)
        for model in waiting:
            own = Mass(self._store.read(model), self._weight)
            if heard[model].weight:
                self._store.write(model, absorb(heard[model], own).value)
            gossiper.inject(model, self._weight)
        self.waiting.clear()
        _log.info("peer %s brings in its own network; %d cells took new places", self._name, moved)


class PeerGuards(Guards):
    """Guards of a peer that may count for nothing yet: it judges weights by what it will count.

    weight: what that is.
    """

    weight: int = 0

    def inspect(
        self, give: Give, own: Array, held: int, worth: int, now: float, *, counting: bool = True
    ) -> Give | str:
        """See Guards."""
        return super().inspect(give, own, held, worth or self.weight, now, counting=counting)


def digest(value: Array) -> str:
    """Return a short digest of a vector's values, equal on two peers exactly if the values are."""
    data = np.ascontiguousarray(value)
    return hashlib.blake2b(
        data.tobytes(), digest_size=8, person=str(data.dtype).encode()
    ).hexdigest()


def load_trained(network: SlicedNetwork, path: Path) -> None:
    """Give a network the values of one that was trained before; ModelError says what is wrong."""
    if not path.is_file():
        raise ModelError(f"{path}: there is no such file; it should hold the network to start from")
    try:
        network.load(path)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: cannot be read as a network (safetensors): {error}") from None
