"""Topology experiments: a graph comes in, facts, comparisons, losses and advice come out."""

from .swarm import SwarmGraph, groups_of, load_graph, mixing_of, swarm_graph

__all__ = ["SwarmGraph", "groups_of", "load_graph", "mixing_of", "swarm_graph"]
