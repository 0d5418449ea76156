"""What people run: the command line, configs, data, the arena and the papers."""

from .arena import Arena, Round
from .build import Member, Swarm
from .config import Config, ConfigError, load_config, parse_config
from .simulate import Simulation, simulate

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
