"""A running peer's network for others to use: a copy that answers while the peer learns, and a file.

Both are brought up to date between two rounds, by the thread that trains, so they are always the network as
it was after some round.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gossamer import __version__
from gossamer.files import atomic_path, write_atomically

from ..gossip import schema_hash
from ..models import SlicedNetwork
from .exits import PeerError
from .store import schema_entries

_log = logging.getLogger(__name__)

FORMAT = "gossamer-network-1"
"""Identifies the form of the JSON file beside a network."""


class NetworkCopy:
    """A copy of a peer's network, in eval mode; any thread may call it. `copy(x)` returns its outputs."""

    def __init__(self, network: SlicedNetwork) -> None:
        self._network = network
        self._lock = threading.Lock()
        self._module = deepcopy(network.module).eval().requires_grad_(False)
        self.round = 0
        """The round after which the copy was made."""

    def update(self, round_number: int) -> None:
        """Copy the values of the peer's network; only the thread that trains it may call this."""
        with self._lock, torch.no_grad():
            source = self._network.module.state_dict()
            for name, value in self._module.state_dict().items():
                value.copy_(source[name])
            self.round = round_number

    def __call__(self, *inputs: Any) -> Any:
        """Return the network's outputs, all of them from one and the same state of its values."""
        with self._lock, torch.no_grad():
            return self._module(*inputs)


@dataclass(frozen=True)
class About:
    """What a network's file holds: written as JSON beside it, and inside it as metadata.

    schema: per partial model, the hash of its parameters' names and shapes.
    entry, arguments: the function that makes a learner with such a network, if known.
    """

    peer: str
    swarm: str
    session: str
    round: int
    accuracy: float | None
    time: str
    schema: Mapping[str, str]
    entry: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    version: str = __version__
    format: str = FORMAT


@dataclass
class NetworkFile:
    """Writes a peer's network to a safetensors file, and a small JSON file about it beside it.

    Both are replaced atomically, the network first. pause: least seconds from one writing to the next.
    """

    path: Path
    pause: float
    entry: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    _written_at: float = field(default=-inf, init=False)
    _fails: bool = field(default=False, init=False)

    def write_if_due(self, network: SlicedNetwork, now: float, wall: float, **about: Any) -> None:
        """Write the files if the last time is long enough ago; log the first of several failures.

        now: by the monotonic clock. wall: by the wall clock. about: other fields of About.
        """
        if now - self._written_at < self.pause:
            return
        self._written_at = now
        try:
            self.write(network, wall, **about)
        except (OSError, SafetensorError) as error:
            if not self._fails:
                _log.warning(
                    "peer %s: its network cannot be written to %s: %s; it is tried again every %g s",
                    network.peer, self.path, getattr(error, "strerror", None) or error, self.pause,
                )  # fmt: skip
            self._fails = True
        else:
            self._fails = False

    def write(self, network: SlicedNetwork, wall: float, **about: Any) -> None:
        """Write both files; raises OSError or SafetensorError."""
        accuracy = about.pop("accuracy")
        notes = json.dumps(
            asdict(
                About(
                    accuracy=accuracy if isfinite(accuracy) else None,
                    time=datetime.fromtimestamp(wall, UTC).isoformat(timespec="seconds"),
                    schema={m: schema_hash(schema_entries(network, m)) for m in network.averaged_models},
                    entry=self.entry, arguments=self.arguments, **about,
                )
            )
        )  # fmt: skip
        with atomic_path(self.path) as part:
            network.save(part, about=notes)
        write_atomically(about_path(self.path), notes + "\n")


def about_path(network: Path) -> Path:
    """Return the path of the JSON file beside a network's file: NAME.safetensors → NAME.network.json."""
    return network.with_suffix(".network.json")


def read_about(network: Path) -> dict[str, Any]:
    """Return what a network's file says of itself, by the fields of About; PeerError if it says nothing."""
    try:
        with safe_open(network, framework="pt") as file:
            notes = json.loads((file.metadata() or {})["about"])
        if notes["format"] != FORMAT:
            raise PeerError(
                f"{network}: was written by another version of gossamer ({notes['version']})"
            )
        return notes
    except OSError as error:
        raise PeerError(f"{network}: cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise PeerError(f"{network}: is not a safetensors file: {error}") from None
    except (KeyError, ValueError, TypeError):
        raise PeerError(f"{network}: does not say which peer made it, and how") from None
