"""Real processes that compress, beside their uncompressed twin."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from swarm_kit import small_config, small_swarm

from gossamer.experiments.config.tables import Model, Network, Training
from gossamer.experiments.live.run import accuracies_by_round, collect
from gossamer.experiments.results import RecordFile
from gossamer.peer import LocalSwarm

pytestmark = pytest.mark.live


def outcome_of(folder, url, **gossip):
    changes = {
        "network": Network(layout="64=200=10", activation="tanh", output="sigmoid"),
        "training": Training(local_samples=40, rate=0.03, loss="squared", reduction="sum"),
        "models": [Model(name="global", layout="64-200-0")],
    }
    config = small_config(4, 12, mode="rounds", per_process=2, **gossip).model_copy(update=changes)
    spec = small_swarm(config, folder, url)
    with RecordFile(folder / "metrics.jsonl") as file:
        asyncio.run(LocalSwarm(spec, on_record=file.write).run())
    return collect(config, spec, [])


@pytest.mark.timeout(600)
def test_int8_takes_a_quarter_of_the_bytes_and_hardly_shows(tmp_path, mosquitto):
    plain = outcome_of(tmp_path / "plain", mosquitto.url)
    packed = outcome_of(tmp_path / "int8", mosquitto.url, compress="int8")
    accuracies = [float(np.mean(list(each.accuracy.values()))) for each in (plain, packed)]
    assert plain.bytes > 3.5 * packed.bytes > 0
    assert accuracies[0] > 0.5  # they have learnt something that could be lost
    assert abs(accuracies[0] - accuracies[1]) <= 0.05
    for held, injected in (*plain.weight.values(), *packed.weight.values()):
        assert held == injected == 4
    assert packed.consensus["global"] < 0.01
    assert 0 < packed.traffic.mean_distortion < 0.01
    assert plain.traffic.messages == 0
    assert accuracies_by_round(tmp_path / "int8" / "metrics.jsonl")
