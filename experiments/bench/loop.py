"""The baseline of the arena: a loop over torch modules, as one writes it in an afternoon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ...models import SlicedNetwork, mlp
from ...topology import metropolis, uniform_push

if TYPE_CHECKING:
    from .arena import Work


@dataclass
class PlainPeer:
    """A module, its optimizer, and its samples in random order."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: Tensor
    labels: Tensor

    def train(self, batch: int, steps: int, mean: bool) -> None:
        """Some gradient steps; every epoch is a fresh permutation."""
        order = torch.empty(0, dtype=torch.int64)
        for _ in range(steps):
            if len(order) < batch:
                order = torch.cat([order, torch.randperm(len(self.labels))])
            chosen, order = order[:batch], order[batch:]
            outputs = self.module(self.inputs[chosen])
            goals = F.one_hot(self.labels[chosen], outputs.shape[1])
            losses = 0.5 * (outputs - goals).square().sum(dim=1)
            self.optimizer.zero_grad()
            (losses.mean() if mean else losses.sum()).backward()
            self.optimizer.step()


class Loop:
    """All peers one after the other, then one exchange of their shared coordinates."""

    def __init__(self, work: Work, peers: Sequence[PlainPeer], shared: Tensor | None):
        self._work, self.peers, self._shared = work, peers, shared
        count = len(peers)
        self._weights = torch.ones(count, dtype=torch.float64)
        if work.mixing != "mean":
            rule = metropolis if work.mixing == "plain" else uniform_push
            self._matrix = torch.from_numpy(rule(work.graph()).toarray())

    @classmethod
    def of(
        cls,
        work: Work,
        data: Sequence[tuple[Tensor, Tensor]],
        networks: Sequence[SlicedNetwork],
    ) -> Loop:
        """Modules that start where the networks are, with data of their own."""
        peers = []
        for network, (inputs, labels) in zip(networks, data, strict=True):
            module = mlp(work.layout)
            module.load_state_dict(network.module.state_dict())
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            peers.append(PlainPeer(module, optimizer, inputs.clone(), labels.clone()))
        coordinates = networks[0].slicing.coordinates("global")
        whole = len(coordinates) == len(networks[0].flat)
        return cls(work, peers, None if whole else torch.from_numpy(np.array(coordinates)))

    def train(self, peers: int | None = None) -> None:
        """Every peer's steps, or those of the first few."""
        work = self._work
        for peer in self.peers[:peers]:
            peer.train(work.batch, work.steps, work.reduction == "mean")

    def round(self) -> None:
        """Train, then average."""
        self.train()
        with torch.no_grad():
            self._exchange()

    def _exchange(self) -> None:
        vectors = [parameters_to_vector(peer.module.parameters()) for peer in self.peers]
        shared = vectors if self._shared is None else [v[self._shared] for v in vectors]
        for peer, vector, mixed in zip(self.peers, vectors, self._mixed(shared), strict=True):
            if self._shared is None:
                vector = mixed.clone()  # parameters become views of it
            else:
                vector[self._shared] = mixed
            vector_to_parameters(vector, peer.module.parameters())

    def _mixed(self, shared: list[Tensor]) -> Sequence[Tensor]:
        """What every peer holds after the exchange."""
        values = torch.stack(shared)
        if self._work.mixing == "mean":
            return [values.mean(dim=0)] * len(shared)
        if self._work.mixing == "plain":
            return list(self._matrix.float() @ values)
        sums = (self._matrix * self._weights).float() @ values
        self._weights = self._matrix @ self._weights
        return list(sums / self._weights[:, None].float())
