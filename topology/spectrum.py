"""How fast a graph mixes: predicted by the second eigenvalue of its mixing matrix, or measured.

In each exchange of synchronous push-sum, the error shrinks by about |λ2|, the second largest modulus among
the eigenvalues of the column-stochastic mixing matrix W; the *spectral gap* is 1 − |λ2|. The *slowest mode*
is the eigenvector of λ2. Small matrices are solved densely. A large W that is reversible, as with every
weight rule on an undirected graph, has the eigenvalues of a symmetric matrix: λ2 is found by Lanczos, or by
shift-invert if that converges slowly (rings). Other large matrices, of directed graphs, need Arnoldi.
Measured rates come from a run of synchronous push-sum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf, log, log1p
from typing import Literal

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal
from scipy.sparse import block_array, coo_array, csc_array, csr_array, diags_array, eye_array
from scipy.sparse.csgraph import breadth_first_order
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs, eigsh, splu

from .graphs import Schedule
from .structure import (
    Edge,
    Members,
    Rule,
    Seed,
    TopologyError,
    effective_diameter,
    mixing_matrix,
    require_connected,
    subgraphs,
    weak_spots,
    without_zero_weights,
)

Vector = NDArray[np.float64]
Method = Literal["auto", "dense", "sparse", "factorized"]
"""Which solver computes λ2; `factorized` is shift-invert."""

MAX_DENSE = 500
"""The number of peers up to which the dense solver is used: it is faster there, and always converges."""

MAX_LANCZOS_STEPS = 3000
"""The number of Lanczos steps after which a matrix is factorized instead (shift-invert)."""


def spectral_gap(matrix: csr_array, method: Method = "auto") -> float:
    """Return 1 − |λ2| of a column-stochastic matrix, accurate even where |λ2| rounds to 1.

    0 means that it never mixes (disconnected or periodic). `method` is for tests: it forces the dense
    solver, the sparse solvers, or shift-invert only.
    """
    matrix = csr_array(matrix)
    peers = _count_peers(matrix)
    if peers == 1:
        return 1.0
    dense = method == "dense" or (method == "auto" and peers <= MAX_DENSE)
    symmetric_form = _symmetric_form(matrix)
    if symmetric_form is None:
        gap = 1.0 - (
            _dense_second_eigenvalue(matrix) if dense else _sparse_second_eigenvalue(matrix)
        )
    elif dense:
        symmetric, top = symmetric_form
        deflated = symmetric.toarray() - np.outer(top, top)
        gap = 1.0 - float(np.abs(np.linalg.eigvalsh(deflated)).max())
    else:
        gap = _symmetric_gap(*symmetric_form, iterate=method != "factorized")
    return min(max(gap, 0.0), 1.0)


def predicted_exchanges(gap: float, tolerance: float = 1e-6) -> float:
    """Return how many exchanges it takes until the error is `tolerance` times the first error.

    That is for the worst starting values. Others contain less of the slowest mode and need a fixed number of
    exchanges less. Push-sum's weights converge at the same rate, which can cost one exchange more. `inf` if
    the gap is 0.
    """
    if not 0 < tolerance < 1:
        raise TopologyError(f"tolerance is a fraction of the first error, 0 … 1, not {tolerance}")
    if gap <= 0:
        return inf
    return 1.0 if gap >= 1 else float(ceil(log(tolerance) / log1p(-gap)))


def schedule_rate(
    schedule: Schedule, rule: Rule = "push", steps: int | None = None, method: Method = "auto"
) -> float:
    """Return |λ2| per exchange of a schedule that repeats its period; 0 when a period averages exactly.

    For a schedule without a period give `steps`: its first `steps` steps are taken as the period. Raise it
    until the rate no longer changes.
    """
    period, peers = steps or schedule.period, schedule.peers
    if period is None:
        raise TopologyError(
            "this schedule never repeats: give steps, the number of steps to take as its period"
        )
    matrices = [schedule.matrix(step, rule) for step in range(period)]

    def apply(vector: NDArray) -> NDArray:
        for matrix in matrices:
            vector = matrix @ vector
        return vector

    # Check this first: an exact period leaves only rounding errors, whose eigenvalues mean nothing.
    if peers == 1 or np.abs(_deflate(apply, _start_vector(peers))).max() < 1e-13:
        return 0.0
    if method == "dense" or (method == "auto" and peers <= MAX_DENSE):
        second = float(np.abs(np.linalg.eigvals(apply(np.eye(peers)) - 1.0 / peers)).max())
    else:
        second = _arnoldi(apply, peers)
    return min(second, 1.0) ** (1.0 / period)


@dataclass(frozen=True)
class Pace:
    """The predicted speed of averaging.

    `gap` is 1 − |λ2| per exchange, `exchanges` the number of exchanges to the tolerance; `exact_after` is the
    number of exchanges after which averages are exact, or None if they never are.
    """

    gap: float
    exchanges: float
    exact_after: int | None

    @property
    def rate(self) -> float:
        """|λ2|: the factor by which the error shrinks per exchange."""
        return 1.0 - self.gap


def predict_pace(
    schedule: Schedule, rule: Rule = "push", tolerance: float = 1e-6, steps: int | None = None
) -> Pace:
    """Predict how fast a schedule averages; `steps` as for `schedule_rate`."""
    if schedule.period == 1:
        gap = spectral_gap(schedule.matrix(0, rule))
    else:
        gap = 1.0 - schedule_rate(schedule, rule, steps)
    if gap > 1.0 - 1e-12:  # a period averages exactly; before its end nothing is certain
        period = schedule.period or steps or 1
        return Pace(1.0, float(period), period)
    return Pace(gap, predicted_exchanges(gap, tolerance), None)


def _count_peers(matrix: csr_array) -> int:
    """Return the number of peers of a mixing matrix; pyright does not know that it has a shape."""
    return len(matrix.indptr) - 1


def _start_vector(peers: int) -> Vector:
    """Return a fixed start vector, so that the same matrix always gives the same result."""
    return np.random.default_rng(20240229).standard_normal(peers)


def _deflate(apply: Callable[[NDArray], NDArray], vector: NDArray) -> NDArray:
    """Return (W − 11ᵀ/n) v: Brauer's deflation. 1ᵀ is W's left eigenvector, so only λ1 changes, to 0."""
    return apply(vector) - vector.mean()


def _dense_second_eigenvalue(matrix: csr_array) -> float:
    """Return |λ2| of any matrix, by the dense solver."""
    deflated = matrix.toarray() - 1.0 / _count_peers(matrix)
    return float(np.abs(np.linalg.eigvals(deflated)).max())


def _symmetric_form(matrix: csr_array) -> tuple[csr_array, Vector] | None:
    """Return S = D^−½ W D^½ and the unit eigenvector of λ1, or None when W is not reversible.

    W is reversible if some π has W_ij π_j = W_ji π_i; D = diag(π). π is computed along a spanning tree, then
    checked on every edge. The eigenvector is called `top` in this module.
    """
    peers = _count_peers(matrix)
    forward, backward = csr_array(matrix, copy=True), csr_array(matrix.T)
    for entries in (forward, backward):
        entries.eliminate_zeros()
        entries.sort_indices()
    if not (
        np.array_equal(forward.indptr, backward.indptr)
        and np.array_equal(forward.indices, backward.indices)
    ):
        return None
    if np.allclose(forward.data, backward.data, rtol=1e-13, atol=0):
        return csr_array((forward + backward) / 2), np.full(peers, peers**-0.5)
    order, parent = breadth_first_order(forward, 0, directed=False)
    if len(order) < peers:
        return None
    log_ratios = np.log(np.divide(forward.data, backward.data))
    log_ratio = csr_array((log_ratios, forward.indices, forward.indptr), forward.shape)
    steps = np.asarray(log_ratio[order[1:], parent[order[1:]]]).ravel()
    log_pi = np.zeros(peers)
    for node, step in zip(order[1:].tolist(), steps.tolist(), strict=True):
        log_pi[node] = log_pi[parent[node]] + step
    row = np.repeat(np.arange(peers), np.diff(forward.indptr))
    error = np.abs(log_pi[row] - log_pi[forward.indices] - log_ratio.data).max()
    if error > 1e-10 or np.ptp(log_pi) > 50:
        return None
    top = np.exp((log_pi - log_pi.max()) / 2)
    symmetric = csr_array(diags_array(1 / top) @ forward @ diags_array(top))
    return csr_array((symmetric + symmetric.T) / 2), top / np.linalg.norm(top)


def _symmetric_gap(symmetric: csr_array, top: Vector, iterate: bool) -> float:
    """Return the gap of a symmetric matrix whose unit eigenvector of λ1 is `top`."""
    extremes = _lanczos(symmetric, top) if iterate else None
    if extremes is not None:
        return 1.0 - max(abs(extremes[0]), abs(extremes[1]))
    gap = _factorized_gap(symmetric, top)
    # Gershgorin: no eigenvalue is below 2·(smallest diagonal entry) − 1, so the lowest rarely matters.
    if 2.0 * symmetric.diagonal().min() < gap:
        low = eigsh(
            symmetric, k=1, which="SA", v0=_start_vector(len(top)), return_eigenvectors=False
        )
        gap = min(gap, 1.0 - abs(float(low[0])))
    return gap


def _lanczos(symmetric: csr_array, top: Vector) -> tuple[float, float] | None:
    """Return the lowest and highest eigenvalue of S − top topᵀ, or None if it does not converge in time.

    Plain three-term Lanczos: without reorthogonalization inner Ritz values repeat, which does not change the
    two extreme ones, and a step costs one sparse product (ARPACK needs five times as long).
    """
    vector = _start_vector(len(top))
    vector -= top * (top @ vector)
    vector /= np.linalg.norm(vector)
    previous, beta = np.zeros_like(vector), 0.0
    alphas, betas = [], []
    for step in range(1, MAX_LANCZOS_STEPS + 1):
        following = symmetric @ vector - top * (top @ vector) - beta * previous
        alphas.append(float(following @ vector))
        following -= alphas[-1] * vector
        beta = float(np.linalg.norm(following))
        is_exact = beta < 1e-13  # the Krylov space is complete
        if is_exact or step % 100 == 0:
            ritz = (_ritz(alphas, betas, i, beta) for i in (0, step - 1))
            values, errors = zip(*ritz, strict=True)
            slack = min(1e-9, 1e-4 * (1.0 - max(map(abs, values))))
            # The result is the larger modulus; the other value need only be certain to be smaller.
            large = int(abs(values[1]) >= abs(values[0]))
            small_bound = abs(values[1 - large]) + errors[1 - large]
            if is_exact or (errors[large] <= slack and small_bound <= abs(values[large]) + slack):
                return values[0], values[1]
        betas.append(beta)
        previous, vector = vector, following / beta
    return None


def _ritz(alphas: list[float], betas: list[float], index: int, beta: float) -> tuple[float, float]:
    """Return one Ritz value, and a bound on its distance to an eigenvalue."""
    if len(alphas) == 1:
        return alphas[0], beta
    value, vector = eigh_tridiagonal(
        alphas, betas[: len(alphas) - 1], select="i", select_range=(index, index)
    )
    return float(value[0]), abs(beta * float(vector[-1, 0]))


def _factorized_gap(symmetric: csr_array, top: Vector) -> float:
    """Return 1 − λ2 by shift-invert, with a shift slightly above λ1 (by about the gap of a ring)."""
    peers = len(top)
    shift = 1.0 / peers**2
    shifted = csc_array((1.0 + shift) * eye_array(peers) - symmetric)
    factors = splu(shifted, permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True})

    def solve(vector: NDArray) -> NDArray:
        vector = vector.ravel() - top * (top @ vector.ravel())
        solved = factors.solve(vector)
        return solved - top * (top @ solved)

    inverse = LinearOperator((peers, peers), matvec=solve, dtype=np.float64)  # pyright: ignore
    _, vectors = eigsh(inverse, k=1, which="LA", v0=_start_vector(peers))
    slowest = vectors[:, 0] - top * (top @ vectors[:, 0])
    # The Dirichlet form sums squares, so a gap of 1e-9 keeps its digits; 1 − λ2 would lose them.
    entries = symmetric.tocoo()
    row, column = entries.coords
    differences = slowest[row] / top[row] - slowest[column] / top[column]
    weights = entries.data * top[row] * top[column]
    return float(weights @ differences**2 / 2 / (slowest @ slowest))


def _arnoldi(apply: Callable[[NDArray], NDArray], peers: int) -> float:
    """Return |λ2| of the matrix that `apply` multiplies by; ArpackNoConvergence after 60 restarts."""

    def multiply_deflated(vector: NDArray) -> NDArray:
        return _deflate(apply, vector.ravel())

    start = _start_vector(peers)
    if np.abs(multiply_deflated(start)).max() < 1e-13:  # ARPACK refuses a zero operator
        return 0.0
    operator = LinearOperator((peers, peers), matvec=multiply_deflated, dtype=np.float64)  # pyright: ignore
    values = eigs(
        operator,
        k=min(4, peers - 2),
        v0=start,
        ncv=min(peers, 60),
        maxiter=60,
        tol=1e-11,  # pyright: ignore[reportArgumentType]
        return_eigenvectors=False,
    )
    return float(np.abs(values).max())


def _sparse_second_eigenvalue(matrix: csr_array) -> float:
    """Return |λ2| of a large directed graph: by Arnoldi, or by shift-invert near 1 if that is slow."""
    peers = _count_peers(matrix)
    try:
        return _arnoldi(lambda vector: matrix @ vector, peers)
    except ArpackNoConvergence:
        pass
    kept = float(matrix.diagonal().min())  # the smallest share of its mass that a peer keeps
    columns = csc_array(matrix)
    shift = 1.0 + 1.0 / peers**2
    for count in (8, 32):
        values: NDArray = eigs(  # pyright: ignore[reportAssignmentType]
            columns, k=count, sigma=shift, v0=_start_vector(peers), return_eigenvectors=False
        )
        distance = np.abs(1.0 - values)
        others = values[np.arange(len(values)) != distance.argmin()]
        second = float(np.abs(others).max())
        # All eigenvalues lie in the disc of centre `kept` that touches 1, hence those farther than r from 1
        # have modulus² ≤ 1 − r²·kept/(1 − kept).
        bound = 1.0 - distance.max() ** 2 * kept / (1.0 - kept)
        if second**2 >= bound - 1e-12:
            return second
    raise TopologyError(
        f"no second eigenvalue for this directed graph of {peers} peers: the solvers did not "
        "converge. Measure it instead (gossamer.topology.contraction), or let peers keep more of their mass"
    )


# --- measured: runs of synchronous push-sum -------------------------------------------------------

Exchange = csr_array | Callable[[int], csr_array]
"""One column-stochastic matrix, or a function that returns the matrix of a step (a schedule)."""


def log_errors(
    exchange: Exchange, exchanges: int, start: Vector | None = None, seed: Seed = 0
) -> Vector:
    """Return the natural logs of the error after 0 … `exchanges` exchanges, relative to the first error.

    The error is the root mean square of x − x̄ weighted by w; its log is −inf where averages are exact.
    `start` has one value per peer (by default drawn from a normal distribution); all weights start at 1.

    The computation keeps the distance from the mean, s − x̄·w, and rescales it as it shrinks, so that
    rounding errors do not hide it even after thousands of exchanges.
    """
    first_matrix = exchange(0) if callable(exchange) else exchange
    peers = _count_peers(first_matrix)
    value = (
        np.random.default_rng(seed).standard_normal(peers)
        if start is None
        else np.array(start, float)
    )
    if value.shape != (peers,):
        raise TopologyError(
            f"start has shape {value.shape}: give one value for each of {peers} peers"
        )
    offset = value - value.mean()
    weight = np.ones(peers)
    size = float(np.sqrt(np.mean(offset**2)))
    if size == 0:
        return np.full(exchanges + 1, -np.inf)
    logs = np.full(exchanges + 1, -np.inf)
    logs[0] = 0.0
    for step in range(exchanges):
        matrix = exchange(step) if callable(exchange) else exchange
        offset = matrix @ (offset / size)
        weight = matrix @ weight
        offset -= weight * (offset.sum() / weight.sum())  # remove rounding errors: the sum is 0
        size = float(np.sqrt(np.sum(offset**2 / weight) / peers))
        if size < 1e-14:  # this exchange averaged exactly
            break
        logs[step + 1] = logs[step] + np.log(size)
    return logs


def contraction(
    exchange: Exchange, exchanges: int, start: Vector | None = None, seed: Seed = 0
) -> float:
    """Return the measured |λ2|: the mean factor of the error per exchange, over the second half of a run.

    Use several times 1 / gap exchanges, so that only the slowest mode is left in the second half.
    """
    logs = log_errors(exchange, exchanges, start, seed)
    half = exchanges // 2
    if exchanges < 2 or not np.isfinite(logs[half]):
        return 0.0
    return float(np.exp((logs[-1] - logs[half]) / (exchanges - half)))


def exchanges_to(logs: Vector, tolerance: float) -> int | None:
    """Return the first exchange after which the error stays at or below `tolerance`; None if never."""
    too_large = np.flatnonzero(logs > np.log(tolerance))
    exchange = int(too_large[-1]) + 1 if too_large.size else 0
    return exchange if exchange < len(logs) else None


# --- delayed links: messages arrive some exchanges later ------------------------------------------


def link_delays(graph: nx.Graph, max_steps: int, seed: Seed = 0) -> nx.Graph:
    """Return a copy whose links have `delay_steps`: after how many exchanges a message arrives.

    They are proportional to `delay` if every link has one (the slowest gets `max_steps`), else drawn
    uniformly from 0 … `max_steps`.
    """
    if max_steps < 0:
        raise TopologyError(f"a delay is a number of exchanges, 0 or more, not {max_steps}")
    copy = graph.copy()
    links = copy.number_of_edges()
    delays = [d for *_, d in copy.edges(data="delay") if isinstance(d, int | float)]
    if delays and len(delays) == links:
        longest = max(delays) or 1.0
        delay_steps = [round(max_steps * delay / longest) for delay in delays]
    else:
        delay_steps = np.random.default_rng(seed).integers(0, max_steps + 1, links).tolist()
    for (u, v), steps in zip(copy.edges, delay_steps, strict=True):
        copy[u][v]["delay_steps"] = steps
    return copy


def delayed_matrix(graph: nx.Graph, rule: Rule = "push") -> csr_array:
    """Return the matrix of one exchange on a graph of `link_delays`, which includes mass in flight.

    Its state is the mass of every peer, then the mass that arrives at every peer in 1, 2, … exchanges.
    Columns sum to 1, so `spectral_gap` predicts the rate as for any mixing matrix.
    """
    nodes = sorted(graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    peers = len(nodes)
    delay_steps = {}
    for u, v, steps in graph.edges(data="delay_steps", default=0):
        delay_steps[index[v], index[u]] = steps
        if not graph.is_directed():
            delay_steps[index[u], index[v]] = steps
    shares = coo_array(mixing_matrix(graph, rule))
    row, column = shares.coords
    entries = zip(row.tolist(), column.tolist(), strict=True)
    delays = np.array([delay_steps.get(entry, 0) for entry in entries])
    longest = int(delays.max(initial=0))
    blocks: list[list[csr_array | None]] = [[None] * (longest + 1) for _ in range(longest + 1)]
    for delay in range(longest + 1):
        is_chosen = delays == delay
        blocks[delay][0] = csr_array(
            (shares.data[is_chosen], (row[is_chosen], column[is_chosen])), shape=(peers, peers)
        )
        if delay < longest:  # mass that was due in delay + 1 exchanges is now due in one less
            blocks[delay][delay + 1] = csr_array(eye_array(peers))
    return csr_array(block_array(blocks))


# --- all facts about a graph in one object ---------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """Properties of a graph that matter for gossip.

    `gap` is the spectral gap. `exchanges` is the predicted number to `tolerance`, from the worst starting
    values. Degrees are numbers of links per peer (of outgoing ones, if directed). Losing any one of
    `cut_edges` (the bridges of `weak_spots`) or `bridge_peers` (its cut peers) splits the swarm.
    """

    peers: int
    links: int
    directed: bool
    least_degree: int
    mean_degree: float
    most_degree: int
    gap: float
    tolerance: float
    exchanges: float
    effective_diameter: float
    cut_edges: tuple[Edge, ...]
    bridge_peers: tuple[int, ...]

    @property
    def rate(self) -> float:
        """|λ2|: the factor by which the error shrinks per exchange."""
        return 1.0 - self.gap

    @property
    def messages(self) -> float:
        """The messages until the tolerance is reached; an undirected link carries two per exchange."""
        return self.exchanges * self.links * (1 if self.directed else 2)


def facts(
    graph: nx.Graph,
    rule: Rule = "push",
    tolerance: float = 1e-6,
    seed: Seed = 0,
    graph_name: str = "the graph",
    sources: int = 64,
) -> Facts:
    """Return degrees, spectrum, distances and weak spots of a connected graph.

    Raises `DisconnectedError`, with the components, for a disconnected graph; `graph_name` is the subject of
    its message. With more peers than `sources`, distances are measured from that many peers, drawn with
    `seed`. With the rule `edges`, links of weight 0 do not count.
    """
    all_links, graph = graph, without_zero_weights(graph, rule)
    if graph is not all_links:
        graph_name = f"{graph_name} without its links of weight 0"
    require_connected(graph, graph_name)
    gap = spectral_gap(mixing_matrix(graph, rule))
    degree_of = graph.out_degree() if isinstance(graph, nx.DiGraph) else graph.degree()
    degrees = [degree for _, degree in degree_of]
    bridges, cut_peers = weak_spots(graph)
    return Facts(
        peers=len(graph),
        links=graph.number_of_edges(),
        directed=graph.is_directed(),
        least_degree=min(degrees),
        mean_degree=sum(degrees) / len(degrees),
        most_degree=max(degrees),
        gap=gap,
        tolerance=tolerance,
        exchanges=predicted_exchanges(gap, tolerance),
        effective_diameter=effective_diameter(graph, sources=sources, seed=seed),
        cut_edges=tuple(bridges),
        bridge_peers=tuple(cut_peers),
    )


def model_facts(
    graph: nx.Graph, members: Members, rule: Rule = "push", tolerance: float = 1e-6, seed: Seed = 0
) -> dict[str, Facts]:
    """Return the facts of each partial model's subgraph: that of the peers that have it."""
    return {
        model: facts(subgraph, rule, tolerance, seed, f"the subgraph of partial model {model!r}")
        for model, subgraph in subgraphs(graph, members).items()
    }
