"""A sliced network as gossip sees it: named flat vectors, and what they are made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..gossip.wire import SchemaEntry, schema_hash
from ..models import SlicedNetwork


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


def schema_entries(network: SlicedNetwork, owner: str) -> list[SchemaEntry]:
    """What an owner's vector is made of, block by block, in words that two peers can compare."""
    dtype = str(network.flat.dtype).removeprefix("torch.")
    return [
        (
            f"{name} ({' × '.join(model for model, _ in axes if model)})",
            [count for _, count in axes],
            dtype,
        )
        for name, axes in network.slicing.schema(owner)
    ]


def schema_hashes(network: SlicedNetwork) -> dict[str, str]:
    """The hash that messages about each owner carry."""
    return {owner: schema_hash(schema_entries(network, owner)) for owner in network.owners}
