"""The books: sequences, verdicts, waiting times that follow what was seen, and snapshots."""

from __future__ import annotations

import numpy as np
import pytest

from gossamer.gossip import Delays, Ledger, RetryPolicy
from gossamer.gossip.ledger import SESSIONS_KEPT


def test_sequences_rise_per_edge_and_only_one_is_open() -> None:
    ledger = Ledger("a", "s")
    value = np.zeros(1)
    assert ledger.debit("v", "b", "sb", 5, value, 0.0).give.sequence == 1
    with pytest.raises(ValueError, match="'v' to 'b': another one is still open"):
        ledger.debit("v", "b", "sb", 5, value, 0.0)
    assert ledger.debit("w", "b", "sb", 5, value, 0.0).give.sequence == 1
    ledger.close(("b", "v"))
    assert ledger.debit("v", "b", "another session", 5, value, 0.0).give.sequence == 2


def test_a_snapshot_restores_everything_and_shares_values() -> None:
    ledger = Ledger("a", "s")
    value = np.arange(3.0)
    ledger.debit("v", "b", "sb", 5, value, 0.0, (2, 1))
    ledger.debit("v", "c", "sc", 6, value, 0.0)
    ledger.update(("c", "v"), recalling=True)
    ledger.decide("b", "sb", "v", 4, "credited")
    data = ledger.snapshot()
    assert len(data["values"]) == 1
    again = Ledger.restore(data)
    assert again.open["b", "v"].give.tag == (2, 1)
    assert again.open["c", "v"].recalling
    assert again.open["b", "v"].give.value is again.open["c", "v"].give.value
    assert again.verdict("b", "sb", "v") == (4, "credited")
    again.close(("b", "v"))
    assert again.debit("v", "b", "sb", 1, value, 0.0).give.sequence == 2
    assert Ledger.restore(data).snapshot() == data


def test_sessions_of_one_sender_are_bounded() -> None:
    ledger = Ledger("a", "s")
    for number in range(SESSIONS_KEPT + 10):
        ledger.decide("b", f"s{number}", "v", 1, "credited")
    assert len(list(ledger.verdicts())) == SESSIONS_KEPT
    assert ledger.verdict("b", f"s{SESSIONS_KEPT + 9}", "v") == (1, "credited")


def test_the_sender_that_was_heard_last_comes_last() -> None:
    ledger = Ledger("a", "s")
    for number, sender in enumerate("bcb"):
        ledger.decide(sender, f"s{sender}", "v", number, "credited")
    assert [sender for sender, *_ in ledger.verdicts()] == ["c", "b"]


def test_waiting_follows_the_delays_seen() -> None:
    retry = RetryPolicy(first=1.0, resend_factor=2.0, backoff=3.0, recall_factor=10.0, longest=50.0)
    delays = Delays(retry)
    assert delays.repeat_timeout(1) == pytest.approx(2.0)
    for _ in range(100):
        delays.acknowledged(0.1, 1)
    assert delays.repeat_timeout(1) == pytest.approx(0.2)
    assert delays.repeat_timeout(2) == pytest.approx(0.6)
    assert delays.repeat_timeout(99) == retry.longest
    assert delays.recall_timeout() == pytest.approx(1.0)
    for _ in range(retry.remembered):
        delays.acknowledged(2.0, 1)
    assert delays.recall_timeout() == pytest.approx(20.0)


def test_an_ambiguous_delay_is_not_learnt_but_the_backoff_stays_until_a_clear_one() -> None:
    delays = Delays(RetryPolicy(first=1.0, resend_factor=1.0, backoff=2.0))
    delays.acknowledged(40.0, 3)
    assert delays.repeat_timeout(1) == pytest.approx(4.0)
    delays.acknowledged(3.0, 1)
    assert delays.repeat_timeout(1) == pytest.approx(3.0)
