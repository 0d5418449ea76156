"""A learner that learns nothing, at once: what remains of a peer is its gossip."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ...models import Metrics, SlicedNetwork, mlp
from .gate import say_through, wait_for_turn

LAYOUT = "784=300=100=10"


def network(peer: str) -> SlicedNetwork:
    """The paper's network of 266,610 parameters, all of it global."""
    return SlicedNetwork(mlp(LAYOUT), {"global": LAYOUT.replace("=", "-")}, peer=peer, seed=1)


class IdleLearner:
    """Waits for its turn instead of training, and says when the averaging after it is over.

    Without a folder there are no turns: a stretch takes `pause` seconds.
    """

    def __init__(self, peer: str, folder: Path | None, pause: float = 0.0):
        self.network = network(peer)
        self._folder, self._pause = folder, pause
        self._turn = -1

    def train(self, steps: int) -> Metrics:
        """Change nothing."""
        if self._folder is None:
            time.sleep(self._pause)
        else:
            if self._turn < 0:
                say_through(self._folder, "peers", -1, self.network.peer)
            self._turn += 1
            wait_for_turn(self._folder, "peers", self._turn)
        return Metrics()

    def test(self) -> Metrics:
        """Measure nothing. Peers test when an averaging is over."""
        if self._folder is not None:
            say_through(self._folder, "peers", self._turn, self.network.peer)
        return Metrics()

    def state(self) -> dict[str, Any]:
        """Hold nothing."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over nothing."""


def make_learner(peer: str, folder: str | None, pause: float = 0.0) -> IdleLearner:
    """The entry point of the benchmark's peers."""
    return IdleLearner(peer, None if folder is None else Path(folder), pause)
