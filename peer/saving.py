"""When a peer writes its checkpoint, and what it does if it cannot.

What others are about to be told must be saved before, and is tried again for a while if the disk is full.
A peer that nobody hears saves now and then, so that a crash costs it seconds of training, not all of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from .errors import NotSaved, PeerError
from .machine import Machine, moment
from .settings import Limits, Settings

_log = logging.getLogger(__name__)


class Saver:
    """One peer's checkpoint file.

    path: None saves nothing. tree: returns what to save, when it is saved.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        path: Path | None,
        tree: Callable[[], dict[str, Any]],
        machine: Machine,
        limits: Limits,
    ):
        self.path = path
        self._name, self._settings, self._tree = name, settings, tree
        self._limits = limits
        self._machine = machine
        # A power cut may bring an older file back. Where boots have names it is known to be old, and
        # its session is not resumed. Else every save must reach the disk; and so must, everywhere,
        # the count of what was released with noise, or the report would state too small an epsilon.
        self._sync = machine.boot() is None or settings.dp is not None
        self._last, self._cost, self._round = machine.monotonic(), 0.0, 0
        self._failing = False
        self._blocked_since: float | None = None
        """Since when others cannot be told anything, because it cannot be saved."""
        self._retry_at = self._pause = 0.0

    # --- a former process -----------------------------------------------------------------------

    def load(self, schemas: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the checkpoint of a former process, if there is one; PeerError if it is bad."""
        tree = None if self.path is None else self._machine.files.load(self.path)
        if tree is None:
            return None
        with self.fitting():
            if tree["peer"] != self._name or tree["schemas"] != schemas:
                raise PeerError(
                    f"{self.path}: holds another network or peer ({tree['peer']}); "
                    "point the peer at another file, or move this one away"
                )
            if not torch.isfinite(tree["network"]).all():
                raise PeerError(
                    f"{self.path}: holds values that are NaN or infinite, of a training that diverged; "
                    "move it away to begin anew"
                )
        return tree

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Turn whatever a checkpoint lacks into a PeerError that names it."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise PeerError(
                f"{self.path}: does not fit this version of the program, or this learner "
                f"({type(error).__name__}: {error}); run the version that wrote it, or move it away to "
                "begin anew"
            ) from error

    def require_agreed(self, written: Mapping[str, str], now: Mapping[str, str]) -> None:
        """Refuse a checkpoint of a session that began with other settings than these."""
        for key, value in now.items():
            if written.get(key) != value:
                raise PeerError(
                    f"peer {self._name}: {self.path} was written with {key} = {written.get(key)!r}, and the "
                    f"settings now say {value!r}; put {key} back, or move the checkpoint away to begin anew"
                )

    def in_touch(self, tree: dict[str, Any]) -> float | None:
        """Return when a checkpoint's session was last in touch, by `uptime`; None if nobody can tell.

        The machine may have been started anew since: then the file may be older than what others were told.
        """
        return moment(self._machine, tree["in_touch"])

    # --- this process ---------------------------------------------------------------------------

    def save(self, *, durable: bool = False) -> bool:
        """Write what others are about to be told; False if it failed and is to be tried again.

        durable: force it to the disk, whatever the machine can tell after a power cut.

        NotSaved once it has failed for `save_retry` seconds. Asked too soon after a failure, it does nothing.
        """
        if self.path is None:
            return True
        blocked = self._blocked_since
        if blocked is not None and self._machine.monotonic() < self._retry_at:
            return False
        if (why := self._write(self._tree(), durable=durable)) is None:
            return True
        first, longest = self._limits.save_pauses
        if blocked is None:
            self._pause, blocked = first, self._last
        else:
            self._pause = min(2 * self._pause, longest)
        self._blocked_since, self._retry_at = blocked, self._last + self._pause
        if self._last - blocked >= self._limits.save_retry:
            raise NotSaved(
                f"peer {self._name}: its checkpoint {self.path} cannot be written: {why}; make "
                f"room, and start it again within its lease of {self._settings.lease:g} s: it then "
                "goes on where it was"
            )
        return False

    def save_now_and_then(self, number: int) -> None:
        """Save after this round if it is time to. Nobody was told anything: no harm if it fails.

        Without a new round too, now and then: the file says when the peer was last in touch.
        """
        if self.path is None:
            return
        rest = max(self._settings.save_every, self._cost / self._limits.save_share)
        if number == self._round:
            rest = max(rest, self._settings.lease / 4)
        if self._machine.monotonic() - self._last >= rest:
            self._write(self._tree())

    def remove(self) -> None:
        """Remove the checkpoint: its session has ended, and nothing of it is needed any more."""
        if self.path is not None:
            self._machine.files.remove(self.path)

    def _write(self, tree: dict[str, Any], *, durable: bool = False) -> str | None:
        """Write the file; returns what went wrong, if anything did. An operator hears of it once."""
        assert self.path is not None
        began = self._machine.monotonic()
        try:
            self._machine.files.save(self.path, tree, sync=self._sync or durable)
        except (OSError, SafetensorError) as error:
            self._last = self._machine.monotonic()
            why = getattr(error, "strerror", None) or str(error)
            if not self._failing:
                self._failing = True
                _log.warning(
                    "peer %s: cannot write its checkpoint %s: %s; it tries again",
                    self._name, self.path, why,
                )  # fmt: skip
            return why
        self._last, self._blocked_since = self._machine.monotonic(), None
        self._cost, self._round = self._last - began, tree["books"]["round"]
        if self._failing:
            self._failing = False
            _log.info("peer %s: could write its checkpoint again", self._name)
        return None
