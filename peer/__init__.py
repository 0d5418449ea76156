"""A running peer: training, gossip, presence and checkpoints in one process."""

from .broker import Broker, BrokerError, BrokerSettings
from .errors import PeerError
from .host import BrokerAddress, HostSpec, PeerSpec, mqtt_connect
from .peer import Peer, Report
from .settings import Matching, Settings
from .swarm import LocalSwarm, SwarmSpec

__all__ = [
    "Broker",
    "BrokerAddress",
    "BrokerError",
    "BrokerSettings",
    "HostSpec",
    "LocalSwarm",
    "Matching",
    "Peer",
    "PeerError",
    "PeerSpec",
    "Report",
    "Settings",
    "SwarmSpec",
    "mqtt_connect",
]
