"""Bookkeeping while parts are looked for: channels, which of them are one, and where they stand.

Every channel that some layer reads or writes gets a number. Channels that must move together are tied;
what is tied in the end is one cell. A tensor's axis is a list of channel numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

FIXED = 0
"""The channel that never moves: whatever is tied to it carries no cell (positions, vocabularies)."""


def input_name(place: int) -> str:
    """What the part of an input's channels is called."""
    return f"input{place}" if place else "input"


@dataclass(frozen=True)
class Channels:
    """The channels on one side of a layer; `name` is what a part made of them will be called."""

    name: str
    first: int
    count: int
    made: bool
    """Whether a layer makes them (or they are the input), rather than only reads them."""
    given: bool = False
    """Whether they are an input of the whole network."""

    @property
    def ids(self) -> np.ndarray:
        """Their numbers."""
        return np.arange(self.first, self.first + self.count)


@dataclass
class Ledger:
    """Channels, ties between them, and the axes of tensors they stand on."""

    spaces: list[Channels] = field(default_factory=list)
    axes: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    _by_hand: set[tuple[str, int]] = field(default_factory=set)
    _dropped: list[int] = field(default_factory=list)
    _ties: list[np.ndarray] = field(default_factory=list)
    _total: int = 1  # number 0 is FIXED

    def channels(
        self, name: str, count: int, *, made: bool = True, given: bool = False
    ) -> Channels:
        """Number the channels of one side of a layer."""
        space = Channels(name, self._total, count, made, given)
        self._total += count
        self.spaces.append(space)
        return space

    def tie(self, some: np.ndarray, others: np.ndarray | int) -> None:
        """Let channels be one cell, pair by pair."""
        some = np.asarray(some, np.int64).reshape(-1)
        others = np.broadcast_to(np.asarray(others, np.int64).reshape(-1), some.shape)
        self._ties.append(np.stack([some, others]))

    def place(self, tensor: str, axis: int, ids: np.ndarray) -> None:
        """Say which channel each index of a tensor's axis stands for. Tied weights are placed twice."""
        key = (tensor, axis)
        if key in self._by_hand:
            self._dropped.append(int(np.min(ids)))
        elif key in self.axes:
            self.tie(self.axes[key], ids)
        else:
            self.axes[key] = np.asarray(ids, np.int64)

    def place_by_hand(self, tensor: str, axis: int, ids: np.ndarray) -> None:
        """The same, said by a user: what the trace finds for this axis does not count."""
        self.place(tensor, axis, ids)
        self._by_hand.add((tensor, axis))

    def dropped(self, space: Channels) -> bool:
        """Whether a user named an axis that these channels stand on, so that they are not traced."""
        return any(space.first <= one < space.first + space.count for one in self._dropped)

    def cells(self) -> np.ndarray:
        """For every channel the number of its cell; 0 for those that never move."""
        pairs = np.concatenate([np.zeros((2, 1), np.int64), *self._ties], axis=1)
        graph = coo_array((np.ones(pairs.shape[1], np.int8), pairs), shape=(self._total,) * 2)
        found = connected_components(graph, directed=False)[1]
        # Cells are numbered by their first channel; the component of FIXED comes first, as 0.
        _, first = np.unique(found, return_index=True)
        rank = np.empty(len(first), np.int64)
        rank[np.argsort(first)] = np.arange(len(first))
        return rank[found]
