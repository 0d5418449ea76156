"""The in-memory network: every fault happens, and the same seed gives the same outcome."""

from __future__ import annotations

from collections import Counter

import pytest

from gossamer.gossip import FaultPlan, MemoryNetwork, Partition, Recall


def message(number: int, sender: str = "a") -> Recall:
    return Recall("v", sender, "1", "b", "1", number)


def deliveries(seed: int, faults: FaultPlan) -> tuple[list[tuple[int, int]], Counter[str]]:
    network: MemoryNetwork[Recall] = MemoryNetwork(seed, faults)
    got = []
    for step in range(400):
        network.send(message(step), step * 0.01)
        got += [(step, m.sequence) for m in network.deliver(step * 0.01)]
    got += [(999, m.sequence) for m in network.deliver(1e9)]
    assert network.deliver(1e9) == []
    return got, network.counters


def test_the_seed_decides() -> None:
    faults = FaultPlan(loss=0.2, duplicate=0.2, reorder=0.2, delay=(0.0, 0.1))
    assert deliveries(1, faults) == deliveries(1, faults)
    assert deliveries(1, faults) != deliveries(2, faults)
    got, counters = deliveries(1, faults)
    assert all(counters[k] > 20 for k in ("lost", "duplicated", "reordered"))
    assert len(got) == counters["delivered"] == 400 - counters["lost"] + counters["duplicated"]


def test_without_reordering_order_is_kept_although_delays_vary() -> None:
    network: MemoryNetwork[Recall] = MemoryNetwork(0, FaultPlan(delay=(0.0, 5.0)))
    for i in range(100):
        network.send(message(i), 0.01 * i)
    assert [m.sequence for m in network.deliver(99.0)] == list(range(100))


def test_partitions_cut_and_heal() -> None:
    partition = Partition(1.0, 2.0, frozenset({"a"}))
    network: MemoryNetwork[Recall] = MemoryNetwork(0, FaultPlan(partitions=(partition,)))
    for now in (0.5, 1.5, 2.0):
        network.send(message(1), now)
        network.send(message(2, "c"), now)
    assert [m.sequence for m in network.deliver(9.0)].count(1) == 2
    assert network.counters["partitioned"] == 1


def test_impossible_plans_are_named() -> None:
    with pytest.raises(ValueError, match="loss is 2"):
        FaultPlan(loss=2)
    with pytest.raises(ValueError, match="delay"):
        FaultPlan(delay=(2, 1))
