"""A graph or a schedule from a config: a name with parameters, short or long.

"regular:4"    "torus"    "clusters:4:2"    "file:swarm.graphml"    "function:mine:graph"
"swarm.graphml"    "graphs/office.csv"    "networkx:karate_club_graph"    (the same, told by their look)
{"kind": "regular", "degree": 4}            {"kind": "file", "path": "swarm.csv", "format": "edges"}
"""

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import networkx as nx

from gossamer.names import hint

from . import graphs, schedule
from .errors import TopologyError
from .files import from_function, load, looks_like_file, plain
from .graphs import Seed

Spec = str | Path | Mapping[str, Any] | nx.Graph
"""What a config's `topology = …` may be; from Python also a graph itself."""

BUILDERS = MappingProxyType(
    {
        "ring": graphs.ring,
        "path": graphs.path,
        "star": graphs.star,
        "torus": graphs.torus,
        "hypercube": graphs.hypercube,
        "clique": graphs.clique,
        "regular": graphs.regular,
        "erdos-renyi": graphs.erdos_renyi,
        "watts-strogatz": graphs.watts_strogatz,
        "barabasi-albert": graphs.barabasi_albert,
        "exponential": graphs.exponential,
        "expander": graphs.expander,
        "clusters": graphs.clusters,
        "geographic": graphs.geographic,
    }
)
"""Graph builders by the name a config uses."""

SCHEDULES = MappingProxyType(
    {
        "one-peer-exponential": schedule.one_peer_exponential,
        "random-matchings": schedule.random_matchings,
        "rotating-rings": schedule.rotating_rings,
    }
)
"""Schedules by the name a config uses."""


def build(spec: Spec, peers: int | None = None, seed: Seed = 0) -> nx.Graph:
    """The graph that `spec` names, for `peers` peers (a file or a graph brings its own number).

    Errors name an unknown kind or parameter and the nearest known one, and a number of peers that
    the graph does not have.
    """
    if isinstance(spec, nx.Graph):
        graph = plain(spec)
    elif isinstance(spec, Path):
        graph = load(spec)
    else:
        kind, parameters = parse(spec)
        if kind == "file":
            graph = _call(kind, load, parameters)
        elif kind == "function":
            # its own parameters belong to the user's function, so they are not checked here
            name = parameters.pop("name", None)
            if not isinstance(name, str):
                raise TopologyError("topology function: give name = 'module:function'")
            graph = from_function(name, peers, seed, **parameters)
        elif kind in SCHEDULES:
            raise TopologyError(f"{kind} changes over time: it is a schedule, not one graph")
        else:
            builder = _known(kind, BUILDERS, ("file", "function", *SCHEDULES))
            if peers is None:
                raise TopologyError(f"topology {kind}: how many peers?")
            graph = _call(kind, builder, parameters, peers=peers, seed=seed)
    if peers is not None and len(graph) != peers:
        few = "fewer" if len(graph) < peers else "more"
        raise TopologyError(
            f"the graph has {few} peers than the swarm: {len(graph)}, not {peers}. Set peers = "
            f"{len(graph)}, or give a graph of {peers}"
        )
    return graph


def build_schedule(
    spec: Spec | schedule.Schedule, peers: int | None = None, seed: Seed = 0
) -> schedule.Schedule:
    """As `build`, for graphs that may change over time; a graph becomes a schedule that stays."""
    if isinstance(spec, schedule.Schedule):
        return spec
    if isinstance(spec, str | Mapping):
        kind, parameters = parse(spec)
        if kind in SCHEDULES:
            if peers is None:
                raise TopologyError(f"topology {kind}: how many peers?")
            return _call(kind, SCHEDULES[kind], parameters, peers=peers, seed=seed)
    return schedule.static(build(spec, peers, seed))


def parse(spec: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Split a spec into its kind and parameters; words of the short form are converted by type."""
    if isinstance(spec, str):
        kind, *words = spec.split(":")
        if kind == "file":
            return kind, {"path": ":".join(words)}
        if kind == "function":
            return kind, {"name": ":".join(words)}
        if kind not in BUILDERS and kind not in SCHEDULES:
            if looks_like_file(spec):
                return "file", {"path": spec}
            if len(words) == 1 and words[0].isidentifier():
                _doubt(kind)
                return "function", {"name": spec}
        known = BUILDERS | SCHEDULES
        takes = _parameters(_known(kind, known, ("file", "function")))
        if len(words) > len(takes):
            names = ":".join([kind, *takes])
            raise TopologyError(f"topology {spec!r} has too many parts: write {names}")
        chosen = list(takes.values())[: len(words)]
        return kind, {
            p.name: _convert(spec, p, word) for p, word in zip(chosen, words, strict=True)
        }
    parameters = dict(spec)
    kind = parameters.pop("kind", None)
    if not isinstance(kind, str):
        raise TopologyError(f"topology {dict(spec)!r} needs a kind, such as kind = 'regular'")
    return kind, parameters


def _doubt(kind: str) -> None:
    """Raise for `regulr:x`: nearly a builder's name and no module is a slip, not a user's function."""
    near = get_close_matches(kind, [*BUILDERS, *SCHEDULES], 1, cutoff=0.8)
    if near and not _importable(kind):
        raise TopologyError(f"unknown topology {kind!r}: did you mean {near[0]!r}?")


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _known(kind: str, table: Mapping[str, Callable], others: tuple[str, ...]) -> Callable:
    if kind in table:
        return table[kind]
    names = [*table, *others]
    raise TopologyError(f"unknown topology {kind!r}: {hint(kind, names)}")


def _parameters(function: Callable) -> dict[str, inspect.Parameter]:
    """What a config may set: everything but the number of peers and the seed."""
    found = inspect.signature(function).parameters
    return {name: p for name, p in found.items() if name not in ("peers", "seed")}


def _convert(spec: str, parameter: inspect.Parameter, word: str) -> int | float | str:
    types = get_args(parameter.annotation) or (parameter.annotation,)
    kind = next((t for t in (int, float) if t in types), str)
    try:
        return kind(word)
    except ValueError:
        raise TopologyError(
            f"topology {spec!r}: {parameter.name} is {word!r}, not {'a whole' if kind is int else 'a'} number"
        ) from None


def _call(kind: str, function: Callable, parameters: dict[str, Any], **given: Any) -> Any:
    takes = _parameters(function)
    for name, value in parameters.items():
        if name not in takes:
            raise TopologyError(f"topology {kind} has no parameter {name!r}: {hint(name, takes)}")
        allowed = get_args(takes[name].annotation) or (takes[name].annotation,)
        whole = isinstance(value, int) and float in allowed
        if isinstance(value, bool) or not (whole or isinstance(value, allowed)):
            words = " or ".join("nothing" if t is type(None) else t.__name__ for t in allowed)
            raise TopologyError(f"topology {kind}: {name} is {value!r}, not {words}")
    own = {
        name: value
        for name, value in given.items()
        if name in inspect.signature(function).parameters
    }
    try:
        return function(**own, **parameters)
    except TypeError as error:  # a parameter without a default is missing
        raise TopologyError(f"topology {kind}: {error}") from error
