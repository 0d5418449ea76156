"""Averaging in lockstep: means, and products with mixing matrices, over stacked networks.

Learner, network and peer number i belong together: they have the same index. The *members* of a partial model
are the peers that have it. Networks of one architecture are rows of a `Stack`; a network that cannot be
stacked is a `SingleNetwork`, a stack of one row. A *block* is, in this module, a range of coordinates of all
members of a partial model, small enough to stay in cache. It is gathered from the stacks, mixed and written
back. Blocks are independent, so threads can process them in any order, and the result is the same for any
number of threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...models import ModelError, SlicedNetwork, check_schema, check_weights, networks_by_model
from ...models.stack import BLOCK_BYTES, SingleNetwork, Stack, row_index
from ...peer import MatchedStore

if TYPE_CHECKING:  # scipy is slow to import, and needed only with a graph
    import networkx as nx
    from scipy.sparse import csr_array

    from ...topology import Rule, Schedule
    from .shards import Exchange, Shard

WIDEST_BLOCK = 1 << 16
"""The maximal number of coordinates in a block."""
DENSE_COST = 0.2
"""Time per entry of a mixing matrix in a dense product, relative to a nonzero entry in a sparse product."""
FOLD_PEERS = 2048
"""The most peers for which exchanges are multiplied into one matrix, which becomes dense on the way."""
MIN_RUN_FOR_TILES = 16
"""Coordinates are copied as tiles if their runs of consecutive numbers have at least this mean length; with
shorter runs, index lists are faster."""
EXCHANGE_BYTES = 16 << 20
"""The size of the rows that all ranks together exchange at once, if a swarm is divided among several."""

Mixer = Callable[[Tensor], Tensor]
"""Maps a block [members, coordinates] to the values after mixing: a row per member, or one row for all."""
Block = tuple[int, int]
"""The first coordinate of a block, and the one after its last."""
Tasks = list[Callable[[], None]]
"""Functions that may run in any order, and at the same time."""


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

        None instead of matrices stands for the weighted mean.

        members: the indices of the members, sorted. step: how often the model was averaged before. weights:
        those that the last call returned; in the first call, the learners' initial ones.
        """
        ...


@dataclass(frozen=True)
class ExactMean:
    """Gives all peers the weighted mean, to which gossip would converge."""

    def check(self, models: Mapping[str, Sequence[int]], peers: int, weighted: bool) -> None:
        pass

    def matrices(
        self, model: str, members: Sequence[int], step: int, weights: np.ndarray
    ) -> tuple[list[csr_array] | None, np.ndarray]:
        return None, weights


@dataclass(frozen=True)
class Server(ExactMean):
    """Lets one peer compute the mean of each partial model, as in a live swarm's `server` mode.

    Here it is the same as `ExactMean`. They differ only with Arena(wire=…), where events.py simulates the
    messages to the server and back, which change the values (rounding, compression).
    """


@dataclass(frozen=True, eq=False)
class Steady(ExactMean):
    """Values without weight, which move their receivers in bounded steps: a live swarm's `steady` mode.

    Only with Arena(wire=…): all peers send at the same time, then each steps towards every value it received.

    graph
        An undirected networkx graph whose nodes 0 … n−1 are the learners.
    fanout, hostile
        See gossip.SteadyMode.
    """

    graph: nx.Graph
    fanout: int = 4
    hostile: int | Literal["auto"] = "auto"


@dataclass(frozen=True, eq=False)
class Robust(ExactMean):
    """A robust mean in place of the mean: a live swarm's modes `rounds` and `server` with the key `robust`.

    Only with Arena(wire=…).

    rule, hostile
        See gossip.RobustMean.
    graph
        The neighbours whose values a peer combines; None for a server that combines all.
    exchanges
        How often values are exchanged and combined in one averaging.
    """

    rule: str
    graph: nx.Graph | None = None
    exchanges: int = 1
    hostile: int | Literal["auto"] = "auto"


