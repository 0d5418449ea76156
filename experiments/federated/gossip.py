"""Federated methods without a server: Gossip SGD and Gossamer.

Gossip SGD (Blot et al. 2016): every client trains, then pushes its network to a random other client.

    i trains x_i, picks a random j, keeps α_i/2 and sends (x_i, α_i/2)
    x_j ← (α_j x_j + Σ α_i/2 · x_i) / (α_j + Σ α_i/2),   α_j ← α_j + Σ α_i/2      Σ over all i that picked j,
                                                         where α_j on the right is what j has kept

This is push-sum on whole networks. All clients start with the same weight α, as in the paper. Weights by
numbers of samples would not last: a weight moves on with the values, and soon says nothing about the client
that holds it.

Gossamer: all clients share some cells of their networks (those of one partial model), and each keeps the
other cells to itself. After every round of training, clients average the parameters that belong to shared
cells alone, by `exchanges` exchanges of push-sum on a graph; the arena, our simulator, runs both. In the
variant `auto`, clients share every cell at first and decide while they learn which ones to keep to
themselves, or to average in groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from ...gossip import Array, Count, WireSettings, alternatives
from ...models import ModelError
from ..config.tables import Fraction
from .method import GLOBAL_MODEL, Client, Method, NonzeroFraction, RoundContext

if TYPE_CHECKING:  # so that reading a config and `gossamer explain` do not import torch
    import networkx as nx

    from ...models import SlicedNetwork
    from ...topology import Schedule
    from ..arena import Arena, Lockstep, Wire


class GossipMethod(Method, WireSettings):
    """A method whose clients push to each other, with the same keys for encoding values as live peers."""

    @property
    def wire(self) -> Wire | None:
        """How values are rounded or compressed, and which pushes `drift` skips; None if neither."""
        from ..arena import Wire

        wire = Wire.of(self)
        return None if wire == Wire() else wire


def require_two_clients(clients: Sequence[Client], method: str) -> None:
    """Raise ModelError if there are fewer than two clients."""
    if len(clients) < 2:
        raise ModelError(f"{method} needs at least two clients: a single client has no neighbours")


# --- Gossip SGD -------------------------------------------------------------------------------------


class WholeNetwork:
    """The store through which a gossiper reads and writes all parameters of a client, as one vector."""

    def __init__(self, client: Client):
        self._client = client

    def names(self) -> Iterable[str]:
        """Return the name of the one vector."""
        return (GLOBAL_MODEL,)

    def read(self, name: str) -> Array:
        """Return a copy of the network's values."""
        return self._client.values().cpu().numpy()

    def write(self, name: str, value: Array) -> None:
        """Replace the network's values."""
        import torch

        self._client.load(torch.from_numpy(value))


def simulate_gossipers(clients: Sequence[Client], wire: Wire) -> Lockstep:
    """Return a simulation of the clients' gossipers; all clients have the same push-sum weight.

    wire: how values are encoded. Raises ModelError if its compressor does not fit the network.
    """
    from ..arena import Lockstep

    shapes = [tuple(value.shape) for value in clients[0].network.parameters.values()]
    fitted_wire = wire.fitted({GLOBAL_MODEL: shapes}, {GLOBAL_MODEL: len(clients[0].network.flat)})
    names = [client.name for client in clients]
    networks = [WholeNetwork(client) for client in clients]
    return Lockstep(names, networks, [1.0] * len(clients), fitted_wire)


@dataclass(frozen=True)
class PushSumState:
    """Push-sum's weights α and every client's neighbours; the clients themselves hold the networks.

    lockstep: the simulation of the clients' gossipers; None if values arrive unchanged.
    """

    alpha: np.ndarray
    neighbours: tuple[tuple[int, ...], ...]
    lockstep: Lockstep | None = None


class GossipSgd(GossipMethod):
    """Clients push their whole networks to random neighbours."""

    pushes: Count = 1
    """How often a client pushes in a round. Raise it when clients disagree; the bytes sent grow in
    proportion."""
    topology: str = "clique"
    """Which clients may push to which: `ring`, `regular:4`, a file beside the config; see `gossamer
    topology`."""

    def start(self, clients: Sequence[Client]) -> PushSumState:
        from ...topology import build, require_connected

        require_two_clients(clients, "gossip-sgd")
        graph = build(self.topology, len(clients), seed=0)
        require_connected(graph)
        return PushSumState(
            np.ones(len(clients)),
            tuple(tuple(graph.neighbors(k)) for k in range(len(clients))),
            None if self.wire is None else simulate_gossipers(clients, self.wire),
        )

    def round(
        self, state: PushSumState, clients: Sequence[Client], context: RoundContext
    ) -> PushSumState:
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
                context.to_peer(client.values())  # counts the bytes
                sums[j] = sums[j] + half_sums[i]
                alpha[j] += half_weights[i]
            for client, total, weight in zip(clients, sums, alpha, strict=True):
                client.load(total / weight)
        return PushSumState(alpha, state.neighbours)

    def _push(self, state: PushSumState, lockstep: Lockstep, context: RoundContext) -> PushSumState:
        """Make the pushes of one round by the simulated gossipers, which count bytes themselves."""
        sent_before = lockstep.sent
        for _ in range(self.pushes):
            targets = {
                i: [int(context.rng.choice(neighbours))]
                for i, neighbours in enumerate(state.neighbours)
            }
            lockstep.exchange(GLOBAL_MODEL, targets)
        context.bytes_between_clients += lockstep.sent - sent_before
        alpha = [lockstep.weight(k, GLOBAL_MODEL) for k in range(len(state.neighbours))]
        return PushSumState(np.array(alpha), state.neighbours, lockstep)


