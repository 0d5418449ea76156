"""The values of all groups, from which a peer that joins late finds its groups.

It tests the values of each group on its held-out samples, and joins the groups whose loss is lowest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection

import numpy as np

from .assignment import GLOBAL, OWN, Assignment


class GroupValues:
    """The layout of a vector that gossip averages, with the mean values of all groups of an assignment.

    The vector has one entry per group, and the values at the group's coordinates. Every peer that has groups
    contributes 1 and its own values to each of them (`pack`). A group's mean is the mean of the values
    divided by the mean of that entry, which is right even before gossip has reached all peers equally.

    newcomers: peers of the assignment that have no groups yet.
    """

    def __init__(self, assignment: Assignment, newcomers: Collection[str]):
        self._assignment = assignment
        peers = assignment.peers
        has_groups = [number for number, name in enumerate(peers) if name not in newcomers]
        self._groups: list[tuple[frozenset[int], np.ndarray]] = []
        for code in np.unique(assignment.codes).tolist():
            if code == 1 << GLOBAL or code >> OWN & 1:  # no group averages these coordinates
                continue
            labels, columns = assignment.peer_groups(code), np.flatnonzero(assignment.codes == code)
            for group in dict.fromkeys(labels[number] for number in has_groups):
                members = frozenset(number for number in has_groups if labels[number] == group)
                self._groups.append((members, columns))
        # Where the values of each group begin, and where those of the last one end.
        sizes = (len(columns) for _, columns in self._groups)
        self._starts = np.cumsum([len(self._groups), *sizes])
        content = [assignment.digest, sorted(newcomers)]
        self.name = hashlib.blake2b(json.dumps(content).encode(), digest_size=4).hexdigest()
        """The name of the layout: only vectors of the same layout may be averaged."""
        example_of: dict[tuple[int, ...], str] = {}
        for number in has_groups:
            example_of.setdefault(assignment.groups_of(peers[number]), peers[number])
        # For every combination of groups that occurs, the name of one peer that is in these groups.
        self._examples = tuple(example_of.values())

    @property
    def size(self) -> int:
        """The length of the vector."""
        return int(self._starts[-1])

    def examples_for(self, peer: str) -> list[str]:
        """Return one peer for every combination of groups that a peer may join; itself if there is none.

        The groups of partial models that were given by hand must be the same.
        """
        schemes = self._assignment.schemes[: self._assignment.given]
        index = self._assignment.peers.index

        def groups_by_hand(name: str) -> list[int]:
            return [labels[index(name)] for labels in schemes[OWN + 1 :]]

        own = groups_by_hand(peer)
        return [example for example in self._examples if groups_by_hand(example) == own] or [peer]

    def pack(self, peer: str, values: np.ndarray) -> np.ndarray:
        """Return a peer's contribution; values: its flat parameter vector."""
        vector, index = np.zeros(self.size, np.float32), self._assignment.peers.index(peer)
        for number, (members, columns) in enumerate(self._groups):
            if index in members:
                vector[number] = 1.0
                vector[self._starts[number] : self._starts[number + 1]] = values[columns]
        return vector

    def values_like(
        self, example: str, vector: np.ndarray, values: np.ndarray
    ) -> np.ndarray | None:
        """Return a copy of `values` with the means of the groups that the peer `example` is in.

        None while gossip has not brought the values of one of these groups.

        vector: the mean over peers of their contributions.
        """
        values, index = values.copy(), self._assignment.peers.index(example)
        for number, (members, columns) in enumerate(self._groups):
            if index in members:
                if not vector[number] > 0:
                    return None
                total = vector[self._starts[number] : self._starts[number + 1]]
                values[columns] = total / vector[number]
        return values
