"""Graphs from files and from a user's own function, made plain: peers 0 … n−1.

Labels other than 0 … n−1 are numbered in the order of the file and kept as `label` on the nodes.
Every error gives the file, where possible the line, and the reason.
"""

import inspect
import json
from collections.abc import Callable
from math import inf, isfinite
from pathlib import Path
from types import MappingProxyType
from xml.etree.ElementTree import ParseError

import networkx as nx
import numpy as np

from gossamer.entry import EntryError, describe_error, load_entry

from .errors import TopologyError, name_peers
from .graphs import Seed


def plain(graph: nx.Graph, source: str = "the graph") -> nx.Graph:
    """A simple graph with peers 0 … n−1, or an error: no peers, parallel links, self-loops."""
    if graph.number_of_nodes() == 0:
        raise TopologyError(f"{source}: no peers in it")
    loops = list(nx.nodes_with_selfloops(graph))
    if loops:
        raise TopologyError(f"{source}: self-loops at {name_peers(loops)}; remove them")
    if graph.is_multigraph():
        simple = nx.DiGraph(graph) if graph.is_directed() else nx.Graph(graph)
        if simple.number_of_edges() < graph.number_of_edges():
            doubled = next((u, v) for u, v in simple.edges if graph.number_of_edges(u, v) > 1)
            raise TopologyError(f"{source}: parallel links {doubled[0]}–{doubled[1]}; keep one")
        graph = simple
    for u, v, weight in graph.edges(data="weight"):
        if isinstance(weight, int | float) and not 0 <= weight < inf:
            raise TopologyError(
                f"{source}: link {u}–{v} has the weight {weight:g}, not a finite number, 0 or more"
            )
    labels = list(graph.nodes)
    if set(labels) != set(range(len(labels))):
        numbers = {str(label): label for label in labels}
        if set(numbers) == {str(i) for i in range(len(labels))}:  # "0", "1", … as GraphML has them
            mapping = {label: int(text) for text, label in numbers.items()}
        else:
            mapping = {label: i for i, label in enumerate(labels)}
            graph = graph.copy()
            nx.set_node_attributes(graph, {label: str(label) for label in labels}, "label")
        graph = nx.relabel_nodes(graph, mapping)
    ordered = nx.DiGraph() if graph.is_directed() else nx.Graph()
    ordered.add_nodes_from(range(len(labels)))
    ordered.update(graph)
    return ordered


