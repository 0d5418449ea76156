"""The commands about graphs of peers: `gossamer topology show`, `compare`, `stress` and `advise`."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ..results import Results
from . import console
from .console import AtLeastOne, AtLeastOneIfGiven, Output, Seed, command, command_group, load_torch

if TYPE_CHECKING:
    from ...topology import Rule
    from ..graphs import SwarmGraph

RULES = ("push", "metropolis", "max-degree", "edges")
"""The values of topology.Rule, which WEIGHTS_HELP describes; a copy, because importing it would slow the help
down. A test checks that both are equal."""

GRAPH_HELP = (
    "A kind of graph with its parameters (regular:4 gives each peer 4 links), a file (club.graphml), a "
    "function (networkx:karate_club_graph), or a config (.toml)."
)
WEIGHTS_HELP = (
    "How a peer divides its values among its neighbours and itself. push: equally. metropolis: a link gets "
    "1 / (1 + the larger number of links of its two peers). max-degree: 1 / (1 + the largest number of links "
    "of any peer). edges: its weight in the file. If left out, the config's rule, or push."
)
Graph = Annotated[str, typer.Argument(metavar="GRAPH", help=GRAPH_HELP)]
Graphs = Annotated[list[str], typer.Argument(metavar="GRAPH…")]
Weights = Annotated[
    str | None, typer.Option("--rule", "--weights", metavar="RULE", help=WEIGHTS_HELP)
]
YesNoOrNeither = Annotated[bool | None, typer.Option("--learn/--no-learn")]

topology_app = command_group(
    no_args_is_help=True,
    help="Analyse and compare graphs of peers: how fast a swarm averages on them, and what breaks them.",
)


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """Options of all commands that read graphs.

    Args:
        peers: The number of peers, for a kind of graph; 16 if left out. Files contain their own.
        tolerance: The disagreement at which averaging is complete, relative to that at the start.
        bridge: Connect a graph that is in several components by adding as few links as possible.
        seed: The seed of random graphs, starting values and failures.
    """

    peers: AtLeastOneIfGiven = None
    weights: Weights = None
    tolerance: float = 1e-6
    bridge: bool = False
    seed: Seed = 0

    def __post_init__(self) -> None:
        if self.weights is not None and self.weights not in RULES:
            from ...topology import TopologyError

            raise TopologyError(f"--rule {self.weights!r}: use {', '.join(RULES)}")
        _check_tolerance(self.tolerance)

    @property
    def rule(self) -> Rule | None:
        """How peers split their values among neighbours; None for the graph's own rule."""
        return cast("Rule | None", self.weights)

    def load(self, text: str) -> SwarmGraph:
        """Return the graph that an argument names; print which links were added and which weights ignored."""
        from ..graphs.swarm import load_graph, print_graph_notes

        graph = load_graph(text, self.peers, seed=self.seed, bridging=self.bridge)
        print_graph_notes(
            graph, "with --rule edges, link weights are the shares", rule=self.rule, named=True
        )
        return graph


@command("show", topology_app, slow=True)
def show_command(
    graph: Graph, *, group: str | None = None, options: GraphOptions, output: Output
) -> None:
    """Print a graph's properties (size, spectrum, weak points) and draw it.

    For a config, this is the graph of its swarm, and the subgraph of every partial model.

    Args:
        group: The node attribute by which peers are coloured in the picture.
    """
    from ..graphs.show import MODEL_HEADER, examine, show

    swarm_graph = options.load(graph)
    results = _results(output, "show", swarm_graph.name)
    with results.opened() as folder:
        properties = examine(swarm_graph, options.rule, options.tolerance, group)
        console.table(swarm_graph.name, ["what", "value"], properties.rows)
        if properties.models:
            console.table("each partial model on its own subgraph", MODEL_HEADER, properties.models)
        results.begin()  # only now, because it deletes the results that --force replaces
        console.print_written(show(properties, folder))


