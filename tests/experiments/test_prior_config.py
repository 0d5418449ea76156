"""The key `prior` of [training]: in simulations, sweeps, comparisons and live peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federated_kit import CLASSES, make_clients, round_context
from torch.nn import functional as F

from gossamer.experiments.arena.simulation import Simulation
from gossamer.experiments.build import Swarm, make_learner
from gossamer.experiments.config.needs import warn_unused_in_sweep, warn_unused_keys
from gossamer.experiments.config.tables import ConfigError, parse_config
from gossamer.experiments.federated import METHODS, Client
from gossamer.experiments.federated.comparison import (
    Cell,
    clients_of,
    describe,
    parse_comparison,
    run,
)
from gossamer.experiments.federated.fedavg import FedAvg
from gossamer.experiments.federated.method import Ensemble, Method, Pooled, ensemble_probabilities
from gossamer.experiments.live.layout import plan
from gossamer.models import Metrics, SgdLearner, log_priors
from gossamer.models.fednp import FedNPLearner, FedNPOptions
from gossamer.peer import BrokerAddress

torch.set_num_threads(1)
BROKER = BrokerAddress("mqtt://127.0.0.1")


def table(prior: str, **changes: Any) -> dict[str, Any]:
    """Six peers with skewed classes that share the whole network."""
    return {
        "peers": 6,
        "rounds": 10,
        "data": {
            "partition": "dirichlet", "alpha": 0.2, "total": 900, "minimum": 20, "tested": "own",
        },
        "network": {"layout": "64=16=10"},
        "models": [{"name": "all", "share": 1.0}],
        "training": {"local_samples": 150, "rate": 0.1, "prior": prior},
    } | changes  # fmt: skip


def learners(config: dict[str, Any]) -> list[SgdLearner]:
    found = [member.learner for member in Swarm(parse_config(config)).members()]
    assert all(isinstance(learner, SgdLearner) for learner in found)
    return found  # type: ignore[return-value]


def counts(found: list[SgdLearner]) -> np.ndarray:
    return np.array([np.bincount(one.samples[1].numpy(), minlength=10) for one in found])


SWAPPED = [{"kind": "swap", "labels": [0, 1], "peers": [2]}]


@pytest.mark.parametrize("how", ["own", "auto"])
def test_priors_are_of_the_labels_that_a_peer_trains_on(how: Any) -> None:
    found = learners(table(how, tasks=SWAPPED))
    expected = log_priors(counts(found), how)
    assert expected is not None
    for learner, row in zip(found, expected, strict=True):
        assert learner.log_prior is not None
        np.testing.assert_allclose(learner.log_prior.numpy(), row, rtol=1e-6)


def test_none_is_the_default() -> None:
    config = table("none")
    del config["training"]["prior"]
    assert all(learner.log_prior is None for learner in learners(config))


@pytest.mark.parametrize("samples", [20, 100])
@pytest.mark.parametrize("tasks", [[], [{"kind": "symmetric", "last": 4}]])
def test_auto_does_nothing_where_classes_are_equally_frequent(
    samples: int, tasks: list[dict[str, Any]]
) -> None:
    equal = {"data": {"partition": "iid", "samples": samples}, "tasks": tasks, "rounds": 2}
    assert all(learner.log_prior is None for learner in learners(table("auto", **equal)))
    results = [
        [round.tests for round in Simulation.of(parse_config(table(how, **equal))).rounds()]
        for how in ("auto", "none", "own")
    ]
    assert results[0] == results[1] != results[2]


def test_peers_with_skewed_classes_share_a_network_better_with_a_prior() -> None:
    accuracy = {
        how: list(Simulation.of(parse_config(table(how))).rounds())[-1].accuracy
        for how in ("none", "own", "auto")
    }
    assert min(accuracy["own"], accuracy["auto"]) > accuracy["none"] + 0.05


@pytest.mark.parametrize(
    ("prior", "tested", "told"),
    [("own", "common", True), ("own", "own", False), ("none", "common", False)],
)
@pytest.mark.parametrize("swept", [False, True])
def test_a_prior_with_common_tests_is_told(
    prior: str, tested: str, told: bool, swept: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    config = parse_config(table(prior, data={"tested": tested}))
    if swept:
        warn_unused_in_sweep(config, {}, [config], "mine.toml")
    else:
        warn_unused_keys(config, "lockstep", "mine.toml")
    lines = " ".join(capsys.readouterr().err.split())
    assert ("mine.toml: key 'training.prior': fits tests with the peer's own" in lines) == told


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"prior": "own", "loss": "squared"}}, "'training': has a prior, which is added"),
        ({"training": {"prior": "mean"}}, "'training.prior': input should be 'auto', 'own' or 'none'"),
        ({"data": {"set": "sparse"}, "network": {"layout": "50<>40"}, "models": []},
         "'training.prior': the associative network has no classes"),
    ],
)  # fmt: skip
def test_what_has_no_logits_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        Swarm(parse_config(table("own", **changes), "mine.toml"), "mine.toml").member(0)
    assert str(error.value).startswith("mine.toml: key ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("how", ["own", "auto"])
def test_a_single_output_is_refused(how: str, tmp_path: Path) -> None:
    (tmp_path / "two_classes.py").write_text(
        "import torch\n"
        "from gossamer.experiments.data import Dataset, Samples\n"
        "def make():\n"
        "    x = torch.rand(200, 4)\n"
        "    samples = Samples(x, (x[:, 0] > 0.5).long())\n"
        "    return Dataset('two', samples, None, 2, '')\n"
    )
    config = parse_config(
        {
            "peers": 2, "data": {"set": "two_classes:make"}, "network": {"layout": "4=3=1"},
            "models": [{"name": "all", "share": 1.0}], "training": {"prior": how},
        }
    )  # fmt: skip
    source = str(tmp_path / "mine.toml")
    with pytest.raises(ConfigError, match=r"key 'training.prior': needs one output for each class"):
        Swarm(config, source).member(0)


def test_live_peers_are_built_without_the_labels_of_others(tmp_path: Path) -> None:
    """With "auto" they average what they need of others: the config of a process does not ask for it."""
    spec = plan(parse_config(table("auto")), tmp_path, BROKER)
    assert {peer.settings.prior for peer in spec.peers} == {"auto"}
    learner = make_learner(**spec.peers[0].arguments)
    assert isinstance(learner, SgdLearner)
    assert learner.log_prior is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gossip": {"compress": "int8"}}, "compressors distort class counts"),
        ({"trust": {"kind": "swarm"}}, "do not know class counts"),
        ({"trust": {"dp": {"clip": 1.0, "noise": 1.0}}}, "without noise"),
        ({"training": {"prior": "auto", "proximal": 0.1}}, "training.proximal"),
    ],
)
def test_live_peers_refuse_what_spoils_class_counts(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason) as one:
        plan(parse_config(table("auto") | changes), tmp_path, BROKER, "mine.toml")
    assert "\n" not in str(one.value)


def test_live_peers_have_the_prior_of_their_own_labels(tmp_path: Path) -> None:
    config = table("own")
    spec = plan(parse_config(config), tmp_path, BROKER)
    expected = learners(config)
    for peer, same in zip(spec.peers[:2], expected, strict=False):
        learner = make_learner(**peer.arguments)
        assert isinstance(learner, SgdLearner)
        assert learner.log_prior is not None
        assert same.log_prior is not None
        assert torch.equal(learner.log_prior, same.log_prior)


# --- comparisons ----------------------------------------------------------------------------------


def comparison(prior: str, **methods: dict[str, Any]) -> Any:
    config = table(prior)
    del config["models"], config["training"]["local_samples"]
    return parse_comparison(config | {"rounds": 2, "seeds": 1, "methods": methods or {"local": {}}})


@pytest.mark.parametrize("how", ["own", "auto"])
def test_the_clients_of_every_method_have_the_priors_of_the_config(how: Any) -> None:
    config = comparison(how)
    for name in METHODS:
        clients = clients_of(config, METHODS[name](), 0)
        expected = log_priors(counts([client.learner for client in clients]), how)
        assert expected is not None
        for client, row in zip(clients, expected, strict=True):
            assert client.learner.log_prior is not None
            np.testing.assert_allclose(client.learner.log_prior.numpy(), row, rtol=1e-6)
    assert f"log-prior {how}" in describe(config)
    assert "log-prior" not in describe(comparison("none"))


def test_results_of_another_prior_are_run_again() -> None:
    keys = {Cell("local", comparison(how), 0).key for how in ("none", "own", "auto")}
    assert len(keys) == 3


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_with_priors(name: str) -> None:
    record = run(Cell(name, comparison("own", **{name: {}}), 0))
    assert np.mean(record["curve"][-1]["accuracy"]) > 0.2


SHIFT = torch.tensor([0.8, -0.6], dtype=torch.float64)


def shifted(in_network: bool) -> list[Client]:
    """Clients that all add the same values to their outputs: as a prior, or by their output biases."""
    clients = make_clients((9, 5, 7), batch=4)
    for client in clients:
        if in_network:
            client.network.flat[-CLASSES:] += SHIFT
        else:
            client.learner.log_prior = SHIFT
    return clients


def results(method: Method, clients: list[Client], rounds: int = 3) -> list[Metrics]:
    state, tests = method.start(clients), list[Metrics]()
    for index in range(rounds):
        state = method.round(state, clients, round_context(index))
        tests += method.test(state, clients)
    return tests


# FedNP pulls biases towards values of their own, and the other two have tests below.
@pytest.mark.parametrize(
    "name", [one for one in METHODS if one not in ("fednp", "pooled", "ensemble")]
)
def test_a_common_prior_is_a_shift_of_the_output_biases(name: str) -> None:
    found, expected = (
        results(METHODS[name](), shifted(False)),
        results(METHODS[name](), shifted(True)),
    )
    plain = results(METHODS[name](), make_clients((9, 5, 7), batch=4))
    for one, same, other in zip(found, expected, plain, strict=True):
        assert one.loss == pytest.approx(same.loss, rel=1e-9)
        assert one.correct == same.correct
        assert one.loss != pytest.approx(other.loss, rel=1e-4)


def with_own_priors() -> list[Client]:
    """Clients with the same test samples and different priors."""
    clients = make_clients((9, 5, 7), batch=4)
    for index, client in enumerate(clients):
        client.learner.held_out = clients[0].learner.held_out
        client.learner.log_prior = index * SHIFT
    return clients


def test_shared_test_samples_are_tested_with_the_prior_of_each_client() -> None:
    clients, method = with_own_priors(), FedAvg()
    state = method.round(method.start(clients), clients, round_context())
    tests = method.test(state, clients)
    assert tests == [client.test() for client in clients]
    assert len({test.loss for test in tests}) == 3


def test_pooled_samples_have_the_prior_of_all_and_tests_that_of_each_client() -> None:
    clients, method = with_own_priors(), Pooled()
    state = method.start(clients)
    labels = torch.cat([client.learner.samples[1] for client in clients])
    expected = (torch.bincount(labels, minlength=CLASSES) + 1).double()
    assert state.learner.log_prior is not None
    torch.testing.assert_close(state.learner.log_prior.exp(), expected / expected.sum())
    assert clients[0].learner.log_prior is not None
    assert torch.equal(clients[0].learner.log_prior, 0 * SHIFT)  # the copy's alone was changed
    state = method.round(state, clients, round_context())
    w, (x, y) = state.values(), clients[0].learner.held_out
    for index, test in enumerate(method.test(state, clients)):
        clients[index].load(w)
        with torch.no_grad():
            outputs = clients[index].network(x) + index * SHIFT
        assert test.loss == pytest.approx(float(F.cross_entropy(outputs, y, reduction="sum")))


def test_an_ensemble_is_multiplied_by_the_shares_of_the_client_that_uses_it() -> None:
    clients = with_own_priors()
    x, y = clients[0].learner.held_out
    common = ensemble_probabilities(clients, x)
    for index, test in enumerate(Ensemble().test(None, clients)):
        own = common * (index * SHIFT).exp()
        own = own / own.sum(1, keepdim=True)
        assert test.loss == pytest.approx(float(-own[range(len(y)), y].log().sum()))
        assert test.correct == int((own.argmax(1) == y).sum())


def test_fednp_trains_and_tests_with_the_prior() -> None:
    plain = make_clients()[0].learner
    wrapped = make_clients()[0].learner
    plain.log_prior = wrapped.log_prior = SHIFT
    options = FedNPOptions(strength=0.0)
    fednp = FedNPLearner(wrapped, options, counting_peer=True)
    for _ in range(2):
        assert fednp.train(1).loss == pytest.approx(plain.train(1).loss)
        assert fednp.test().loss == pytest.approx(plain.test().loss)
