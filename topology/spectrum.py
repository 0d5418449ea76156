"""How fast an exchange mixes: predicted by the second eigenvalue of its matrix, and measured.

The error of synchronous push-sum shrinks per exchange like |λ2| of its column-stochastic matrix W;
the *gap* is 1 − |λ2|. A reversible W (every rule on an undirected graph) has the eigenvalues of a
symmetric matrix and gets Lanczos; slow ones (rings) get shift-invert; directed ones get Arnoldi.
Small matrices are solved densely. A run of synchronous push-sum measures the same.
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
    flowing,
    mixing_matrix,
    require_connected,
    subgraphs,
    weak_spots,
)

Vector = NDArray[np.float64]
Method = Literal["auto", "dense", "sparse", "factorized"]

DENSE = 500
"""Up to this many peers a dense solver is both the fastest and the surest."""

STEPS = 3000
"""Lanczos steps before a matrix counts as slow and is factorized instead."""


def spectral_gap(matrix: csr_array, method: Method = "auto") -> float:
    """1 − |λ2| of a column-stochastic matrix, accurate even where |λ2| rounds to 1.

    0 means that it never mixes (disconnected or periodic). `method` forces the dense or the sparse
    solvers, or shift-invert alone; leave it alone outside tests.
    """
    matrix = csr_array(matrix)
    peers = _peers(matrix)
    if peers == 1:
        return 1.0
    dense = method == "dense" or (method == "auto" and peers <= DENSE)
    form = _symmetric_form(matrix)
    if form is None:
        gap = 1.0 - (_dense_second(matrix) if dense else _general_second(matrix))
    elif dense:
        symmetric, top = form
        rest = symmetric.toarray() - np.outer(top, top)
        gap = 1.0 - float(np.abs(np.linalg.eigvalsh(rest)).max())
    else:
        gap = _symmetric_gap(*form, iterate=method != "factorized")
    return min(max(gap, 0.0), 1.0)


def predicted_exchanges(gap: float, tolerance: float = 1e-6) -> float:
    """Exchanges until the error is `tolerance` of what it was, from the slowest start.

    Other starts hold less of the slow mode and get there sooner, by a fixed number of exchanges. Push-sum's
    weights settle at the same pace, which can cost an exchange more. `inf` when the gap is 0.
    """
    if not 0 < tolerance < 1:
        raise TopologyError(f"tolerance is a fraction of the first error, 0 … 1, not {tolerance}")
    if gap <= 0:
        return inf
    return 1.0 if gap >= 1 else float(ceil(log(tolerance) / log1p(-gap)))


def schedule_rate(
    schedule: Schedule, rule: Rule = "push", steps: int | None = None, method: Method = "auto"
) -> float:
    """|λ2| per exchange over one period that repeats for ever; 0 when a period averages exactly.

    A schedule without a period needs `steps`, the window to take instead; raise it until the rate
    settles.
    """
    window, peers = steps or schedule.period, schedule.peers
    if window is None:
        raise TopologyError("this schedule never repeats: give steps, the window to measure over")
    matrices = [schedule.matrix(step, rule) for step in range(window)]

    def apply(vector: NDArray) -> NDArray:
        for matrix in matrices:
            vector = matrix @ vector
        return vector

    # asked first: an exact period leaves rounding errors, whose eigenvalues mean nothing
    if peers == 1 or np.abs(_rest(apply, _start(peers))).max() < 1e-13:
        return 0.0
    if method == "dense" or (method == "auto" and peers <= DENSE):
        second = float(np.abs(np.linalg.eigvals(apply(np.eye(peers)) - 1.0 / peers)).max())
    else:
        second = _arnoldi(apply, peers)
    return min(second, 1.0) ** (1.0 / window)


@dataclass(frozen=True)
class Pace:
    """How fast exchanges average, as predicted.

    `gap` is 1 − |λ2| per exchange, `exchanges` what it takes to the tolerance asked for; `exact_after` is
    the number of exchanges that average exactly, None where no period does.
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
    if gap > 1.0 - 1e-12:  # exact: not for certain before the whole period is over
        after = schedule.period or steps or 1
        return Pace(1.0, float(after), after)
    return Pace(gap, predicted_exchanges(gap, tolerance), None)


