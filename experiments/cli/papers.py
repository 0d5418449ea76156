"""`gossamer paper`: every reproduction by name, whatever runs it underneath."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from ..errors import ConfigError
from ..results import Results
from . import console
from .results import Force, Out, results_for

ALL = frozenset({"quick", "runs", "jobs", "only"})
FIGURE = "..cli.papers:paper_figure"
FUSION = "..fusing.command:paper_fusion"
LIVE = "..papers.fusing_live_studies:paper_live"
FEDERATED = "..papers.fednp_papers:paper_federated"
NETWORKS = "..papers.networks_papers:paper_networks"


@dataclass(frozen=True)
class Reproduction:
    """One experiment of a paper.

    run: module:function. It takes the name, `results`, where to leave them, and those options that are in
        `takes`.
    """

    name: str
    section: str
    title: str
    run: str
    takes: frozenset[str] = ALL


# Written down once more, so that torch need not be loaded to list them; a test compares them with the
# studies themselves.
REPRODUCTIONS: Mapping[str, Reproduction] = MappingProxyType(
    {
        one.name: one
        for one in (
            Reproduction(
                "averaging-level", "003, V.3.a, figure 17",
                "Averaging level: accuracy by cells in the global model", FIGURE,
            ),
            Reproduction(
                "semi-local", "003, V.3.d, figure 20",
                "Semi-local models: one model per group of like peers", FIGURE,
            ),
            Reproduction(
                "semi-local-and-local", "003, V.3.e, figure 21",
                "Global, semi-local and local models together", FIGURE,
            ),
            Reproduction(
                "associative", "003, V.5, figure 27",
                "Associative network: accuracy by averaged hidden cells", FIGURE,
            ),
            Reproduction(
                "associative-starts", "003, V.5, 10 mini-batches",
                "Associative network: which starting weights show the paper's curve", FIGURE,
            ),
            Reproduction(
                "pfnm-table", "reference table",
                "PFNM and MAGI against averaging and the ensemble, ten peers", FUSION,
            ),
            Reproduction(
                "pfnm-figure2", "000, figures 2 and 3",
                "PFNM: accuracy and size by the number of peers", FUSION,
            ),
            Reproduction(
                "pfnm-figure4", "000, figure 4",
                "PFNM: accuracy and size by the number of hidden parts", FUSION,
            ),
            Reproduction(
                "pfnm-streaming", "000, supplement, figure 3b",
                "PFNM streaming: posterior becomes prior", FUSION,
            ),
            Reproduction(
                "magi-table1", "002, table 1, rows of MNIST", "MAGI: accuracy on MNIST", FUSION
            ),
            Reproduction(
                "magi-figure2", "002, figure 2", "MAGI: size of the fused network by λ", FUSION
            ),
            Reproduction(
                "newcomers", "live", "peers trained apart join, aligned or not", LIVE, frozenset()
            ),
            Reproduction(
                "widths", "live", "peers of three widths in one partial model", LIVE, frozenset()
            ),
            Reproduction(
                "fednp-toy", "004, figure 1 and table 4",
                "FedNP on three stretches of a parabola, with z frozen as a control",
                FEDERATED, frozenset({"runs"}),
            ),
            Reproduction(
                "multitask", "001, federated multi-task learning",
                "MOCHA against separate and pooled linear models", FEDERATED, frozenset({"runs"}),
            ),
            Reproduction(
                "networks-cifar", "003, other networks",
                "Partial sharing of a small CNN, CIFAR-10", NETWORKS,
            ),
            Reproduction(
                "networks-hapt", "003, other networks",
                "Partial sharing of an LSTM and a 1-D CNN, HAPT", NETWORKS,
            ),
            Reproduction(
                "compression", "deck 001", "Accuracy and bytes of live peers, by compressor",
                "..cli.papers:paper_bytes", frozenset({"quick", "only"}),
            ),
        )
    }
)  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("paper")(paper_command)


def paper_command(
    name: Annotated[
        str, typer.Argument(help="A reproduction's name, or LIST to see them.")
    ] = "list",
    quick: Annotated[
        bool, typer.Option("--quick", help="A minute or two on the built-in digits.")
    ] = False,
    runs: Annotated[
        int | None, typer.Option(min=1, help="Seeds per point; the paper's if left out.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Worker processes; one per core if left out.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only this line of the figure; repeat for more.")
    ] = None,
    out: Out = None,
    force: Force = False,
) -> None:
    """Run a paper's experiment: JSON lines, a summary table and the figure in the paper's form.

    Most take long at the paper's size; interrupted, they go on where they stopped. Runs that an earlier
    one has in common are copied from its folder; --force runs them all again.
    """
    known = REPRODUCTIONS
    if name.lower() == "list":
        rows = [(one.name, one.section, one.title) for one in known.values()]
        console.table("gossamer paper NAME", ["name", "where", "what"], rows)
        return
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"no reproduction is called {name!r}; {hint}there are {', '.join(known)}")
    chosen = known[name]
    given: dict[str, Any] = {"quick": quick, "runs": runs, "jobs": jobs, "only": only}
    for option, value in given.items():
        if value and option not in chosen.takes:
            takes = ", ".join(f"--{one}" for one in sorted(chosen.takes))
            takes = takes or "no options but --out and --force"
            raise ConfigError(f"{name} does not take --{option}; it takes {takes}")
    default = Path("results/paper") / (f"{name}-quick" if quick else name)
    results = results_for(out, default, f"paper {name}", force=force)
    module, function = chosen.run.split(":")
    run = getattr(import_module(module, __package__), function)
    run(name, results=results, **{option: given[option] for option in chosen.takes})


def paper_bytes(name: str, *, quick: bool, only: list[str] | None, results: Results) -> None:
    """`gossamer paper compression`."""
    from ..papers.compression_study import paper_compression

    paper_compression(results, quick=quick, only=only)


def paper_figure(
    name: str,
    *,
    quick: bool,
    runs: int | None,
    jobs: int | None,
    only: list[str] | None,
    results: Results,
) -> None:
    """A figure of the paper on partial models: runs by line and x, their medians drawn."""
    from ..papers import STUDIES, run_study

    study = STUDIES[name]
    known = list(dict.fromkeys(cell.line for cell in study.cells(quick, 0)))
    wanted = only or known
    if unknown := [line for line in wanted if line not in known]:
        raise ConfigError(
            f"{name} has no line {unknown[0]!r}; lines are {', '.join(map(repr, known))}"
        )
    with console.progress("runs") as bar:
        task = bar.add_task(name, total=None, latest="")
        summary, files = run_study(
            study,
            results,
            quick=quick,
            runs=runs,
            jobs=jobs,
            select=lambda cell: cell.line in wanted,
            on_start=lambda done, total: bar.update(task, completed=done, total=total),
            on_record=lambda record: bar.update(
                task,
                advance=1,
                latest=f"{record['line']} at {record['x']:g}: {record['accuracy']:.3f}",
            ),
        )
    rows = [
        (
            p.line,
            f"{p.x:g}",
            p.runs,
            f"{p.median:.3f}",
            f"{p.low:.3f}",
            f"{p.high:.3f}",
            f"{p.mean:.3f}",
        )
        for p in summary
    ]
    header = [study.legend, study.x_label, "runs", "median", "2nd quintile", "3rd quintile", "mean"]
    console.table(f"{study.title} ({study.section})", header, rows)
    console.wrote([results.folder / "runs.jsonl", *files])
