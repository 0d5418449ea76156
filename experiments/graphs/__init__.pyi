from .swarm import SwarmGraph as SwarmGraph
from .swarm import groups_of as groups_of
from .swarm import load_graph as load_graph
from .swarm import mixing_of as mixing_of
from .swarm import swarm_graph as swarm_graph
