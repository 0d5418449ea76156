"""SCAFFOLD (Karimireddy et al. 2020), with option II for the control variates.

y ← w;  K times:  y ← y − η_l (g_i(y) − c_i + c)
c_i⁺ ← c_i − c + (w − y) / (K η_l)
w ← w + η_g · mean(y − w),   c ← c + |S|/N · mean(c_i⁺ − c_i)        over the clients in S
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...gossip import Positive
from ...models import ModelError, PlainSgd
from .method import Client, ServerMethod, Turn, mean


@dataclass(frozen=True)
class State:
    """The server's network and control variate, and the clients' own control variates."""

    w: Tensor
    c: Tensor
    own: tuple[Tensor, ...]


class Scaffold(ServerMethod):
    """Corrects the drift of each client by what it knows of all clients' gradients.

    A client sends and receives two vectors where FedAvg has one. Clients count the same, as in the
    paper, whatever their samples.
    """

    server_rate: Positive = 1.0
    """η_g: how far the server follows the clients' mean."""

    def start(self, clients: Sequence[Client]) -> State:
        w = clients[0].values()
        for client in clients:
            learner_rate(client)  # refuse now what cannot work
        return State(w, torch.zeros_like(w), tuple(torch.zeros_like(w) for _ in clients))

    def round(self, state: State, clients: Sequence[Client], turn: Turn) -> State:
        w, own, moves, changes = state.w, list(state.own), [], []
        for i, client in self.visit(clients, turn, w):
            c, c_i = turn.to_client(state.c), own[i]
            correction = c - c_i
            with client.adding(lambda _, correction=correction: correction):
                client.train()
            y = client.values()
            own[i] = c_i - c + (w - y) / (client.steps * learner_rate(client))
            moves.append(turn.to_server(y - w))
            changes.append(turn.to_server(own[i] - c_i))
        return State(
            w + self.server_rate * mean(moves),
            state.c + len(changes) / len(clients) * mean(changes),
            tuple(own),
        )


def learner_rate(client: Client) -> float:
    """η_l; only plain descent moves by rate times gradient, as (w − y)/(K η_l) needs."""
    if not isinstance(client.learner.optimizer, PlainSgd):
        raise ModelError(
            f"client {client.name!r}: scaffold reads gradients off the distance travelled, so it needs "
            "plain SGD; leave out the learner's optimizer and give it a rate"
        )
    return client.learner.optimizer.rate
