"""Masks and noise in live peers: the average stays, and what cannot go together is refused."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from papers_kit import Papers
from peer_kit import Nest, Still, begin, held, injected, make_learner, quick
from waiting import until

from gossamer.gossip import Give, ReleasePlan, encode
from gossamer.gossip.security import GuardSettings, SwarmSecurity
from gossamer.peer import traffic
from gossamer.peer.engine import Engine
from gossamer.peer.exits import PeerError
from gossamer.peer.presence import SessionEnded

LABELS = ("a", "b", "c", "d")


async def still(papers, mode, **changes):
    """Four peers with values of their own, which only averaging changes."""
    names = papers.names(*LABELS)
    settings = quick(
        mode=mode, rounds=1, exchanges=1, expect=names, founder=True,
        servers={"global": names[1]}, **changes,
    )  # fmt: skip
    nest = Nest(settings)
    learners = [Still(make_learner(label), float(n)) for n, label in enumerate(LABELS)]
    for label, learner in zip(LABELS, learners, strict=True):
        nest.start(label, learner, papers.settings(label, settings))
    return learners, await nest.all()


@pytest.mark.parametrize("mode", ["rounds", "server"])
@pytest.mark.parametrize("scale", [None, 64.0], ids=["plain", "private"])
def test_masks_hide_values_and_leave_the_average(run, tmp_path, monkeypatch, mode, scale):
    first: dict[str, np.ndarray] = {}

    def recording(message, schema, dtype):
        if isinstance(message, Give) and message.model == "global":
            first.setdefault(message.sender, np.array(message.value))
        return encode(message, schema, dtype)

    monkeypatch.setattr(traffic, "encode", recording)
    private = {} if scale is None else {"global": scale}
    learners, reports = run(still(Papers(tmp_path), mode, private=private, guards="off"))
    assert held(reports) == injected(reports) == 4
    for learner in learners:
        np.testing.assert_allclose(learner.network.read("global"), 1.5, atol=1e-4)
    senders = [value for name, value in first.items() if mode == "rounds" or name[0] != "b"]
    assert len(senders) >= 3
    for value in senders:
        assert (value.std() > scale / 4) if scale else (value.std() == 0)


def test_releases_are_noised_and_counted(run, tmp_path):
    plan = ReleasePlan(clip=0.1, noise=2.0)

    async def one(settings):
        learner = make_learner("a")
        return learner, await Nest(settings).start("a", learner).task

    plain, without = run(one(quick(rounds=3)))
    noisy, report = run(one(quick(rounds=3, dp=plan)))
    assert without.privacy == {}
    assert report.privacy["releases"] == 3  # the local model never leaves the peer
    assert 0 < report.privacy["epsilon"] < 10
    difference = (noisy.network.read("global") - plain.network.read("global")).std()
    assert difference > 0.1


def test_a_restart_forgets_no_release(tmp_path):
    settings = quick(dp=ReleasePlan(clip=0.1, noise=2.0))
    first = Engine("a", make_learner("a"), settings, checkpoint=tmp_path / "x")
    begin(first)
    first.train()
    first.save()
    again = Engine("a", make_learner("a"), settings, checkpoint=tmp_path / "x")
    assert again.report()["privacy"]["releases"] == 1


def test_a_spent_budget_ends_the_peer_in_one_line():
    settings = quick(dp=ReleasePlan(clip=0.1, noise=2.0, limit=0.01))
    engine = Engine("a", make_learner("a"), settings)
    before = engine.network.read("global").clone()
    with pytest.raises(PeerError, match=r"one more release would exceed epsilon 0\.01"):
        engine.train()
    np.testing.assert_array_equal(engine.network.read("global"), before)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"trust": "none"}, 'set trust = "swarm"'),
        ({"mode": "async"}, "use mode rounds or server"),
        ({"dtype": "float16"}, "use dtype float32 or float64"),
        ({"guards": GuardSettings()}, 'set guards = "off"'),
        ({"private": {"global": 3.0}}, "scale 3.0 is not a power of two"),
    ],
)
def test_what_cannot_go_together_is_refused(changes, text):
    fine = quick(trust="swarm", mode="rounds", private={"global": 64.0})
    Engine("a", make_learner("a"), fine)
    with pytest.raises(PeerError, match=text) as caught:
        Engine("a", make_learner("a"), fine.updated(**changes))
    assert "\n" not in str(caught.value)


def test_a_peer_is_no_neighbour_before_its_secrets_are_forgotten(run, tmp_path, monkeypatch):
    """A private round that began between the two would find a neighbour without a secret."""
    order, turn, gone = [], Engine.turn, SwarmSecurity.remove

    def turned(engine, arrived, events, *rest):
        outgoing = turn(engine, arrived, events, *rest)
        order.extend(
            ("no neighbour", engine.name, e.peer) for e in events if isinstance(e, SessionEnded)
        )
        return outgoing

    def forgotten(trust, peer, session):
        order.append(("forgotten", trust.name, peer))
        gone(trust, peer, session)

    monkeypatch.setattr(Engine, "turn", turned)
    monkeypatch.setattr(SwarmSecurity, "remove", forgotten)
    papers = Papers(tmp_path)
    names = papers.names("a", "b")
    settings = quick(rounds=10**9, expect=names, founder=True)

    async def scenario():
        nest = Nest(settings)
        stays, goes = [nest.start(n, settings=papers.settings(n, settings)) for n in "ab"]
        await until(goes.counts)
        goes.peer.leave("home")
        await goes.task
        await until(lambda: ("forgotten", *names) in order)
        stays.peer.leave("home too")
        await stays.task

    run(scenario())
    assert order.index(("no neighbour", *names)) < order.index(("forgotten", *names))


def test_two_peers_cannot_hide_from_each_other(run, tmp_path):
    papers = Papers(tmp_path)
    names = papers.names("a", "b")
    settings = quick(mode="rounds", rounds=1, expect=names, private={"global": 64.0})

    async def scenario():
        nest = Nest(settings)
        lives = [nest.start(n, settings=papers.settings(n, settings)) for n in "ab"]
        return await asyncio.gather(*(life.task for life in lives), return_exceptions=True)

    for error in run(scenario()):  # also of the one who sees the other leave first
        assert isinstance(error, PeerError)
        assert "a single one could subtract its mask" in str(error)
