"""Downpour SGD (Dean et al. 2012): clients push their changes to a server without waiting for each other.

    replica_k ← fetched;  train it on the next mini-batches
    Δ_k ← replica_k before − replica_k after        (rate × accrued gradients)
    w ← w − η_s Δ_k;  fetched ← w

Clients run one after the other in a random order. Between a client's fetch and its next push all other
clients push, so its change is as stale as on machines that do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ...gossip import Count, Positive
from .method import Client, RoundContext, ServerMethod


@dataclass(frozen=True)
class State:
    """The server's network, and the network that every client has fetched last."""

    w: Tensor
    fetched: tuple[Tensor, ...]


class Downpour(ServerMethod):
    """Asynchronous SGD with a parameter server."""

    pushes: Count = 1
    """How often a client pushes and fetches in a round. Raise it for less stale networks at more bytes."""
    server_rate: Positive | None = None
    """η_s: the factor by which the server scales a client's change. 1 adds up the changes of all clients, as
    in the paper, and may diverge with many or stale clients; 1/K, used if left out, averages K changes."""

    def start(self, clients: Sequence[Client]) -> State:
        w = clients[0].values()
        return State(w, tuple(w for _ in clients))

    def round(self, state: State, clients: Sequence[Client], context: RoundContext) -> State:
        w, fetched = state.w, list(state.fetched)
        participants = context.pick(clients, self.participation)
        rate = self.server_rate or 1 / len(participants)
        for push in range(self.pushes):
            for k in context.rng.permutation(participants):
                client = clients[k]
                client.load(fetched[k])
                total = client.epochs * client.samples
                samples = total * (push + 1) // self.pushes - total * push // self.pushes
                if samples:
                    client.train_samples(samples)
                change = fetched[k] - client.values()
                w = w - rate * context.to_server(change)
                fetched[k] = context.to_client(w)
        return State(w, tuple(fetched))
