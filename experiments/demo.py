"""The demo: sixteen peers, sixteen tasks, three ways to live together."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from . import console
from .arena import Round
from .config import Config, Data, Model, Network, TaskEntry, Training
from .figures import COLOURS, canvas, place_legend, save
from .results import RecordFile, read_records, write_json
from .simulate import Simulation

ALONE, ALL, PARTIAL = "alone", "everything averaged", "partial models"

# Every peer swaps a pair of labels of its own, so what an output cell means is the peer's own
# business; what the hidden cells see is everybody's.
SCHEMES: dict[str, list[Model]] = {
    ALONE: [],
    ALL: [Model(name="global", layout="64-60-10")],
    PARTIAL: [Model(name="global", layout="64-54-0")],
}


def demo_config(scheme: str, seed: int = 0) -> Config:
    """One of the demo's three swarms; they differ in their partial models alone."""
    return Config(
        name=f"demo, {scheme}",
        seed=seed,
        peers=16,
        rounds=80,
        test_every=2,
        data=Data(set="digits"),
        tasks=[TaskEntry(kind="swaps")],
        network=Network(layout="64=60=10"),
        models=SCHEMES[scheme],
        training=Training(stretch=80, rate=0.3),
    )


def run_demo(out: Path) -> None:
    """Run the three swarms, print their accuracy and draw it."""
    path = out / "metrics.jsonl"
    with RecordFile(path) as file, console.progress("rounds") as bar:
        for scheme in SCHEMES:
            config = demo_config(scheme)
            task = bar.add_task(f"{scheme:20}", total=config.rounds, latest="")
            simulation = Simulation.of(config)
            write_json(
                out / f"config-{scheme.replace(' ', '-')}.json", config.model_dump(mode="json")
            )
            for round in simulation.rounds():
                bar.update(task, advance=1)
                if round.tests:
                    bar.update(task, latest=f"accuracy {round.accuracy:.3f}")
                    _record(file, scheme, simulation, round)
    rows = []
    for scheme, curve in _curves(path).items():
        last = curve[max(curve)]
        rows.append((scheme, f"{np.mean(last):.3f}", f"{min(last):.3f}", f"{max(last):.3f}"))
    console.table(
        "16 peers, each with 90 digits and a label swap of its own; accuracy on its own task",
        ["", "mean", "worst peer", "best peer"],
        rows,
    )
    console.wrote([path, *draw_demo(out)])


def draw_demo(out: Path) -> list[Path]:
    """Draw the demo's picture from its metrics file."""
    figure, axes = canvas(
        "line: mean over 16 peers, band: worst to best peer, each tested on its own task"
    )
    for index, (scheme, curve) in enumerate(_curves(out / "metrics.jsonl").items()):
        rounds = sorted(curve)
        values = np.array([curve[round] for round in rounds])
        colour = COLOURS[index]
        axes.fill_between(
            rounds, values.min(axis=1), values.max(axis=1), color=colour, alpha=0.13, linewidth=0
        )
        axes.plot(rounds, values.mean(axis=1), color=colour, linewidth=2, label=scheme)
    axes.set(title="Sixteen peers, sixteen tasks", xlabel="round", ylabel="accuracy", ylim=(0, 1))
    place_legend(axes)
    return save(figure, out / "demo")


def _record(file: RecordFile, scheme: str, simulation: Simulation, round: Round) -> None:
    for member, test in zip(simulation.members, round.tests, strict=True):
        file.write(
            {
                "scheme": scheme,
                "round": round.index,
                "peer": member.name,
                "task": member.task,
                "accuracy": test.accuracy,
            }
        )


def _curves(path: Path) -> dict[str, dict[int, list[float]]]:
    """Accuracies of all peers by scheme and round."""
    found: dict[str, dict[int, list[float]]] = {}
    for record in read_records(path):
        found.setdefault(record["scheme"], {}).setdefault(record["round"], []).append(
            record["accuracy"]
        )
    return found
