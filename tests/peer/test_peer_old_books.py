"""Who comes back with old books, or in a session that was given up, begins a new one and counts once."""

from __future__ import annotations

import logging
import shutil
from functools import partial

import pytest
import torch
from peer_kit import (
    ASK_BACK_SOON,
    Clocks,
    Nest,
    Still,
    begin,
    consensus,
    held,
    make_learner,
    quick,
)
from waiting import until

from gossamer.gossip import ONE, Ack
from gossamer.peer.engine import Engine
from gossamer.peer.exits import PeerError
from gossamer.peer.presence import Online

PAIR = ("a", "b")
quick_nest = partial(Nest, limits=ASK_BACK_SOON)


def one_life(path, machine=None, **settings) -> Engine:
    learner = Still(make_learner("a"), 0.25)
    engine = Engine("a", learner, quick(**settings), checkpoint=path, machine=machine)
    begin(engine)
    engine.train()
    engine.save()
    return engine


def next_life(path, machine=None, **settings) -> Engine:
    learner = Still(make_learner("a"), 7.0)
    return Engine("a", learner, quick(**settings), checkpoint=path, machine=machine)


@pytest.mark.parametrize("mode", ["async", "rounds"])
def test_after_the_machine_started_anew_values_and_rounds_are_kept_in_a_new_session(
    tmp_path, caplog, mode
):
    """A power cut may have brought an older file back: what others were told since is not in its books."""
    one = one_life(tmp_path / "c", Clocks("one"), mode=mode)
    two = next_life(tmp_path / "c", Clocks("another"), mode=mode)
    assert not two.restored
    assert two.returning
    assert two.session != one.session
    assert two.view.round == 1
    assert torch.equal(two.network.flat, one.network.flat)
    report = two.report()
    assert report["weight"]["global"] == [0, 0, 0]
    assert [each["session"] for each in report["abandoned"]] == [one.session]
    assert "the machine was restarted" in caplog.text


def test_with_its_clock_set_back_a_peer_takes_a_new_session(tmp_path):
    machine = Clocks(None)  # where boots have names the clock on the wall does not matter
    one = one_life(tmp_path / "c", machine)
    machine.wall_ahead = -7200.0
    two = next_life(tmp_path / "c", machine)
    assert not two.restored
    assert two.session != one.session


def test_the_lease_counts_from_when_others_could_hear_of_it_not_from_the_last_save(tmp_path):
    one = one_life(tmp_path / "c", lease=600.0)
    one.turn(
        [], [], 0.0, 1 << 20, last_contact=one.last_contact - 700.0
    )  # trained and saved alone since
    one.save()
    assert not next_life(tmp_path / "c", lease=600.0).restored
    assert next_life(tmp_path / "c", lease=900.0).restored


def test_a_restart_does_not_begin_the_lease_again(tmp_path):
    machine = Clocks()
    one_life(tmp_path / "c", machine)
    machine.ahead = 500.0
    two = next_life(tmp_path / "c", machine)
    assert two.restored
    assert machine.uptime() - two.last_contact >= 500.0


def rejected(engine, *, by=("b",)) -> str:
    """What an engine makes of neighbours that answer its push with "gone"; c is one too."""
    others = [Online(peer, f"{peer}-1", ("global",)) for peer in "bc"]
    engine.turn([], others, 0.0, 1 << 20)
    engine.train()
    for (peer, vector), transfer in list(engine.gossiper.ledger.open.items()):
        if peer in by:
            answer = (engine.name, engine.session, transfer.give.sequence, "gone")
            engine.gossiper.handle(Ack(vector, peer, f"{peer}-1", *answer), 1.0)
    engine.turn([], [], 1.0, 1 << 20)
    return engine.view.rejection


def test_one_neighbour_is_believed_after_a_restart_and_once_in_a_lease(tmp_path):
    machine = Clocks()
    one = one_life(tmp_path / "c", machine)
    assert rejected(one) == ""
    machine.ahead = 2 * one.settings.lease
    one.turn([], [], 2.0, 1 << 20, machine.uptime())
    assert one.view.rejection == "b has given it up"
    one.start_new_session("its session was rejected")
    begin(one)
    assert rejected(one) == ""
    one.save()
    assert rejected(next_life(tmp_path / "c", machine)) == "b has given it up"


def test_a_rejection_by_all_neighbours_is_believed_at_once(tmp_path):
    assert rejected(one_life(tmp_path / "c"), by=("b", "c")) == "b has given it up"


def test_lockstep_modes_cannot_renew_and_say_why(tmp_path):
    one = one_life(tmp_path / "c", mode="rounds")
    with pytest.raises(PeerError, match="must end its session: b has given it up, and rounds mode"):
        one.start_new_session("must end its session: b has given it up")


def test_an_old_copy_of_a_checkpoint_is_found_out_and_counts_once(run, tmp_path, caplog):
    async def swarm():
        nest = quick_nest(quick(rounds=10**9, expect=PAIR, founder=True))
        one, two = (nest.start(n, checkpoint=tmp_path / f"{n}.checkpoint") for n in PAIR)
        await until(lambda: two.counts() and two.peer.link.view.round > 2)
        ledger = two.peer.link.engine.gossiper.ledger
        session = two.peer.link.session
        shutil.copy(tmp_path / "b.checkpoint", tmp_path / "copy")
        given = ledger.last_sequence("a", "global")
        await until(lambda: ledger.last_sequence("a", "global") > given + 5)
        await two.crash()
        shutil.copy(tmp_path / "copy", tmp_path / "b.checkpoint")
        again = nest.start("b", checkpoint=tmp_path / "b.checkpoint")
        await until(lambda: again.counts() and again.peer.link.session != session)
        for life in (one, again):
            life.go_on_for(3)
        return [one, again], await nest.all()

    with caplog.at_level(logging.WARNING):
        lives, reports = run(swarm())
    assert (
        "peer b: its session was rejected: its ledger is older than the transfers that a has received"
        in caplog.text
    )
    assert [r.weight["global"][2] for r in reports] == [ONE, ONE]
    assert all(r.weight["global"][1] == 0 for r in reports)  # no edge hangs
    assert held(reports) <= 3  # of two peers, one of which came twice
    assert consensus([life.peer.learner for life in lives]) < 1e-3


def test_who_was_given_up_and_returns_in_its_old_session_is_told_and_counts_once(
    run, tmp_path, caplog
):
    async def swarm():
        nest = quick_nest(quick(rounds=10**9, expect=PAIR, founder=True))
        one, two = (nest.start(n, checkpoint=tmp_path / f"{n}.checkpoint") for n in PAIR)
        await until(lambda: two.counts() and two.peer.link.view.round > 2)
        session = two.peer.link.session
        lost = two.peer.link.engine.gossiper
        await two.crash()
        account = lost.account("global")
        await one.outlive("b")
        await until(lambda: one.peer.link.roster._entries["b"].announced_session is None)
        again = nest.start("b", checkpoint=tmp_path / "b.checkpoint")
        await until(lambda: again.counts() and again.peer.link.session != session)
        for life in (one, again):
            life.go_on_for(3)
        return [one, again], await nest.all(), account

    with caplog.at_level(logging.WARNING):
        lives, reports, lost = run(swarm())
    assert caplog.text.count("peer a: b is back in a session that was given up here") == 1
    assert "peer b: its session was rejected: a has given it up" in caplog.text
    assert 3 * ONE - lost.held - lost.open <= round(held(reports) * ONE) <= 3 * ONE
    assert reports[1].weight["global"][2] == ONE
    assert consensus([life.peer.learner for life in lives]) < 1e-3
