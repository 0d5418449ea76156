"""Compression in the comparison's gossip methods: the pushes stay the same, what they carry does not."""

from __future__ import annotations

from typing import Any

import networkx as nx
import numpy as np
import pytest
from federated_kit import LAYOUT, SIZE, make_clients, round_context, values

from gossamer.experiments.arena import Arena, Gossip
from gossamer.experiments.config.tables import ConfigError
from gossamer.experiments.federated import RoundContext
from gossamer.experiments.federated.comparison import Cell, Comparison, check, parse_comparison, run
from gossamer.experiments.federated.gossip import (
    ArenaState,
    AutoPartialModels,
    GossipSgd,
    PartialModels,
)
from gossamer.models import SlicedNetwork


def small(**methods: dict[str, Any]) -> Comparison:
    return parse_comparison(
        {
            "peers": 5, "rounds": 10, "seeds": 1, "test_every": 10, "network": {"layout": "64=16=10"},
            "data": {"total": 300, "test": 200, "partition": "iid"}, "methods": methods,
        },
        "many.toml",
    )  # fmt: skip


@pytest.mark.parametrize("method", ["gossamer", "gossip-sgd"])
def test_compression_sends_less_and_still_learns(method: str) -> None:
    knobs = {
        "plain": {},
        "int8": {"compress": "int8"},
        "half": {"dtype": "float16"},
        "patient": {"drift": 0.1},
    }
    config = small(**{name: {"method": method, **more} for name, more in knobs.items()})
    ends = {name: run(Cell(name, config, 0))["curve"][-1] for name in knobs}
    accuracy = {name: np.mean(end["accuracy"]) for name, end in ends.items()}
    sent = {name: end["bytes"] for name, end in ends.items()}
    assert accuracy["plain"] > 0.5
    for name in knobs:
        assert abs(accuracy[name] - accuracy["plain"]) < 0.05
    assert sent["plain"] > 3.5 * sent["int8"] > 0
    assert sent["plain"] == 2 * sent["half"]
    assert 0 < sent["patient"] < sent["plain"]


@pytest.mark.parametrize("method", [GossipSgd, PartialModels])
def test_a_wire_that_changes_nothing_makes_the_same_pushes(method: Any) -> None:
    found = []
    for knobs in ({}, {"dtype": "float64"}):
        clients = make_clients(sizes=(4, 6, 5, 7))
        made = method(**knobs)
        state, sent = made.start(clients), 0
        for index in range(4):
            context = RoundContext(np.random.default_rng(index))
            state = made.round(state, clients, context)
            sent += context.bytes_between_clients
        found.append((np.stack([values(client) for client in clients]), sent, state))
    (plain, plain_bytes, before), (wired, wired_bytes, after) = found
    assert np.abs(plain - wired).max() < 1e-9
    assert plain_bytes == wired_bytes > 0  # these clients' values are float64
    if method is GossipSgd:
        assert after.alpha == pytest.approx(before.alpha)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"compress": "int99"}, "key 'compress': .*int99"),
        ({"compress": "int8", "dtype": "float16"}, "exclude each other"),
        ({"compress": "low-rank:60"}, "low-rank:60 makes no block shorter"),
        ({"drift": -1.0}, "key 'drift'"),
    ],
)
@pytest.mark.parametrize("method", ["gossamer", "gossip-sgd"])
def test_what_cannot_be_is_refused_before_anything_runs(
    method: str, knobs: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=rf"many.toml: .*\[methods.one\].*{words}") as refused:
        check(small(one={"method": method, **knobs}), "many.toml")
    assert "\n" not in str(refused.value)


def test_the_messages_of_a_group_without_links_are_counted_as_between_all_its_members() -> None:
    clients = make_clients(sizes=(4, 6, 5, 7))
    for index, client in enumerate(clients):
        group = {("even", "odd")[index % 2]: LAYOUT.replace("=", "-")}
        client.learner.network = SlicedNetwork(client.network.module, group, peer=str(index))
    ring = Gossip(nx.cycle_graph(4), complete=frozenset({"even", "odd"}))
    state = ArenaState(Arena([client.learner for client in clients], mixing=ring))
    context = round_context()
    AutoPartialModels().round(state, clients, context)
    assert np.allclose(values(clients[0]), values(clients[2]))
    assert not np.allclose(values(clients[0]), values(clients[1]))
    assert context.bytes_between_clients == 4 * SIZE * 8
