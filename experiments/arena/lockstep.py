"""Averaging in lockstep: means, and products with mixing matrices, over stacked networks.

Learner, network and peer number i belong together: they have the same index. The *members* of a partial model
are the peers that give cells to it (elsewhere: its implementers). Networks of one architecture are rows of a
`Stack`; a network that cannot be stacked is a `SingleNetwork`, a stack of one row. A block is a range of
coordinates of all members of a partial model, small enough to stay in cache. It is gathered from the stacks,
mixed and written back. Blocks are independent, so threads can process them in any order, and the result is
the same for any number of threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...models import ModelError, SlicedNetwork, check_schema, check_weights, implementers
from ...models.stack import BLOCK_BYTES, SingleNetwork, Stack, row_index
from ...peer import MatchedStore

if TYPE_CHECKING:  # scipy is slow to import, and needed only with a graph
    import networkx as nx
    from scipy.sparse import csr_array

    from ...topology import Rule, Schedule

WIDEST_BLOCK = 1 << 16
"""The maximal number of coordinates in a block."""
DENSE_COST = 0.2
"""Time per entry of a mixing matrix in a dense product, relative to a nonzero entry in a sparse product."""
FOLD_PEERS = 2048
"""The most peers for which exchanges are multiplied into one matrix, which becomes dense on the way."""
MIN_RUN_FOR_TILES = 16
"""Coordinates are copied as tiles if their runs of consecutive numbers have at least this mean length; with
shorter runs, index lists are faster."""

Mixer = Callable[[Tensor], Tensor]
"""Maps a block [members, coordinates] to the values after mixing: a row per member, or one row for all."""
Block = tuple[int, int]
"""The first coordinate of a block, and the one after its last."""
Tasks = list[Callable[[], None]]


# --- mixing rules -------------------------------------------------------------------------------


class Mixing(Protocol):
    """How one partial model is averaged among its members."""

    def check(self, models: Mapping[str, Sequence[int]], peers: int, weighted: bool) -> None:
        """Raise ModelError if this mixing is impossible for these models and peers."""
        ...

    def matrices(
        self, model: str, members: Sequence[int], step: int, weights: np.ndarray
    ) -> tuple[list[csr_array] | None, np.ndarray]:
        """Return the matrices by which the members' values are multiplied, in order, and the new weights.

        None instead of matrices stands for the weighted mean. `members` are their indices, sorted;
        `step` counts averagings from 0; `weights` are the weights that the last call returned, and in the
        first call the learners' weights.
        """
        ...


@dataclass(frozen=True)
class ExactMean:
    """All peers get the weighted mean, which is the limit of gossip."""

    def check(self, models: Mapping[str, Sequence[int]], peers: int, weighted: bool) -> None:
        pass

    def matrices(
        self, model: str, members: Sequence[int], step: int, weights: np.ndarray
    ) -> tuple[list[csr_array] | None, np.ndarray]:
        return None, weights


@dataclass(frozen=True)
class Server(ExactMean):
    """One peer computes the mean of each partial model, as in a live swarm's `server` mode.

    Here it is the same as `ExactMean`. They differ only with Arena(wire=…), where events.py simulates the
    messages to the server and back, which change the values (rounding, compression).
    """


@dataclass(frozen=True, eq=False)
class Gossip:
    """Synchronous exchanges on a graph whose nodes 0 … n−1 are the learners, in order.

        Arena(learners, mixing=Gossip(topology.build("regular:4", 16, seed=1)))

    graph
        A networkx graph, or a topology.Schedule with a graph for each exchange. Every partial model is
        averaged on the subgraph of its members.
    kind
        `push-sum` sends a weight with the values, so that values converge to the mean (weighted by the
        arena's `weights`) on any connected graph, directed or not. Weights are kept from round to round:
        what a peer learns enters the mean with its current push-sum weight, not with its initial one.
        `plain` mixes only values: it needs a matrix whose rows sum to 1, as with metropolis and max-degree
        weights.
    rule
        The share that each peer sends to each neighbour, see topology.mixing_matrix. By default, push (equal
        parts) for push-sum, and metropolis for plain. Edge weights of the graph matter only with the rule
        `edges`.
    exchanges
        The number of exchanges per averaging. Raise it if peers still disagree after a round.
    complete
        Partial models whose members are all neighbours of each other, whatever the graph is: an exchange
        leads to their mean.
    """

    graph: nx.Graph | Schedule
    kind: Literal["push-sum", "plain"] = "push-sum"
    rule: Rule | None = None
    exchanges: int = 1
    complete: frozenset[str] = frozenset()
    _matrices: dict[tuple[int, tuple[int, ...]], csr_array] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        # By attribute, not by isinstance, so that networkx and scipy are not imported here.
        if not (hasattr(self.graph, "nodes") or hasattr(self.graph, "period")):
            raise ModelError(
                f"Gossip({self.graph!r}): give a networkx graph, for example topology.build('regular:4', "
                "peers), or a topology.Schedule"
            )
        if self.kind not in ("push-sum", "plain"):
            raise ModelError(f"unknown gossip {self.kind!r}: there are push-sum, plain")
        if self.exchanges < 1:
            raise ModelError(f"{self.exchanges} exchanges: an averaging needs at least one")

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of graphs; with a single graph, the same for every exchange."""
        from ...topology import Schedule, static

        return self.graph if isinstance(self.graph, Schedule) else static(self.graph)

    def exchanges_before(self, step: int) -> int:
        """Return the number of exchanges in the first `step` averagings."""
        return step * self.exchanges

    def check(self, models: Mapping[str, Sequence[int]], peers: int, weighted: bool) -> None:
        if weighted and self.kind == "plain":
            raise ModelError("plain gossip cannot weigh peers: use push-sum, or leave out weights")
        from ...topology import Schedule, require_models_connected

        if isinstance(self.graph, Schedule):
            if self.graph.peers != peers:
                raise ModelError(
                    f"the schedule is for {self.graph.peers} peers, but there are {peers} learners"
                )
            return
        if set(self.graph.nodes) != set(range(peers)):
            examples = ", ".join(repr(node) for node in list(self.graph)[:4])
            if len(self.graph) == peers:
                examples += (
                    "; gossamer.topology.normalize_graph(graph) numbers them in the graph's order"
                )
            raise ModelError(
                f"the graph has {len(self.graph)} nodes and there are {peers} learners: nodes must be "
                f"the numbers 0 to {peers - 1}, one for each learner, and here they begin with {examples}"
            )
        members = {
            name: list(peers_of_model)
            for name, peers_of_model in models.items()
            if name not in self.complete
        }
        require_models_connected(self.graph, members, self._rule)

    def matrices(
        self, model: str, members: Sequence[int], step: int, weights: np.ndarray
    ) -> tuple[list[csr_array] | None, np.ndarray]:
        if model in self.complete:
            return None, weights
        matrices = []
        for exchange in range(self.exchanges_before(step), self.exchanges_before(step + 1)):
            matrix = self._matrix(members, exchange)
            if self.kind == "push-sum":
                matrix, weights = estimate_matrix(matrix, weights)
            matrices.append(matrix)
        return matrices, weights

    @property
    def _rule(self) -> Rule:
        return self.rule or ("push" if self.kind == "push-sum" else "metropolis")

    def _matrix(self, members: Sequence[int], exchange: int) -> csr_array:
        """The matrix of one exchange among the members; cached if the schedule has a period."""
        from ...topology import check_stochastic, mixing_matrix

        schedule, cache = self.schedule, self._matrices
        key = (exchange % schedule.period if schedule.period else -1, tuple(members))
        if key in cache:
            return cache[key]
        graph = schedule.graph(exchange).subgraph(members)
        if len(graph) < len(members):  # a peer missing from this exchange keeps its values
            graph = graph.copy()
            graph.add_nodes_from(members)
        matrix = mixing_matrix(graph, self._rule)
        if self.kind == "plain":
            check_stochastic(matrix, rows=True, names=sorted(members))
        if schedule.period:
            cache[key] = matrix
        return matrix


def estimate_matrix(matrix: csr_array, weights: np.ndarray) -> tuple[csr_array, np.ndarray]:
    """Return an exchange of push-sum as a matrix that multiplies estimates, and the weights after it.

    Estimates are s / w, so multiplying sums s by W means multiplying estimates by (1 / w') · W · w.
    """
    after = matrix @ weights
    return matrix.multiply(weights[None, :]).multiply(1.0 / after[:, None]).tocsr(), after


def fold(matrices: list[csr_array]) -> list[csr_array]:
    """Return the product of the matrices if multiplying by it is cheaper; otherwise the matrices."""
    from scipy.sparse import csr_array

    members = len(matrices[0].indptr) - 1 if matrices else 0
    if len(matrices) < 2 or members > FOLD_PEERS:
        return matrices
    product = matrices[0]
    for matrix in matrices[1:]:
        product = csr_array(matrix @ product)
    cost = min(product.nnz, DENSE_COST * members * members)
    return [product] if cost < sum(matrix.nnz for matrix in matrices) else matrices


# --- averaging ----------------------------------------------------------------------------------


class Averager:
    """Averages every partial model of a swarm whose networks are rows of stacks.

    rows: for every network its stack, and its row in the stack.
    stores: where vectors are read and written if peers with different numbers of cells share a model: each
        store pads its peer's vector to a *common width*, with room for all cells. One per network, or none.
        All members of a model must have it at a common width, or none of them: this is not checked, and
        members without the common width would be left out.
    step: how many averagings there have been.
    """

    def __init__(
        self,
        networks: Sequence[SlicedNetwork],
        rows: Sequence[tuple[Stack | SingleNetwork, int]],
        mixing: Mixing,
        weights: Sequence[float] | None,
        stores: Sequence[MatchedStore] = (),
        *,
        step: int = 0,
    ):
        self._mixing, self.step = mixing, step
        initial_weights = np.array(check_weights(networks, weights), dtype=np.float64)
        shared = {m: peers for m, peers in implementers(networks).items() if len(peers) > 1}
        mixing.check(shared, len(networks), weights is not None)
        common_width_models = [
            set() if store.common_width is None else set(store.common_width.averaged_models)
            for store in stores
        ]
        digests: dict[int, bytes] = {}
        self._plans: list[_StackedModel | _CommonWidthModel] = []
        for model, peers in shared.items():
            members = [index for index, models in enumerate(common_width_models) if model in models]
            if len(members) > 1:
                self._plans.append(_CommonWidthModel(model, members, stores))
            else:
                self._plans.append(_StackedModel(model, peers, networks, rows, digests))
        self._weights = [initial_weights[plan.members] for plan in self._plans]

    @property
    def common_width_models(self) -> list[str]:
        """The partial models that are averaged at a common width."""
        return [plan.model for plan in self._plans if isinstance(plan, _CommonWidthModel)]

    def tasks(self) -> list[Tasks]:
        """Return the tasks of one averaging, as lists to be run one after the other.

        The tasks of one list are independent. The n-th list has the n-th step of every model: an exchange,
        or all exchanges at once if `fold` has multiplied them or the model is averaged at a common width.
        """
        steps: list[Tasks] = []
        for index, plan in enumerate(self._plans):
            matrices, after = self._mixing.matrices(
                plan.model, plan.members, self.step, self._weights[index]
            )
            for step, tasks in enumerate(plan.tasks(matrices, self._weights[index])):
                if len(steps) <= step:
                    steps.append([])
                steps[step] += tasks
            self._weights[index] = after
        self.step += 1
        return steps


class _CommonWidthModel:
    """A partial model of peers with different numbers of cells, averaged at a common width.

    Whole vectors are read from and written to the peers' stores, one peer at a time.
    """

    def __init__(self, model: str, members: list[int], stores: Sequence[MatchedStore]):
        self.model, self.members = model, members
        self._stores = [stores[index] for index in members]
        expected = self._stores[0].schema(model)
        for index, store in zip(members, self._stores, strict=True):
            if store.schema(model) != expected:
                raise ModelError(
                    f"model {model!r} does not have the same common width on all its members: learners "
                    f"{members[0]} and {index} differ"
                )

    def tasks(self, matrices: list[csr_array] | None, weights: np.ndarray) -> list[Tasks]:
        return [[lambda: self._mix(matrices, weights / weights.sum())]]

    def _mix(self, matrices: list[csr_array] | None, shares: np.ndarray) -> None:
        block = np.stack([store.read(self.model) for store in self._stores])
        mixed = block.astype(np.float64)
        if matrices is None:
            # Averaging the differences to one peer keeps the mean of equal values exact.
            mean = mixed[0] + shares @ (mixed - mixed[0])
            mixed = np.broadcast_to(mean, mixed.shape)
        for matrix in matrices or ():
            mixed = matrix @ mixed
        if not np.isfinite(mixed).all():
            raise ModelError(
                f"model {self.model!r}: values are not finite after averaging; lower the learning rate or "
                "check the peers' data"
            )
        for store, row in zip(self._stores, mixed, strict=True):
            store.write(self.model, row.astype(block.dtype))


class _StackedModel:
    """One partial model, with the precomputed positions of its values in the stacks."""

    def __init__(
        self,
        model: str,
        members: list[int],
        networks: Sequence[SlicedNetwork],
        rows: Sequence[tuple[Stack | SingleNetwork, int]],
        digests: dict[int, bytes],
    ):
        self.model, self.members = model, members
        self._networks = [networks[member] for member in members]
        reference = self._networks[0]
        size = len(reference.slicing.coordinates(model))
        width = max(16, min(size, WIDEST_BLOCK, BLOCK_BYTES // (4 * len(members))))
        self._blocks = [(start, min(start + width, size)) for start in range(0, size, width)]
        by_coordinates: dict[
            object, tuple[Stack | SingleNetwork, slice | np.ndarray, list[int], list[int]]
        ] = {}
        for block_row, (member, network) in enumerate(zip(members, self._networks, strict=True)):
            check_schema(model, reference, network)
            (stack, row), coordinates = rows[member], network.slicing.coordinates_or_slice(model)
            key = (id(stack), _coordinates_key(coordinates, digests))
            _, _, stack_rows, block_rows = by_coordinates.setdefault(
                key, (stack, coordinates, [], [])
            )
            stack_rows.append(row)
            block_rows.append(block_row)
        self._groups = [_MemberGroup(*each, self._blocks) for each in by_coordinates.values()]
        self._like = self._groups[0].stack.values[:0, :0]

    def tasks(self, matrices: list[csr_array] | None, weights: np.ndarray) -> list[Tasks]:
        if matrices is None:
            mixers = [self._mean(weights)]
        else:
            mixers = [self._product(matrix) for matrix in fold(matrices)]
        return [
            [lambda b=block, m=mixer: self._mix(b, m) for block in self._blocks] for mixer in mixers
        ]

    def _mix(self, block: Block, mixer: Mixer) -> None:
        """Gather the values of a block, mix and check them, and write them back."""
        values = self._like.new_empty(len(self.members), block[1] - block[0])
        for group in self._groups:
            group.gather(block, values)
        mixed = mixer(values)
        if not bool(torch.isfinite(mixed.sum())):
            self._raise_if_not_finite()
        for group in self._groups:
            group.scatter(block, mixed)

    def _raise_if_not_finite(self) -> None:
        """Raise ModelError naming the peer and parameter whose value is not finite.

        There may be none: the sum of finite values can overflow.
        """
        for group in self._groups:
            group.stack.write_back()  # the networks are on another device if the arena has a `device`
        for network in self._networks:
            network.check_finite(self.model, network.read(self.model))

    def _mean(self, weights: np.ndarray) -> Mixer:
        shares = torch.from_numpy(weights / weights.sum()).to(self._like)
        # Averaging the differences to one peer keeps the mean of equal values exact.
        return lambda block: block[0] + shares @ (block - block[0])

    def _product(self, matrix: csr_array) -> Mixer:
        """The fastest way to multiply a block by this matrix: dense or sparse."""
        like, members = self._like, len(self.members)
        if matrix.nnz > DENSE_COST * members * members:
            dense = torch.from_numpy(matrix.toarray()).to(like)
            return lambda block: dense @ block
        # A weighted sum of rows for each member is a sparse product; embedding_bag is torch's fastest one.
        index = torch.from_numpy(matrix.indices.astype(np.int64)).to(like.device)
        starts = torch.from_numpy(matrix.indptr[:-1].astype(np.int64)).to(like.device)
        shares = torch.from_numpy(matrix.data).to(like)
        return lambda block: F.embedding_bag(
            index, block, starts, mode="sum", per_sample_weights=shares
        )


class _MemberGroup:
    """Members whose networks are in one stack and have the model at the same coordinates.

    coordinates: indices, or, if they are contiguous, a Python slice object (not a slice of cells).
    stack_rows, block_rows: the rows of the members in the stack and in a block.
    """

    def __init__(
        self,
        stack: Stack | SingleNetwork,
        coordinates: slice | np.ndarray,
        stack_rows: list[int],
        block_rows: list[int],
        blocks: Sequence[Block],
    ):
        device = stack.values.device
        self.stack = stack
        self._stack_rows = row_index(stack_rows, device)
        self._block_rows = row_index(block_rows, device)
        tiled = tiles(coordinates)
        self._tiles = (
            {} if tiled is None else {block: subrange_of_tiles(tiled, *block) for block in blocks}
        )
        self._index = None if tiled is not None else torch.as_tensor(coordinates, device=device)

    def gather(self, block: Block, values: Tensor) -> None:
        """Copy the members' coordinates of a block into their rows of `values`."""
        source, rows, block_rows = self.stack.values, self._stack_rows, self._block_rows
        if self._index is not None:
            columns = self._index[slice(*block)]
            if isinstance(rows, slice):
                picked = source[rows].index_select(1, columns)
            else:
                picked = source[rows[:, None], columns]
            values[block_rows] = picked.to(values.device)
            return
        offset = 0
        for tile in self._tiles[block]:
            target = values[:, offset : offset + tile.size].unflatten(1, (tile.count, tile.length))
            target[block_rows] = tile.view(source)[rows].to(values.device)
            offset += tile.size

    def scatter(self, block: Block, mixed: Tensor) -> None:
        """Write mixed values back: one row per member, or a single row for all members."""
        target_values, rows = self.stack.values, self._stack_rows
        mixed = (mixed[self._block_rows] if mixed.ndim == 2 else mixed).to(target_values.device)
        if self._index is not None:
            columns = self._index[slice(*block)]
            if isinstance(rows, slice):
                selected = target_values[rows]
                selected.index_copy_(1, columns, mixed.expand(len(selected), len(columns)))
            else:
                target_values[rows[:, None], columns] = mixed
            return
        offset = 0
        for tile in self._tiles[block]:
            values = mixed[..., offset : offset + tile.size].unflatten(
                -1, (tile.count, tile.length)
            )
            tile.view(target_values)[rows] = values
            offset += tile.size


def _coordinates_key(coordinates: slice | np.ndarray, digests: dict[int, bytes]) -> object:
    """A key that is equal for equal coordinates; peers with equal slices share one array, hashed once."""
    if isinstance(coordinates, slice):
        return coordinates.start, coordinates.stop
    if id(coordinates) not in digests:
        digests[id(coordinates)] = hashlib.blake2b(coordinates.tobytes()).digest()
    return digests[id(coordinates)]


# --- coordinates as tiles -----------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """`count` runs of `length` consecutive coordinates, the first at `start`, `stride` from run to run.

    If a partial model has the first cells of two consecutive layers, its coordinates in the weight matrix
    between them are the first columns of the first rows: one tile. In a whole network it has about one tile
    per parameter. Tiles are copied as strided views, without index lists.
    """

    start: int
    count: int
    stride: int
    length: int

    @property
    def size(self) -> int:
        """The number of its coordinates."""
        return self.count * self.length

    def view(self, rows: Tensor) -> Tensor:
        """Return the tile's values in rows of a stack, [rows, count, length]: a view."""
        return rows.as_strided(
            (len(rows), self.count, self.length),
            (rows.stride(0), self.stride, 1),
            rows.storage_offset() + self.start,
        )

    def subrange(self, first: int, last: int) -> list[Tile]:
        """Return the coordinates number `first` to `last` (exclusive) of this tile, as tiles."""
        result: list[Tile] = []
        while first < last:
            run, inside = divmod(first, self.length)
            if inside or last - first < self.length:  # a run that begins or ends in the middle
                size = min(self.length - inside, last - first)
                result.append(Tile(self.start + run * self.stride + inside, 1, 0, size))
            else:
                runs = (last - first) // self.length
                size = runs * self.length
                result.append(Tile(self.start + run * self.stride, runs, self.stride, self.length))
            first += size
        return result


def tiles(coordinates: slice | np.ndarray) -> list[Tile] | None:
    """Return coordinates as tiles, in order; None if they are too scattered for tiles to be faster."""
    if isinstance(coordinates, slice):
        return [Tile(coordinates.start, 1, 0, coordinates.stop - coordinates.start)]
    breaks = np.flatnonzero(np.diff(coordinates) != 1) + 1
    starts = np.concatenate([[0], breaks])
    lengths = np.diff(np.concatenate([starts, [len(coordinates)]]))
    if len(coordinates) < MIN_RUN_FOR_TILES * len(starts):
        return None
    result: list[Tile] = []
    for first, length in zip(coordinates[starts].tolist(), lengths.tolist(), strict=True):
        if result and result[-1].length == length:
            last = result[-1]
            stride = first - (last.start + (last.count - 1) * last.stride)
            if stride > 0 and (last.count == 1 or stride == last.stride):
                result[-1] = Tile(last.start, last.count + 1, stride, length)
                continue
        result.append(Tile(first, 1, 0, length))
    return result


def subrange_of_tiles(tiled: list[Tile], first: int, last: int) -> list[Tile]:
    """Return the coordinates number `first` to `last` (exclusive) of a list of tiles, as tiles."""
    result: list[Tile] = []
    offset = 0
    for tile in tiled:
        a, b = max(first - offset, 0), min(last - offset, tile.size)
        if a < b:
            result += tile.subrange(a, b)
        offset += tile.size
    return result
