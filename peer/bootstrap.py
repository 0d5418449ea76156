"""Decides, for each partial model, when and with which values a peer's own weight begins to count.

A peer *counts* in a partial model once it has injected its own weight into the push-sum average; until then
the model is *waiting*. To inject a weight *at* a value adds weight × value to the sum.
The peer decides from the cards and statuses that other peers publish:

- If a peer that counts has published a status since we connected, wait for the first value from a neighbour,
  and inject this peer's weight at that value.
- If no such peer is known, *found* the model: inject this peer's weight at its own values. If all waiting
  peers start with equal values, all of them found at once. Otherwise the peer that came first founds; the
  others receive its values, or found by themselves if that takes too long. So no two peers wait for each
  other.

A peer founds only after it has not seen a counting peer for a while (`settings.silence`), because the broker
or the other peers may be restarting. It need not wait if all expected peers are online, or if the settings
make it a founder.

A peer whose network was trained before it joined keeps its values. It stages received values (keeps them
beside the network) until it has received or may found every model. Then it permutes its cells to match the
received values, and injects its weight at its own values.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError

from ..gossip import Array, Gossiper, Mass, absorb
from ..models import Learner, ModelError, SlicedNetwork
from .presence import Event, Offline, Online, SessionEnded
from .settings import Settings
from .store import MatchedStore
from .summary import Journal

_log = logging.getLogger(__name__)

WARN_AFTER = 10.0
"""Seconds after which a warning is logged about a partial model that is still waiting."""


FOUND_ANYWAY_AFTER = 1.5
"""Multiple of `silence` after which a peer founds a model even if retained statuses say that counting peers
are online: these peers may have died while the broker was down. A live peer that counts would have published
a new status in answer to ours."""


class OtherPeers:
    """What the engine knows of the other peers, from presence events.

    The engine runs in the worker thread, which must not read the roster: that belongs to the event loop.
    """

    def __init__(self) -> None:
        self.known: dict[str, Online] = {}
        """The last online event of every peer whose session has not ended."""
        self._offline: set[str] = set()

    def apply(self, event: Event) -> None:
        """Update from a presence event."""
        match event:
            case Online():
                self.known[event.peer] = event
                self._offline.discard(event.peer)
            case Offline():
                self._offline.add(event.peer)
            case SessionEnded():
                if event.peer in self.known and self.known[event.peer].session == event.session:
                    del self.known[event.peer]
                    self._offline.discard(event.peer)

    def online_now(self) -> dict[str, Online]:
        """Return what is known of all peers that are online and not leaving, by name."""
        return {
            peer: other
            for peer, other in self.known.items()
            if peer not in self._offline and not other.leaving
        }

    def clear(self) -> None:
        """Forget all peers."""
        self.known.clear()
        self._offline.clear()

    def online_senders(self, model: str) -> list[Online]:
        """Return the peers that are online, are not leaving, and may push this model to us."""
        return [
            other
            for peer, other in self.known.items()
            if peer not in self._offline
            and model in other.models_pushed_to_us
            and not other.leaving
        ]


class Bootstrap:
    """Makes one peer's weight count in its partial models, following the rules in the module docstring.

    weight: the weight to inject into each model.
    journal: for the events that a model is founded, or that the peer begins to count in it.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        store: MatchedStore,
        learner: Learner,
        weight: int,
        journal: Journal,
    ):
        self._name, self._settings, self._journal = name, settings, journal
        self._store, self._learner, self._weight = store, learner, weight
        self.waiting: set[str] = set()
        """Partial models in which the peer's own weight does not count yet."""
        self._is_deciding = False
        """Whether `start_deciding` was called in this session."""
        self._all_expected_online = False
        self._waiting_since = self._session_began = 0.0
        self._counting_last_seen: dict[str, float] = {}
        """Per partial model: when a live peer that counts in it was last seen online; if none was, when the
        wait began. An online peer is live if it has published a status since we connected."""
        self._start_digests: dict[str, str] = {}
        """Per partial model: the digest of the peer's starting values; peers compare them on their cards."""
        self._warned: set[str] = set()
        if settings.trained:
            store.start_staging()  # at once: other peers push as soon as they see a new name

    def begin_session(self, gossiper: Gossiper, session_began: float) -> dict[str, str]:
        """Begin a session; return the digests of its starting values, for the card.

        Until `start_deciding` is called, the peer only notes which peers count.
        """
        self._session_began = session_began
        self._start_digests = {m: digest(self._store.read(m)) for m in gossiper.models}
        self.waiting = {m for m in gossiper.models if not gossiper.injected(m)}
        self._is_deciding = self._all_expected_online = False
        self._counting_last_seen.clear()
        self._warned.clear()
        return dict(self._start_digests)

    def update_models(self, gossiper: Gossiper) -> None:
        """Take over the gossiper's models after they have changed; those without injected weight wait."""
        self._start_digests = {m: digest(self._store.read(m)) for m in gossiper.models}
        self.waiting = {m for m in gossiper.models if not gossiper.injected(m)}
        seen = self._counting_last_seen
        self._counting_last_seen = {m: seen.get(m, self._waiting_since) for m in gossiper.models}

    def start_deciding(
        self, gossiper: Gossiper, now: float, *, as_founder: bool, all_online: bool
    ) -> None:
        """Begin to decide in which models the peer's weight may count; from now on `update` injects it.

        as_founder: whether to inject the peer's weight at once, at its own values.
        all_online: whether the settings name expected peers, and all of them are online.
        """
        self._is_deciding, self._all_expected_online, self._waiting_since = True, all_online, now
        self._counting_last_seen = (
            dict.fromkeys(self._start_digests, now) | self._counting_last_seen
        )
        # If values have already been received (weight > 0), a trained network is first matched with them.
        if as_founder and not (self._store.is_staging and any(map(gossiper.weight, self.waiting))):
            self._inject_where_ready(gossiper, lambda _: True)

    def restart_wait_for_counting_peers(self, now: float) -> None:
        """Restart the wait for counting peers: the connection was lost, and they may be reconnecting too."""
        self._waiting_since = now
        self._counting_last_seen = dict.fromkeys(self._start_digests, now)

    def update(self, gossiper: Gossiper, others: OtherPeers, now: float) -> None:
        """Inject the peer's weight into every model in which it may count now; called in every turn."""
        for model in self.waiting:
            if any(
                model in other.counting_rounds and other.is_live
                for other in others.online_senders(model)
            ):
                self._counting_last_seen[model] = now
        if not self._is_deciding or not self.waiting:
            return
        self._inject_where_ready(gossiper, lambda model: self._may_found(model, others, now))
        for model in sorted(self.waiting - self._warned):
            if now - self._waiting_since >= WARN_AFTER:
                self._warned.add(model)
                count = sum(model in other.counting_rounds for other in others.known.values())
                _log.warning(
                    "peer %s: model %s still waits for a first value after %.0f s; of the other peers, %d "
                    "count in it, and %d are online and may send it",
                    self._name, model, now - self._waiting_since, count,
                    len(others.online_senders(model)),
                )  # fmt: skip

    def _may_found(self, model: str, others: OtherPeers, now: float) -> bool:
        """Return whether the peer may found a model; the module docstring has the rules."""
        silence = now - self._counting_last_seen[model]
        if silence >= FOUND_ANYWAY_AFTER * self._settings.silence:
            return True
        online = others.online_senders(model)
        if any(model in other.counting_rounds for other in online):
            return False
        # Once all expected peers are online there is no need to wait, unless the setting `founder` is false.
        must_wait = self._settings.founder is False or not self._all_expected_online
        if must_wait and silence < self._settings.silence:
            return False
        # With equal starting values all waiting peers found, else only the one that came first.
        own_digest, own_arrival = self._start_digests[model], (self._session_began, self._name)
        return all(other.starts.get(model) == own_digest for other in online) or all(
            own_arrival < (other.session_began, other.peer) for other in online
        )

    def _inject_where_ready(self, gossiper: Gossiper, may_found: Callable[[str], bool]) -> None:
        """Inject the weight into models with a received value, and into those that may be founded.

        A network that was trained before the peer joined is added to all models together, once all are ready.
        """
        ready = {m for m in self.waiting if gossiper.weight(m) or may_found(m)}
        if self._store.is_staging:
            if self.waiting and ready == self.waiting:
                self._add_trained_network(gossiper)
            return
        for model in sorted(ready):
            is_founder = not gossiper.weight(model)
            self.inject(gossiper, model)
            if is_founder and gossiper.neighbours(model):
                self._journal.add("founded", f"founds model {model} at its own values")
            elif not is_founder:
                self._journal.add("counted", f"begins to count in {model}, at a received value")

    def inject_everywhere(self, gossiper: Gossiper) -> None:
        """Stop waiting: inject the weight into all models, at the peer's own values if none were received."""
        self._inject_where_ready(gossiper, lambda _: True)

    def inject(self, gossiper: Gossiper, model: str) -> None:
        """Inject the peer's weight at the value that the model has now: from now on it counts."""
        gossiper.inject(model, self._weight)
        self.waiting.discard(model)

    def reset(self) -> None:
        """Prepare for a new session."""
        self.waiting.clear()
        if self._store.is_staging:
            self._store.start_staging()  # drop the values that the old session received

    def _add_trained_network(self, gossiper: Gossiper) -> None:
        """Match the trained network's cells with the received values, and inject the network's own values."""
        models = sorted(self.waiting)
        neighbours = {m: set(gossiper.neighbours(m)) for m in models if gossiper.neighbours(m)}
        received = {m: Mass(np.array(self._store.read(m)), gossiper.weight(m)) for m in models}
        changed = self._store.match_cells(self._learner)
        for model in models:
            own = Mass(self._store.read(model), self._weight)
            if received[model].weight:
                self._store.write(model, absorb(received[model], own).value)
            gossiper.inject(model, self._weight)
        self.waiting.clear()
        self._journal.add(*self._describe_match(neighbours, changed))

    def _describe_match(
        self, neighbours: Mapping[str, Collection[str]], changed: int
    ) -> tuple[str, str]:
        """Return the event that a trained network was added: its kind, and what happened.

        neighbours: of every partial model that has some. changed: how many cells
        `MatchedStore.match_cells` permuted, or, in fused models, gave an index that no neighbour uses.
        """
        matching = self._settings.matching
        kinds = {matching[model].kind for model in neighbours if model in matching}
        counts = f"counts in {', '.join(neighbours) or 'no shared model'}"
        if not kinds:
            return "counted", f"adds its trained network as it is, and {counts}"
        peers = sorted({peer for names in neighbours.values() for peer in names})
        whom = ", ".join(peers[:3]) + f" and {len(peers) - 3} more" * (len(peers) > 3)
        if "fuse" in kinds:
            return "fused", f"fused with {whom} (cells that are new to them: {changed}); {counts}"
        return "aligned", f"aligned with {whom}: moved {changed} cells; {counts}"


def digest(value: Array) -> str:
    """Return a short digest of a vector's values, equal on two peers exactly if the values are."""
    data = np.ascontiguousarray(value)
    return hashlib.blake2b(
        data.tobytes(), digest_size=8, person=str(data.dtype).encode()
    ).hexdigest()


def load_trained(network: SlicedNetwork, path: Path) -> None:
    """Load a network's values from a safetensors file; ModelError says what is wrong with the file."""
    if not path.is_file():
        raise ModelError(f"{path}: there is no such file; it should hold the network to start from")
    try:
        network.load(path)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: cannot be read as a network (safetensors): {error}") from None
