"""A running peer: training, gossip, presence and checkpoints in one process."""

from typing import TYPE_CHECKING

from .lazy import at_first_use

if TYPE_CHECKING:
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

# A broker needs no network to average, and should not wait two seconds for torch.
_AT_FIRST_USE = {
    "Broker": ".broker",
    "BrokerAddress": ".host",
    "BrokerError": ".broker",
    "BrokerSettings": ".broker",
    "HostSpec": ".host",
    "LocalSwarm": ".swarm",
    "Matching": ".settings",
    "Peer": ".peer",
    "PeerError": ".errors",
    "PeerSpec": ".host",
    "Report": ".peer",
    "Settings": ".settings",
    "SwarmSpec": ".swarm",
    "mqtt_connect": ".host",
}
__getattr__ = at_first_use(__name__, _AT_FIRST_USE)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
