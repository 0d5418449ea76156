"""Reminders of what will expire: a peer's invitation, and the certificates of its connection."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import inf
from pathlib import Path

from cryptography import x509

_log = logging.getLogger(__name__)

DAY = 86400.0
NOTICE = 7 * DAY
"""Seconds before its end from which on something is mentioned, once a day."""


class Reminders:
    """Logs what expires within a week, once a day.

    peer: for log lines. ends: what expires, with the remedy, and when, in seconds since 1970.
    """

    def __init__(self, peer: str, ends: Mapping[str, float]) -> None:
        self._peer, self._ends = peer, dict(ends)
        self._last = -inf

    def check(self, now: float) -> None:
        """Log everything that has less than a week left, if the last time was a day ago; now: wall clock."""
        due = {what: end for what, end in self._ends.items() if end - now < NOTICE}
        if not due or 0 <= now - self._last < DAY:
            return
        self._last = now
        for what, end in due.items():
            left = end - now
            when = "has expired" if left <= 0 else f"expires in {_duration(left)}"
            _log.warning("peer %s: %s", self._peer, what.replace("expires", when, 1))


def _duration(seconds: float) -> str:
    """Return `3 days` or `5 hours`."""
    number, unit = (seconds / DAY, "day") if seconds >= 2 * DAY else (seconds / 3600, "hour")
    return f"{int(number)} {unit}{'' if int(number) == 1 else 's'}"


def certificate_end(path: Path) -> float | None:
    """Return when the first certificate in a PEM file expires; None if it cannot be read."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError):
        return None  # connecting with it will say what is wrong
    return certificate.not_valid_after_utc.timestamp()
