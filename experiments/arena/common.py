"""Peers of different widths in the arena: partial models averaged at a common width."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...models import ModelError
from ...peer import MatchedStore
from .mixing import Mixing


class CommonAverager:
    """Averages the vectors of a common width that peers' stores hold beside their networks.

    It reads and writes whole vectors, peer by peer: a fused model is not stacked.
    """

    def __init__(
        self, stores: Sequence[MatchedStore], mixing: Mixing, weights: Sequence[float] | None
    ):
        self._stores, self._mixing, self._step = stores, mixing, 0
        found: dict[str, list[int]] = {}
        for place, store in enumerate(stores):
            for owner in () if store.common is None else store.common.owners:
                found.setdefault(owner, []).append(place)
        self.owners = {owner: who for owner, who in sorted(found.items()) if len(who) > 1}
        for owner, who in self.owners.items():
            first = stores[who[0]].entries(owner)
            for place in who[1:]:
                if stores[place].entries(owner) != first:
                    raise ModelError(
                        f"model {owner!r} has not the same common width on all its peers: learners "
                        f"{who[0]} and {place} differ"
                    )
        shares = np.ones(len(stores)) if weights is None else np.asarray(weights, dtype=np.float64)
        self._weights = {owner: shares[who] for owner, who in self.owners.items()}

    def tasks(self) -> list[Callable[[], None]]:
        """One averaging: a task for every owner."""
        found = []
        for owner, who in self.owners.items():
            matrices, weights = self._mixing.matrices(owner, who, self._step, self._weights[owner])
            shares = self._weights[owner] / self._weights[owner].sum()
            self._weights[owner] = weights
            found.append(lambda o=owner, m=matrices, s=shares: self._mix(o, m, s))
        self._step += 1
        return found

    def _mix(self, owner: str, matrices: Sequence[object] | None, shares: np.ndarray) -> None:
        stores = [self._stores[place] for place in self.owners[owner]]
        block = np.stack([store.read(owner) for store in stores])
        like, mixed = block.dtype, block.astype(np.float64)
        if matrices is None:
            # The mean of differences from one peer: equal values average to themselves, exactly.
            mean = mixed[0] + shares @ (mixed - mixed[0])
            mixed = np.broadcast_to(mean, mixed.shape)
        for matrix in matrices or ():
            mixed = matrix @ mixed  # type: ignore[operator]
        if not np.isfinite(mixed).all():
            raise ModelError(
                f"model {owner!r}: values are not finite after averaging; lower the learning rate or look "
                "at the peers' data"
            )
        for store, row in zip(stores, mixed, strict=True):
            store.write(owner, row.astype(like))
