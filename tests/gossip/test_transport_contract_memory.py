"""What the memory broker does beyond the contract: faults, from a seed."""

from __future__ import annotations

import asyncio

import pytest

from gossamer.gossip import FaultPlan, MemoryBroker, MemoryTransport, TransportError


async def deliveries(plan: FaultPlan, seed: int, count: int = 300) -> list[int]:
    broker = MemoryBroker(plan, seed=seed)
    async with MemoryTransport(broker, "a") as a, MemoryTransport(broker, "b") as b:
        await b.subscribe("x/#")
        for number in range(count):
            await a.publish("x/inbox", b"%d" % number)
        for _ in range(50):
            await asyncio.sleep(0)
    return [int(payload) async for _, payload, _ in b.messages()]


def test_faults_come_from_the_seed(run):
    plan = FaultPlan(loss=0.2, duplicate=0.2, reorder=0.2, delay=(0, 3))
    first, second, third = (run(deliveries(plan, seed)) for seed in (1, 1, 2))
    assert first == second
    assert first != third


def test_each_fault_does_what_it_says(run):
    everything = list(range(300))
    assert run(deliveries(FaultPlan(), 1)) == everything
    assert run(deliveries(FaultPlan(loss=1.0), 1)) == []
    assert run(deliveries(FaultPlan(duplicate=1.0), 1)) == [n for n in everything for _ in "ab"]
    dropped = run(deliveries(FaultPlan(loss=0.3), 1))
    assert 160 < len(dropped) < 260
    assert dropped == sorted(dropped)
    reordered = run(deliveries(FaultPlan(reorder=0.3), 1))
    assert reordered != everything
    assert sorted(reordered) == everything
    assert run(deliveries(FaultPlan(delay=(5, 5)), 1)) == everything


def test_state_is_never_faulty(run):
    async def scenario():
        broker = MemoryBroker(FaultPlan(loss=1.0))
        async with MemoryTransport(broker, "a") as a, MemoryTransport(broker, "b") as b:
            await b.subscribe("#")
            await a.publish("x/card", b"here")
        return [payload async for _, payload, _ in b.messages()]

    assert run(scenario()) == [b"here"]


def test_same_id_takes_over(run):
    async def scenario():
        broker = MemoryBroker()
        async with MemoryTransport(broker, "a") as first, MemoryTransport(broker, "a"):
            assert first.connection.state == "failed"
            with pytest.raises(TransportError) as error:
                await anext(first.messages())
            assert error.value.cause == "taken-over"

    run(scenario())
