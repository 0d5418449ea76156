"""`gossamer paper fednp-toy`: FedNP's eq (20), three clients fit cubics to three ranges of a parabola (004).

    y = −x² + 2x + 5 + noise,   noise ~ N(0, 5²)

A client's own cubic fits well where its samples are, and badly elsewhere; the mean of the clients' cubics
fits badly everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ...models import SgdLearner, SlicedNetwork, Start, seeded_rng
from ...models.fednp import FedNPLearner, FedNPOptions
from ..arena import Arena
from ..results import Record
from ..study import EachCell, Frame, Job, Study, StudyCell, as_text, frame_of
from . import StudyEntry

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RANGES = ((-8.0, -3.0), (-3.0, 2.0), (2.0, 8.0))
SIZES = (30, 20, 50)
NOISE = 5.0
POWERS = 3
SCALE = 4.0
BATCH = 10
EPOCHS = 5
ROUNDS = 20
RATE = 0.3
OPTIONS = FedNPOptions(strength=10.0, spread=1.0, auxiliary_rate=0.2, dimensions=4, hidden=8)
"""FedNP's options, tuned on seeds that the study does not use."""


@dataclass(frozen=True)
class Points:
    """The samples of one client, or of all clients."""

    x: Tensor
    y: Tensor

    @property
    def features(self) -> Tensor:
        """The powers 1 to 3 of x / `SCALE`; scaled so that one learning rate suits all three."""
        powers = torch.arange(1, POWERS + 1)
        return (self.x[:, None] / SCALE) ** powers


GRID = torch.linspace(RANGES[0][0], RANGES[-1][1], 161)


def truth(x: Tensor) -> Tensor:
    """The parabola without its noise."""
    return -(x**2) + 2 * x + 5


def draw(seed: int) -> list[Points]:
    """Draw the samples of the three clients."""
    clients = []
    for index, ((low, high), size) in enumerate(zip(RANGES, SIZES, strict=True)):
        random = seeded_rng(seed, "parabola", index)
        x = torch.from_numpy(random.uniform(low, high, size)).float()
        noise = torch.from_numpy(random.normal(0, NOISE, size)).float()
        clients.append(Points(x, truth(x) + noise))
    return clients


def pooled(clients: list[Points]) -> Points:
    """The samples of all clients together."""
    return Points(torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients]))


def cubic_learner(peer: str, own: Points, everything: Points, seed: int) -> SgdLearner:
    """A learner that fits a cubic by RMSprop on squared errors, in small batches, as in the paper.

    It is tested on the samples of all clients, as in the paper's table 4.
    """
    network = SlicedNetwork(
        nn.Sequential(nn.Linear(POWERS, 1)), {"global": f"{POWERS}-1"},
        peer=peer, seed=seed, start=Start(gain=0.1),
    )  # fmt: skip
    return SgdLearner(
        network, (own.features, own.y), (everything.features, everything.y),
        local_samples=len(own.y), batch=BATCH, loss=lambda out, y: (out[:, 0] - y).square(),
        optimizer=lambda parameters: torch.optim.RMSprop(parameters, lr=RATE),
        seed=int(seeded_rng(seed, "order", peer).integers(2**31)),
    )  # fmt: skip


def run(options: FedNPOptions | None, seed: int) -> Record:
    """Run FedAvg if `options` is None, otherwise FedNP; clients are weighted by their numbers of samples.

    Returns the mean squared error over all samples after each round (`by_round`) and at the end (`mse`), the
    averaged cubic at `GRID` (`shared`), each client's cubic before the last averaging (`own`), and the
    standard deviation of the cubic that FedNP predicts (`spread`).
    """
    clients = draw(seed)
    everything = pooled(clients)
    sizes = [len(own.y) for own in clients]
    learners: list[Any] = [
        cubic_learner(f"client-{index}", own, everything, seed) for index, own in enumerate(clients)
    ]
    if options is not None:
        for index, inner in enumerate(learners):
            learners[index] = FedNPLearner(inner, options, counting_peer=index == 0, seed=seed)
            learners[index].set_weight(sizes[index])
    arena = Arena(learners, every=EPOCHS, weights=sizes, threads=1)
    errors, own = [], []
    grid_features = Points(GRID, GRID).features
    for _ in range(ROUNDS):
        arena.train()
        with torch.no_grad():
            own = [learner.network(grid_features)[:, 0].tolist() for learner in learners]
        arena.average()
        errors.append(arena.test()[0].mean_loss)
    with torch.no_grad():
        shared = learners[0].network(grid_features)[:, 0].tolist()
    spread = None
    if options is not None:
        _, variance = learners[0].predict_target()
        design = torch.cat([grid_features, torch.ones(len(GRID), 1)], dim=1)
        spread = (design.square() @ variance).sqrt().tolist()
    return {
        "mse": errors[-1], "by_round": errors, "shared": shared, "own": own, "spread": spread,
    }  # fmt: skip


