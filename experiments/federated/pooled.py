"""One network on everybody's samples, which is what federations exist to avoid: an upper mark."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch

from ...models import Metrics
from .client import Client
from .method import Method, Turn


class Pooled(Method):
    """Plain SGD on all samples. The state is a client that has them all.

    A round is E epochs, so that it sees as many samples as a round of K clients; it takes as many more
    steps one after the other. Samples keep the labels that their clients gave them.
    """

    bound = True

    def start(self, clients: Sequence[Client]) -> Client:
        learner = copy(clients[0].learner)  # its network, optimizer, batches and order
        learner.samples = (
            torch.cat([client.learner.samples[0] for client in clients]),
            torch.cat([client.learner.samples[1] for client in clients]),
        )
        return Client(learner, clients[0].epochs)

    def round(self, state: Client, clients: Sequence[Client], turn: Turn) -> Client:
        turn.pick(clients)
        state.train()
        return state

    def test(self, state: Client, clients: Sequence[Client]) -> list[Metrics]:
        values = state.values()
        for client in clients:
            client.load(values)
        return [client.test() for client in clients]
