"""How much accuracy do we lose? `gossamer paper compression`: live swarms beside their uncompressed twins.

The deck's question, answered by running both. Eight live peers with digits of their own share their hidden
cells, in every mode, with every compressor; in async mode also with pushes skipped while a model has
hardly moved (dynamic averaging). Twins differ in nothing but that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..config.tables import Config, Data, Gossip, Model, Network, TaskEntry, Training
from ..live.run import broker_for, run_live
from ..results import Record
from ..study import EachCell, Frame, Job, Study, StudyCell, as_text, frame_of
from . import Paper

TWIN = "uncompressed"
COMPRESSORS = (
    "float16", "int8", "int4", "top-k:0.1", "top-k:0.05+int8", "mask:0.25", "subsample:0.5", "low-rank:4",
)  # fmt: skip
BOUNDS = (0.05, 0.1, 0.2)


@dataclass(frozen=True)
class Cell(StudyCell):
    """One swarm: a compressor or a bound on drift, and all other settings of its gossip."""

    gossip: Gossip
    rounds: int

    @property
    def name(self) -> str:
        """Mode and compressor, as one word for a folder."""
        name = f"{self.gossip.mode}-{self.line}"
        return name.replace(" ", "-").replace(":", "-").replace("+", "-")


def compression(paper: Paper, quick: bool, seeds: range) -> Study[Cell]:
    """Return the study: in each mode the uncompressed twin first."""
    rounds = 15 if quick else 40
    names = {
        "rounds": ("int8",) if quick else COMPRESSORS,
        "server": ("int8", "top-k:0.05+int8"),
        "async": () if quick else ("int8", "top-k:0.05+int8"),
    }

    def cell(mode: str, line: str, **changed: object) -> Cell:
        common = {"mode": mode, "per_process": 4, "checkpoint": False}
        return Cell(line, Gossip.model_validate({**common, **changed}), rounds)

    cells = []
    for mode, compressors in names.items():
        cells.append(cell(mode, TWIN))
        cells += [cell(mode, name, compress=name) for name in compressors]
    bounds = BOUNDS[-1:] if quick else BOUNDS
    cells += [cell("async", f"drift {bound:g}", drift=bound) for bound in bounds]
    title = f"8 live peers, 13,000 shared values, {rounds} rounds of training"
    return Study(
        paper.name, cells, EachCell(run_cell), table, draw,
        titles={"summary": title},
        latest=lambda record: f"{record['mode']}, {record['what']}: {record['accuracy']:.3f}",
        always={TWIN}, live=True,
    )  # fmt: skip


def study_config(cell: Cell) -> Config:
    """Eight peers, 13,000 shared values; what an output cell means is every peer's own business."""
    return Config(
        name=f"compression-{cell.name}", peers=8, rounds=cell.rounds, test_every=cell.rounds,
        data=Data(set="digits", samples=50),
        tasks=[TaskEntry(kind="swaps")],
        network=Network(layout="64=200=10", activation="tanh", output="sigmoid"),
        models=[Model(name="global", layout="64-200-0")],
        training=Training(local_samples=80, rate=0.03, loss="squared", reduction="sum"),
        gossip=cell.gossip,
    )  # fmt: skip


def run_cell(cell: Cell, job: Job) -> Record:
    """Run a swarm in a folder of its own."""
    with broker_for(None, say=False) as broker:
        outcome = run_live(study_config(cell), job.empty_folder(cell.name), broker, quiet=True)
    traffic = outcome.traffic
    return {
        "mode": cell.gossip.mode, "what": cell.line,
        "accuracy": float(np.mean(list(outcome.accuracy.values()))), "bytes": outcome.bytes,
        "distortion": traffic.mean_distortion, "worst": traffic.worst, "skipped": traffic.skipped,
    }  # fmt: skip


def table(records: Sequence[Record]) -> dict[str, Frame]:
    """Return a row for every swarm, beside its mode's uncompressed twin."""
    frame = frame_of(records)
    twins = frame[frame["what"] == TWIN].set_index("mode")
    columns = {
        "mode": frame["mode"],
        "compressor": frame["what"],
        "accuracy": frame["accuracy"],
        "lost": frame["mode"].map(twins["accuracy"]) - frame["accuracy"],
        "MB sent": frame["bytes"] / 1e6,
        "times fewer": frame["mode"].map(twins["bytes"]) / frame["bytes"],
        **{name: frame[name] for name in ("distortion", "worst", "skipped")},
    }
    formats = {
        "accuracy": ".3f", "lost": "+.3f", "MB sent": ".2f", "times fewer": ".2f", "distortion": ".4f",
        "worst": ".3f",
    }  # fmt: skip
    return {"summary": as_text(frame_of(columns), formats)}


def draw(folder: Path, records: Sequence[Record]) -> list[Path]:
    """Draw accuracy against bytes, one colour per mode; the filled marks are the uncompressed twins."""
    from ..study.figures import COLOURS, MARKERS, canvas, place_legend, save

    caption = "mean accuracy of 8 live peers, each on its own task; filled: the uncompressed twin"
    figure, axes = canvas(caption, width=9.0, height=5.4)
    modes = list(dict.fromkeys(r["mode"] for r in records))
    for record in records:
        index, plain = modes.index(record["mode"]), record["what"] == TWIN
        at = record["bytes"] / 1e6, record["accuracy"]
        axes.plot(
            *at, MARKERS[index], color=COLOURS[index], markersize=9 if plain else 6,
            fillstyle="full" if plain else "none", label=record["mode"] if plain else None,
        )  # fmt: skip
        axes.annotate(record["what"], at, fontsize=7, xytext=(5, 4), textcoords="offset points")
    axes.set(title="What compression costs", xlabel="MB sent by all peers", ylabel="accuracy")
    axes.set_xscale("log")
    place_legend(axes, "mode")
    return save(figure, folder / "figure")
