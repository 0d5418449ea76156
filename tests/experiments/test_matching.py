"""Matching from a config: what is refused, and what the arena, live peers and the command make of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from cli_kit import runner

from gossamer.experiments.arena import LearningSimulation
from gossamer.experiments.arena.simulation import Simulation
from gossamer.experiments.build import Swarm, matched_members
from gossamer.experiments.config.tables import Config, ConfigError, parse_config
from gossamer.experiments.live.device import load_join
from gossamer.experiments.live.layout import plan
from gossamer.experiments.papers import live as newcomers
from gossamer.gossip import MemoryBroker, MemoryTransport
from gossamer.peer import BrokerAddress, Matching, Peer, ProcessSpec

BROKER = BrokerAddress("mqtt://127.0.0.1")


def three_widths(**changes) -> Config:
    """Peers of 5, 7 and 9 cells in a model of 9."""
    table = {
        "name": "three", "peers": 3, "rounds": 4, "test_every": 4,
        "data": {"samples": 20},
        "network": {
            "layout": "64=9=10",
            "sizes": [{"layout": f"64={5 + 2 * i}=10", "peers": [i]} for i in range(2)],
        },
        "models": [
            {
                "name": "all", "layout": f"64-{5 + 2 * i}-10", "peers": [i],
                "matching": "fuse", "width": "64-9-10",
            }
            for i in range(3)
        ],
        "training": {"local_samples": 20},
        "gossip": {"mode": "rounds", "checkpoint": False},
    }  # fmt: skip
    return parse_config(table | changes)


async def in_memory(config: Config, folder: Path) -> list[Peer]:
    """The config's peers as live ones in this process, run to their end."""
    broker = MemoryBroker()

    def connect(client_id, will, on_connect):
        return MemoryTransport(broker, client_id, will=will, on_connect=on_connect)

    members = Swarm(config).members()
    specs = plan(config, folder, BROKER).peers
    peers = [
        Peer(member.name, member.learner, spec.settings, connect, seed=spec.seed)
        for member, spec in zip(members, specs, strict=True)
    ]
    async with asyncio.timeout(240):
        await asyncio.gather(*(peer.run() for peer in peers))
    return peers


def test_the_arena_and_live_peers_of_three_widths_agree(tmp_path):
    config = three_widths()
    simulation = Simulation.of(config)
    *_, last = simulation.rounds()
    peers = asyncio.run(in_memory(config, tmp_path))
    for member, peer, test in zip(simulation.members, peers, last.tests, strict=True):
        live = peer.learner.network
        assert live.flat.shape == member.network.flat.shape
        np.testing.assert_allclose(live.flat, member.network.flat, atol=1e-5)
        assert abs(peer.learner.test().accuracy - test.accuracy) < 0.03


def test_widths_also_average_on_a_graph():
    """Push-sum on a path of three: after enough exchanges nearly everybody's mean."""
    exact = Simulation.of(three_widths(rounds=1))
    list(exact.rounds())
    gossip = {"mode": "rounds", "exchanges": 60, "checkpoint": False}
    graph = Simulation.of(three_widths(rounds=1, topology="path", gossip=gossip))
    list(graph.rounds())
    for one, other in zip(exact.members, graph.members, strict=True):
        np.testing.assert_allclose(one.network.flat, other.network.flat, atol=1e-4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Config, Path]:
    """Four peers trained separately, from their own initial values; their networks are in this folder."""
    folder = tmp_path_factory.mktemp("trained")
    config = newcomers.newcomers_config("align", newcomers.Durations()).model_copy(
        update={"peers": 4, "rounds": 1}
    )
    (folder / "nets").mkdir()
    for index in range(4):
        member = Swarm(config.model_copy(update={"seed": 50 + index})).member(index)
        member.learner.train(300)  # cells that have learned little cannot be told apart
        member.network.save(folder / "nets" / f"{index}.safetensors")
    network = config.network.model_copy(update={"trained": "nets/{peer}.safetensors"})
    return config.model_copy(update={"network": network}), folder


def test_networks_trained_separately_average_far_better_when_aligned(trained):
    config, folder = trained
    (model,) = config.models
    found = {}
    for matching in ("align", "none"):
        models = [model.model_copy(update={"matching": matching})]
        simulation = Simulation.of(
            config.model_copy(update={"models": models}), str(folder / "config.toml")
        )
        before = np.mean([member.learner.test().accuracy for member in simulation.members])
        arena = simulation.arena()
        arena.average()
        after = np.mean([test.accuracy for test in arena.test()])
        found[matching] = after / before
    assert found["align"] > found["none"] + 0.2, found


