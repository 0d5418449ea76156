"""Federated averaging (McMahan et al. 2017; deck 001's Algorithm 1).

    S_t ← max(C·K, 1) random clients
    w_k ← E epochs of w ← w − η ∇ℓ(w; b), batches b of size B, from w_t     for k in S_t
    w_{t+1} ← Σ_k n_k/n · w_k                                               n = Σ_{k in S_t} n_k

Live, this is `gossamer swarm` with `mode = "server"` in [gossip], `weights = "samples"` and one model
that has all cells; clients then train `local_samples` × `every` samples in a round.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .method import Client, ServerMethod, Turn, mean


class FedAvg(ServerMethod):
    """Averages networks, weighted by samples. The state is w."""

    def start(self, clients: Sequence[Client]) -> Tensor:
        return clients[0].values()

    def round(self, state: Tensor, clients: Sequence[Client], turn: Turn) -> Tensor:
        w, trained, n = state, [], []
        for k in turn.pick(clients, self.participation):
            client = clients[k]
            client.load(turn.to_client(w))
            self.update(client, w)
            trained.append(turn.to_server(client.values(), since=w))
            n.append(client.samples)
        return mean(trained, n)

    def update(self, client: Client, w: Tensor) -> None:
        """ClientUpdate(k, w); the client's network holds w already."""
        client.train()
