"""Peers of widths 40, 60 and 100 in one partial model, against each of them alone.

The swarm is live: a process for each peer, averaging at the common width. Alone, the same peers train on
the same samples in the same order, in the arena, and share nothing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..config.tables import Config, Data, Gossip, Model, Network, Size, Training
from ..results import RecordFile, read_records, write_csv
from ..simulation import Simulation

WIDTHS = (40, 60, 100)
EACH = 2
"""Peers of every width."""


def widths_config(rounds: int = 60, seed: int = 0, *, alone: bool = False) -> Config:
    """Two peers of each width, 40 samples each."""
    groups = {width: [EACH * place + k for k in range(EACH)] for place, width in enumerate(WIDTHS)}
    widest = max(WIDTHS)
    models = [
        Model(
            name="global",
            layout=f"64-{width}-10",
            peers=peers,
            matching="fuse",
            width=f"64-{widest}-10",
        )
        for width, peers in groups.items()
    ]
    sizes = [Size(layout=f"64={width}=10", peers=peers) for width, peers in groups.items()]
    return Config(
        name="widths",
        seed=seed,
        peers=EACH * len(WIDTHS),
        rounds=rounds,
        test_every=2,
        data=Data(set="digits", samples=40, partition="iid"),
        network=Network(layout=f"64={widest}=10", activation="relu", output="none", sizes=sizes),
        models=[] if alone else models,
        training=Training(stretch=40, rate=0.1, loss="cross-entropy", reduction="mean"),
        gossip=Gossip(checkpoint=False),
    )


def width_of(peer: str) -> int:
    """The width of a peer, by its number."""
    return WIDTHS[int(peer) // EACH]


def run_alone(config: Config, metrics: Path) -> None:
    """Train every peer by itself."""
    simulation = Simulation.of(config)
    with RecordFile(metrics) as file:
        for round in simulation.rounds():
            for member, test in zip(simulation.members, round.tests, strict=False):
                file.write({"peer": member.name, "round": round.index, "accuracy": test.accuracy})


def curves(metrics: Path) -> dict[int, dict[int, float]]:
    """Width → round → mean accuracy of its peers."""
    found: dict[int, dict[int, dict[str, float]]] = {}
    for record in read_records(metrics):
        if "accuracy" in record:  # settled values come last, in the last round
            by_round = found.setdefault(width_of(record["peer"]), {})
            by_round.setdefault(record["round"], {})[record["peer"]] = record["accuracy"]
    return {
        width: {at: float(np.mean(list(one.values()))) for at, one in sorted(by_round.items())}
        for width, by_round in sorted(found.items())
    }


def report(out: Path) -> list[Path]:
    """The table and the picture, from the metrics of both."""
    from ..study.figures import COLOURS, canvas, place_legend, save

    together, alone = (curves(out / each / "metrics.jsonl") for each in ("fused", "alone"))
    table = out / "summary.csv"
    rows = [
        [width, f"{_last(alone[width]):.3f}", f"{_last(together[width]):.3f}"] for width in together
    ]
    write_csv(table, ["width", "alone", "together"], rows)
    figure, axes = canvas(
        f"{EACH} live peers of every width, 40 of the built-in digits each, 64=WIDTH=10; mean over the peers "
        "of a width. solid: together, averaged at the common width of 100; dashed: each alone."
    )
    for colour, width in zip(COLOURS, together, strict=False):
        for line, style in ((together[width], "-"), (alone[width], "--")):
            label = f"{width} cells" if style == "-" else None
            axes.plot(
                list(line), list(line.values()), style, color=colour, linewidth=1.8, label=label
            )
    axes.set(
        title="Peers of three widths share one partial model", xlabel="round", ylabel="accuracy"
    )
    place_legend(axes)
    return [table, *save(figure, out / "figure")]


def _last(line: dict[int, float]) -> float:
    return line[max(line)]
