"""What people run: the command line, configs, data, the arena and the papers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import ConfigError
from .simulate import Simulation, simulate  # now: later, the module of that name would hide it

if TYPE_CHECKING:
    from .arena import Arena, Round
    from .build import Member, Swarm
    from .config import Config, load_config, parse_config

__all__ = [
    "Arena",
    "Config",
    "ConfigError",
    "Member",
    "Round",
    "Simulation",
    "Swarm",
    "load_config",
    "parse_config",
    "simulate",
]

# Every command imports this package before it can say a word; torch alone takes two seconds.
_AT_FIRST_USE = {
    "Arena": ".arena",
    "Config": ".config",
    "Member": ".build",
    "Round": ".arena",
    "Swarm": ".build",
    "load_config": ".config",
    "parse_config": ".config",
}


def __getattr__(name: str) -> Any:
    if name not in _AT_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_AT_FIRST_USE[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
