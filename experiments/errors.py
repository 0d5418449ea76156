"""What a config that cannot be used raises; on its own, so that commands need not load what reads configs."""


class ConfigError(ValueError):
    """A config that cannot be used; the text names the file and the key."""