def _peers(matrix: csr_array) -> int:
    return len(matrix.indptr) - 1


def _start(peers: int) -> Vector:
    """A fixed start vector: same matrix, same answer."""
    return np.random.default_rng(20240229).standard_normal(peers)


def _rest(apply: Callable[[NDArray], NDArray], vector: NDArray) -> NDArray:
    """(W − 11ᵀ/n) v: Brauer's deflation. 1ᵀ is W's left eigenvector, so only λ1 moves, to 0."""
    return apply(vector) - vector.mean()


def _dense_second(matrix: csr_array) -> float:
    rest = matrix.toarray() - 1.0 / _peers(matrix)
    return float(np.abs(np.linalg.eigvals(rest)).max())


def _symmetric_form(matrix: csr_array) -> tuple[csr_array, Vector] | None:
    """S = D^−½ W D^½ and its unit top vector, or None when W is not reversible.

    Reversible: some π has W_ij π_j = W_ji π_i; D = diag(π). π is read off a
    spanning tree, then checked on every edge.
    """
    peers = _peers(matrix)
    here, there = csr_array(matrix, copy=True), csr_array(matrix.T)
    for side in (here, there):
        side.eliminate_zeros()
        side.sort_indices()
    if not (
        np.array_equal(here.indptr, there.indptr) and np.array_equal(here.indices, there.indices)
    ):
        return None
    if np.allclose(here.data, there.data, rtol=1e-13, atol=0):
        return csr_array((here + there) / 2), np.full(peers, peers**-0.5)
    order, parent = breadth_first_order(here, 0, directed=False)
    if len(order) < peers:
        return None
    ratio = csr_array(
        (np.log(np.divide(here.data, there.data)), here.indices, here.indptr), here.shape
    )
    steps = np.asarray(ratio[order[1:], parent[order[1:]]]).ravel()
    height = np.zeros(peers)
    for node, step in zip(order[1:].tolist(), steps.tolist(), strict=True):
        height[node] = height[parent[node]] + step
    row = np.repeat(np.arange(peers), np.diff(here.indptr))
    off = np.abs(height[row] - height[here.indices] - ratio.data).max()
    if off > 1e-10 or np.ptp(height) > 50:
        return None
    top = np.exp((height - height.max()) / 2)
    symmetric = csr_array(diags_array(1 / top) @ here @ diags_array(top))
    return csr_array((symmetric + symmetric.T) / 2), top / np.linalg.norm(top)


def _symmetric_gap(symmetric: csr_array, top: Vector, iterate: bool) -> float:
    ends = _lanczos(symmetric, top) if iterate else None
    if ends is not None:
        return 1.0 - max(abs(ends[0]), abs(ends[1]))
    gap = _factorized_gap(symmetric, top)
    # Gershgorin: no eigenvalue lies below 2·(least kept share) − 1, so the low end rarely matters
    if 2.0 * symmetric.diagonal().min() < gap:
        low = eigsh(symmetric, k=1, which="SA", v0=_start(len(top)), return_eigenvectors=False)
        gap = min(gap, 1.0 - abs(float(low[0])))
    return gap


def _lanczos(symmetric: csr_array, top: Vector) -> tuple[float, float] | None:
    """Least and largest eigenvalue of S − top topᵀ, or None when `STEPS` were not enough.

    Plain three-term Lanczos: without reorthogonalization inner Ritz values repeat, which does not
    hurt the two ends, and a step costs one sparse product (ARPACK's upkeep is five times that).
    """
    vector = _start(len(top))
    vector -= top * (top @ vector)
    vector /= np.linalg.norm(vector)
    before, beta = np.zeros_like(vector), 0.0
    alphas, betas = [], []
    for step in range(1, STEPS + 1):
        after = symmetric @ vector - top * (top @ vector) - beta * before
        alphas.append(float(after @ vector))
        after -= alphas[-1] * vector
        beta = float(np.linalg.norm(after))
        exact = beta < 1e-13  # the start's whole subspace is spanned
        if exact or step % 100 == 0:
            found, sure = zip(*(_ritz(alphas, betas, i, beta) for i in (0, step - 1)), strict=True)
            slack = min(1e-9, 1e-4 * (1.0 - max(map(abs, found))))
            # the end with the smaller modulus may stay rough: only the larger one is the answer
            big = int(abs(found[1]) >= abs(found[0]))
            small_bound = abs(found[1 - big]) + sure[1 - big]
            if exact or (sure[big] <= slack and small_bound <= abs(found[big]) + slack):
                return found[0], found[1]
        betas.append(beta)
        before, vector = vector, after / beta
    return None


