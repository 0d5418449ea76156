"""Compression in lockstep: the rule of live peers, bytes that are counted, no mass that is lost."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from results_kit import Watch, at

from gossamer.experiments.arena import Arena, ExactMean, Gossip, Wire
from gossamer.experiments.arena.simulation import Simulation, simulate
from gossamer.experiments.build import Swarm
from gossamer.experiments.config.tables import Config, ConfigError, parse_config
from gossamer.experiments.live.layout import plan
from gossamer.experiments.study.sweep import outcome, stackable_batches
from gossamer.gossip import Gossiper, Mass, total
from gossamer.models import Learner, Metrics, ModelError, SlicedNetwork
from gossamer.peer import BrokerAddress, Engine, Online
from gossamer.topology import build, build_schedule

torch.set_num_threads(1)
NOWHERE = BrokerAddress("mqtt://localhost:1")


def config(**table: Any) -> Config:
    base = {
        "name": "tiny",
        "peers": 4,
        "rounds": 3,
        "data": {"samples": 30, "test": 60},
        "network": {"layout": "64=12=10"},
        "models": [{"name": "all", "layout": "64-8-10"}],
        "training": {"local_samples": 30},
    }
    return parse_config(base | table)


class Walker:
    """A learner whose training is a step of its own, the same in the arena and live."""

    def __init__(self, network: SlicedNetwork):
        self.network = network
        self._random = torch.Generator().manual_seed(sum(network.peer.encode()))

    def train(self, steps: int) -> Metrics:
        self.network.flat.add_(torch.randn(len(self.network.flat), generator=self._random))
        return Metrics(0.0, 0, 1)

    def test(self) -> Metrics:
        return Metrics(0.0, 1, 1)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


def walkers(settings: Config) -> list[Learner]:
    return [Walker(member.network) for member in Swarm(settings).members()]


def values(learners: list[Learner]) -> np.ndarray:
    return np.stack([learner.network.flat.numpy() for learner in learners])


def simulated(settings: Config) -> tuple[np.ndarray, Arena]:
    """A config's exchanges in the arena, with walkers for learners."""
    made = Simulation.of(settings)
    learners = walkers(settings)
    weights = [m.samples for m in made.members] if settings.weights == "samples" else None
    arena = Arena(learners, mixing=made.mixing, wire=made.wire, weights=weights)
    list(arena.run(settings.rounds))
    return values(learners), arena


def live(settings: Config, folder: Path) -> tuple[np.ndarray, int]:
    """The same with live peers' engines, packets and all; the bytes of compressed values too."""
    learners = walkers(settings)
    engines = {
        peer.name: Engine(
            peer.name, learner, peer.settings, samples=peer.samples, seed=peer.seed
        )
        for peer, learner in zip(plan(settings, folder, NOWHERE).peers, learners, strict=True)
    }  # fmt: skip
    arrived: dict[str, list[Any]] = {name: [] for name in engines}
    events: dict[str, list[Any]] = {}
    for name, engine in engines.items():
        engine.open_session(0.0, 1)
        engine.begin(0.0, as_founder=True, all_online=True)
        around = engine.settings.neighbours
        events[name] = [
            Online(other.name, other.session, tuple(other.schemas))
            for other in engines.values()
            if other is not engine and (around is None or other.name in around)
        ]
    for _ in range(settings.rounds):
        for name, engine in engines.items():
            engine.turn([], events.pop(name, []), 0.0, 1 << 20)
            engine.train()
        for _ in range(100):
            sent = [
                (out.receiver, (out.model, bytes(packet)))
                for name, engine in engines.items()
                for out in engine.turn(arrived[name], [], 0.0, 1 << 20)
                for packet in out.packets
            ]
            arrived = {name: [what for to, what in sent if to == name] for name in engines}
            if not sent:
                break
        assert all(engine.view.averaged for engine in engines.values())
    counted = [engine.compression.links.traffic["all"] for engine in engines.values()]
    plain = 4 * plain_size(settings)  # of one message, without the header that live peers count too
    return values(learners), sum(c.bytes - c.plain_bytes + plain * c.messages for c in counted)


