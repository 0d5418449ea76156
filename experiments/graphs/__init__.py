"""Topology experiments: a graph comes in, facts, comparisons, losses and advice come out."""

from .given import Given, groups_of, take
from .swarm import SwarmGraph, mixing_of, swarm_graph

__all__ = ["Given", "SwarmGraph", "groups_of", "mixing_of", "swarm_graph", "take"]
