"""The options --out and --force, which all commands that leave results have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..results import Results

Out = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", help="An empty folder for results; a new one below results/ if left out."
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Replace the newest results, or those in --out, by this run's."),
]


def results_for(out: Path | None, default: Path, command: str, *, force: bool) -> Results:
    """Where a command leaves its results: in the folder `out`, or in the next number below `default`."""
    return Results(out or default, command, exact=out is not None, force=force)
