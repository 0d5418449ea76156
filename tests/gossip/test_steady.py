"""Steady gossip: values without weight, bounded moves, and allowances per neighbour."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.gossip import (
    ONE,
    DictStore,
    Give,
    Gossiper,
    MemoryNetwork,
    SteadyMode,
    introduce,
    run,
)
from gossamer.gossip.robust import MAX_ALLOWANCE, RATE, limits, needed_neighbours, step_factor

SIZE = 3


def receiver(neighbours: int = 4, **options: object) -> Gossiper:
    """A peer at 0 with so many neighbours, after one round in which training moved it by 1."""
    mode = SteadyMode(**options)  # type: ignore[arg-type]
    gossiper = Gossiper("me", "s", DictStore({"v": np.zeros(SIZE)}), mode=mode)
    gossiper.inject("v", ONE)
    for number in range(neighbours):
        gossiper.peer_online(f"n{number}", f"s{number}", ["v"])
    gossiper.tick(0.0)
    gossiper.set_value("v", np.array([1.0, 0.0, 0.0]))
    end_round(gossiper)
    gossiper.set_value("v", np.zeros(SIZE))
    return gossiper


def end_round(gossiper: Gossiper) -> None:
    gossiper.mode.request()  # type: ignore[attr-defined]
    gossiper.tick(0.0)
    gossiper.poll()


def value_from(
    sender: str, sequence: int, value: object, weight: int = 0, session: str = ""
) -> Give:
    array = np.asarray(value, dtype=float)
    session = session or f"s{sender[1:]}"
    return Give("v", sender, session, sequence, "me", "s", weight, array)


def verdicts(gossiper: Gossiper) -> list[str]:
    return [message.verdict for message in gossiper.poll()]  # type: ignore[union-attr]


# --- the rule ----------------------------------------------------------------------------------------


def test_the_limits_are_those_of_the_2b_plus_1st_largest():
    assert limits([1, 9, 3, 4], [0.5, 0.0, 0.1, 0.2], 1, None) == (3, 0.2)
    assert limits([1, 9, 3, 4], [0.001] * 4, 1, None) == (3, 0.02)


def test_with_few_known_neighbours_the_least_counts_and_early_steps_are_bounded_by_training():
    assert limits([5.0, 2.0], [4.0, 1.0], 1, None) == (2.0, 0.5)
    assert limits([5.0, 2.0], [0.0, 0.1], 1, 1.0) == (1.5, 0.02)


def test_a_step_shrinks_with_distance_and_with_excess_loss():
    assert step_factor(1.0, 0.0, 2.0, 0.02) == 1.0
    assert step_factor(4.0, 0.0, 2.0, 0.02) == 0.5
    assert step_factor(2.0, 0.2, 2.0, 0.1) == pytest.approx(0.25)
    assert step_factor(math.inf, 0.0, math.inf, 1.0) == step_factor(1.0, math.inf, 1.0, 1.0) == 0.0


def test_peers_that_count_by_samples_follow_smaller_ones_less_and_claims_gain_nothing():
    steps = {}
    for claimed in (1, 2, 4, 10**6):
        gossiper = receiver()
        gossiper.adjust("v", 4 * ONE)
        gossiper.peer_online("n0", "s0", ["v"], weight=claimed * ONE)
        gossiper.handle(value_from("n0", 1, [1.0, 0.0, 0.0]), 0.0)
        steps[claimed] = float(gossiper.value("v")[0])
    assert steps[4] > 0
    assert steps == {1: steps[4] / 4, 2: steps[4] / 2, 4: steps[4], 10**6: steps[4]}


@pytest.mark.parametrize(("hostile", "needed"), [("auto", 4), (1, 4), (2, 5), (0, 1)])
def test_how_many_neighbours_it_takes(hostile, needed):
    assert needed_neighbours(hostile) == needed


# --- one peer among hostile neighbours ---------------------------------------------------------------

NUMBER = st.floats(allow_nan=True, allow_infinity=True, width=32)
MESSAGE = st.tuples(
    st.sampled_from(["n0", "n1", "n2", "n3", "stranger"]),
    st.integers(0, 6),
    st.lists(NUMBER, min_size=SIZE - 1, max_size=SIZE),
    st.sampled_from([0, 0, 0, 1, ONE, 1 << 62]),
    st.sampled_from(["", "another session"]),
)


CHURN = st.tuples(st.sampled_from(["leaves", "returns"]), st.sampled_from(["n0", "n1", "n2", "n3"]))


@given(
    st.lists(st.one_of(MESSAGE, MESSAGE, st.just("round"), CHURN), max_size=60), st.integers(1, 2)
)
@settings(max_examples=100)
def test_no_sequence_of_messages_moves_a_peer_further_than_the_bound(events, hostile):
    """Whatever members send, and however often they leave and return.

    Each message moves x by β·τ at most, a neighbour is looked at only so often, and no weight appears or is
    lost.
    """
    scored = 0

    def score(model: str, value: np.ndarray | None) -> float:
        nonlocal scored
        scored += 1
        return 0.0 if value is None else float(np.abs(value).sum())

    peer = receiver(hostile=hostile, score=score)
    rounds, returns = 1, 0
    distances: dict[str, float] = {}
    looks: Counter[str] = Counter()
    sessions = {f"n{number}": f"s{number}" for number in range(4)}
    for event in events:
        before, scored_before = np.array(peer.value("v")), scored
        match event:
            case "round":
                end_round(peer)
                rounds += 1
            case "leaves", name:
                if name in sessions:
                    peer.peer_gone(name, sessions.pop(name))
            case "returns", name:
                returns += 1
                sessions[name] = f"return {returns}"
                assert peer.peer_online(name, sessions[name], ["v"])
            case sender, sequence, value, weight, session:
                session = session or sessions.get(sender, "gone")
                message = value_from(sender, sequence, value, weight, session)
                peer.handle(message, 0.0)
                if scored > scored_before:
                    looks[sender] += 1
                    with np.errstate(over="ignore"):
                        distances[sender] = float(np.linalg.norm(message.value - before))
        move = float(np.linalg.norm(peer.value("v") - before))
        if scored > scored_before:
            known = sorted(
                (distances[name] for name in sessions if name in distances), reverse=True
            )
            tau = known[2 * hostile] if len(known) > 2 * hostile else known[-1]
            assert move <= tau / (len(sessions) + 1) * (1 + 1e-9)
        else:
            assert move == 0
        assert np.isfinite(peer.value("v")).all()
        account = peer.account("v")
        assert (account.held, account.open, account.injected) == (ONE, 0, ONE)
    assert all(count <= MAX_ALLOWANCE + RATE * rounds for count in looks.values())
    assert "stranger" not in looks


def test_one_far_value_among_honest_ones_moves_little():
    peer = receiver()
    for number, value in enumerate([[1, 0, 0], [0, 1, 0], [0, 0, 1]]):
        peer.handle(value_from(f"n{number}", 1, value), 0.0)
    before = np.array(peer.value("v"))
    peer.handle(value_from("n3", 1, [1e6, 0, 0]), 0.0)
    assert 0 < np.linalg.norm(peer.value("v") - before) <= 1.2 / 5


def test_a_value_with_a_high_loss_hardly_counts_however_near_it_is():
    def score(model: str, value: np.ndarray | None) -> float:
        return 0.0 if value is None else max(0.0, 10.0 * float(value[0]))

    peer = receiver(score=score)
    for number, value in enumerate([[0, 1, 0], [0, 1, 0], [0, 1, 0]]):
        peer.handle(value_from(f"n{number}", 1, value), 0.0)
    y = peer.value("v")[1]
    peer.handle(value_from("n3", 1, [1, y, 0]), 0.0)
    assert peer.value("v")[0] < 1e-4
    assert y == pytest.approx(1 - 0.8**3)


def test_repeated_values_use_up_the_allowance_and_own_rounds_restore_it():
    peer = receiver()
    for sequence in range(1, 6):
        peer.handle(value_from("n0", sequence, [1, 0, 0]), 0.0)
    assert verdicts(peer) == ["credited", *["void"] * 4]
    assert peer.counters["refused-allowance"] == 4
    end_round(peer)
    # A new session of the same member has no new allowance.
    for sequence in (1, 2):
        peer.handle(value_from("n0", sequence, [1, 0, 0], session="new"), 0.0)
    assert verdicts(peer) == ["credited", "void"]


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (value_from("n0", 1, [1, 2]), "wrong-length"),
        (value_from("n0", 1, [1, 2, math.nan]), "not-finite"),
        (value_from("n0", 1, [1, 2, 3], weight=1), "weight"),
        (value_from("stranger", 1, [1, 2, 3]), "no-neighbour"),
    ],
)
def test_malformed_values_are_void_and_cost_no_allowance(message, cause):
    peer = receiver()
    peer.handle(message, 0.0)
    assert verdicts(peer) == ["void"]
    assert peer.counters[f"refused-{cause}"] == 1
    assert (peer.value("v") == 0).all()
    peer.handle(value_from("n0", 2, [1, 0, 0]), 0.0)
    assert verdicts(peer) == ["credited"]


def test_before_its_first_training_a_peer_follows_nobody():
    gossiper = Gossiper("me", "s", DictStore({"v": np.zeros(SIZE)}), mode=SteadyMode())
    gossiper.inject("v", ONE)
    gossiper.peer_online("n0", "s0", ["v"])
    gossiper.handle(value_from("n0", 1, [1, 0, 0]), 0.0)
    assert (gossiper.value("v") == 0).all()


def test_a_newcomer_starts_from_the_median_of_three_values():
    mode = SteadyMode(hostile=1)
    peer = Gossiper("me", "s", DictStore({"v": np.full(SIZE, 7.0)}), mode=mode)
    peer.inject("v", ONE, after_first_transfer=True)
    for number in range(4):
        peer.peer_online(f"n{number}", f"s{number}", ["v"])
    peer.handle(value_from("n0", 1, [1, 1, 1]), 0.0)
    peer.handle(value_from("n0", 2, [1, 1, 1]), 0.0)
    peer.handle(value_from("n1", 1, [1e9, -1e9, 0]), 0.0)
    assert (peer.value("v") == 7).all()
    assert peer.injected("v") == 0
    peer.handle(value_from("n2", 1, [2, 2, 2]), 0.0)
    assert peer.value("v").tolist() == [2, 1, 1]
    assert peer.injected("v") == ONE


def test_a_newcomer_is_welcomed_as_soon_as_the_value_can_be_sent():
    mode = SteadyMode()
    store = DictStore({"v": np.full(SIZE, np.nan)})
    gossiper = Gossiper("me", "s", store, mode=mode)
    gossiper.inject("v", ONE)
    gossiper.peer_online("n0", "s0", ["v"])
    mode.welcome("v", "n0")
    gossiper.tick(0.0)
    assert not gossiper.poll()
    store.write("v", np.ones(SIZE))
    gossiper.tick(1.0)
    assert [message.receiver for message in gossiper.poll()] == ["n0"]


# --- a swarm -----------------------------------------------------------------------------------------


def swarm(count: int, **options: object) -> dict[str, Gossiper]:
    peers = {}
    for number in range(count):
        store = DictStore({"v": np.full(SIZE, float(number))})
        mode = SteadyMode(**options)  # type: ignore[arg-type]
        name = f"p{number}"
        peers[name] = Gossiper(name, f"s{number}", store, mode=mode, seed=number)
        peers[name].inject("v", ONE)
    introduce(peers.values())
    return peers


def test_honest_peers_come_to_agree_between_their_values_and_keep_their_weight():
    peers = swarm(6)
    network: MemoryNetwork = MemoryNetwork()
    now = 0.0
    for round in range(200):
        for peer in peers.values():
            if round < 6:  # a little training, of which early steps are a multiple
                peer.set_value("v", peer.value("v") + 0.001 * (-1) ** round)
            peer.mode.request()  # type: ignore[attr-defined]
        now = run(peers, network, start=now, seconds=0.05)
    values = np.array([peer.value("v")[0] for peer in peers.values()])
    assert np.ptp(values) < 1e-2
    assert 1 < values.mean() < 4
    assert all(peer.account("v").held == ONE for peer in peers.values())


def test_neighbours_are_served_in_turn():
    peers = swarm(6, fanout=2)
    me = peers["p0"]
    served: list[str] = []
    for _ in range(3):
        me.mode.request()  # type: ignore[attr-defined]
        me.tick(0.0)
        for message in me.poll():
            served.append(message.receiver)
            peers[message.receiver].handle(message, 0.0)
            for answer in peers[message.receiver].poll():
                me.handle(answer, 0.0)
    assert len(served) == 6
    assert set(served) == {f"p{number}" for number in range(1, 6)}


def test_a_neighbour_that_never_acknowledges_does_not_hold_up_training():
    peers = swarm(5)
    me = peers["p0"]
    me.mode.request()  # type: ignore[attr-defined]
    me.tick(0.0)
    messages = me.poll()
    assert not me.mode.caught_up(me)  # type: ignore[attr-defined]
    for message in messages[1:]:
        peers[message.receiver].handle(message, 0.0)
        for answer in peers[message.receiver].poll():
            me.handle(answer, 0.0)
    assert me.mode.caught_up(me)  # type: ignore[attr-defined]


def test_a_leaver_hands_nothing_over_and_is_done_when_its_values_are_acknowledged():
    peers = swarm(3)
    leaver = peers["p0"]
    leaver.hand_over(0.0)
    assert leaver.poll() == []
    assert leaver.is_drained()
    assert leaver.account("v").held == ONE


def test_a_restored_peer_remembers_what_it_knows_of_its_neighbours():
    peer = receiver()
    peer.handle(value_from("n0", 1, [1, 0, 0]), 0.0)
    again = Gossiper.restore(peer.snapshot(), DictStore({"v": np.zeros(SIZE)}), mode=SteadyMode())
    again.peer_online("n0", "s0", ["v"])
    peer.poll()
    again.handle(value_from("n0", 2, [1, 0, 0]), 0.0)
    assert again.counters["refused-allowance"] == 1


def test_a_dry_run_says_what_would_happen_and_changes_nothing():
    peer = receiver(score=lambda model, value: 0.0 if value is None else float(np.abs(value).sum()))
    for number in range(3):
        peer.handle(value_from(f"n{number}", 1, [0, 1, number]), 0.0)
    message = value_from("n3", 1, [2, 0, 0])
    before = peer.snapshot()
    would = peer.mode.would_move(peer, message)  # type: ignore[attr-defined]
    assert peer.snapshot()["mode"] == before["mode"]
    peer.handle(message, 0.0)
    np.testing.assert_array_equal(peer.value("v"), would)
    assert peer.mode.would_move(peer, message) == "allowance"  # type: ignore[attr-defined]
