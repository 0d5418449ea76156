"""Averaging in lockstep: means, and products with mixing matrices, over stacked networks.

A block is some coordinates of all peers that implement a partial model, small enough to stay in cache: it
is gathered from the stacks, mixed and put back. Blocks share nothing, so threads take them as they come,
and the result is the same for any number of threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...models import ModelError, SlicedNetwork, check_schema, check_weights, implementers
from ...models.stack import BLOCK_BYTES, Alone, Stack, as_rows
from ...peer import MatchedStore

if TYPE_CHECKING:  # scipy takes a while to load: only for those who have a graph
    import networkx as nx
    from scipy.sparse import csr_array

    from ...topology import Rule, Schedule

WIDEST_BLOCK = 1 << 16
"""Coordinates of a block at most."""
DENSE_COST = 0.2
"""Time of one entry of a mixing matrix in a dense product, against one in a sparse product."""
FOLD_PEERS = 2048
"""Exchanges are multiplied into one matrix for at most so many peers; it fills up as it is folded."""
MEAN_RUN = 16
"""Coordinates that follow each other, on average, from which tiles beat picking one by one."""

Mixer = Callable[[Tensor], Tensor]
"""From a block [members, coordinates] to what its members hold afterwards; one row stands for all."""
Block = tuple[int, int]
"""The first coordinate of a block, and the one after its last."""
Tasks = list[Callable[[], None]]


# --- who mixes with whom ------------------------------------------------------------------------


class Mixing(Protocol):
    """How one partial model is averaged among the peers that implement it."""

    def check(self, models: Mapping[str, Sequence[int]], peers: int, weighted: bool) -> None:
        """Raise what is wrong with it for this swarm, before anything runs."""
        ...

    def matrices(
        self, model: str, members: Sequence[int], step: int, weights: np.ndarray
    ) -> tuple[list[csr_array] | None, np.ndarray]:
        """Return what multiplies the members' values, one matrix after the other; None for their mean.

        `members` are places of learners, in order; `step` counts averagings from 0; `weights` are what
        this returned as its second value last time, and the learners' weights at first.
        """
        ...


@dataclass(frozen=True)
class ExactMean:
    """Everybody gets the weighted mean, at once: what gossip tends to."""

    def check(self, models: Mapping[str, Sequence[int]], peers: int, weighted: bool) -> None:
        pass

    def matrices(
        self, model: str, members: Sequence[int], step: int, weights: np.ndarray
    ) -> tuple[list[csr_array] | None, np.ndarray]:
        return None, weights


@dataclass(frozen=True)
class Server(ExactMean):
    """The same mean, from one peer for every partial model, as in a live swarm's `server` mode.

    It differs from `ExactMean` where a wire changes what is sent to the server and back.
    """


@dataclass(frozen=True, eq=False)
class Gossip:
    """Synchronous exchanges on a graph whose nodes 0 … n−1 are the learners, in order.

        Arena(learners, mixing=Gossip(topology.build("regular:4", 16, seed=1)))

    graph
        A networkx graph, or a topology.Schedule of graphs that change from exchange to exchange. Every
        partial model gossips on the subgraph of the peers that implement it.
    kind
        `push-sum` carries a weight with the values, so that any graph, directed or not, tends to the
        mean (weighted by the arena's `weights`). Weights stay from round to round, and what a peer
        learns counts by the weight it has. `plain` only mixes values: it needs rows that sum to 1,
        which metropolis and max-degree weights have.
    rule
        What a peer gives to whom, see topology.mixing_matrix. If left out: push (equal parts) for
        push-sum, metropolis for plain. Weights on the graph's edges count with `edges` alone.
    exchanges
        How often peers exchange in one averaging. Raise it when peers disagree after a round.
    """

    graph: nx.Graph | Schedule
    kind: Literal["push-sum", "plain"] = "push-sum"
    rule: Rule | None = None
    exchanges: int = 1

    def __post_init__(self) -> None:
        # By what they have: networkx and scipy are loaded by those who made a graph.
        if not (hasattr(self.graph, "nodes") or hasattr(self.graph, "period")):
            raise ModelError(
                f"Gossip({self.graph!r}): give a networkx graph, as topology.build('regular:4', peers) "
                "makes one, or a topology.Schedule"
            )
        if self.kind not in ("push-sum", "plain"):
            raise ModelError(f"unknown gossip {self.kind!r}: there are push-sum, plain")
        if self.exchanges < 1:
            raise ModelError(f"{self.exchanges} exchanges: an averaging needs at least one")
        object.__setattr__(self, "_kept", {})

    @cached_property
    def schedule(self) -> Schedule:
        """Return the graph of every exchange."""
        from ...topology import Schedule, static

        return self.graph if isinstance(self.graph, Schedule) else static(self.graph)

    def exchanges_before(self, step: int) -> int:
        """Return how many exchanges the first `step` averagings make."""
        return step * self.exchanges

    def check(self, models: Mapping[str, Sequence[int]], peers: int, weighted: bool) -> None:
        if weighted and self.kind == "plain":
            raise ModelError("plain gossip cannot weigh peers: use push-sum, or leave out weights")
        from ...topology import Schedule, require_models_connected

        if isinstance(self.graph, Schedule):
            if self.graph.peers != peers:
                raise ModelError(
                    f"the schedule is for {self.graph.peers} peers, and there are {peers} learners"
                )
            return
        if set(self.graph.nodes) != set(range(peers)):
            few = ", ".join(repr(node) for node in list(self.graph)[:4])
            if len(self.graph) == peers:
                few += "; gossamer.topology.plain(graph) numbers them in the graph's order"
            raise ModelError(
                f"the graph has {len(self.graph)} nodes and there are {peers} learners: nodes must be "
                f"the numbers 0 to {peers - 1}, one for each learner, and here they begin with {few}"
            )
        members = {name: list(who) for name, who in models.items()}
        require_models_connected(self.graph, members, self._rule)

    def matrices(
        self, model: str, members: Sequence[int], step: int, weights: np.ndarray
    ) -> tuple[list[csr_array] | None, np.ndarray]:
        found = []
        for exchange in range(self.exchanges_before(step), self.exchanges_before(step + 1)):
            matrix = self._matrix(members, exchange)
            if self.kind == "push-sum":
                matrix, weights = on_estimates(matrix, weights)
            found.append(matrix)
        return found, weights

    @property
    def _rule(self) -> Rule:
        return self.rule or ("push" if self.kind == "push-sum" else "metropolis")

    def _matrix(self, members: Sequence[int], exchange: int) -> csr_array:
        """The matrix of one exchange among the members; those that come again are kept."""
        from ...topology import check_stochastic, mixing_matrix

        schedule = self.schedule
        kept: dict[tuple[int, tuple[int, ...]], csr_array] = self._kept  # type: ignore[attr-defined]
        key = (exchange % schedule.period if schedule.period else -1, tuple(members))
        if key in kept:
            return kept[key]
        some = schedule.graph(exchange).subgraph(members)
        if len(some) < len(members):  # who is away keeps what it has
            some = some.copy()
            some.add_nodes_from(members)
        matrix = mixing_matrix(some, self._rule)
        if self.kind == "plain":
            check_stochastic(matrix, rows=True, names=sorted(members))
        if schedule.period:
            kept[key] = matrix
        return matrix


def on_estimates(matrix: csr_array, weights: np.ndarray) -> tuple[csr_array, np.ndarray]:
    """Return an exchange of push-sum's sums as a matrix on estimates, and the weights after it.

    Estimates are s / w, so an exchange of sums is (1 / w') · W · w on them.
    """
    after = matrix @ weights
    return matrix.multiply(weights[None, :]).multiply(1.0 / after[:, None]).tocsr(), after


def fold(matrices: list[csr_array]) -> list[csr_array]:
    """Return the same exchanges as fewer matrices, where multiplying them first saves work."""
    from scipy.sparse import csr_array

    members = len(matrices[0].indptr) - 1 if matrices else 0
    if len(matrices) < 2 or members > FOLD_PEERS:
        return matrices
    whole = matrices[0]
    for matrix in matrices[1:]:
        whole = csr_array(matrix @ whole)
    cost = min(whole.nnz, DENSE_COST * members * members)
    return [whole] if cost < sum(matrix.nnz for matrix in matrices) else matrices


# --- averaging ----------------------------------------------------------------------------------


class Averager:
    """Averages every partial model of a swarm whose networks lie in stacks.

    rows: for every network its stack, and the row there. stores: one per network where peers of different
    widths share a partial model, which is averaged at the common width that the stores hold.
    """

    def __init__(
        self,
        networks: Sequence[SlicedNetwork],
        rows: Sequence[tuple[Stack | Alone, int]],
        mixing: Mixing,
        weights: Sequence[float] | None,
        stores: Sequence[MatchedStore] = (),
    ):
        self._mixing, self._step = mixing, 0
        shares = np.array(check_weights(networks, weights), dtype=np.float64)
        shared = {model: who for model, who in implementers(networks).items() if len(who) > 1}
        mixing.check(shared, len(networks), weights is not None)
        wide = [set() if store.common is None else set(store.common.owners) for store in stores]
        digests: dict[int, bytes] = {}
        self._plans: list[_StackedModel | _CommonModel] = []
        for model, who in shared.items():
            common = [place for place, models in enumerate(wide) if model in models]
            if len(common) > 1:
                self._plans.append(_CommonModel(model, common, stores))
            else:
                self._plans.append(_StackedModel(model, who, networks, rows, digests))
        self._weights = [shares[plan.members] for plan in self._plans]

    @property
    def common_width(self) -> list[str]:
        """The partial models that are averaged at a common width."""
        return [plan.model for plan in self._plans if isinstance(plan, _CommonModel)]

    def tasks(self) -> list[Tasks]:
        """Return one averaging: lists of tasks, to be done list after list (one list per exchange)."""
        rounds: list[Tasks] = []
        for place, plan in enumerate(self._plans):
            matrices, after = self._mixing.matrices(
                plan.model, plan.members, self._step, self._weights[place]
            )
            for exchange, tasks in enumerate(plan.tasks(matrices, self._weights[place])):
                if len(rounds) <= exchange:
                    rounds.append([])
                rounds[exchange] += tasks
            self._weights[place] = after
        self._step += 1
        return rounds


class _CommonModel:
    """A partial model of peers of different widths, averaged at a common width.

    Whole vectors are read and written, peer by peer: peers' stores hold them beside their networks.
    """

    def __init__(self, model: str, members: list[int], stores: Sequence[MatchedStore]):
        self.model, self.members = model, members
        self._stores = [stores[place] for place in members]
        first = self._stores[0].entries(model)
        for place, store in zip(members, self._stores, strict=True):
            if store.entries(model) != first:
                raise ModelError(
                    f"model {model!r} has not the same common width on all its peers: learners "
                    f"{members[0]} and {place} differ"
                )

    def tasks(self, matrices: list[csr_array] | None, weights: np.ndarray) -> list[Tasks]:
        return [[lambda: self._mix(matrices, weights / weights.sum())]]

    def _mix(self, matrices: list[csr_array] | None, shares: np.ndarray) -> None:
        block = np.stack([store.read(self.model) for store in self._stores])
        mixed = block.astype(np.float64)
        if matrices is None:
            # The mean of differences from one peer: equal values average to themselves, exactly.
            mean = mixed[0] + shares @ (mixed - mixed[0])
            mixed = np.broadcast_to(mean, mixed.shape)
        for matrix in matrices or ():
            mixed = matrix @ mixed
        if not np.isfinite(mixed).all():
            raise ModelError(
                f"model {self.model!r}: values are not finite after averaging; lower the learning rate or "
                "look at the peers' data"
            )
        for store, row in zip(self._stores, mixed, strict=True):
            store.write(self.model, row.astype(block.dtype))


class _StackedModel:
    """Where the values of one partial model lie in the stacks, prepared once."""

    def __init__(
        self,
        model: str,
        members: list[int],
        networks: Sequence[SlicedNetwork],
        rows: Sequence[tuple[Stack | Alone, int]],
        digests: dict[int, bytes],
    ):
        self.model, self.members = model, members
        self._networks = [networks[member] for member in members]
        first = self._networks[0]
        size = len(first.slicing.coordinates(model))
        width = max(16, min(size, WIDEST_BLOCK, BLOCK_BYTES // (4 * len(members))))
        self._blocks = [(at, min(at + width, size)) for at in range(0, size, width)]
        found: dict[object, tuple[Stack | Alone, slice | np.ndarray, list[int], list[int]]] = {}
        for slot, (member, network) in enumerate(zip(members, self._networks, strict=True)):
            check_schema(model, first, network)
            (stack, row), where = rows[member], network.slicing.where(model)
            key = (id(stack), _place_key(where, digests))
            _, _, own_rows, slots = found.setdefault(key, (stack, where, [], []))
            own_rows.append(row)
            slots.append(slot)
        self._pieces = [_Piece(*each, self._blocks) for each in found.values()]
        self._like = self._pieces[0].stack.values[:0, :0]

    def tasks(self, matrices: list[csr_array] | None, weights: np.ndarray) -> list[Tasks]:
        if matrices is None:
            mixers = [self._mean(weights)]
        else:
            mixers = [self._product(matrix) for matrix in fold(matrices)]
        return [
            [lambda b=block, m=mixer: self._mix(b, m) for block in self._blocks] for mixer in mixers
        ]

    def _mix(self, block: Block, mixer: Mixer) -> None:
        """Gather, mix, check, put back."""
        values = self._like.new_empty(len(self.members), block[1] - block[0])
        for piece in self._pieces:
            piece.gather(block, values)
        mixed = mixer(values)
        if not bool(torch.isfinite(mixed.sum())):
            self._refuse_not_finite()
        for piece in self._pieces:
            piece.scatter(block, mixed)

    def _refuse_not_finite(self) -> None:
        """Name the peer and parameter whose value is not finite, if there is one."""
        for piece in self._pieces:
            piece.stack.publish()
        for network in self._networks:
            network.check_finite(self.model, network.read(self.model))

    def _mean(self, weights: np.ndarray) -> Mixer:
        shares = torch.from_numpy(weights / weights.sum()).to(self._like)
        # The mean of differences from one peer: equal values average to themselves, exactly.
        return lambda block: block[0] + shares @ (block - block[0])

    def _product(self, matrix: csr_array) -> Mixer:
        """The quickest product of a matrix with a block."""
        like, members = self._like, len(self.members)
        if matrix.nnz > DENSE_COST * members * members:
            dense = torch.from_numpy(matrix.toarray()).to(like)
            return lambda block: dense @ block
        # A bag of weighted rows for each member is a sparse product, and torch's fastest one.
        index = torch.from_numpy(matrix.indices.astype(np.int64)).to(like.device)
        starts = torch.from_numpy(matrix.indptr[:-1].astype(np.int64)).to(like.device)
        shares = torch.from_numpy(matrix.data).to(like)
        return lambda block: F.embedding_bag(
            index, block, starts, mode="sum", per_sample_weights=shares
        )


class _Piece:
    """Members in one stack whose model lies at the same coordinates."""

    def __init__(
        self,
        stack: Stack | Alone,
        where: slice | np.ndarray,
        rows: list[int],
        slots: list[int],
        blocks: Sequence[Block],
    ):
        device = stack.values.device
        self.stack = stack
        self._rows, self._slots = as_rows(rows, device), as_rows(slots, device)
        tiled = tiles(where)
        self._tiles = {} if tiled is None else {block: span(tiled, *block) for block in blocks}
        self._index = None if tiled is not None else torch.as_tensor(where, device=device)

    def gather(self, block: Block, values: Tensor) -> None:
        """Copy the members' coordinates of a block into their rows of `values`."""
        source, rows, slots = self.stack.values, self._rows, self._slots
        if self._index is not None:
            columns = self._index[slice(*block)]
            if isinstance(rows, slice):
                picked = source[rows].index_select(1, columns)
            else:
                picked = source[rows[:, None], columns]
            values[slots] = picked.to(values.device)
            return
        at = 0
        for tile in self._tiles[block]:
            target = values[:, at : at + tile.size].unflatten(1, (tile.count, tile.length))
            target[slots] = tile.of(source)[rows].to(values.device)
            at += tile.size

    def scatter(self, block: Block, mixed: Tensor) -> None:
        """Write mixed values back, one row for each member or one for all."""
        goal, rows = self.stack.values, self._rows
        mixed = (mixed[self._slots] if mixed.ndim == 2 else mixed).to(goal.device)
        if self._index is not None:
            columns = self._index[slice(*block)]
            if isinstance(rows, slice):
                some = goal[rows]
                some.index_copy_(1, columns, mixed.expand(len(some), len(columns)))
            else:
                goal[rows[:, None], columns] = mixed
            return
        at = 0
        for tile in self._tiles[block]:
            part = mixed[..., at : at + tile.size].unflatten(-1, (tile.count, tile.length))
            tile.of(goal)[rows] = part
            at += tile.size


def _place_key(where: slice | np.ndarray, digests: dict[int, bytes]) -> object:
    """Equal for equal coordinates; peers that slice alike share one array, which is hashed once."""
    if isinstance(where, slice):
        return where.start, where.stop
    if id(where) not in digests:
        digests[id(where)] = hashlib.blake2b(where.tobytes()).digest()
    return digests[id(where)]


# --- coordinates as few regular pieces ----------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """`count` runs of `length` coordinates, the first at `start`, each `stride` after the one before.

    The coordinates of a slice in a weight matrix are some first columns of some first rows: one tile. A
    slice of a whole network is about one per parameter, read and written by copying, not by picking.
    """

    start: int
    count: int
    stride: int
    length: int

    @property
    def size(self) -> int:
        """Coordinates in it."""
        return self.count * self.length

    def of(self, rows: Tensor) -> Tensor:
        """Return the tile's values in rows of a stack, [rows, count, length]: a view."""
        return rows.as_strided(
            (len(rows), self.count, self.length),
            (rows.stride(0), self.stride, 1),
            rows.storage_offset() + self.start,
        )

    def cut(self, first: int, last: int) -> list[Tile]:
        """Return the part of its coordinates from `first` to `last`, counted in their order."""
        found: list[Tile] = []
        while first < last:
            run, inside = divmod(first, self.length)
            if inside or last - first < self.length:  # a run that begins or ends in the middle
                size = min(self.length - inside, last - first)
                found.append(Tile(self.start + run * self.stride + inside, 1, 0, size))
            else:
                runs = (last - first) // self.length
                size = runs * self.length
                found.append(Tile(self.start + run * self.stride, runs, self.stride, self.length))
            first += size
        return found


def tiles(where: slice | np.ndarray) -> list[Tile] | None:
    """Return coordinates as tiles, in their order; None where they are too scattered for it."""
    if isinstance(where, slice):
        return [Tile(where.start, 1, 0, where.stop - where.start)]
    breaks = np.flatnonzero(np.diff(where) != 1) + 1
    starts = np.concatenate([[0], breaks])
    lengths = np.diff(np.concatenate([starts, [len(where)]]))
    if len(where) < MEAN_RUN * len(starts):
        return None
    found: list[Tile] = []
    for first, length in zip(where[starts].tolist(), lengths.tolist(), strict=True):
        if found and found[-1].length == length:
            last = found[-1]
            stride = first - (last.start + (last.count - 1) * last.stride)
            if stride > 0 and (last.count == 1 or stride == last.stride):
                found[-1] = Tile(last.start, last.count + 1, stride, length)
                continue
        found.append(Tile(first, 1, 0, length))
    return found


def span(tiled: list[Tile], first: int, last: int) -> list[Tile]:
    """Return the part of some tiles' coordinates from `first` to `last`, counted in their order."""
    found: list[Tile] = []
    at = 0
    for tile in tiled:
        a, b = max(first - at, 0), min(last - at, tile.size)
        if a < b:
            found += tile.cut(a, b)
        at += tile.size
    return found
