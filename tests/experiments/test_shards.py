"""One simulation over several processes: the same results, and only rows that are needed cross."""

from __future__ import annotations

from typing import Any, cast

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.experiments.arena.shards import (
    divide_peers,
    facts_of,
    plan_exchange,
    require_agreement,
)
from gossamer.experiments.build import Swarm
from gossamer.experiments.config.needs import refuse_conflicts
from gossamer.experiments.config.tables import Config, ConfigError, parse_config
from gossamer.topology import mixing_matrix


@given(st.integers(2, 30), st.floats(0, 0.4), st.integers(1, 5), st.booleans(), st.integers(0, 99))
def test_the_rows_that_are_sent_are_those_that_are_needed(
    peers: int, density: float, ranks: int, graph_is_divided: bool, seed: int
) -> None:
    graph = nx.gnp_random_graph(peers, density, seed=seed, directed=seed % 2 == 0)
    matrix = mixing_matrix(graph)
    random = np.random.default_rng(seed)
    rank_of = random.integers(0, ranks, peers)
    if graph_is_divided and ranks <= peers:
        rank_of = divide_peers(peers, ranks, graph)
    plans = [plan_exchange(matrix, rank_of, rank, ranks) for rank in range(ranks)]
    rows_of = [np.flatnonzero(rank_of == rank) for rank in range(ranks)]
    values = random.standard_normal((peers, 3))
    product, dense = matrix @ values, matrix.toarray()
    total = 0
    for rank, plan in enumerate(plans):
        received = []
        for other in range(ranks):
            sent = rows_of[other][plans[other].sends[rank]]
            needed = np.flatnonzero(dense[rows_of[rank]].any(axis=0) & (rank_of == other))
            assert sent.tolist() == ([] if other == rank else needed.tolist())
            assert plan.receives[other] == len(sent)
            received.append(values[sent])
        total += sum(plan.receives)
        rows = np.concatenate([values[rows_of[rank]], *received])
        np.testing.assert_allclose(plan.matrix @ rows, product[rows_of[rank]], atol=1e-12)
    assert {plan.total_rows for plan in plans} == {total}


class Told:
    """Ranks of which this one is number 0, and the others say what they are given."""

    rank = 0

    def __init__(self, *others: Any):
        self._others = others
        self.count = 1 + len(others)

    def all_gather(self, value: Any) -> list[Any]:
        return [value, *self._others]


def config(**table: Any) -> Config:
    base = {
        "peers": 4,
        "network": {"layout": "64=12=10"},
        "models": [{"name": "all", "layout": "64-8-10"}],
    }
    return parse_config(base | table)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("key 'training.rate' is 0.1 on rank 0 and 0.2 on rank 2", {"key 'training.rate'": 0.2}),
        ("the version of gossamer is", {"the version of gossamer": "0.0.1"}),
        ("key 'models.1.name' is None on rank 0", {"key 'models.1.name'": "more"}),
    ],
)
def test_ranks_with_another_config_or_version_are_refused(key: str, change: dict[str, Any]) -> None:
    facts = facts_of(config(training={"rate": 0.1}))
    ranks: Any = Told(facts, facts | change)
    with pytest.raises(ConfigError, match=key):
        require_agreement(ranks, facts, "swarm.toml")
    require_agreement(cast(Any, Told(facts)), facts, "swarm.toml")


@pytest.mark.parametrize(
    ("key", "table"),
    [
        ("time", {"time": {}}),
        ("sharing", {"sharing": "auto"}),
        ("fednp", {"fednp": {}}),
        ("training.metrics", {"training": {"metrics": ["f1"]}}),
        ("training.prior", {"training": {"prior": "auto"}}),
        ("gossip.mode", {"gossip": {"mode": "steady"}}),
        ("gossip.robust", {"gossip": {"mode": "rounds", "robust": "median"}}),
        ("gossip.compress", {"gossip": {"compress": "int8"}}),
        ("gossip.dtype", {"gossip": {"dtype": "float16"}}),
        ("models.0.matching", {"models": [{"name": "all", "layout": "64-8-10", "matching": "align"}]}),
    ],
)  # fmt: skip
def test_what_one_process_must_simulate_is_refused(key: str, table: dict[str, Any]) -> None:
    refuse_conflicts("shards", config(), "swarm.toml")
    with pytest.raises(ConfigError, match=f"swarm.toml: key '{key}': not over several processes"):
        refuse_conflicts("shards", config(**table), "swarm.toml")


def test_a_peer_is_the_same_whoever_builds_the_others() -> None:
    settings = config(data={"samples": 30, "test": 60, "tested": "own"}, training={"batch": 5})
    whole, some = Swarm(settings).members(), Swarm(settings, only=[1, 3]).members()
    assert [member.name for member in some] == ["1", "3"]
    for member in some:
        other = whole[int(member.name)]
        assert member.learner.train(2) == other.learner.train(2)
        assert member.learner.test() == other.learner.test()
        assert (member.network.flat == other.network.flat).all()
