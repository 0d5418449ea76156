"""Pushes at the pace of training, on graphs that change from push to push."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gossamer.gossip import MIN_WEIGHT, ONE, DictStore, Give, Gossiper, PacedMode, introduce


def peers(turns: dict[str, list[list[str]]], values: dict[str, float]) -> dict[str, Gossiper]:
    made = {}
    for name, value in values.items():
        store = DictStore({"v": np.full(2, value)})
        made[name] = Gossiper(
            name, f"s{name}", store, mode=PacedMode(neighbours_by_push=turns.get(name, ()))
        )
        made[name].inject("v", ONE)
    introduce(list(made.values()))
    return made


def push_all(swarm: dict[str, Gossiper], now: float) -> list[tuple[str, str]]:
    """One request of everybody, delivered at once; who gave to whom."""
    for peer in swarm.values():
        peer.mode.request()
        peer.tick(now)
    pushed = []
    waiting = [message for peer in swarm.values() for message in peer.poll()]
    while waiting:
        for message in waiting:
            if isinstance(message, Give):
                pushed.append((message.sender, message.receiver))
            swarm[message.receiver].handle(message, now)
        waiting = [message for peer in swarm.values() for message in peer.poll()]
    return pushed


def test_turns_are_taken_one_after_the_other() -> None:
    swarm = peers({"a": [["b"], ["c"], ["b", "c"]]}, {"a": 0.0, "b": 1.0, "c": 2.0})
    given = [dict(push_all(swarm, float(step)))["a"] for step in range(6)]
    assert given[:2] == given[3:5] == ["b", "c"]
    assert {given[2], given[5]} <= {"b", "c"}


def test_one_peer_exponential_averages_exactly_after_two_pushes_of_four() -> None:
    names = "abcd"
    turns = {
        name: [[names[(place + hop) % 4]] for hop in (1, 2)] for place, name in enumerate(names)
    }
    swarm = peers(turns, dict(zip(names, (0.0, 4.0, 8.0, 12.0), strict=True)))
    for step in range(2):
        push_all(swarm, float(step))
    for peer in swarm.values():
        np.testing.assert_allclose(peer.value("v"), 6.0, rtol=1e-12)
        assert peer.weight("v") == ONE


def test_a_turn_of_somebody_who_cannot_be_reached_passes() -> None:
    swarm = peers({"a": [["b"], ["c"]]}, {"a": 0.0, "b": 1.0, "c": 2.0})
    swarm["a"].peer_offline("b")
    given = [
        [to for sender, to in push_all(swarm, float(step)) if sender == "a"] for step in (0, 1)
    ]
    assert given == [[], ["c"]]


def test_a_busy_neighbour_is_waited_for() -> None:
    swarm = peers({"a": [["b"], ["b"], ["c"]]}, {"a": 0.0, "b": 1.0, "c": 2.0})
    a = swarm["a"]
    for now in (0.0, 0.01):
        a.mode.request()
        a.tick(now)
    first = [message.receiver for message in a.poll() if isinstance(message, Give)]
    assert first == ["b"]  # the second push is for b too, and b has not answered yet
    assert a.account("v").open == ONE // 2


def test_a_newcomer_to_a_model_that_has_ended_is_not_welcomed() -> None:
    """Its card may arrive after the change, and name models that both had before."""
    store = DictStore({"old": np.zeros(2), "new": np.zeros(3)})
    gossiper = Gossiper("a", "sa", store, mode=PacedMode())
    for model in ("old", "new"):
        gossiper.inject(model, ONE)
    del store._models["old"]
    gossiper.update_models()
    gossiper.peer_online("b", "sb", ["old", "new"])
    for model in ("old", "new"):
        gossiper.mode.welcome(model, "b")
    gossiper.tick(0.0)
    assert [message.model for message in gossiper.poll() if isinstance(message, Give)] == ["new"]


def test_a_newcomer_is_welcomed_with_whatever_weight_is_left():
    """Else one whose weight was lost to the dead, and a newcomer that waits for it, would wait for ever."""
    mode = PacedMode(1)
    gossiper = Gossiper("a", "a-1", DictStore({"v": np.ones(2)}), mode=mode)
    gossiper.inject("v", MIN_WEIGHT)
    gossiper.peer_online("b", "b-1", ["v"])
    mode.request()
    gossiper.tick(0.0)
    assert not gossiper.poll()
    mode.welcome("v", "b")
    gossiper.tick(1.0)
    (give,) = gossiper.poll()
    assert (give.receiver, give.weight) == ("b", MIN_WEIGHT // 2)


def restored(snapshot: dict[str, Any]) -> Gossiper:
    mode = PacedMode(neighbours_by_push=[["b"], ["c"]])
    gossiper = Gossiper.restore(snapshot, DictStore({"v": np.ones(2)}), mode=mode)
    for other in "bc":
        gossiper.peer_online(other, f"s{other}", ["v"])
    return gossiper


def test_a_restart_continues_the_schedule_and_makes_the_push_that_waits() -> None:
    swarm = peers({"a": [["b"], ["c"]]}, {"a": 0.0, "b": 1.0, "c": 2.0})
    a, c = swarm["a"], swarm["c"]
    push_all(swarm, 0.0)
    a.push("v", {"c": ONE // 4}, 1.0)
    a.mode.request()
    a.tick(1.0)  # the push to c waits, because a transfer to it is open
    again = restored(a.snapshot())
    for give in a.poll():
        c.handle(give, 1.0)
    for answer in c.poll():
        again.handle(answer, 1.0)
    again.tick(2.0)
    assert [give.receiver for give in again.poll()] == ["c"]


def test_a_snapshot_without_the_state_of_the_mode_is_read() -> None:
    snapshot = peers({}, {"a": 0.0, "b": 1.0, "c": 2.0})["a"].snapshot()
    a = restored({**snapshot, "mode": {}})
    a.mode.request()
    a.tick(0.0)
    assert [give.receiver for give in a.poll()] == ["b"]


def test_neither_a_welcome_nor_the_schedule_is_lost_when_a_push_fails():
    store = DictStore({"v": np.full(2, np.nan)})
    mode = PacedMode(neighbours_by_push=[["b"], ["c"]])
    gossiper = Gossiper("a", "sa", store, mode=mode)
    gossiper.inject("v", ONE)
    for other in "bcd":
        gossiper.peer_online(other, f"s{other}", ["v"])
    mode.welcome("v", "d")
    mode.request()
    gossiper.tick(0.0)
    assert not gossiper.poll()
    store.write("v", np.ones(2))
    gossiper.tick(1.0)
    assert [give.receiver for give in gossiper.poll()] == ["b", "d"]


def test_a_share_that_would_fall_below_the_floor_is_kept():
    mode = PacedMode(fraction=0.5)
    gossiper = Gossiper("a", "a-1", DictStore({"v": np.ones(2)}), mode=mode)
    gossiper.inject("v", 2 * MIN_WEIGHT - 1)
    gossiper.peer_online("b", "b-1", ["v"])
    mode.request()
    gossiper.tick(0.0)
    assert not gossiper.poll()
    gossiper.inject("v", 1)
    gossiper.tick(1.0)
    assert [give.weight for give in gossiper.poll()] == [MIN_WEIGHT]


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="fraction is 1"):
        PacedMode(fraction=1)
    with pytest.raises(ValueError, match="fanout is 0"):
        PacedMode(0)
