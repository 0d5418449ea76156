"""What commands have in common: the options --out and --force, and torch with the threads of --threads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...peer import exit_on_interrupt
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


class Torch:
    """Torch as commands load it. threads: how many one of its products may use, as --threads says."""

    threads = 1


def load_torch() -> None:
    """Import torch, with the threads of --threads.

    It takes two seconds, in which Ctrl-C ends the process without a word. A command calls this when it begins
    to compute: help and the news that a file is missing should not wait for it.
    """
    with exit_on_interrupt():
        import torch
    torch.set_num_threads(Torch.threads)
