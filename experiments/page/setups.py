"""A set-up of `gossamer lab`: the choices in one column of its page, as a graph and a config, and its run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np

from gossamer.errors import GossamerError

from ...topology import BUILDERS, SCHEDULES, TopologyError, log_errors, parse
from ..cli import console
from ..config.examples import example_path
from ..config.tables import Config, parse_config, read_table
from ..graphs.swarm import SwarmGraph, load_graph
from ..results import Results

if TYPE_CHECKING:
    from ...models import Callback, Progress

_log = logging.getLogger(__name__)

NO_LINKS = "no links"
"""The graph to begin with if all links are to be drawn by hand."""
GRAPHS = (*BUILDERS, *SCHEDULES, "networkx:karate_club_graph", NO_LINKS)
"""The graphs that can be picked; any other may be typed."""
DATA: dict[str, dict[str, Any]] = {
    "each peer has about two digits": {"partition": "shards"},
    "each peer has all digits": {"partition": "iid"},
}
TASKS: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "the same for all peers": lambda peers: [],
    "two halves: one swaps the labels 8 and 9": lambda peers: [
        {"kind": "swap", "labels": [8, 9], "peers": peers // 2}
    ],
    "every peer swaps two labels of its own": lambda peers: [{"kind": "swaps"}],
}
_HIDDEN = {"name": "hidden", "layout": "64-30-0"}
SHARING: dict[str, dict[str, Any]] = {
    "nothing: every peer learns alone": {"models": []},
    "everything": {"models": [{"name": "all", "layout": "64-30-10"}]},
    "hidden cells; every peer has its own outputs": {"models": [_HIDDEN]},
    "hidden cells; outputs among peers with the same task": {
        "models": [_HIDDEN, {"name": "{task}", "layout": "0-0-10", "depends": ["hidden"]}]
    },
    "what the peers decide themselves": {"models": [], "sharing": "auto"},
}
Link = tuple[int, int]


@dataclass(frozen=True)
class SetUp:
    """What is chosen in one column of the lab.

    graph: as `gossamer topology show` takes it. exchanges: how often peers push to their neighbours after
    each round. leave: percent of the peers that leave, per virtual second. lost: percent of messages.
    links: those of a graph that was drawn or edited, in place of `graph`.
    """

    name: str
    graph: str = "ring"
    peers: int = 16
    data: str = "each peer has about two digits"
    tasks: str = "the same for all peers"
    sharing: str = "everything"
    exchanges: int = 1
    rounds: int = 60
    leave: float = 0.0
    lost: float = 0.0
    seed: int = 0
    links: tuple[Link, ...] | None = None
    directed: bool = False

    def load(self) -> SwarmGraph:
        """Build the graph, which need not be connected; raises TopologyError if it cannot be built."""
        if self.links is not None or self.graph == NO_LINKS:
            return self._swarm_graph(self.links or (), self.directed)
        if self.graph.endswith(".toml"):
            raise TopologyError(f"{self.graph}: name a graph, not a config")
        kind = parse(self.graph)[0]
        if kind not in (*BUILDERS, *SCHEDULES):
            try:
                return load_graph(self.graph, seed=self.seed, check_connected=False)
            except TopologyError:  # a function of networkx may need the number of peers
                if kind == "file":
                    raise
        return load_graph(self.graph, self.peers, seed=self.seed, check_connected=False)

    def _swarm_graph(self, links: tuple[Link, ...], directed: bool) -> SwarmGraph:
        graph = nx.DiGraph() if directed else nx.Graph()
        graph.add_nodes_from(range(self.peers))
        graph.add_edges_from(links)
        return SwarmGraph("drawn graph", graph)

    def toggle(self, loaded: SwarmGraph, a: int, b: int) -> SetUp:
        """Return the set-up with the link between two peers cut, or added if there is none."""
        if loaded.changing:
            raise TopologyError(
                f"{self.graph} changes in every step, so its links cannot be cut or added; pick another graph"
            )
        graph = loaded.graph
        both_ways = {(a, b), (b, a)}
        links = tuple(link for link in graph.edges if link not in both_ways)
        if len(links) == graph.number_of_edges():
            links += tuple(both_ways if graph.is_directed() else {(min(a, b), max(a, b))})
        return replace(
            self, peers=len(graph), links=tuple(sorted(links)), directed=graph.is_directed()
        )

    def table(self) -> dict[str, Any]:
        """Return the table of a config that runs this set-up: example:digits, changed by the choices."""
        base = read_table(example_path("digits"))
        graph, links = self.graph, self.links
        if links is None and (graph == NO_LINKS or parse(graph)[0] == "file"):
            links = tuple(self.load().graph.edges)  # the config must not need a second file
        topology: Any = graph
        if links is not None:
            topology = {"kind": "links", "links": [list(link) for link in links]}
            topology |= {"directed": True} if self.directed else {}
        changes: dict[str, Any] = {
            "name": self.name, "seed": self.seed, "peers": self.peers, "rounds": self.rounds,
            "topology": topology, "data": base["data"] | DATA[self.data],
            "tasks": TASKS[self.tasks](self.peers), **SHARING[self.sharing],
            "gossip": {"exchanges": self.exchanges},
        }  # fmt: skip
        if self.leave or self.lost:
            time: dict[str, Any] = {"loss": self.lost / 100}
            changes["time"] = time | ({"churn": {"leave": self.leave / 100}} if self.leave else {})
        return {key: value for key, value in (base | changes).items() if value != []}

    def config(self) -> Config:
        """Return the config; raises ConfigError, one line that names the set-up and the key."""
        return parse_config(self.table(), self.name)

    def toml(self) -> str:
        """Return the config as the text of a file, which repeats the run on the command line."""
        lines = [f"# Made by gossamer lab. Run it: gossamer simulate {self.name}.toml", ""]
        return "\n".join([*lines, *_toml(self.table())]) + "\n"


def _toml(table: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The lines of a TOML file: values first, then tables and lists of tables. None and NaN do not occur."""
    tables = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    lists = {
        key: value
        for key, value in table.items()
        if isinstance(value, list) and value and isinstance(value[0], Mapping)
    }
    for key, value in table.items():
        if key not in tables and key not in lists:
            yield f"{key} = {json.dumps(value)}"
    for key, value in tables.items():
        yield from ("", f"[{above}{key}]", *_toml(value, f"{above}{key}."))
    for key, entries in lists.items():
        for entry in entries:
            yield from ("", f"[[{above}{key}]]", *_toml(entry, f"{above}{key}."))


