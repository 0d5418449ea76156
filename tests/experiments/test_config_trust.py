"""Trust in configs, in a peer's file and on the command line."""

from __future__ import annotations

import pytest
from papers_kit import Papers
from typer.testing import CliRunner

from gossamer.experiments.cli.app import app
from gossamer.experiments.config.tables import Config, ConfigError, parse_config
from gossamer.experiments.live.device import load_join
from gossamer.experiments.live.layout import plan
from gossamer.gossip.security import (
    Admission,
    GuardSettings,
    Identity,
    TrustError,
    check,
    public_text,
    read_public,
)
from gossamer.peer import AUTO_MODELS, BrokerAddress

BROKER = BrokerAddress("mqtt://x")
SMALL = {
    "name": "small",
    "peers": 3,
    "data": {"samples": 20},
    "network": {"layout": "64=12=10"},
    "models": [
        {"name": "global", "layout": "64-8-0"},
        {"name": "pair", "layout": "0-2-4", "peers": [0, 1]},
    ],
}


def test_a_name_stands_for_a_table_and_survives_json():
    config = parse_config({"trust": "swarm"})
    assert config.trust.kind == "swarm"
    assert config == parse_config({"trust": {"kind": "swarm"}})
    bounded = parse_config({"trust": {"kind": "swarm", "guards": {"distance": 2.0}}})
    assert bounded.trust.guards == GuardSettings(distance=2.0)
    assert parse_config(bounded.model_dump(mode="json")) == bounded
    assert parse_config({}).trust.kind == "none"


@pytest.mark.parametrize(
    ("trust", "text"),
    [
        ("everybody", "key 'trust.kind': input should be 'none' or 'swarm', not 'everybody'"),
        ({"kin": "swarm"}, "unknown key 'trust.kin'; did you mean 'kind'?"),
        ({"guards": {"distanc": 1}}, "key 'trust.guards': unknown key 'distanc'; did you mean"),
        ({"guards": {"distance": "far"}}, "key 'trust.guards': distance: "),
        ({"guards": {"distance": 0}}, "key 'trust.guards': guards: distance is 0"),
    ],
)
def test_mistakes_name_the_key(trust, text):
    with pytest.raises(ConfigError) as caught:
        parse_config({"trust": trust})
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_swarms_invitations_admit_to_what_each_peer_implements(tmp_path):
    config: Config = parse_config({**SMALL, "trust": "swarm", "gossip": {"mode": "server"}})
    spec = plan(config, tmp_path, BROKER)
    names = spec.peers[0].settings.expect
    for index, peer in enumerate(spec.peers):
        settings = peer.settings
        assert settings.identity is not None
        assert settings.invitation is not None
        assert settings.owner is not None
        key = tmp_path / "trust" / f"{index}.key"
        assert settings.identity == str(key)
        assert key.stat().st_mode & 0o777 == 0o600
        identity = Identity.load(key)
        assert (peer.name, names[index]) == (identity.label, identity.name)
        paper = Admission.load(tmp_path / "trust" / f"{index}.invitation", identity)
        terms = check(paper, read_public(settings.owner), "small", identity.name, identity.public)
        assert terms.admits("global")
        assert terms.admits("pair") is (index < 2)
        assert settings.servers["global"] in names
    again = plan(config, tmp_path, BROKER)
    assert set(again.peers[0].settings.expect).isdisjoint(names)  # thrown away


def test_a_swarm_that_decides_what_it_shares_is_invited_by_patterns(tmp_path):
    table = {**SMALL, "peers": 4, "models": [], "sharing": "auto", "trust": "swarm"}
    spec = plan(parse_config(table), tmp_path, BROKER)
    identity = Identity.load(tmp_path / "trust" / "3.key")
    paper = Admission.load(tmp_path / "trust" / "3.invitation", identity)
    owner = read_public(spec.peers[3].settings.owner or "")
    terms = check(paper, owner, "small", identity.name, identity.public)
    assert terms.models == {"global", *AUTO_MODELS}  # its own model, and those that plans may make
    for model in ("global", "global-0f", "group2-1-0f", "group2-1-0f&group3-0-0f", "statistics-a1"):
        assert terms.admits(model)
    assert not terms.admits("local-0-0f")


