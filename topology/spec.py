"""Build graphs and schedules from specs: the values of `topology` in a config.

A spec is a string, with parameters after colons, or a table:

    "regular:4"    "torus"    "clusters:4:2"    "file:swarm.graphml"    "function:mine:graph"
    "swarm.graphml"    "graphs/office.csv"    "networkx:karate_club_graph"    (short for `file:`, `function:`)
    {"kind": "regular", "degree": 4}            {"kind": "file", "path": "swarm.csv", "format": "edges"}
    {"kind": "links", "links": [[0, 1], [1, 2]]}

The peers of graphs from files and from a user's function are numbered 0 … n−1. Other labels are numbered in
the order of the file and kept as the attribute `label` of the nodes. Errors give the file, where possible
the line, and the reason.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from math import inf, isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args
from xml.etree.ElementTree import ParseError

import networkx as nx
import numpy as np

from gossamer.entry import EntryError, describe_error, load_entry
from gossamer.errors import hint

from .graphs import BUILDERS, SCHEDULES, Schedule, static
from .structure import Seed, TopologyError, name_peers

Spec = str | Path | Mapping[str, Any] | nx.Graph
"""The types of a config's `topology = …`; from Python also a path or a graph."""


def build(spec: Spec, peers: int | None = None, seed: Seed = 0) -> nx.Graph:
    """Return the graph that a spec describes, for `peers` peers.

    peers: may be None for a file or a graph, which has its own number of peers. Raises TopologyError for an
    unknown name or parameter, with the nearest known one, and for a graph that does not have `peers` peers.
    """
    if isinstance(spec, nx.Graph):
        graph = normalize_graph(spec)
    elif isinstance(spec, Path):
        graph = load(spec)
    else:
        kind, parameters = parse(spec)
        if kind == "file":
            graph = _call(kind, load, parameters)
        elif kind == "links":
            graph = _call(kind, _from_links, parameters, peers=peers)
        elif kind == "function":
            # The other parameters are for the user's function, so they are not checked here.
            name = parameters.pop("name", None)
            if not isinstance(name, str):
                raise TopologyError("topology function: give name = 'module:function'")
            graph = from_function(name, peers, seed, **parameters)
        elif kind in SCHEDULES:
            raise TopologyError(f"{kind} changes over time: it is a schedule, not one graph")
        else:
            builder = _find(kind, BUILDERS, ("file", "function", "links", *SCHEDULES))
            if peers is None:
                raise TopologyError(f"topology {kind}: give the number of peers")
            graph = _call(kind, builder, parameters, peers=peers, seed=seed)
    if peers is not None and len(graph) != peers:
        comparison = "fewer" if len(graph) < peers else "more"
        raise TopologyError(
            f"the graph has {comparison} peers than the swarm: {len(graph)}, not {peers}. Set peers = "
            f"{len(graph)}, or give a graph of {peers}"
        )
    return graph


def build_schedule(spec: Spec | Schedule, peers: int | None = None, seed: Seed = 0) -> Schedule:
    """Return the schedule that a spec describes; a graph becomes a schedule that does not change.

    Arguments and errors are those of `build`.
    """
    if isinstance(spec, Schedule):
        return spec
    if isinstance(spec, str | Mapping):
        kind, parameters = parse(spec)
        if kind in SCHEDULES:
            if peers is None:
                raise TopologyError(f"topology {kind}: give the number of peers")
            return _call(kind, SCHEDULES[kind], parameters, peers=peers, seed=seed)
    return static(build(spec, peers, seed))


