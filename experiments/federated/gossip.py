"""Methods without a server: Gossip SGD and Gossamer's own.

Gossip SGD (Blot et al. 2016): every client trains, then pushes to a random other.

    i trains x_i, picks a random j, keeps α_i/2 and sends (x_i, α_i/2)
    x_j ← (α_j x_j + Σ α_i/2 · x_i) / (α_j + Σ α_i/2),   α_j ← α_j + Σ α_i/2

This is push-sum on whole networks. Clients count the same at the start, as in the paper: weights travel
with what they weigh, so that starting them at the clients' samples would be forgotten in a few rounds.

Gossamer: cells of a partial model are gossiped, the others are a client's own. Clients live in the arena:
after every round of training they make `exchanges` exchanges of push-sum on a graph, of shared coordinates
alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from ...gossip import Array, Count, WireSettings
from ...models import ModelError, SlicedNetwork
from ...topology import Schedule, build, build_schedule, require_connected
from ..arena import Arena, Gossip, Lockstep, Wire
from .method import GLOBAL_MODEL, Client, Method, RoundContext, Share


class GossipMethod(Method, WireSettings):
    """A method whose clients push to each other, as live peers do, over a wire with the knobs of theirs."""

    @property
    def wire(self) -> Wire | None:
        """What becomes of values between clients; None if they arrive as they are."""
        plain = self.compress is None and self.drift is None and self.dtype == "float32"
        return None if plain else Wire(self.dtype, self.compress, self.drift)


def require_two(clients: Sequence[Client], method: str) -> None:
    """ModelError for a client that is alone."""
    if len(clients) < 2:
        raise ModelError(f"{method} needs at least two clients: one alone has nobody to push to")


# --- Gossip SGD -------------------------------------------------------------------------------------


class WholeNetwork:
    """A client's parameters as one vector, for its gossiper."""

    def __init__(self, client: Client):
        self._client = client

    def names(self) -> Iterable[str]:
        """The one vector."""
        return (GLOBAL_MODEL,)

    def read(self, name: str) -> Array:
        """A copy of the network's values."""
        return self._client.values().cpu().numpy()

    def write(self, name: str, value: Array) -> None:
        """Replace the network's values."""
        self._client.load(torch.from_numpy(value))


def lockstep_of(clients: Sequence[Client], wire: Wire) -> Lockstep:
    """The clients' gossipers, whole networks, all of the same weight."""
    blocks = [tuple(value.shape) for value in clients[0].network.module.parameters()]
    fit = wire.fitted({GLOBAL_MODEL: blocks}, {GLOBAL_MODEL: len(clients[0].network.flat)})
    names = [client.name for client in clients]
    return Lockstep(names, [WholeNetwork(each) for each in clients], [1.0] * len(clients), fit)


@dataclass(frozen=True)
class Pushed:
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

    def start(self, clients: Sequence[Client]) -> Pushed:
        require_two(clients, "gossip-sgd")
        graph = build(self.topology, len(clients), seed=0)
        require_connected(graph)
        return Pushed(
            np.ones(len(clients)),
            tuple(tuple(graph.neighbors(k)) for k in range(len(clients))),
            None if self.wire is None else lockstep_of(clients, self.wire),
        )

    def round(self, state: Pushed, clients: Sequence[Client], context: RoundContext) -> Pushed:
        alpha = state.alpha.copy()
        for k in context.pick(clients):
            clients[k].train()
        if state.lockstep is not None:
            return self._push(state, state.lockstep, context)
        for _ in range(self.pushes):
            sums = [alpha[k] / 2 * client.values().double() for k, client in enumerate(clients)]
            alpha = alpha / 2
            kept, halves = alpha.copy(), list(sums)
            for i, client in enumerate(clients):
                j = int(context.rng.choice(state.neighbours[i]))
                context.to_peer(client.values())
                sums[j] = sums[j] + halves[i]
                alpha[j] += kept[i]
            for client, total, weight in zip(clients, sums, alpha, strict=True):
                client.load(total / weight)
        return Pushed(alpha, state.neighbours)

    def _push(self, state: Pushed, lockstep: Lockstep, context: RoundContext) -> Pushed:
        """The same pushes, by the clients' gossipers, which count their bytes themselves."""
        before = lockstep.sent
        for _ in range(self.pushes):
            targets = {i: [int(context.rng.choice(k))] for i, k in enumerate(state.neighbours)}
            lockstep.exchange(GLOBAL_MODEL, targets)
        context.across += lockstep.sent - before
        alpha = [lockstep.weight(k, GLOBAL_MODEL) for k in range(len(state.neighbours))]
        return Pushed(np.array(alpha), state.neighbours, lockstep)


# --- Gossamer ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Gossiping:
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

    def start(self, clients: Sequence[Client]) -> Gossiping:
        require_two(clients, "gossamer")
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
        return Gossiping(arena, graphs, 0)

    def round(
        self, state: Gossiping, clients: Sequence[Client], context: RoundContext
    ) -> Gossiping:
        context.pick(clients)
        state.arena.train()
        if (lockstep := state.arena.wire_simulation) is not None:
            before = lockstep.sent
            state.arena.average()
            context.across += lockstep.sent - before
            return state
        message = clients[0].network.read(GLOBAL_MODEL)
        for exchange in range(state.made, state.made + self.exchanges):
            graph = state.graphs.graph(exchange)
            directions = 1 if graph.is_directed() else 2
            context.to_peer(message, times=directions * graph.number_of_edges())
        state.arena.average()
        return Gossiping(state.arena, state.graphs, state.made + self.exchanges)

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
            old.module, {GLOBAL_MODEL: shares}, peer=old.peer, anatomy=anatomy, buffers=old.buffers
        )
