"""From a config's [time] table to the conditions of a world."""

from __future__ import annotations

import math
from pathlib import Path

import networkx as nx

from ...topology import TopologyError, draw_events, read_events
from ..config.tables import Churn, Config, ConfigError, Time
from .distributions import TimeError, parse
from .world import Conditions, Cut, World


def world_of(config: Config, graph: nx.Graph, source: str = "config") -> World:
    """The world that a config with a [time] table describes; errors name the file and the key."""
    time = config.time or Time()
    if config.gossip.mode != "async":
        raise ConfigError(
            f"{source}: key 'gossip.mode': virtual time is for mode = 'async', not {config.gossip.mode!r}; "
            "without a [time] table the arena averages in rounds"
        )
    try:
        training = parse(time.training, "training")
        seconds = time.seconds or config.rounds * config.every * training.mean
        conditions = Conditions(
            training=training,
            delay=parse(time.delay, "delay"),
            stragglers=time.stragglers,
            slowdown=time.slowdown,
            loss=time.loss,
            timeout=time.timeout,
            events=_events(time.churn, config, graph, seconds, source),
            step=time.churn.step if time.churn else 1.0,
            cuts=tuple(Cut(s.start, s.end, _side(s.peers, config.peers)) for s in time.partitions),
            every=config.every,
        )
        return World(conditions, graph, config.seed)
    except (TimeError, TopologyError) as error:
        key = "time.churn" if isinstance(error, TopologyError) else "time"
        raise ConfigError(f"{source}: key {key!r}: {error}") from None


def seconds_of(config: Config, world: World) -> float:
    """How long a config runs."""
    given = None if config.time is None else config.time.seconds
    return given or config.rounds * world.conditions.pace


def _events(churn: Churn | None, config: Config, graph: nx.Graph, seconds: float, source: str):
    if churn is None:
        return ()
    if churn.trace is not None:
        return tuple(read_events(Path(source).parent / churn.trace))
    steps = math.ceil(seconds / churn.step) + 1
    chances = {k: getattr(churn, k) for k in ("leave", "arrive", "link_down", "link_up")}
    return tuple(draw_events(graph, steps, **chances, seed=config.seed))


def _side(who: int | list[int] | str, peers: int) -> frozenset[int]:
    if isinstance(who, str):
        return frozenset(range(peers))
    return frozenset(range(who) if isinstance(who, int) else who)