def test_alignment_changes_no_peers_function(trained):
    config, folder = trained
    source = str(folder / "config.toml")
    plain = Swarm(config, source).members()
    aligned, _ = matched_members(Swarm(config, source))
    moved = 0
    for one, other in zip(plain, aligned, strict=True):
        x = one.learner.held_out[0]
        np.testing.assert_allclose(one.network(x).detach(), other.network(x).detach(), atol=1e-4)
        moved += int(not np.array_equal(one.network.flat, other.network.flat))
    assert moved == 3  # all but the first, who gives the order


def test_live_peers_with_networks_of_their_own_take_over_the_first_ones_order(tmp_path, trained):
    config, folder = trained
    specs = plan(config, tmp_path, BROKER, str(folder / "config.toml")).peers
    assert [spec.settings.founder for spec in specs] == [True, False, False, False]
    assert all(spec.settings.trained for spec in specs)
    assert [Path(spec.network).name for spec in specs] == [f"{i}.safetensors" for i in range(4)]
    assert "nets" not in specs[0].arguments["config"]
    ProcessSpec(BROKER, str(tmp_path), specs).write(tmp_path / "host.json")
    assert ProcessSpec.read(tmp_path / "host.json").peers[1] == specs[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"matching": "mix"}, "key 'models.0.matching': input should be 'none', 'align' or 'fuse'"),
        ({"matching": "align", "width": "64-9-10"}, "key 'models.0.width': is only for matching"),
        ({"bound": "64-9-10"}, "key 'models.0.bound': is only for matching"),
        ({"matching": "fuse"}, "key 'models.0.width': is missing"),
        ({"matching": "fuse", "width": "64-3-10"}, "peer 0: .*the common width allows 3"),
    ],
)
def test_mistakes_name_their_key(change, message):
    model = {"name": "all", "layout": "64-5-10"} | change
    table = {"peers": 2, "network": {"layout": "64=5=10"}, "models": [model]}
    with pytest.raises(ConfigError, match=message):
        Simulation.of(parse_config(table))


def test_what_cannot_be_matched_is_refused(tmp_path, trained):
    config = three_widths()
    models = [model.model_dump() for model in config.models]
    models[1]["width"] = "64-8-10"
    with pytest.raises(ConfigError, match=r"'models.1.width': models.0 says '64-9-10' of the same"):
        Swarm(three_widths(models=models))
    network = config.network.model_copy(update={"equal_starts": False})
    with pytest.raises(ConfigError, match="fuse starts all peers from common values"):
        Swarm(config.model_copy(update={"network": network}))
    associative = {
        "data": {"set": "sparse"}, "network": {"layout": "50<>400"},
        "models": [{"name": "all", "layout": "50-10", "matching": "align"}],
    }  # fmt: skip
    with pytest.raises(ConfigError, match="chains of dense layers"):
        Swarm(parse_config(associative))
    with pytest.raises(ConfigError, match="matching 'fuse' is not supported in virtual time"):
        LearningSimulation(three_widths(time={}))
    separately, folder = trained
    lockstep = separately.model_copy(update={"gossip": config.gossip})
    with pytest.raises(ConfigError, match='which only mode = "async" supports'):
        plan(lockstep, tmp_path, BROKER, str(folder / "config.toml"))
    with pytest.raises(ConfigError, match=r"network.trained': peer 0: .*there is no such file"):
        Swarm(separately, "elsewhere/config.toml").members()


def test_every_model_needs_the_first_peer_to_give_its_order(tmp_path):
    config = parse_config(
        {
            "peers": 4, "network": {"layout": "64=8=10", "equal_starts": False},
            "models": [{"name": "few", "layout": "64-8-10", "peers": [2, 3], "matching": "align"}],
        }
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"order of peer 0, but peer 0 does not implement 'few'"):
        plan(config, tmp_path, BROKER)


def test_a_device_joins_with_its_own_network(tmp_path):
    (tmp_path / "peer.toml").write_text(
        'name = "anna"\nentry = "device:make"\nnetwork = "own.safetensors"\n'
        'matching.all = {kind = "fuse", width = "64-9-10", bound = "64-12-10", seed = 4}\n'
    )
    spec = load_join(tmp_path / "peer.toml", BROKER).spec
    assert spec.network == str(tmp_path / "own.safetensors")
    assert spec.settings.trained
    assert spec.settings.matching == {"all": Matching("fuse", "64-9-10", "64-12-10", 4)}
    other = load_join(tmp_path / "peer.toml", BROKER, network=Path("b.safetensors")).spec
    assert other.network == "b.safetensors"