def spread(graph: SwarmGraph, origin: int, exchanges: int) -> list[list[float]]:
    """How a value that one peer starts with reaches all peers: their estimates after 0, 1, … exchanges.

    An estimate is relative to the average of all peers: 0 as long as nothing has arrived, 1 in the end.
    """
    peers = len(graph.graph)
    sums, weights = np.zeros(peers), np.ones(peers)
    sums[origin] = peers
    estimates = [sums / weights]
    for step in range(exchanges):
        matrix = graph.schedule.matrix(step, graph.rule)
        sums, weights = matrix @ sums, matrix @ weights
        estimates.append(sums / weights)
    return [values.tolist() for values in estimates]


def disagreement(graph: SwarmGraph, exchanges: int) -> list[float]:
    """The peers' distance from the average after 0, 1, … exchanges, relative to the first; without zeros."""
    logs = log_errors(lambda step: graph.schedule.matrix(step, graph.rule), exchanges)
    return [float(value) for value in np.exp(logs) if value > 0]


class Run:
    """A simulation of a config on a thread of its own, as `gossamer simulate` runs it.

    folder: where the results are; None before the first round. length: how many rounds or virtual seconds.
    error: what went wrong, in one line. done: whether the thread has ended.
    """

    def __init__(self, config: Config, results: Results):
        self.folder: Path | None = None
        self.length, self.error, self.done = float(config.round_count), "", False
        self._config, self._results, self._stopping = config, results, False
        self._thread = Thread(target=self._work, name=f"simulate {config.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the run after its present round; results so far are kept."""
        self._stopping = True

    def _work(self) -> None:
        try:
            self._simulate()
        except KeyboardInterrupt:
            pass  # raised by the callback, after `stop`
        except GossamerError as error:
            self.error = " ".join(str(error).split())
        except Exception as error:
            _log.exception("the simulation has failed")
            self.error = f"the simulation has failed: {type(error).__name__}: {error}"
        finally:
            self.done = True

    def _simulate(self) -> None:
        console.load_torch()
        from ..arena import Simulation, simulate, simulate_in_time

        config, results = self._config, self._results
        if config.time is None:
            simulate(Simulation.of(config, config.name), results, callbacks=[self._follower()])
            return
        simulate_in_time(config, results, config.name, callbacks=[self._follower()])

    def _follower(self) -> Callback:
        """Return a callback that notes the run's length and folder, and stops the run if it is asked to."""
        from ...models import Callback

        run = self

        class Follower(Callback):
            def round(self, progress: Progress) -> None:
                run.folder = run._results.folder
                if progress.time and progress.rounds:
                    run.length = progress.time / progress.round * progress.rounds
                if run._stopping:
                    raise KeyboardInterrupt  # as Ctrl-C in `gossamer simulate`: results so far are kept

        return Follower()
