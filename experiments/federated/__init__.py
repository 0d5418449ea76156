"""Federated methods on one interface, and a command that compares them.

To add a method, write a subclass of `Method`, in its own file unless it is a variant of another method, and
add it to `METHODS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .downpour import Downpour
from .fedavg import FedAvg, FedDyn, FedProx, Scaffold
from .fednp import FedNP
from .fedper import FedPer
from .gossip import AutoPartialModels, GossipSgd, PartialModels
from .method import Client, Ensemble, Local, Method, Pooled, RoundContext, ServerMethod
from .moon import Moon

__all__ = [
    "METHODS", "AutoPartialModels", "Client", "Downpour", "Ensemble", "FedAvg", "FedDyn", "FedNP", "FedPer",
    "FedProx", "GossipSgd", "Local", "Method", "Moon", "PartialModels", "Pooled", "RoundContext",
    "Scaffold", "ServerMethod",
]  # fmt: skip

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
        "auto": AutoPartialModels,
        "local": Local,
        "pooled": Pooled,
        "ensemble": Ensemble,
    }
)
"""The methods by the names that configs use."""
