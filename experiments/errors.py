"""What commands raise; on its own, so that they need not load what reads configs."""


class ConfigError(ValueError):
    """A config that cannot be used; the text names the file and the key."""


class Stopped(Exception):
    """A command that was interrupted; the text says what is kept, and what the next run does with it."""