def test_a_swarm_without_trust_has_no_keys(tmp_path):
    spec = plan(parse_config(SMALL), tmp_path, BROKER)
    assert spec.peers[0].settings.expect == ("0", "1", "2")
    assert not (tmp_path / "trust").exists()


@pytest.fixture
def papers(tmp_path):
    made = Papers(tmp_path, swarm="garden")
    made.names("anna")
    return made


def test_a_peers_file_names_its_papers(tmp_path, papers):
    owner = public_text(papers.owner.public)
    file = tmp_path / "peer.toml"
    file.write_text(
        'entry = "m:f"\n[trust]\nidentity = "anna.key"\ninvitation = "anna.invitation"\n'
        f'owner = "{owner}"\nguards = "off"\n'
    )
    spec = load_join(file, BROKER).spec
    settings = spec.settings
    assert (spec.name, settings.trust, settings.guards) == ("anna", "swarm", "off")
    assert settings.identity == str(tmp_path / "anna.key")
    assert settings.invitation == str(tmp_path / "anna.invitation")
    assert settings.owner == owner
    said = load_join(file, BROKER, name="b", owner="another", invitation=str(tmp_path / "x")).spec
    assert (said.settings.owner, said.settings.invitation) == ("another", str(tmp_path / "x"))
    file.write_text('entry = "m:f"\n')
    given = load_join(file, BROKER, identity=str(tmp_path / "anna.key")).spec
    assert (given.name, given.settings.trust) == ("anna", "swarm")
    with pytest.raises(TrustError, match=r"gone\.key: cannot be read"):
        load_join(file, BROKER, identity=str(tmp_path / "gone.key"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--peer", "a"], "need --acl FOLDER"),
        (["--acl", "rules"], "--acl needs --swarm NAME and at least one --peer"),
        (["--acl", "rules", "--swarm", "g", "--peer", "a", "--user", "x:y"], "leave --user out"),
        (
            ["--acl", "rules", "--swarm", "g", "--peer", "a", "--kind", "x"],
            "write nats or mosquitto",
        ),
        (["--acl", "rules", "--kind", "mosquitto", "--embedded"], "--embedded means --kind nats"),
    ],
)
def test_rules_that_make_no_sense_are_refused(tmp_path, monkeypatch, arguments, text):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["broker", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert text in str(result.exception)
    assert not (tmp_path / "rules").exists()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"trust": {"kind": "swarm", "private": {"pair": 64.0}}},
            "'pair' must be shared by at least 3 peers",
        ),
        (
            {"trust": {"kind": "swarm", "private": {"x": 64.0}}},
            "'x' must be shared by at least 3 peers",
        ),
        ({"trust": {"private": {"global": 64.0}}}, "masks need trust"),
        (
            {"gossip": {}, "trust": {"kind": "swarm", "private": {"global": 64.0}}},
            'gossip.mode = "rounds"',
        ),
    ],
)
def test_masks_that_hide_nothing_are_refused(tmp_path, changes, text):
    config = parse_config({**SMALL, "gossip": {"mode": "rounds"}, **changes})
    with pytest.raises(ConfigError, match=r"key 'trust\.private'") as caught:
        plan(config, tmp_path, BROKER)
    assert text in str(caught.value)


def test_masks_cost_exchanges_on_a_graph(tmp_path):
    table = {**SMALL, "peers": 6, "topology": "ring", "gossip": {"mode": "rounds"}}
    masked = {"kind": "swarm", "private": {"global": 64.0}, "dp": {"clip": 1.0, "noise": 1.0}}
    spec = [
        plan(parse_config({**table, "models": SMALL["models"][:1], "trust": trust}), tmp_path,
             BROKER).peers[0].settings
        for trust in ("swarm", masked)
    ]  # fmt: skip
    assert spec[1].exchanges > spec[0].exchanges
    assert spec[1].private == {"global": 64.0}
    assert spec[1].dp is not None
