"""The gossiper by example: bad input, recall, leaving, newcomers, restarts, async mode."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from gossamer.gossip import (
    ONE,
    Ack,
    DictStore,
    FaultPlan,
    Give,
    Gossiper,
    MemoryNetwork,
    PacedMode,
    Partition,
    Recall,
    RetryPolicy,
    introduce,
    new_session,
    run,
)
from gossamer.gossip.pushsum import MAX_WEIGHT


class Eager(PacedMode):
    """Pushes to whoever is free, at every tick."""

    def step(self, gossiper: Gossiper, now: float) -> None:
        self.request()
        super().step(gossiper, now)


def make(name: str, value: float = 0.0, weight: int = ONE, **options) -> Gossiper:
    store = DictStore({"v": np.full(3, value, dtype=np.float32)})
    peer = Gossiper(name, f"s{name}", store, **options)
    if weight:
        peer.inject("v", weight)
    return peer


def pair(**options) -> tuple[Gossiper, Gossiper]:
    a, b = make("a", 0.0, **options), make("b", 4.0, **options)
    introduce([a, b])
    return a, b


def read(peer: Gossiper) -> np.ndarray:
    return peer.value("v")


def is_busy(peer: Gossiper) -> bool:
    return bool(peer.ledger.open)


def give_of(a: Gossiper) -> Give:
    (give,) = a.poll()
    assert isinstance(give, Give)
    return give


def pushed(a: Gossiper, share: int = ONE // 2, now: float = 0.0) -> Give:
    assert a.push("v", {"b": share}, now)
    return give_of(a)


def test_a_transfer_debits_credits_and_closes() -> None:
    a, b = pair()
    give = pushed(a)
    assert (a.weight("v"), a.account("v").open) == (ONE // 2, ONE // 2)
    b.handle(give, 0.1)
    assert b.weight("v") == ONE + ONE // 2
    np.testing.assert_allclose(read(b), 4 * 2 / 3, rtol=1e-6)
    (ack,) = b.poll()
    a.handle(ack, 0.2)
    assert a.account("v").open == 0
    assert read(b).dtype == np.float32


def bad(give: Give, kind: str) -> Give:
    value = np.array(give.value)
    if kind == "nan":
        value[1] = np.nan
        return replace(give, value=value)
    if kind == "too big for float32":
        return replace(give, value=np.full(3, 1e300))
    return {
        "short": replace(give, value=value[:2]),
        "two-dimensional": replace(give, value=value[None]),
        "complex": replace(give, value=value.astype(complex)),
        "strings": replace(give, value=np.array(["1", "2", "3"])),
        "zero": replace(give, weight=0),
        "negative": replace(give, weight=-5),
        "huge": replace(give, weight=MAX_WEIGHT),
        "unknown": replace(give, model="w"),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("nan", "refused-not-finite"),
        ("too big for float32", "refused-not-finite"),
        ("short", "refused-wrong-length"),
        ("two-dimensional", "refused-wrong-length"),
        ("complex", "refused-bad-dtype"),
        ("strings", "refused-bad-dtype"),
        ("zero", "refused-weight"),
        ("negative", "refused-weight"),
        ("huge", "refused-weight"),
        ("unknown", "refused-unknown-model"),
    ],
)
def test_bad_mass_is_counted_refused_and_returned(kind: str, cause: str) -> None:
    for own_weight, observe in product((ONE, 0), (None, lambda *_: None)):
        a, b = make("a", 1.0), make("b", 4.0, weight=own_weight)
        b.observe = observe
        introduce([a, b])
        if kind == "huge" and own_weight == 0:
            continue
        give = bad(pushed(a), kind)
        b.handle(give, 0.0)
        assert b.counters[cause] == 1
        assert b.weight("v") == own_weight
        assert list(read(b)) == [4.0] * 3
        (ack,) = b.poll()
        assert isinstance(ack, Ack)
        assert ack.verdict == "void"
        a.handle(replace(ack, model="v"), 0.0)
        assert a.weight("v") == ONE


def test_strange_messages_change_nothing() -> None:
    a, b = pair()
    give = pushed(a)
    before = b.snapshot()["vault"]["weights"]
    b.handle(replace(give, receiver="c"), 0.0)
    b.handle(replace(give, receiver_session="former life"), 0.0)
    b.handle(replace(give, sequence=0), 0.0)
    assert b.poll() == []
    assert b.snapshot()["vault"]["weights"] == before
    assert b.counters == {"misaddressed": 1, "other-session": 1, "stale": 1}
    b.handle(give, 0.0)
    (ack,) = b.poll()
    assert isinstance(ack, Ack)
    a.handle(replace(ack, session="another"), 0.0)
    a.handle(replace(ack, giver_session="another"), 0.0)
    a.handle(replace(ack, sequence=9), 0.0)
    a.handle(replace(ack, verdict="perhaps"), 0.0)  # type: ignore[arg-type]
    assert a.account("v").open == ONE // 2
    assert a.counters["stale-ack"] == 3
    assert a.counters["bad-verdict"] == 1


def test_own_values_that_are_not_finite_are_not_pushed() -> None:
    a, _ = pair()
    a.set_value("v", np.array([1, np.inf, 2], dtype=np.float32))
    assert not a.push("v", {"b": 5}, 0.0)
    assert a.counters["own-value-not-finite"] == 1
    assert a.weight("v") == ONE


def test_mistakes_of_the_driver_are_named() -> None:
    a, _ = pair()
    with pytest.raises(ValueError, match="push 'v' to 'z': not a neighbour"):
        a.push("v", {"z": 5}, 0.0)
    with pytest.raises(ValueError, match="at least 1"):
        a.push("v", {"b": 0}, 0.0)
    with pytest.raises(ValueError, match="the share must be from 1 to the weight"):
        a.push("v", {"b": 2 * ONE}, 0.0)
    with pytest.raises(ValueError, match=r"'a' has no partial model 'w', only \['v'\]"):
        a.weight("w")
    with pytest.raises(ValueError, match="out of range"):
        a.inject("v", 0)
    with pytest.raises(ValueError, match="no transfer is open"):
        a.recall("b", "v", 0.0)
    pushed(a)
    with pytest.raises(ValueError, match="a transfer is open"):
        a.push("v", {"b": 5}, 0.0)


def test_a_recalled_transfer_is_burnt_even_if_it_arrives_later() -> None:
    a, b = pair()
    give = pushed(a)
    a.recall("b", "v", 1.0)
    (recall,) = a.poll()
    assert isinstance(recall, Recall)
    b.handle(recall, 1.0)
    b.handle(give, 1.1)
    assert [m.verdict for m in b.poll() if isinstance(m, Ack)] == ["void", "void"]
    assert b.weight("v") == ONE
    a.handle(Ack("v", "b", "sb", "a", "sa", give.sequence, "void"), 1.2)
    assert a.weight("v") == ONE
    assert read(a)[0] == 0.0


def test_a_recall_that_comes_too_late_is_answered_credited() -> None:
    a, b = pair()
    b.handle(pushed(a), 0.0)
    b.poll()
    a.recall("b", "v", 1.0)
    b.handle(a.poll()[0], 1.0)
    (ack,) = b.poll()
    assert isinstance(ack, Ack)
    assert ack.verdict == "credited"
    a.handle(ack, 1.0)
    assert (a.weight("v"), b.weight("v")) == (ONE // 2, ONE + ONE // 2)


def test_repeats_back_off_then_the_transfer_is_recalled() -> None:
    a, _ = pair(retry=RetryPolicy(first=1.0, resend_factor=1.0, backoff=2.0, recall_factor=20.0))
    pushed(a)
    sent = []
    for tick in range(1, 300):
        a.tick(tick * 0.1)
        sent += [(tick * 0.1, type(m)) for m in a.poll()]
    times = [t for t, kind in sent if kind is Give]
    assert times == pytest.approx([1.0, 3.0, 7.0, 15.0])
    assert sent[len(times)][1] is Recall
    assert sent[len(times)][0] == pytest.approx(20.0)
    assert Give not in [kind for t, kind in sent if t > 20.05]


def test_nothing_is_repeated_to_an_offline_peer_and_at_once_when_it_is_back() -> None:
    a, _ = pair()
    give = pushed(a)
    a.peer_offline("b")
    a.tick(15.0)
    assert a.poll() == []
    assert a.free_neighbours("v") == []
    assert a.peer_online("b", "sb", ["v"])
    a.tick(15.1)
    assert a.poll() == [give]


def test_a_new_session_means_the_old_one_is_gone() -> None:
    a, _ = pair()
    pushed(a)
    assert a.peer_online("b", "second life", ["v"])
    assert a.weight("v") == ONE
    assert not a.peer_online("b", "sb", ["v"])
    assert pushed(a).receiver_session == "second life"
    assert a.ledger.open["b", "v"].give.sequence == 2


def test_old_news_of_a_death_leaves_the_present_session_alone() -> None:
    a, _ = pair()
    assert a.peer_online("b", "second life", ["v"])
    pushed(a)
    a.peer_gone("b", "sb")
    assert a.account("v").open == ONE // 2
    assert a.neighbours("v") == ["b"]


def test_a_leaver_is_nobodys_heir() -> None:
    a, b, c = make("a"), make("b"), make("c")
    introduce([a, b, c])
    a.peer_online("b", "sb", ["v"], leaving=True)
    assert (a.neighbours("v"), a.heirs("v")) == (["b", "c"], ["c"])
    a.peer_online("c", "sc", ["v"], leaving=True)
    a.hand_over(0.0)
    assert (a.poll(), a.weight("v")) == ([], ONE)
    a.peer_online("c", "a new life", ["v"])
    a.tick(0.1)
    (give,) = a.poll()
    assert (give.receiver, a.weight("v")) == ("c", 0)


@pytest.mark.parametrize("credited", [True, False])
def test_a_leavers_statement_settles_what_its_lost_acknowledgements_left_open(
    credited: bool,
) -> None:
    a, b, c = make("a"), make("b", 4.0), make("c", 8.0)
    introduce([a, b, c])
    give = pushed(a)
    if credited:
        b.handle(give, 0.0)
    b.hand_over(0.1)
    late = pushed(c)  # comes while leaving: refused
    b.handle(late, 0.2)
    for _ in range(20):
        outgoing = [m for m in b.poll() if not (isinstance(m, Ack) and m.receiver == "a")]
        for message in outgoing:  # whatever b gives reaches its heir; acks to a are lost
            {"a": a, "c": c}[message.receiver].handle(message, 0.3)
        for message in [*a.poll(), *c.poll()]:
            b.handle(message, 0.4)
        b.tick(0.5)
    assert b.is_drained()
    for peer in (a, c):
        peer.peer_gone("b", "sb", b.statement())
        assert peer.account("v").open == 0
    assert a.weight("v") + c.weight("v") == 3 * ONE
    assert a.counters["settled-by-statement"] == credited
    assert c.weight("v") >= ONE
    assert b.counters["refused-leaving"] >= 1


def test_a_statement_also_answers_a_sender_that_was_given_up_and_lives() -> None:
    a, b = pair()
    b.handle(pushed(a), 0.0)  # and the acknowledgement is lost
    b.peer_gone("a", "sa")  # b was cut off for longer than a's lease
    store = DictStore({"v": np.zeros(3, dtype=np.float32)})
    restored = Gossiper.restore(b.snapshot(), store)
    for leaver in (b, restored):
        assert ["a", "sa", "v", 1, "credited"] in leaver.statement()
    a.peer_gone("b", "sb", b.statement())
    assert a.weight("v") == ONE // 2
    b.peer_gone("a", "sa", a.statement())
    assert b.statement() == []


def test_a_newcomer_adds_its_weight_at_what_it_hears() -> None:
    a, b = make("a", 6.0), make("b", 1000.0, weight=0)
    introduce([a, b])
    b.inject("v", ONE, after_first_transfer=True)
    assert b.weight("v") == 0
    b.handle(pushed(a), 0.0)
    assert b.weight("v") == ONE + ONE // 2
    assert list(read(b)) == [6.0] * 3
    assert b.account("v").injected == ONE


def test_a_lossy_wire_costs_nothing() -> None:
    a, b = make("a", 1.0001, lossy=lambda _, x: x.astype(np.float16)), make("b", 4.0)
    introduce([a, b])
    give = pushed(a, ONE // 4)
    assert give.value.dtype == np.float16
    before = ONE * np.float64(np.float32(1.0001))
    kept = a.weight("v") * read(a).astype(float) + give.weight * give.value.astype(float)
    np.testing.assert_allclose(kept, before, rtol=1e-7)
    b.handle(give, 0.0)
    assert b.counters["credited"] == 1


def test_a_lossy_wire_costs_nothing_even_if_all_weight_is_sent() -> None:
    a, b = (
        make(name, value, lossy=lambda _, x: x.round()) for name, value in (("a", 0.4), ("b", 0.8))
    )
    introduce([a, b])
    b.handle(pushed(a, ONE), 0.0)
    for ack in b.poll():
        a.handle(ack, 0.0)
    np.testing.assert_allclose(read(b), 0.4, rtol=1e-6)  # the mean of 0 and 0.8
    b.push("v", {"a": ONE}, 0.0)
    a.handle(give_of(b), 0.0)
    assert a.weight("v") == b.weight("v") == ONE
    np.testing.assert_allclose(read(a) + read(b), 1.2, rtol=1e-6)


def test_one_push_shares_one_read_only_value() -> None:
    a, b, c = make("a"), make("b"), make("c")
    introduce([a, b, c])
    a.push("v", {"b": 5, "c": 6}, 0.0)
    first, second = (m for m in a.poll() if isinstance(m, Give))
    assert first.value is second.value
    assert not first.value.flags.writeable
    a.value("v")[:] = 9  # training goes on
    assert list(first.value) == [0.0] * 3


def test_a_snapshot_is_plain_data_and_restores_the_whole_state() -> None:
    a, b = pair()
    a.inject("v", 3)
    a.handle(Give("v", "b", "sb", 7, "a", "sa", 5, read(b), (1, 2)), 0.0)
    a.poll()
    pushed(a)
    a.peer_gone("z", "old")
    snapshot = a.snapshot()

    def plain(data: object) -> bool:
        if isinstance(data, dict):
            return all(isinstance(k, str) and plain(v) for k, v in data.items())
        if isinstance(data, list):
            return all(plain(v) for v in data)
        return data is None or type(data) in (int, str, bool, np.ndarray)

    assert plain(snapshot)
    store = DictStore({"v": np.zeros(3, dtype=np.float32)})
    again = Gossiper.restore(snapshot, store)
    np.testing.assert_equal(again.snapshot(), snapshot)
    again.tick(100.0)
    (give,) = again.poll()
    assert isinstance(give, Give)
    assert give.sequence == 1
    assert not again.peer_online("z", "old", [])
    assert again.peer_online("b", "a new life", ["v"])  # b is gone: restored books take it back
    assert again.weight("v") == ONE + 3 + 5


def test_snapshots_that_do_not_fit_are_refused() -> None:
    snapshot = make("a").snapshot()
    with pytest.raises(ValueError, match=r"partial models \['v'\], the store \['w'\]"):
        Gossiper.restore(snapshot, DictStore({"w": np.zeros(3)}))
    with pytest.raises(ValueError, match="'v' has 3 values, the store's 4"):
        Gossiper.restore(snapshot, DictStore({"v": np.zeros(4)}))
    with pytest.raises(ValueError, match="version 9"):
        Gossiper.restore({**snapshot, "version": 9}, DictStore({"v": np.zeros(3)}))
    values_elsewhere = make("a", 5.0).snapshot(values=False)
    assert values_elsewhere["vault"]["values"] == {}


def test_sessions_are_unique() -> None:
    assert len({new_session() for _ in range(100)}) == 100


def test_async_gossip_agrees_on_the_weighted_mean_through_faults() -> None:
    samples = [1, 5, 2, 9, 3]
    cut = Partition(2.0, 6.0, frozenset({"p0", "p1"}))
    faults = FaultPlan(0.1, 0.1, 0.2, (0.0, 0.05), (cut,))
    peers = {}
    for i, count in enumerate(samples):
        store = DictStore({"v": np.full(2, float(i)), "w": np.full(2, -float(i * i))})
        mode = Eager(fraction=0.5)
        peer = Gossiper(f"p{i}", f"s{i}", store, mode=mode, retry=RetryPolicy(first=0.1), seed=i)
        for model in ("v", "w"):
            peer.inject(model, ONE * count)
        peers[peer.peer] = peer
    introduce(peers.values())
    network: MemoryNetwork = MemoryNetwork(4, faults)
    run(peers, network, seconds=20)
    for model, start in (("v", [0, 1, 2, 3, 4]), ("w", [0, -1, -4, -9, -16])):
        mean = np.average(start, weights=samples)
        for peer in peers.values():
            np.testing.assert_allclose(peer.value(model), mean, rtol=1e-6)
            peer.mode = PacedMode()
    run(peers, network, start=21.0, seconds=40, until=lambda: not any(map(is_busy, peers.values())))
    for model in ("v", "w"):
        accounts = [p.account(model) for p in peers.values()]
        assert [a.open for a in accounts] == [0] * 5
        assert sum(a.held for a in accounts) == sum(a.injected for a in accounts)
    assert sum(p.counters["repeat"] for p in peers.values()) > 0


def test_an_observer_sees_both_values_of_every_credit_before_it_changes_ours():
    a, b = pair()
    seen = []
    b.observe = lambda give, own, distance: seen.append(
        (give.sender, give.value.copy(), own.copy(), distance)
    )
    a.push("v", {"b": ONE // 2}, 0.0)
    give = give_of(a)
    b.handle(replace(give, value=np.full(3, np.inf, dtype=np.float32)), 0.0)
    assert seen == []  # refused
    a, b = pair()
    b.observe = lambda give, own, distance: seen.append(
        (give.sender, give.value.copy(), own.copy(), distance)
    )
    a.push("v", {"b": ONE // 2}, 0.0)
    give = give_of(a)
    b.handle(give, 0.0)
    b.handle(give, 0.0)  # a duplicate
    ((sender, received, own, distance),) = seen
    assert sender == "a"
    assert received.tolist() == [0.0] * 3
    assert own.tolist() == [4.0] * 3
    assert distance == pytest.approx(4.0 * 3**0.5)
    assert read(b).tolist() != own.tolist()


def test_a_value_is_credited_whose_distance_is_beyond_its_dtype():
    a, b = pair()
    distances = []
    b.observe = lambda give, own, distance: distances.append(distance)
    b.handle(replace(pushed(a, ONE), value=np.full(3, 1e30, dtype=np.float32)), 0.0)
    assert distances == [np.inf]
    np.testing.assert_allclose(read(b), 0.5e30, rtol=1e-6)


def test_an_observer_is_told_how_far_a_value_was_before_it_was_changed_for_credit():
    a, b = pair()
    distances = []
    b.observe = lambda give, own, distance: distances.append(distance)
    b.admit = lambda give: replace(give, value=np.full(3, 3.0, dtype=np.float32))
    a.push("v", {"b": ONE // 2}, 0.0)
    b.handle(give_of(a), 0.0)
    assert distances == [pytest.approx(4.0 * 3**0.5)]
