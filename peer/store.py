"""A sliced network as gossip sees it: named flat vectors, and what they are made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..gossip import SchemaEntry, schema_hash
from ..models import SlicedNetwork

if TYPE_CHECKING:  # matching loads scipy: only for those who match
    from ..models.matching import CommonWidth


class NetworkStore:
    """The vectors that a network averages live in the network itself; nothing is kept here."""

    def __init__(self, network: SlicedNetwork):
        self._network = network

    def names(self) -> Iterable[str]:
        """The owners: partial models, and pairs with cross-model averaging."""
        return self._network.owners

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """A fresh gather of the owner's coordinates."""
        return self._network.read(name).cpu().numpy()

    def write(self, name: str, value: np.ndarray[Any, Any]) -> None:
        """Scatter values back into the network."""
        self._network.write(name, value)


def schema_entries(
    network: SlicedNetwork, owner: str, common: CommonWidth | None = None
) -> list[SchemaEntry]:
    """What an owner's vector is made of, block by block, in words that two peers can compare.

    Peers of different widths agree where they have a `common` one.
    """
    dtype = str(network.flat.dtype).removeprefix("torch.")
    wide = common is not None and owner in common.owners
    slicing = common.common if common is not None and wide else network.slicing
    return [
        (
            f"{name} ({' × '.join(model for model, _ in axes if model)})",
            [count for _, count in axes],
            dtype,
        )
        for name, axes in slicing.schema(owner)
    ]


def schema_hashes(network: SlicedNetwork, common: CommonWidth | None = None) -> dict[str, str]:
    """The hash that messages about each owner carry."""
    return {owner: schema_hash(schema_entries(network, owner, common)) for owner in network.owners}
