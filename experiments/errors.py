"""What commands raise; on its own, so that they need not load what reads configs."""

from gossamer.errors import GossamerError


class ConfigError(GossamerError, ValueError):
    """A config that cannot be used; the text names the file and the key."""


class Stopped(GossamerError):
    """A command that was interrupted; the text says what is kept, and what the next run does with it."""
