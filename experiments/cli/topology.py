"""The commands of topology experiments: `gossamer topology show | compare | stress | advise`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from ..results import Results
from . import console
from .options import Force, Out, load_torch, results_for

if TYPE_CHECKING:
    from ...topology import Rule
    from ..graphs import SwarmGraph

RULES = ("push", "metropolis", "max-degree", "edges")
"""Weights, for the help; those of topology.Rule, which a test compares."""

Graph = Annotated[
    str,
    typer.Argument(
        metavar="GRAPH",
        help="regular:4, club.graphml, networkx:karate_club_graph, mine:graph, or a config (.toml).",
    ),
]
Peers = Annotated[
    int | None,
    typer.Option(min=1, help="Peers of a builder; 16 if left out. Files bring their own."),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--rule", "--weights", metavar="RULE",
        help=f"Shares of mass: {', '.join(RULES)}. A config's own, else push, if left out.",
    ),
]  # fmt: skip
Tolerance = Annotated[
    float, typer.Option(help="When disagreement counts as gone: a share of the first.")
]
SeedOption = Annotated[int, typer.Option("--seed", help="For random graphs, starts and losses.")]
Bridge = Annotated[
    bool, typer.Option("--bridge", help="Join a graph in parts by the fewest added links.")
]

topology_app = typer.Typer(
    no_args_is_help=True,
    help="Bring a graph and see how a swarm lives on it.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@topology_app.command("show")
def show_command(
    graph: Graph,
    peers: Peers = None,
    weights: Weights = None,
    tolerance: Tolerance = 1e-6,
    group: Annotated[
        str | None, typer.Option(help="The node attribute that colours peers on the picture.")
    ] = None,
    bridge: Bridge = False,
    seed: SeedOption = 0,
    out: Out = None,
    force: Force = False,
) -> None:
    """A graph's facts (size, spectrum, weak spots) and its picture.

    A config shows the graph of its swarm, and every partial model on its own subgraph.
    """
    from ..graphs.show import MODEL_HEADER, examine, show

    rule = _rule(weights)
    given = _graph(graph, peers, seed, bridge, rule)
    _checked(tolerance)
    results = _results(out, "show", given.name, force)
    with results.opened() as folder:
        shown = examine(given, rule, tolerance, group)
        console.table(given.name, ["what", "value"], shown.rows)
        if shown.models:
            console.table("each partial model on its own subgraph", MODEL_HEADER, shown.models)
        results.begin()
        console.print_written(show(shown, folder))


@topology_app.command("compare")
def compare_command(
    graphs: Annotated[
        list[str], typer.Argument(metavar="GRAPH…", help="Up to 8 graphs, as for show.")
    ],
    peers: Peers = None,
    weights: Weights = None,
    tolerance: Tolerance = 1e-6,
    learn: Annotated[
        bool | None,
        typer.Option(
            "--learn/--no-learn",
            help="Train a swarm on each graph at equal bytes; up to 128 peers if left out.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the learning run.")] = 40,
    megabytes: Annotated[
        float | None,
        typer.Option(
            help="What the swarm may send while learning; a middling graph's if left out."
        ),
    ] = None,
    bridge: Bridge = False,
    seed: SeedOption = 0,
    out: Out = None,
    force: Force = False,
) -> None:
    """Graphs side by side: predicted and measured disagreement, messages, accuracy at equal bytes."""
    load_torch()
    from ...topology import TopologyError
    from ..graphs import compare as comparing

    rule = _rule(weights)
    found = [_graph(graph, peers, seed, bridge, rule) for graph in graphs]
    wanted = comparing.worth_learning(found) if learn is None else learn
    if megabytes is not None and megabytes <= 0:
        raise TopologyError(f"--megabytes {megabytes:g}: give a positive number")
    _checked(tolerance)
    results = _results(out, "compare", f"{len(found)} graphs", force)
    learning = comparing.Learning(rounds=rounds, seed=seed)
    budget = None
    if wanted:
        budget = comparing.default_budget(found, learning) if megabytes is None else megabytes * 1e6
    with results.opened() as folder:
        with console.progress("graphs") as bar:
            task = bar.add_task("compare", total=len(found), latest="")

            def on_graph(name: str) -> None:
                bar.update(task, latest=name)

            entries = comparing.compare(
                found,
                rule=rule,
                tolerance=tolerance,
                learning=learning if wanted else None,
                budget=budget,
                seed=seed,
                on_graph=on_graph,
                on_done=lambda: bar.advance(task),
            )
        count = len(found[0].graph)
        console.table(
            f"{count} peers, to {tolerance:g} of the first disagreement: predicted and measured",
            comparing.PACE,
            comparing.pace_rows(entries),
        )
        console.table(
            f"what it costs in messages of {learning.message / 1e3:.3g} kB, the cheapest first",
            comparing.COST[: 5 if wanted else 4],
            [row[: 5 if wanted else 4] for row in comparing.cost_rows(entries, learning.message)],
        )
        if budget is not None:
            console.out.print(
                f"accuracy: digits, {learning.shards} shards of labels per peer, {rounds} rounds, "
                f"{budget / 1e6:.3g} MB for every graph; mean of the last quarter",
                soft_wrap=True,
            )
        elif learn is None:
            console.out.print(f"no learning run for {count} peers; --learn forces it")
        results.begin()
        console.print_written(
            comparing.write(
                entries, folder, tolerance=tolerance, message=learning.message, budget=budget
            )
        )


@topology_app.command("stress")
def stress_command(
    graph: Graph,
    peers: Peers = None,
    weights: Weights = None,
    tolerance: Tolerance = 1e-6,
    bridge: Bridge = False,
    seed: SeedOption = 0,
    out: Out = None,
    force: Force = False,
) -> None:
    """Lose peers and links, by chance and at the worst places; churn; delay: what breaks first?"""
    from ..graphs import stress as stressing

    rule = _rule(weights)
    given = _graph(graph, peers, seed, bridge, rule)
    _checked(tolerance)
    results = _results(out, "stress", given.name, force)
    with results.opened() as folder:
        with console.progress("steps") as bar:
            task = bar.add_task("stress", total=6, latest="")

            def on_step(name: str) -> None:
                bar.update(task, advance=1, latest=name)

            found = stressing.stress(
                given, rule=rule, tolerance=tolerance, seed=seed, on_step=on_step
            )
        console.table(
            f"{found.name}: {found.peers} peers, {found.links} links",
            stressing.HEADER,
            stressing.rows(found),
        )
        console.table(
            "churn and delay",
            ["trouble", "exchanges, in calm ones"],
            [(s.trouble, f"{s.factor:.3g}") for s in found.slowdowns],
        )
        console.out.print(found.verdict, soft_wrap=True)
        results.begin()
        console.print_written(stressing.write(found, folder))


@topology_app.command("advise")
def advise_command(
    peers: Annotated[int, typer.Option(help="Peers of the swarm.")],
    degree: Annotated[
        int | None, typer.Option(help="Links that a peer may have: its messages per exchange.")
    ] = None,
    kilobytes: Annotated[
        float | None, typer.Option(help="What a peer may send in one averaging, on the average.")
    ] = None,
    parameters: Annotated[
        int, typer.Option(min=1, help="Values in one message, 4 bytes each.")
    ] = 1000,
    groups: Annotated[
        str | None,
        typer.Option(help="Semi-local groups: how many equal ones, or sizes, as in 10,10,12."),
    ] = None,
    tolerance: Tolerance = 1e-6,
    seed: SeedOption = 0,
    out: Out = None,
    force: Force = False,
) -> None:
    """Graphs for a swarm, ranked by predicted rate within a budget of links or bytes, with the reason."""
    from ...topology import TopologyError, advise
    from ..graphs import compare as comparing

    members = None if groups is None else comparing.groups_from(groups, peers)
    limits = [f"at most {degree} links per peer"] if degree else []
    limits += [f"{kilobytes:g} kB per peer and averaging"] if kilobytes else []
    limits += [f"{len(members)} groups"] if members else []
    title = f"{peers} peers" + "".join(f", {limit}" for limit in limits)
    results = _results(out, "advise", title, force)
    advice = advise(
        peers,
        degree,
        budget=None if kilobytes is None else kilobytes * 1e3,
        message=4.0 * parameters,
        members=members,
        tolerance=_checked(tolerance),
        seed=seed,
    )
    if not advice.ranked:
        told = "; ".join(f"{spec}: {reason}" for spec, reason in advice.refused)
        raise TopologyError(f"no topology fits {title}: {told}")
    columns = 5 if kilobytes is None else 6  # the last one is about the bytes
    table = [row[:columns] for row in comparing.advice_rows(advice)]
    console.table(
        f"{title}; best first, links and messages per peer", comparing.ADVICE[:columns], table
    )
    for one in advice.ranked:
        console.out.print(f"{one.topology}: {comparing.reason(one)}", soft_wrap=True)
    for spec, reason in advice.refused:
        console.out.print(f"not {spec}: {reason}", soft_wrap=True)
    best = advice.ranked[0]
    console.out.print(
        f'in a config: topology = "{best.topology}"' + ("\nbridge = true" if best.added else "")
    )
    with results.begun() as folder:
        console.print_written(comparing.write_advice(advice, folder, title))


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.add_typer(topology_app, name="topology")


def _graph(
    text: str, peers: int | None, seed: int, bridging: bool, rule: Rule | None
) -> SwarmGraph:
    from ..graphs.swarm import describe_bridging, describe_unused, load_graph, unused

    given = load_graph(text, peers, seed=seed, bridging=bridging)
    if given.added.edges:
        console.out.print(
            f"{given.name}: {describe_bridging(given.added, given.labels)}", soft_wrap=True
        )
    used = rule or given.rule
    if unused(given.graph, used):
        line = f"{given.name}: {describe_unused(used)}; --rule edges takes them for shares"
        console.out.print(line, soft_wrap=True, markup=False)
    return given


def _rule(name: str | None) -> Rule | None:
    from ...topology import Rule, TopologyError

    if name is not None and name not in get_args(Rule):
        raise TopologyError(f"--rule {name!r}: use {', '.join(get_args(Rule))}")
    return name  # pyright: ignore[reportReturnType]


def _checked(tolerance: float) -> float:
    if not 0 < tolerance < 1:
        from ...topology import TopologyError

        raise TopologyError(f"--tolerance {tolerance:g}: give a share of the first, 0 … 1")
    return tolerance


def _results(out: Path | None, command: str, name: str, force: bool) -> Results:
    plain = "".join(c if c.isalnum() or c in "._-" else "-" for c in name)
    default = Path("results/topology") / command / plain
    return results_for(out, default, f"topology {command}", force=force)
