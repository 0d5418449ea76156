"""When a peer that agrees may leave: once everybody does, not when it merely is calm again."""

from __future__ import annotations

from types import SimpleNamespace

from peer_kit import quick

from gossamer.peer.ending import Settling


class Scripted(Settling):
    """Hears what a test says, look after look: (all are done, it is disturbed)."""

    def __init__(self, looks):
        self.phases, self._looks = [], looks
        self._member = SimpleNamespace(name="a", enter=self.phases.append)
        self._settings = quick()

    async def _push_until(self, reached, limit):
        while not await reached():
            pass

    async def _agreed(self):
        return True

    def _all_done(self):
        return self._looks[0][0]

    async def _disturbed(self):
        disturbed = self._looks[0][1]
        if len(self._looks) > 1:
            del self._looks[0]
        return disturbed


def test_who_was_disturbed_for_a_moment_waits_for_the_others_all_the_same(run):
    settling = Scripted([(False, True), (False, False), (False, False), (True, False)])
    run(settling._agree())
    assert settling.phases == ["settling", "done", "settling", "done"]


def test_who_sees_all_done_and_is_calm_is_through(run):
    settling = Scripted([(False, False), (True, False)])
    run(settling._agree())
    assert settling.phases == ["settling", "done"]
