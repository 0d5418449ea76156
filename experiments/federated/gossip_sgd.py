"""Gossip SGD (Blot et al. 2016): every client trains, then pushes to a random other. No server.

    i trains x_i, picks a random j, keeps α_i/2 and sends (x_i, α_i/2)
    x_j ← (α_j x_j + Σ α_i/2 · x_i) / (α_j + Σ α_i/2),   α_j ← α_j + Σ α_i/2

This is push-sum on whole networks. Clients count the same at the start, as in the paper: weights travel
with what they weigh, so that starting them at the clients' samples would be forgotten in a few rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...gossip import Count
from ...models import ModelError
from ..arena import Lockstep
from .method import WHOLE, Client, GossipMethod, Turn, lockstep_of


@dataclass(frozen=True)
class State:
    """Push-sum's weights α and who may hear whom; the networks are the clients' own.

    lockstep: the clients' gossipers, where a wire changes what is pushed.
    """

    alpha: np.ndarray
    neighbours: tuple[tuple[int, ...], ...]
    lockstep: Lockstep | None = None


class GossipSgd(GossipMethod):
    """Whole networks, pushed at random."""

    pushes: Count = 1
    """Pushes per client and round. Raise it when clients disagree, at that many more bytes."""
    topology: str = "clique"
    """Who may push to whom: `ring`, `regular:4`, a file; see `gossamer topology`."""

    def start(self, clients: Sequence[Client]) -> State:
        if len(clients) < 2:
            raise ModelError(
                "gossip-sgd needs at least two clients: one alone has nobody to push to"
            )
        from ...topology import build, require_connected  # scipy: only for those who gossip

        graph = build(self.topology, len(clients), seed=0)
        require_connected(graph)
        return State(
            np.ones(len(clients)),
            tuple(tuple(graph.neighbors(k)) for k in range(len(clients))),
            None if self.wire is None else lockstep_of(clients, self.wire),
        )

    def round(self, state: State, clients: Sequence[Client], turn: Turn) -> State:
        alpha = state.alpha.copy()
        for k in turn.pick(clients):
            clients[k].train()
        if state.lockstep is not None:
            return self._push(state, state.lockstep, turn)
        for _ in range(self.pushes):
            sums = [alpha[k] / 2 * client.values().double() for k, client in enumerate(clients)]
            alpha = alpha / 2
            kept, halves = alpha.copy(), list(sums)
            for i, client in enumerate(clients):
                j = int(turn.rng.choice(state.neighbours[i]))
                turn.to_peer(client.values())
                sums[j] = sums[j] + halves[i]
                alpha[j] += kept[i]
            for client, total, weight in zip(clients, sums, alpha, strict=True):
                client.load(total / weight)
        return State(alpha, state.neighbours)

    def _push(self, state: State, lockstep: Lockstep, turn: Turn) -> State:
        """The same pushes, by the clients' gossipers."""
        before = lockstep.sent
        for _ in range(self.pushes):
            targets = {i: [int(turn.rng.choice(k))] for i, k in enumerate(state.neighbours)}
            lockstep.exchange(WHOLE, targets)
        turn.across(lockstep.sent - before)
        alpha = [lockstep.weight(k, WHOLE) for k in range(len(state.neighbours))]
        return State(np.array(alpha), state.neighbours, lockstep)
