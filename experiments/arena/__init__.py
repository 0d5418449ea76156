"""The arena: a whole swarm in one process, its peers stacked in one tensor; one seed, one result."""

from ...models.stack import Needs, Term, estimate
from .arena import Arena, Round
from .lockstep import ExactMean, Gossip, Mixing, Server

__all__ = [
    "Arena",
    "ExactMean",
    "Gossip",
    "Mixing",
    "Needs",
    "Round",
    "Server",
    "Term",
    "estimate",
]
