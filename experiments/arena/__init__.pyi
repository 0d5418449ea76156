from .arena import Arena as Arena
from .arena import Round as Round
from .lockstep import ExactMean as ExactMean
from .lockstep import Gossip as Gossip
from .lockstep import Mixing as Mixing
from .lockstep import Server as Server
