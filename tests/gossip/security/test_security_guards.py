"""Guards on values: bounds, rates, and the initial estimate of a newcomer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from security_kit import SCHEMA, group

from gossamer.gossip import (
    ONE,
    Chunker,
    DictStore,
    Give,
    Gossiper,
    Mass,
    MemoryNetwork,
    RoundsMode,
    introduce,
    run,
    total,
)
from gossamer.gossip.security import Guards, GuardSettings, InitialEstimate, Intake, guard
from gossamer.gossip.security.layer import MIN_SHARE, message_share

# --- bounds on values --------------------------------------------------------------------------------


OWN = np.linspace(-1, 1, 101).astype(np.float32)


def give(value, sender="eve", weight=ONE, sequence=1):
    return Give("v", sender, "s", sequence, "anna", "t", weight, np.asarray(value, np.float32))


def inspect(guards, value, held=ONE, **fields):
    return guards.inspect(give(value, **fields), OWN, held, ONE)


WRONG = {
    "a NaN": (np.where(OWN > 0.5, np.nan, OWN), "not-finite"),
    "an infinity": (np.where(OWN > 0.5, np.inf, OWN), "not-finite"),
    "huge": (np.full_like(OWN, 1e30), "norm"),
    "ten times ours": (10 * OWN, "norm"),
    "sign flipped": (-OWN, "distance"),
    "random": (np.random.default_rng(0).normal(0, OWN.std(), OWN.size), "distance"),
    "too short": (OWN[1:], "wrong-length"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_out_of_bounds_is_refused(what):
    value, cause = WRONG[what]
    guards = Guards()
    assert inspect(guards, value) == cause
    assert guards.counters == {cause: 1}


@pytest.mark.parametrize("value", [OWN, 1.4 * OWN, OWN + 0.2, 0.6 * OWN])
def test_what_is_close_passes_untouched(value):
    passed = inspect(Guards(), value)
    assert isinstance(passed, Give)
    np.testing.assert_array_equal(passed.value, np.asarray(value, np.float32))


@pytest.mark.parametrize(
    ("weight", "passes"), [(1, True), (16 * ONE, True), (16 * ONE + 1, False), (0, False)]
)
def test_weights_are_bounded(weight, passes):
    assert (inspect(Guards(), OWN, weight=weight) == "weight") is not passes


def test_a_newcomer_has_no_opinion_but_norms_still_bind():
    assert isinstance(inspect(Guards(), -OWN, held=0), Give)
    assert inspect(Guards(), 10 * OWN, held=0) == "norm"


def test_values_that_honest_peers_need_not_have_alike_are_bounded_in_size_alone():
    guards = Guards()
    for value, passes in (
        (OWN * 1e5, True),
        (-OWN, True),
        (OWN * 1e30, False),
        (OWN * np.nan, False),
    ):
        result = guards.inspect(give(value), OWN, ONE, ONE, comparable=False)
        assert isinstance(result, Give) == passes, value
    assert set(guards.counters) == {"norm", "not-finite"}


def test_a_vector_of_zeros_can_be_joined():
    guards, zeros = Guards(), np.zeros(100, np.float32)
    assert isinstance(guards.inspect(give(np.full(100, 3e-4)), zeros, ONE, ONE), Give)
    assert guards.inspect(give(np.full(100, 1.0)), zeros, ONE, ONE) == "norm"


@pytest.mark.parametrize(("value", "cause"), [(-OWN, "distance"), (10 * OWN, "norm")])
def test_clipping_shortens_the_pull(value, cause):
    guards = Guards(GuardSettings(beyond="clip", distance=0.5))
    passed = inspect(guards, value, held=ONE if cause == "distance" else 0)
    assert isinstance(passed, Give)
    centre, reach = (OWN, 0.5) if cause == "distance" else (0 * OWN, 4.0)
    length = np.linalg.norm(OWN)
    assert np.linalg.norm(passed.value - centre) == pytest.approx(reach * length, rel=1e-5)
    assert np.dot(passed.value - centre, value - centre) > 0
    assert guards.counters == {f"clipped-{cause}": 1}
    assert inspect(guards, np.full_like(OWN, np.nan)) == "not-finite"  # nothing to shorten
    assert inspect(guards, np.full_like(OWN, 3e38)) == "norm"


def test_a_value_that_is_far_too_large_pulls_no_further_than_others():
    guards = Guards(GuardSettings(beyond="clip", distance=0.5))
    passed = inspect(guards, 10 * OWN)
    assert isinstance(passed, Give)
    assert np.linalg.norm(passed.value - OWN) == pytest.approx(0.5 * np.linalg.norm(OWN), rel=1e-5)
    assert guards.counters == {"clipped-norm": 1, "clipped-distance": 1}


def test_rates_are_bounded_and_recover():
    guards = Guards(GuardSettings(rate=10, burst=20))
    assert [guards.allow("eve", 0.0) for _ in range(25)] == [True] * 20 + [False] * 5
    assert guards.allow("ben", 0.0)  # one's flood is not another's
    assert [guards.allow("eve", 1.0) for _ in range(11)] == [True] * 10 + [False]
    assert guards.counters["rate"] == 6


def test_nobody_is_excluded_for_its_values():
    guards = Guards()
    for _ in range(50):
        assert inspect(guards, -OWN) == "distance"
    assert isinstance(inspect(guards, OWN), Give)
    assert guards.counters == {"distance": 50}


def test_records_are_bounded():
    guards = Guards()
    for number in range(5000):
        guards.allow(f"x{number}", 0.0)
    assert guards.remembered == 4096


@pytest.mark.parametrize(
    "wrong", [{"distance": 0}, {"norm": -1.0}, {"senders": 2}, {"rate": float("nan")}]
)
def test_settings_without_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="guards: "):
        GuardSettings(**wrong)


# --- between gossiper and balances -------------------------------------------------------------------


def pair(value=OWN + 0.1, **settings):
    """Anna, with guards, and Eve, who holds this value."""
    anna, eve = (
        Gossiper(name, f"s-{name}", DictStore({"v": own.astype(np.float64)}), seed=1)
        for name, own in (("anna", OWN), ("eve", value))
    )
    for gossiper in (anna, eve):
        gossiper.inject("v", ONE)
    guards = Guards(GuardSettings(**settings))
    guard(anna, guards)
    introduce([anna, eve])
    return anna, eve, guards


def held(*gossipers):
    return total([Mass(g.value("v"), g.weight("v")) for g in gossipers])


def exchange(anna, eve):
    run({"anna": anna, "eve": eve}, MemoryNetwork(0), seconds=1.0)


def test_a_refused_transfer_goes_back_to_its_sender():
    anna, eve, guards = pair(-OWN)
    flipped, weight = held(anna, eve)
    eve.push("v", {"anna": ONE // 2}, 0.0)
    exchange(anna, eve)
    assert guards.counters == {"distance": 1}
    assert anna.counters["refused-distance"] == 1
    assert eve.counters["acknowledged-void"] == 1
    assert (anna.weight("v"), eve.weight("v")) == (ONE, ONE)  # as if nothing had been sent
    after, same = held(anna, eve)
    assert same == weight
    np.testing.assert_allclose(after, flipped)
    np.testing.assert_allclose(anna.value("v"), OWN.astype(np.float64))


def test_an_honest_transfer_is_credited_exactly():
    anna, eve, guards = pair()
    before, weight = held(anna, eve)
    eve.push("v", {"anna": ONE // 2}, 0.0)
    exchange(anna, eve)
    after, same = held(anna, eve)
    assert (same, anna.weight("v")) == (weight, ONE + ONE // 2)
    np.testing.assert_allclose(after, before, rtol=1e-12)
    assert not guards.counters


def test_a_clipped_transfer_is_credited_at_the_clipped_value():
    anna, eve, guards = pair(-OWN, beyond="clip", distance=0.5)
    own = OWN.astype(np.float64)
    eve.push("v", {"anna": ONE // 2}, 0.0)
    exchange(anna, eve)
    assert guards.counters == {"clipped-distance": 1}
    np.testing.assert_allclose(anna.value("v"), own + (0.5 / 1.5) * (0.5 * own - own))
    assert eve.counters["acknowledged-credited"] == 1


def test_duplicates_of_a_refused_transfer_get_the_same_answer():
    anna, eve, guards = pair(-OWN)
    eve.push("v", {"anna": ONE // 2}, 0.0)
    (message,) = eve.poll()
    for _ in range(3):
        anna.handle(message, 0.0)
    assert [ack.verdict for ack in anna.poll()] == ["void"] * 3
    assert guards.counters == {"distance": 1}
    anna.handle(replace(message, sequence=2, value=np.full(101, np.nan)), 0.0)
    assert [ack.verdict for ack in anna.poll()] == ["void"]


def test_what_is_usual_bounds_what_is_allowed():
    """Six senders are close; a seventh, far beyond them but below the ceiling, is out of place."""
    rng = np.random.default_rng(0)
    near = [OWN + rng.normal(0, 0.05 * OWN.std(), OWN.size) for _ in range(6)]
    guards, lax = Guards(), Guards(GuardSettings(outlier=None))
    far = 0.7 * OWN
    for each in (guards, lax):
        for number, value in enumerate(near):
            assert isinstance(inspect(each, value, sender=f"p{number}"), Give)
    assert inspect(guards, far) == "distance"
    assert isinstance(inspect(lax, far), Give)
    assert isinstance(inspect(Guards(), far), Give)  # nobody else was heard: only the ceiling binds


def test_a_refused_sender_in_rounds_is_not_waited_for():
    """In lockstep a peer waits for every neighbour's part: a refused one must not stop the round."""
    names = ["anna", "ben", "eve"]
    gossipers = {
        name: Gossiper(
            name, f"s-{name}", DictStore({"v": own.astype(np.float64)}), mode=RoundsMode(3), seed=1
        )
        for name, own in zip(names, (OWN, OWN, -OWN), strict=True)
    }
    for gossiper in gossipers.values():
        gossiper.inject("v", ONE)
    introduce(gossipers.values())
    for name in ("anna", "ben"):
        guard(gossipers[name], Guards())
    for gossiper in gossipers.values():
        gossiper.mode.begin_round(gossiper, 0)
    run(gossipers, MemoryNetwork(0), seconds=5)
    for name in ("anna", "ben"):
        assert gossipers[name].mode.finished(0)
        assert gossipers[name].counters["refused-distance"] > 0
        np.testing.assert_allclose(gossipers[name].value("v"), OWN.astype(np.float64))


