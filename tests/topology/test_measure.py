import networkx as nx
import numpy as np
import pytest

from gossamer.topology import (
    TopologyError,
    build,
    contraction,
    exchanges_to,
    log_errors,
    mixing_matrix,
)


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
