"""FedNP around learners: the joint network, the pull, gossip's cavities against the server's, restarts."""

from __future__ import annotations

import networkx as nx
import pytest
import torch
from torch import nn

from gossamer.experiments import Arena
from gossamer.experiments.arena import Gossip
from gossamer.models import (
    AssociativeLearner,
    AssociativeNetwork,
    Learner,
    ModelError,
    SgdLearner,
    SlicedNetwork,
    average,
    mlp,
    sparse_vectors,
)
from gossamer.models.fednp import (
    SITES,
    FedNPLearner,
    FedNPOptions,
    Natural,
    server_cavities,
    server_round,
)

PEERS = 4
OPTIONS = FedNPOptions(strength=0.05, dimensions=3, hidden=4, batch=8)


def sgd(
    peer: int,
    *,
    double: bool = False,
    slices=None,
    samples: int = 12,
    local_samples: int = 12,
    mean: int | None = None,
) -> SgdLearner:
    """A small learner whose data depend on its number; `mean` is that of its inputs."""
    module = mlp("4=5=3", activation="tanh", output="none")
    module = module.double() if double else module
    network = SlicedNetwork(module, slices or {"global": "4-5-3"}, peer=f"p{peer}", seed=0)
    random = torch.Generator().manual_seed(peer)
    x = torch.randn(samples, 4, generator=random).to(network.flat)
    x += peer if mean is None else mean
    y = torch.randint(0, 3, (samples,), generator=random)
    return SgdLearner(
        network, (x, y), (x, y), local_samples=local_samples, batch=6, rate=0.1, reduction="mean",
        loss="cross-entropy", seed=peer,
    )  # fmt: skip


def swarm(options: FedNPOptions = OPTIONS, **changes) -> list[FedNPLearner]:
    return [
        FedNPLearner(sgd(peer, **changes), options, counting_peer=peer == 0, seed=0)
        for peer in range(PEERS)
    ]


def test_a_wrapped_learner_is_a_learner_whose_network_has_two_more_models():
    inner = sgd(0)
    before = inner.network.flat.clone()
    learner = FedNPLearner(inner, OPTIONS, counting_peer=True)
    assert isinstance(learner, Learner)
    assert learner.network.averaged_models == ("fednp", SITES, "global")
    assert len(learner.network.slicing.private) == 0
    torch.testing.assert_close(learner.network.read("global"), before)
    x = inner.samples[0]
    torch.testing.assert_close(learner.network(x), inner.network.module.model(x))


def test_private_cells_stay_private_and_peers_of_one_swarm_start_alike():
    slices = {"global": "4-3-0"}
    a, b = (FedNPLearner(sgd(p, slices=slices), OPTIONS, seed=7) for p in (0, 1))
    assert {"local-p0"} == set(a.network.averaged_models) - {"fednp", SITES, "global"}
    assert "local-p1" in b.network.averaged_models
    names = ("fednp.f.0.weight", "fednp.npn.first.mean")
    states = [dict(each.network.module.named_parameters()) for each in (a, b)]
    for name in names:
        torch.testing.assert_close(states[0][name], states[1][name])


def test_strength_zero_trains_exactly_as_the_inner_learner():
    alone = sgd(1)
    wrapped = FedNPLearner(sgd(1), FedNPOptions(strength=0.0, dimensions=2, hidden=3))
    for _ in range(3):
        alone.train(1)
        wrapped.train(1)
    torch.testing.assert_close(wrapped.network.read("global"), alone.network.flat)


def test_the_pull_draws_the_target_to_what_the_npn_predicts():
    def distance(strength: float) -> float:
        learner = FedNPLearner(
            sgd(2), FedNPOptions(strength=strength, dimensions=2, hidden=3, auxiliary_rate=1e-6)
        )
        for _ in range(10):
            learner.train(1)
        layer = dict(learner.network.module.named_parameters())
        values = torch.cat([layer["model.2.weight"].reshape(-1), layer["model.2.bias"]]).detach()
        return float((values - learner.predict_target()[0]).norm())

    assert distance(0.5) < 0.5 * distance(0.0)


