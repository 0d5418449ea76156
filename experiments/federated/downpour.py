"""Downpour SGD (Dean et al. 2012): clients push their changes to a server without waiting for each other.

    w_k ← fetched_k;  client k trains w_k on its next mini-batches
    Δ_k ← fetched_k − w_k                            learning rate × the sum of the gradients
    w ← w − η_s · Δ_k                                on the server
    fetched_k ← w

The simulation runs the clients of a round one after the other, in a random order that it draws anew for each
push. Between a client's fetch and its next push, every other client of the round pushes once on average. So
the server's network has changed by about as much as it would on machines that do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...gossip import Count, Positive
from .method import Client, RoundContext, ServerMethod

if TYPE_CHECKING:  # so that reading a config and `gossamer explain` do not import torch
    from torch import Tensor


@dataclass(frozen=True)
class State:
    """The server's network `w`, and for every client the network that it fetched last."""

    w: Tensor
    fetched: tuple[Tensor, ...]


class Downpour(ServerMethod):
    """Asynchronous SGD: clients push to a server, and fetch from it, each at its own time."""

    pushes: Count = 1
    """How often a client pushes and fetches in a round. Raise it so that clients train newer copies of the
    server's network; the bytes sent grow in proportion."""
    server_rate: Positive | None = None
    """η_s: the factor by which the server scales a client's change. 1 adds up the changes of all clients, as
    in the paper, and may diverge if clients are many or push rarely. If left out, it is 1 / the number of
    clients in a round, which averages their changes."""

    def start(self, clients: Sequence[Client]) -> State:
        w = clients[0].values()
        return State(w, tuple(w for _ in clients))

    def round(self, state: State, clients: Sequence[Client], context: RoundContext) -> State:
        w, fetched = state.w, list(state.fetched)
        participants = context.pick(clients, self.participation)
        server_rate = self.server_rate or 1 / len(participants)
        for push_number in range(self.pushes):
            for k in context.rng.permutation(participants):
                client = clients[k]
                client.load(fetched[k])
                # A round's samples, divided among its pushes as evenly as integers allow.
                round_samples = client.epochs * client.sample_count
                first = round_samples * push_number // self.pushes
                end = round_samples * (push_number + 1) // self.pushes
                if end > first:
                    client.train_samples(end - first)
                change = fetched[k] - client.values()
                w = w - server_rate * context.to_server(change)
                fetched[k] = context.to_client(w)
        return State(w, tuple(fetched))
