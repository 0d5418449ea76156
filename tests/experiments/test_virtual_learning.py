"""Learning in virtual time: the config's switch, its files, and what the seed decides."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from results_kit import at

from gossamer.experiments import build
from gossamer.experiments.arena import Arena, LearningSimulation, PeerTestResult, simulate_in_time
from gossamer.experiments.arena.events import Outcome
from gossamer.experiments.config.tables import ConfigError, parse_config
from gossamer.experiments.results import read_records
from gossamer.gossip import ONE
from gossamer.gossip.compress import Traffic
from gossamer.models import Metrics, SgdLearner

torch.set_num_threads(1)

TIME = {"training": "lognormal:1:0.3", "delay": "exponential:0.3"}


def table(**changed: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "name": "tiny",
        "peers": 6,
        "rounds": 10,
        "test_every": 2,
        "data": {"samples": 60, "test": 60},
        "tasks": [{"kind": "swap", "labels": [8, 9], "peers": 2}],
        "network": {"layout": "64=12=10", "activation": "sigmoid", "output": "sigmoid"},
        "models": [
            {"name": "global", "layout": "64-10-10"},
            {"name": "pair", "layout": "0-1-0", "peers": [0, 1], "depends": ["global"]},
        ],
        "training": {"local_samples": 60, "rate": 0.3, "loss": "squared", "reduction": "sum"},
        "time": TIME,
    }
    return base | changed


def learn(threads: int = 1, **changed: Any) -> tuple[LearningSimulation, list[PeerTestResult]]:
    tests: list[PeerTestResult] = []
    swarm = LearningSimulation(
        parse_config(table(**changed)), threads=threads, on_test=tests.append
    )
    swarm.run()
    return swarm, tests


def last(tests: list[PeerTestResult]) -> dict[int, float]:
    return {tested.peer: tested.metrics.accuracy for tested in tests}


def test_peers_learn_together() -> None:
    swarm, together = learn(rounds=30)
    _, alone = learn(rounds=30, models=[])
    assert sum(last(together).values()) / 6 > sum(last(alone).values()) / 6 + 0.03
    times = [tested.time for tested in together if tested.peer == 3]
    assert times == sorted(times)
    assert times[-1] == swarm.seconds
    assert len(times) > 10


def test_only_those_who_implement_a_model_share_it() -> None:
    swarm, _ = learn()
    shared = [set(gossiper.models) for gossiper in swarm.events.gossipers.values()]
    assert shared == [{"global", "pair"}] * 2 + [{"global"}] * 4


def test_mass_is_conserved_while_peers_learn() -> None:
    swarm, _ = learn(time=TIME | {"loss": 0.3})
    everyone = swarm.events.gossipers
    assert sum(gossiper.counters["credited"] for gossiper in everyone.values()) > 6
    for name in ("global", "pair"):
        gossipers = [gossiper for gossiper in everyone.values() if name in gossiper.models]
        accounts = [gossiper.account(name) for gossiper in gossipers]
        # What is open at its sender may be credited already: the answer is still on its way.
        open_ = sum(
            transfer.give.weight
            for gossiper in gossipers
            for (_, vector), transfer in gossiper.ledger.open.items()
            if vector == name
            and everyone[int(transfer.give.receiver)].ledger.verdict(
                gossiper.peer, gossiper.session, name
            )
            != (transfer.give.sequence, "credited")
        )
        assert sum(account.held for account in accounts) + open_ == len(accounts) * ONE


def test_without_gossip_training_is_plain_training() -> None:
    """Adding what training changed must be what training in place is."""
    quiet = TIME | {"delay": "constant:1000", "training": "constant:1"}
    swarm, _ = learn(time=quiet, rounds=4)
    fresh = LearningSimulation(parse_config(table(time=quiet, rounds=4)))
    for member, other in zip(swarm.members, fresh.members, strict=True):
        other.learner.train(4)
        torch.testing.assert_close(member.network.flat, other.network.flat, rtol=0, atol=1e-5)


TROUBLE = TIME | {
    "loss": 0.2,
    "stragglers": 0.2,
    "slowdown": 4,
    "churn": {"leave": 0.05, "arrive": 0.4},
    "partitions": [{"start": 2, "end": 5, "peers": 3}],
}


def test_threads_change_nothing_and_seeds_do() -> None:
    one, tests = learn(time=TROUBLE)
    two, same = learn(time=TROUBLE, threads=3)
    assert tests == same
    for member, other in zip(one.members, two.members, strict=True):
        assert torch.equal(member.network.flat, other.network.flat)
    assert learn(time=TROUBLE, seed=1)[1] != tests


class OneByOne(SgdLearner):
    """The same learner, of a kind that no arena stacks."""


@pytest.mark.parametrize("optimizer", [None, "momentum", "adam"])
def test_training_at_once_is_training_one_by_one(
    optimizer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = {"local_samples": 60, "rate": 0.03}
    if optimizer:
        training["optimizer"] = optimizer
    stacked, tests = learn(time=TROUBLE, training=training, rounds=8)
    monkeypatch.setattr(build, "SgdLearner", OneByOne)
    apart, plain = learn(time=TROUBLE, training=training, rounds=8)
    assert [(t.time, t.round, t.peer) for t in tests] == [(t.time, t.round, t.peer) for t in plain]
    for member, other in zip(stacked.members, apart.members, strict=True):
        assert type(other.learner) is OneByOne
        torch.testing.assert_close(member.network.flat, other.network.flat, rtol=0, atol=2e-4)


def test_training_waits_until_one_peer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    train = Arena.train

    def counted(arena: Arena, peers: list[int]) -> tuple[Metrics, ...]:
        batches.append(len(peers))
        return train(arena, peers)

    monkeypatch.setattr(Arena, "train", counted)
    swarm, _ = learn(peers=16, data={"samples": 20, "test": 20}, rounds=10)
    assert sum(batches) >= sum(swarm.rounds)
    assert batches[0] == 16
    assert len(batches) < sum(swarm.rounds) / 4


ONE_MODEL = [{"name": "global", "layout": "64-10-10"}]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"models": [{"name": "global", "layout": "64-12-10"}], "weights": "samples"},
        {"training": {"local_samples": 35, "rate": 0.03, "optimizer": "momentum"}},
        {"training": {"local_samples": 60, "rate": 0.03, "optimizer": "adam"}, "every": 2},
        {"topology": "ring", "gossip": {"exchanges": 2, "fraction": 0.4, "dtype": "float64"}},
    ],
    ids=["part", "whole", "momentum", "adam", "ring"],
)
def test_arrays_do_what_gossipers_do_with_peers_that_learn(changed: dict[str, Any]) -> None:
    trouble = {key: value for key, value in TROUBLE.items() if key != "churn"}
    config = parse_config(table(time=trouble | {"timeout": 1.5}, models=ONE_MODEL) | changed)
    tests: tuple[list[PeerTestResult], ...] = ([], [])
    on_arrays = LearningSimulation(config, on_test=tests[0].append)
    through_gossipers = LearningSimulation(config, arrays=False, on_test=tests[1].append)
    for swarm in (on_arrays, through_gossipers):
        swarm.run()
    assert on_arrays.array_jobs is not None
    counters = on_arrays.array_jobs.push_sum.counters
    assert min(counters[kind] for kind in ("training", "push", "arrival", "return")) > 0
    assert on_arrays.rounds == through_gossipers.rounds
    assert on_arrays.traffic_by_model() == through_gossipers.traffic_by_model()
    weights = [through_gossipers.events.units(peer, "global") for peer in range(6)]
    assert on_arrays.array_jobs.push_sum.weights.tolist() == weights
    for one, other in zip(*tests, strict=True):
        assert (one.time, one.round, one.peer) == (other.time, other.round, other.peer)
        assert one.metrics.loss == pytest.approx(other.metrics.loss, rel=1e-4)
    for member, other in zip(on_arrays.members, through_gossipers.members, strict=True):
        torch.testing.assert_close(member.network.flat, other.network.flat, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "changed",
    [
        {"models": [*ONE_MODEL, {"name": "pair", "layout": "0-1-0", "peers": [0, 1]}]},
        {"models": [ONE_MODEL[0] | {"peers": [0, 1, 2]}]},
        {"gossip": {"dtype": "float16"}},
        {"gossip": {"compress": "int8"}},
        {"time": TROUBLE},
    ],
    ids=["two models", "some peers", "rounded", "compressed", "churn"],
)
def test_peers_that_arrays_do_not_serve_have_gossipers(changed: dict[str, Any]) -> None:
    swarm = LearningSimulation(parse_config(table(models=ONE_MODEL) | changed))
    assert swarm.array_jobs is None
    assert swarm.events.gossipers


def test_weights_may_count_samples() -> None:
    swarm, _ = learn(weights="samples", rounds=2)
    injected = {gossiper.injected("global") for gossiper in swarm.events.gossipers.values()}
    assert injected == {60 * ONE}


def test_float16_on_the_wire_loses_no_weight() -> None:
    swarm, tests = learn(gossip={"dtype": "float16"})
    assert all(0.1 <= accuracy <= 1 for accuracy in last(tests).values())
    held = sum(g.account("global").held for g in swarm.events.gossipers.values())
    assert 0 < held <= 6 * ONE


def test_a_value_too_large_for_float16_travels_in_float32_and_its_bytes_count() -> None:
    sent = {}
    for value in (1.0, 1e5, np.nan):
        swarm = LearningSimulation(parse_config(table(gossip={"dtype": "float16"})))
        store = swarm.events.stores[2]
        start = store.read("global")
        store.write("global", np.full_like(start, value))
        assert swarm.events.push("global", 2, {3: Outcome(1.0, 2.0, True)}, 0.0) == np.isfinite(
            value
        )
        sent[value] = swarm.events.bytes["global"]
    assert sent == {1.0: 2 * start.size, 1e5: 4 * start.size, np.nan: 0}


def saved(swarm: LearningSimulation) -> tuple[int, Traffic]:
    return swarm.events.bytes["global"], swarm.events.traffic("global")


@pytest.mark.parametrize("compressor", ["int8", "top-k:0.1+int8", "mask:0.3"])
def test_compressors_are_those_of_live_peers(compressor: str) -> None:
    plain, _ = learn(time=TROUBLE)
    swarm, tests = learn(time=TROUBLE, gossip={"compress": compressor})
    size, traffic = saved(swarm)
    assert size + traffic.saved == saved(plain)[0]  # the same messages, only shorter
    assert size < 0.7 * saved(plain)[0]
    assert 0 < traffic.mean_distortion < 1
    assert all(np.isfinite(m.network.flat.numpy()).all() for m in swarm.members)
    assert learn(time=TROUBLE, gossip={"compress": compressor}, threads=2)[1] == tests


def test_compression_loses_no_weight() -> None:
    steady = TIME | {"delay": "constant:0.01", "training": "uniform:0.9:1.1"}
    swarm, _ = learn(time=steady, gossip={"compress": "top-k:0.1"})
    gossipers = swarm.events.gossipers.values()
    assert sum(g.account("global").held for g in gossipers) == 6 * ONE
    assert sum(g.account("pair").held for g in list(gossipers)[:2]) == 2 * ONE


def test_compressors_of_different_peers_draw_apart() -> None:
    swarm, _ = learn(rounds=2, gossip={"compress": "mask:0.3"})
    states = {str(g.rng.bit_generator.state) for g in swarm.events.gossipers.values()}
    assert len(states) == 6


def test_what_hardly_moved_is_not_pushed() -> None:
    often, _ = learn(gossip={"drift": 0.0})
    swarm, _ = learn(gossip={"drift": 0.3})
    size, traffic = saved(swarm)
    assert traffic.skipped > 0
    assert size < saved(often)[0]
    assert saved(often)[1].skipped == 0


def test_bytes_follow_the_kind_of_values() -> None:
    sizes = [saved(learn(gossip={"dtype": f"float{bits}"})[0])[0] for bits in (16, 32, 64)]
    assert sizes[0] * 4 == sizes[1] * 2 == sizes[2]


def test_files(tmp_path: Path) -> None:
    config = parse_config(table(time=TROUBLE))
    seen: list[PeerTestResult] = []
    files = simulate_in_time(config, at(tmp_path), networks=True, on_test=seen.append)
    names = {"summary.csv", "accuracy.png", "accuracy.svg", "traffic.csv"}
    assert {file.name for file in files} == names | {f"{i}.safetensors" for i in range(6)}
    assert parse_config(json.loads((tmp_path / "config.json").read_text())) == config
    records = list(read_records(tmp_path / "metrics.jsonl"))
    assert [(r["time"], r["round"], int(r["peer"])) for r in records] == [
        (t.time, t.round, t.peer) for t in seen
    ]
    assert "virtual time" in (tmp_path / "accuracy.svg").read_text()
    with (tmp_path / "summary.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["peer", "task", "rounds", "accuracy", "there"]
    *rows, mean = rows
    assert {row[0]: row[3] for row in rows} == {
        str(peer): f"{accuracy:.4f}"
        for peer, accuracy in last(sorted(seen, key=lambda t: t.time)).items()
    }
    there = [float(row[3]) for row in rows if row[4] == "yes"]
    assert mean == ["mean", "", "", f"{np.mean(there):.4f}", f"{len(there)}"]


def test_interrupted_keeps_what_was_tested(tmp_path: Path) -> None:
    count = 0

    def stop(tested: PeerTestResult) -> None:
        nonlocal count
        count += 1
        if count == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate_in_time(parse_config(table()), at(tmp_path), threads=2, on_test=stop)
    assert len(list(read_records(tmp_path / "metrics.jsonl"))) == 8
    assert (tmp_path / "accuracy.png").exists()


def test_a_churn_trace_is_read_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("2,leave,5\n4,arrive,5\n", "utf-8")
    config = parse_config(table(time=TIME | {"churn": {"trace": "trace.csv", "step": 0.5}}))
    swarm = LearningSimulation(config, str(tmp_path / "config.toml"))
    assert swarm.world.ends[5, 0] == 1.0
    assert swarm.world.starts[5, 1] == 2.0


@pytest.mark.parametrize(
    ("time", "message"),
    [
        (
            {"training": "lognorml:1:1"},
            "key 'time.training': unknown distribution 'lognorml'; did you mean",
        ),
        ({"delay": -1}, "key 'time.delay': value is -1"),
        ({"delay": "uniform:1"}, "write uniform:low:high"),
        ({"delay": [1]}, "key 'time.delay': should be a number of seconds"),
        ({"seconds": -3.0}, "key 'time.seconds': input should be greater than 0, not -3.0"),
        ({"timeout": 0.0}, "key 'time.timeout'"),
        ({"los": 0.1}, "unknown key 'time.los'; did you mean 'loss'?"),
        ({"churn": {"leav": 0.1}}, "unknown key 'time.churn.leav'; did you mean 'leave'?"),
        ({"partitions": {"start": 1}}, "write [[partitions]]"),
    ],
)
def test_mistakes_in_the_table_are_named(time: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(table(time=time), "swarm.toml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("swarm.toml: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gossip": {"mode": "rounds"}}, "virtual time is for the modes 'async' and 'steady'"),
        ({"time": TIME | {"churn": {"trace": "none.csv"}}}, "key 'time.churn': "),
        ({"time": TIME | {"churn": {"step": 1e-9}}}, "key 'time.churn.step': 1e-09 s make"),
        (
            {"time": TIME | {"partitions": [{"start": 1, "end": 2, "peers": [77]}]}},
            "names peer 77, but peers are 0 to 5",
        ),
        (
            {"time": TIME | {"partitions": [{"start": 1, "end": 2, "peers": 10**12}]}},
            "names peer 6, but peers are 0 to 5",
        ),
        ({"topology": "one-peer-exponential"}, "key 'topology'"),
        (
            {"gossip": {"compress": "int8", "dtype": "float16"}},
            "key 'gossip.compress': cannot be combined with gossip.dtype",
        ),
        ({"gossip": {"drift": {"globl": 0.1}}}, "no peers share a model 'globl'"),
    ],
)
def test_mistakes_that_need_the_swarm_are_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LearningSimulation(parse_config(table(**changed)), "swarm.toml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("swarm.toml: ")