def test_exact_means_give_the_servers_cavities_and_everything_else():
    gossip, server = swarm(double=True), swarm(double=True)
    arena = Arena(gossip, threads=1)
    for _ in range(4):
        arena.train()
        arena.average()
        server_round(server)
    wanted = server_cavities(gossip[0].prior, [learner.site for learner in gossip])
    for learner, other, cavity in zip(gossip, server, wanted, strict=True):
        torch.testing.assert_close(
            learner.current_cavity().stack(), cavity.stack(), rtol=1e-9, atol=1e-9
        )
        torch.testing.assert_close(learner.network.flat, other.network.flat, rtol=1e-9, atol=1e-9)
        assert learner.total_weight() == pytest.approx(PEERS)
    assert float(wanted[0].stack().abs().sum()) > PEERS  # the sites do say something


def test_gossip_on_a_graph_gives_the_servers_cavities_once_it_has_converged():
    learners = swarm(double=True)
    graph = nx.cycle_graph(PEERS)
    arena = Arena(learners, mixing=Gossip(graph, exchanges=80), threads=1)
    for _ in range(3):
        arena.train()
        arena.average()
        wanted = server_cavities(learners[0].prior, [learner.site for learner in learners])
        for learner, cavity in zip(learners, wanted, strict=True):
            error = (learner.current_cavity().stack() - cavity.stack()).abs().max()
            assert float(error) < 1e-6


def test_on_a_ring_of_40_sites_stay_as_sharp_as_the_servers():
    """Twenty hops from the counting peer the count of peers is 3^20 when it is first heard of."""
    options = FedNPOptions(strength=0.05, dimensions=2, hidden=3, batch=4)

    def learners() -> list[FedNPLearner]:
        inner = [sgd(peer, samples=6, local_samples=6, mean=peer % 5) for peer in range(40)]
        return [
            FedNPLearner(each, options, counting_peer=peer == 0, seed=0)
            for peer, each in enumerate(inner)
        ]

    def sharpest(some: list[FedNPLearner]) -> float:
        return max(float(learner.site.precision.max()) for learner in some)

    gossip, server = learners(), learners()
    arena = Arena(gossip, mixing=Gossip(nx.cycle_graph(40), exchanges=6), threads=1)
    for _ in range(5):
        arena.train()
        arena.average()
        server_round(server)
        assert sharpest(gossip) <= 10 * sharpest(server)
        assert all(learner.total_weight() <= 40 * (1 + 1e-6) for learner in gossip)


def test_a_peer_that_has_seen_nobody_waits_with_its_cavity_until_the_count_has_settled():
    learners = swarm(double=True)
    networks = [learner.network for learner in learners]
    found = []
    for _ in range(14):
        for learner in learners:
            learner.train(1)
        average(networks)
        found.append(float((learners[1].current_cavity() - learners[1].prior).stack().abs().max()))
    assert found[0] == found[9] == 0
    assert found[-1] > 0
    wanted = server_cavities(learners[0].prior, [learner.site for learner in learners])
    torch.testing.assert_close(learners[1].current_cavity().stack(), wanted[1].stack())


def test_a_peer_that_sees_the_swarm_grow_takes_the_prior_at_that_moment():
    learners = swarm(double=True)
    seen = [2]
    for learner in learners:
        learner.peers_seen = lambda: seen[0]
    for count in (2, 2, 4, 4):
        seen[0] = count
        for learner in learners:
            learner.train(1)
        average([learner.network for learner in learners])
        if count == 2:
            assert learners[1].total_weight() == pytest.approx(2)
    assert learners[1].total_weight() == pytest.approx(4)
    good = learners[1].current_cavity()
    seen[0] = 9
    assert torch.equal(learners[1].current_cavity().stack(), learners[1].prior.stack())
    assert float(good.precision.min()) > 1


