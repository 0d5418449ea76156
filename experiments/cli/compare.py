"""`gossamer compare`: several methods on the same clients, at equal rounds and at equal bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..results import Record, write_json
from . import console
from .results import Force, Out, results_for

if TYPE_CHECKING:
    from ..federated.config import Comparison


def compare_command(
    config: Annotated[
        Path, typer.Argument(help="A TOML file; experiments/configs/compare.toml is one.")
    ],
    only: Annotated[
        list[str] | None, typer.Option(help="Only this method of the file; repeat for more.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Worker processes; one per core if left out.")
    ] = None,
    out: Out = None,
    force: Force = False,
) -> None:
    """Compare methods of learning together: accuracy per client, bytes and time, with a picture.

    Interrupted, it goes on where it stopped. A changed config gets a new folder, to which runs that it
    has in common with earlier ones are copied; --force runs them all again.
    """
    import numpy as np

    from ..federated.config import choose, load_comparison
    from ..federated.report import show, write_report
    from ..federated.run import cells_of, check, run_cells
    from ..study.sweep_run import open_runs

    settings = choose(load_comparison(config), only)
    check(settings, str(config))
    results = results_for(out, Path("results/compare") / settings.name, "compare", force=force)
    cells = cells_of(settings, str(config))
    files: list[Path] = []
    with open_runs(results, cells) as (folder, grid), console.progress("runs") as bar:
        task = bar.add_task(settings.name, total=None, latest="")

        def finished(record: Record) -> None:
            accuracy = float(np.mean(record["curve"][-1]["accuracy"]))
            bar.update(task, advance=1, latest=f"{record['method']}: {accuracy:.3f}")

        try:
            grid.go(
                run_cells,
                jobs=jobs,
                on_start=lambda done, total: bar.update(task, completed=done, total=total),
                on_record=finished,
            )
        finally:
            records = grid.records()
            if records:
                write_json(folder / "config.json", settings.model_dump(mode="json"))
            files = write_report(records, folder, settings.name, describe(settings), len(cells))
    show(records, settings.name)
    console.wrote([folder / "runs.jsonl", *files])


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("compare")(compare_command)


def describe(config: Comparison) -> str:
    """The setting, as a caption says it."""
    split, training = config.split, config.training
    dealt = {"dirichlet": f"Dirichlet({split.alpha:g})", "shards": f"{split.shards} shards each"}
    amount = f"{config.data.samples} samples" if config.data.samples else "all samples"
    swapped = ", two labels swapped at each" if split.tasks == "swaps" else ""
    network = config.network.layout if config.network.kind == "mlp" else config.network.kind
    tested = "each client's own classes" if config.data.tested == "own" else "all classes"
    return (
        f"{config.data.set}, {amount}, {config.peers} clients, {dealt.get(split.kind, split.kind)}{swapped}; "
        f"{network}; E = {training.epochs}, B = {training.batch}, η = {training.rate:g}; "
        f"tested on {tested}."
    )
