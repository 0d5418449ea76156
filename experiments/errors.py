"""Errors that commands raise. In a separate module so that importing them does not import the config
loader."""

from gossamer.errors import GossamerError


class ConfigError(GossamerError, ValueError):
    """Raised for a config that cannot be used; the message names the file and the key."""


class Stopped(GossamerError):
    """Raised when a command was interrupted; the message says which results were kept and how the next run
    uses them."""
