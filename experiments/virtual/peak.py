"""How much memory a process has taken."""

from __future__ import annotations

import sys


def peak_memory() -> int:
    """The most bytes that this process has held so far."""
    import resource  # Windows has none

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
