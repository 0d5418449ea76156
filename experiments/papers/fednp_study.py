"""`gossamer paper fednp-toy`: FedAvg, FedNP and FedNP with z frozen on the parabola of eq (20)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ...models.fednp import FedNPOptions
from ..results import Record, RecordFile, read_records, write_csv
from ..study.figures import COLOURS, save
from . import fednp_toy as toy
from .fednp_panels import panels

METHODS: dict[str, FedNPOptions | None] = {
    "FedAvg": None,
    "FedNP": toy.OPTIONS,
    "FedNP, z frozen": replace(toy.OPTIONS, freeze_z=True),
}
BOUND = "pooled least squares"


def run_toy(
    out: Path, seeds: int, on_record: Callable[[Record], None] = lambda _: None
) -> tuple[list[list[str]], list[Path]]:
    """Run every method on every seed; returns the table's rows and the files."""
    with RecordFile(out / "runs.jsonl") as file:
        for seed in range(seeds):
            _write(file, on_record, {"seed": seed, "method": BOUND, "mse": toy.least_squares(seed)})
            for name, options in METHODS.items():
                fit = toy.run(options, seed)
                record: Record = {
                    "seed": seed, "method": name, "mse": fit.errors[-1], "by_round": fit.errors,
                    "shared": fit.shared.tolist(), "own": [curve.tolist() for curve in fit.own],
                    "spread": None if fit.spread is None else fit.spread.tolist(),
                }  # fmt: skip
                _write(file, on_record, record)
    return report(out)


def report(out: Path) -> tuple[list[list[str]], list[Path]]:
    """The table and the picture of whatever runs.jsonl holds."""
    records = list(read_records(out / "runs.jsonl"))
    by_method = {
        name: np.array([r["mse"] for r in records if r["method"] == name])
        for name in (*METHODS, BOUND)
    }
    fedavg = by_method["FedAvg"]
    rows = [
        [
            name,
            f"{errors.mean():.1f}",
            f"{errors.std():.1f}",
            "" if name in ("FedAvg", BOUND) else f"{(errors < fedavg).sum()} of {len(errors)}",
            " ".join(f"{error:.1f}" for error in errors),
        ]
        for name, errors in by_method.items()
    ]
    write_csv(out / "summary.csv", HEADER, rows)
    return [HEADER, *rows], [out / "summary.csv", *_draw(out, records)]


HEADER = ["method", "mean squared error", "deviation", "below FedAvg", "by seed"]


def _write(file: RecordFile, tell: Callable[[Record], None], record: Record) -> None:
    file.write(record)
    tell(record)


def _draw(out: Path, records: list[Record]) -> list[Path]:
    chosen: dict[str, Record] = {r["method"]: r for r in records if r["seed"] == 0}
    caption = (
        "004, eq (20), one draw of the data (seed 0): 30, 20 and 50 samples of three clients; noise of "
        f"deviation 5. Cubics in x/{toy.SCALE:g}, RMSprop {toy.RATE:g}, batches of {toy.BATCH}, "
        f"{toy.EPOCHS} local epochs, {toy.ROUNDS} rounds, averages by samples (the paper: 1 epoch, 10 "
        "rounds, rate 0.01, its ranges of x unknown). Thin: each client's cubic before the last averaging; "
        "thick: the averaged one, with its mean squared error above, within three deviations of what the NPN "
        "predicts (ε = 1 sets their size)."
    )
    figure, axes = panels(len(METHODS), caption)
    points = toy.draw(0)
    for place, (name, one) in enumerate(zip(METHODS, axes, strict=True)):
        _panel(one, name, chosen[name], points)
        if place == 0:
            one.set_ylabel("y")
            one.legend(fontsize=7, frameon=False, loc="lower center")
    return save(figure, out / "figure")


def _panel(axes: Axes, name: str, record: Record, points: list[toy.Points]) -> None:
    grid = toy.GRID.numpy()
    for index, client in enumerate(points):
        axes.plot(
            client.x, client.y, "x", color=COLOURS[index], markersize=4, alpha=0.6,
            label=f"client {index + 1}",
        )  # fmt: skip
        axes.plot(grid, record["own"][index], color=COLOURS[index], linewidth=1)
    shared = np.array(record["shared"])
    if record["spread"] is not None:
        reach = 3 * np.array(record["spread"])
        axes.fill_between(
            grid, shared - reach, shared + reach, color="black", alpha=0.1, linewidth=0
        )
    axes.plot(grid, shared, color="black", linewidth=2.2, label="averaged")
    truth: Any = toy.truth(toy.GRID)
    axes.plot(grid, truth, color="black", linewidth=1, linestyle=":", label="truth")
    axes.set(title=f"{name}: {record['mse']:.1f}", xlabel="x", ylim=(-110, 40))
