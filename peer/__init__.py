"""A running peer: training, gossip, presence and checkpoints in one process."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    if name not in _AT_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_AT_FIRST_USE[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