def least_squares(seed: int) -> float:
    """The mean squared error of the best cubic for all samples, which is a lower bound for all methods."""
    everything = pooled(draw(seed))
    design = torch.cat([everything.features, torch.ones(len(everything.x), 1)], dim=1).double()
    targets = everything.y.double()
    best = torch.linalg.lstsq(design, targets[:, None]).solution
    return float((design @ best - targets[:, None]).square().mean())


# --- the study --------------------------------------------------------------------------------------

METHODS: dict[str, FedNPOptions | None] = {
    "FedAvg": None,
    "FedNP": OPTIONS,
    "FedNP, z frozen": OPTIONS.model_copy(update={"freeze_z": True}),
}
BOUND = "pooled least squares"


@dataclass(frozen=True)
class Cell(StudyCell):
    """One run: a method, or the lower bound, with one seed; `line` is the name of the method."""

    seed: int
    options: FedNPOptions | None


def toy(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Return the study: FedAvg, FedNP, and FedNP with z frozen."""
    methods = {BOUND: None, **METHODS}
    return Study(
        entry.name, [Cell(name, seed, methods[name]) for seed in seeds for name in methods],
        EachCell(run_cell), table, lambda folder, records: draw_fits(folder / "figure", records),
        latest=lambda record: f"{record['method']}, seed {record['seed']}",
    )  # fmt: skip


def run_cell(cell: Cell, job: Job) -> Record:
    """Run a method, or compute the lower bound."""
    is_bound = cell.line == BOUND
    result = {"mse": least_squares(cell.seed)} if is_bound else run(cell.options, cell.seed)
    return {"seed": cell.seed, "method": cell.line, **result}


def table(records: Sequence[Record]) -> dict[str, Frame]:
    """Return errors by method, and for how many seeds a method's error is below FedAvg's."""
    by_seed = frame_of(records).pivot(index="seed", columns="method", values="mse")
    fedavg = by_seed.get("FedAvg")
    rows = []
    for name in (name for name in (*METHODS, BOUND) if name in by_seed):
        errors = by_seed[name].dropna()
        compared = fedavg is not None and name not in ("FedAvg", BOUND)
        rows.append(
            {
                "method": name, "mean squared error": errors.mean(), "deviation": errors.std(ddof=0),
                "below FedAvg": f"{(errors < fedavg).sum()} of {len(errors)}" if compared else "",
                "by seed": " ".join(f"{error:.1f}" for error in errors),
            }
        )  # fmt: skip
    formats = dict.fromkeys(("mean squared error", "deviation"), ".1f")
    return {"summary": as_text(frame_of(rows), formats)}


def draw_fits(path: Path, records: Sequence[Record]) -> list[Path]:
    """Draw the cubics of the first seed, a panel for each method that has run."""
    from ..study.figures import panels, save

    by_method = {r["method"]: r for r in records if r["seed"] == 0 and r["method"] in METHODS}
    if not by_method:
        return []
    caption = (
        "004, eq (20), one draw of the data (seed 0): 30, 20 and 50 samples of three clients; noise of "
        f"deviation 5. Cubics in x/{SCALE:g}, RMSprop {RATE:g}, batches of {BATCH}, {EPOCHS} local epochs, "
        f"{ROUNDS} rounds, averages by samples (the paper: 1 epoch, 10 rounds, rate 0.01, its ranges of x "
        "unknown). Thin: each client's cubic before the last averaging; thick: the averaged cubic, with its "
        "mean squared error above; band: three standard deviations predicted by the NPN (scaled by ε = 1)."
    )
    count = len(by_method)
    figure, (row,) = panels(1, count, caption, 3.6 * count, 3.4, sharey=True)
    points = draw(0)
    for axes, name in zip(row, by_method, strict=True):
        _panel(axes, name, by_method[name], points)
    row[0].set_ylabel("y")
    row[0].legend(fontsize=7, frameon=False, loc="lower center")
    return save(figure, path)


def _panel(axes: Axes, name: str, record: Record, points: list[Points]) -> None:
    from ..study.figures import COLOURS

    grid = GRID.numpy()
    for index, client in enumerate(points):
        axes.plot(
            client.x, client.y, "x", color=COLOURS[index], markersize=4, alpha=0.6,
            label=f"client {index + 1}",
        )  # fmt: skip
        axes.plot(grid, record["own"][index], color=COLOURS[index], linewidth=1)
    shared = np.array(record["shared"])
    if record["spread"] is not None:
        band = 3 * np.array(record["spread"])
        axes.fill_between(grid, shared - band, shared + band, color="black", alpha=0.1, linewidth=0)
    axes.plot(grid, shared, color="black", linewidth=2.2, label="averaged")
    axes.plot(grid, truth(GRID).numpy(), color="black", linewidth=1, linestyle=":", label="truth")
    axes.set(title=f"{name}: {record['mse']:.1f}", xlabel="x", ylim=(-110, 40))