def _ritz(alphas: list[float], betas: list[float], index: int, beta: float) -> tuple[float, float]:
    """One Ritz value and the bound on its distance to an eigenvalue."""
    if len(alphas) == 1:
        return alphas[0], beta
    value, vector = eigh_tridiagonal(
        alphas, betas[: len(alphas) - 1], select="i", select_range=(index, index)
    )
    return float(value[0]), abs(beta * float(vector[-1, 0]))


def _factorized_gap(symmetric: csr_array, top: Vector) -> float:
    """1 − λ2 by shift-invert. The shift is of the size of a ring's gap, just beside λ1."""
    peers = len(top)
    shift = 1.0 / peers**2
    shifted = csc_array((1.0 + shift) * eye_array(peers) - symmetric)
    factors = splu(shifted, permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True})

    def solve(vector: NDArray) -> NDArray:
        vector = vector.ravel() - top * (top @ vector.ravel())
        solved = factors.solve(vector)
        return solved - top * (top @ solved)

    inverse = LinearOperator((peers, peers), matvec=solve, dtype=np.float64)  # pyright: ignore
    _, vectors = eigsh(inverse, k=1, which="LA", v0=_start(peers))
    slow = vectors[:, 0] - top * (top @ vectors[:, 0])
    # the Dirichlet form sums squares, so a gap of 1e-9 keeps its digits where 1 − λ2 would not
    share = symmetric.tocoo()
    row, column = share.coords
    differences = slow[row] / top[row] - slow[column] / top[column]
    return float((share.data * top[row] * top[column]) @ differences**2 / 2 / (slow @ slow))


def _arnoldi(apply: Callable[[NDArray], NDArray], peers: int, rounds: int = 60) -> float:
    def deflated(vector: NDArray) -> NDArray:
        return _rest(apply, vector.ravel())

    start = _start(peers)
    if np.abs(deflated(start)).max() < 1e-13:  # ARPACK refuses a zero operator
        return 0.0
    operator = LinearOperator((peers, peers), matvec=deflated, dtype=np.float64)  # pyright: ignore
    wanted = min(4, peers - 2)
    values = eigs(
        operator,
        k=wanted,
        v0=start,
        ncv=min(peers, 60),
        maxiter=rounds,
        tol=1e-11,  # pyright: ignore[reportArgumentType]
        return_eigenvectors=False,
    )
    return float(np.abs(values).max())


def _general_second(matrix: csr_array) -> float:
    """|λ2| of a large directed exchange: Arnoldi, or shift-invert at 1 when that is slow."""
    peers = _peers(matrix)
    try:
        return _arnoldi(lambda vector: matrix @ vector, peers)
    except ArpackNoConvergence:
        pass
    kept = float(matrix.diagonal().min())
    near = csc_array(matrix)
    for wanted in (8, 32):
        values: NDArray = eigs(  # pyright: ignore[reportAssignmentType]
            near, k=wanted, sigma=1.0 + 1.0 / peers**2, v0=_start(peers), return_eigenvectors=False
        )
        distance = np.abs(1.0 - values)
        others = values[np.arange(len(values)) != distance.argmin()]
        second = float(np.abs(others).max())
        # All eigenvalues lie in the disc of centre `kept` that touches 1, hence those farther
        # than r from 1 have modulus² ≤ 1 − r²·kept/(1 − kept).
        bound = 1.0 - distance.max() ** 2 * kept / (1.0 - kept)
        if second**2 >= bound - 1e-12:
            return second
    raise TopologyError(
        f"no second eigenvalue for this directed graph of {peers} peers: the solvers did not "
        "converge. Measure it instead (gossamer.topology.contraction), or use more self-weight"
    )


