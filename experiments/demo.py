"""The demo: sixteen live peers, sixteen tasks, three ways to live together."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .cli import console
from .config.tables import Config, Data, Gossip, Model, Network, TaskEntry, Training
from .watch import broker_for, curves, run_live

ALONE, ALL, PARTIAL = "alone", "everything averaged", "partial models"

# Every peer swaps a pair of labels of its own, so what an output cell means is the peer's own
# business; what the hidden cells see is everybody's.
SCHEMES: dict[str, list[Model]] = {
    ALONE: [],
    ALL: [Model(name="global", layout="64-30-10")],
    PARTIAL: [Model(name="global", layout="64-30-0")],
}


def demo_config(scheme: str, seed: int = 0) -> Config:
    """One of the demo's three swarms; they differ in their partial models alone."""
    return Config(
        name=f"demo-{scheme.replace(' ', '-')}",
        seed=seed,
        peers=16,
        rounds=80,
        test_every=4,
        data=Data(set="digits", samples=50),
        tasks=[TaskEntry(kind="swaps")],
        network=Network(layout="64=30=10", activation="sigmoid", output="sigmoid"),
        models=SCHEMES[scheme],
        training=Training(local_samples=80, rate=0.3, loss="squared", reduction="sum"),
        gossip=Gossip(per_process=8),
    )


def run_demo(out: Path, broker: str | None = None) -> None:
    """Run the three swarms on one broker, print their accuracy and draw it."""
    rows = []
    with broker_for(broker) as address:
        for scheme in SCHEMES:
            outcome = run_live(demo_config(scheme), _folder(out, scheme), address)
            values = list(outcome.accuracy.values())
            apart = max(outcome.consensus.values(), default=float("nan"))
            rows.append(
                (
                    scheme,
                    f"{np.mean(values):.3f}",
                    f"{min(values):.3f}",
                    f"{max(values):.3f}",
                    "" if np.isnan(apart) else f"{apart:.0e}",
                )
            )
    console.table(
        "16 live peers, 50 digits and a label swap of its own each; accuracy on its own task",
        ["", "mean", "worst peer", "best peer", "distance from the mean"],
        rows,
    )
    console.wrote(draw_demo(out))


def draw_demo(out: Path) -> list[Path]:
    """Draw the demo's picture from the metrics of its three swarms."""
    from .study.figures import COLOURS, band, canvas, place_legend, save

    figure, axes = canvas(
        "line: mean over 16 peers, band: worst to best peer, each on its own task"
    )
    for colour, scheme in zip(COLOURS, SCHEMES, strict=False):
        band(axes, curves(_folder(out, scheme) / "metrics.jsonl"), colour, scheme)
    axes.set(title="Sixteen peers, sixteen tasks", xlabel="round", ylabel="accuracy", ylim=(0, 1))
    place_legend(axes)
    return save(figure, out / "demo")


def _folder(out: Path, scheme: str) -> Path:
    return out / scheme.replace(" ", "-")
