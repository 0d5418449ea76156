"""FedDyn (Acar et al. 2021): dynamic regularisation, so that local and global minima agree.

θ_k ← argmin  L_k(θ) − ⟨g_k, θ⟩ + α/2 ‖θ − w‖²        gradient: ∇L_k − g_k + α (θ − w)
g_k ← g_k − α (θ_k − w)
h ← h − α/m Σ_{k in P} (θ_k − w),    w ← mean_{k in P} θ_k − h/α        m clients in all
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...gossip import Positive
from .method import Client, ServerMethod, Turn, mean


@dataclass(frozen=True)
class State:
    """The server's network w and correction h, and the clients' own gradients g_k."""

    w: Tensor
    h: Tensor
    own: tuple[Tensor, ...]


class FedDyn(ServerMethod):
    """Every client's loss is tilted by what it learned before; all count the same, as in the paper.

    The same bytes as FedAvg: h and g_k never leave their machines.
    """

    alpha: Positive = 0.1
    """α: raise it for steadier, slower progress; too low a value makes w jump, since h/α grows."""

    def start(self, clients: Sequence[Client]) -> State:
        w = clients[0].values()
        return State(w, torch.zeros_like(w), tuple(torch.zeros_like(w) for _ in clients))

    def round(self, state: State, clients: Sequence[Client], turn: Turn) -> State:
        w, own, trained, moves = state.w, list(state.own), [], []
        for k, client in self.visit(clients, turn, w):
            g = own[k]
            with client.adding(lambda theta, g=g: self.alpha * (theta - w) - g):
                client.train()
            theta = client.values()
            own[k] = g - self.alpha * (theta - w)
            trained.append(turn.to_server(theta, since=w))
            moves.append(trained[-1] - w)
        h = state.h - self.alpha * len(moves) / len(clients) * mean(moves)
        return State(mean(trained) - h / self.alpha, h, tuple(own))
