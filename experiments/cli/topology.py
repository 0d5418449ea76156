"""The commands of topology experiments: `gossamer topology show | compare | stress | advise`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ..results import Results
from . import console
from .console import AtLeastOne, AtLeastOneIfGiven, Output, command, load_torch

if TYPE_CHECKING:
    from ...topology import Rule
    from ..graphs import SwarmGraph

RULES = ("push", "metropolis", "max-degree", "edges")
"""Weights, for the help; those of topology.Rule, which a test compares."""

GRAPH_HELP = "regular:4, club.graphml, networkx:karate_club_graph, mine:graph, or a config (.toml)."
WEIGHTS_HELP = f"Shares of mass: {', '.join(RULES)}. A config's own, else push, if left out."
Graph = Annotated[str, typer.Argument(metavar="GRAPH", help=GRAPH_HELP)]
Graphs = Annotated[list[str], typer.Argument(metavar="GRAPH…")]
Weights = Annotated[
    str | None, typer.Option("--rule", "--weights", metavar="RULE", help=WEIGHTS_HELP)
]
YesNoOrNeither = Annotated[bool | None, typer.Option("--learn/--no-learn")]

topology_app = typer.Typer(
    no_args_is_help=True,
    help="Bring a graph and see how a swarm lives on it.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of all commands that are given graphs.

    Args:
        peers: Peers of a builder; 16 if left out. Files bring their own.
        tolerance: When disagreement counts as gone: a share of the first.
        bridge: Join a graph in parts by the fewest added links.
        seed: For random graphs, starts and losses.
    """

    peers: AtLeastOneIfGiven = None
    weights: Weights = None
    tolerance: float = 1e-6
    bridge: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.weights is not None and self.weights not in RULES:
            from ...topology import TopologyError

            raise TopologyError(f"--rule {self.weights!r}: use {', '.join(RULES)}")
        _check_tolerance(self.tolerance)

    @property
    def rule(self) -> Rule | None:
        """How peers weigh what they give; the graph's own if None."""
        return cast("Rule | None", self.weights)

    def load(self, text: str) -> SwarmGraph:
        """Return the graph that a text names, and say what was added to it, or is not used."""
        from ..graphs.swarm import load_graph, print_graph_notes

        given = load_graph(text, self.peers, seed=self.seed, bridging=self.bridge)
        print_graph_notes(given, "--rule edges takes them for shares", rule=self.rule, named=True)
        return given


@command("show", topology_app)
def show_command(graph: Graph, *, group: str | None = None, common: Common, output: Output) -> None:
    """A graph's facts (size, spectrum, weak spots) and its picture.

    A config shows the graph of its swarm, and every partial model on its own subgraph.

    Args:
        group: The node attribute that colours peers on the picture.
    """
    from ..graphs.show import MODEL_HEADER, examine, show

    given = common.load(graph)
    results = _results(output, "show", given.name)
    with results.opened() as folder:
        shown = examine(given, common.rule, common.tolerance, group)
        console.table(given.name, ["what", "value"], shown.rows)
        if shown.models:
            console.table("each partial model on its own subgraph", MODEL_HEADER, shown.models)
        results.begin()
        console.print_written(show(shown, folder))


@command("compare", topology_app)
def compare_command(
    graphs: Graphs,
    *,
    learn: YesNoOrNeither = None,
    rounds: AtLeastOne = 40,
    megabytes: float | None = None,
    common: Common,
    output: Output,
) -> None:
    """Graphs side by side: predicted and measured disagreement, messages, accuracy at equal bytes.

    Args:
        graphs: Up to 8 graphs, as for show.
        learn: Train a swarm on each graph at equal bytes; up to 128 peers if left out.
        rounds: Rounds of the learning run.
        megabytes: What the swarm may send while learning; a middling graph's if left out.
    """
    load_torch()
    from ...topology import TopologyError
    from ..graphs import compare as comparing

    found = [common.load(graph) for graph in graphs]
    wanted = comparing.worth_learning(found) if learn is None else learn
    if megabytes is not None and megabytes <= 0:
        raise TopologyError(f"--megabytes {megabytes:g}: give a positive number")
    results = _results(output, "compare", f"{len(found)} graphs")
    learning = comparing.Learning(rounds=rounds, seed=common.seed)
    budget = None
    if wanted:
        budget = comparing.default_budget(found, learning) if megabytes is None else megabytes * 1e6
    with results.opened() as folder:
        with console.progress("graphs") as bar:
            task = bar.add_task("compare", total=len(found), latest="")
            entries = comparing.compare(
                found,
                rule=common.rule,
                tolerance=common.tolerance,
                learning=learning if wanted else None,
                budget=budget,
                seed=common.seed,
                on_graph=lambda name: bar.update(task, advance=1, latest=name),
            )
        count, columns = len(found[0].graph), 5 if wanted else 4  # the last one is the accuracy
        console.table(
            f"{count} peers, to {common.tolerance:g} of the first disagreement: predicted and measured",
            comparing.PACE,
            comparing.pace_rows(entries),
        )
        console.table(
            f"what it costs in messages of {learning.message / 1e3:.3g} kB, the cheapest first",
            comparing.COST[:columns],
            [row[:columns] for row in comparing.cost_rows(entries, learning.message)],
        )
        if budget is not None:
            console.say(
                f"accuracy: digits, {learning.shards} shards of labels per peer, {rounds} rounds, "
                f"{budget / 1e6:.3g} MB for every graph; mean of the last quarter"
            )
        elif learn is None:
            console.say(f"no learning run for {count} peers; --learn forces it")
        results.begin()
        files = comparing.write(
            entries, folder, tolerance=common.tolerance, message=learning.message, budget=budget
        )
        console.print_written(files)


