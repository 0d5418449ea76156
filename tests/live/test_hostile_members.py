"""Steady gossip on a real broker, with trust: hostile members, a crash and a newcomer."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import pytest
import torch
from trusting import Swarmlet
from waiting import until

from gossamer.experiments.config.tables import Config, Data, Gossip, Model, Network, Training, Trust
from gossamer.models import Metrics, SgdLearner

pytestmark = pytest.mark.live

PEERS, ROUNDS = 12, 30
HOSTILE, CRASHED, NEWCOMER = (3, 8), 5, 11


class Drifting:
    """A hostile member that raises the loss of its own samples, and sends values at the usual distance."""

    def __init__(self, inner: SgdLearner):
        self._inner, self.network = inner, inner.network

    def train(self, steps: int) -> Metrics:
        before = self.network.flat.clone()
        metrics = self._inner.train(steps)
        with torch.no_grad():
            self.network.flat.copy_(before - 2 * (self.network.flat - before))
        return metrics

    def test(self) -> Metrics:
        return self._inner.test()

    def state(self) -> dict[str, Any]:
        return self._inner.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._inner.restore(state)


class Spamming(Drifting):
    """A hostile member that does not train, so that its values come as fast as they are acknowledged."""

    def train(self, steps: int) -> Metrics:
        with torch.no_grad():
            self.network.flat.mul_(-1.0)
        return Metrics(0.0, 0, 1)


class Mislabelled(Drifting):
    """A hostile member that is honest but for the labels of its samples."""

    def __init__(self, inner: SgdLearner):
        super().__init__(inner)
        inputs, labels = inner.samples
        inner.samples = inputs, 9 - labels

    def train(self, steps: int) -> Metrics:
        return self._inner.train(steps)


def config() -> Config:
    return Config(
        name=f"steady-{secrets.token_hex(4)}", peers=PEERS, rounds=ROUNDS, test_every=ROUNDS,
        topology="regular:5", seed=3,
        data=Data(set="digits", samples=50, partition="iid"),
        network=Network(layout="64=32=10"),
        models=[Model(name="global", layout="64-32-10")],
        training=Training(local_samples=100, batch=25, rate=0.4),
        gossip=Gossip(mode="steady"),
        trust=Trust(kind="swarm"),
    )  # fmt: skip


async def lived(folder, url, *hostile: type[Drifting]) -> float:
    """Let the swarm live, with a crash and a newcomer; return the honest peers' mean accuracy.

    hostile: what the learners of the hostile members are; none if left out.
    """
    swarm = Swarmlet(config(), folder, url, expect=(), founder=None, silence=1.0)
    learners = {index: member.learner for index, member in enumerate(swarm.members)}
    for index, kind in zip(HOSTILE, hostile, strict=False):
        learners[index] = kind(learners[index])
    for index, learner in learners.items():
        if index != NEWCOMER:
            swarm.start(index, learner, checkpoint=index == CRASHED)

    def rounds(index: int) -> int:
        link = swarm.peers[index].link
        return 0 if link is None else link.view.round

    await until(lambda: rounds(CRASHED) >= 5)
    await swarm.crash(CRASHED)
    swarm.start(CRASHED, swarm.members[CRASHED].learner, checkpoint=True)
    await until(lambda: rounds(0) >= 10)
    swarm.start(NEWCOMER, learners[NEWCOMER])
    await swarm.reports()
    honest = [index for index in learners if index not in HOSTILE]
    return float(np.mean([swarm.members[index].learner.test().accuracy for index in honest]))


@pytest.mark.timeout(1200)
def test_two_hostile_members_of_twelve_cost_little(mosquitto, run, tmp_path):
    clean = run(lived(tmp_path / "clean", mosquitto.url))
    attacked = run(lived(tmp_path / "attacked", mosquitto.url, Drifting, Spamming))
    mislabelled = run(lived(tmp_path / "labels", mosquitto.url, Mislabelled, Mislabelled))
    print(
        f"honest mean {clean:.3f}; {attacked:.3f} with drift and spam, {mislabelled:.3f} with wrong labels"
    )
    assert clean > 0.75
    assert attacked > clean - 0.1
    assert mislabelled > clean - 0.1
