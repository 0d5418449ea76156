"""Every setting is declared once, and `swarm` and `join` compute the same settings from the same config."""

from __future__ import annotations

import importlib
import inspect
import json
import pickle
import pkgutil
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
from cli_kit import runner
from papers_kit import Papers
from pydantic import BaseModel, ValidationError

from gossamer import gossip, peer
from gossamer.experiments import config, federated
from gossamer.experiments.config.tables import ConfigError, load_config, parse_config
from gossamer.experiments.live.device import load_join
from gossamer.experiments.live.layout import plan
from gossamer.experiments.study.sweep import expand
from gossamer.gossip import LinkSettings, MqttOptions
from gossamer.gossip.security import public_text
from gossamer.models import fednp
from gossamer.peer import BrokerAddress, PeerSpec, ProcessSpec, Settings, SwarmSpec

URL = "mqtt://127.0.0.1:1"
BROKER = BrokerAddress(URL)
BASE: dict[str, Any] = {
    "peers": 3,
    "data": {"samples": 20},
    "network": {"layout": "64=12=10"},
    "models": [{"name": "global", "layout": "64-8-0"}],
}
DIFFERENT_STARTS = {
    "network": {"layout": "64=12=10", "equal_starts": False},
    "models": [{"name": "global", "layout": "64-8-10", "matching": "align"}],
}
TRUST: dict[str, Any] = {"trust": {"kind": "swarm"}}
MASKED = {"gossip": {"mode": "rounds"}, "trust": {"kind": "swarm", "private": {"global": 64.0}}}

TOGETHER: dict[str, Any] = {
    "rounds": 7,
    "every": 2,
    "test_every": 3,
    "weights": "samples",
    "callbacks": ["gossamer.models:EarlyStopping"],
    "gossip": {
        "banned": ["eve"], "fraction": 0.25, "dtype": "float64", "drift": {"global": 0.05}, "lease": 77,
        "asleep": 7, "round_every": 7, "silence": 3, "start_timeout": 7, "settle_tolerance": 0.01,
        "settle_timeout": 7, "leave_timeout": 7, "checkpoint": False, "save_every": 7, "tick": 0.5,
        "save_network_every": 7,
    },
}  # fmt: skip
"""Settings that one config can have together."""
CASES: dict[str, dict[str, Any]] = {
    **dict.fromkeys([*TOGETHER.keys() - {"gossip"}, *TOGETHER["gossip"]], TOGETHER),
    "gain": {"gain": 1.0},
    "sharing": {"sharing": "auto", "models": []},
    "prior": {"training": {"prior": "auto"}},
    "mode": {"gossip": {"mode": "rounds"}},
    "robust": {"gossip": {"mode": "rounds", "robust": "trimmed"}},
    "hostile": {"gossip": {"mode": "steady", "hostile": 1}, "peers": 6},
    "compress": {"gossip": {"compress": "int8"}},
    "exchanges": {"topology": "ring", "peers": 5, "gossip": {"mode": "rounds"}},
    "neighbours": {"topology": "ring", "peers": 5},
    "hops": {"topology": "ring", "peers": 5},
    "sources": {"topology": "exponential", "peers": 6, "gossip": {"mode": "rounds"}},
    "turns": {"topology": "one-peer-exponential", "peers": 4},
    "servers": {"gossip": {"mode": "server"}},
    "expect": {},
    "founder": DIFFERENT_STARTS,
    "trained": DIFFERENT_STARTS,
    "matching": DIFFERENT_STARTS,
    "guards": {"trust": {"guards": {"distance": 2.0}}},
    "private": MASKED,
    "dp": {"trust": {"dp": {"clip": 1.0, "noise": 1.0}}},
    "swarm": {"name": "garden"},
    "trust": TRUST,
    "identity": TRUST,
    "invitation": TRUST,
    "owner": TRUST,
}
LINK = {"connect_timeout": 7, "keepalive": 7, "max_packet": 4096}
COMMAND_LINE_ONLY = {"replace"}
DEVICE_FILE_ONLY = {"discovery", "samples_folder", "window"}