# --- measured: synchronous push-sum, run ---------------------------------------------------------

Exchange = csr_array | Callable[[int], csr_array]
"""One column-stochastic matrix, or a function of the step that gives one (a schedule)."""


def log_errors(
    exchange: Exchange, exchanges: int, start: Vector | None = None, seed: Seed = 0
) -> Vector:
    """Natural log of the error after 0 … `exchanges` exchanges, relative to the first error.

    The error is the root mean square of x − x̄ weighted by w. `start` holds one value per peer (drawn
    from a normal distribution when left out); all weights start at 1. −inf where it is exact.

    The state is kept as distance from the mean, s − x̄·w, and rescaled as it shrinks, so that thousands
    of exchanges can be measured without sinking into rounding.
    """
    first = exchange(0) if callable(exchange) else exchange
    peers = len(first.indptr) - 1
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
        offset -= weight * (offset.sum() / weight.sum())  # rounding only: the sum is conserved at 0
        size = float(np.sqrt(np.sum(offset**2 / weight) / peers))
        if size < 1e-14:  # this exchange averaged exactly
            break
        logs[step + 1] = logs[step] + np.log(size)
    return logs


def contraction(
    exchange: Exchange, exchanges: int, start: Vector | None = None, seed: Seed = 0
) -> float:
    """Measured |λ2|: mean factor per exchange over the second half of a run.

    Give several times 1 / gap exchanges, so that only the slowest mode is left by half-time.
    """
    logs = log_errors(exchange, exchanges, start, seed)
    half = exchanges // 2
    if exchanges < 2 or not np.isfinite(logs[half]):
        return 0.0
    return float(np.exp((logs[-1] - logs[half]) / (exchanges - half)))


def exchanges_to(logs: Vector, tolerance: float) -> int | None:
    """First exchange after which the error stays at or under `tolerance`; None when never."""
    above = np.flatnonzero(logs > np.log(tolerance))
    first = int(above[-1]) + 1 if above.size else 0
    return first if first < len(logs) else None


# --- links that take time: messages arrive some exchanges later ----------------------------------


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


# --- facts in one object ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """What one graph does to gossip.

    `exchanges` is the prediction from the slowest start to `tolerance`; `messages` is exchanges ×
    links used per exchange (both directions of an undirected link). Losing one of `cut_edges` or
    `bridge_peers` cuts the swarm apart.
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
    def second(self) -> float:
        """|λ2|: the factor by which the error shrinks per exchange."""
        return 1.0 - self.gap

    @property
    def messages(self) -> float:
        """Messages that the swarm sends until the tolerance is met."""
        return self.exchanges * self.links * (1 if self.directed else 2)


def facts(
    graph: nx.Graph,
    rule: Rule = "push",
    tolerance: float = 1e-6,
    seed: Seed = 0,
    what: str = "the graph",
    sources: int = 64,
) -> Facts:
    """Degrees, spectrum, distances and weak spots of a connected graph.

    A disconnected one raises `DisconnectedError` with its components. `seed` and `sources` choose
    where distances are sampled from when there are more peers than `sources`. Links that carry nothing
    under the rule do not count.
    """
    whole, graph = graph, flowing(graph, rule)
    if graph is not whole:
        what = f"{what} without its links of weight 0"
    require_connected(graph, what)
    gap = spectral_gap(mixing_matrix(graph, rule))
    degrees = [
        d for _, d in (graph.out_degree() if isinstance(graph, nx.DiGraph) else graph.degree())
    ]
    edges, peers = weak_spots(graph)
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
        cut_edges=tuple(edges),
        bridge_peers=tuple(peers),
    )


def model_facts(
    graph: nx.Graph, members: Members, rule: Rule = "push", tolerance: float = 1e-6, seed: Seed = 0
) -> dict[str, Facts]:
    """Facts of each partial model on the subgraph of the peers that implement it."""
    return {
        model: facts(part, rule, tolerance, seed, f"the subgraph of partial model {model!r}")
        for model, part in subgraphs(graph, members).items()
    }
