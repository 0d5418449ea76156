"""`gossamer paper`: every reproduction by name, whatever runs it underneath."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from . import console
from .errors import ConfigError

ALL = frozenset({"quick", "runs", "jobs", "only"})


@dataclass(frozen=True)
class Reproduction:
    """One experiment of a paper.

    run: takes `out`, the folder for results, and those options that are in `takes`.
    """

    name: str
    section: str
    title: str
    run: Callable[..., None]
    takes: frozenset[str] = ALL


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
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for results.")] = None,
) -> None:
    """Run a paper's experiment: JSON lines, a summary table and the figure in the paper's form.

    Most take long at the paper's size; interrupted, they go on where they stopped.
    """
    known = reproductions()
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
            takes = ", ".join(f"--{one}" for one in sorted(chosen.takes)) or "no options but --out"
            raise ConfigError(f"{name} does not take --{option}; it takes {takes}")
    folder = out or Path("results/paper") / (f"{name}-quick" if quick else name)
    chosen.run(out=folder, **{option: given[option] for option in chosen.takes})


def reproductions() -> Mapping[str, Reproduction]:
    """Every reproduction, in the order in which they are listed."""
    from .compression_study import paper_compression
    from .federated.fednp_papers import FEDERATED_STUDIES, paper_federated
    from .fusing.command import paper_fusion
    from .fusing.live_studies import LIVE_STUDIES, paper_live
    from .fusing.studies import FUSION_STUDIES
    from .networks_papers import NETWORKS_STUDIES, paper_networks
    from .paper import STUDIES

    found = [
        *(Reproduction(s.name, s.section, s.title, partial(_figure, s.name)) for s in STUDIES.values()),
        *(
            Reproduction(s.name, s.section, s.title, partial(paper_fusion, s.name))
            for s in FUSION_STUDIES.values()
        ),
        *(
            Reproduction(s.name, s.section, s.title, partial(paper_live, s.name), frozenset())
            for s in LIVE_STUDIES.values()
        ),
        *(
            Reproduction(
                s.name, s.section, s.title, partial(paper_federated, s.name), frozenset({"runs"})
            )
            for s in FEDERATED_STUDIES.values()
        ),
        *(
            Reproduction(name, s.section, s.title, partial(paper_networks, name))
            for name, s in NETWORKS_STUDIES.items()
        ),
        Reproduction(
            "compression", "deck 001", "Accuracy and bytes of live peers, by compressor",
            paper_compression, frozenset({"quick", "only"}),
        ),
    ]  # fmt: skip
    return {one.name: one for one in found}


def _figure(
    name: str,
    *,
    quick: bool,
    runs: int | None,
    jobs: int | None,
    only: list[str] | None,
    out: Path,
) -> None:
    """A figure of the paper on partial models: runs by line and x, their medians drawn."""
    from .paper import STUDIES, run_study

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
            out,
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
    console.wrote([out / "runs.jsonl", *files])
