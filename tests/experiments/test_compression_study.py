"""The keys `compress` and `drift` of a config, and the study's table and picture."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from gossamer.experiments.config.tables import ConfigError, parse_config
from gossamer.experiments.live import plan
from gossamer.experiments.papers.compression_study import Finding, paper_compression, report, runs
from gossamer.peer import BrokerAddress

SHARED = {"models": [{"name": "global", "layout": "64-20-0"}], "peers": 2}


@pytest.mark.parametrize(
    ("gossip", "words"),
    [
        ({"compress": "int9"}, "key 'gossip.compress': int9: values have 2 to 8 bits"),
        ({"compress": "top-k:2"}, "key 'gossip.compress': top-k:2: the part"),
        ({"compress": 8}, "key 'gossip.compress'"),
        ({"drift": -0.5}, "key 'gossip.drift': drift is -0.5"),
        ({"drift": "much"}, "key 'gossip.drift': should be a relative distance"),
    ],
)
def test_bad_values_name_the_key(gossip, words):
    with pytest.raises(ConfigError, match=words):
        parse_config({**SHARED, "gossip": gossip})


@pytest.mark.parametrize(
    ("gossip", "words"),
    [
        ({"compress": "low-rank:60"}, "model 'global': low-rank:60 makes no block shorter"),
        ({"compress": "int8", "dtype": "float16"}, "cannot be combined with gossip.dtype"),
        ({"drift": 0.1, "mode": "server"}, 'use mode = "async"'),
        ({"drift": {"nobody": 0.1}}, "no peers share a model 'nobody'; there are global"),
    ],
)
def test_what_does_not_fit_the_swarm_is_refused_before_it_starts(tmp_path, gossip, words):
    config = parse_config({**SHARED, "gossip": gossip})
    with pytest.raises(ConfigError, match=words):
        plan(config, tmp_path, BrokerAddress("mqtt://127.0.0.1"))


def test_settings_reach_the_peers(tmp_path):
    gossip = {"compress": "top-k:0.1+int8", "drift": {"global": 0.1}}
    config = parse_config({**SHARED, "gossip": gossip})
    spec = plan(config, tmp_path, BrokerAddress("mqtt://127.0.0.1"))
    assert spec.peers[0].settings.compress == "top-k:0.1+int8"
    assert spec.peers[0].settings.drift == {"global": 0.1}


def test_every_mode_has_its_twin_first():
    for quick in (True, False):
        seen = {}
        for run in runs(quick):
            seen.setdefault(run.mode, run.what)
        assert set(seen.values()) == {"uncompressed"}


def test_an_unknown_line_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no line 'zip'; lines are 'uncompressed'"):
        paper_compression(tmp_path, only=["zip"])


def test_report_is_drawn_from_the_file(tmp_path, capsys):
    findings = [
        Finding("rounds", "uncompressed", 0.9, 0.0, 4_000_000, 1.0, 0.0, 0.0, 0),
        Finding("rounds", "int8", 0.89, 0.01, 1_000_000, 4.0, 0.001, 0.01, 0),
    ]
    lines = [json.dumps(asdict(finding)) for finding in findings]
    (tmp_path / "runs.jsonl").write_text("\n".join(lines))
    (tmp_path / "rounds-uncompressed").mkdir()
    (tmp_path / "rounds-uncompressed" / "config.json").write_text('{"rounds": 7}')
    files = report(tmp_path)
    assert all(file.stat().st_size > 100 for file in files)
    assert "4.00" in files[0].read_text()
    assert "7 rounds" in capsys.readouterr().out
