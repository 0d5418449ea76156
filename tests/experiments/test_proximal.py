"""FedProx as a learner, and FedAvg and FedProx live: server mode computes what the baselines compute."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from federated_kit import RATE, SIZE, data, gradient, make_clients, values

from gossamer.experiments.build import Swarm
from gossamer.experiments.config.tables import Config, ConfigError, parse_config
from gossamer.experiments.federated import Client, RoundContext
from gossamer.experiments.federated.fedavg import FedAvg, FedProx
from gossamer.experiments.live.layout import plan
from gossamer.gossip import MemoryBroker, MemoryTransport
from gossamer.models import ModelError, SgdLearner
from gossamer.peer import BrokerAddress, Peer

torch.set_num_threads(1)
ROUNDS, SAMPLES = 3, 30


def test_two_steps_by_hand():
    client = make_clients((5,))[0]
    w, mu = values(client), 0.9
    y = w - RATE * gradient(w, *data(client))
    y = y - RATE * (gradient(y, *data(client)) + mu * (y - w))
    client.learner.proximal = mu
    client.learner.train(2)
    np.testing.assert_allclose(values(client), y, rtol=1e-12, atol=1e-12)


def test_a_sum_of_losses_is_pulled_as_its_mean_is():
    mean, total = make_clients((6,), batch=3)[0], make_clients((6,), batch=3, rate=RATE / 3)[0]
    total.learner.reduction = "sum"
    for client in (mean, total):
        client.learner.proximal = 0.5
        client.learner.train(2)
    np.testing.assert_allclose(values(mean), values(total), rtol=1e-9, atol=1e-9)


def test_the_pull_starts_anew_where_averaging_left_the_network():
    client = make_clients((5,))[0]
    learner = client.learner
    learner.proximal = 5.0
    learner.train(1)
    moved = torch.full((SIZE,), 0.25, dtype=torch.float64)
    learner.network.flat.copy_(moved)
    learner.train(1)  # a first step from there feels no pull
    expected = moved.numpy() - RATE * gradient(moved.numpy(), *data(client))
    np.testing.assert_allclose(values(client), expected, rtol=1e-12, atol=1e-12)
    assert learner.test().samples == 5
    learner.restore(learner.state())


@pytest.mark.parametrize("mu", [-0.1, float("nan"), float("inf")])
def test_a_strength_out_of_range_is_refused(mu):
    plain = make_clients((5,))[0].learner
    with pytest.raises(ModelError, match="it must be finite, 0 or more"):
        SgdLearner(plain.network, plain.samples, plain.held_out, proximal=mu)
    with pytest.raises(ConfigError, match=r"key 'training.proximal'"):
        parse_config({"training": {"proximal": mu}})


def config(proximal: float = 0.0) -> Config:
    """Three peers whose server mode is FedAvg: one model of all cells, epochs of their samples."""
    return parse_config(
        {
            "name": "federation",
            "peers": 3,
            "rounds": ROUNDS,
            "test_every": ROUNDS,
            "weights": "samples",
            "data": {"samples": SAMPLES, "partition": "iid"},
            "network": {"layout": "64=6=10", "output": "none"},
            "models": [{"name": "global", "layout": "64-6-10"}],
            "training": {
                "local_samples": SAMPLES, "batch": 8, "reduction": "mean", "rate": 0.3,
                "loss": "cross-entropy", "proximal": proximal,
            },
            "gossip": {"mode": "server"},
        }
    )  # fmt: skip


async def live(config: Config, folder) -> list[np.ndarray]:
    """Every peer of a config in this process, as `gossamer swarm` would set it up."""
    broker = MemoryBroker()
    members = Swarm(config).members()
    spec = plan(config, folder, BrokerAddress("mqtt://127.0.0.1"))

    def connect(client_id, will, on_connect):
        return MemoryTransport(broker, client_id, will=will, on_connect=on_connect)

    peers = [
        Peer(member.name, member.learner, one.settings, connect, samples=one.samples, seed=one.seed)
        for member, one in zip(members, spec.peers, strict=True)
    ]
    await asyncio.gather(*(peer.run() for peer in peers))
    return [member.network.flat.numpy().copy() for member in members]


@pytest.mark.parametrize(("mu", "method"), [(0.0, FedAvg()), (0.8, FedProx(mu=0.8))])
def test_live_server_mode_is_the_baseline(mu, method, tmp_path):
    found = asyncio.run(live(config(mu), tmp_path))
    clients = []
    for member in Swarm(config()).members():
        assert isinstance(member.learner, SgdLearner)
        clients.append(Client(member.learner))
    state = method.start(clients)
    rng = np.random.default_rng(0)
    for _ in range(ROUNDS):
        state = method.round(state, clients, RoundContext(rng))
    for flat in found:
        np.testing.assert_allclose(flat, state.w.numpy(), atol=1e-5)
    if mu:  # the pull is felt
        plain = asyncio.run(live(config(), tmp_path))
        assert not np.allclose(plain[0], found[0], atol=1e-4)


def test_the_associative_network_has_no_gradient_to_add_to():
    table = {
        "data": {"set": "sparse"},
        "network": {"layout": "50<>40"},
        "training": {"proximal": 0.1},
    }
    with pytest.raises(ConfigError, match=r"'training.proximal': the associative network"):
        Swarm(parse_config(table)).members()