# --- rates -------------------------------------------------------------------------------------------


def intake(person, **settings):
    dropped = Counter()
    made = Intake(
        person.security, {"global": SCHEMA}, guards=Guards(GuardSettings(**settings)),
        drop=lambda cause, _: dropped.update([cause]),
    )  # fmt: skip
    return made, dropped


def test_a_message_of_more_packets_than_the_burst_comes_through():
    """With the bounds as they are: a broker that takes small packets only, and a large vector."""
    (anna, ben), _ = group("anna", "ben")
    way_in, dropped = intake(ben)
    taken = []
    for sequence in range(1, 11):
        packets = anna.packets(ben, size=60_000, sequence=sequence, limit=1000)
        assert len(packets) > GuardSettings().burst
        taken += [way_in.take("global", packet, 0.0) for packet in packets]
    assert [message.sequence for message in taken if message is not None] == list(range(1, 11))
    assert not dropped


@pytest.mark.parametrize(("limit", "chunks"), [(4096, 1), (1000, 4)])
def test_messages_beyond_the_burst_are_dropped_however_they_are_cut(limit, chunks):
    (anna, ben), _ = group("anna", "ben")
    way_in, dropped = intake(ben, rate=1, burst=4.5)
    taken = []
    for sequence in range(1, 9):
        packets = anna.packets(ben, size=900, sequence=sequence, limit=limit)
        assert len(packets) == chunks
        taken += [way_in.take("global", packet, 0.0) for packet in packets]
    assert [message.sequence for message in taken if message is not None] == [1, 2, 3, 4]
    assert dropped["rate"] >= 4


