"""When a peer that agrees may leave: once everybody does, not when it merely is calm again."""

from __future__ import annotations

from types import SimpleNamespace

from peer_kit import quick

from gossamer.peer.lifecycle import Event, Lifecycle, State
from gossamer.peer.machine import Machine
from gossamer.peer.membership import Settling


class Scripted(Settling):
    """Hears what a test says, look after look: (all are done, it is disturbed)."""

    def __init__(self, looks):
        link = SimpleNamespace(name="a", engine=None, settings=quick(), machine=Machine())
        super().__init__(link)  # type: ignore[arg-type]
        self._looks = looks

    async def _push_until(self, reached):
        while not await reached():
            pass
        return True

    async def _agreed(self):
        return True

    def _all_done(self):
        return self._looks[0][0]

    async def _lost_agreement(self):
        disturbed = self._looks[0][1]
        if len(self._looks) > 1:
            del self._looks[0]
        return disturbed


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


def test_who_was_lost_agreement_for_a_moment_waits_for_the_others_all_the_same(run):
    settling = Scripted([(False, True), (False, False), (False, False), (True, False)])
    again = [State.SETTLING, State.DONE]
    assert run(states(settling)) == [*again, *again]


def test_who_sees_all_done_and_is_calm_is_through(run):
    settling = Scripted([(False, False), (True, False)])
    assert run(states(settling)) == [State.SETTLING, State.DONE]
