"""Federated methods without a server: Gossip SGD and Gossamer.

Gossip SGD (Blot et al. 2016): every client trains, then pushes its network to a random other client.

    i trains x_i, picks a random j, keeps α_i/2 and sends (x_i, α_i/2)
    x_j ← (α_j x_j + Σ α_i/2 · x_i) / (α_j + Σ α_i/2),   α_j ← α_j + Σ α_i/2

This is push-sum on whole networks. All clients start with the same weight, as in the paper: weights move from
client to client with the values, so starting weights by numbers of samples would be mixed up in a few rounds.

Gossamer: the cells of one partial model are gossiped, all other cells are local to each client. The clients
run in the arena: after every round of training they make `exchanges` exchanges of push-sum on a graph, which
carry only the shared coordinates. In the variant `auto`, clients share every cell at first and decide while
they learn which ones to keep to themselves, or to average in groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from ...gossip import Array, Count, WireSettings
from ...models import ModelError, SlicedNetwork, implementers
from ...topology import Schedule, build, build_schedule, require_connected
from ..arena import Arena, AutoSharing, Gossip, Lockstep, Wire
from .method import GLOBAL_MODEL, Client, Method, RoundContext, Share


class GossipMethod(Method, WireSettings):
    """A method whose clients push to each other; it has the same settings of the wire as live peers."""

    @property
    def wire(self) -> Wire | None:
        """How values change on the way between clients; None if they arrive unchanged."""
        unchanged = self.compress is None and self.drift is None and self.dtype == "float32"
        return None if unchanged else Wire(self.dtype, self.compress, self.drift)


def require_two(clients: Sequence[Client], method: str) -> None:
    """Raise ModelError if there are fewer than two clients."""
    if len(clients) < 2:
        raise ModelError(f"{method} needs at least two clients: a single client has no neighbours")


# --- Gossip SGD -------------------------------------------------------------------------------------


class WholeNetwork:
    """Lets a gossiper read and write a client's parameters as one vector."""

    def __init__(self, client: Client):
        self._client = client

    def names(self) -> Iterable[str]:
        """The name of the one vector."""
        return (GLOBAL_MODEL,)

    def read(self, name: str) -> Array:
        """A copy of the network's values."""
        return self._client.values().cpu().numpy()

    def write(self, name: str, value: Array) -> None:
        """Replace the network's values."""
        self._client.load(torch.from_numpy(value))


def lockstep_of(clients: Sequence[Client], wire: Wire) -> Lockstep:
    """Simulate the clients' gossipers over the wire; all clients have the same push-sum weight."""
    shapes = [tuple(value.shape) for value in clients[0].network.module.parameters()]
    fit = wire.fitted({GLOBAL_MODEL: shapes}, {GLOBAL_MODEL: len(clients[0].network.flat)})
    names = [client.name for client in clients]
    return Lockstep(names, [WholeNetwork(each) for each in clients], [1.0] * len(clients), fit)


@dataclass(frozen=True)
class Pushed:
    """Push-sum's weights α and every client's neighbours; the clients themselves hold the networks.

    lockstep: simulates the clients' gossipers; None if values arrive unchanged.
    """

    alpha: np.ndarray
    neighbours: tuple[tuple[int, ...], ...]
    lockstep: Lockstep | None = None


class GossipSgd(GossipMethod):
    """Clients push their whole networks to random neighbours."""

    pushes: Count = 1
    """Pushes per client and round. Raise it when clients disagree, at that many more bytes."""
    topology: str = "clique"
    """Which clients may push to which: `ring`, `regular:4`, a file; see `gossamer topology`."""

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
            half_weights, half_sums = alpha.copy(), list(sums)
            for i, client in enumerate(clients):
                j = int(context.rng.choice(state.neighbours[i]))
                context.to_peer(client.values())
                sums[j] = sums[j] + half_sums[i]
                alpha[j] += half_weights[i]
            for client, total, weight in zip(clients, sums, alpha, strict=True):
                client.load(total / weight)
        return Pushed(alpha, state.neighbours)

    def _push(self, state: Pushed, lockstep: Lockstep, context: RoundContext) -> Pushed:
        """Make the pushes of one round by the simulated gossipers, which count bytes themselves."""
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
    """The clients in an arena, the graph of every exchange, and the number of exchanges made so far."""

    arena: Arena
    graphs: Schedule
    exchanges_made: int


