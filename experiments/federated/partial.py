"""Gossamer's own method: cells of a partial model are gossiped, the others are a client's own. No server.

Clients live in the arena: after every round of training they make `exchanges` exchanges of push-sum
on a graph, of the shared coordinates alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...gossip import Count
from ...models import ModelError, SlicedNetwork
from ...topology import Schedule, build_schedule
from ..arena import Arena, Gossip
from .method import WHOLE, Client, GossipMethod, Share, Turn


@dataclass(frozen=True, eq=False)
class State:
    """The clients in an arena, the graphs that they gossip on, and exchanges made so far."""

    arena: Arena
    graphs: Schedule
    made: int


class PartialModels(GossipMethod):
    """Push-sum gossip of a part of every network."""

    share: Share = 1.0
    """The share of each hidden part's cells that everyone shares. Lower it when tasks differ."""
    outputs: Literal["own", "shared"] = "own"
    """Whether output cells are each client's own: right when labels differ in meaning or in number."""
    topology: str = "one-peer-exponential"
    """Who gossips with whom; by default each sends to one other per exchange, another one every time."""
    exchanges: Count = 1
    """Exchanges per round. Raise it when peers disagree, at that many more bytes."""

    def start(self, clients: Sequence[Client]) -> State:
        if len(clients) < 2:
            raise ModelError(
                "gossamer needs at least two clients: one alone has nobody to gossip with"
            )
        for client in clients:
            client.learner.network = self._sliced(client.network)
        graphs = build_schedule(self.topology, len(clients), seed=0)
        arena = Arena(
            [client.learner for client in clients],
            every=clients[0].epochs,
            mixing=Gossip(graphs, exchanges=self.exchanges),
            threads=1,
            wire=self.wire,
        )
        return State(arena, graphs, 0)

    def round(self, state: State, clients: Sequence[Client], turn: Turn) -> State:
        turn.pick(clients)
        state.arena.train()
        if (lockstep := state.arena.lockstep) is not None:
            before = lockstep.sent
            state.arena.average()
            turn.across(lockstep.sent - before)
            return state
        message = clients[0].network.read(WHOLE)
        for exchange in range(state.made, state.made + self.exchanges):
            graph = state.graphs.graph(exchange)
            directions = 1 if graph.is_directed() else 2
            turn.to_peer(message, times=directions * graph.number_of_edges())
        state.arena.average()
        return State(state.arena, state.graphs, state.made + self.exchanges)

    def _sliced(self, old: SlicedNetwork) -> SlicedNetwork:
        """The same module and values, its cells divided between everyone and the client."""
        anatomy = old.slicing.anatomy
        if len(anatomy.parts) < 2:
            raise ModelError(
                "gossamer shares a part of every network, and this one's parts are not known: "
                "gossamer slices says why"
            )
        shares = {"*": self.share, anatomy.parts[-1].name: float(self.outputs == "shared")}
        return SlicedNetwork(
            old.module, {WHOLE: shares}, peer=old.peer, anatomy=anatomy, buffers=old.buffers
        )
