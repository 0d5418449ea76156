"""Which task each peer of a config has: what its labels mean, or which sparse vectors it learns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from ..data import Task, tasks
from .keys import Keys
from .tables import TaskEntry

# Six labels have 720 permutations, more than any swarm here has peers; ten would have 3.6 million.
MOST_PERMUTED = 6


class Tasks:
    """The `[[tasks]]` of a config, checked for the peers that they name."""

    def __init__(self, entries: Sequence[TaskEntry], keys: Keys):
        self._keys = keys
        self._entries = [
            (f"tasks.{place}", entry, keys.who(entry.peers, f"tasks.{place}.peers"))
            for place, entry in enumerate(entries)
        ]

    def of(self, index: int, classes: int) -> Task:
        """What one peer's labels mean: every entry that names the peer, one after the other."""
        found = tasks.identity(classes)
        for key, entry, who in self._entries:
            if index in who:
                with self._keys.blaming(key):
                    task = self._one(entry, key, classes, who.index(index))
                found = task if found.name == "identity" else found.then(task)
        return found

    def modified(self, index: int) -> bool:
        """Whether one peer learns the modified sparse vectors."""
        for key, entry, _ in self._entries:
            if entry.kind != "modified":
                raise self._keys.error(f"{key}.kind", "sparse vectors know only 'modified'")
        return any(index in who for _, _, who in self._entries)

    def _one(self, entry: TaskEntry, key: str, classes: int, place: int) -> Task:
        match entry.kind:
            case "swap":
                if entry.labels is None:
                    raise self._keys.error(f"{key}.labels", "a swap needs two labels, as in [8, 9]")
                return tasks.swap(classes, *entry.labels)
            case "cycle":
                return tasks.cycle(classes, entry.last)
            case "symmetric":
                if entry.last > MOST_PERMUTED:
                    raise self._keys.error(
                        f"{key}.last",
                        f"{entry.last} labels have too many permutations; at most {MOST_PERMUTED}",
                    )
                every = tasks.symmetric(classes, entry.last)
                return every[place % len(every)]
            case "swaps":
                pairs = list(combinations(range(classes), 2))
                # A stride that shares no factor with the number of pairs visits each of them once,
                # and far-apart ones first.
                return tasks.swap(classes, *pairs[place * 7 % len(pairs)])
            case "modified":
                raise self._keys.error(f"{key}.kind", "'modified' is for the sparse vectors only")
