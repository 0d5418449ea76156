"""One config in the arena and as a live swarm, in every mode."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from swarm_kit import small_config, small_swarm

from gossamer.experiments.arena.simulation import Simulation
from gossamer.experiments.build import Swarm
from gossamer.experiments.live.layout import plan
from gossamer.experiments.live.run import collect, demo_config
from gossamer.gossip import MemoryBroker, MemoryTransport
from gossamer.peer import BrokerAddress, LocalSwarm, Peer

pytestmark = pytest.mark.live


async def in_memory(config, tmp_path):
    """Every peer of a config in this process; returns the members and their reports."""
    broker = MemoryBroker()
    members = Swarm(config).members()
    spec = plan(config, tmp_path, BrokerAddress("mqtt://127.0.0.1"))

    def connect(client_id, will, on_connect):
        return MemoryTransport(broker, client_id, will=will, on_connect=on_connect)

    peers = [
        Peer(member.name, member.learner, one.settings, connect, samples=one.samples, seed=one.seed)
        for member, one in zip(members, spec.peers, strict=True)
    ]
    return members, await asyncio.gather(*(peer.run() for peer in peers))


def arena(config):
    simulation = Simulation.of(config)
    *_, last = simulation.rounds()
    return simulation.members, last


@pytest.mark.timeout(600)
def test_real_processes_in_rounds_mode_equal_the_arena(tmp_path, mosquitto):
    config = small_config(4, 6, mode="rounds", per_process=2).model_copy(update={"name": "twin"})
    spec = small_swarm(config, tmp_path, mosquitto.url)
    asyncio.run(LocalSwarm(spec).run())
    outcome = collect(config, spec, [])
    members, last = arena(config)
    lives = Swarm(config).members()
    for member, live, test in zip(members, lives, last.tests, strict=True):
        assert abs(outcome.accuracy[member.name] - test.accuracy) <= 0.02
        live.network.load(tmp_path / f"{member.name}.safetensors")
        np.testing.assert_allclose(live.network.flat, member.network.flat, atol=1e-5)


@pytest.mark.timeout(900)
def test_the_demo_learns_as_well_in_every_mode(tmp_path):
    config = demo_config("partial models by hand")
    _, last = arena(config)  # rounds mode equals it: see above
    for mode in ("async", "server"):
        gossip = config.gossip.model_copy(update={"mode": mode, "checkpoint": False})
        live = config.model_copy(update={"gossip": gossip, "test_every": config.rounds})
        _, reports = asyncio.run(in_memory(live, tmp_path))
        accuracy = float(np.mean([report.accuracy for report in reports]))
        assert abs(accuracy - last.accuracy) < 0.05, (mode, accuracy, last.accuracy)
