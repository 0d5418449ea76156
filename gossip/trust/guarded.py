"""Guards put between a gossiper and its vault: what they refuse is answered "void" like any defect."""

from __future__ import annotations

from collections.abc import Callable

from ..balances import Vault
from ..gossiper import Gossiper
from ..messages import Give
from .guards import Guards


class GuardedVault(Vault):
    """A vault that asks the guards before it credits. Takes over the state of another."""

    def __init__(self, gossiper: Gossiper, guards: Guards, clock: Callable[[], float]) -> None:
        self.__dict__.update(gossiper._vault.__dict__)  # the same books, not a copy of them
        self._guards, self._clock = guards, clock
        self._passed: tuple[Give, Give] | None = None

    def defect(self, give: Give) -> str | None:
        """What is wrong with a transfer, in its form or to the guards."""
        defect = super().defect(give)
        if defect is not None:
            return defect
        vector = give.vector
        worth = self.injected[vector] or self._promised.get(vector, 0)
        verdict = self._guards.inspect(
            give, self.store.read(vector), self.weights[vector], worth, self._clock(),
            counting=bool(self.injected[vector]),
        )  # fmt: skip
        if isinstance(verdict, str):
            return verdict
        self._passed = (give, verdict)
        return None

    def credit(self, give: Give) -> str | None:
        """Absorb a transfer as the guards let it pass."""
        passed, self._passed = self._passed, None
        if passed is None or passed[0] is not give:
            return super().credit(give)
        return super().credit(passed[1])


def guard(gossiper: Gossiper, guards: Guards, clock: Callable[[], float]) -> None:
    """Let `guards` decide what `gossiper` credits, from now on. Call it once, after a restore too.

    clock: the one whose time is handed to the gossiper's `tick`.
    """
    gossiper._state.vault = GuardedVault(gossiper, guards, clock)
