"""Who mixes with whom at the end of a round: the mean of everybody, or gossip on a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from ...models import ModelError
from . import plan

if TYPE_CHECKING:  # scipy takes a while to load: only for those who have a graph
    import networkx as nx
    from scipy.sparse import csr_array

    from ...topology import Rule, Schedule


class Mixing(Protocol):
    """How one partial model is averaged among the peers that implement it."""

    def check(self, owners: Mapping[str, Sequence[int]], peers: int, weighted: bool) -> None:
        """Raise what is wrong with it for this swarm, before anything runs."""
        ...

    def matrices(
        self, owner: str, members: Sequence[int], step: int, weights: np.ndarray
    ) -> tuple[list[csr_array] | None, np.ndarray]:
        """What multiplies the members' values, one matrix after the other; None for their mean.

        `members` are places of learners, in order; `step` counts averagings from 0; `weights` are what
        this returned as its second value last time, and the learners' weights at first.
        """
        ...


@dataclass(frozen=True)
class ExactMean:
    """Everybody gets the weighted mean, at once: what gossip tends to."""

    def check(self, owners: Mapping[str, Sequence[int]], peers: int, weighted: bool) -> None:
        pass

    def matrices(
        self, owner: str, members: Sequence[int], step: int, weights: np.ndarray
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

    def check(self, owners: Mapping[str, Sequence[int]], peers: int, weighted: bool) -> None:
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
        members = {name: list(who) for name, who in owners.items()}
        require_models_connected(self.graph, members, self._rule)

    def matrices(
        self, owner: str, members: Sequence[int], step: int, weights: np.ndarray
    ) -> tuple[list[csr_array] | None, np.ndarray]:
        found = []
        for exchange in range(step * self.exchanges, (step + 1) * self.exchanges):
            matrix = self._matrix(members, exchange)
            if self.kind == "push-sum":
                sent, weights = weights, matrix @ weights
                # Values are estimates s / w, so an exchange of sums is (1 / w') · W · w on them.
                matrix = matrix.multiply(sent[None, :]).multiply(1.0 / weights[:, None]).tocsr()
            found.append(matrix)
        return found, weights

    @property
    def _rule(self) -> Rule:
        return self.rule or ("push" if self.kind == "push-sum" else "metropolis")

    def _matrix(self, members: Sequence[int], exchange: int) -> csr_array:
        """The matrix of one exchange among the members; those of a graph that stays are kept."""
        from ...topology import Schedule, check_stochastic, mixing_matrix

        changing = isinstance(self.graph, Schedule)
        period = self.graph.period if isinstance(self.graph, Schedule) else 1
        kept: dict[tuple[int, tuple[int, ...]], csr_array] = self._kept  # type: ignore[attr-defined]
        key = (exchange % period if period else -1, tuple(members))
        if key in kept:
            return kept[key]
        graph = self.graph.graph(exchange) if isinstance(self.graph, Schedule) else self.graph
        some = graph.subgraph(members)
        if len(some) < len(members):  # who is away keeps what it has
            some = some.copy()
            some.add_nodes_from(members)
        matrix = mixing_matrix(some, self._rule)
        if self.kind == "plain":
            check_stochastic(matrix, rows=True, names=sorted(members))
        if not changing or period:
            kept[key] = matrix
        return matrix


def fold(matrices: list[csr_array]) -> list[csr_array]:
    """The same exchanges as fewer matrices, where multiplying them first saves work."""
    from scipy.sparse import csr_array

    members = len(matrices[0].indptr) - 1
    if len(matrices) == 1 or members > plan.FOLD_PEERS:
        return matrices
    whole = matrices[0]
    for matrix in matrices[1:]:
        whole = csr_array(matrix @ whole)
    return [whole] if plan.fold(members, sum(m.nnz for m in matrices), whole.nnz) else matrices
