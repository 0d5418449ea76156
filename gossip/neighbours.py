"""Who a peer may push to: which session each neighbour is in, and whether it can be reached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
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
