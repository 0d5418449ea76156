"""Peers whose values cannot be sent: too large for float16, or not finite after a training that diverged."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch
from peer_kit import Nest, Still, consensus, held, injected, make_learner, quick

from gossamer.gossip import MemoryTransport, Reassembler, decode, topics

NAMES = ("a", "b", "c")
SERVERS = {"global": "b"}


class Diverging(Still):
    """Its shared values are not finite after its second training, and ever after."""

    def train(self, steps: int):
        metrics = super().train(steps)
        if self.rounds >= 2:
            values = self.network.read("global").clone()
            values[0] = torch.nan
            self.network.write("global", values)
        return metrics


def settings(mode: str, **changes):
    base = {"expect": NAMES, "founder": True, "servers": SERVERS}
    return quick(mode=mode, **{**base, **changes})


@pytest.mark.parametrize("mode", ["async", "rounds", "server"])
@pytest.mark.parametrize("who", ["a", "b"])  # with servers, a client and the server
def test_who_diverged_is_named_and_infects_nobody(run, tmp_path, caplog, mode, who):
    learners = {
        name: (Diverging if name == who else Still)(make_learner(name), value)
        for name, value in zip(NAMES, (0.0, 1.0, 5.0), strict=True)
    }

    async def swarm():
        # Async peers never agree with one that diverged: only this ends their settling.
        nest = Nest(settings(mode, settle_timeout=0.5 if mode == "async" else 120.0))
        for name, learner in learners.items():
            nest.start(name, learner, checkpoint=tmp_path / name)
        return await nest.all()

    with caplog.at_level(logging.WARNING):
        reports = run(swarm())
    assert [report.rounds for report in reports] == [6, 6, 6]
    assert held(reports) == injected(reports) == 3
    for name, learner in learners.items():
        finite = bool(torch.isfinite(learner.network.read("global")).all())
        assert finite == (name != who)
    told = [r.getMessage() for r in caplog.records if "has diverged" in r.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(f"peer {who}: model global has diverged, 1 of its")


@asynccontextmanager
async def count_dtypes(nest: Nest) -> AsyncIterator[Counter[str]]:
    """Count the dtypes of the values that peers send one another, as somebody at the broker sees them."""
    counted: Counter[str] = Counter()
    listener = MemoryTransport(nest.broker, "listener")

    async def listen() -> None:
        whole = Reassembler()
        async for _, packet, _ in listener.messages():
            message = whole.add(packet)
            if message is not None and (dtype := decode(message).dtype) is not None:
                counted[dtype] += 1

    async with listener:
        await listener.subscribe(topics.of_all(nest.settings.swarm, "inbox"))
        task = asyncio.create_task(listen())
        yield counted
        task.cancel()


@pytest.mark.parametrize("mode", ["async", "rounds", "server"])
def test_a_value_that_float16_cannot_hold_travels_in_float32(run, caplog, mode):
    """The mean of all is small, so that what follows is float16 again."""
    learners = [Still(make_learner(n), v) for n, v in zip(NAMES, (1e5, 0.0, -9e4), strict=True)]

    async def swarm():
        nest = Nest(settings(mode, dtype="float16", settle_tolerance=1e-2))
        async with count_dtypes(nest) as counted:
            for name, learner in zip(NAMES, learners, strict=True):
                nest.start(name, learner)
            return await nest.all(), counted

    with caplog.at_level(logging.WARNING):
        reports, counted = run(swarm())
    assert held(reports) == injected(reports) == 3
    assert not any(report.gossip.get("own-value-too-large") for report in reports)
    assert counted["float32"] >= 1
    assert counted["float16"] >= 1
    if mode != "async":
        assert consensus(learners) < 1e-2
        for learner in learners:
            np.testing.assert_allclose(learner.network.read("global"), 1e4 / 3, rtol=2e-3)