def parse(spec: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the kind of a spec (a builder, a schedule, `file`, `function` or `links`) and its parameters.

    The parameters of a string are converted to the types that the builder declares.
    """
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
                _refuse_misspelt(kind)
                return "function", {"name": spec}
        accepted = _parameters(_find(kind, BUILDERS | SCHEDULES, ("file", "function")))
        if len(words) > len(accepted):
            names = ":".join([kind, *accepted])
            raise TopologyError(f"topology {spec!r} has too many parameters: write {names}")
        return kind, {
            parameter.name: _convert(spec, parameter, word)
            for parameter, word in zip(accepted.values(), words, strict=False)
        }
    parameters = dict(spec)
    kind = parameters.pop("kind", None)
    if not isinstance(kind, str):
        raise TopologyError(f"topology {dict(spec)!r} needs a kind, such as kind = 'regular'")
    return kind, parameters


def _refuse_misspelt(kind: str) -> None:
    """Raise for a misspelt builder (`regulr:x`), which would otherwise be taken for a user's function.

    A name is misspelt if it resembles that of a builder or schedule and no module has it.
    """
    similar = get_close_matches(kind, [*BUILDERS, *SCHEDULES], 1, cutoff=0.8)
    if similar and not _module_exists(kind):
        raise TopologyError(f"unknown topology {kind!r}: did you mean {similar[0]!r}?")


def _module_exists(module: str) -> bool:
    """Return whether a module can be found, without importing it."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _find(kind: str, table: Mapping[str, Callable], others: tuple[str, ...]) -> Callable:
    """Return the function that has this name in `table`; `others` are further names for the error's hint."""
    if kind in table:
        return table[kind]
    names = [*table, *others]
    raise TopologyError(f"unknown topology {kind!r}: {hint(kind, names)}")


def _parameters(function: Callable) -> dict[str, inspect.Parameter]:
    """Return the parameters that a config may set: all but the number of peers and the seed."""
    parameters = inspect.signature(function).parameters
    return {name: p for name, p in parameters.items() if name not in ("peers", "seed")}


def _convert(spec: str, parameter: inspect.Parameter, word: str) -> int | float | str:
    """Return a word of a spec as the type that the parameter's annotation declares."""
    types = get_args(parameter.annotation) or (parameter.annotation,)
    declared = next((t for t in (int, float) if t in types), str)
    try:
        return declared(word)
    except ValueError:
        expected = "a whole number" if declared is int else "a number"
        raise TopologyError(
            f"topology {spec!r}: {parameter.name} is {word!r}, not {expected}"
        ) from None


def _call(kind: str, function: Callable, parameters: dict[str, Any], **available: Any) -> Any:
    """Check parameters and call a builder with them; return what it returns.

    available: arguments that are passed only if the builder has a parameter of that name (peers, seed).
    """
    accepted = _parameters(function)
    for name, value in parameters.items():
        if name not in accepted:
            raise TopologyError(
                f"topology {kind} has no parameter {name!r}: {hint(name, accepted)}"
            )
        allowed = get_args(accepted[name].annotation) or (accepted[name].annotation,)
        is_int_for_float = isinstance(value, int) and float in allowed
        # In Python a bool is an int.
        is_wrong_bool = isinstance(value, bool) and bool not in allowed
        if is_wrong_bool or not (is_int_for_float or isinstance(value, allowed)):
            types = " or ".join("nothing" if t is type(None) else t.__name__ for t in allowed)
            raise TopologyError(f"topology {kind}: {name} is {value!r}, not {types}")
    passed = {
        name: value
        for name, value in available.items()
        if name in inspect.signature(function).parameters
    }
    for name, parameter in accepted.items():
        if parameter.default is parameter.empty and name not in parameters:
            raise TopologyError(f"topology {kind} needs {name!r}, which has no default")
    return function(**passed, **parameters)


def normalize_graph(graph: nx.Graph, source: str = "the graph") -> nx.Graph:
    """Return a simple graph with peers 0 … n−1; raise if it has no peers, parallel links or self-loops.

    `source` is how errors name the graph.
    """
    if graph.number_of_nodes() == 0:
        raise TopologyError(f"{source}: no peers in it")
    loops = list(nx.nodes_with_selfloops(graph))
    if loops:
        raise TopologyError(f"{source}: self-loops at {name_peers(loops)}; remove them")
    if graph.is_multigraph():
        simple = nx.DiGraph(graph) if graph.is_directed() else nx.Graph(graph)
        if simple.number_of_edges() < graph.number_of_edges():
            a, b = next((u, v) for u, v in simple.edges if graph.number_of_edges(u, v) > 1)
            raise TopologyError(f"{source}: parallel links {a}–{b}; keep one")
        graph = simple
    for u, v, weight in graph.edges(data="weight"):
        if isinstance(weight, int | float) and not 0 <= weight < inf:
            raise TopologyError(
                f"{source}: link {u}–{v} has the weight {weight:g}, not a finite number, 0 or more"
            )
    labels = list(graph.nodes)
    if set(labels) != set(range(len(labels))):
        by_text = {str(label): label for label in labels}
        if set(by_text) == {str(i) for i in range(len(labels))}:  # "0", "1", … as GraphML has them
            mapping = {label: int(text) for text, label in by_text.items()}
        else:
            mapping = {label: i for i, label in enumerate(labels)}
            graph = graph.copy()
            nx.set_node_attributes(graph, {label: str(label) for label in labels}, "label")
        graph = nx.relabel_nodes(graph, mapping)
    ordered = nx.DiGraph() if graph.is_directed() else nx.Graph()
    ordered.add_nodes_from(range(len(labels)))
    ordered.update(graph)
    return ordered


def _read_graphml(path: Path) -> nx.Graph:
    """Read a GraphML file."""
    try:
        return nx.read_graphml(path)
    except ParseError as error:
        raise TopologyError(f"{path}, line {error.position[0]}: not XML: {error}") from error
    except (nx.NetworkXError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise TopologyError(f"{path}: not GraphML: {error!r}") from error


def _read_edge_list(path: Path) -> nx.Graph:
    """Read lines `u v` or `u v weight`, separated by blanks or commas.

    The graph is directed if the first line is `# directed`.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    directed = bool(lines) and lines[0].strip().lower().replace(" ", "") == "#directed"
    graph = nx.DiGraph() if directed else nx.Graph()
    for number, line in enumerate(lines, 1):
        fields = line.split("#")[0].replace(",", " ").split()
        if not fields:
            continue
        location = f"{path}, line {number}: {line.strip()!r}"
        if len(fields) not in (2, 3):
            raise TopologyError(f"{location}: {len(fields)} fields, not `u v` or `u v weight`")
        u, v = (int(field) if field.isdecimal() else field for field in fields[:2])
        if u == v:
            raise TopologyError(f"{location}: a self-loop; remove it")
        data = {"weight": _parse_weight(fields[2], location)} if len(fields) == 3 else {}
        if graph.has_edge(u, v) and graph[u][v] != data:
            raise TopologyError(f"{location}: an earlier line has this link with another weight")
        graph.add_edge(u, v, **data)
    return graph


def _parse_weight(text: str, location: str) -> float:
    """Return a weight; `location` begins the error if the text is not a finite number, 0 or more."""
    try:
        value = float(text)
    except ValueError:
        raise TopologyError(f"{location}: {text!r} is not a number") from None
    if not isfinite(value) or value < 0:
        raise TopologyError(f"{location}: {text} is not a finite number, 0 or more")
    return value


def _read_csv_matrix(path: Path) -> nx.Graph:
    """Read an adjacency matrix from a CSV file; see `_from_matrix`."""
    rows: list[list[float]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        row = [
            _parse_weight(field.strip(), f"{path}, line {number}, column {column}")
            for column, field in enumerate(line.split(","), 1)
        ]
        if rows and len(row) != len(rows[0]):
            raise TopologyError(
                f"{path}, line {number}: {len(row)} columns where line 1 has {len(rows[0])}"
            )
        rows.append(row)
    return _from_matrix(np.array(rows, dtype=float), path)


def _read_npy_matrix(path: Path) -> nx.Graph:
    """Read an adjacency matrix from a NumPy file; see `_from_matrix`."""
    try:
        matrix = np.load(path, allow_pickle=False)
        matrix = np.asarray(matrix, dtype=float)
    except (ValueError, TypeError, EOFError) as error:
        raise TopologyError(f"{path}: not a plain .npy array of numbers: {error}") from error
    invalid = np.argwhere(~(np.isfinite(matrix) & (matrix >= 0)))
    if invalid.size:
        entry = tuple(int(i) for i in invalid[0])
        raise TopologyError(
            f"{path}, entry {entry}: {matrix[entry]} is not a finite number, 0 or more"
        )
    return _from_matrix(matrix, path)


def _from_matrix(matrix: np.ndarray, path: Path) -> nx.Graph:
    """Return the graph with a link i → j for every entry (i, j) ≠ 0.

    It is undirected if the matrix is symmetric, and has weights if entries other than 0 and 1 occur.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise TopologyError(f"{path}: an adjacency matrix is square, not of shape {matrix.shape}")
    graph = nx.Graph() if np.array_equal(matrix, matrix.T) else nx.DiGraph()
    graph.add_nodes_from(range(len(matrix)))
    has_weights = not np.isin(matrix, (0.0, 1.0)).all()
    for i, j in np.argwhere(matrix).tolist():
        graph.add_edge(i, j, **({"weight": float(matrix[i, j])} if has_weights else {}))
    return graph


def _read_node_link(path: Path) -> nx.Graph:
    """Read networkx's node-link JSON."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise TopologyError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from error
    if not isinstance(data, dict) or "nodes" not in data or not {"edges", "links"} & set(data):
        raise TopologyError(
            f"{path}: not node-link JSON: it needs `nodes` and `edges` (or `links`)"
        )
    ids = {node.get("id") for node in data["nodes"] if isinstance(node, dict)}
    links = "edges" if "edges" in data else "links"
    for position, link in enumerate(data[links]):
        ends = [link.get(end) for end in ("source", "target")] if isinstance(link, dict) else [None]
        for end in ends:
            if end not in ids:
                raise TopologyError(f"{path}, {links}[{position}]: no node has the id {end!r}")
    try:
        return nx.node_link_graph(data, edges=links)
    except (nx.NetworkXError, KeyError, TypeError, ValueError) as error:
        raise TopologyError(f"{path}: not node-link JSON: {error!r}") from error


READERS = MappingProxyType(
    {
        "graphml": _read_graphml,
        "edges": _read_edge_list,
        "matrix": _read_csv_matrix,
        "npy": _read_npy_matrix,
        "json": _read_node_link,
    }
)
"""File formats by their name in configs."""

_SUFFIXES = MappingProxyType(
    {
        ".graphml": "graphml",
        ".edges": "edges",
        ".edgelist": "edges",
        ".txt": "edges",
        ".csv": "matrix",
        ".npy": "npy",
        ".json": "json",
    }
)
"""The format that each suffix of a file stands for."""


def looks_like_file(text: str) -> bool:
    """Return whether a spec is a path: it has a slash, or a suffix of letters."""
    return "/" in text or "\\" in text or Path(text).suffix[1:].isalpha()


def load(path: str | Path, format: str | None = None) -> nx.Graph:
    """Return the graph in a file; `format` (graphml, edges, matrix, npy, json) overrides its suffix."""
    path = Path(path)
    name = format or _SUFFIXES.get(path.suffix.lower(), "")
    reader: Callable[[Path], nx.Graph] | None = READERS.get(name)
    if reader is None:
        formats = ", ".join(READERS)
        raise TopologyError(
            f"{path}: unknown format {format or path.suffix!r}: write the graph as one of {formats}, or name "
            f'its format: topology = {{kind = "file", path = "{path}", format = "json"}}'
        )
    try:
        graph = reader(path)
    except FileNotFoundError as error:
        raise TopologyError(f"{path}: there is no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise TopologyError(f"{path}: cannot read it: {error}") from error
    return normalize_graph(graph, str(path))


def _from_links(links: list, peers: int | None = None, directed: bool = False) -> nx.Graph:
    """Return the graph of `peers` peers with these links, each a pair of peers' numbers.

    peers: one more than the largest number if left out. directed: values pass from the first of a pair to
    the second only.
    """
    graph = nx.DiGraph() if directed else nx.Graph()
    for link in links:
        pair = link if isinstance(link, list | tuple) and len(link) == 2 else ()
        if not pair or not all(isinstance(end, int) and end >= 0 for end in pair):
            raise TopologyError(f"topology links: {link!r} is not a pair of peers, such as [0, 1]")
        if peers is not None and max(pair) >= peers:
            raise TopologyError(
                f"topology links: {list(pair)} names a peer that is not there; {peers} peers have the "
                f"numbers 0 … {peers - 1}"
            )
        graph.add_edge(*pair)
    graph.add_nodes_from(range(max(graph, default=-1) + 1 if peers is None else peers))
    return normalize_graph(graph, "topology links")


def from_function(
    name: str, peers: int | None = None, seed: Seed = 0, **parameters: object
) -> nx.Graph:
    """Return the networkx graph that a user's `module:function` returns, with peers 0 … n−1.

    The function is called with `parameters`, and with `peers` and `seed` if it has parameters of those names;
    a required parameter `n`, as networkx's generators have, gets `peers`.
    """
    try:
        function = load_entry(name)
    except EntryError as error:
        raise TopologyError(str(error)) from error
    arguments = dict(parameters)
    available = {"peers": peers, "seed": seed}
    try:
        accepted = inspect.signature(function).parameters
        if "n" in accepted and accepted["n"].default is inspect.Parameter.empty:
            available["n"] = peers
        arguments |= {
            key: value
            for key, value in available.items()
            if key in accepted and key not in arguments and value is not None
        }
        inspect.signature(function).bind(**arguments)
    except (TypeError, ValueError) as error:
        raise TopologyError(
            f"{name}: cannot be called with {sorted(arguments)}: {error}"
        ) from error
    try:
        graph = function(**arguments)
    except nx.NetworkXException as error:  # networkx's own message is for the user
        raise TopologyError(f"{name}: {error}") from error
    except TopologyError:
        raise
    except Exception as error:
        raise TopologyError(describe_error(name, error)) from error
    if not isinstance(graph, nx.Graph):
        raise TopologyError(f"{name}: returned {type(graph).__name__}, not a networkx graph")
    return normalize_graph(graph, name)