@command("stress", topology_app)
def stress_command(graph: Graph, *, common: Common, output: Output) -> None:
    """Lose peers and links, by chance and at the worst places; churn; delay: what breaks first?"""
    from ..graphs.show import LOSS_HEADER, loss_rows, stress, write_stress

    given = common.load(graph)
    results = _results(output, "stress", given.name)
    with results.opened() as folder:
        with console.progress("steps") as bar:
            task = bar.add_task("stress", total=6, latest="")
            found = stress(
                given,
                rule=common.rule,
                tolerance=common.tolerance,
                seed=common.seed,
                on_step=lambda name: bar.update(task, advance=1, latest=name),
            )
        title = f"{found.name}: {found.peers} peers, {found.links} links"
        console.table(title, LOSS_HEADER, loss_rows(found))
        slower = [(one.trouble, f"{one.factor:.3g}") for one in found.slowdowns]
        console.table("churn and delay", ["trouble", "exchanges, in calm ones"], slower)
        console.say(found.verdict)
        results.begin()
        console.print_written(write_stress(found, folder))


@command("advise", topology_app)
def advise_command(
    *,
    peers: int,
    degree: int | None = None,
    kilobytes: float | None = None,
    parameters: AtLeastOne = 1000,
    groups: str | None = None,
    tolerance: float = 1e-6,
    seed: int = 0,
    output: Output,
) -> None:
    """Graphs for a swarm, ranked by predicted rate within a budget of links or bytes, with the reason.

    Args:
        peers: Peers of the swarm.
        degree: Links that a peer may have: its messages per exchange.
        kilobytes: What a peer may send in one averaging, on the average.
        parameters: Values in one message, 4 bytes each.
        groups: Semi-local groups: how many equal ones, or sizes, as in 10,10,12.
        tolerance: When disagreement counts as gone: a share of the first.
        seed: For random graphs, starts and losses.
    """
    from ...topology import TopologyError, advise
    from ..graphs import compare as comparing

    _check_tolerance(tolerance)
    members = None if groups is None else comparing.groups_from(groups, peers)
    limits = [f"at most {degree} links per peer"] if degree else []
    limits += [f"{kilobytes:g} kB per peer and averaging"] if kilobytes else []
    limits += [f"{len(members)} groups"] if members else []
    title = ", ".join([f"{peers} peers", *limits])
    results = _results(output, "advise", title)
    advice = advise(
        peers,
        degree,
        budget=None if kilobytes is None else kilobytes * 1e3,
        message=4.0 * parameters,
        members=members,
        tolerance=tolerance,
        seed=seed,
    )
    if not advice.ranked:
        told = "; ".join(f"{spec}: {reason}" for spec, reason in advice.refused)
        raise TopologyError(f"no topology fits {title}: {told}")
    columns = 5 if kilobytes is None else 6  # the last one is about the bytes
    table = [row[:columns] for row in comparing.advice_rows(advice)]
    heading = f"{title}; best first, links and messages per peer"
    console.table(heading, comparing.ADVICE[:columns], table)
    for one in advice.ranked:
        console.say(f"{one.topology}: {comparing.reason(one)}")
    for spec, reason in advice.refused:
        console.say(f"not {spec}: {reason}")
    best = advice.ranked[0]
    bridge = "\nbridge = true" if best.added else ""
    console.say(f'in a config: topology = "{best.topology}"{bridge}')
    with results.begun() as folder:
        console.print_written(comparing.write_advice(advice, folder, title))


def _check_tolerance(tolerance: float) -> None:
    if not 0 < tolerance < 1:
        from ...topology import TopologyError

        raise TopologyError(f"--tolerance {tolerance:g}: give a share of the first, 0 … 1")


def _results(output: Output, command: str, name: str) -> Results:
    plain = "".join(c if c.isalnum() or c in "._-" else "-" for c in name)
    return output.results(f"results/topology/{command}/{plain}", f"topology {command}")