def _graphml(path: Path) -> nx.Graph:
    try:
        return nx.read_graphml(path)
    except ParseError as error:
        raise TopologyError(f"{path}, line {error.position[0]}: not XML: {error}") from error
    except (nx.NetworkXError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise TopologyError(f"{path}: not GraphML: {error!r}") from error


def _edge_list(path: Path) -> nx.Graph:
    """`u v` or `u v weight` a line, split by blanks or commas; a first line `# directed` counts."""
    lines = path.read_text(encoding="utf-8").splitlines()
    directed = bool(lines) and lines[0].strip().lower().replace(" ", "") == "#directed"
    graph = nx.DiGraph() if directed else nx.Graph()
    for number, line in enumerate(lines, 1):
        fields = line.split("#")[0].replace(",", " ").split()
        if not fields:
            continue
        where = f"{path}, line {number}: {line.strip()!r}"
        if len(fields) not in (2, 3):
            raise TopologyError(f"{where}: {len(fields)} fields, not `u v` or `u v weight`")
        u, v = (int(field) if field.isdecimal() else field for field in fields[:2])
        if u == v:
            raise TopologyError(f"{where}: a self-loop; remove it")
        data = {"weight": _number(fields[2], where)} if len(fields) == 3 else {}
        if graph.has_edge(u, v) and graph[u][v] != data:
            raise TopologyError(f"{where}: this link came before with another weight")
        graph.add_edge(u, v, **data)
    return graph


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise TopologyError(f"{where}: {text!r} is not a number") from None
    if not isfinite(value) or value < 0:
        raise TopologyError(f"{where}: {text} is not a finite number, 0 or more")
    return value


def _csv_matrix(path: Path) -> nx.Graph:
    rows: list[list[float]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        row = [
            _number(cell.strip(), f"{path}, line {number}, column {column}")
            for column, cell in enumerate(line.split(","), 1)
        ]
        if rows and len(row) != len(rows[0]):
            raise TopologyError(
                f"{path}, line {number}: {len(row)} cells where line 1 has {len(rows[0])}"
            )
        rows.append(row)
    return _from_matrix(np.array(rows, dtype=float), path)


def _npy_matrix(path: Path) -> nx.Graph:
    try:
        matrix = np.load(path, allow_pickle=False)
        matrix = np.asarray(matrix, dtype=float)
    except (ValueError, TypeError, EOFError) as error:
        raise TopologyError(f"{path}: not a plain .npy array of numbers: {error}") from error
    bad = np.argwhere(~(np.isfinite(matrix) & (matrix >= 0)))
    if bad.size:
        at = tuple(int(i) for i in bad[0])
        raise TopologyError(f"{path}, entry {at}: {matrix[at]} is not a finite number, 0 or more")
    return _from_matrix(matrix, path)


def _from_matrix(matrix: np.ndarray, path: Path) -> nx.Graph:
    """Entry (i, j) ≠ 0 is the link i → j; symmetric means undirected; not only 0 and 1 means weights."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise TopologyError(f"{path}: an adjacency matrix is square, not of shape {matrix.shape}")
    graph = nx.Graph() if np.array_equal(matrix, matrix.T) else nx.DiGraph()
    graph.add_nodes_from(range(len(matrix)))
    weighted = not np.isin(matrix, (0.0, 1.0)).all()
    for i, j in np.argwhere(matrix).tolist():
        graph.add_edge(i, j, **({"weight": float(matrix[i, j])} if weighted else {}))
    return graph


def _node_link(path: Path) -> nx.Graph:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise TopologyError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from error
    if not isinstance(data, dict) or "nodes" not in data or not {"edges", "links"} & set(data):
        raise TopologyError(
            f"{path}: not node-link JSON: it needs `nodes` and `edges` (or `links`)"
        )
    known = {node.get("id") for node in data["nodes"] if isinstance(node, dict)}
    links = "edges" if "edges" in data else "links"
    for position, link in enumerate(data[links]):
        ends = [link.get(end) for end in ("source", "target")] if isinstance(link, dict) else [None]
        for end in ends:
            if end not in known:
                raise TopologyError(f"{path}, {links}[{position}]: no node has the id {end!r}")
    try:
        return nx.node_link_graph(data, edges=links)
    except (nx.NetworkXError, KeyError, TypeError, ValueError) as error:
        raise TopologyError(f"{path}: not node-link JSON: {error!r}") from error


READERS = MappingProxyType(
    {
        "graphml": _graphml,
        "edges": _edge_list,
        "matrix": _csv_matrix,
        "npy": _npy_matrix,
        "json": _node_link,
    }
)
"""File formats by the name a config uses."""

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


def looks_like_file(text: str) -> bool:
    """Whether a spec names a file: it has a folder in it, or ends as graph files do."""
    return "/" in text or "\\" in text or Path(text).suffix.lower() in _SUFFIXES


def load(path: str | Path, format: str | None = None) -> nx.Graph:
    """Read a graph. `format` (graphml, edges, matrix, npy, json) overrides the file's suffix."""
    path = Path(path)
    kind = format or _SUFFIXES.get(path.suffix.lower(), "")
    reader: Callable[[Path], nx.Graph] | None = READERS.get(kind)
    if reader is None:
        raise TopologyError(
            f"{path}: unknown format {format or path.suffix!r}: set format to one of {', '.join(READERS)}"
        )
    try:
        graph = reader(path)
    except (OSError, UnicodeDecodeError) as error:
        raise TopologyError(f"{path}: cannot read it: {error}") from error
    return plain(graph, str(path))


def from_function(
    name: str, peers: int | None = None, seed: Seed = 0, **parameters: object
) -> nx.Graph:
    """Call a user's `module:function` and take the networkx graph that it returns.

    It is given `peers` and `seed` if it has parameters of those names (`n` counts as `peers` where it
    is asked for, as networkx's generators do), and `parameters` always.
    """
    try:
        function = load_entry(name)
    except EntryError as error:
        raise TopologyError(str(error)) from error
    given = dict(parameters)
    offered = {"peers": peers, "seed": seed}
    try:
        accepted = inspect.signature(function).parameters
        if "n" in accepted and accepted["n"].default is inspect.Parameter.empty:
            offered["n"] = peers
        given |= {
            key: value
            for key, value in offered.items()
            if key in accepted and key not in given and value is not None
        }
        inspect.signature(function).bind(**given)
    except (TypeError, ValueError) as error:
        raise TopologyError(f"{name}: cannot be called with {sorted(given)}: {error}") from error
    try:
        graph = function(**given)
    except nx.NetworkXException as error:  # what networkx itself says of bad numbers
        raise TopologyError(f"{name}: {error}") from error
    except TopologyError:
        raise
    except Exception as error:
        raise TopologyError(describe_error(name, error)) from error
    if not isinstance(graph, nx.Graph):
        raise TopologyError(f"{name}: returned {type(graph).__name__}, not a networkx graph")
    return plain(graph, name)