def test_float32_networks_are_exact_enough():
    learners = swarm()
    arena = Arena(learners, threads=1)
    for _ in range(5):
        arena.train()
        arena.average()
    wanted = server_cavities(learners[0].prior, [learner.site for learner in learners])
    for learner, cavity in zip(learners, wanted, strict=True):
        torch.testing.assert_close(
            learner.current_cavity().stack(), cavity.stack(), rtol=1e-5, atol=1e-5
        )


def test_weights_by_samples_leave_the_sum_of_sites_right():
    learners, sizes = swarm(double=True), [1.0, 2.0, 3.0, 6.0]
    for learner, size in zip(learners, sizes, strict=True):
        learner.set_weight(size)
    arena = Arena(learners, weights=sizes, threads=1)
    for _ in range(3):
        arena.train()
        arena.average()
    wanted = server_cavities(learners[0].prior, [learner.site for learner in learners])
    for learner, cavity in zip(learners, wanted, strict=True):
        assert learner.total_weight() == pytest.approx(sum(sizes))
        torch.testing.assert_close(
            learner.current_cavity().stack(), cavity.stack(), rtol=1e-9, atol=1e-9
        )


def test_frozen_z_keeps_the_prior_and_says_nothing_to_gossip():
    learners = swarm(FedNPOptions(dimensions=3, hidden=4, freeze_z=True))
    arena = Arena(learners, threads=1)
    for _ in range(2):
        arena.train()
        arena.average()
    assert float(learners[0].site.stack().abs().sum()) == 0
    assert float(learners[0].network.module.fednp.sites.abs().sum()) == 0


def test_one_signal_keeps_all_dimensions_alike_and_each_does_not():
    one = FedNPLearner(sgd(1), FedNPOptions(dimensions=3, hidden=4, signals="one"), peers=1)
    each = FedNPLearner(sgd(1), FedNPOptions(dimensions=3, hidden=4), peers=1)
    one.train(2)
    each.train(2)
    assert float(one.site.eta.std()) < 1e-12 < float(each.site.eta.std())


def test_a_cavity_that_cannot_be_is_not_used():
    learner = FedNPLearner(sgd(0), OPTIONS, peers=3)
    learner.train(1)
    good = learner.cavity
    with torch.no_grad():
        learner.network.module.fednp.sites[1].fill_(-5.0)
    assert torch.equal(learner.current_cavity().stack(), good.stack())
    learner.train(1)
    assert torch.isfinite(learner.network.flat).all()


@pytest.mark.parametrize("features", ["input", "last", "0"])
@pytest.mark.parametrize("moments", ["quadrature", "closed", "probit"])
def test_every_kind_of_features_and_moments_trains(features, moments):
    options = FedNPOptions(dimensions=2, hidden=3, moments=moments, features=features)
    learner = FedNPLearner(sgd(0), options, peers=2)
    metrics = learner.train(2)
    assert metrics.samples == 24
    assert torch.isfinite(learner.network.flat).all()
    assert learner.test().samples == 12


def test_learners_without_an_optimizer_are_wrapped_too():
    network = SlicedNetwork(AssociativeNetwork("50<>20"), {"global": "50-20"}, peer="a", seed=0)
    whole, partial, expected = sparse_vectors(0, 9)
    inner = AssociativeLearner(network, whole, (partial, expected))
    learner = FedNPLearner(inner, FedNPOptions(dimensions=2, hidden=3, strength=0.1), peers=1)
    twin_network = SlicedNetwork(
        AssociativeNetwork("50<>20"), {"global": "50-20"}, peer="a", seed=0
    )
    twin = AssociativeLearner(twin_network, whole, (partial, expected))
    learner.train(1)
    twin.train(1)
    assert not torch.equal(learner.network.read("global"), twin.network.flat)
    assert torch.isfinite(learner.network.flat).all()


