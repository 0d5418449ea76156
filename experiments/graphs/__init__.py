"""Topology experiments: measure, compare and stress the graphs that peers gossip on, and advise on them."""

from .swarm import SwarmGraph, groups_of, load_graph, mixing_of, swarm_graph

__all__ = ["SwarmGraph", "groups_of", "load_graph", "mixing_of", "swarm_graph"]
