"""How long ago something was, told across restarts of a process and of the machine.

A clock on the wall can be set back, and a machine that starts anew may bring back older files than it had:
what was not forced to the disk is lost with the power. Linux gives every boot a name, and counts the
seconds since; elsewhere the clock on the wall must do.
"""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Any

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def clock() -> float:
    """Seconds that go on while the device sleeps, unlike time.monotonic on Linux."""
    since_boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.time() if since_boot is None else time.clock_gettime(since_boot)


@cache
def boot() -> str | None:
    """The name of this run of the machine, another one after every start; None where there is none."""
    try:
        return _BOOT_ID.read_text("ascii").strip() or None
    except (OSError, ValueError):
        return None


def mark(at: float) -> dict[str, Any]:
    """A time of `clock`, as plain data that another process can compare with its own."""
    return {"boot": boot(), "clock": at, "wall": time.time() - (clock() - at)}


def moment(then: dict[str, Any]) -> float | None:
    """The time of a mark, by the `clock` of now; None if the machine has started anew since, or if the
    time is yet to come, because a clock was set back: nobody can tell then how long ago it was."""
    if then["boot"] != boot():
        return None
    now = clock()
    at = then["clock"] if boot() is not None else now - (time.time() - then["wall"])
    return min(at, now) if at <= now + 1.0 else None
