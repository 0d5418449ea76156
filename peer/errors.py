"""The errors that end a peer, and the exit codes of a process that ran one."""

from __future__ import annotations

from enum import IntEnum

from gossamer.errors import GossamerError


class ExitCode(IntEnum):
    """What a process that ran peers says to whoever started it; any other code is a crash."""

    FINISHED = 0
    """Every peer finished, or left because it was asked to."""
    CANNOT_TAKE_PART = 2
    """Somebody must act before a restart helps; the last line on stderr says what to do."""
    NOT_HANDED_IN = 3
    """The peer has ended, but no broker accepted its goodbye. Start it again to deliver it."""
    REPLACED = 4
    """Another device has taken this one's name. A service manager must not start it again."""
    INTERRUPTED = 130
    """Ctrl-C during start-up, before there was a peer to shut down cleanly."""


class PeerError(GossamerError):
    """A failure that retrying does not fix; the text is one line that says what to do."""

    exit_code: ExitCode = ExitCode.CANNOT_TAKE_PART


class NotSaved(PeerError):
    """The checkpoint cannot be written. The peer stops as if killed, without a goodbye: others were told
    nothing that is not in the last checkpoint written, so a restart can go on from it."""


class NotHandedIn(PeerError):
    """The peer has ended, but no broker accepted its goodbye, which stays in the checkpoint."""

    exit_code = ExitCode.NOT_HANDED_IN


class Replaced(PeerError):
    """Another device has taken this peer's name."""

    exit_code = ExitCode.REPLACED
