"""003, V.3.a: how much of a network should be averaged? (figure 17)"""

from __future__ import annotations

from ..config.tables import Config, Data, TaskEntry
from ..study.study import Cell, Study
from .schemes import LEVELS, level, network, training


def _cells(quick: bool, seed: int) -> list[Cell]:
    inputs = 64 if quick else 784
    data = Data(set="digits", test=360) if quick else Data(set="mnist", samples=3500, test=1000)
    return [
        Cell(
            f"{size}",
            share,
            Config(
                name="averaging-level",
                seed=seed,
                peers=16,
                rounds=20 if quick else 30,
                data=data,
                tasks=[TaskEntry(kind="swap", labels=(8, 9), peers=7)],
                network=network(quick),
                models=level(inputs, share),
                training=training(quick, size),
            ),
        )
        for size in ((40, 80) if quick else (50, 100, 200, 500, 1000, 1500, 3000))
        for share in LEVELS
    ]


def _caption(quick: bool) -> str:
    if quick:
        return (
            "16 peers with 89 of scikit-learn's digits each, 8 and 9 swapped for 7 of them; "
            "20 averagings; tanh cells."
        )
    return "16 peers with 3500 MNIST digits each, 8 and 9 swapped for 7 of them; 30 averagings."


AVERAGING_LEVEL = Study(
    name="averaging-level",
    title="Averaging level: accuracy by cells in the global model",
    section="003, V.3.a, figure 17",
    x_label="averaging level",
    legend="mini-batch size",
    runs=10,
    cells=_cells,
    caption=_caption,
)