def test_the_share_agrees_with_the_chunker():
    for size in (10, 5000, 50_000):
        packets = list(Chunker("anna@x/s", 1000).split([bytes(size)]))
        assert sum(map(message_share, packets)) == pytest.approx(max(1, len(packets) / 64))
    assert message_share(b"short") == 1.0
    assert message_share(bytes(40)) == 1.0  # of no chunks at all
    assert message_share(b"\xff" * 40) == MIN_SHARE  # of four thousand million


@pytest.mark.parametrize("bound", ["messages", "bytes"])
def test_a_flood_of_unfinished_messages_keeps_nobody_elses_from_completing(bound):
    """One member opens messages that it never finishes, within its rate, between others' packets."""
    (ben, eve, *others), _ = group("ben", "eve", "anna", "carl", "dora")
    way_in, dropped = intake(ben)
    if bound == "bytes":
        way_in.reassembler.max_total_bytes = way_in.reassembler.max_sender_bytes = 400_000
    streams = [other.packets(ben, size=4000, limit=500) for other in others]
    chunker, numbers = Chunker(f"{eve.name}/{eve.session}", 500), count()
    taken = []
    for turn in zip(*streams, strict=True):
        for packet in turn:
            taken.append(way_in.take("global", packet, 0.0))
            for _ in range(20):
                first = next(chunker.split([next(numbers).to_bytes(8, "big"), bytes(40_000)]))
                taken.append(
                    way_in.take("global", eve.security.seal(ben.name, "global", first), 0.0)
                )
    assert "rate" not in dropped
    finished = [message.sender for message in taken if message is not None]
    assert sorted(finished) == sorted(other.name for other in others)


