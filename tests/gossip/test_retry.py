"""How long a transfer is waited for: large ones longer, and those that were asked back too early."""

from __future__ import annotations

import numpy as np
import pytest

from gossamer.gossip import ONE, Ack, Delays, DictStore, Give, Gossiper, Recall, RetryPolicy
from gossamer.gossip.ledger import LARGE_VALUE_BYTES, MAX_EARLY_RECALLS, DelaysBySize


def test_what_is_large_may_take_its_time() -> None:
    retry = RetryPolicy(first=1.0, rate=1e6)
    delays = DelaysBySize(retry)
    for _ in range(50):
        delays.of(100).acknowledged(0.01, 1)
    assert delays.of(LARGE_VALUE_BYTES - 1).recall_timeout() == pytest.approx(0.4)
    assert delays.of(40_000_000).recall_timeout() == pytest.approx(20 * 41.0)
    delays.of(40_000_000).acknowledged(5.0, 1)
    assert delays.of(41_000_000).recall_timeout() == pytest.approx(100.0)
    assert delays.of(LARGE_VALUE_BYTES - 1).recall_timeout() == pytest.approx(0.4)


def test_a_recall_that_came_too_early_makes_the_next_wait_longer() -> None:
    delays = Delays(RetryPolicy(first=1.0, recall_factor=10.0, backoff=2.0))
    for wait in (20.0, 40.0):
        delays.recalled(arrived=False)
        assert delays.recall_timeout() == pytest.approx(wait)
    for _ in range(100):
        delays.recalled(arrived=False)
    assert delays.recall_timeout() == pytest.approx(10.0 * 2.0**MAX_EARLY_RECALLS)
    delays.recalled(arrived=True)
    assert delays.recall_timeout() == pytest.approx(10.0)


def test_a_transfer_slower_than_the_first_recall_passes_in_the_end() -> None:
    """The link takes 70 s for every transfer, and carries small messages at once."""
    retry = RetryPolicy(first=1.0, recall_factor=20.0)
    gossiper = Gossiper("a", "sa", DictStore({"v": np.zeros(2)}), retry=retry)
    gossiper.inject("v", ONE)
    gossiper.peer_online("b", "sb", ["v"])
    now, recalls, credited = 0.0, 0, False
    while not credited and now < 1000:
        if not gossiper.ledger.open:
            gossiper.push("v", {"b": ONE // 4}, now)
            sent = now
        gossiper.tick(now)
        for message in gossiper.poll():
            if isinstance(message, Recall) or (isinstance(message, Give) and now - sent >= 70):
                credited = isinstance(message, Give)
                recalls += not credited
                verdict = "credited" if credited else "void"
                gossiper.handle(Ack("v", "b", "sb", "a", "sa", message.sequence, verdict), now)
                break
        now += 0.5
    assert credited
    assert recalls == 2  # after 20 and 40 seconds; the third may take 80


def test_nobody_waits_for_what_is_late_though_it_is_not_asked_back_yet() -> None:
    retry = RetryPolicy(first=1.0, recall_factor=20.0)
    gossiper = Gossiper("a", "sa", DictStore({"v": np.zeros(2)}), retry=retry)
    gossiper.inject("v", ONE)
    gossiper.peer_online("b", "sb", ["v"])
    gossiper.push("v", {"b": ONE // 4}, 0.0)
    gossiper.tick(25.0)
    (recall,) = [m for m in gossiper.poll() if isinstance(m, Recall)]
    gossiper.handle(Ack("v", "b", "sb", "a", "sa", recall.sequence, "void"), 25.0)
    gossiper.push("v", {"b": ONE // 4}, 30.0)  # is asked back after 40 seconds from now on
    gossiper.tick(45.0)
    assert gossiper.in_flight()["v"] == 1
    gossiper.tick(55.0)
    assert gossiper.in_flight()["v"] == 0
    assert not [m for m in gossiper.poll() if isinstance(m, Recall)]
    assert gossiper.ledger.open


def test_an_answer_after_a_night_of_repeats_is_an_answer() -> None:
    gossiper = Gossiper("a", "sa", DictStore({"v": np.zeros(2)}))
    gossiper.inject("v", ONE)
    gossiper.peer_online("b", "sb", ["v"])
    gossiper.push("v", {"b": ONE // 4}, 0.0, tag=(0, 0))  # in lockstep it is never recalled
    for hour in range(1, 1200):
        gossiper.tick(3600.0 * hour)
    gossiper.handle(Ack("v", "b", "sb", "a", "sa", 1, "credited"), 3600.0 * 1200)
    assert gossiper.counters["acknowledged-credited"] == 1
    assert not gossiper.ledger.open


def test_pauses_between_repeats_grow_anew_when_a_neighbour_is_back() -> None:
    gossiper = Gossiper("a", "sa", DictStore({"v": np.zeros(2)}))
    gossiper.inject("v", ONE)
    gossiper.peer_online("b", "sb", ["v"])
    gossiper.push("v", {"b": ONE // 4}, 0.0, tag=(0, 0))
    for minute in range(10):
        gossiper.tick(60.0 * minute)
    gossiper.peer_offline("b")
    gossiper.peer_online("b", "sb", ["v"])
    gossiper.poll()
    sent = []
    for second in range(601, 621):
        gossiper.tick(float(second))
        sent += [second for _ in gossiper.poll()]
    assert sent == [601, 604, 610]  # 1.5 s are doubled with each repeat, and one tick is a second