@dataclass(frozen=True, eq=False)
class Gossip:
    """Averages by synchronous exchanges on a graph whose nodes 0 … n−1 are the learners, in order.

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
        How often peers exchange values in a round. Raise it if they still disagree afterwards.
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
            raise ModelError(f"exchanges={self.exchanges}: gossip needs at least one in a round")

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of graphs; with a single graph, the same for every exchange."""
        from ...topology import Schedule, static

        return self.graph if isinstance(self.graph, Schedule) else static(self.graph)

    def exchanges_before(self, step: int) -> int:
        """Return the number of exchanges after which a model has been averaged `step` times."""
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
        """The rule, or the default for this kind of gossip."""
        return self.rule or ("push" if self.kind == "push-sum" else "metropolis")

    def _matrix(self, members: Sequence[int], exchange: int) -> csr_array:
        """Return the matrix of one exchange among the members; it is cached if the schedule has a period."""
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
    """Return an exchange of push-sum as a matrix that multiplies estimates, and the new weights.

    Estimates are s / w, so multiplying sums s by W means multiplying estimates by (1 / w') · W · w.
    """
    new = matrix @ weights
    return matrix.multiply(weights[None, :]).multiply(1.0 / new[:, None]).tocsr(), new


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
    step: how often the models were averaged before.
    shard: which peers of a larger swarm these are, if it is divided among several ranks (processes).
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
        shard: Shard | None = None,
    ):
        self._mixing, self.step = mixing, step
        peer_weights, count = check_weights(networks, weights), len(networks)
        if shard is None:
            shared = {
                m: peers for m, peers in networks_by_model(networks).items() if len(peers) > 1
            }
        else:
            shared, count = shard.models, shard.peers
            peer_weights = shard.all_by_peer(peer_weights)
        initial_weights = np.array(peer_weights, dtype=np.float64)
        mixing.check(shared, count, weights is not None)
        common_width_models = [
            set() if store.common_width is None else set(store.common_width.averaged_models)
            for store in stores
        ]
        digests: dict[int, bytes] = {}
        self._models: list[_StackedModel | _CommonWidthModel] = []
        for model, peers in shared.items():
            if shard is not None:
                ranks = np.unique(shard.rank_of[peers]).tolist()
                if len(ranks) > 1 or ranks == [shard.rank]:
                    self._models.append(_DividedModel(model, peers, networks, rows, digests, shard))
                continue
            members = [index for index, models in enumerate(common_width_models) if model in models]
            if len(members) > 1:
                self._models.append(_CommonWidthModel(model, members, stores))
            else:
                self._models.append(_StackedModel(model, peers, networks, rows, digests))
        self._weights = [initial_weights[averaged.members] for averaged in self._models]

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs: how often models were averaged, and the weights of their peers."""
        return {
            "step": self.step,
            "weights": {
                model: weights.tolist() for model, weights in self._weights_by_model().items()
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned; ModelError if other models are averaged."""
        saved = {model: np.array(weights) for model, weights in state["weights"].items()}
        current = self._weights_by_model()
        if {m: w.shape for m, w in saved.items()} != {m: w.shape for m, w in current.items()}:
            raise ModelError(
                f"the state averages the partial models {sorted(saved)}, this arena {sorted(current)}, or "
                "other numbers of peers share them: build the same arena"
            )
        self.step = int(state["step"])
        self._weights = [saved[averaged.model] for averaged in self._models]

    def _weights_by_model(self) -> dict[str, np.ndarray]:
        """Return the weights of each averaged model's members."""
        models = [averaged.model for averaged in self._models]
        return dict(zip(models, self._weights, strict=True))

    @property
    def common_width_models(self) -> list[str]:
        """The partial models that are averaged at a common width."""
        return [each.model for each in self._models if isinstance(each, _CommonWidthModel)]

    def tasks(self) -> list[Tasks]:
        """Return the tasks that average all models once, as lists to be run one after the other.

        The tasks of one list are independent. The n-th list has the n-th step of every model: an exchange,
        or all exchanges at once if `fold` has multiplied them or the model is averaged at a common width.
        Models of several ranks come one after the other: all ranks must exchange in the same order.
        """
        steps: list[Tasks] = []
        for index, averaged in enumerate(self._models):
            weights = self._weights[index]
            matrices, new_weights = self._mixing.matrices(
                averaged.model, averaged.members, self.step, weights
            )
            first = len(steps) if isinstance(averaged, _DividedModel) else 0
            for step, tasks in enumerate(averaged.tasks(matrices, weights), start=first):
                if len(steps) <= step:
                    steps.append([])
                steps[step] += tasks
            self._weights[index] = new_weights
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
        """Return one task, which averages the model once; see `Mixing.matrices`."""
        return [[lambda: self._mix(matrices, weights / weights.sum())]]

    def _mix(self, matrices: list[csr_array] | None, shares: np.ndarray) -> None:
        """Read the members' vectors, mix and check them, and write them back."""
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


