"""The experiments of FedNP (paper 004): `gossamer paper fednp-toy`, `fednp-moments` and `fednp-cifar`.

fednp-toy: eq (20), three clients fit cubics to three ranges of a parabola.

    y = −x² + 2x + 5 + noise,   noise ~ N(0, 5²)

A client's own cubic fits well where its samples are, and badly elsewhere; the mean of the clients' cubics
fits badly everywhere.

fednp-moments: how exact, and how fast, are the ways to compute the moments of a tilted cavity?

fednp-cifar: FedNP and other methods with a small convolutional network, by the number of clients.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ...models import SgdLearner, SlicedNetwork, Start, seeded_rng
from ...models.fednp import FedNPLearner, FedNPOptions, tilted_moments
from ..arena import Arena
from ..config.tables import Data, Network, Training
from ..federated import comparison
from ..results import Record
from ..study import EachCell, Frame, Job, Study, StudyCell, as_text, frame_of
from . import StudyEntry
from .partial_models import figure_study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RANGES = ((-8.0, -3.0), (-3.0, 2.0), (2.0, 8.0))
"""The range of x of each client's samples."""
SIZES = (30, 20, 50)
"""The number of each client's samples."""
NOISE = 5.0
"""The standard deviation of the noise."""
POWERS = 3
"""The highest power of x in the functions that clients fit: cubics."""
SCALE = 4.0
"""x is divided by this number, so that one learning rate suits all powers."""
BATCH = 10
EPOCHS = 5
ROUNDS = 20
RATE = 0.3
OPTIONS = FedNPOptions(strength=10.0, spread=1.0, auxiliary_rate=0.2, dimensions=4, hidden=8)
"""FedNP's options, tuned on seeds that the study does not use."""


Samples = tuple[Tensor, Tensor]
"""The x and the y of one client's samples, or of all clients'."""


def features(x: Tensor) -> Tensor:
    """Return the powers 1 to 3 of x / `SCALE`."""
    return (x[:, None] / SCALE) ** torch.arange(1, POWERS + 1)


GRID = torch.linspace(RANGES[0][0], RANGES[-1][1], 161)
"""The values of x at which cubics are drawn."""


def parabola(x: Tensor) -> Tensor:
    """Return y without the noise."""
    return -(x**2) + 2 * x + 5


def draw_samples(seed: int) -> list[Samples]:
    """Draw the samples of the three clients."""
    clients = []
    for index, ((low, high), size) in enumerate(zip(RANGES, SIZES, strict=True)):
        random = seeded_rng(seed, "parabola", index)
        x = torch.from_numpy(random.uniform(low, high, size)).float()
        noise = torch.from_numpy(random.normal(0, NOISE, size)).float()
        clients.append((x, parabola(x) + noise))
    return clients


def pool_samples(clients: list[Samples]) -> Samples:
    """Return the samples of all clients together."""
    x, y = (torch.cat(values) for values in zip(*clients, strict=True))
    return x, y


def cubic_learner(peer: str, own: Samples, all_samples: Samples, seed: int) -> SgdLearner:
    """Return a learner that fits a cubic by RMSprop on squared errors, in small batches, as in the paper.

    It is tested on the samples of all clients, as in the paper's table 4.
    """
    network = SlicedNetwork(
        nn.Sequential(nn.Linear(POWERS, 1)), {"global": f"{POWERS}-1"},
        peer=peer, seed=seed, start=Start(gain=0.1),
    )  # fmt: skip
    return SgdLearner(
        network, *((features(x), y) for x, y in (own, all_samples)),
        local_samples=len(own[1]), batch=BATCH, loss=lambda out, y: (out[:, 0] - y).square(),
        optimizer=lambda parameters: torch.optim.RMSprop(parameters, lr=RATE),
        seed=int(seeded_rng(seed, "order", peer).integers(2**31)),
    )  # fmt: skip


def run(options: FedNPOptions | None, seed: int) -> Record:
    """Run FedAvg if `options` is None, otherwise FedNP; clients are weighted by their numbers of samples.

    Returns the mean squared error over all samples after each round (`by_round`) and at the end (`mse`), the
    averaged cubic at `GRID` (`shared`), each client's cubic before the last averaging (`own`), and the
    standard deviation of the cubic that FedNP predicts (`spread`).
    """
    clients = draw_samples(seed)
    all_samples = pool_samples(clients)
    sizes = [len(y) for _, y in clients]
    learners: list[Any] = [
        cubic_learner(f"client-{index}", own, all_samples, seed)
        for index, own in enumerate(clients)
    ]
    if options is not None:
        for index, inner in enumerate(learners):
            learners[index] = FedNPLearner(inner, options, counting_peer=index == 0, seed=seed)
            learners[index].set_weight(sizes[index])
    arena = Arena(learners, every=EPOCHS, weights=sizes, threads=1)
    errors, own = [], []
    grid_features = features(GRID)
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
    """Return the mean squared error of the best cubic for all samples, a lower bound for all methods."""
    x, y = pool_samples(draw_samples(seed))
    design, targets = torch.cat([features(x), torch.ones(len(x), 1)], dim=1).double(), y.double()
    coefficients = torch.linalg.lstsq(design, targets[:, None]).solution
    return float((design @ coefficients - targets[:, None]).square().mean())


