"""When a peer that agrees may leave: once all peers do, not as soon as its own values agree again."""

from __future__ import annotations

from types import SimpleNamespace

from peer_kit import quick

from gossamer.peer.lifecycle import Event, Lifecycle, State
from gossamer.peer.machine import Machine
from gossamer.peer.membership import Settling


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
