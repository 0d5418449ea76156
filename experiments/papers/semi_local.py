"""003, V.3.d and V.3.e: semi-local models, with and without their dependency (figures 20 and 21)."""

from __future__ import annotations

from collections.abc import Sequence

from ..config.tables import Config, Data, Model, TaskEntry
from ..study.study import Cell, Study
from .schemes import level, network, per_class, training


def _groups(inputs: int, depends: Sequence[str]) -> list[Model]:
    """V.3.d's 80 + 20: a global model, and one for every group of peers with the same task."""
    return [
        *level(inputs, 80),
        Model(name="{task}", layout="0-50-20-0", depends=list(depends)),
    ]


def _pairs(inputs: int, depends: Sequence[str]) -> list[Model]:
    """V.3.e's 70 + 30 or 15: peers 0 and 1 are alike, 2 and 3 half alike; the rest is local."""
    return [
        Model(name="global", layout=f"{inputs}-220-70-10"),
        Model(name="alike", layout="0-80-30-0", peers=[0, 1], depends=list(depends)),
        Model(name="half-alike", layout="0-40-15-0", peers=[2, 3], depends=list(depends)),
    ]


def _cells(quick: bool, seed: int) -> list[Cell]:
    inputs = 64 if quick else 784
    swarm = Config(
        name="semi-local",
        seed=seed,
        peers=12,
        rounds=20 if quick else 100,
        data=_data(quick, 110, 200),
        tasks=[TaskEntry(kind="symmetric", last=3)],
        network=network(quick),
    )
    schemes = {
        "80 + 20 per class, no dependency": _groups(inputs, []),
        "80 + 20 per class, dependency": _groups(inputs, ["global"]),
    }
    return _grid(quick, swarm, schemes, (25, 50, 100) if quick else (25, 50, 75, 100, 150))


def _cells_with_local(quick: bool, seed: int) -> list[Cell]:
    inputs = 64 if quick else 784
    swarm = Config(
        name="semi-local-and-local",
        seed=seed,
        peers=4,
        rounds=25 if quick else 50,
        data=_data(quick, 350, 1000),
        tasks=[
            TaskEntry(kind="swap", labels=(8, 9), peers=[2, 3]),
            TaskEntry(kind="swap", labels=(6, 7), peers=[3]),
        ],
        network=network(quick),
    )
    schemes = {
        "70 + 30 / 15, no dependency": _pairs(inputs, []),
        "70 + 30 / 15, dependency": _pairs(inputs, ["global"]),
    }
    return _grid(quick, swarm, schemes, (50, 100, 200) if quick else (100, 200, 400, 800))


def _grid(
    quick: bool, swarm: Config, schemes: dict[str, list[Model]], sizes: Sequence[int]
) -> list[Cell]:
    """The same swarm under the four schemes that both experiments compare with, and its own."""
    inputs = 64 if quick else 784
    every = {
        "no averaging": [],
        "100": level(inputs, 100),
        "100 per class": per_class(inputs),
        "80": level(inputs, 80),
        **schemes,
    }
    return [
        Cell(
            scheme,
            size,
            swarm.model_copy(update={"models": models, "training": training(quick, size)}),
        )
        for size in sizes
        for scheme, models in every.items()
    ]


def _data(quick: bool, digits: int, mnist: int) -> Data:
    if quick:
        return Data(set="digits", samples=digits, test=360)
    return Data(set="mnist", samples=mnist, test=1000)


def _caption(quick: bool) -> str:
    source, rounds = ("110 of scikit-learn's digits", 20) if quick else ("200 MNIST digits", 100)
    return (
        f"12 peers with {source} each, all six permutations of the last three labels; "
        f"{rounds} averagings{'; tanh cells' if quick else ''}."
    )


def _caption_with_local(quick: bool) -> str:
    source = "350 of scikit-learn's digits" if quick else "1000 MNIST digits"
    return (
        f"4 peers with {source} each; 8 and 9 swapped for peers 2 and 3, 6 and 7 for peer 3 as well; "
        f"{'25 averagings; tanh cells' if quick else '50 averagings'}."
    )


SEMI_LOCAL = Study(
    name="semi-local",
    title="Semi-local models: one model per group of like peers",
    section="003, V.3.d, figure 20",
    x_label="mini-batch size",
    legend="averaging scheme",
    runs=20,
    cells=_cells,
    caption=_caption,
)

SEMI_LOCAL_AND_LOCAL = Study(
    name="semi-local-and-local",
    title="Global, semi-local and local models together",
    section="003, V.3.e, figure 21",
    x_label="mini-batch size",
    legend="averaging scheme",
    runs=20,
    cells=_cells_with_local,
    caption=_caption_with_local,
)
