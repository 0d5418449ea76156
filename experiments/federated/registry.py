"""The methods by name. A new one is a subclass of `Method` in a file of its own, and a line here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from ..config.tables import ConfigError
from .downpour import Downpour
from .ensemble import Ensemble
from .fedavg import FedAvg
from .feddyn import FedDyn
from .fednp import FedNP
from .fedper import FedPer
from .fedprox import FedProx
from .gossip_sgd import GossipSgd
from .local import Local
from .method import Method
from .moon import Moon
from .partial import PartialModels
from .pooled import Pooled
from .scaffold import Scaffold

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


def find(name: str) -> type[Method]:
    """The method of a name; an unknown one is an error that names the nearest."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"no method is called {name!r}; {hint}There are {', '.join(METHODS)}")
    return METHODS[name]


def require_serverless(names: Mapping[str, str]) -> None:
    """Refuse methods that need a server; `names` gives the method's name for every entry's."""
    for entry, name in names.items():
        method = find(name)
        if method.needs_server:
            raise ConfigError(
                f"{entry!r} ({name}) needs a server, and this comparison has none (server = false); the "
                f"nearest method without one is {method.nearest_without!r}"
            )
