"""A session's gossiper and its mode: made as the settings ask, new or from a checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeAlias

import numpy as np

from ..gossip import (
    Array,
    Gossiper,
    PacedMode,
    RetryPolicy,
    RoundsMode,
    ServerMode,
    Store,
    as_sent,
    wide_enough,
)
from ..gossip.security import Guards, guard
from .machine import Machine
from .outgoing import Compression
from .settings import Settings

PeerMode: TypeAlias = PacedMode | RoundsMode | ServerMode


class Sessions:
    """Makes one peer's gossipers, one after the other: each session has its own, and a mode of its own.

    vectors: all that the peer has. guards: what decides about transfers, if anything does.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        vectors: Collection[str],
        store: Store,
        *,
        compression: Compression,
        guards: Guards | None,
        seed: int,
        machine: Machine,
        retry: RetryPolicy,
    ) -> None:
        self._retry = retry
        self._name, self._settings, self._vectors, self._store = name, settings, vectors, store
        self._compression, self._guards = compression, guards
        self._machine = machine
        self._rng = np.random.default_rng(seed)
        self._lossy = None if settings.dtype != "float16" else _as_float16

    def begin(self) -> tuple[Gossiper, PeerMode]:
        """Start a new session; nobody knows what was compressed in an older one."""
        links, mode = self._compression.links, self._mode()
        links.forget()
        gossiper = Gossiper(
            self._name, self._machine.new_session(), self._store,
            mode=mode, seed=self._rng, retry=self._retry, lossy=self._lossy, links=links,
        )  # fmt: skip
        return self._guarded(gossiper), mode

    def resume(self, snapshot: dict[str, Any]) -> tuple[Gossiper, PeerMode]:
        """Go on in the session of a snapshot."""
        links, mode = self._compression.links, self._mode()
        gossiper = Gossiper.restore(
            snapshot, self._store,
            mode=mode, seed=self._rng, retry=self._retry, lossy=self._lossy, links=links,
        )  # fmt: skip
        return self._guarded(gossiper), mode

    def _guarded(self, gossiper: Gossiper) -> Gossiper:
        if self._guards is not None:
            guard(gossiper, self._guards, self._machine.monotonic)
        return gossiper

    def _mode(self) -> PeerMode:
        settings = self._settings
        match settings.mode:
            case "async":
                return PacedMode(
                    settings.exchanges, fraction=settings.fraction, turns=settings.turns,
                    drift=self._compression.drift(),
                )  # fmt: skip
            case "rounds":
                sources = None
                if settings.sources is not None:
                    sources = {vector: set(settings.sources) for vector in self._vectors}
                return RoundsMode(settings.exchanges, sources=sources)
            case "server":
                # A model without a server is the peer's own: it averages it by itself.
                servers = {v: settings.servers.get(v, self._name) for v in self._vectors}
                return ServerMode(self._name, servers)


def _as_float16(_vector: str, value: Array) -> Array:
    return as_sent(value, wide_enough(value, "float16"))