# --- the study --------------------------------------------------------------------------------------

# FedNP's options by method; None for FedAvg.
METHODS: dict[str, FedNPOptions | None] = {
    "FedAvg": None,
    "FedNP": OPTIONS,
    "FedNP, z frozen": OPTIONS.model_copy(update={"freeze_z": True}),
}
BOUND = "pooled least squares"
"""The name of the lower bound in tables."""


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
        is_compared = fedavg is not None and name not in ("FedAvg", BOUND)
        rows.append(
            {
                "method": name, "mean squared error": errors.mean(), "deviation": errors.std(ddof=0),
                "below FedAvg": f"{(errors < fedavg).sum()} of {len(errors)}" if is_compared else "",
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
        "004, eq (20), for one draw of the data (seed 0). Three clients have 30, 20 and 50 samples, with "
        f"noise of standard deviation 5. They fit cubics in x/{SCALE:g} by RMSprop with rate {RATE:g}, in "
        f"batches of {BATCH}, for {EPOCHS} local epochs in each of {ROUNDS} rounds, and average by samples. "
        "(The paper has 1 epoch, 10 rounds and rate 0.01, and does not give its ranges of x.) Thin lines are "
        "each client's cubic before the last averaging; the thick line is the averaged cubic, with its mean "
        "squared error in the title; the band is three standard deviations that the NPN predicts (for ε = 1)."
    )
    count = len(by_method)
    figure, (row,) = panels(1, count, caption, 3.6 * count, 3.4, sharey=True)
    clients = draw_samples(0)
    for axes, name in zip(row, by_method, strict=True):
        _draw_panel(axes, name, by_method[name], clients)
    row[0].set_ylabel("y")
    row[0].legend(fontsize=7, frameon=False, loc="lower center")
    return save(figure, path)


def _draw_panel(axes: Axes, name: str, record: Record, clients: list[Samples]) -> None:
    """Draw the samples of all clients and the cubics of one method."""
    from ..study.figures import COLOURS

    grid = GRID.numpy()
    for index, (x, y) in enumerate(clients):
        axes.plot(
            x, y, "x", color=COLOURS[index], markersize=4, alpha=0.6,
            label=f"client {index + 1}",
        )  # fmt: skip
        axes.plot(grid, record["own"][index], color=COLOURS[index], linewidth=1)
    shared = np.array(record["shared"])
    if record["spread"] is not None:
        band = 3 * np.array(record["spread"])
        axes.fill_between(grid, shared - band, shared + band, color="black", alpha=0.1, linewidth=0)
    axes.plot(grid, shared, color="black", linewidth=2.2, label="averaged")
    axes.plot(
        grid, parabola(GRID).numpy(), color="black", linewidth=1, linestyle=":", label="truth"
    )
    axes.set(title=f"{name}: {record['mse']:.1f}", xlabel="x", ylim=(-110, 40))


# --- how the moments of a tilted cavity are computed (table 6) ----------------------------------------

REFERENCE_NODES = 20_001
"""Nodes of the quadrature whose moments count as exact."""
CAVITIES = 200
"""Cavities whose moments are computed in one update."""
GRIDS = (100, 1000, 10_000)
"""Numbers of equidistant nodes, those of the paper's quadratures."""


@dataclass(frozen=True)
class MomentsCell(StudyCell):
    """One way to compute moments: Gauss–Hermite `quadrature` or a closed form; a grid if `moments` is ""."""

    moments: str
    nodes: int
    seed: int


def grid_moments(mean: Tensor, variance: Tensor, f: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Return the moments that `tilted_moments` does, by equidistant nodes within 8 standard deviations."""
    points = torch.linspace(-8, 8, nodes, dtype=mean.dtype)
    z = mean[:, None] + variance.sqrt()[:, None] * points
    log_weights = -points.square() / 2 + torch.nn.functional.logsigmoid(f[:, None] * z)
    weights = torch.softmax(log_weights, dim=-1)
    tilted_mean = (weights * z).sum(-1)
    return tilted_mean, (weights * (z - tilted_mean[:, None]).square()).sum(-1)


def run_moments_cell(cell: MomentsCell, job: Job) -> Record:
    """Compute the moments of random cavities; return the largest errors, and the processor time of an update.

    mse: the error of FedNP in the toy experiment with these moments; a grid cannot be used there.
    """
    rng = seeded_rng(cell.seed, "cavities")
    mean = torch.from_numpy(rng.uniform(-3, 3, CAVITIES))
    variance = torch.from_numpy(rng.uniform(0.1, 4, CAVITIES))
    f = torch.from_numpy(rng.uniform(-2, 2, CAVITIES))

    def update() -> tuple[Tensor, Tensor]:
        if not cell.moments:
            return grid_moments(mean, variance, f, cell.nodes)
        return tilted_moments(mean, variance, f, cell.moments, cell.nodes)  # type: ignore[arg-type]

    exact, computed = grid_moments(mean, variance, f, REFERENCE_NODES), update()
    errors = [float((a - b).abs().max()) for a, b in zip(computed, exact, strict=True)]
    began, repeats = time.process_time(), 20
    for _ in range(repeats):
        update()
    seconds = (time.process_time() - began) / repeats
    options = OPTIONS.model_copy(update={"moments": cell.moments, "nodes": cell.nodes})
    return {
        "line": cell.line, "seed": cell.seed, "milliseconds": 1000 * seconds, "mean_error": errors[0],
        "variance_error": errors[1], "mse": run(options, cell.seed)["mse"] if cell.moments else None,
    }  # fmt: skip


def moments(entry: StudyEntry, quick: bool, seeds: range) -> Study[MomentsCell]:
    """Return the study of moments: two closed forms, Gauss–Hermite, and grids of the paper's sizes."""
    ways = {
        "closed form": ("closed", 20), "probit": ("probit", 20), "Gauss–Hermite 20": ("quadrature", 20),
        "Gauss–Hermite 100": ("quadrature", 100), **{f"grid {nodes}": ("", nodes) for nodes in GRIDS},
    }  # fmt: skip
    return Study(
        entry.name, [MomentsCell(name, *way, seed) for seed in seeds for name, way in ways.items()],
        EachCell(run_moments_cell), moments_table,
        latest=lambda record: f"{record['line']}: {record['milliseconds']:.2f} ms",
    )  # fmt: skip


def moments_table(records: Sequence[Record]) -> dict[str, Frame]:
    """Return errors, time and the toy's error by way."""
    columns = ("milliseconds", "mean_error", "variance_error", "mse")
    rows = [{"line": r["line"], **{name: r[name] for name in columns}} for r in records]
    frame = frame_of(rows, ordered=["line"]).astype(dict.fromkeys(columns, float))
    means = frame.groupby("line", observed=True).mean().reset_index().astype({"line": str})
    formats = {"milliseconds": ".3f", "mean_error": ".1e", "variance_error": ".1e", "mse": ".1f"}
    titles = {
        "line": "moments by", "milliseconds": "ms per update", "mean_error": "largest error of a mean",
        "variance_error": "of a variance", "mse": "mean squared error of the toy",
    }  # fmt: skip
    return {"summary": as_text(means, formats).rename(columns=titles)}


# --- a convolutional network by the number of clients (tables 1 and 5) --------------------------------

FEDERATED_METHODS = {
    "FedAvg": {"method": "fedavg"}, "FedProx": {"method": "fedprox", "mu": 0.01},
    "MOON": {"method": "moon", "mu": 1.0}, "SCAFFOLD": {"method": "scaffold"},
    "FedDyn": {"method": "feddyn", "alpha": 0.1},
    "FedNP": {"method": "fednp", "features": "last", "strength": 0.01},
}  # fmt: skip
"""The methods, with the weights that the paper found best for FedProx, MOON and FedNP."""


@dataclass(frozen=True)
class ClientsCell(StudyCell):
    """One run of a method; `line` is its name."""

    config: comparison.Comparison
    seed: int


def run_clients_cell(cell: ClientsCell, job: Job) -> Record:
    """Run one method with one number of clients; the record has the accuracy after the last round."""
    result = comparison.run(comparison.Cell(cell.line, cell.config, cell.seed))
    end = result["curve"][-1]
    return {
        "line": cell.line, "settings": {"x": cell.config.peers}, "seed": cell.seed,
        "accuracy": float(np.mean(end["accuracy"])), "seconds": end["seconds"],
    }  # fmt: skip


def by_clients(entry: StudyEntry, quick: bool, seeds: range) -> Study[ClientsCell]:
    """Return the study of methods by the number of clients, which divide the same samples among them."""
    clients, total, rounds = ((3, 6), 600, 3) if quick else ((10, 50, 100), 3000, 20)
    network = (
        Network(layout="64=30=10", activation="relu", output="none")
        if quick
        else Network.model_validate(
            {"name": "small-cnn", "options": {"widths": [8, 16], "hidden": 64}}
        )
    )

    def config(count: int) -> comparison.Comparison:
        return comparison.Comparison(
            name=entry.name, peers=count, rounds=rounds, test_every=rounds, methods=FEDERATED_METHODS,
            data=Data(
                set="digits" if quick else "cifar10", total=total, partition="dirichlet", alpha=0.5,
                minimum=2, test=None if quick else 1000, tested="common",
            ),
            network=network, training=Training(epochs=1, batch=20, rate=0.1),
        )  # fmt: skip

    configs = [config(count) for count in clients]
    cells = [
        ClientsCell(name, config, seed)
        for seed in seeds
        for config in configs
        for name in FEDERATED_METHODS
    ]
    caption = (
        f"{comparison.describe(configs[0])} {rounds} rounds. All numbers of clients divide the same samples. "
        "(The paper has CIFAR-100, ResNet18, 10 epochs and 100 rounds.)"
    )
    return figure_study(
        entry,
        cells,
        x_label="clients",
        legend="method",
        caption=caption,
        run=EachCell(run_clients_cell),
    )
