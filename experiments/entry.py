"""The entry point of a config's peers. It imports little, because every process of a swarm runs it."""

from __future__ import annotations

import json
from functools import lru_cache

from ..models import Learner
from .build import Swarm
from .config import parse_config


def make_learner(config: str, index: int) -> Learner:
    """Build one peer of a config (given as JSON) in its own process."""
    return _swarm(config).member(index).learner


@lru_cache(maxsize=4)
def _swarm(config: str) -> Swarm:
    """Peers that share a process share the data they were dealt from."""
    return Swarm(parse_config(json.loads(config)))
