"""Every client alone: what learning together has to beat."""

from __future__ import annotations

from collections.abc import Sequence

from .client import Client
from .method import Method, Turn


class Local(Method):
    """Each client trains its own network on its own samples. There is no state besides them."""

    bound = True

    def start(self, clients: Sequence[Client]) -> None:
        return None

    def round(self, state: None, clients: Sequence[Client], turn: Turn) -> None:
        for k in turn.pick(clients):
            clients[k].train()
