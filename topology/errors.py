"""What a bad topology raises, and how peers are named in its messages."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gossamer.errors import GossamerError


class TopologyError(GossamerError, ValueError):
    """A graph, file, schedule or weight that gossip cannot use; the message says what to change."""


class DisconnectedError(TopologyError):
    """Some peers can never hear from others.

    `components` holds the connected (for directed graphs: strongly connected) parts, largest first.
    """

    def __init__(self, message: str, components: Sequence[frozenset[int]]):
        super().__init__(message)
        self.components = tuple(components)


def name_peers(
    peers: Iterable[object], limit: int = 8, labels: Mapping[Any, str] | None = None
) -> str:
    """Write a set of peers for a message: `{0, 1, 2}`, or the first few and how many follow.

    labels: what peers are called, where they are called something.
    """
    known = list(peers)
    try:
        known.sort()  # pyright: ignore[reportCallIssue, reportArgumentType]
    except TypeError:  # mixed labels of a user's graph have no order
        known.sort(key=str)
    shown = ", ".join(str((labels or {}).get(peer, peer)) for peer in known[:limit])
    more = f", … {len(known) - limit} more" if len(known) > limit else ""
    return "{" + shown + more + "}"


def name_components(components: Sequence[Iterable[object]], limit: int = 4) -> str:
    """Write the parts of a disconnected graph for a message."""
    shown = "; ".join(name_peers(part) for part in components[:limit])
    more = f"; … {len(components) - limit} more" if len(components) > limit else ""
    return shown + more
