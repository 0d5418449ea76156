"""Guards put between a gossiper and its balances: what they refuse is answered "void" like any defect."""

from __future__ import annotations

from collections.abc import Callable

from ..gossiper import Gossiper
from ..messages import Give
from .guards import Guards


def guard(gossiper: Gossiper, guards: Guards, clock: Callable[[], float]) -> None:
    """Let `guards` decide what `gossiper` credits, from now on. Call it once, after a restore too.

    clock: the one whose time is handed to the gossiper's `tick`.
    """

    def admit(give: Give) -> Give | str:
        injected = gossiper.injected(give.model)
        worth = injected or gossiper.promised(give.model)
        own, held = gossiper.value(give.model), gossiper.weight(give.model)
        return guards.inspect(give, own, held, worth, clock(), counting=bool(injected))

    gossiper.admit = admit
