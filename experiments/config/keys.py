"""The keys of one config, for those who build from it: whom they name, and errors that name them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ...models import ModelError
from ..data import DataError
from ..errors import ConfigError
from .values import Who


@dataclass(frozen=True)
class Keys:
    """source: the config's file, which starts every error. peers: how many the swarm has."""

    source: str
    peers: int

    def who(self, who: Who, key: str) -> list[int]:
        """The numbers of the peers that stand at a key."""
        if who == "all":
            return list(range(self.peers))
        chosen = list(range(who)) if isinstance(who, int) else who
        if chosen and max(chosen) >= self.peers:
            raise self.error(key, f"names peer {max(chosen)}, but peers are 0 to {self.peers - 1}")
        return chosen

    def error(self, key: str, text: str) -> ConfigError:
        """What to raise about a key."""
        return ConfigError(f"{self.source}: key {key!r}: {text}")

    @contextmanager
    def blaming(self, key: str, prefix: str = "") -> Iterator[None]:
        """Errors of models and data know nothing of configs: say which file and key they come from."""
        try:
            yield
        except (ModelError, DataError) as error:
            raise self.error(key, f"{prefix}{error}") from None
