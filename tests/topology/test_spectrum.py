from math import cos, log2, pi, sin

import networkx as nx
import numpy as np
import pytest
from scipy.sparse import csr_array

from gossamer.topology import (
    BUILDERS,
    Schedule,
    TopologyError,
    build,
    contraction,
    exchanges_to,
    log_errors,
    mixing_matrix,
    predicted_exchanges,
    schedule_rate,
    spectral_gap,
)


def dense_second(matrix: csr_array) -> float:
    """Independent of the code under test: all eigenvalues of the whole matrix, by modulus."""
    return float(np.sort(np.abs(np.linalg.eigvals(matrix.toarray())))[-2])


def second_eigenvalue(matrix: csr_array, method="auto") -> float:
    return 1 - spectral_gap(matrix, method)


def random_case(number: int) -> csr_array:
    """Undirected under each rule, and directed, in turn; connected."""
    rng = np.random.default_rng(number)
    peers = int(rng.integers(8, 70))
    rule = ("metropolis", "max-degree", "push", "directed")[number % 4]
    p = float(rng.uniform(1.2, 4) * np.log(peers) / peers)
    graph = nx.gnp_random_graph(peers, min(p, 0.9), seed=number, directed=rule == "directed")
    nx.add_cycle(graph, [int(i) for i in rng.permutation(peers)])
    return mixing_matrix(graph, "push" if rule == "directed" else rule)  # type: ignore[arg-type]


@pytest.mark.parametrize("block", range(8))
def test_sparse_agrees_with_dense_on_200_random_graphs(block: int) -> None:
    for number in range(25 * block, 25 * block + 25):
        matrix = random_case(number)
        expected = dense_second(matrix)
        assert second_eigenvalue(matrix, "sparse") == pytest.approx(expected, abs=1e-8), number
        assert second_eigenvalue(matrix, "dense") == pytest.approx(expected, abs=1e-8), number


@pytest.mark.parametrize(
    "spec", ["watts-strogatz:4:0.3", "regular:3", "barabasi-albert:2", "geographic"]
)
@pytest.mark.parametrize("rule", ["metropolis", "push"])
def test_larger_graphs_agree_before_lanczos_spans_everything(spec: str, rule) -> None:
    matrix = mixing_matrix(build(spec, 600, seed=5), rule)
    assert second_eigenvalue(matrix, "sparse") == pytest.approx(dense_second(matrix), abs=1e-8)


def test_two_way_links_with_uneven_shares_are_not_taken_for_reversible() -> None:
    rng = np.random.default_rng(6)
    graph = build("watts-strogatz:4:0.3", 40, seed=1).to_directed()
    for _, _, data in graph.edges(data=True):
        data["weight"] = float(rng.uniform(0.01, 0.1))
    matrix = mixing_matrix(graph, "edges")
    for method in ("dense", "sparse"):
        assert second_eigenvalue(matrix, method) == pytest.approx(dense_second(matrix), abs=1e-8)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [(k, "push") for k in BUILDERS] + [(k, "metropolis") for k in BUILDERS if k != "exponential"],
)
def test_measured_gossip_meets_the_prediction(kind: str, rule) -> None:
    matrix = mixing_matrix(build(kind, 64, seed=3), rule)
    gap = spectral_gap(matrix, "sparse")
    measured = contraction(matrix, min(int(60 / gap), 15_000))
    if gap > 1 - 1e-9:
        assert measured == 0  # exact in one exchange
    else:
        assert np.log(measured) == pytest.approx(np.log1p(-gap), rel=0.05)


@pytest.mark.parametrize("kind", [k for k in BUILDERS if k not in ("exponential", "clique")])
def test_slowest_start_takes_the_predicted_exchanges(kind: str) -> None:
    matrix = mixing_matrix(build(kind, 64, seed=3), "metropolis")
    values, vectors = np.linalg.eigh(matrix.toarray() - 1 / 64)
    predicted = predicted_exchanges(spectral_gap(matrix), 1e-6)
    logs = log_errors(matrix, int(1.2 * predicted) + 2, vectors[:, np.abs(values).argmax()])
    assert exchanges_to(logs, 1e-6) == pytest.approx(predicted, rel=0.05, abs=1)
    # and no other start is slower
    anyhow = exchanges_to(log_errors(matrix, int(1.2 * predicted) + 2, seed=8), 1e-6)
    assert anyhow is not None
    assert anyhow <= predicted


def test_ring_gap_falls_as_one_over_n_squared() -> None:
    for peers in (8, 100, 1000, 30_000):  # dense, dense, Lanczos, shift-invert
        gap = spectral_gap(mixing_matrix(build("ring", peers)))
        assert gap == pytest.approx(4 / 3 * sin(pi / peers) ** 2, rel=1e-6)


def test_slow_lattices_keep_their_digits() -> None:
    path = spectral_gap(mixing_matrix(build("path", 20_000)))
    assert path == pytest.approx(4 / 3 * sin(pi / 40_000) ** 2, rel=1e-6)
    torus = spectral_gap(mixing_matrix(build("torus", 10_000)))
    assert torus == pytest.approx(4 / 5 * sin(pi / 100) ** 2, rel=1e-6)


def test_directed_ring_by_shift_invert() -> None:
    ring = nx.cycle_graph(2000, create_using=nx.DiGraph)
    assert second_eigenvalue(mixing_matrix(ring)) == pytest.approx(cos(pi / 2000), abs=1e-10)


