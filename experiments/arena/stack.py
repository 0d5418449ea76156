"""The stack: networks of one architecture as the rows of one tensor [peers, coordinates]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...models import SlicedNetwork


class Stack:
    """Takes networks in: from then on each network's flat tensor *is* its row.

    Nothing is copied back and forth: what the stack learns, `network.flat`, `network.read` and the
    module itself show at once, and what is written into a network is in the stack. Networks are moved
    one by one, so that two copies of all of them never exist.

    On another device than the networks' own, rows cannot be shared: there `publish` copies them back.
    """

    def __init__(self, networks: Sequence[SlicedNetwork], device: torch.device):
        first = networks[0].flat
        self.networks = list(networks)
        self.shared = device == first.device
        self.values = torch.empty(len(networks), len(first), dtype=first.dtype, device=device)
        for row, network in zip(self.values, self.networks, strict=True):
            row.copy_(network.flat)
            if self.shared:
                network.rebind(row)

    def refresh(self) -> None:
        """Take in again what was given other memory since, by another arena or by a user."""
        for row, network in zip(self.values, self.networks, strict=True):
            if not self.shared:
                row.copy_(network.flat)
            elif network.flat.data_ptr() != row.data_ptr():
                row.copy_(network.flat)
                network.rebind(row)

    def publish(self) -> None:
        """Let networks that live on another device see what was learned."""
        if not self.shared:
            for row, network in zip(
                self.values.to(self.networks[0].flat), self.networks, strict=True
            ):
                network.flat.copy_(row)

    def release(self) -> None:
        """Give every network memory of its own again, of its own size: to copy or to send it."""
        self.publish()
        if self.shared:
            for network in self.networks:
                network.rebind(network.flat.clone())


class Alone:
    """A network that no stack took in, seen as a stack of one row."""

    def __init__(self, network: SlicedNetwork):
        self.networks = [network]

    @property
    def values(self) -> Tensor:
        """The network's own flat tensor, wherever it is now."""
        return self.networks[0].flat[None]
