"""Every baseline against an update written by hand, and the equalities between baselines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from federated_kit import (
    CLASSES,
    HIDDEN,
    RATE,
    SIZE,
    data,
    gradient,
    hidden,
    make_clients,
    round_context,
    values,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.experiments.federated import METHODS, Client
from gossamer.experiments.federated.downpour import Downpour
from gossamer.experiments.federated.fedavg import FedAvg, FedDyn, FedProx, Scaffold
from gossamer.experiments.federated.fedper import FedPer, base_coordinates
from gossamer.experiments.federated.gossip import GossipSgd, PartialModels
from gossamer.experiments.federated.method import (
    GLOBAL_MODEL,
    Ensemble,
    Local,
    Method,
    Pooled,
    ensemble_probabilities,
    mean,
)
from gossamer.experiments.federated.moon import Moon
from gossamer.models import ModelError, SlicedNetwork

torch.set_num_threads(1)
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def after(method: Method, clients: list[Client], rounds: int = 1, seed: int = 0):
    """The state after some rounds."""
    state = method.start(clients)
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        one = round_context()
        one.rng = rng
        state = method.round(state, clients, one)
    return state


def steps(w: np.ndarray, client: Client, count: int, term=lambda w: 0.0) -> np.ndarray:
    """Plain descent by hand, one full batch per step."""
    for _ in range(count):
        w = w - RATE * (gradient(w, *data(client)) + term(w))
    return w


def test_the_gradient_written_by_hand_is_torchs():
    client = make_clients()[0]
    w = values(client)
    x, y = client.learner.samples
    client.learner.loss(client.network(x), y).mean().backward()
    grads = [p.grad.numpy().ravel() for p in client.network.module.parameters()]
    np.testing.assert_allclose(gradient(w, x.numpy(), y.numpy()), np.concatenate(grads), **CLOSE)


# --- one round against numpy ----------------------------------------------------------------------


def test_fedavg_averages_clients_by_their_samples():
    clients = make_clients(epochs=2)
    w = values(clients[0])
    found = after(FedAvg(), clients).w
    n = np.array([client.sample_count for client in clients])
    expected = sum(k * steps(w, c, 2) for k, c in zip(n, clients, strict=True)) / n.sum()
    np.testing.assert_allclose(found, expected, **CLOSE)


def test_fedprox_pulls_every_step_towards_the_servers_network():
    clients, mu = make_clients(epochs=3), 0.7
    w = values(clients[0])
    found = after(FedProx(mu=mu), clients).w
    n = np.array([client.sample_count for client in clients])
    trained = [steps(w, c, 3, lambda y: mu * (y - w)) for c in clients]
    np.testing.assert_allclose(
        found, sum(k * t for k, t in zip(n, trained, strict=True)) / n.sum(), **CLOSE
    )


def test_scaffold_follows_the_paper_for_three_rounds():
    clients, count = make_clients(epochs=2), 3
    x, c = values(clients[0]), np.zeros(SIZE)
    own = [np.zeros(SIZE) for _ in clients]
    found = after(Scaffold(server_rate=0.8), clients, rounds=3)
    for _ in range(3):
        moves, changes = [], []
        for i, client in enumerate(clients):
            y = steps(x, client, 2, lambda _, i=i, c=c: c - own[i])
            new = own[i] - c + (x - y) / (2 * RATE)
            moves.append(y - x)
            changes.append(new - own[i])
            own[i] = new
        x = x + 0.8 * sum(moves) / count
        c = c + sum(changes) / count
    np.testing.assert_allclose(found.w, x, **CLOSE)
    np.testing.assert_allclose(found.correction, c, **CLOSE)


def test_feddyn_follows_the_paper_for_three_rounds():
    clients, alpha = make_clients(epochs=2), 0.2
    w, h = values(clients[0]), np.zeros(SIZE)
    own = [np.zeros(SIZE) for _ in clients]
    found = after(FedDyn(alpha=alpha), clients, rounds=3)
    for _ in range(3):
        thetas = []
        for k, client in enumerate(clients):
            theta = steps(w, client, 2, lambda t, k=k, w=w: alpha * (t - w) - own[k])
            own[k] = own[k] - alpha * (theta - w)
            thetas.append(theta)
        h = h - alpha / 3 * sum(theta - w for theta in thetas)
        w = sum(thetas) / 3 - h / alpha
    np.testing.assert_allclose(found.w, w, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(found.correction, h, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "method", [FedAvg(), FedDyn(alpha=0.1), Scaffold(server_rate=2.0)], ids=repr
)
def test_the_server_averages_the_statistics_of_batch_norm(method):
    clients = make_clients((6, 6, 6), norm="average")
    w = after(method, clients, rounds=3).w
    trained = torch.stack([client.values() for client in clients]).mean(0)
    names = list(clients[0].network.slicing.anatomy.views(w))
    assert names[-2:] == ["1.running_mean", "1.running_var"]
    np.testing.assert_allclose(w[-2 * HIDDEN :], trained[-2 * HIDDEN :], **CLOSE)


def test_clients_with_statistics_of_their_own_are_tested_one_by_one():
    clients = make_clients((20, 30), norm="local")
    for client in clients:
        client.learner.held_out = clients[0].learner.held_out
    method = FedAvg()
    first, second = method.test(after(method, clients, rounds=3), clients)
    assert (first.loss, second.loss) == (clients[0].test().loss, clients[1].test().loss)
    assert first.loss != second.loss


def test_clients_test_the_pooled_network_with_its_statistics():
    clients = make_clients((20, 30), norm="local")
    for client in clients:
        client.learner.held_out = clients[0].learner.held_out
    method = Pooled()
    first, second = method.test(after(method, clients, rounds=3), clients)
    assert first.loss == second.loss


def test_moon_contrasts_with_the_servers_and_the_former_network():
    [client], mu, tau = make_clients((5,)), 2.0, 0.5
    method = Moon(mu=mu, temperature=tau)
    start = method.start([client])
    rng = np.random.default_rng(0)
    w, before = rng.normal(size=SIZE), rng.normal(size=SIZE)
    state = type(start)(torch.from_numpy(w), (torch.from_numpy(before),))
    x, y = data(client)
    z, near, far = hidden(w, x), hidden(w, x), hidden(before, x)
    similar = lambda a, b: (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)  # noqa: E731

    def slope(other: np.ndarray) -> np.ndarray:
        lengths = np.linalg.norm(z, axis=1, keepdims=True)
        return (
            other / lengths / np.linalg.norm(other, axis=1, keepdims=True)
            - similar(z, other)[:, None] * z / lengths**2
        )

    chance = 1 / (1 + np.exp((similar(z, far) - similar(z, near)) / tau))
    above = -mu * (1 - chance)[:, None] / tau * (slope(near) - slope(far)) / len(y)
    expected = w - RATE * gradient(w, x, y, above)
    found = method.round(state, [client], round_context())
    np.testing.assert_allclose(found.w, expected, rtol=1e-10, atol=1e-10)
    assert not np.allclose(expected, w - RATE * gradient(w, x, y), atol=1e-4)  # the term is felt


def test_fedper_averages_the_base_and_keeps_the_head():
    clients = make_clients()
    w = values(clients[0])
    method = FedPer()
    state = after(method, clients)
    trained = [steps(w, c, 1) for c in clients]
    n = np.array([client.sample_count for client in clients])
    head = CLASSES * HIDDEN + CLASSES
    average = sum(k * t for k, t in zip(n, trained, strict=True)) / n.sum()
    np.testing.assert_allclose(state.base, average[:-head], **CLOSE)
    method.test(state, clients)
    for client, own in zip(clients, trained, strict=True):
        np.testing.assert_allclose(values(client)[-head:], own[-head:], **CLOSE)
        np.testing.assert_allclose(values(client)[:-head], average[:-head], **CLOSE)


def test_downpour_applies_stale_changes_in_turn():
    clients, one = make_clients(), round_context(5)
    method = Downpour(server_rate=0.5)
    w = values(clients[0])
    state = method.start(clients)
    state = method.round(state, clients, one)
    second = method.round(state, clients, round_context(6))
    # by hand: the same dice give the same turns
    fetched = dict.fromkeys(range(3), w)
    for seed in (5, 6):
        rng = np.random.default_rng(seed)
        chosen = sorted(rng.choice(3, 3, replace=False))
        for k in rng.permutation(chosen):
            change = fetched[k] - steps(fetched[k], clients[k], 1)
            w = w - 0.5 * change
            fetched[k] = w
    np.testing.assert_allclose(second.w, w, **CLOSE)


def test_gossip_sgd_is_push_sum_of_what_was_trained():
    clients, one = make_clients(), round_context(3)
    w = values(clients[0])
    method = GossipSgd()
    state = method.round(method.start(clients), clients, one)
    rng = np.random.default_rng(3)
    rng.choice(3, 3, replace=False)
    x = [steps(w, client, 1) for client in clients]
    alpha = np.ones(3)
    sums, weights = [a / 2 * v for a, v in zip(alpha, x, strict=True)], alpha / 2
    for i in range(3):
        j = int(rng.choice([k for k in range(3) if k != i]))
        sums[j] = sums[j] + alpha[i] / 2 * x[i]
        weights[j] += alpha[i] / 2
    np.testing.assert_allclose(state.alpha, weights, **CLOSE)
    for client, total, weight in zip(clients, sums, weights, strict=True):
        np.testing.assert_allclose(values(client), total / weight, **CLOSE)


def test_local_clients_only_descend():
    clients = make_clients(epochs=2)
    w = values(clients[0])
    after(Local(), clients)
    for client in clients:
        np.testing.assert_allclose(values(client), steps(w, client, 2), **CLOSE)


def test_pooled_descends_on_everybodys_samples():
    clients = make_clients()
    w = values(clients[0])
    x = np.concatenate([data(client)[0] for client in clients])
    y = np.concatenate([data(client)[1] for client in clients])
    state = after(Pooled(), clients)
    np.testing.assert_allclose(state.values(), w - RATE * gradient(w, x, y), **CLOSE)


def test_an_ensembles_answer_counts_by_the_samples_of_the_class():
    clients = make_clients()
    after(Ensemble(), clients)
    x = torch.randn(4, 3, dtype=torch.float64)
    total = np.zeros((4, CLASSES))
    counts = np.stack([np.bincount(data(c)[1], minlength=CLASSES) for c in clients])
    for client, own in zip(clients, counts, strict=True):
        p = torch.softmax(client.network(x), 1).detach().numpy()
        total += p * own / counts.sum(0)
    np.testing.assert_allclose(
        ensemble_probabilities(clients, x), total / total.sum(1, keepdims=True), **CLOSE
    )


def test_gossamer_averages_the_shared_cells_and_nothing_else():
    clients = make_clients()
    w = values(clients[0])
    method = PartialModels(share=0.5, topology="clique")
    after(method, clients)
    trained = [steps(w, client, 1) for client in clients]
    average = sum(trained) / 3
    for client, own in zip(clients, trained, strict=True):
        where = client.network.slicing.coordinates(GLOBAL_MODEL)
        assert len(where) == 2 * 3 + 2  # two cells of four: their inputs and biases
        expected = own.copy()
        expected[where] = average[where]
        np.testing.assert_allclose(values(client), expected, rtol=1e-9, atol=1e-9)


# --- equalities -----------------------------------------------------------------------------------


def test_fedavg_with_one_client_is_sgd_bit_for_bit():
    clients, [twin] = make_clients((20,), batch=3, epochs=2), make_clients((20,), batch=3, epochs=2)
    found = after(FedAvg(), clients, rounds=4).w
    twin.learner.train(8)  # an epoch each
    assert torch.equal(found, twin.values())


def test_fedprox_without_a_pull_is_fedavg_bit_for_bit():
    found = after(FedProx(mu=0.0), make_clients((9, 5, 7), batch=2), rounds=3).w
    assert torch.equal(found, after(FedAvg(), make_clients((9, 5, 7), batch=2), rounds=3).w)


def test_moon_without_its_term_is_fedavg():
    found = after(Moon(mu=0.0), make_clients((9, 5, 7), batch=2), rounds=3).w
    expected = after(FedAvg(), make_clients((9, 5, 7), batch=2), rounds=3).w
    np.testing.assert_allclose(found, expected, **CLOSE)


def test_scaffold_with_equal_data_is_fedavg():
    alike = {"sizes": (8, 8, 8, 8), "batch": 3, "epochs": 2, "equal": True}
    found = after(Scaffold(), make_clients(**alike), rounds=4).w
    expected = after(FedAvg(), make_clients(**alike), rounds=4).w
    np.testing.assert_allclose(found, expected, **CLOSE)
    other = {**alike, "equal": False}  # and with other data it is not
    found = after(Scaffold(), make_clients(**other), rounds=4).w
    expected = after(FedAvg(), make_clients(**other), rounds=4).w
    assert not np.allclose(found, expected, atol=1e-6)


def test_gossamer_with_all_cells_and_a_mean_of_all_is_fedavg():
    clients = make_clients((7, 7, 7), batch=2)
    after(PartialModels(outputs="shared", topology="clique"), clients, rounds=3)
    expected = after(FedAvg(), make_clients((7, 7, 7), batch=2), rounds=3).w
    for client in clients:
        np.testing.assert_allclose(client.values(), expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=5), st.integers(0, 2**31), st.integers(1, 4)
)
def test_gossip_keeps_the_weighted_sum(sizes, seed, pushes):
    """Push-sum invents and loses nothing: Σ α and Σ α·x stay, whatever is pushed where."""
    clients = make_clients(sizes, rate=1e-300)  # training moves nothing
    rng = np.random.default_rng(seed)
    for client in clients:
        client.load(torch.from_numpy(rng.normal(size=SIZE)))
    before = sum(values(client) for client in clients)
    method = GossipSgd(pushes=pushes)
    state = method.round(method.start(clients), clients, round_context(seed))
    assert state.alpha.sum() == pytest.approx(len(sizes), rel=1e-12)
    held = sum(a * values(c) for a, c in zip(state.alpha, clients, strict=True))
    np.testing.assert_allclose(held, before, rtol=1e-9, atol=1e-9)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6))
def test_a_mean_lies_between_and_equal_vectors_are_their_own_mean(numbers):
    vectors = [torch.tensor([number], dtype=torch.float64) for number in numbers]
    found = float(mean(vectors, list(range(1, len(numbers) + 1))))
    assert min(numbers) - 1e-6 <= found <= max(numbers) + 1e-6
    assert torch.equal(mean([vectors[0]] * 3, [1, 2, 5]), vectors[0])


# --- bytes and participants -----------------------------------------------------------------------

NETWORK = 8 * SIZE  # float64
BASE = 8 * (SIZE - CLASSES * HIDDEN - CLASSES)


@pytest.mark.parametrize(
    ("method", "up", "down", "across"),
    [
        (FedAvg(), 3 * NETWORK, 3 * NETWORK, 0),
        (FedAvg(participation=0.3), NETWORK, NETWORK, 0),
        (FedProx(), 3 * NETWORK, 3 * NETWORK, 0),
        (Scaffold(), 6 * NETWORK, 6 * NETWORK, 0),
        (FedDyn(), 3 * NETWORK, 3 * NETWORK, 0),
        (Moon(), 3 * NETWORK, 3 * NETWORK, 0),
        (FedPer(), 3 * BASE, 3 * BASE, 0),
        (Downpour(pushes=2), 6 * NETWORK, 6 * NETWORK, 0),
        (GossipSgd(pushes=2), 0, 0, 6 * NETWORK),
        (PartialModels(topology="ring"), 0, 0, 6 * BASE),
        (PartialModels(exchanges=2), 0, 0, 6 * BASE),
        (Local(), 0, 0, 0),
        (Pooled(), 0, 0, 0),
        (Ensemble(), 0, 0, 0),
    ],
)
def test_what_a_round_puts_on_the_wire(method, up, down, across):
    clients, one = make_clients(), round_context()
    method.round(method.start(clients), clients, one)
    assert (one.bytes_to_server, one.bytes_to_clients) == (up, down)
    assert one.bytes_between_clients == across
    assert one.total_bytes == up + down + across


@given(st.integers(1, 20), st.floats(0.01, 1.0), st.integers(0, 99))
def test_participants_are_that_share_of_all_but_one_at_least(count, share, seed):
    chosen = round_context(seed).pick([None] * count, share)  # type: ignore[list-item]
    assert len(chosen) == len(set(chosen)) == max(round(share * count), 1)
    assert chosen == sorted(chosen)
    assert set(chosen) <= set(range(count))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_tests_every_client_and_leaves_them_usable(name):
    clients = make_clients((12, 9, 10), batch=4)
    method = METHODS[name]()
    state = after(method, clients, rounds=2)
    tests = method.test(state, clients)
    assert [test.samples for test in tests] == [12, 9, 10]
    again = method.round(state, clients, round_context(9))
    assert len(method.test(again, clients)) == 3


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: FedProx(mu=-0.1), "mu"),
        (lambda: FedProx(mu=float("nan")), "mu"),
        (lambda: Moon(temperature=0.0), "temperature"),
        (lambda: FedDyn(alpha=0.0), "alpha"),
        (lambda: FedAvg(participation=1.5), "participation"),
        (lambda: FedAvg(participation=0.0), "participation"),
        (lambda: Scaffold(server_rate=-1.0), "server_rate"),
        (lambda: FedAvg(rate=0.0), "rate"),
        (lambda: PartialModels(share=1.1), "share"),
    ],
)
def test_a_knob_out_of_its_range_is_named(make, key):
    with pytest.raises(ValueError, match=key):
        make()


def test_scaffold_refuses_an_optimizer_that_is_not_plain_descent():
    clients = make_clients()
    learner = clients[1].learner
    learner.optimizer = torch.optim.SGD(learner.network.module.parameters(), 0.1, momentum=0.9)
    with pytest.raises(ModelError, match=r"client '1': scaffold .* plain SGD"):
        Scaffold().start(clients)


def test_fedper_keeps_the_statistics_of_personal_layers():
    def block(width):
        return torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width)

    module = torch.nn.Sequential(*block(4), *block(2), torch.nn.BatchNorm1d(2, affine=False))
    network = SlicedNetwork(module, {"all": 1.0}, example=torch.zeros(3, 4))
    names = dict(module.named_parameters()) | dict(module.named_buffers())
    shared = base_coordinates(network, 2).tolist()
    found = {
        name
        for name, span in network.slicing.anatomy.spans.items()
        if set(range(span.start, span.stop)) <= {*shared}
    }
    wanted = {name for name in names if name.startswith(("0.", "1."))}
    assert found == wanted - {"1.num_batches_tracked"}
    assert len(shared) == sum(names[name].numel() for name in found)


def test_fedper_needs_a_layer_to_share():
    with pytest.raises(ModelError, match=r"personal is 2, .* only 2 layers .* at most 1"):
        base_coordinates(make_clients()[0].network, 2)


@pytest.mark.parametrize("method", [GossipSgd(), PartialModels()])
def test_nobody_gossips_alone(method):
    with pytest.raises(ModelError, match="at least two clients"):
        method.start(make_clients((5,)))


def test_a_client_trains_at_least_one_epoch():
    with pytest.raises(ModelError, match="at least 1 epoch in a round, not 0"):
        Client(make_clients((5,))[0].learner, 0)