DECLARED_MORE_THAN_ONCE = {
    "exchanges": {
        "NeighbourSettings",
        "Gossip",
        "ArenaMethod",
    },  # a config may leave it to the graph
    "trust": {"Settings", "Config", "JoinConfig"},  # in files it is a table with a kind
    "gain": {"ScheduleSettings", "Network"},  # what a peer gains; the scale of starting weights
    "matching": {"MatchingSettings", "Model"},  # a config says it of each of its models
    "trained": {"Settings", "Network"},  # a config names the files of trained networks
    "max_packet": {"LinkSettings", "BrokerSettings"},  # the limit of a broker that is started
    "swarm": {"Settings", "SwarmSpec"},  # the processes of one machine have one too
    "per_process": {"Gossip", "SwarmSpec"},
    "broker": {"ProcessSpec", "SwarmSpec"},
    "folder": {"ProcessSpec", "SwarmSpec"},
    "entry": {"Network", "PeerSpec", "JoinConfig"},  # a network's function; a peer's learner
    "arguments": {"PeerSpec", "JoinConfig"},
    "samples": {"Data", "PeerSpec", "JoinConfig"},  # a config's are per peer, a peer's are its own
    "seed": {"Experiment", "PeerSpec", "JoinConfig"},
    "network": {"Experiment", "PeerSpec", "JoinConfig"},  # a table; the file of a trained one
    "rate": {"Training", "Method", "GuardSettings"},  # a method may have its own; messages a second
    "epochs": {"Training", "Method"},  # a method may have its own
    "topology": {  # methods of one comparison have several
        "Config",
        "GossipSgd",
        "PartialModels",
        "AutoPartialModels",
    },
    "compress": {"WireSettings", "ServerMethod"},  # with a server, what is left out is lost
    "dtype": {"WireSettings", "Training"},  # of messages; of the values that are trained
    "share": {"Model", "PartialModels"},
    "buffers": {"Network", "PartialModels"},  # a method may have its own
    "pushes": {"GossipSgd", "Downpour"},  # to a peer; to the server
    "server_rate": {"Scaffold", "Downpour"},  # they differ in what is usual
    "mu": {"FedProx", "Moon"},  # the letter of both papers, for different terms
}
"""Keys that are declared in more than one table, and why; the keys of EVERYWHERE are left out."""
EVERYWHERE = {"name", "kind", "peers", "layout", "start", "alpha", "batch", "loss", "training"}
"""Keys that mean something else in each table."""


def settings_classes() -> Iterator[type]:
    """All tables of settings, and the plans of processes: of peers, configs, devices' files, comparisons."""
    found = ["gossamer.experiments.live.device"]
    for package in (config, federated, fednp, gossip, peer):
        within = f"{package.__name__}."
        found += [one.name for one in pkgutil.walk_packages(package.__path__, within)]
    for module in (importlib.import_module(name) for name in found if "__main__" not in name):
        for each in vars(module).values():
            own = isinstance(each, type) and each.__module__ == module.__name__
            if own and not each.__name__.startswith("_"):  # as the check of what a record holds
                plan = is_dataclass(each) and each.__name__.endswith(
                    ("Settings", "Spec", "Options")
                )
                if plan or issubclass(each, BaseModel):
                    yield each


