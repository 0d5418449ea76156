"""The signals that ask a process to end well."""

from __future__ import annotations

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """Ctrl-C, a supervisor's request, and a terminal that was closed.

    The last one only where nobody said, as nohup does, that it is to be ignored.
    """
    asked = (signal.SIGINT, signal.SIGTERM)
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is None or signal.getsignal(hangup) is signal.SIG_IGN:
        return asked
    return (*asked, hangup)
