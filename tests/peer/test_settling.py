"""When a peer that agrees may leave: once all peers do, not as soon as its own values agree again."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from peer_kit import Clocks, begin, make_learner, quick

from gossamer.peer.engine import Engine
from gossamer.peer.lifecycle import Event, Lifecycle, State
from gossamer.peer.link import Link
from gossamer.peer.machine import Machine, Worker
from gossamer.peer.membership import Settling, deliver_goodbye, hand_over
from gossamer.peer.presence import Offline, Status


class Scripted(Settling):
    """Sees what a test scripts, check after check: (all peers are done, agreement is lost)."""

    def __init__(self, checks):
        link = SimpleNamespace(
            name="a",
            engine=None,
            settings=quick(),
            machine=Machine(),
            all_done=lambda: checks[0][0],
        )
        super().__init__(link)  # type: ignore[arg-type]
        self._checks = checks

    async def _push_until(self, reached):
        while not await reached():
            pass
        return True

    async def _has_settled(self):
        return True

    async def _lost_agreement(self):
        lost = self._checks[0][1]
        if len(self._checks) > 1:
            del self._checks[0]
        return lost


async def states(settling: Settling) -> list[State]:
    """The states that a peer goes through between its training and its goodbye."""
    life, seen = Lifecycle(), []
    life.state = State.SETTLING
    while life.state is not State.LEAVING:
        seen.append(life.state)
        if life.state is State.SETTLING:
            await settling.settle()
            life.fire(Event.AGREED)
        else:
            life.fire(Event.ALL_DONE if await settling.keep_pushing() else Event.LOST_AGREEMENT)
    return seen


def test_a_peer_that_lost_agreement_for_a_moment_still_waits_for_the_others(run):
    settling = Scripted([(False, True), (False, False), (False, False), (True, False)])
    again = [State.SETTLING, State.DONE]
    assert run(states(settling)) == [*again, *again]


def test_a_peer_that_agrees_leaves_once_all_are_done(run):
    settling = Scripted([(False, False), (True, False)])
    assert run(states(settling)) == [State.SETTLING, State.DONE]


def test_a_peer_that_finds_others_only_when_it_is_done_does_not_wait_for_ever(run):
    """Without neighbours it had nothing to agree on, so `settle` was never called."""
    clocks = Clocks()

    class Endless:
        """A link to a peer that trains no more, but is never done."""

        name, settings, machine, engine = "a", quick(settle_timeout=60.0), clocks, None
        roster = SimpleNamespace(online=dict)
        turns = 0

        def __init__(self) -> None:
            self.engine = SimpleNamespace(request_push=lambda: None)
            self.worker = self

        async def run(self, function: Any) -> None:
            function()

        def wake(self) -> None:
            clocks.ahead += 30.0

        async def next_turn(self) -> None:
            self.turns += 1

        def others_train(self) -> bool:
            return False

        def all_done(self) -> bool:
            return self.turns > 10

    link = Endless()
    settling = Settling(link)  # type: ignore[arg-type]
    assert run(settling.keep_pushing())
    assert settling.timed_out
    assert link.turns <= 2


def test_a_peer_that_keeps_what_it_agreed_upon_does_not_miss_a_neighbour(run, caplog):
    caplog.set_level(logging.INFO)
    engine = begin(Engine("a", make_learner("a"), quick()))

    async def leave() -> None:
        async with Worker("a") as worker:
            await hand_over(Link(engine, worker, on_record=lambda _: None))

    engine.gossiper.close()
    run(leave())
    assert "keeps its mass" not in caplog.text


@pytest.mark.parametrize(
    ("closed", "words"),
    [
        (True, "not all its transfers were acknowledged"),
        (False, "not all its mass was handed over"),
    ],
)
def test_what_was_not_done_in_time_is_named(run, caplog, closed, words):
    async def at_once(function: Any) -> Any:
        return function()

    link = SimpleNamespace(
        name="a", settings=SimpleNamespace(leave_timeout=0.0), wake=lambda: None,
        worker=SimpleNamespace(run=at_once), next_turn=lambda: asyncio.Event().wait(),
        engine=SimpleNamespace(hand_over=lambda: False, gossiper=SimpleNamespace(closed=closed)),
    )  # fmt: skip
    run(hand_over(link))  # type: ignore[arg-type]
    assert f"peer a: {words} within 0 s; it keeps the mass of the others" in caplog.text


def test_goodbyes_that_came_before_ours_count_even_if_ours_is_not_delivered_back(run):
    """The broker has accepted ours, and the time is over."""
    events: list[Any] = []

    async def publish_goodbye(_: Status) -> None:
        events.append(Offline("b"))

    async def earlier_goodbyes() -> None:
        await asyncio.Event().wait()

    link = SimpleNamespace(
        publish_goodbye=publish_goodbye, earlier_goodbyes=earlier_goodbyes,
        take_events=lambda: events,
    )  # fmt: skip
    told = run(deliver_goodbye(link, Status("left", "s"), 0.0))  # type: ignore[arg-type]
    assert told == ("", [Offline("b")])
