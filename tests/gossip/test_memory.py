"""The in-memory network: every fault happens, and the same seed has the same fate."""

from __future__ import annotations

import pytest

from gossamer.gossip.memory import Envelope, FaultPlan, MemoryNetwork, Partition


def deliveries(seed: int, faults: FaultPlan) -> tuple[list[tuple[int, int]], dict[str, int]]:
    network: MemoryNetwork[Envelope] = MemoryNetwork(seed, faults)
    got = []
    for step in range(400):
        network.send(Envelope("a", "b", bytes([step % 256])), step * 0.01)
        got += [(step, m.payload[0]) for m in network.deliver(step * 0.01)]
    got += [(999, m.payload[0]) for m in network.deliver(1e9)]
    assert len(network) == 0
    assert network.next_arrival() is None
    return got, dict(network.counters)


def test_the_seed_decides() -> None:
    faults = FaultPlan(drop=0.2, duplicate=0.2, reorder=0.2, delay=(0.0, 0.1))
    assert deliveries(1, faults) == deliveries(1, faults)
    assert deliveries(1, faults) != deliveries(2, faults)
    got, counters = deliveries(1, faults)
    assert all(counters[k] > 20 for k in ("dropped", "duplicated", "reordered"))
    assert len(got) == counters["delivered"] == 400 - counters["dropped"] + counters["duplicated"]


def test_without_faults_order_is_kept_although_delays_vary() -> None:
    network: MemoryNetwork[Envelope] = MemoryNetwork(0, FaultPlan(delay=(0.0, 5.0)))
    for i in range(100):
        network.send(Envelope("a", "b", bytes([i])), 0.01 * i)
    assert [m.payload[0] for m in network.deliver(99.0)] == list(range(100))


def test_partitions_cut_and_heal() -> None:
    cut = Partition(1.0, 2.0, frozenset({"a"}))
    network: MemoryNetwork[Envelope] = MemoryNetwork(0, FaultPlan(partitions=(cut,)))
    for now in (0.5, 1.5, 2.0):
        network.send(Envelope("a", "b", b"ab"), now)
        network.send(Envelope("c", "b", b"cb"), now)
    assert [m.payload for m in network.deliver(9.0)].count(b"ab") == 2
    assert network.counters["partitioned"] == 1


def test_bad_plans_are_named() -> None:
    with pytest.raises(ValueError, match="drop is 2"):
        FaultPlan(drop=2)
    with pytest.raises(ValueError, match="delay"):
        FaultPlan(delay=(2, 1))
