"""How a peer's own weight comes to count: at once, after hearing, or with what it brings along.

A founder's weight counts at once. A newcomer takes over the first values that it hears, and adds its
weight at those. A newcomer whose network was trained before keeps it: it hears of every model, has its
cells put into the neighbours' order, and adds its weight at its own values. The sum of all mass is then
what it was, plus the newcomer's weight times its values; nothing that anybody was given is lost.
"""

from __future__ import annotations

import logging
from pathlib import Path

from safetensors import SafetensorError

from ..gossip.gossiper import Gossiper
from ..gossip.messages import Give
from ..gossip.pushsum import Array, Mass, absorb
from ..gossip.trust import Guards
from ..models import Learner, ModelError, SlicedNetwork
from .errors import PeerError
from .matched_store import MatchedStore
from .settings import Settings

_log = logging.getLogger(__name__)


class Arrival:
    """What a peer still waits for before its weight counts. PeerError if settings contradict it."""

    def __init__(
        self, name: str, settings: Settings, store: MatchedStore, learner: Learner, weight: int
    ):
        _check(name, settings)
        self._name = name
        self._store, self._learner, self._weight = store, learner, weight
        self._waiting: set[str] = set()
        if settings.trained:
            store.keep_apart()  # from the first moment: others give as soon as they see a new name

    def begin(self, gossiper: Gossiper, newcomer: bool) -> None:
        """Let the peer's weight count now, or once a neighbour was heard."""
        new = {v for v in gossiper.vectors if not gossiper.account(v).injected} - self._waiting
        if self._store.apart:
            self._waiting |= new
            if not newcomer and not any(gossiper.weight(v) for v in new):
                self._bring_in(gossiper)  # else it founds nothing: somebody was there before
            return
        for vector in sorted(new):
            gossiper.inject(vector, self._weight, after_hearing=newcomer)
        if newcomer:
            self._waiting |= new

    def look(self, gossiper: Gossiper) -> None:
        """Once in every turn: whoever has heard enough counts, and whom nobody can tell anything too."""
        if self._store.apart:
            heard = (gossiper.weight(v) or not gossiper.neighbours(v) for v in self._waiting)
            if self._waiting and all(heard):
                self._bring_in(gossiper)
            return
        for vector in sorted(self._waiting):
            if gossiper.weight(vector):
                self._waiting.discard(vector)
            elif not gossiper.neighbours(vector):
                self._waiting.discard(vector)
                gossiper.inject(vector, self._weight)

    def renew(self) -> None:
        """Return as a newcomer. Who counted before brings nothing new along, and is in order."""
        self._waiting.clear()
        if self._store.apart:
            self._store.keep_apart()  # what it heard counts no more

    def snapshot(self) -> list[str]:
        """The vectors for which it waits."""
        return sorted(self._waiting)

    def restore(self, waiting: list[str]) -> None:
        """Go on waiting."""
        self._waiting = set(waiting)

    def _bring_in(self, gossiper: Gossiper) -> None:
        waiting = sorted(self._waiting)
        heard = {v: Mass(self._store.read(v), gossiper.weight(v)) for v in waiting}
        moved = self._store.put_in_order(self._learner)
        for vector in waiting:
            own = Mass(self._store.read(vector), self._weight)
            if heard[vector].weight:
                self._store.write(vector, absorb(heard[vector], own).value)
            gossiper.inject(vector, self._weight)
        self._waiting.clear()
        _log.info("peer %s brings in its own network; %d cells took new places", self._name, moved)


class PeerGuards(Guards):
    """Guards of a peer that may count for nothing yet: it judges weights by what it will count.

    weight: what that is.
    """

    weight: int = 0

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
        """See Guards."""
        return super().inspect(give, own, held, worth or self.weight, now, counting=counting)


def _check(name: str, settings: Settings) -> None:
    if not settings.trained:
        return
    why = None
    if settings.dp is not None:
        why = "what it brings would leave it without noise; leave out dp, or start untrained"
    elif settings.matching and settings.mode != "async":
        why = (
            "its cells are matched when it joins, and nobody joins midway in "
            f"{settings.mode} mode; use async mode"
        )
    if why is not None:
        raise PeerError(f"peer {name}: a network that was trained before: {why}")


def load_trained(network: SlicedNetwork, path: Path) -> None:
    """Give a network the values of one that was trained before; ModelError says what is wrong."""
    if not path.is_file():
        raise ModelError(f"{path}: there is no such file; it should hold the network to start from")
    try:
        network.load(path)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: cannot be read as a network (safetensors): {error}") from None
