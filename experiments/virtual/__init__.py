"""Virtual time: asynchronous swarms in one process, as slow, lossy and restless as one likes."""

from .distributions import KINDS, Distribution, TimeError, parse
from .swarm import PushSumSwarm, Sample
from .world import Conditions, Cut, World

__all__ = [
    "KINDS",
    "Conditions",
    "Cut",
    "Distribution",
    "PushSumSwarm",
    "Sample",
    "TimeError",
    "World",
    "parse",
]