@pytest.mark.parametrize("peers", [16, 256, 1024])
def test_hypercube_and_exponential_gaps_fall_as_one_over_log(peers: int) -> None:
    expected = 2 / (1 + log2(peers))
    for kind in ("hypercube", "exponential"):
        assert spectral_gap(mixing_matrix(build(kind, peers))) == pytest.approx(expected, abs=1e-9)


def test_clique_is_exact_at_once() -> None:
    for method in ("dense", "sparse"):
        assert spectral_gap(mixing_matrix(build("clique", 40)), method) == pytest.approx(
            1, abs=1e-12
        )
    logs = log_errors(mixing_matrix(build("clique", 40)), 3)
    assert exchanges_to(logs, 1e-12) == 1


def test_star_with_metropolis_has_gap_one_over_n() -> None:
    for peers in (50, 5000):
        matrix = mixing_matrix(build("star", peers), "metropolis")
        assert spectral_gap(matrix) == pytest.approx(1 / peers, rel=1e-8)


def test_random_regular_beats_ring_and_torus() -> None:
    gaps = {
        kind: spectral_gap(mixing_matrix(build(kind, 256, seed=0)))
        for kind in ("regular:4", "ring", "torus")
    }
    assert gaps["regular:4"] > 3 * gaps["torus"] > 9 * gaps["ring"]


def test_expander_gap_does_not_fall() -> None:
    gaps = [spectral_gap(mixing_matrix(build("expander", peers))) for peers in (100, 1000, 10_000)]
    assert min(gaps) > 0.1


def test_disconnected_and_periodic_never_mix() -> None:
    apart = nx.disjoint_union(nx.cycle_graph(5), nx.cycle_graph(6))
    assert spectral_gap(mixing_matrix(apart), "dense") == pytest.approx(0, abs=1e-12)
    assert spectral_gap(mixing_matrix(apart), "sparse") == pytest.approx(0, abs=1e-9)
    swap = csr_array(np.array([[0.0, 1.0], [1.0, 0.0]]))
    assert spectral_gap(swap) == pytest.approx(0, abs=1e-12)
    assert predicted_exchanges(0.0) == float("inf")


def test_low_end_counts_after_shift_invert() -> None:
    """A nearly periodic ring: the eigenvalue near −1 is the slow one."""
    graph = nx.cycle_graph(40)
    nx.set_edge_attributes(graph, 0.4999, "weight")
    matrix = mixing_matrix(graph, "edges")
    assert second_eigenvalue(matrix, "factorized") == pytest.approx(dense_second(matrix), abs=1e-8)
    assert second_eigenvalue(matrix, "factorized") == pytest.approx(4 * 0.4999 - 1, abs=1e-8)


def test_predicted_exchanges() -> None:
    assert predicted_exchanges(0.5, 1 / 1024) == 10
    assert predicted_exchanges(1.0) == 1
    with pytest.raises(TopologyError, match="tolerance"):
        predicted_exchanges(0.5, 2.0)


def test_period_of_one_is_the_matrix_itself() -> None:
    graph = build("watts-strogatz", 40, seed=1)
    expected = pytest.approx(dense_second(mixing_matrix(graph)), abs=1e-9)
    for method in ("dense", "sparse"):
        for period in (1, 3):
            schedule = Schedule(40, lambda step: graph, period)
            assert schedule_rate(schedule, method=method) == expected
    assert spectral_gap(csr_array(np.ones((1, 1)))) == 1


@pytest.mark.parametrize("rule", ["metropolis", "push"])
def test_errors_are_those_of_plain_push_sum(rule) -> None:
    matrix = mixing_matrix(build("barabasi-albert", 20, seed=1), rule)
    start = np.random.default_rng(2).uniform(0, 5, 20)
    total, weight = start.copy(), np.ones(20)
    expected = []
    for _ in range(9):
        expected.append(np.sqrt(np.sum(weight * (total / weight - start.mean()) ** 2)))
        total, weight = matrix @ total, matrix @ weight
    measured = np.exp(log_errors(matrix, 8, start))
    assert np.allclose(measured, np.array(expected) / expected[0], rtol=1e-9)


def test_no_floor_from_rounding() -> None:
    matrix = mixing_matrix(build("ring", 8))
    logs = log_errors(matrix, 2000)
    slope = np.log(1 - 4 / 3 * np.sin(np.pi / 8) ** 2)
    assert logs[2000] - logs[1000] == pytest.approx(1000 * slope, rel=1e-6)
    assert logs[2000] < np.log(1e-100)


def test_exchanges_to() -> None:
    logs = np.log([1.0, 0.05, 0.2, 0.09, 0.01])
    assert exchanges_to(logs, 0.1) == 3  # the dip at 1 did not last
    assert exchanges_to(logs, 2.0) == 0
    assert exchanges_to(logs, 1e-3) is None


def test_equal_values_have_no_error() -> None:
    matrix = mixing_matrix(nx.path_graph(4))
    assert np.isneginf(log_errors(matrix, 5, np.full(4, 3.0))).all()
    assert contraction(matrix, 10, np.full(4, 3.0)) == 0
    with pytest.raises(TopologyError, match=r"start has shape \(3,\)"):
        log_errors(matrix, 5, np.ones(3))