# --- Gossamer ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ArenaState:
    """The arena (simulator) that holds the clients, and the number of exchanges so far."""

    arena: Arena
    exchanges_made: int = 0


class ArenaMethod(Method):
    """A method whose clients gossip the cells that they share, in the arena."""

    exchanges: Count = 1
    """How often clients exchange values in a round. Raise it when they disagree; the bytes sent grow in
    proportion."""

    def start_arena(
        self, clients: Sequence[Client], graphs: Schedule | nx.Graph, **options: Any
    ) -> ArenaState:
        """Return the state before the first round; options: further keyword arguments of `Arena`."""
        from ..arena import Arena, Gossip

        arena = Arena(
            [client.learner for client in clients], every=clients[0].epochs,
            mixing=Gossip(graphs, exchanges=self.exchanges), threads=1, **options,
        )  # fmt: skip
        return ArenaState(arena)

    def round(
        self, state: ArenaState, clients: Sequence[Client], context: RoundContext
    ) -> ArenaState:
        context.pick(clients)  # so that a generator shared with other methods stays in step
        if (lockstep := state.arena.wire_simulation) is not None:
            sent_before = lockstep.sent
            state.arena.train_and_average()
            context.bytes_between_clients += lockstep.sent - sent_before
            return state
        made = state.exchanges_made + self.exchanges
        for exchange in range(state.exchanges_made, made):
            context.bytes_between_clients += _bytes_of_exchange(state.arena, clients, exchange)
        state.arena.train_and_average()
        return ArenaState(state.arena, made)


def _bytes_of_exchange(arena: Arena, clients: Sequence[Client], exchange: int) -> int:
    """Return the bytes of all messages: the shared models, and the statistics by which clients decide."""
    from ...models import networks_by_model
    from ..arena import Gossip

    assert isinstance(arena.mixing, Gossip)
    graph = arena.mixing.schedule.graph(exchange)
    directions = 1 if graph.is_directed() else 2
    networks = [client.network for client in clients]
    values = 0
    for model, members in networks_by_model(networks).items():
        if model in arena.mixing.complete:  # a group has formed: each member sends to all others
            messages = len(members) * (len(members) - 1)
        else:
            messages = directions * graph.subgraph(members).number_of_edges()
        values += messages * len(networks[members[0]].slicing.coordinates(model))
    if arena.sharing is not None and arena.sharing.can_decide:
        values += directions * graph.number_of_edges() * arena.sharing.plan.layout.size
    return values * networks[0].flat.element_size()


class PartialModels(ArenaMethod, GossipMethod):
    """Push-sum gossip of the shared cells of every network."""

    share: Annotated[
        NonzeroFraction | dict[str, Fraction],
        alternatives("should be a fraction above 0, up to 1, or a table of fractions by part"),
    ] = 1.0
    """The fraction of each hidden layer's cells that all clients share. Lower it when tasks differ. Or a
    table of fractions by part, as `share` of [[models]]: `{"*" = 1.0, "fc2" = 0}`."""
    outputs: Literal["own", "shared"] = "own"
    """own: output cells are local to each client; choose it if labels differ in meaning or in number. shared:
    all clients share them. An entry of a table `share` with exactly the name of the last part overrides this
    key; a pattern such as `*` does not."""
    buffers: Literal["average", "local", "recompute"] | None = None
    """What clients do with batch norm; overrides `network.buffers` for this method. "local" gives each client
    its own norms: with `outputs = "shared"`, this is FedBN by gossip."""
    topology: str = "one-peer-exponential"
    """Which clients gossip with which; by default each sends to one client per exchange, in rotation."""

    def start(self, clients: Sequence[Client]) -> ArenaState:
        from ...topology import build_schedule

        require_two_clients(clients, "gossamer")
        for client in clients:
            client.learner.network = self._slice_network(client.network)
        graphs = build_schedule(self.topology, len(clients), seed=0)
        return self.start_arena(clients, graphs, wire=self.wire)

    def _slice_network(self, network: SlicedNetwork) -> SlicedNetwork:
        """Return the same module and values, with its cells divided into shared and local ones."""
        from ...models import SlicedNetwork

        anatomy = network.slicing.anatomy
        if len(anatomy.parts) < 2:
            raise ModelError(
                "gossamer shares cells of every layer, and this network's layers could not be analysed: "
                "run gossamer slices to see why"
            )
        if self.buffers is not None and not anatomy.statistics:
            raise ModelError(
                f'buffers = "{self.buffers}" has no effect: the network has no batch norm; leave it out'
            )
        table = self.share if isinstance(self.share, dict) else {"*": self.share}
        last = anatomy.parts[-1].name
        # Of several entries that match a part, the last one counts.
        shares = {part: share for part, share in table.items() if part != last}
        shares[last] = table.get(last, float(self.outputs == "shared"))
        return SlicedNetwork(
            network.module, {GLOBAL_MODEL: shares}, peer=network.peer, anatomy=anatomy,
            buffers=self.buffers or network.buffers,
        )  # fmt: skip


class AutoPartialModels(ArenaMethod):
    """Push-sum gossip of the cells that clients have decided to share, with all others or with some."""

    topology: str = "exponential"
    """Which clients gossip with which: one graph, which does not change over time. Clients that have formed a
    group are all neighbours in it, whatever the graph is."""

    def start(self, clients: Sequence[Client]) -> ArenaState:
        from ...topology import build
        from ..arena import AutoSharing

        require_two_clients(clients, "auto")
        graph = build(self.topology, len(clients), seed=0)
        return self.start_arena(clients, graph, sharing=AutoSharing())

    def warning(self, state: ArenaState) -> str:
        sharing = state.arena.sharing
        assert sharing is not None
        return "" if sharing.can_decide else f"everything stays shared: {sharing.reason}"