def split_into_blocks(size: int, rows: int) -> list[Block]:
    """Return blocks of a model with `size` coordinates that stay in cache with this many rows."""
    width = max(16, min(size, WIDEST_BLOCK, BLOCK_BYTES // (4 * max(rows, 1))))
    return [(start, min(start + width, size)) for start in range(0, size, width)]


class _StackedModel:
    """One partial model, with the precomputed positions of its values in the stacks."""

    def __init__(
        self,
        model: str,
        members: list[int],
        networks: Sequence[SlicedNetwork],
        rows: Sequence[tuple[Stack | SingleNetwork, int]],
        digests: dict[int, bytes],
        blocks: list[Block] | None = None,
    ):
        self.model, self.members = model, members
        self._networks = [networks[member] for member in members]
        # Without elements: new tensors take its dtype and device.
        self._empty = rows[members[0] if members else 0][0].values[:0, :0]
        if blocks is None:
            size = len(self._networks[0].slicing.coordinates(model))
            blocks = split_into_blocks(size, len(members))
        self._blocks = blocks
        by_coordinates: dict[
            object, tuple[Stack | SingleNetwork, slice | np.ndarray, list[int], list[int]]
        ] = {}
        for block_row, (member, network) in enumerate(zip(members, self._networks, strict=True)):
            check_schema(model, self._networks[0], network)
            (stack, row), coordinates = rows[member], network.slicing.coordinates_or_slice(model)
            key = (id(stack), _coordinates_key(coordinates, digests))
            _, _, stack_rows, block_rows = by_coordinates.setdefault(
                key, (stack, coordinates, [], [])
            )
            stack_rows.append(row)
            block_rows.append(block_row)
        self._groups = [_MemberGroup(*group, self._blocks) for group in by_coordinates.values()]

    def tasks(self, matrices: list[csr_array] | None, weights: np.ndarray) -> list[Tasks]:
        """Return a list of tasks, one per block, for every product; see `Mixing.matrices`."""
        if matrices is None:
            mixers = [self._mean(weights)]
        else:
            mixers = [self._product(matrix) for matrix in fold(matrices)]
        return [
            [lambda b=block, m=mixer: self._mix(b, m) for block in self._blocks] for mixer in mixers
        ]

    def _mix(self, block: Block, mixer: Mixer, others: Tensor | None = None) -> None:
        """Gather the values of a block, mix and check them, and write them back.

        others: rows of members on other ranks, below those of this rank's members.
        """
        mixed = self._mixed(block, mixer, others)
        for group in self._groups:
            group.scatter(block, mixed)

    def _mixed(self, block: Block, mixer: Mixer, others: Tensor | None = None) -> Tensor:
        """Gather the values of a block; return them mixed and checked."""
        count = len(self._networks)
        received = 0 if others is None else len(others)
        values = self._empty.new_empty(count + received, block[1] - block[0])
        for group in self._groups:
            group.gather(block, values)
        if others is not None:
            values[count:] = others
        mixed = mixer(values)
        if not bool(torch.isfinite(mixed.sum())):
            self._raise_if_not_finite()
        return mixed

    def _raise_if_not_finite(self) -> None:
        """Raise ModelError naming the peer and parameter whose value is not finite.

        There may be none: the sum of finite values can overflow.
        """
        for group in self._groups:
            group.stack.write_back()  # the networks are on another device if the arena has a `device`
        for network in self._networks:
            network.check_finite(self.model, network.read(self.model))

    def _mean(self, weights: np.ndarray) -> Mixer:
        """Return the mixer that computes the weighted mean."""
        shares = torch.from_numpy(weights / weights.sum()).to(self._empty)

        def mean(block: Tensor) -> Tensor:
            first = block[0].clone()
            # Averaging the differences to one peer keeps the mean of equal values exact.
            return first + shares @ block.sub_(first)

        return mean

    def _product(self, matrix: csr_array) -> Mixer:
        """Return the mixer that multiplies by this matrix: dense or sparse, whichever is faster."""
        rows, columns = matrix.shape or (0, 0)
        if matrix.nnz > DENSE_COST * rows * columns:
            dense = torch.from_numpy(matrix.toarray()).to(self._empty)
            return lambda block: dense @ block
        # A weighted sum of rows for each member is a sparse product; embedding_bag is torch's fastest one.
        device = self._empty.device
        index = torch.from_numpy(matrix.indices.astype(np.int64)).to(device)
        starts = torch.from_numpy(matrix.indptr[:-1].astype(np.int64)).to(device)
        shares = torch.from_numpy(matrix.data).to(self._empty)
        return lambda block: F.embedding_bag(
            index, block, starts, mode="sum", per_sample_weights=shares
        )


class _DividedModel(_StackedModel):
    """A partial model whose members are on several ranks; this rank mixes the rows of its own members.

    A rank without members takes part in the exchanges, with no rows.

    members: the indices of the members on all ranks.
    """

    def __init__(
        self,
        model: str,
        members: list[int],
        networks: Sequence[SlicedNetwork],
        rows: Sequence[tuple[Stack | SingleNetwork, int]],
        digests: dict[int, bytes],
        shard: Shard,
    ):
        self._ranks, self._rank_of = shard.ranks, shard.rank_of[members]
        # Which of `members` are on this rank.
        self._own_members = np.flatnonzero(self._rank_of == shard.rank)
        # Blocks are the same on all ranks, which exchange them one after the other.
        blocks = split_into_blocks(shard.sizes[model], len(members) // shard.ranks.count)
        own_indices = np.searchsorted(shard.own_peers, np.array(members)[self._own_members])
        super().__init__(model, own_indices.tolist(), networks, rows, digests, blocks)
        self.members = members
        # Rows of members on other ranks, for the blocks that are mixed next.
        self._received: Tensor | None = None

    def tasks(self, matrices: list[csr_array] | None, weights: np.ndarray) -> list[Tasks]:
        if len(self._own_members) == len(self.members):
            return super().tasks(matrices, weights)
        if matrices is None:
            return self._mean_over_ranks(weights)
        plans, folded = [self._plan(matrix) for matrix in matrices], fold(matrices)
        if folded is not matrices:  # ranks then exchange rows only once, but perhaps more of them
            folded_plans = [self._plan(matrix) for matrix in folded]
            plans = min(plans, folded_plans, key=lambda plans: sum(p.total_rows for p in plans))
        return [tasks for plan in plans for tasks in self._product_over_ranks(plan)]

    def _plan(self, matrix: csr_array) -> Exchange:
        from .shards import (
            plan_exchange,
        )  # imports torch.distributed, needed only with several ranks

        return plan_exchange(matrix, self._rank_of, self._ranks.rank, self._ranks.count)

    def _product_over_ranks(self, plan: Exchange) -> list[Tasks]:
        """Return tasks that multiply by a matrix: exchange some blocks, mix them, then the next ones."""
        mixer, (first, last) = self._product(plan.matrix), self._blocks[0]
        block_bytes = max(1, plan.total_rows) * (last - first) * self._empty.element_size()
        at_once = max(1, EXCHANGE_BYTES // block_bytes)  # the same on all ranks
        steps: list[Tasks] = []
        for begin in range(0, len(self._blocks), at_once):
            blocks = self._blocks[begin : begin + at_once]
            steps.append([lambda blocks=blocks: self._exchange(plan, blocks)])
            start = blocks[0][0]
            mix = [lambda b=block, s=start: self._mix_received(b, s, mixer) for block in blocks]
            steps.append(mix if len(self._own_members) else [])
        return steps

    def _exchange(self, plan: Exchange, blocks: Sequence[Block]) -> None:
        """Send the rows of some blocks that other ranks need, and receive those that this rank needs."""
        if not plan.total_rows:  # no link of this exchange connects two ranks
            self._received = None
            return
        start, stop = blocks[0][0], blocks[-1][1]
        sent = torch.from_numpy(np.concatenate(plan.sends)).to(self._empty.device)
        rows = self._empty.new_empty(len(sent), stop - start)
        for a, b in blocks:
            rows[:, a - start : b - start] = self._mixed((a, b), lambda values: values[sent])
        counts = [len(numbers) for numbers in plan.sends]
        self._received = self._ranks.exchange(rows, counts, plan.receives)

    def _mix_received(self, block: Block, start: int, mixer: Mixer) -> None:
        """Mix a block with the rows received; start: the first coordinate of these rows."""
        others = self._received
        if others is not None:
            others = others[:, block[0] - start : block[1] - start]
        self._mix(block, mixer, others)

    def _mean_over_ranks(self, weights: np.ndarray) -> list[Tasks]:
        """Return tasks that compute the weighted mean: on every rank by itself, then over the ranks."""
        own_weights = weights[self._own_members]
        mixer, share = self._mean(own_weights), float(own_weights.sum() / weights.sum())
        # In float64, so that the mean of equal values stays exact.
        total = torch.zeros(self._blocks[-1][1], dtype=torch.float64, device=self._empty.device)
        own_blocks = self._blocks if len(own_weights) else []

        def add(block: Block) -> None:
            total[slice(*block)] = share * self._mixed(block, mixer).double()

        def write(block: Block) -> None:
            for group in self._groups:
                group.scatter(block, total[slice(*block)].to(self._empty))

        return [
            [lambda block=block: add(block) for block in own_blocks],
            [lambda: self._ranks.add(total)],
            [lambda block=block: write(block) for block in own_blocks],
        ]


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