@command("compare", topology_app, slow=True)
def compare_command(
    graphs: Graphs,
    *,
    learn: YesNoOrNeither = None,
    rounds: AtLeastOne = 40,
    megabytes: float | None = None,
    options: GraphOptions,
    output: Output,
) -> None:
    """Compare graphs: predicted and measured disagreement, messages, accuracy for the same bytes sent.

    Args:
        graphs: Up to 8 graphs, in the form that gossamer topology show accepts.
        learn: Train a swarm on each graph, all with the same budget of bytes; if left out, only for up to
            128 peers.
        rounds: The number of rounds of training.
        megabytes: The budget: what all peers together may send in a whole training. If left out, what one
            exchange per round takes on the graph of median cost among those compared.
    """
    load_torch()
    from ...topology import TopologyError
    from ..graphs import compare as comparing

    swarm_graphs = [options.load(graph) for graph in graphs]
    learns = comparing.worth_learning(swarm_graphs) if learn is None else learn
    if megabytes is not None and not 0 < megabytes < inf:
        raise TopologyError(f"--megabytes {megabytes:g}: give a positive number")
    if megabytes is not None and learn is False:
        raise TopologyError(
            "--megabytes is for training, which --no-learn leaves out: use one of them"
        )
    results = _results(output, "compare", f"{len(swarm_graphs)} graphs")
    learning = comparing.Learning(rounds=rounds, seed=options.seed)
    budget = None
    if learns and megabytes is not None:
        budget = megabytes * 1e6
    elif learns:
        budget = comparing.default_budget(swarm_graphs, learning)
    with results.opened() as folder:
        with console.progress("graphs") as bar:
            task = bar.add_task("compare", total=len(swarm_graphs), latest="")
            entries = comparing.compare(
                swarm_graphs,
                rule=options.rule,
                tolerance=options.tolerance,
                learning=learning if learns else None,
                budget=budget,
                seed=options.seed,
                on_graph=lambda name: bar.update(task, advance=1, latest=name),
            )
        count, columns = len(swarm_graphs[0].graph), 5 if learns else 4  # the last is the accuracy
        message_bytes = learning.message
        console.table(
            f"{count} peers: how fast the disagreement falls to {options.tolerance:g} of that at the start, "
            "predicted and measured",
            comparing.PACE_HEADER,
            comparing.pace_rows(entries),
        )
        console.table(
            f"cost in messages of {message_bytes / 1e3:.3g} kB, the cheapest first",
            comparing.COST_HEADER[:columns],
            [row[:columns] for row in comparing.cost_rows(entries, message_bytes)],
        )
        if budget is not None:
            console.say(
                f"accuracy: mean over the last quarter of {rounds} rounds of training on the digits, with "
                f"{budget / 1e6:.3g} MB to send on every graph; each peer has samples of about "
                f"{learning.shards} classes"
            )
        elif learn is None:
            console.say(f"no swarm is trained for {count} peers; --learn forces it")
        results.begin()
        files = comparing.write(
            entries, folder, tolerance=options.tolerance, message=message_bytes, budget=budget
        )
        console.print_written(files)


@command("stress", topology_app, slow=True)
def stress_command(graph: Graph, *, options: GraphOptions, output: Output) -> None:
    """Measure how a graph withstands failures of peers and links (random and worst case), churn and delay."""
    from ..graphs.show import LOSS_HEADER, loss_rows, stress, write_stress

    swarm_graph = options.load(graph)
    results = _results(output, "stress", swarm_graph.name)
    with results.opened() as folder:
        with console.progress("steps") as bar:
            task = bar.add_task("stress", total=6, latest="")
            outcome = stress(
                swarm_graph,
                rule=options.rule,
                tolerance=options.tolerance,
                seed=options.seed,
                on_step=lambda name: bar.update(task, advance=1, latest=name),
            )
        title = f"{outcome.name}: {outcome.peers} peers, {outcome.links} links"
        console.table(title, LOSS_HEADER, loss_rows(outcome))
        rows = [(slowdown.trouble, f"{slowdown.factor:.3g}") for slowdown in outcome.slowdowns]
        console.table("churn and delay", ["disturbance", "exchanges needed, × undisturbed"], rows)
        console.say(outcome.verdict)
        results.begin()
        console.print_written(write_stress(outcome, folder))


