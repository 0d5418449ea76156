"""What a peer does to its values before others see them: noise on updates, masks in lockstep rounds.

Both are off unless the settings ask for them, and what cannot work is refused at the start.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from ..gossip import (
    Gossiper,
    MaskPlan,
    PrivacyError,
    PrivateRound,
    Releases,
    enter_round,
    leave_round,
)
from ..gossip.security import SecurityLayer, SwarmSecurity, TrustError
from ..models import SlicedNetwork
from .errors import PeerError
from .settings import Settings

_log = logging.getLogger(__name__)


class Privacy:
    """One peer's masks and releases. PeerError if the settings cannot be had together."""

    def __init__(self, name: str, settings: Settings, vectors: Collection[str]):
        self._name, self._own = name, f"local-{name.partition('@')[0]}"  # never leaves the peer
        self._plans = _plans(name, settings, vectors)
        self._rounds: dict[str, PrivateRound] = {}
        self._given: set[tuple[str, str]] = set()
        self._releases: Releases | None = None
        try:
            if settings.dp is not None:
                self._releases = Releases(settings.dp)
        except PrivacyError as error:
            raise PeerError(f"peer {name}: {error}") from None

    # --- differential privacy -------------------------------------------------------------------

    def before(self, network: SlicedNetwork) -> dict[str, Any]:
        """The values that training is about to move; nothing if updates are released as they are."""
        if self._releases is None:
            return {}
        return {v: network.read(v).cpu().numpy().copy() for v in network.owners if v != self._own}

    def release(self, network: SlicedNetwork, before: dict[str, Any]) -> None:
        """Put what may be seen of the training in the place of what was learnt."""
        for vector, old in before.items():
            assert self._releases is not None
            try:
                new = self._releases.release(old, network.read(vector).cpu().numpy())
            except PrivacyError as error:
                network.write(vector, old)  # nothing un-noised may leave
                raise PeerError(f"peer {self._name}: {error}") from None
            network.write(vector, new)

    # --- masks ----------------------------------------------------------------------------------

    def enter(self, gossiper: Gossiper, number: int, trust: SecurityLayer) -> None:
        """Mask the planned vectors, just before round `number` begins."""
        self._given.clear()
        if not self._plans:
            return
        assert isinstance(trust, SwarmSecurity)
        try:
            secret = trust.keyring.mask_secret
            self._rounds = enter_round(gossiper, number, secret, self._plans)
        except (ValueError, TrustError) as error:
            raise PeerError(f"peer {self._name}: {error}") from None

    def credited(self, sender: str, vector: str) -> None:
        """Note that a neighbour's masked mass has come in."""
        if vector in self._plans:
            self._given.add((sender, vector))

    def gone(self, gossiper: Gossiper, peer: str) -> None:
        """Take the masks shared with a vanished neighbour out, where it has given nothing yet."""
        waiting = {v: r for v, r in self._rounds.items() if peer in r.secrets}
        whole = {v: r for v, r in waiting.items() if (peer, v) not in self._given}
        leave_round(gossiper, whole, peer)
        for vector in waiting.keys() - whole.keys():
            _log.warning(
                "peer %s: %s vanished in the midst of a private round: the average of %s is off by "
                "part of its masks", self._name, peer, vector,
            )  # fmt: skip

    def over(self) -> None:
        """Forget a round that is finished: who vanishes now has done its part."""
        self._rounds.clear()

    # --- books ----------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Releases so far, of former lives too."""
        return 0 if self._releases is None else self._releases.count

    def restore(self, count: int) -> None:
        """Take over what former lives released: a restart forgets no cost."""
        if self._releases is not None:
            self._releases.count = count

    def report(self) -> dict[str, float]:
        """Epsilon and how it came about; empty without differential privacy."""
        return {} if self._releases is None else self._releases.report()


def _plans(name: str, settings: Settings, vectors: Collection[str]) -> dict[str, MaskPlan]:
    if not settings.private:
        return {}
    why = None
    if settings.trust != "swarm":
        why = 'masks need secrets between peers; set trust = "swarm"'
    elif settings.mode == "async":
        why = "it needs rounds to begin from; use mode rounds or server"
    elif settings.dtype == "float16":
        why = "float16 cannot carry masks; use dtype float32 or float64"
    elif settings.bounds is not None:
        why = 'guards take masked values for attacks; set guards = "off"'
    if why is not None:
        raise PeerError(f"peer {name}: private averaging: {why}")
    try:
        plans = {vector: MaskPlan(scale) for vector, scale in settings.private.items()}
    except ValueError as error:
        raise PeerError(f"peer {name}: {error}") from None
    return {vector: plan for vector, plan in plans.items() if vector in vectors}
