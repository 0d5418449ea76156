"""Fifteen Florentine families learn digits by gossip, each only with the families it married into."""

from pathlib import Path

import networkx as nx

from gossamer.experiments import Arena, Swarm, parse_config
from gossamer.experiments.arena import Gossip
from gossamer.experiments.graphs import SwarmGraph
from gossamer.experiments.graphs.show import examine, show
from gossamer.topology import facts, normalize_graph

graph = normalize_graph(nx.florentine_families_graph())  # any networkx graph; names become labels
known = facts(graph)
weak = [graph.nodes[peer]["label"] for peer in known.bridge_peers]
print(f"{known.exchanges:.0f} exchanges to agree; cut in two without one of {', '.join(weak)}")

config = {
    "peers": len(graph),
    "data": {"partition": "shards"},  # every family knows few digits
    "network": {"layout": "64=24=10"},
    "models": [{"name": "everybody", "layout": "64-24-10"}],
    "training": {"rate": 0.3},
}
learners = [member.learner for member in Swarm(parse_config(config)).members()]
accuracy = {}
for round in Arena(learners, mixing=Gossip(graph, exchanges=2), test_every=10).run(40):
    if round.tests:
        print(round.index, f"{round.accuracy:.3f}")
        accuracy = {peer: f"above {t.accuracy // 0.1 / 10}" for peer, t in enumerate(round.tests)}

nx.set_node_attributes(graph, accuracy, "group")  # the picture colours families by what they know
families = SwarmGraph("Florentine families, by accuracy", graph)
print(*show(examine(families), Path("results/florentine")), sep="\n")