# --- newcomers ---------------------------------------------------------------------------------------


SIZE = 200
START = np.random.default_rng(0).normal(0, 0.1, SIZE)
TRAINED = 4.5 * START


def elder_give(value, sender="anna@a", sequence=1, model="v"):
    return Give(model, sender, "s", sequence, "new@n", "t", ONE, np.asarray(value, np.float64))


def test_enough_elders_make_an_opinion_and_what_was_held_is_handed_on():
    opinion = InitialEstimate({"v": SIZE}, max_elders=3, wait=10.0)
    values = [TRAINED + shift for shift in (0.0, 0.1, 0.5)]
    assert opinion.estimate("v", 5, 0.0) is None
    for number, value in enumerate(values):
        assert opinion.estimate("v", 5, 1.0) is None
        assert opinion.hold(elder_give(value, f"p@{number}"), 1.0)
    formed = opinion.estimate("v", 5, 1.0)
    np.testing.assert_array_equal(formed.value, values[1])
    assert [each.sender for each in formed.gives] == ["p@0", "p@1", "p@2"]
    assert opinion.pending == []
    assert not opinion.hold(elder_give(TRAINED), 2.0)  # from now on the guards judge
    assert opinion.estimate("v", 5, 2.0) is None


@pytest.mark.parametrize(("elders", "heard"), [(1, 1), (2, 2), (4, 4), (9, 5), (0, 1)])
def test_nobody_waits_for_more_elders_than_there_are(elders, heard):
    opinion = InitialEstimate({"v": SIZE}, wait=1e9)
    for number in range(heard):
        assert opinion.estimate("v", elders, 0.0) is None
        opinion.hold(elder_give(TRAINED, f"p@{number}"), 0.0)
    assert opinion.estimate("v", elders, 0.0) is not None


def test_after_the_wait_those_that_were_heard_are_enough():
    opinion = InitialEstimate({"v": SIZE, "w": SIZE}, wait=10.0)
    opinion.hold(elder_give(TRAINED), 5.0)
    assert opinion.estimate("v", 5, 14.9) is None
    assert opinion.estimate("v", 5, 15.0) is not None
    assert opinion.estimate("w", 5, 1e9) is None  # nobody was heard: nothing to think
    assert opinion.pending == ["w"]


def test_one_elder_counts_once_whatever_its_label():
    opinion = InitialEstimate({"v": SIZE}, max_elders=3, wait=10.0)
    for number in range(10):
        assert opinion.hold(elder_give(-TRAINED, f"eve{number}@e", sequence=number + 1), 0.0)
    assert opinion.estimate("v", 5, 0.0) is None
    opinion.hold(elder_give(TRAINED, "anna@a"), 0.0)
    opinion.hold(elder_give(TRAINED, "ben@b"), 0.0)
    assert opinion.hold(
        elder_give(TRAINED, "carl@c"), 0.0
    )  # one too many: neither kept nor handled
    formed = opinion.estimate("v", 5, 0.0)
    assert [each.sender for each in formed.gives] == ["eve9@e", "anna@a", "ben@b"]
    np.testing.assert_array_equal(formed.value, TRAINED)