class PartialModels(GossipMethod):
    """Push-sum gossip of the shared cells of every network."""

    share: Share = 1.0
    """The fraction of each hidden layer's cells that all clients share. Lower it when tasks differ."""
    outputs: Literal["own", "shared"] = "own"
    """Whether output cells are local to each client: "own" if labels differ in meaning or in number."""
    topology: str = "one-peer-exponential"
    """Which clients gossip with which; by default each sends to one client per exchange, in rotation."""
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
        context.pick(clients)  # draws the same random numbers as other methods
        state.arena.train()
        if (lockstep := state.arena.wire_simulation) is not None:
            before = lockstep.sent
            state.arena.average()
            context.across += lockstep.sent - before
            return state
        message = clients[0].network.read(GLOBAL_MODEL)
        for exchange in range(state.exchanges_made, state.exchanges_made + self.exchanges):
            graph = state.graphs.graph(exchange)
            directions = 1 if graph.is_directed() else 2
            context.to_peer(message, times=directions * graph.number_of_edges())
        state.arena.average()
        return Gossiping(state.arena, state.graphs, state.exchanges_made + self.exchanges)

    def _sliced(self, old: SlicedNetwork) -> SlicedNetwork:
        """Return the same module and values, with cells divided into shared and local ones."""
        anatomy = old.slicing.anatomy
        if len(anatomy.parts) < 2:
            raise ModelError(
                "gossamer shares cells of every layer, and this network's layers could not be analysed: "
                "gossamer slices says why"
            )
        shares = {"*": self.share, anatomy.parts[-1].name: float(self.outputs == "shared")}
        return SlicedNetwork(
            old.module, {GLOBAL_MODEL: shares}, peer=old.peer, anatomy=anatomy, buffers=old.buffers
        )


@dataclass(frozen=True, eq=False)
class Deciding:
    """The clients in an arena, and what decides about their sharing."""

    arena: Arena
    sharing: AutoSharing


class AutoPartialModels(Method):
    """Push-sum gossip of the cells that clients have decided to share, with all others or with some."""

    topology: str = "exponential"
    """Which clients gossip with which. Links are added where a group that clients have formed is not
    connected, so the graph must not change over time."""
    exchanges: Count = 1
    """Exchanges per round. Raise it when peers disagree, at that many more bytes."""

    def start(self, clients: Sequence[Client]) -> Deciding:
        require_two(clients, "auto")
        graph = build(self.topology, len(clients), seed=0)
        sharing = AutoSharing()
        arena = Arena(
            [client.learner for client in clients],
            every=clients[0].epochs,
            mixing=Gossip(graph, exchanges=self.exchanges),
            threads=1,
            sharing=sharing,
        )
        return Deciding(arena, sharing)

    def warning(self, state: Deciding) -> str:
        reason = state.sharing.reason
        return reason and f"everything stays shared: {reason}"

    def round(self, state: Deciding, clients: Sequence[Client], context: RoundContext) -> Deciding:
        context.pick(clients)  # draws the same random numbers as other methods
        context.across += self.exchanges * self._bytes_per_exchange(state, clients)
        state.arena.train_and_average()
        return state

    @staticmethod
    def _bytes_per_exchange(state: Deciding, clients: Sequence[Client]) -> int:
        """Return the bytes of all messages: every shared model, and what clients tell to decide."""
        assert isinstance(state.arena.mixing, Gossip)
        graph = state.arena.mixing.schedule.graph(0)
        directions = 1 if graph.is_directed() else 2
        networks = [client.network for client in clients]
        values = 0
        for model, members in implementers(networks).items():
            edges = graph.subgraph(members).number_of_edges()
            values += edges * len(networks[members[0]].slicing.coordinates(model))
        if not state.sharing.reason:
            values += graph.number_of_edges() * state.sharing.plan.layout.size
        return directions * values * networks[0].flat.element_size()
