"""A session that others gave up, and books that are an old copy: neither may count mass twice, nor hang."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest

from gossamer.gossip import ONE, Ack, DictStore, Give, Gossiper, Recall, decode, encode

HALF = ONE // 2


def start(name: str) -> Gossiper:
    gossiper = Gossiper(name, f"{name}-1", DictStore({"v": np.ones(2)}))
    gossiper.inject("v", ONE)
    return gossiper


def pair() -> tuple[Gossiper, Gossiper]:
    a, b = start("a"), start("b")
    a.peer_online("b", b.session, ["v"])
    b.peer_online("a", a.session, ["v"])
    return a, b


def deliver(sender: Gossiper, receiver: Gossiper) -> list[Give | Recall | Ack]:
    messages = sender.poll()
    for message in messages:
        receiver.handle(message, 0.0)
    return messages


def exchange(sender: Gossiper, receiver: Gossiper, share: int) -> None:
    assert sender.push("v", {receiver.peer: share}, 0.0)
    deliver(sender, receiver)
    deliver(receiver, sender)


def weight(*gossipers: Gossiper) -> int:
    return sum(g.account("v").held + g.account("v").open for g in gossipers)


def test_what_a_session_gives_that_was_given_up_is_refused_and_it_is_told(caplog):
    a, b = pair()
    a.peer_gone("b", b.session)
    with caplog.at_level(logging.WARNING):
        assert not a.peer_online("b", b.session, ["v"])
        assert not a.peer_online("b", b.session, ["v"])
    assert caplog.text.count("peer a: b is back in a session that was given up here") == 1
    exchange(b, a, HALF)
    assert a.counters["refused-gone-session"] == 1
    assert (a.weight("v"), b.weight("v")) == (ONE, ONE)  # neither lost nor drained
    assert b.rejections == {"a": "a has given it up"}
    assert not b.ledger.open


def test_a_restart_does_not_forget_that_a_given_up_session_is_back():
    a, b = pair()
    a.peer_gone("b", b.session)
    a.peer_online("b", b.session, ["v"])
    a = Gossiper.restore(a.snapshot(), DictStore({"v": np.ones(2)}))
    exchange(b, a, HALF)  # arrives before the news that b is online
    assert a.counters["refused-gone-session"] == 1
    assert (a.weight("v"), b.weight("v")) == (ONE, ONE)


def test_what_the_dead_had_on_its_way_still_comes_in():
    a, b = pair()
    b.push("v", {"a": HALF}, 0.0)
    a.peer_gone("b", b.session)
    deliver(b, a)
    assert a.weight("v") == ONE + HALF


@pytest.mark.parametrize("acknowledged", [True, False])
def test_what_a_peer_passed_on_exists_twice_only_if_it_is_given_up_before_its_answer_is_read(
    acknowledged,
):
    """The known limit of docs/explanation/averaging.md: its books say how much, and its goodbye mends it."""
    a, b, c = start("a"), start("b"), start("c")
    a.peer_online("c", c.session, ["v"])
    c.peer_online("b", b.session, ["v"])
    a.push("v", {"c": HALF}, 0.0)
    deliver(a, c)
    (answer,) = c.poll()
    exchange(c, b, ONE + HALF // 2)  # so that more is passed on than dies with c
    if acknowledged:
        a.handle(answer, 0.0)
    for survivor in (a, b):
        survivor.peer_gone("c", c.session)
    a.handle(answer, 0.0)  # comes too late to change anything
    twice = 0 if acknowledged else HALF
    assert weight(a, b, c) == 3 * ONE + twice
    assert sum(row[-1] for row in a.reclaimed) == twice
    a.peer_gone("c", c.session, c.statement(), c.reclaimed)
    assert weight(a, b, c) == 3 * ONE
    assert a.reclaimed == []


def test_what_was_credited_before_is_not_given_back_to_a_session_that_returns():
    a, b = pair()
    b.push("v", {"a": HALF}, 0.0)
    deliver(b, a)
    a.poll()  # the answer is lost
    a.peer_gone("b", b.session)
    a.peer_online("b", b.session, ["v"])
    b.recall("a", "v", 0.0)
    deliver(b, a)
    deliver(a, b)
    assert weight(a, b) == 2 * ONE


def test_who_refers_to_old_books_is_told_so_and_no_edge_hangs():
    a, b = pair()
    exchange(b, a, HALF)
    old = copy.deepcopy(b.snapshot())
    exchange(b, a, HALF // 2)
    exchange(b, a, HALF // 4)
    back = Gossiper.restore(old, DictStore({"v": np.ones(2)}))
    back.peer_online("a", a.session, ["v"])
    assert not back.rejections
    exchange(back, a, HALF)
    assert a.counters["stale"] == 1
    assert back.rejections == {
        "a": "its ledger is older than the transfers that a has received from it"
    }
    assert a.weight("v") == 2 * ONE - b.weight("v")  # nothing of the old copy was credited


@pytest.mark.parametrize("late", ["give", "recall"])
def test_a_late_copy_is_answered_with_what_became_of_the_last_transfer(late):
    a, b = pair()
    b.push("v", {"a": HALF}, 0.0)
    b.recall("a", "v", 0.0)
    (give, recall) = b.poll()
    a.handle(give, 0.0)
    deliver(a, b)
    b.push("v", {"a": HALF // 2}, 0.0)
    deliver(b, a)
    a.poll()  # the answer to the second is lost
    a.handle(give if late == "give" else recall, 0.0)
    (answer,) = a.poll()
    assert (answer.sequence, answer.verdict) == (2, "credited")
    b.handle(answer, 0.0)
    assert not b.ledger.open
    assert not b.rejections
    assert (a.weight("v"), b.weight("v")) == (ONE + HALF + HALF // 2, HALF - HALF // 2)


def test_a_late_copy_of_what_is_settled_changes_nothing():
    a, b = pair()
    b.push("v", {"a": HALF}, 0.0)
    (give,) = b.poll()
    a.handle(give, 0.0)
    deliver(a, b)
    exchange(b, a, HALF // 2)
    b.push("v", {"a": HALF // 4}, 0.0)
    b.poll()  # the third is lost, and stays open
    a.handle(give, 0.0)
    deliver(a, b)
    assert list(b.ledger.open) == [("a", "v")]
    assert b.counters["stale-ack"] == 1
    assert not b.rejections
    assert weight(a, b) == 2 * ONE


def test_the_answer_to_a_session_that_was_given_up_passes_the_wire():
    ack = Ack("v", "a", "a-1", "b", "b-1", 3, "gone")
    packet = b"".join(bytes(each) for each in encode(ack, "feed", "float32"))
    assert decode(packet).message == ack