@pytest.mark.parametrize("value", [TRAINED[1:], TRAINED * np.nan, []])
def test_what_can_be_no_opinion_is_left_to_the_guards(value):
    opinion = InitialEstimate({"v": SIZE})
    assert not opinion.hold(elder_give(value), 0.0)
    assert not opinion.hold(elder_give(TRAINED, model="other"), 0.0)
    assert opinion.estimate("v", 1, 1e9) is None


def test_an_opinion_can_be_dropped():
    opinion = InitialEstimate({"v": SIZE})
    opinion.hold(elder_give(TRAINED), 0.0)
    assert [each.sender for each in opinion.drop("v")] == ["anna@a"]
    assert opinion.drop("v") == ()
    assert not opinion.hold(elder_give(TRAINED), 0.0)


def test_senseless_settings_are_refused():
    for wrong in ({"max_elders": 0}, {"wait": -1.0}, {"wait": float("nan")}):
        with pytest.raises(ValueError, match="initial estimate: "):
            InitialEstimate({"v": SIZE}, **wrong)


# --- with gossipers and guards ---------------------------------------------------------------------


def swarm(values):
    """A newcomer with guards, which holds back what elders with these values give to it."""
    elders = [
        Gossiper(f"elder@{number}", f"s{number}", DictStore({"v": np.array(value)}), seed=number)
        for number, value in enumerate(values)
    ]
    for elder in elders:
        elder.inject("v", ONE)
    store = DictStore({"v": START.copy()})
    newcomer = Gossiper("new@n", "t", store, seed=9)
    guards = Guards()
    guard(newcomer, guards)
    introduce([newcomer, *elders])
    return newcomer, elders, guards, store


def join(newcomer, elders, store, opinion):
    """What a peer does: hold back, form an opinion, count at it, then handle what was held back."""
    for elder in elders:
        elder.push("v", {newcomer.peer: ONE // 2}, 0.0)
        for message in elder.poll():
            assert opinion.hold(message, 0.0)
    formed = opinion.estimate("v", len(elders), 0.0)
    store.write("v", formed.value)
    newcomer.inject("v", ONE)
    for message in formed.gives:
        newcomer.handle(message, 0.0)
    by_name = {elder.peer: elder for elder in elders}
    for answer in newcomer.poll():
        by_name[answer.receiver].handle(answer, 0.0)
    return newcomer.value("v")


def test_elders_far_from_the_start_are_followed_and_none_is_refused():
    rng = np.random.default_rng(1)
    values = [TRAINED + rng.normal(0, 0.01, SIZE) for _ in range(5)]
    newcomer, elders, guards, store = swarm(values)
    found = join(newcomer, elders, store, InitialEstimate({"v": SIZE}))
    np.testing.assert_allclose(found, TRAINED, atol=0.03)
    assert not guards.counters
    assert newcomer.weight("v") == ONE + 5 * (ONE // 2)


@pytest.mark.parametrize("lie", [-TRAINED, 100 * TRAINED, np.zeros(SIZE), np.full(SIZE, 1e30)],
                         ids=["flipped", "blown up", "zero", "huge"])  # fmt: skip
@pytest.mark.parametrize("max_elders", [3, 5])
def test_one_liar_among_five_elders_is_not_followed(lie, max_elders):
    rng = np.random.default_rng(2)
    values = [lie, *(TRAINED + rng.normal(0, 0.01, SIZE) for _ in range(4))]  # it comes first
    newcomer, elders, guards, store = swarm(values)
    found = join(newcomer, elders, store, InitialEstimate({"v": SIZE}, max_elders=max_elders))
    np.testing.assert_allclose(found, TRAINED, atol=0.03)
    assert guards.counters.total() == 1
    liar, *honest = elders
    assert liar.counters["acknowledged-void"] == 1
    assert sum(elder.counters["acknowledged-credited"] for elder in honest) == max_elders - 1
