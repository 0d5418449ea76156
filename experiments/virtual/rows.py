"""Moving rows between two tables, a cacheful at a time and on as many threads as wanted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .draws import Floats, Ints

_BLOCK_BYTES = 1 << 18  # two of these fit the second-level cache of any machine of today
_WORTH_A_THREAD = 1 << 20


class Rows:
    """The rows of `table`, one per peer. Peers named in one call must all be different."""

    def __init__(self, table: Floats, threads: int = 1):
        self.table = table
        self._block = max(1, _BLOCK_BYTES // (8 * max(table.shape[1], 1)))
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads) if threads > 1 else None

    def copy(self, peer: Ints, target: Floats, rows: Ints) -> None:
        """target[rows] = table[peer]"""

        def work(part: slice) -> None:
            target[rows[part]] = np.take(self.table, peer[part], axis=0, mode="clip")

        self._share_out(len(peer), work)

    def mix(self, peer: Ints, source: Floats, rows: Ints, ratio: Floats) -> None:
        """Move table[peer] by `ratio` of the way to source[rows]: push-sum's absorb."""

        def work(part: slice) -> None:
            mine = np.take(self.table, peer[part], axis=0, mode="clip")
            step = np.take(source, rows[part], axis=0, mode="clip")
            step -= mine
            step *= ratio[part, None]
            step += mine
            self.table[peer[part]] = step

        self._share_out(len(peer), work)

    def _share_out(self, count: int, work: Callable[[slice], None]) -> None:
        """Rows are independent of each other, so who does which of them changes nothing."""
        parts = [slice(i, min(i + self._block, count)) for i in range(0, count, self._block)]
        if self._executor is None or count * self.table.shape[1] * 8 < _WORTH_A_THREAD:
            for part in parts:
                work(part)
        else:
            list(self._executor.map(work, parts))
