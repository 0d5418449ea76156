"""What methods without a server have in common: a wire between clients, which may change what it carries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch

from ...gossip import Array
from ..arena import Lockstep, Wire
from .client import Client
from .method import Compressor, Method, Strength

WHOLE = "network"
"""A client's whole network, as its gossiper calls it."""


class GossipMethod(Method):
    """A method whose clients push to each other, as live peers do."""

    compress: Compressor | None = None
    """How values are compressed: `int8`, `top-k:0.05+int8`, … What is left out stays in the sender."""
    dtype: Literal["float32", "float64", "float16"] = "float32"
    """Values on the wire."""
    drift: Strength | None = None
    """Skip a push of what has moved less than this relative distance since it was last pushed."""

    @property
    def wire(self) -> Wire | None:
        """What becomes of values between clients; None if they arrive as they are."""
        plain = self.compress is None and self.drift is None and self.dtype == "float32"
        return None if plain else Wire(self.dtype, self.compress, self.drift)


class WholeNetwork:
    """A client's parameters as one vector, for its gossiper."""

    def __init__(self, client: Client):
        self._client = client

    def names(self) -> Iterable[str]:
        """The one vector."""
        return (WHOLE,)

    def read(self, name: str) -> Array:
        """A copy of the network's values."""
        return self._client.values().cpu().numpy()

    def write(self, name: str, value: Array) -> None:
        """Replace the network's values."""
        self._client.load(torch.from_numpy(value))


def lockstep_of(clients: Sequence[Client], wire: Wire) -> Lockstep:
    """The clients' gossipers, whole networks, all of the same weight."""
    blocks = [tuple(value.shape) for value in clients[0].network.module.parameters()]
    fit = wire.fitted({WHOLE: blocks}, {WHOLE: len(clients[0].network.flat)})
    names = [client.name for client in clients]
    return Lockstep(names, [WholeNetwork(each) for each in clients], [1.0] * len(clients), fit)
