"""Mass that is taken back without an answer, and sessions that were given up: nothing counts twice."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest

from gossamer.gossip import ONE, Ack, DictStore, Give, Gossiper, Message, decode, encode
from gossamer.gossip.ledger import RECLAIMED_KEPT
from gossamer.gossip.pushsum import MAX_WEIGHT

HALF = ONE // 2


def swarm(names: str = "ab") -> list[Gossiper]:
    """Peers that know each other, each with weight ONE."""
    made = [Gossiper(name, f"{name}-1", DictStore({"v": np.ones(2)})) for name in names]
    for one in made:
        one.inject("v", ONE)
        for other in made:
            if other is not one:
                one.peer_online(other.peer, other.session, ["v"])
    return made


def deliver(sender: Gossiper, receiver: Gossiper) -> list[Message]:
    messages = sender.poll()
    for message in messages:
        receiver.handle(message, 0.0)
    return messages


def exchange(sender: Gossiper, receiver: Gossiper, share: int) -> None:
    assert sender.push("v", {receiver.peer: share}, 0.0)
    deliver(sender, receiver)
    deliver(receiver, sender)


def end(leaver: Gossiper) -> None:
    """End without waiting for anybody, as a peer does whose time is over."""
    leaver.close()
    leaver.reclaim()


def hear_goodbye(hearer: Gossiper, leaver: Gossiper) -> None:
    hearer.peer_gone(leaver.peer, leaver.session, leaver.statement(), leaver.reclaimed)


def total(*gossipers: Gossiper) -> int:
    """What all books say that there is."""
    return sum(g.account("v").held + g.account("v").open for g in gossipers)


def test_what_was_credited_is_given_up_and_what_the_leaver_takes_home_counts():
    a, b = swarm()
    a.push("v", {"b": HALF}, 0.0)
    deliver(a, b)
    b.poll()  # the acknowledgement is lost
    end(a)
    assert not a.ledger.open
    assert a.weight("v") == ONE
    assert a.reclaimed == [["b", "b-1", "v", 1, HALF]]
    assert total(a, b) == 2 * ONE + HALF  # until b hears of it
    hear_goodbye(b, a)
    assert b.weight("v") == ONE
    assert total(a, b) == 2 * ONE
    assert b.counters["given-up"] == 1


def test_what_was_not_credited_never_will_be():
    a, b = swarm()
    a.push("v", {"b": HALF}, 0.0)
    late = a.poll()
    end(a)
    hear_goodbye(b, a)
    for message in late:  # a copy that was long on its way
        b.handle(message, 0.0)
    (answer,) = b.poll()
    assert answer.verdict == "void"
    assert not b.counters["given-up"]
    assert total(a, b) == 2 * ONE


def test_what_arrives_before_the_goodbye_is_given_up_with_it():
    a, b = swarm()
    a.push("v", {"b": HALF}, 0.0)
    late = a.poll()
    end(a)
    for message in late:
        b.handle(message, 0.0)
    deliver(b, a)  # an acknowledgement changes nothing any more
    hear_goodbye(b, a)
    assert total(a, b) == 2 * ONE


def test_a_goodbye_that_is_heard_again_is_believed_once():
    a, b = swarm()
    a.push("v", {"b": HALF}, 0.0)
    deliver(a, b)
    end(a)
    for _ in range(3):
        hear_goodbye(b, a)
    assert b.counters["given-up"] == 1
    assert total(a, b) == 2 * ONE


@pytest.mark.parametrize("restarted", [False, True])
def test_a_goodbye_takes_no_more_weight_than_its_transfer_brought(restarted):
    a, b = swarm()
    a.push("v", {"b": HALF}, 0.0)
    deliver(a, b)
    if restarted:
        b = Gossiper.restore(b.snapshot(), DictStore({"v": np.ones(2)}))
    b.peer_gone("a", a.session, [], [["b", "b-1", "v", 1, MAX_WEIGHT]])
    assert b.weight("v") == b.account("v").held == ONE


def test_what_was_passed_on_is_a_debt_that_the_next_mass_pays():
    a, b, c = swarm("abc")
    a.push("v", {"b": HALF}, 0.0)
    deliver(a, b)
    b.poll()
    b.push("v", {"c": b.weight("v") - 10}, 0.0)
    deliver(b, c)
    deliver(c, b)
    end(a)
    hear_goodbye(b, a)
    assert b.weight("v") == 1  # its value stays alive
    assert b.account("v").held == 10 - HALF
    assert total(a, b, c) == 3 * ONE
    c.peer_gone("a", a.session, a.statement(), a.reclaimed)
    c.push("v", {"b": ONE}, 0.0)
    deliver(c, b)
    deliver(b, c)
    assert b.weight("v") == b.account("v").held == ONE + 10 - HALF
    assert total(a, b, c) == 3 * ONE


def test_a_debt_survives_a_restart():
    a, b, c = swarm("abc")
    a.push("v", {"b": HALF}, 0.0)
    deliver(a, b)
    b.poll()
    b.push("v", {"c": b.weight("v") - 10}, 0.0)
    end(a)
    hear_goodbye(b, a)
    again = Gossiper.restore(b.snapshot(), DictStore({"v": np.zeros(2)}))
    assert again.account("v") == b.account("v")
    assert total(a, again, c) == 3 * ONE


def test_a_restart_before_the_goodbye_forgets_no_row():
    a, b = swarm()
    a.push("v", {"b": HALF}, 0.0)
    deliver(a, b)
    end(a)
    again = Gossiper.restore(a.snapshot(), DictStore({"v": np.zeros(2)}))
    assert again.reclaimed == a.reclaimed
    hear_goodbye(b, again)
    assert total(again, b) == 2 * ONE


def test_rows_for_others_and_nonsense_change_nothing():
    a, b = swarm()
    a.push("v", {"b": HALF}, 0.0)
    deliver(a, b)
    rows = [
        ["c", "c-1", "v", 1, HALF],
        ["b", "b-0", "v", 1, HALF],
        ["b", "b-1", "w", 1, HALF],
        ["b", "b-1", "v", 1],
        "nonsense",
    ]
    b.peer_gone("a", a.session, [], rows)
    assert b.counters["bad-reclaim"] == 2
    assert b.weight("v") == ONE + HALF


def test_only_what_is_on_its_way_to_the_unreachable_is_taken_back():
    a, b, c = swarm("abc")
    a.push("v", {"b": HALF // 2, "c": HALF // 2}, 0.0)
    a.peer_offline("b")
    assert a.reclaim(stranded_only=True) == 1
    assert list(a.ledger.open) == [("c", "v")]
    assert a.reclaimed == [["b", "b-1", "v", 1, HALF // 2]]
    deliver(a, c)
    deliver(c, a)
    assert total(a, b, c) == 3 * ONE


@pytest.mark.parametrize("credited", [True, False])
def test_who_comes_back_after_that_gets_nothing_more_in_this_session(credited):
    """It remembers one sequence, and could not tell which of two it has to give up."""
    a, b = swarm()
    a.push("v", {"b": HALF}, 0.0)
    if credited:
        deliver(a, b)
        b.poll()
    a.peer_offline("b")
    a.hand_over(0.0)
    a.reclaim(stranded_only=True)
    a.peer_online("b", b.session, ["v"])
    assert not a.free_neighbours("v")
    assert not a.heirs("v")
    with pytest.raises(ValueError, match="not a neighbour for it"):
        a.push("v", {"b": HALF}, 0.0)
    a.tick(1.0)
    deliver(a, b)
    end(a)
    hear_goodbye(b, a)
    assert total(a, b) == 2 * ONE
    b.peer_online("a", "a-2", ["v"])
    a.peer_online("b", "b-2", ["v"])
    assert a.free_neighbours("v") == ["b"]  # another session knows nothing of it


def test_a_transfer_of_nothing_is_not_reclaimed():
    a, _ = swarm()
    a.skip("v", ["b"], 0.0, (1, 1))
    (give,) = a.poll()
    assert isinstance(give, Give)
    end(a)
    assert a.reclaimed == []


def test_the_rows_of_a_goodbye_are_bounded():
    a, _ = swarm()
    for number in range(RECLAIMED_KEPT + 5):
        a.peer_online("b", f"b-{number + 2}", ["v"])
        a.push("v", {"b": 1}, 0.0)
        a.peer_offline("b")
        a.reclaim(stranded_only=True)
    assert len(a.reclaimed) == RECLAIMED_KEPT
    assert a.reclaimed[-1][1] == f"b-{RECLAIMED_KEPT + 6}"
    assert a.weight("v") == ONE


# --- sessions that were given up, and ledgers that are an old copy ------------------------------------


def test_what_a_session_gives_that_was_given_up_is_refused_and_it_is_told(caplog):
    a, b = swarm()
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
    a, b = swarm()
    a.peer_gone("b", b.session)
    a.peer_online("b", b.session, ["v"])
    a = Gossiper.restore(a.snapshot(), DictStore({"v": np.ones(2)}))
    exchange(b, a, HALF)  # arrives before the news that b is online
    assert a.counters["refused-gone-session"] == 1
    assert (a.weight("v"), b.weight("v")) == (ONE, ONE)


def test_what_the_dead_had_on_its_way_still_comes_in():
    a, b = swarm()
    b.push("v", {"a": HALF}, 0.0)
    a.peer_gone("b", b.session)
    deliver(b, a)
    assert a.weight("v") == ONE + HALF


@pytest.mark.parametrize("acknowledged", [True, False])
def test_what_a_peer_passed_on_exists_twice_only_if_it_is_given_up_before_its_answer_is_read(
    acknowledged,
):
    """The known limit of docs/explanation/averaging.md: its books say how much, and its goodbye mends it."""
    a, b, c = (swarm(name)[0] for name in "abc")
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
    assert total(a, b, c) == 3 * ONE + twice
    assert sum(row[-1] for row in a.reclaimed) == twice
    a.peer_gone("c", c.session, c.statement(), c.reclaimed)
    assert total(a, b, c) == 3 * ONE
    assert a.reclaimed == []


def test_what_was_credited_before_is_not_given_back_to_a_session_that_returns():
    a, b = swarm()
    b.push("v", {"a": HALF}, 0.0)
    deliver(b, a)
    a.poll()  # the answer is lost
    a.peer_gone("b", b.session)
    a.peer_online("b", b.session, ["v"])
    b.recall("a", "v", 0.0)
    deliver(b, a)
    deliver(a, b)
    assert total(a, b) == 2 * ONE


def test_who_refers_to_old_books_is_told_so_and_no_edge_hangs():
    a, b = swarm()
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
    a, b = swarm()
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
    a, b = swarm()
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
    assert total(a, b) == 2 * ONE


def test_the_answer_to_a_session_that_was_given_up_passes_the_wire():
    ack = Ack("v", "a", "a-1", "b", "b-1", 3, "gone")
    packet = b"".join(bytes(each) for each in encode(ack, "feed", "float32"))
    assert decode(packet).message == ack