@command("advise", topology_app, slow=True)
def advise_command(
    *,
    peers: AtLeastOneIfGiven = None,
    graph: str | None = None,
    hostile: AtLeastOneIfGiven = None,
    degree: int | None = None,
    kilobytes: float | None = None,
    parameters: AtLeastOneIfGiven = None,
    groups: str | None = None,
    tolerance: float = 1e-6,
    seed: Seed = 0,
    output: Output,
) -> None:
    """Recommend graphs for a swarm: ranked by how fast they average, within a budget of links or bytes.

    With --graph and --hostile, instead: print which links to add to a graph so that every peer withstands
    that many hostile neighbours, if the swarm gossips with mode = "steady".

    Args:
        peers: The number of peers.
        graph: A graph, as for topology show, or a config, to which links may be added.
        hostile: How many neighbours of a peer may be hostile.
        degree: The largest number of links of a peer, which sends one message per link and exchange.
        kilobytes: What a peer may send, on average over peers, in one averaging.
        parameters: The number of values in one message, 4 bytes each; 1000 if left out.
        groups: Groups of peers, of which each shares a partial model of its own beside that of all peers: how
            many groups of equal size, or a list of sizes, as in 10,10,12.
        tolerance: The disagreement at which averaging is complete, relative to that at the start.
        seed: The seed of random graphs, starting values and failures.
    """
    if peers is None and graph is None and hostile is None:
        raise typer.BadParameter("give the number of peers", param_hint="--peers")
    from ...topology import TopologyError, advise
    from ..graphs import compare as comparing

    _check_tolerance(tolerance)
    if graph is not None and hostile is not None:
        for_ranking = {
            "--degree": degree, "--kilobytes": kilobytes, "--parameters": parameters, "--groups": groups,
            "--out": output.out, "--force": output.force or None,
        }  # fmt: skip
        if ignored := [option for option, value in for_ranking.items() if value is not None]:
            raise TopologyError(
                f"{', '.join(ignored)}: without effect with --graph and --hostile, which only print links; "
                "leave out one or the other"
            )
        _advise_links(graph, hostile, peers, seed)
        return
    if peers is None or graph is not None or hostile is not None:
        raise TopologyError("--graph and --hostile belong together: give both")
    if kilobytes is not None and not 0 < kilobytes < inf:
        raise TopologyError(f"--kilobytes {kilobytes:g}: give a positive number")
    members = None if groups is None else comparing.groups_from(groups, peers)
    limits = [f"at most {degree} links per peer"] if degree else []
    limits += [f"{kilobytes:g} kB per peer in each averaging"] if kilobytes else []
    limits += [f"{len(members)} groups"] if members else []
    title = ", ".join([f"{peers} peers", *limits])
    results = _results(output, "advise", title)
    advice = advise(
        peers,
        degree,
        budget=None if kilobytes is None else kilobytes * 1e3,
        message=4.0 * (parameters or 1000),
        members=members,
        tolerance=tolerance,
        seed=seed,
    )
    if not advice.ranked:
        reasons = "; ".join(f"{spec}: {reason}" for spec, reason in advice.refused)
        raise TopologyError(f"no topology fits {title}: {reasons}")
    columns = 5 if kilobytes is None else 6  # the last one, the error left, needs a budget of bytes
    table = [row[:columns] for row in comparing.advice_rows(advice)]
    heading = f"{title}; best first, links and messages per peer"
    console.table(heading, comparing.ADVICE_HEADER[:columns], table)
    for candidate in advice.ranked:
        console.say(f"{candidate.topology}: {comparing.reason(candidate)}")
    for spec, reason in advice.refused:
        console.say(f"not {spec}: {reason}")
    best = advice.ranked[0]
    bridge = (
        "\nbridge = true" if best.added else ""
    )  # if links were added to connect partial models
    console.say(f'in a config: topology = "{best.topology}"{bridge}')
    with results.run_folder() as folder:
        console.print_written(comparing.write_advice(advice, folder, title))


def _advise_links(graph: str, hostile: int, peers: int | None, seed: int) -> None:
    """Print which links to add to a graph so that every peer withstands so many hostile neighbours."""
    from ...gossip import needed_neighbours
    from ...topology import TopologyError, links_to_add
    from ..graphs.swarm import load_graph, name_links

    swarm = load_graph(graph, peers, seed=seed, check_connected=False)
    if swarm.graph.is_directed() or swarm.changing is not None:
        raise TopologyError(
            f"{swarm.name}: steady gossip needs an undirected graph that does not change"
        )
    needed = needed_neighbours(hostile)
    models = swarm.models or {"": sorted(swarm.graph)}
    for model, members in models.items():
        if len(members) <= needed:
            of_model = f"model {model!r}: " if model else ""
            raise TopologyError(
                f"{swarm.name}: {of_model}{len(members)} peers cannot have {needed} neighbours each; "
                f"let {needed + 1} or more take part"
            )
    links = links_to_add(swarm.graph, models, needed)
    if not links:
        console.say(f"{swarm.name}: every peer has at least {needed} neighbours: no link is needed")
        return
    named = name_links(links, swarm.labels, limit=len(links))
    console.say(f"{swarm.name}: {len(links)} links to give every peer {needed} neighbours: {named}")


def _check_tolerance(tolerance: float) -> None:
    if not 0 < tolerance < 1:
        from ...topology import TopologyError

        raise TopologyError(f"--tolerance {tolerance:g}: give a number between 0 and 1")


def _results(output: Output, command: str, name: str) -> Results:
    """Return the results folder of a command; characters of `name` that folders cannot have are replaced."""
    folder = "".join(c if c.isalnum() or c in "._-" else "-" for c in name)
    return output.results(f"results/topology/{command}/{folder}", f"topology {command}")
