"""Lone twins of live peers: they train as often as their peers, and a restart does not reset them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_kit import GLOBAL
from peer_kit import Nest, begin, make_learner, quick
from waiting import until

from gossamer.gossip import ReleasePlan
from gossamer.models import Gain, Metrics, ModelError
from gossamer.models.fednp import FedNPLearner, FedNPOptions
from gossamer.peer.engine import Engine
from gossamer.peer.exits import PeerError
from gossamer.peer.summary import is_record

EVERY_CELL = {"global": "4-6-2"}


def alone(name: str, rounds: int, every: int = 1, slices: Mapping[str, str] = GLOBAL) -> Metrics:
    """The test of a peer that has trained so many rounds alone."""
    learner = make_learner(name, slices)
    for _ in range(rounds):
        learner.train(every)
    return learner.test()


def same(gain: Gain | None, test: Metrics) -> bool:
    """Whether a gain is about a twin with this test, up to the order in which losses are added."""
    assert gain is not None
    return gain.alone_accuracy == test.accuracy and gain.alone_loss == pytest.approx(
        test.mean_loss, rel=1e-6
    )


def engine(path: Path | None = None, gain: float = 1.0, **settings: Any) -> Engine:
    return Engine("a", make_learner("a"), quick(gain=gain, **settings), checkpoint=path)


def round_of(one: Engine) -> None:
    """One round: the peer trains, other peers' values change it, its twin trains."""
    one.train()
    one.network.flat.mul_(0.9)
    one.training.train_twin(one.history.round)


def test_a_twin_trains_as_often_as_its_peer_and_does_not_change_it() -> None:
    one, other = begin(engine(every=2)), begin(engine(gain=0.0, every=2))
    for _ in range(3):
        round_of(one)
        round_of(other)
    assert torch.equal(one.network.flat, other.network.flat)
    assert same(one.training.measure_gain(one.history.round), alone("a", 3, every=2))
    assert other.training.measure_gain(other.history.round) is None


def test_a_restart_keeps_the_twin(tmp_path: Path) -> None:
    first = begin(engine(tmp_path / "a.checkpoint"))
    for _ in range(3):
        round_of(first)
    assert first.save()
    second = engine(tmp_path / "a.checkpoint")
    assert second.restored
    assert same(second.training.measure_gain(second.history.round), alone("a", 3))
    round_of(second)
    assert same(second.training.measure_gain(second.history.round), alone("a", 4))


def test_a_twin_makes_up_for_a_round_that_a_crash_cut_off(tmp_path: Path) -> None:
    first = begin(engine(tmp_path / "a.checkpoint"))
    round_of(first)
    first.train()
    assert first.save()  # and dies before its twin has trained
    second = engine(tmp_path / "a.checkpoint")
    assert same(second.training.measure_gain(second.history.round), alone("a", 2))


def test_a_twin_that_would_have_missed_rounds_is_not_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = begin(engine(tmp_path / "a.checkpoint", gain=0.0))
    first.train()
    assert first.save()
    caplog.set_level(logging.WARNING)
    second = engine(tmp_path / "a.checkpoint")
    assert second.training.measure_gain(second.history.round) is None
    assert "peer a: gain was set after its first round" in caplog.text


def test_what_cannot_have_a_twin_is_refused_in_one_line() -> None:
    with pytest.raises(PeerError, match="peer a: gain: a lone twin trains without the noise of dp"):
        engine(dp=ReleasePlan(clip=1.0, noise=1.0))
    learner = FedNPLearner(make_learner("a"), FedNPOptions(), counting_peer=True)
    with pytest.raises(ModelError, match="FedNPLearner learns together with other peers"):
        Engine("a", learner, quick(gain=1.0))


@pytest.mark.parametrize("mode", ["async", "rounds", "server"])
def test_a_peers_report_says_what_it_gained(run, mode: str) -> None:
    records: list[dict[str, Any]] = []

    async def swarm():
        nest = Nest(quick(mode=mode, servers={"global": "b"}, expect=("a", "b"), founder=True))
        nest.start("a", settings=nest.settings.updated(gain=1.0), on_record=records.append)
        nest.start("b")
        return await nest.all()

    with_twin, without = run(swarm())
    gain, test = Gain.from_dict(with_twin.gain), alone("a", 6)
    assert same(gain, test)
    assert gain.accuracy.mean == pytest.approx(with_twin.accuracy - test.accuracy)
    assert gain.loss.interval is not None
    assert without.gain == {}
    tested = [record for record in records if "accuracy" in record]
    assert all("alone_loss" in record and is_record(record) for record in tested)
    assert tested[-1]["alone_accuracy"] == test.accuracy


def test_a_crashed_peer_goes_on_with_its_twin(run, tmp_path: Path) -> None:
    async def swarm():
        nest = Nest(quick(rounds=10**6, gain=1.0, expect=("a", "b"), founder=True))
        path = tmp_path / "a.checkpoint"
        first, _ = nest.start("a", checkpoint=path), nest.start("b")
        await until(lambda: first.trains() and first.view.round >= 3)
        reached = first.view.round
        await first.crash()
        nest.lives.remove(first)
        second = nest.start("a", checkpoint=path)
        await until(second.trains)
        return reached, await nest.finish(3)

    reached, reports = run(swarm())
    assert {report.peer for report in reports} == {"a", "b"}
    for report in reports:
        assert report.rounds >= reached
        assert same(Gain.from_dict(report.gain), alone(report.peer, report.rounds))


def test_a_twin_trains_on_samples_that_its_peer_sets_aside() -> None:
    """Peers that decide what they share hold samples out; a peer alone would train on all of them."""
    learner = make_learner("a")
    one, whole = begin(Engine("a", learner, quick(gain=1.0))), learner.samples
    for held_out in (0, 8, 8, 0):
        learner.samples = (whole[0][held_out:], whole[1][held_out:])
        learner.order = learner.order[:0]
        round_of(one)
    assert same(one.training.measure_gain(one.history.round), alone("a", 4))


def test_a_twin_of_a_peer_that_decides_what_it_shares_is_a_peer_alone(run) -> None:
    names = ("a", "b", "c", "d")

    async def swarm():
        nest = Nest(quick(rounds=14, sharing="auto", expect=names, founder=True))
        for name in names:
            gain = 1.0 if name == "a" else 0.0
            nest.start(name, make_learner(name, EVERY_CELL), nest.settings.updated(gain=gain))
        return await nest.all()

    report, *_ = run(swarm())
    assert same(Gain.from_dict(report.gain), alone("a", report.rounds, slices=EVERY_CELL))
