"""MOCHA's nodes as live peers, on a broker in memory."""

from __future__ import annotations

import numpy as np
import pytest
from peer_kit import Nest, held, quick

from gossamer.models import average
from gossamer.models.multitask import LinearTask, MultiTaskLearner, MultiTaskOptions

NAMES = ("a", "b", "c")


def node(index: int) -> MultiTaskLearner:
    random = np.random.default_rng(index)
    x = random.standard_normal((20, 4))
    y = np.where(x @ np.array([1.0, -1.0, 0.5, 0.1 * index]) > 0, 1.0, -1.0)
    task = LinearTask(x, y)
    return MultiTaskLearner(task, task, index, 3, MultiTaskOptions(0.05, 0.05), every=2)


@pytest.mark.parametrize("mode", ["rounds", "async"])
def test_nodes_agree_on_everybodys_part_without_a_server(run, mode):
    nodes = [node(index) for index in range(3)]

    async def swarm():
        nest = Nest(quick(mode=mode, expect=NAMES, founder=True, dtype="float64"))
        for name, learner in zip(NAMES, nodes, strict=True):
            nest.start(name, learner)
        return await nest.all()

    reports = run(swarm())
    assert held(reports, "tasks") == 3
    true = np.stack([learner._node.v for learner in nodes], axis=1)
    for learner in nodes:
        np.testing.assert_allclose(learner._estimated_v(), true, rtol=1e-3, atol=1e-3)
        assert learner.test().accuracy > 0.8
    if mode == "rounds":
        twins = [node(index) for index in range(3)]
        for _ in range(6):
            for twin in twins:
                twin.train(1)
            average([twin.network for twin in twins])
        for learner, twin in zip(nodes, twins, strict=True):
            np.testing.assert_allclose(learner.weights(), twin.weights(), rtol=1e-4, atol=1e-4)