def test_a_device_that_is_a_peer_of_a_config_matches_as_it_says(tmp_path):
    (tmp_path / "swarm.toml").write_text(
        'peers = 2\nnetwork.layout = "64=5=10"\n'
        '[[models]]\nname = "all"\nlayout = "64-5-10"\nmatching = "align"\n'
    )
    (tmp_path / "peer.toml").write_text('name = "anna"\nconfig = "swarm.toml"\nindex = 1\n')
    spec = load_join(tmp_path / "peer.toml", BROKER).spec
    assert not spec.settings.trained
    assert spec.settings.matching["all"].kind == "align"
    (tmp_path / "peer.toml").write_text(
        'name = "anna"\nconfig = "swarm.toml"\nindex = 1\nmatching.all = {kind = "align"}\n'
    )
    with pytest.raises(ConfigError, match=r"key 'matching': .*swarm.toml defines how"):
        load_join(tmp_path / "peer.toml", BROKER)


def test_a_finished_swarm_is_fused_into_one_network(tmp_path, monkeypatch, capsys):
    fuse = runner(tmp_path, monkeypatch, capsys, "fuse")
    for index in range(3):
        member = Swarm(three_widths()).member(index)
        (tmp_path / "swarm").mkdir(exist_ok=True)
        member.network.save(tmp_path / "swarm" / f"{index}.safetensors")
    result = fuse("swarm", "-o", "swarm/one.safetensors")
    assert result.code == 0, result.err
    assert "64=5=10" in result.out
    assert "64=9=10" in result.out
    again = fuse("swarm", "-o", "swarm/one.safetensors", "--force")  # its own output is left out
    assert again.code == 0
    assert again.out.count("safetensors") == result.out.count("safetensors")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "0.checkpoint").touch()
    result = fuse("empty", "-o", "two.safetensors")
    assert result.code == 2
    assert "there is no network (*.safetensors) in this folder; its peers have not" in result.err


def test_the_studies_pictures_are_drawn_from_their_records(tmp_path):
    """From records written by hand: a swarm that keeps its accuracy, and one that loses it."""
    for kind, after in (("align", 0.8), ("none", 0.3)):
        (tmp_path / kind).mkdir()
        with (tmp_path / kind / "metrics.jsonl").open("w") as file:
            for peer in range(8):
                late = peer >= newcomers.FOUNDERS
                common = {"peer": str(peer), "phase": "training"}
                if late:
                    first = {"round": 0, "time": 10.0, "own_accuracy": 0.7, "counts": False}
                    file.write(json.dumps(common | first) + "\n")
                for number in range(1, 6):
                    moment = {"round": number, "time": (10 if late else 5) + number}
                    values = {"accuracy": after if late else 0.75, "counts": number > 1}
                    file.write(json.dumps(common | moment | values) + "\n")
    found = newcomers.summarise_newcomers(tmp_path / "none" / "metrics.jsonl")
    assert found["own"] == dict.fromkeys("4567", 0.7)
    assert found["first"] == found["worst"] == dict.fromkeys("4567", 0.3)
    assert found["curves"]["4"][:2] == [(0, 0.7), (1, 0.3)]
    assert found["curves"]["0"][0][0] == -3  # four rounds before the newcomers came
    records = [
        {"matching": kind} | newcomers.summarise_newcomers(tmp_path / kind / "metrics.jsonl")
        for kind in newcomers.MATCHINGS
    ]
    assert all(file.exists() for file in newcomers.draw_newcomers(tmp_path, records))
    rows = newcomers.newcomers_table(records)["summary"].set_index(["matching", "newcomer"])
    assert [*rows.loc["none", "4"]] == ["0.700", "0.300", "0.300", "0.300", "0.43"]


def test_widths_are_compared_after_the_last_round(tmp_path):
    lines = [
        json.dumps({"peer": str(peer), "round": number, "accuracy": value})
        for value in (0.1, 0.9)  # the test after convergence comes last
        for peer in range(6)
        for number in (2, 4)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    together = newcomers.tests_of(tmp_path / "metrics.jsonl")
    alone = [(peer, number, 0.1 * number) for peer, number, _ in together]
    records = [{"variant": "alone", "tests": alone}, {"variant": "together", "tests": together}]
    assert newcomers.curves(records).loc[60]["together"].to_dict() == {2: 0.9, 4: 0.9}
    rows = newcomers.widths_table(records)["summary"]
    assert rows.to_numpy().tolist() == [[str(w), "0.400", "0.900"] for w in newcomers.WIDTHS]
    assert all(file.exists() for file in newcomers.draw_widths(tmp_path, records))
