"""`gossamer compare`: several methods on the same clients, at equal rounds and at equal bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..results import Record
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
    from ..federated.report import table, write_report
    from ..federated.run import cells_of, check, run_cells
    from ..study import Study, run_study

    settings = choose(load_comparison(config), only)
    check(settings, str(config))
    results = results_for(out, Path("results/compare") / settings.name, "compare", force=force)
    cells = cells_of(settings, str(config))

    def latest(record: Record) -> str:
        return f"{record['method']}: {float(np.mean(record['curve'][-1]['accuracy'])):.3f}"

    def figure(folder: Path, records: Sequence[Record]) -> list[Path]:
        return write_report(records, folder, settings.name, describe(settings), len(cells))

    study = Study(
        settings.name, cells, run_cells, table, figure,
        titles={"summary": f"{settings.name}: after {settings.rounds} rounds"},
        latest=latest,
        about={"config.json": settings.model_dump(mode="json")},
    )  # fmt: skip
    run_study(study, results, jobs=jobs)


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
