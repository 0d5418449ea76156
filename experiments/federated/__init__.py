"""Methods of learning together on one interface, and a command that compares them.

A new method is a subclass of `Method` in a file of its own, and a line in `METHODS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gossamer.names import hint

from ..errors import ConfigError
from .bounds import Ensemble, Local, Pooled
from .downpour import Downpour
from .fedavg import FedAvg
from .feddyn import FedDyn
from .fednp import FedNP
from .fedper import FedPer
from .fedprox import FedProx
from .gossip_sgd import GossipSgd
from .method import Client, Method, RoundReport, ServerMethod, Turn
from .moon import Moon
from .partial import PartialModels
from .scaffold import Scaffold

__all__ = ["METHODS", "Client", "Method", "RoundReport", "ServerMethod", "Turn", "find"]

METHODS: Mapping[str, type[Method]] = MappingProxyType(
    {
        "fedavg": FedAvg,
        "fedprox": FedProx,
        "scaffold": Scaffold,
        "feddyn": FedDyn,
        "moon": Moon,
        "fednp": FedNP,
        "fedper": FedPer,
        "downpour": Downpour,
        "gossip-sgd": GossipSgd,
        "gossamer": PartialModels,
        "local": Local,
        "pooled": Pooled,
        "ensemble": Ensemble,
    }
)
"""The methods by name."""


def find(name: str) -> type[Method]:
    """The method of a name; an unknown one is an error that names the nearest."""
    if name not in METHODS:
        raise ConfigError(f"no method is called {name!r}; {hint(name, METHODS, are='there are')}")
    return METHODS[name]
