"""What people run: the command line, configs, data, the arena and the papers."""

from typing import TYPE_CHECKING

from ..peer.lazy import at_first_use
from .errors import ConfigError
from .results import Results
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
    "Results",
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
__getattr__ = at_first_use(__name__, _AT_FIRST_USE)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
