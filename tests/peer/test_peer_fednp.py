"""FedNP in live peers, on a broker in memory: cavities by gossip are those that a server would send."""

from __future__ import annotations

import pytest
import torch
from peer_kit import Gate, Nest, held, injected, make_learner, quick

from gossamer.gossip import FaultPlan, MemoryBroker
from gossamer.models.fednp import SITES, FedNPLearner, FedNPOptions, server_cavities

NAMES = ("a", "b", "c", "d")
FAULTS = FaultPlan(loss=0.1, duplicate=0.1, reorder=0.2, delay=(0, 3))
OPTIONS = FedNPOptions(dimensions=3, hidden=4, batch=8, strength=0.05)


class Held(FedNPLearner):
    """Trains as far as its gate lets it."""

    gate: Gate

    def train(self, steps: int = 1):
        self.gate(self.gate.reached + 1)
        return super().train(steps)


def wrapped(name: str, kind: type[FedNPLearner] = FedNPLearner) -> FedNPLearner:
    return kind(make_learner(name), OPTIONS, counting_peer=name == NAMES[0], seed=0)


def servers() -> dict[str, str]:
    return {"global": "a", "fednp": "b", SITES: "c"}


async def live(mode: str, broker: MemoryBroker) -> tuple[list[FedNPLearner], list]:
    learners = [wrapped(name) for name in NAMES]
    nest = Nest(
        quick(
            mode=mode,
            expect=NAMES,
            founder=True,
            servers=servers(),
            rounds=4,
            settle_tolerance=1e-6,
        ),
        broker,
    )
    for name, learner in zip(NAMES, learners, strict=True):
        nest.start(name, learner)
    return learners, await nest.all()


def errors(learners: list[FedNPLearner]) -> float:
    wanted = server_cavities(learners[0].prior, [learner.site for learner in learners])
    return max(
        float((learner.current_cavity().stack() - cavity.stack()).abs().max())
        for learner, cavity in zip(learners, wanted, strict=True)
    )


@pytest.mark.parametrize("mode", ["async", "rounds", "server"])
def test_cavities_are_the_servers_once_peers_agree(run, mode):
    learners, reports = run(live(mode, MemoryBroker(FAULTS, seed=3)))
    assert held(reports, SITES) == injected(reports, SITES) == 4
    assert [round(learner.total_weight(), 3) for learner in learners] == [4.0] * 4
    assert float(torch.stack([learner.site.stack() for learner in learners]).abs().sum()) > 0.1
    assert errors(learners) < (1e-3 if mode == "async" else 1e-5)


def test_a_killed_peer_goes_on_with_the_site_that_it_told(run, tmp_path):
    learners = {name: wrapped(name) for name in NAMES}
    learners["b"] = doomed = wrapped("b", Held)
    doomed.gate = gate = Gate(2)

    async def swarm():
        nest = Nest(quick(mode="rounds", expect=NAMES, founder=True, rounds=8))
        for name, learner in learners.items():
            nest.start(name, learner, checkpoint=tmp_path / name)
        await gate.wait()
        gate.open()  # a thread cannot be killed, only let go
        await nest.lives[1].crash()
        learners["b"] = wrapped("b")
        nest.start("b", learners["b"], checkpoint=tmp_path / "b")
        return await nest.all()

    run(swarm())
    assert errors(list(learners.values())) < 1e-5
