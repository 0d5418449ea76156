"""The entry point of a config's peers. It imports little, because every process of a swarm runs it."""

from __future__ import annotations

import json
from functools import lru_cache

from ..models import Learner
from .build import Swarm
from .config.tables import parse_config


def make_learner(config: str, index: int, source: str = "config") -> Learner:
    """Build one peer of a config (given as JSON) in its own process.

    `source` is the config's file: a user's own modules stand beside it.
    """
    return _swarm(config, source).member(index).learner


@lru_cache(maxsize=4)
def _swarm(config: str, source: str) -> Swarm:
    """Peers that share a process share the data they were dealt from."""
    return Swarm(parse_config(json.loads(config)), source)
