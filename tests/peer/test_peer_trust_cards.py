"""Cards of trusting peers, on a broker in memory: those of the dead, and those that were refused."""

from __future__ import annotations

from papers_kit import Papers
from peer_kit import Clocks, Nest, consensus, held, injected, make_learner, quick
from waiting import until


def test_a_dead_peers_card_does_not_keep_the_others_from_learning(run, tmp_path):
    papers = Papers(tmp_path)
    names = papers.names("a", "b", "c")
    alone = quick(rounds=10**9, founder=True)
    settings = quick(expect=names[1:], founder=True)

    async def scenario():
        nest = Nest(settings)
        dead = nest.start("a", settings=papers.settings("a", alone))
        await until(dead.trains)
        await dead.crash()
        learners = [make_learner(label) for label in ("b", "c")]
        for label, learner in zip(("b", "c"), learners, strict=True):
            nest.start(label, learner, papers.settings(label, settings))
        return learners, await nest.all()

    learners, reports = run(scenario())
    assert consensus(learners) < 1e-3
    assert held(reports) == injected(reports) == 2


def test_who_was_refused_for_its_clock_is_let_in_when_it_is_right(run, tmp_path):
    """Nobody answers it, so it shows its card again; it need not be started again."""
    clocks = {"a": Clocks(), "b": Clocks()}
    clocks["b"].wall_ahead = 86_400.0
    papers = Papers(tmp_path)
    names = [papers.invite(label, days=3.0) for label in ("a", "b")]  # valid tomorrow, too
    settings = quick(expect=tuple(names), founder=True)

    async def scenario():
        nest = Nest(settings)
        learners = [make_learner(label) for label in ("a", "b")]
        first, _ = [
            nest.start(label, learner, papers.settings(label, settings), machine=clocks[label])
            for label, learner in zip(("a", "b"), learners, strict=True)
        ]
        await until(
            lambda: first.peer.link and "untrusted-clock" in first.peer.link.security.counters
        )
        clocks["b"].wall_ahead = 0.0

        def let_in():
            """A little more time has passed for the one that nobody answers."""
            clocks["b"].ahead = min(clocks["b"].ahead + 2.0, 250.0)
            return names[1] in first.peer.link.security.register.members

        await until(let_in)
        return learners, await nest.all()

    learners, reports = run(scenario())
    assert consensus(learners) < 1e-3
    assert held(reports) == injected(reports) == 2


def test_a_peer_that_returns_from_a_crash_learns_who_left_meanwhile(run, tmp_path, caplog):
    """A leaver takes its card away: its goodbye must be believed without it, or it is waited for."""
    papers = Papers(tmp_path)
    names = papers.names("a", "b")
    settings = quick(rounds=10**9, expect=names, founder=True, lease=1e6)
    file = tmp_path / "b.checkpoint"

    async def scenario():
        nest = Nest(settings)
        leaver = nest.start("a", settings=papers.settings("a", settings))
        crashes = nest.start("b", settings=papers.settings("b", settings), checkpoint=file)
        await until(lambda: leaver.counts() and crashes.counts())
        # It saves before it sends: what it has sent to the leaver, its checkpoint knows of.
        await until(lambda: leaver.view.received > 0)
        await crashes.crash()
        leaver.peer.leave("home")
        await leaver.task
        caplog.clear()
        again = nest.start("b", settings=papers.settings("b", settings), checkpoint=file)
        await until(lambda: f"peer {names[0]} left: home" in caplog.text)
        again.peer.leave("home too")
        await again.task

    with caplog.at_level("INFO"):
        run(scenario())
