"""Let a peer that joins late find its groups: it tries the values of every group on its held-out samples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection

import numpy as np

from .assignment import GLOBAL, OWN, Assignment


class GroupValues:
    """The mean values of all groups of an assignment, as one vector that gossip averages.

    Every peer that has its groups adds 1 for each of them, and its values where the group averages. Means are
    read relative to that 1, so they are right even where gossip has not yet reached all peers alike.

    newcomers: peers of the assignment that have no groups yet.
    """

    def __init__(self, assignment: Assignment, newcomers: Collection[str]):
        self._assignment = assignment
        peers = assignment.peers
        settled = [number for number, name in enumerate(peers) if name not in newcomers]
        self._groups: list[tuple[frozenset[int], np.ndarray]] = []
        for code in np.unique(assignment.codes).tolist():
            if code == 1 << GLOBAL or code >> OWN & 1:  # no group averages these coordinates
                continue
            labels, columns = assignment.together(code), np.flatnonzero(assignment.codes == code)
            for group in dict.fromkeys(labels[number] for number in settled):
                members = frozenset(number for number in settled if labels[number] == group)
                self._groups.append((members, columns))
        self._starts = np.cumsum([len(self._groups), *(len(each) for _, each in self._groups)])
        content = [assignment.digest, sorted(newcomers)]
        self.name = hashlib.blake2b(json.dumps(content).encode(), digest_size=4).hexdigest()
        """Vectors of the same name may be averaged."""
        first = dict[tuple[int, ...], str]()
        for number in settled:
            first.setdefault(assignment.groups_of(peers[number]), peers[number])
        self.examples = tuple(first.values())
        """One peer for every combination of groups that peers are in."""

    @property
    def size(self) -> int:
        """The length of the vector."""
        return int(self._starts[-1])

    def pack(self, peer: str, values: np.ndarray) -> np.ndarray:
        """Return what a peer adds; values: its flat parameter vector."""
        vector, place = np.zeros(self.size, np.float32), self._assignment.peers.index(peer)
        for number, (members, columns) in enumerate(self._groups):
            if place in members:
                vector[number] = 1.0
                vector[self._starts[number] : self._starts[number + 1]] = values[columns]
        return vector

    def values_like(
        self, example: str, vector: np.ndarray, values: np.ndarray
    ) -> np.ndarray | None:
        """Return values with those of an example's groups in their place; None while one is unknown.

        vector: the mean over peers of what they added.
        """
        values, place = values.copy(), self._assignment.peers.index(example)
        for number, (members, columns) in enumerate(self._groups):
            if place in members:
                if not vector[number] > 0:
                    return None
                total = vector[self._starts[number] : self._starts[number + 1]]
                values[columns] = total / vector[number]
        return values