COMPRESSED = [
    {"compress": "int8"},
    {"compress": "top-k:0.1+int8"},
    {"compress": "mask:0.3"},
    {"compress": "low-rank:2"},
    {"dtype": "float16"},
]


@pytest.mark.parametrize("knobs", COMPRESSED, ids=lambda k: next(iter(k.values())))
@pytest.mark.parametrize(
    "table",
    [
        {"topology": "ring", "gossip": {"mode": "rounds", "exchanges": 3}},
        {"weights": "samples", "gossip": {"mode": "rounds"}},
        {"gossip": {"mode": "server"}},
    ],
    ids=["ring", "everybody", "server"],
)
def test_the_rule_is_that_of_live_peers(tmp_path: Path, table: Any, knobs: Any) -> None:
    settings = config(**table | {"gossip": table["gossip"] | knobs})
    found, arena = simulated(settings)
    expected, sent = live(settings, tmp_path)
    plain, _ = simulated(config(**table))
    far = np.abs(plain - expected).max()
    assert np.abs(found - expected).max() < 1e-5 < far  # the wire has changed something
    assert arena.wire_simulation is not None
    if "compress" in knobs:  # live peers count no others
        assert arena.wire_simulation.sent == sent > 0


def test_a_wire_that_changes_nothing_gives_what_the_products_give() -> None:
    for graph in (build("regular:4", 8, seed=1), build_schedule("one-peer-exponential", 8)):
        found = []
        for wire in (None, Wire("float64")):
            learners = walkers(config(peers=8))
            arena = Arena(learners, mixing=Gossip(graph, exchanges=2), wire=wire)
            list(arena.run(3))
            found.append(values(learners))
        assert np.abs(found[0] - found[1]).max() < 1e-5


@pytest.mark.parametrize(
    "gossip", [*COMPRESSED, {"drift": 0.3}], ids=lambda k: str(next(iter(k.values())))
)
def test_no_mass_is_lost(gossip: dict[str, Any]) -> None:
    settings = config(peers=6, topology="ring", gossip=gossip)
    made = Simulation.of(settings)
    learners = walkers(settings)
    arena = Arena(learners, mixing=made.mixing, wire=made.wire)
    assert arena.wire_simulation is not None
    gossipers = list(arena.wire_simulation.gossipers.values())
    for _ in range(4):
        arena.train()
        before = mass(gossipers)
        arena.average()
        after = mass(gossipers)
        assert after[1] == before[1]
        assert np.abs(after[0] - before[0]).max() < 1e-4 * np.abs(before[0]).max()


def mass(gossipers: list[Gossiper]) -> tuple[np.ndarray, int]:
    """Held sums and residues of compressors; in lockstep nothing is on its way between two averagings."""
    assert not any(gossiper.ledger.open for gossiper in gossipers)
    held, weight = total(Mass(each.value("all"), each.weight("all")) for each in gossipers)
    return held + sum(
        each.snapshot()["vault"]["residue"].get("all", 0) for each in gossipers
    ), weight