def toml(table: dict[str, Any], above: str = "") -> Iterator[str]:
    """Lines `a.b = value`; the values here are the same in JSON and TOML."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from toml(value, f"{above}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            inside = (", ".join(toml(each)) for each in value)
            yield f"{above}{key} = [{', '.join(f'{{{one}}}' for one in inside)}]"
        else:
            yield f"{above}{key} = {json.dumps(value)}"


def write(path: Path, table: dict[str, Any]) -> Path:
    path.write_text("\n".join(toml(table)) + "\n")
    return path


def planned(folder: Path, changes: dict[str, Any]) -> SwarmSpec:
    """Return what `swarm` runs with the base config and these changes."""
    file = write(folder / "swarm.toml", BASE | changes)
    return plan(load_config(file), folder / "out", BROKER, str(file))


def both(
    folder: Path, changes: dict[str, Any], **device: Any
) -> Iterator[tuple[PeerSpec, PeerSpec, BrokerAddress, BrokerAddress]]:
    """Yield each peer's spec by `swarm` and by `join`, then its broker's address by `swarm` and by `join`."""
    spec = planned(folder, changes)
    for index, one in enumerate(spec.peers):
        own = {"config": "swarm.toml", "index": index} | device
        if one.settings.trust == "swarm":
            keys = ("identity", "invitation", "owner")
            own["trust"] = {key: getattr(one.settings, key) for key in keys}
            own["expect"] = list(
                one.settings.expect
            )  # with trust, names contain ids that are not in the config
        joined = load_join(write(folder / "peer.toml", own), BROKER)
        yield one, joined.spec, spec.broker, joined.broker


def test_every_setting_has_a_case() -> None:
    assert CASES.keys() | COMMAND_LINE_ONLY | DEVICE_FILE_ONLY == Settings.model_fields.keys()
    assert LINK.keys() == LinkSettings.model_fields.keys()


@pytest.mark.parametrize(
    "changes", {id(case): case for case in CASES.values()}.values(), ids=lambda one: "+".join(one)
)
def test_swarm_join_and_a_child_process_give_a_peer_the_same_settings(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    specs = []
    for swarm, join, _, _ in both(tmp_path, changes):
        assert join == swarm
        specs.append(swarm)
    for key in (key for key, case in CASES.items() if case is changes):
        default = Settings.model_fields[key].default
        # Else the case would test nothing.
        assert any(getattr(spec.settings, key) != default for spec in specs), key
    host = ProcessSpec(BROKER, "out", specs)
    host.write(tmp_path / "host.json")
    assert ProcessSpec.read(tmp_path / "host.json") == host
    assert pickle.loads(pickle.dumps(specs[0].settings)) == specs[0].settings


@pytest.mark.parametrize("key", LINK)
def test_swarm_and_join_reach_the_broker_in_the_same_way(tmp_path: Path, key: str) -> None:
    for _, _, swarm, join in both(tmp_path, {"gossip": {key: LINK[key]}}):
        assert join == swarm
        assert getattr(join, key) == LINK[key]


def test_no_knob_is_declared_twice() -> None:
    declared: dict[str, set[str]] = {}
    for each in settings_classes():
        known = getattr(each, "model_fields", None) or inspect.get_annotations(each)
        for key in inspect.get_annotations(each).keys() & known:
            declared.setdefault(key, set()).add(each.__name__)
    twice = {key: classes for key, classes in declared.items() if len(classes) > 1}
    assert {key: twice[key] for key in twice.keys() - EVERYWHERE} == DECLARED_MORE_THAN_ONCE
    assert {*Settings.model_fields, *BrokerAddress.model_fields} <= declared.keys()


def test_no_table_declares_again_what_it_inherits() -> None:
    for each in settings_classes():
        inherited = {key for base in each.__mro__[1:] for key in inspect.get_annotations(base)}
        fields = getattr(each, "model_fields", {}).keys()
        assert not inspect.get_annotations(each).keys() & inherited & fields, each


def test_a_sweep_varies_the_keys_of_a_config_and_has_one_of_its_own() -> None:
    axes = {"training.rate": [0.1, 0.2], "data.total": [300, 400], "seeds": 2}
    cells = expand(parse_config(BASE | {"data": {}, "sweep": axes}))
    assert [len(cells), {*cells[0].settings}] == [8, {"training.rate", "data.total", "seed"}]


def test_every_knob_has_a_docstring() -> None:
    for table in settings_classes():
        if issubclass(table, BaseModel):
            bare = [key for key, field in table.model_fields.items() if not field.description]
            assert bare == [], table


def test_a_connection_is_tried_equally_long_everywhere() -> None:
    assert MqttOptions().connect_timeout == BROKER.connect_timeout == 15.0


def test_settings_are_checked_and_cannot_be_changed() -> None:
    settings = Settings(neighbours=["a", "b"], rounds=3)
    assert settings.neighbours == ("a", "b")
    with pytest.raises(ValidationError, match="frozen"):
        settings.rounds = 4  # type: ignore[misc]
    with pytest.raises(ValidationError, match="rounds"):
        settings.updated(rounds=0)
    with pytest.raises(ValidationError, match="wieghts"):
        Settings(wieghts="samples")  # type: ignore[call-arg]
    assert settings.updated(lease=5.0) == Settings(neighbours=("a", "b"), rounds=3, lease=5.0)


# A device's file and the command line override the config.


def device(folder: Path, swarm: dict[str, Any], **own: Any) -> Path:
    write(folder / "swarm.toml", BASE | swarm)
    return write(folder / "anna.toml", {"config": "swarm.toml", "index": 1} | own)


def test_the_command_line_overrides_the_file_and_the_file_overrides_the_config(tmp_path) -> None:
    swarm = {"rounds": 7, "gossip": {"lease": 70, "keepalive": 7, "tick": 0.5}}
    file = device(tmp_path, swarm, name="anna", lease=80, keepalive=8)
    given = BrokerAddress(URL, keepalive=9)
    found = load_join(file, given, swarm="mine", replace=True)
    settings = found.spec.settings
    assert (settings.rounds, settings.lease, settings.tick) == (7, 80.0, 0.5)
    assert (settings.swarm, settings.replace, found.broker.keepalive) == ("mine", True, 9)
    origins = {key: found.origins.get(key) for key in ("rounds", "lease", "swarm", "every")}
    assert origins == {
        "rounds": "config", "lease": "device file", "swarm": "command line", "every": None,
    }  # fmt: skip
    assert found.origins["keepalive"] == "command line"
    assert load_join(file, BROKER).broker.keepalive == 8
    # The settings contain the name of this device.
    assert found.spec.name == "anna"
    assert settings.expect == ("0", "anna", "2")


def test_a_device_has_its_name_in_the_config_unless_another_is_given(tmp_path, capsys) -> None:
    assert load_join(device(tmp_path, {}), BROKER).spec.name == "1"
    assert capsys.readouterr().err == ""
    assert load_join(device(tmp_path, {}), BROKER, name="anna").spec.name == "anna"
    assert "is named '1' in the other peers' settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("swarm", "own", "key"),
    [
        ({"gossip": {"mode": "rounds"}}, {"mode": "async"}, "mode"),
        ({}, {"weights": "samples"}, "weights"),
        ({"gossip": {"dtype": "float64"}}, {"dtype": "float32"}, "dtype"),
        (TRUST, {"trust": {"kind": "none"}}, "trust.kind"),
        ({}, {"trust": {"kind": "swarm"}}, "trust.kind"),
        ({}, {"trust": {"private": {"global": 64.0}}}, "trust.private"),
    ],
)
def test_settings_that_must_be_common_cannot_be_overridden(tmp_path, swarm, own, key) -> None:
    file = device(tmp_path, swarm, **own)
    with pytest.raises(ConfigError) as caught:
        load_join(file, BROKER)
    line = str(caught.value)
    assert line.startswith(f"{file}: key '{key}': ")
    assert str(tmp_path / "swarm.toml") in line
    assert "\n" not in line
    same = {"mode": "rounds"} if key == "mode" else {}
    load_join(device(tmp_path, swarm if same else {}, **same), BROKER)  # the same value is allowed


@pytest.fixture
def papers(tmp_path: Path) -> Papers:
    made = Papers(tmp_path, swarm="swarm")
    made.names("anna")
    return made


def credentials(papers: Papers) -> dict[str, str]:
    owner = public_text(papers.owner.public)
    return {"identity": "anna.key", "invitation": "anna.invitation", "owner": owner}


def test_a_configs_trust_is_never_left_out(tmp_path, papers) -> None:
    with pytest.raises(
        ConfigError, match=r"anna.toml: key 'trust.identity': .*swarm.toml has trust"
    ):
        load_join(device(tmp_path, TRUST), BROKER)
    some = {"identity": "anna.key", "owner": "x"}
    with pytest.raises(ConfigError, match="needs the device's invitation: give them in"):
        load_join(device(tmp_path, TRUST, trust=some), BROKER)
    found = load_join(device(tmp_path, TRUST, trust=credentials(papers), expect=[]), BROKER)
    assert found.spec.settings.trust == "swarm"
    # A key is refused if the config has no trust.
    with pytest.raises(ConfigError, match=r"key 'trust.kind': .*swarm.toml"):
        load_join(device(tmp_path, {}), BROKER, identity=str(tmp_path / "anna.key"))


@pytest.mark.parametrize(
    ("swarm", "own", "key"),
    [
        (TRUST, {}, "expect"),
        (TRUST | {"topology": "ring"}, {"expect": []}, "neighbours"),
        (TRUST | {"gossip": {"mode": "server"}}, {"expect": []}, "servers"),
    ],
)
def test_names_of_peers_with_keys_must_be_set_in_the_file(
    tmp_path, papers, swarm, own, key
) -> None:
    file = device(tmp_path, swarm, trust=credentials(papers), **own)
    with pytest.raises(ConfigError, match=rf"anna.toml: key '{key}': .*label@id.*: set {key} to"):
        load_join(file, BROKER)


def test_a_device_that_does_not_wait_for_all_others_is_no_founder(tmp_path) -> None:
    assert load_join(device(tmp_path, {}), BROKER).spec.settings.founder is True
    assert load_join(device(tmp_path, {}, expect=[]), BROKER).spec.settings.founder is None
    assert load_join(device(tmp_path, {}, expect=["2", "0"]), BROKER).spec.settings.founder is True
    network = Path("own.safetensors")
    trained = load_join(device(tmp_path, {}), BROKER, network=network).spec.settings
    assert (trained.founder, trained.trained) == (None, True)
    stated = device(tmp_path, {}, expect=[], founder=True)
    assert load_join(stated, BROKER).spec.settings.founder is True


def test_a_devices_file_makes_it_appear_in_home_assistant(tmp_path) -> None:
    assert load_join(device(tmp_path, {}, discovery=True), BROKER).spec.settings.discovery is True
    assert load_join(device(tmp_path, {}), BROKER).spec.settings.discovery is False


def test_each_device_draws_its_own_neighbours(tmp_path) -> None:
    file = write(tmp_path / "peer.toml", {"entry": "m:f"})
    seeds = [load_join(file, BROKER, name=name).spec.seed for name in ("anna", "ben", "anna")]
    assert seeds[0] == seeds[2] != seeds[1]
    assert 0 not in seeds
    write(file, {"entry": "m:f", "seed": 5})
    assert load_join(file, BROKER, name="anna").spec.seed == 5
    assert load_join(device(tmp_path, {}), BROKER).spec.seed == 1
    found = load_join(device(tmp_path, {}, samples=9), BROKER)
    assert (found.spec.samples, found.origins["samples"]) == (9, "device file")
    assert found.origins["seed"] == "config"


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"config": "swarm.toml"}, "key 'index': say which peer of .*swarm.toml .*, 0 to 2"),
        ({"config": "swarm.toml", "index": 3}, "key 'index': say which peer"),
        ({"entry": "m:f", "index": 1}, "key 'index' is only used with 'config'; remove it"),
        (
            {"config": "swarm.toml", "index": 1, "arguments": {"a": 1}},
            "key 'arguments' is only used with 'entry'; remove it",
        ),
    ],
)
def test_a_device_with_a_config_needs_a_valid_index(tmp_path, own, words) -> None:
    write(tmp_path / "swarm.toml", BASE)
    with pytest.raises(ConfigError, match=words):
        load_join(write(tmp_path / "anna.toml", own), BROKER)


def test_a_device_without_a_config_states_any_setting(tmp_path) -> None:
    own = {"entry": "m:f", "name": "anna", "every": 3, "settle_tolerance": 0.1, "test_every": 2}
    places = {"servers": {"global": "ben"}, "sources": ["ben"], "turns": [["ben"], ["carl"]]}
    settings = load_join(write(tmp_path / "peer.toml", own | places), BROKER).spec.settings
    assert (settings.every, settings.settle_tolerance, settings.test_every) == (3, 0.1, 2)
    assert settings.turns == (("ben",), ("carl",))
    assert settings.sources == ("ben",)
    write(tmp_path / "peer.toml", own | {"weigh": "samples"})
    with pytest.raises(ConfigError, match="unknown key 'weigh'; did you mean 'weights'"):
        load_join(tmp_path / "peer.toml", BROKER)


# --show-settings


def table(text: str) -> dict[str, tuple[str, str]]:
    """Value and source by setting."""
    rows = [line.split("  ") for line in text.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    return {row[0]: (row[1], row[2]) for row in cells if len(row) == 3}


def test_the_origin_of_an_entry_point_is_the_devices_file(tmp_path) -> None:
    own = {"name": "anna", "entry": "my_device:make_learner"}
    assert load_join(write(tmp_path / "peer.toml", own), BROKER).origins["entry"] == "device file"


def test_join_shows_every_setting_and_its_source(tmp_path, monkeypatch, capsys) -> None:
    swarm = {"rounds": 7, "topology": "ring", "gossip": {"lease": 70, "keepalive": 7}}
    device(tmp_path, swarm, lease=80)
    monkeypatch.setenv("GOSSAMER_BROKER_PASSWORD", "secret")
    run = runner(tmp_path, monkeypatch, capsys, "join")
    result = run(
        *("--broker", "mqtt://anna@127.0.0.1:1", "--swarm", "mine", "--config", "anna.toml"),
        *("--max-packet", "700", "--replace", "--show-settings"),
    )
    assert result.code == 0
    shown = table(result.out)
    assert {*Settings.model_fields, *BrokerAddress.model_fields, "samples", "seed"} <= shown.keys()
    assert shown["rounds"] == ("7", "config")
    assert shown["lease"] == ("80.0", "device file")
    assert shown["max_packet"] == ("700", "command line")
    assert shown["replace"] == ("true", "command line")
    assert shown["neighbours"] == ("[0, 2]", "config")
    assert shown["keepalive"] == ("7", "config")
    assert shown["tick"] == ("0.05", "default")
    assert shown["password"] == ("(hidden)", "environment")
    assert "secret" not in result.out + result.err
    assert not (tmp_path / "results").exists()


def test_swarm_shows_one_peer_and_what_differs(tmp_path, monkeypatch, capsys) -> None:
    write(tmp_path / "swarm.toml", BASE | TRUST | {"topology": "ring", "gossip": {"lease": 70}})
    run = runner(tmp_path, monkeypatch, capsys, "swarm")
    result = run("swarm.toml", "--show-settings", "--keepalive", "9", "-o", "there")
    assert result.code == 0
    shown = table(result.out)
    assert {*Settings.model_fields, *BrokerAddress.model_fields} <= shown.keys()
    assert shown["lease"] == ("70.0", "config")
    assert shown["keepalive"] == ("9", "command line")
    assert shown["neighbours"] == ("[1, 2]", "config, differs per peer")
    assert shown["training.rate"] == ("0.1", "default")
    assert shown["out"] == ("there", "command line")
    assert shown["url"] == ("(a broker is started)", "default")
    assert not (tmp_path / "there").exists()  # no keys were made


def test_simulate_shows_its_config(tmp_path, monkeypatch, capsys) -> None:
    write(tmp_path / "swarm.toml", BASE | {"rounds": 7})
    result = runner(tmp_path, monkeypatch, capsys, "simulate")("swarm.toml", "--show-settings")
    assert result.code == 0
    shown = table(result.out)
    assert shown["rounds"] == ("7", "config")
    assert shown["gossip.lease"] == ("600.0", "default")
    assert shown["models.0.layout"] == ("64-8-0", "config")
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("option", "value"), [("--ca", "x.pem"), ("--mqtt", "5"), ("--password-file", "p")]
)
def test_options_of_a_broker_need_one(tmp_path, monkeypatch, capsys, option, value) -> None:
    write(tmp_path / "swarm.toml", BASE)
    result = runner(tmp_path, monkeypatch, capsys, "swarm")("swarm.toml", option, value)
    assert result.code == 2
    assert f"{option}: is for a broker named by --broker" in result.err
