"""Robust means, against plain versions of their definitions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.gossip import (
    ONE,
    ROBUST,
    DictStore,
    FaultPlan,
    Give,
    Gossiper,
    MemoryNetwork,
    RetryPolicy,
    RobustMean,
    RoundsMode,
    ServerMode,
    introduce,
    run,
)

SIZE = 4
VALUES = st.lists(
    st.lists(st.floats(-5, 5, width=32), min_size=SIZE, max_size=SIZE), min_size=1, max_size=9
)


def plain_clipped(own, others, b):
    distances = sorted((np.sqrt(((v - own) ** 2).sum()) for v in others), reverse=True)
    radius = distances[2 * b] if len(distances) > 2 * b else 0.0
    result = own.astype(float)
    for v in others:
        d = np.sqrt(((v - own) ** 2).sum())
        part = (v - own) if d <= radius else (v - own) / d * radius
        result = result + part / (len(others) + 1)
    return result


def plain_trimmed(own, others, b):
    result = np.empty(SIZE)
    for i in range(SIZE):
        column = sorted([own[i], *(v[i] for v in others)])
        for _ in range(b):
            if len(column) > 2:
                column = column[1:-1]
        result[i] = sum(column) / len(column)
    return result


def plain_median(own, others, b):
    columns = [sorted([own[i], *(v[i] for v in others)]) for i in range(SIZE)]
    n = len(others) + 1
    return np.array([(c[(n - 1) // 2] + c[n // 2]) / 2 for c in columns])


PLAIN = {"clipped": plain_clipped, "trimmed": plain_trimmed, "median": plain_median}


@pytest.mark.parametrize("name", ROBUST)
@given(values=VALUES, b=st.integers(0, 3))
def test_a_robust_mean_is_the_plain_one(name, values, b):
    own, *others = (np.array(value) for value in values)
    expected = PLAIN[name](own, others, b)
    np.testing.assert_allclose(ROBUST[name](own, others, b), expected, atol=1e-9)


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("lie", [np.nan, np.inf, 1e30, -1e30])
def test_one_liar_of_four_hardly_moves_it(name, lie):
    own = np.zeros(SIZE, np.float32)
    honest = [np.full(SIZE, value, np.float32) for value in (0.9, 1.0, 1.1)]
    result = ROBUST[name](own, [*honest, np.full(SIZE, lie, np.float32)], 1)
    assert result.dtype == np.float32
    assert (np.abs(result) <= 1.1).all()


# --- modes -------------------------------------------------------------------------------------------

NAMES = [f"p{number}" for number in range(6)]
FAULTY = FaultPlan(loss=0.2, duplicate=0.2, reorder=0.3, delay=(0.0, 0.03))


class Lying(MemoryNetwork):
    """A network in which one peer's values are replaced on their way."""

    def send(self, message, now):
        if isinstance(message, Give) and message.sender == "p5" and message.value.size:
            message = dataclasses.replace(message, value=np.full(SIZE, 1e6))
        super().send(message, now)


def starts():
    return {name: np.random.default_rng(i).normal(size=SIZE) for i, name in enumerate(NAMES)}


def averaged(make, network, rounds=1):
    """Let six peers, all neighbours, average for some rounds; return their values."""
    peers = {}
    for name, value in starts().items():
        store, retry = DictStore({"v": value}), RetryPolicy(first=0.05)
        peers[name] = Gossiper(name, f"s{name}", store, mode=make(name), retry=retry)
        peers[name].inject("v", ONE)
    introduce(peers.values())
    now = 0.0
    for number in range(rounds):
        for peer in peers.values():
            peer.mode.begin_round(peer, number)
        done = lambda number=number: all(p.mode.finished(number) for p in peers.values())  # noqa: E731
        now = run(peers, network, start=now, seconds=60.0, until=done)
        assert done()
    assert all(peer.account("v").held == ONE for peer in peers.values())
    return {name: peer.value("v") for name, peer in peers.items()}


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("faults", [FaultPlan(), FAULTY], ids=["clean", "faulty"])
def test_rounds_compute_the_plain_robust_mean_whatever_is_lost_or_doubled(rule, faults):
    found = averaged(
        lambda name: RoundsMode(2, robust=RobustMean(rule, 1)), MemoryNetwork(3, faults)
    )
    values = starts()
    for _ in range(2):
        values = {
            name: PLAIN[rule](own, [values[other] for other in NAMES if other != name], 1)
            for name, own in values.items()
        }
    for name in NAMES:
        np.testing.assert_allclose(found[name], values[name], atol=1e-9)


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("faults", [FaultPlan(), FAULTY], ids=["clean", "faulty"])
def test_a_server_computes_the_plain_robust_mean_for_all(rule, faults):
    found = averaged(
        lambda name: ServerMode(name, {"v": "p0"}, robust=RobustMean(rule, 1)),
        MemoryNetwork(3, faults),
    )
    values = starts()
    expected = PLAIN[rule](values["p0"], [values[name] for name in NAMES[1:]], 1)
    for name in NAMES:
        np.testing.assert_allclose(found[name], expected, atol=1e-9)


@pytest.mark.parametrize("rule", ROBUST)
def test_one_liar_does_not_decide_rounds_or_a_server(rule):
    bound = 1.5 * max(float(np.abs(value).max()) for value in starts().values())
    for make in (
        lambda name: RoundsMode(1, robust=RobustMean(rule, 1)),
        lambda name: ServerMode(name, {"v": "p0"}, robust=RobustMean(rule, 1)),
    ):
        found = averaged(make, Lying(3), rounds=3)
        assert max(float(np.abs(found[name]).max()) for name in NAMES[:5]) < bound


def test_a_restored_peer_has_the_values_that_it_had_acknowledged():
    mode = RoundsMode(1, robust=RobustMean("trimmed", 1))
    peer = Gossiper("p0", "s", DictStore({"v": np.zeros(SIZE)}), mode=mode)
    peer.inject("v", ONE)
    for name in ("p1", "p2"):
        peer.peer_online(name, f"s{name}", ["v"])
    mode.begin_round(peer, 0)
    peer.tick(0.0)
    peer.handle(Give("v", "p1", "sp1", 1, "p0", "s", 0, np.ones(SIZE), (0, 0)), 0.0)
    again = Gossiper.restore(
        peer.snapshot(), DictStore({"v": np.zeros(SIZE)}),
        mode=RoundsMode(1, robust=RobustMean("trimmed", 1)),
    )  # fmt: skip
    for name in ("p1", "p2"):
        again.peer_online(name, f"s{name}", ["v"])
    again.handle(Give("v", "p2", "sp2", 1, "p0", "s", 0, np.full(SIZE, 9.0), (0, 0)), 0.0)
    again.tick(0.0)
    assert again.value("v").tolist() == [1.0] * SIZE
