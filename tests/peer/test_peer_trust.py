"""Peers that trust each other and nobody else, on a broker in memory."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from papers_kit import Papers
from peer_kit import (
    Gate,
    Nest,
    Still,
    consensus,
    held,
    injected,
    make_learner,
    quick,
)
from waiting import until

from gossamer.gossip.security import GuardSettings, public_text, revocation_topic
from gossamer.peer.exits import PeerError
from gossamer.peer.lifecycle import Peer
from gossamer.peer.machine import load_checkpoint, save_checkpoint
from gossamer.peer.process import PeerSpec, ProcessSpec
from gossamer.peer.spec import BrokerAddress

LABELS = ("a", "b", "c", "d")


async def live(papers, mode, **changes):
    names = papers.names(*LABELS)
    settings = quick(mode=mode, expect=names, founder=True, servers={"global": names[1]}, **changes)
    nest = Nest(settings)
    learners = [make_learner(label) for label in LABELS]
    for label, learner in zip(LABELS, learners, strict=True):
        nest.start(label, learner, papers.settings(label, settings))
    return learners, await nest.all()


@pytest.mark.parametrize("mode", ["async", "rounds", "server"])
def test_every_mode_ends_in_agreement_with_all_weight(run, tmp_path, mode):
    papers = Papers(tmp_path)
    learners, reports = run(live(papers, mode))
    assert [r.peer for r in reports] == list(papers.names(*LABELS))
    assert [r.rounds for r in reports] == [6] * 4
    assert consensus(learners) < 1e-3
    assert held(reports) == injected(reports) == 4


def test_a_peer_without_trust_says_so_once(run, caplog):
    with caplog.at_level(logging.WARNING):
        run(lonely(quick(rounds=1)))
    lines = [r.getMessage() for r in caplog.records if "trust is off" in r.getMessage()]
    assert lines == ["peer a: trust is off: every client of the broker can read and forge messages"]


async def lonely(settings, label="a"):
    return await Nest(settings).start(label).task


def connect(*_args):
    raise AssertionError("it must not get as far as the broker")


def wrong(papers, **changes):
    return papers.settings("a", quick()).updated(**changes)


def test_papers_that_do_not_do_are_one_line(tmp_path):
    papers, other = Papers(tmp_path), Papers(tmp_path / "other", swarm="nest")
    other.folder.mkdir()
    papers.names("a", "b")
    cases = {
        r'peer a: trust = "swarm" needs invitation, owner too': wrong(
            papers, invitation=None, owner=None
        ),
        r'peer a: identity is set, but trust is "none"': wrong(papers, trust="none"),
        r"b\.key is the key of b@\w+; name the peer b": wrong(
            papers, identity=str(tmp_path / "b.key")
        ),
        r"none\.key: cannot be read: No such file": wrong(
            papers, identity=str(tmp_path / "none.key")
        ),
        r"is not a public key": wrong(papers, owner="nonsense"),
    }
    for text, settings in cases.items():
        with pytest.raises(PeerError, match=text):
            Peer("a", make_learner("a"), settings, connect)


def test_who_is_not_admitted_ends_before_it_says_anything(run, tmp_path):
    papers = Papers(tmp_path)
    papers.invite("a", models=["something-else"])
    papers.invite("b")
    stranger = public_text(Papers(tmp_path).owner.public)
    with pytest.raises(PeerError, match="implements global, local-a, which invitation"):
        run(lonely(papers.settings("a", quick())))
    with pytest.raises(PeerError, match="no valid invitation"):
        run(lonely(papers.settings("b", quick()).updated(owner=stranger), "b"))


def test_values_beyond_the_bounds_are_refused_and_their_mass_stays_with_the_sender(run, tmp_path):
    papers = Papers(tmp_path)
    names = papers.names("a", "b", "c")
    bounds = GuardSettings(distance=0.5)
    # Who is refused may never agree with the others: this ends its settling.
    settings = quick(rounds=10**9, expect=names, founder=True, settle_timeout=0.5, guards=bounds)

    async def scenario():
        nest = Nest(settings)
        values = {"a": 1.0, "b": 1.0, "c": 50.0}
        learners = {label: Still(make_learner(label), value) for label, value in values.items()}
        for label, learner in learners.items():
            # The hostile one judges nobody.
            own = settings.updated(guards="off") if label == "c" else settings
            nest.start(label, learner, papers.settings(label, own))
        await until(lambda: all(life.trains() and life.view.round > 20 for life in nest.lives))
        return learners, await nest.finish(3)

    learners, reports = run(scenario())
    for label in ("a", "b"):
        np.testing.assert_allclose(learners[label].network.read("global"), 1.0)
    assert held(reports) == injected(reports) == 3
    assert reports[0].dropped["guards-norm"] >= 1


def test_a_list_that_one_peer_has_reaches_the_other_and_a_checkpoint(run, tmp_path):
    papers = Papers(tmp_path)
    names = papers.names("a", "b")
    settings = quick(rounds=10**9, expect=names, founder=True)
    file, data = tmp_path / "a.checkpoint", papers.revoke("x@y")

    async def scenario():
        nest, gate = Nest(settings), Gate()
        still = Still(make_learner("a"), 1.0, gate)
        first = nest.start("a", still, papers.settings("a", settings), checkpoint=file)
        second = nest.start("b", Still(make_learner("b"), 1.0), papers.settings("b", settings))
        await gate.wait()
        first.peer.link.security.receive(revocation_topic(papers.swarm), data)
        gate.open()
        # The broker has no such list: b can have it from a alone.
        await until(lambda: second.peer.link.security.register.revocations.number == 1)
        for one in (first, second):  # who has finished has no checkpoint any more
            one.peer.leave("for lunch")
            await one.task

    run(scenario())
    tree = load_checkpoint(file)
    assert tree is not None
    assert tree["trust"]["revocations"] == data
    assert "masks" not in tree["trust"]  # deleted with its session


def test_a_checkpoint_keeps_the_key_of_masks_while_the_session_goes_on(run, tmp_path):
    papers = Papers(tmp_path)
    papers.names("a")
    file = tmp_path / "a.checkpoint"
    settings = quick(rounds=10**9, founder=True)

    async def scenario():
        life = Nest(settings).start("a", settings=papers.settings("a", settings), checkpoint=file)
        await until(life.trains)
        await life.crash()
        return load_checkpoint(file)

    tree = run(scenario())
    assert tree["trust"]["masks"]["session"] == tree["gossip"]["ledger"]["session"]
    assert len(tree["trust"]["masks"]["key"]) == 32


def test_bytes_survive_a_checkpoint(tmp_path):
    save_checkpoint(tmp_path / "x", {"list": b"\x00\xff", "empty": b""})
    assert load_checkpoint(tmp_path / "x") == {"list": b"\x00\xff", "empty": b""}


def test_guards_survive_the_way_to_a_process(tmp_path):
    settings = quick(guards=GuardSettings(distance=2.0), trust="swarm")
    spec = ProcessSpec(BrokerAddress("mqtt://x"), "f", [PeerSpec("a", "m:f", {}, settings)])
    spec.write(tmp_path / "spec.json")
    (read,) = ProcessSpec.read(Path(tmp_path / "spec.json")).peers
    assert read.settings == settings
    assert read.settings.bounds == GuardSettings(distance=2.0)
    assert quick().bounds is None
    assert quick(trust="swarm").bounds == GuardSettings()
    assert quick(trust="swarm", guards="off").bounds is None
