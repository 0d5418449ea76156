"""Federated averaging (McMahan et al. 2017; deck 001's Algorithm 1), and FedProx (Li et al. 2020).

    S_t ← max(C·K, 1) random clients
    w_k ← E epochs of w ← w − η ∇ℓ(w; b), batches b of size B, from w_t     for k in S_t
    w_{t+1} ← Σ_k n_k/n · w_k                                               n = Σ_{k in S_t} n_k

Live, this is `gossamer swarm` with `mode = "server"` in [gossip], `weights = "samples"` and one model
that has all cells; clients then train `local_samples` × `every` samples in a round.

FedProx holds its clients back by a proximal term: client k descends on

    h_k(w) = F_k(w) + μ/2 · ‖w − w_t‖²,   ∇h_k = ∇F_k + μ (w − w_t)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .method import Client, ServerMethod, Strength, Turn, mean


@dataclass(frozen=True)
class State:
    """The server's network."""

    w: Tensor


class FedAvg(ServerMethod):
    """Averages networks, weighted by samples."""

    def start(self, clients: Sequence[Client]) -> State:
        return State(clients[0].values())

    def round(self, state: State, clients: Sequence[Client], turn: Turn) -> State:
        w, trained, n = state.w, [], []
        for _, client in self.visit(clients, turn, w):
            self.update(client, w)
            trained.append(turn.to_server(client.values(), since=w))
            n.append(client.samples)
        return State(mean(trained, n))

    def update(self, client: Client, w: Tensor) -> None:
        """ClientUpdate(k, w); the client's network holds w already."""
        client.train()


class FedProx(FedAvg):
    """FedAvg with a pull towards the server's network; at μ = 0 it is FedAvg."""

    mu: Strength = 0.1
    """μ: raise it when clients' data differ and local training drifts apart, lower it to learn faster."""

    def update(self, client: Client, w: Tensor) -> None:
        with client.adding(lambda y: self.mu * (y - w)):
            client.train()
