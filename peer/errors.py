"""The errors that end a peer, and the exit codes of a process that ran one."""

from __future__ import annotations

from enum import IntEnum

from gossamer.errors import GossamerError


class ExitCode(IntEnum):
    """What a process that ran peers says to whoever started it; any other code is a crash."""

    FINISHED = 0
    """All peers finished or left as they were asked to."""
    CANNOT_TAKE_PART = 2
    """Something that a restart does not cure; the last line on stderr says what to do about it."""
    NOT_HANDED_IN = 3
    """The peer has ended, but no broker took its goodbye. Start it again to hand that in."""
    REPLACED = 4
    """Another device has taken this one's name. A service manager must not start it again."""
    INTERRUPTED = 130
    """Ctrl-C before there was anything to end in order."""


class PeerError(GossamerError):
    """Something that waiting does not cure; the text is one line that says what to do about it."""

    exit_code: ExitCode = ExitCode.CANNOT_TAKE_PART


class NotSaved(PeerError):
    """The checkpoint cannot be written. The peer ends as if it was killed, and says no goodbye: nobody was
    told what the last one that was written does not know, so that it can go on from there."""


class NotHandedIn(PeerError):
    """The peer has ended, but no broker took its goodbye; its checkpoint keeps it for the next start."""

    exit_code = ExitCode.NOT_HANDED_IN


class Replaced(PeerError):
    """Another device has taken this peer's name."""

    exit_code = ExitCode.REPLACED
