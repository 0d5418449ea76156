"""Giving memory back to the system.

A peer allocates and frees megabytes with every message. glibc keeps what is freed, scattered over the
heap, so that after a burst of gossip a process holds many copies of its networks. `give_back` returns
what is free; between two stretches of training is a good moment for it.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from functools import cache
from typing import Any

SECONDS_BETWEEN = 0.5
"""What is given back has to be asked for again, page by page, so not more often than this."""

_guard = threading.Lock()
_last = float("-inf")


def give_back() -> bool:
    """Return free memory to the system, unless that was done a moment ago; True if it was done now.

    Does nothing where malloc is not glibc's. Any thread may call it: a process has one heap.
    """
    global _last
    library = _glibc()
    if library is None:
        return False
    with _guard:
        now = time.monotonic()
        if now - _last < SECONDS_BETWEEN:
            return False
        _last = now
    library.malloc_trim(0)
    return True


@cache
def _glibc() -> Any | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None
