"""`gossamer paper`, `gossamer study` and `gossamer sweep`: grids of runs, all by the same runner."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from gossamer.names import hint

from ..errors import ConfigError
from ..papers import PAPERS, STUDIES, Paper
from . import console
from .options import Force, Out, load_torch, results_for

Quick = Annotated[bool, typer.Option("--quick", help="A minute or two on the built-in digits.")]
Runs = Annotated[int | None, typer.Option(min=1, help="Seeds per point; the paper's if left out.")]
Jobs = Annotated[
    int | None, typer.Option(min=1, help="Worker processes; one per core if left out.")
]
Only = Annotated[
    list[str] | None, typer.Option(help="Only this line of the figure; repeat for more.")
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("paper")(paper_command)
    app.command("study")(study_command)
    app.command("sweep")(sweep_command)


def paper_command(
    name: Annotated[
        str, typer.Argument(help="A reproduction's name, or LIST to see them.")
    ] = "list",
    quick: Quick = False,
    runs: Runs = None,
    jobs: Jobs = None,
    only: Only = None,
    out: Out = None,
    force: Force = False,
) -> None:
    """Run a paper's experiment: JSON lines, a summary table and the figure in the paper's form.

    Most take long at the paper's size; interrupted, they go on where they stopped. Runs that an earlier
    one has in common are copied from its folder; --force runs them all again.
    """
    given = {"quick": quick, "runs": runs, "jobs": jobs, "only": only}
    _run("paper", PAPERS, name, given, out, force)


def study_command(
    name: Annotated[
        str, typer.Argument(help=f"{', '.join(STUDIES)}, or LIST to see what they measure.")
    ] = "list",
    quick: Annotated[bool, typer.Option("--quick", help="Smaller: seconds, not minutes.")] = False,
    jobs: Jobs = None,
    only: Only = None,
    out: Out = None,
    force: Force = False,
) -> None:
    """Measure trust: what private averaging hides and costs, or what guards make of attacks."""
    _run("study", STUDIES, name, {"quick": quick, "jobs": jobs, "only": only}, out, force)


def sweep_command(
    config: Annotated[Path, typer.Argument(help="A TOML file with a sweep table.")],
    jobs: Jobs = None,
    out: Out = None,
    force: Force = False,
) -> None:
    """Run every combination of a config's sweep table, side by side, and tabulate them.

    Interrupted, it goes on where it stopped. A changed config gets a new folder, to which runs that it
    has in common with earlier ones are copied; --force runs them all again.
    """
    from ..config.tables import load_config

    settings = load_config(config)
    load_torch()  # only now, so that a mistake in the config is told without waiting for it
    from ..study import run_study
    from ..study.sweep import sweep_study

    study = sweep_study(settings, str(config))
    results = results_for(out, Path("results/sweep") / settings.name, "sweep", force=force)
    run_study(study, results, jobs=jobs)


def _run(
    command: str,
    known: Mapping[str, Paper],
    name: str,
    given: Mapping[str, Any],
    out: Path | None,
    force: bool,
) -> None:
    if name.lower() == "list":
        rows = [(one.name, one.section, one.title) for one in known.values()]
        console.table(f"gossamer {command} NAME", ["name", "where", "what"], rows)
        return
    if name not in known:
        what = "reproduction" if command == "paper" else command
        raise ConfigError(
            f"no {what} is called {name!r}; {hint(name, known, are='there are', cutoff=0.6)}"
        )
    paper = known[name]
    for option, value in given.items():
        if value and option not in paper.takes:
            takes = ", ".join(f"--{one}" for one in sorted(paper.takes))
            takes = takes or "no options but --out and --force"
            raise ConfigError(f"{name} does not take --{option}; it takes {takes}")
    folder = f"{name}-quick" if given["quick"] and command == "paper" else name
    results = results_for(out, Path("results") / command / folder, f"{command} {name}", force=force)
    load_torch()
    study = paper.study(quick=given["quick"], runs=given.get("runs")).only(given["only"])
    from ..study import run_study

    run_study(study, results, jobs=given["jobs"])
