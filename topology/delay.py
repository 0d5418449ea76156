"""Links that take time: push-sum whose messages arrive some exchanges later."""

import networkx as nx
import numpy as np
from scipy.sparse import block_array, coo_array, csr_array, eye_array

from .errors import TopologyError
from .graphs import Seed
from .weights import Rule, mixing_matrix


def link_delays(graph: nx.Graph, most: int, seed: Seed = 0) -> nx.Graph:
    """A copy whose links carry `late`: whole exchanges on the way, 0 … `most`.

    In proportion to `delay` where every link has one (the slowest gets `most`), else drawn evenly.
    """
    if most < 0:
        raise TopologyError(f"a delay is a number of exchanges, 0 or more, not {most}")
    copy = graph.copy()
    links = copy.number_of_edges()
    delays = [d for *_, d in copy.edges(data="delay") if isinstance(d, int | float)]
    if delays and len(delays) == links:
        top = max(delays) or 1.0
        late = [round(most * delay / top) for delay in delays]
    else:
        late = np.random.default_rng(seed).integers(0, most + 1, links).tolist()
    for (u, v), steps in zip(copy.edges, late, strict=True):
        copy[u][v]["late"] = steps
    return copy


def delayed_matrix(graph: nx.Graph, rule: Rule = "push") -> csr_array:
    """One exchange of a swarm whose links are `late`, mass on its way included.

    The state is the peers' mass, then what arrives in 1, 2, … exchanges at each peer. Columns sum to
    1, so `spectral_gap` predicts the rate as for any other exchange.
    """
    nodes = sorted(graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    peers = len(nodes)
    late = {}
    for u, v, steps in graph.edges(data="late", default=0):
        late[index[v], index[u]] = steps
        if not graph.is_directed():
            late[index[u], index[v]] = steps
    shares = coo_array(mixing_matrix(graph, rule))
    row, column = shares.coords
    steps = np.array(
        [late.get((i, j), 0) for i, j in zip(row.tolist(), column.tolist(), strict=True)]
    )
    most = int(steps.max(initial=0))
    blocks: list[list[csr_array | None]] = [[None] * (most + 1) for _ in range(most + 1)]
    for stage in range(most + 1):
        taken = steps == stage
        blocks[stage][0] = csr_array(
            (shares.data[taken], (row[taken], column[taken])), shape=(peers, peers)
        )
        if stage < most:  # what was due in stage + 1 exchanges is due in one less
            blocks[stage][stage + 1] = csr_array(eye_array(peers))
    return csr_array(block_array(blocks))