def traffic(folder: Path) -> dict[str, Any]:
    with (folder / "traffic.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    return row


def test_int8_learns_like_its_plain_twin_with_a_quarter_of_the_bytes(tmp_path: Path) -> None:
    accuracy = {}
    for name, knobs in (("plain", {}), ("int8", {"compress": "int8"})):
        settings = config(
            peers=8, rounds=20, test_every=20, topology="regular:4",
            data={"samples": 100, "test": 300}, training={"local_samples": 200, "rate": 0.3},
            gossip={"mode": "rounds", "exchanges": 2, **knobs},
        )  # fmt: skip
        watch = Watch()
        files = simulate(Simulation.of(settings), at(tmp_path / name), callbacks=[watch])
        accuracy[name] = watch.told("end")[-1].value("accuracy")
        assert (tmp_path / name / "traffic.csv" in files) == bool(knobs)
        assert accuracy[name] == pytest.approx(outcome(settings).accuracy)  # in a sweep too
    assert accuracy["plain"] > 0.6
    assert abs(accuracy["int8"] - accuracy["plain"]) < 0.03
    counted = traffic(tmp_path / "int8")
    assert int(counted["plain_bytes"]) == 20 * 2 * 8 * 4 * 4 * plain_size(settings)
    assert 3.5 * int(counted["bytes"]) < int(counted["plain_bytes"])
    assert 0 < float(counted["mean_distortion"]) < 0.05


def test_bytes_of_an_earlier_run_do_not_stay(tmp_path: Path) -> None:
    for knobs in ({"compress": "int8"}, {}):
        settings = config(rounds=1, topology="ring", gossip={"mode": "rounds", **knobs})
        simulate(Simulation.of(settings), at(tmp_path, force=True))
        assert (tmp_path / "traffic.csv").exists() == bool(knobs)


def test_what_hardly_moves_is_not_pushed(tmp_path: Path) -> None:
    for drift, skips in ((1e-9, False), (10.0, True)):
        settings = config(topology="ring", rounds=5, gossip={"drift": drift})
        simulate(Simulation.of(settings), at(tmp_path / f"{drift}"))
        counted = traffic(tmp_path / f"{drift}")
        assert (int(counted["skipped"]) > 0) == skips
        assert int(counted["plain_bytes"]) == 5 * 2 * 4 * 2 * 4 * plain_size(settings)
        assert (int(counted["bytes"]) < int(counted["plain_bytes"])) == skips


def plain_size(settings: Config) -> int:
    return len(Swarm(settings).members()[0].network.read("all"))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"gossip": {"compress": "int8"}}, "key 'gossip.compress': without a topology .* no messages"),
        ({"gossip": {"drift": 0.1}}, "key 'gossip.drift': without a topology .* no messages"),
        ({"gossip": {"dtype": "float16"}}, "key 'gossip.dtype': without a topology .* no messages"),
        (
            {"topology": "ring", "gossip": {"mode": "rounds", "drift": 0.1}},
            "key 'gossip.drift': in rounds mode peers wait",
        ),
        (
            {"topology": "ring", "gossip": {"compress": "int8", "dtype": "float16"}},
            "key 'gossip.compress': cannot be combined with gossip.dtype",
        ),
        (
            {"topology": "ring", "gossip": {"compress": "low-rank:60"}},
            "key 'gossip.compress': model 'all': low-rank:60 makes no block shorter",
        ),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_name(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"club.toml: {words}") as refused:
        Simulation.of(config(**table), "club.toml")
    assert "\n" not in str(refused.value)


def test_arenas_refuse_wires_that_they_cannot_have() -> None:
    learners, graph = walkers(config()), nx.cycle_graph(4)
    wire = Wire(compress="int8")
    with pytest.raises(ModelError, match="exact averaging sends none"):
        Arena(learners, mixing=ExactMean(), wire=wire)
    with pytest.raises(ModelError, match="plain gossip cannot be combined with `wire`"):
        Arena(learners, mixing=Gossip(graph, kind="plain"), wire=wire)
    with pytest.raises(ModelError, match="leave out `device`"):
        Arena(learners, mixing=Gossip(graph), wire=wire, device="cpu")
    with pytest.raises(ModelError, match="exclude each other"):
        Arena(learners, mixing=Gossip(graph), wire=Wire("float16", "int8"))
    many = walkers(config(peers=60, data={"samples": 10, "test": 60}))
    everybody = Gossip(nx.complete_graph(60))
    with pytest.raises(ModelError, match="largest item is references of compressed links"):
        Arena(many, mixing=everybody, wire=wire, memory=16_000_000)
    Arena(many, mixing=everybody, memory=16_000_000)


@pytest.mark.parametrize("gossip", [{"mode": "rounds"}, {"mode": "server"}])
def test_a_peer_that_diverged_is_named(gossip: dict[str, Any]) -> None:
    made = Simulation.of(config(gossip=gossip | {"compress": "int8"}))
    made.members[2].network.flat.fill_(float("nan"))
    with pytest.raises(ModelError, match="peer '2', model 'all': values are not finite"):
        made.arena().average()


def test_compressed_runs_of_a_sweep_are_not_stacked() -> None:
    class Cell:
        def __init__(self, **gossip: Any):
            self.config = config(gossip={"mode": "rounds", **gossip})

    cells = [Cell(), Cell(), Cell(compress="int8"), Cell(compress="int8")]
    assert [len(batch) for batch in stackable_batches(cells)] == [2, 1, 1]
