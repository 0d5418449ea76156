"""The keys `compress` and `drift` of a config, and the study's table and picture."""

from __future__ import annotations

import pytest

from gossamer.experiments.config.tables import ConfigError, parse_config
from gossamer.experiments.live.layout import plan
from gossamer.experiments.papers import PAPERS
from gossamer.experiments.papers.live import compression_table, draw_compression
from gossamer.peer import BrokerAddress

SHARED = {"models": [{"name": "global", "layout": "64-20-0"}], "peers": 2}


@pytest.mark.parametrize(
    ("gossip", "words"),
    [
        ({"compress": "int9"}, "key 'gossip.compress': int9: values have 2 to 8 bits"),
        ({"compress": "top-k:2"}, "key 'gossip.compress': top-k:2: the fraction"),
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
        ({"drift": {"nobody": 0.1}}, "no peers share a model 'nobody'; shared models: global"),
    ],
)
def test_what_does_not_fit_the_swarm_is_refused_before_it_starts(tmp_path, gossip, words):
    config = parse_config({**SHARED, "gossip": gossip})
    with pytest.raises(ConfigError, match=words):
        plan(config, tmp_path, BrokerAddress("mqtt://127.0.0.1"))


@pytest.mark.parametrize("quick", [True, False])
def test_every_mode_has_its_baseline_first(quick):
    study = PAPERS["compression"].study(quick=quick)
    first = {}
    for cell in study.cells:
        first.setdefault(cell.gossip.mode, cell.line)
    assert set(first.values()) == {"uncompressed"}
    chosen = study.only(["int8"]).cells
    assert {cell.line for cell in chosen} == {"int8", "uncompressed"}
    assert len({cell.name for cell in study.cells}) == len(study.cells)


def test_swarms_are_compared_with_their_baselines(tmp_path):
    common = {"mode": "rounds", "distortion": 0.001, "worst": 0.01, "skipped": 0}
    records = [
        {"compressor": "uncompressed", "accuracy": 0.9, "bytes": 4_000_000, **common},
        {"compressor": "int8", "accuracy": 0.89, "bytes": 1_000_000, **common},
    ]
    rows = compression_table(records)["summary"].set_index("compressor")
    assert [*rows.loc["int8"]][1:5] == ["0.890", "+0.010", "1.00", "4.00"]
    assert all(file.stat().st_size > 100 for file in draw_compression(tmp_path, records))