def test_a_restored_learner_goes_on_as_if_nothing_had_happened():
    learner, twin = (FedNPLearner(sgd(3), OPTIONS, counting_peer=True) for _ in range(2))
    learner.train(2)
    state, flat = learner.state(), learner.network.flat.clone()
    learner.train(2)
    twin.network.flat.copy_(flat)
    twin.restore(state)
    twin.train(2)
    assert torch.equal(twin.network.flat, learner.network.flat)
    assert torch.equal(twin.site.stack(), learner.site.stack())


def test_plain_averaging_takes_wrapped_networks_as_they_are():
    learners = swarm()
    for learner in learners:
        learner.train(1)
    average([learner.network for learner in learners])
    first = learners[0].network.read("fednp")
    assert all(torch.equal(first, learner.network.read("fednp")) for learner in learners)


def test_bad_input_is_named():
    with pytest.raises(ModelError, match=r"no such parameter.*0\.weight"):
        FedNPLearner(sgd(0), target="head")
    with pytest.raises(ModelError, match="input, last"):
        FedNPLearner(sgd(0), FedNPOptions(features="backbone"))
    with pytest.raises(ModelError, match=r"global, local-p0.*features='input'"):
        FedNPLearner(sgd(0, slices={"global": "4-3-3"}), FedNPOptions(features="last"))
    tokens = torch.zeros(12, 4, dtype=torch.int64)
    with pytest.raises(ModelError, match=r"inputs of peer 'p0' are torch.int64.*features='last'"):
        FedNPLearner(sgd(0), OPTIONS, inputs=tokens)
    with pytest.raises(ModelError, match="only once"):
        FedNPLearner(FedNPLearner(sgd(0), OPTIONS), OPTIONS)
    with pytest.raises(ModelError, match="at least one"):
        FedNPLearner(sgd(0), peers=0)
    with pytest.raises(ModelError, match="positive"):
        FedNPLearner(sgd(0), OPTIONS).set_weight(0.0)
    with pytest.raises(ModelError, match="at least one client"):
        server_round([])


@pytest.mark.parametrize("buffers", ["average", "local", "recompute"])
def test_a_convolutional_network_with_batch_norm_is_wrapped_too(buffers):
    def learner(peer: int) -> FedNPLearner:
        module = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
            nn.Flatten(), nn.Linear(16, 3),
        )  # fmt: skip
        random = torch.Generator().manual_seed(peer)
        x = torch.randn(12, 1, 6, 6, generator=random) + peer
        y = torch.randint(0, 3, (12,), generator=random)
        network = SlicedNetwork(
            module, {"global": 1.0}, peer=f"p{peer}", seed=0, example=x[:1], buffers=buffers
        )
        inner = SgdLearner(network, (x, y), (x, y), local_samples=12, batch=6, loss="cross-entropy")
        return FedNPLearner(
            inner, OPTIONS.model_copy(update={"features": "last"}), counting_peer=peer == 0
        )

    learners = [learner(peer) for peer in range(2)]
    rounds = list(Arena(learners, threads=1).run(2))
    assert len(rounds[-1].tests) == 2
    first, second = (each.network for each in learners)
    torch.testing.assert_close(first.read("global"), second.read("global"))
    means = [network.module.model[1].running_mean for network in (first, second)]
    assert torch.allclose(*means) == (buffers == "average")


def test_moments_that_cannot_be_leave_site_and_network_as_they_should_be():
    options = FedNPOptions(dimensions=2, hidden=3, moments="closed", damping=1.0)
    learner = FedNPLearner(sgd(0), options, peers=2)
    learner.train(1)
    before = learner.site.stack().clone()
    wide = Natural(torch.tensor([-200.0, 0.0]).double(), torch.full((2,), 1.0).double())
    learner.receive(wide, peers=2)
    with torch.no_grad():
        learner.network.module.fednp.f[2].bias.fill_(
            20.0
        )  # m = −4000 in the first dimension, s = 400 in both
    learner.train(1)
    assert torch.isfinite(learner.network.flat).all()
    assert torch.isfinite(learner.site.stack()).all()
    assert torch.equal(learner.site.stack()[:, 0], before[:, 0])
