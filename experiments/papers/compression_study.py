"""How much accuracy do we lose? `gossamer paper compression`: live swarms beside their uncompressed twins.

The deck's question, answered by running both. Eight live peers with digits of their own share their hidden
cells, in every mode, with every compressor; in async mode also with pushes skipped while a model has
hardly moved (dynamic averaging). Twins differ in nothing but that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ..cli import console
from ..config.tables import Config, ConfigError, Data, Gossip, Model, Network, TaskEntry, Training
from ..results import RecordFile, Results, read_records, write_csv
from ..watch import broker_for, run_live

TWIN = "uncompressed"
COMPRESSORS = (
    "float16", "int8", "int4", "top-k:0.1", "top-k:0.05+int8", "mask:0.25", "subsample:0.5", "low-rank:4",
)  # fmt: skip
BOUNDS = (0.05, 0.1, 0.2)


@dataclass(frozen=True)
class Run:
    """One swarm of the study."""

    mode: str
    what: str
    gossip: Gossip

    @property
    def name(self) -> str:
        """Mode and compressor, as one word for a folder."""
        return f"{self.mode}-{self.what}".replace(" ", "-").replace(":", "-").replace("+", "-")


@dataclass(frozen=True)
class Finding:
    """How a swarm did, beside its twin."""

    mode: str
    what: str
    accuracy: float
    lost: float
    """The twin's accuracy less this one's."""
    bytes: int
    ratio: float
    """The twin's bytes, in this one's."""
    distortion: float
    worst: float
    skipped: int


def runs(quick: bool) -> list[Run]:
    """The swarms: in each mode the uncompressed twin first."""
    names = {
        "rounds": ("int8",) if quick else COMPRESSORS,
        "server": ("int8", "top-k:0.05+int8"),
        "async": () if quick else ("int8", "top-k:0.05+int8"),
    }
    found = []
    for mode, compressors in names.items():
        common = {"mode": mode, "per_process": 4, "checkpoint": False}
        found.append(Run(mode, TWIN, Gossip.model_validate(common)))
        found += [
            Run(mode, name, Gossip.model_validate({**common, "compress": name}))
            for name in compressors
        ]
    bounds = BOUNDS[-1:] if quick else BOUNDS
    common = {"mode": "async", "per_process": 4, "checkpoint": False}
    return found + [
        Run("async", f"drift {bound:g}", Gossip.model_validate({**common, "drift": bound}))
        for bound in bounds
    ]


def study_config(run: Run, rounds: int) -> Config:
    """Eight peers, 13,000 shared values; what an output cell means is every peer's own business."""
    return Config(
        name=f"compression-{run.name}",
        peers=8,
        rounds=rounds,
        test_every=rounds,
        data=Data(set="digits", samples=50),
        tasks=[TaskEntry(kind="swaps")],
        network=Network(layout="64=200=10", activation="tanh", output="sigmoid"),
        models=[Model(name="global", layout="64-200-0")],
        training=Training(stretch=80, rate=0.03),
        gossip=run.gossip,
    )


def paper_compression(
    results: Results, *, quick: bool = False, only: Sequence[str] | None = None
) -> None:
    """Run the swarms one after the other, print a table, draw accuracy against bytes."""
    every = runs(quick)
    known = list(dict.fromkeys(run.what for run in every))
    if unknown := [what for what in only or () if what not in known]:
        raise ConfigError(
            f"compression has no line {unknown[0]!r}; lines are {', '.join(map(repr, known))}"
        )
    wanted = [run for run in every if not only or run.what in (TWIN, *only)]
    twins: dict[str, tuple[float, int]] = {}
    with results.begun() as out:
        with broker_for(None) as broker, RecordFile(out / "runs.jsonl") as file:
            for run in wanted:
                console.err.print(f"{run.mode}: {run.what} …")
                config = study_config(run, 15 if quick else 40)
                outcome = run_live(config, out / run.name, broker, quiet=True)
                accuracy, sent = float(np.mean(list(outcome.accuracy.values()))), outcome.bytes
                twin, plain = twins.setdefault(run.mode, (accuracy, sent))
                traffic = outcome.traffic
                finding = Finding(
                    run.mode, run.what, accuracy, twin - accuracy, sent, plain / sent,
                    traffic.mean_distortion, traffic.worst, traffic.skipped,
                )  # fmt: skip
                file.write(asdict(finding))
        console.wrote([out / "runs.jsonl", *report(out)])


def report(out: Path) -> list[Path]:
    """The table and the picture of a study that was run, from its file."""
    findings = [Finding(**record) for record in read_records(out / "runs.jsonl")]
    header = [
        "mode",
        "compressor",
        "accuracy",
        "lost",
        "MB sent",
        "times fewer",
        "distortion",
        "worst",
    ]
    header.append("skipped")
    rows = [
        (
            f.mode, f.what, f"{f.accuracy:.3f}", f"{f.lost:+.3f}", f"{f.bytes / 1e6:.2f}",
            f"{f.ratio:.2f}", f"{f.distortion:.4f}", f"{f.worst:.3f}", f.skipped,
        )
        for f in findings
    ]  # fmt: skip
    config = json.loads((out / "rounds-uncompressed" / "config.json").read_text("utf-8"))
    title = f"8 live peers, 13,000 shared values, {config['rounds']} rounds of training"
    console.table(title, header, rows)
    table = out / "summary.csv"
    write_csv(table, header, rows)
    return [table, *draw(out / "figure", findings)]


def draw(path: Path, findings: Sequence[Finding]) -> list[Path]:
    """Accuracy against bytes, one colour per mode; the filled marks are the uncompressed twins."""
    from ..study.figures import COLOURS, MARKERS, canvas, place_legend, save

    caption = "mean accuracy of 8 live peers, each on its own task; filled: the uncompressed twin"
    figure, axes = canvas(caption, width=9.0, height=5.4)
    for index, mode in enumerate(dict.fromkeys(f.mode for f in findings)):
        mine = [f for f in findings if f.mode == mode]
        for finding in mine:
            plain = finding.what == TWIN
            axes.plot(
                finding.bytes / 1e6, finding.accuracy, MARKERS[index], color=COLOURS[index],
                markersize=9 if plain else 6, fillstyle="full" if plain else "none",
                label=mode if plain else None,
            )  # fmt: skip
            axes.annotate(
                finding.what, (finding.bytes / 1e6, finding.accuracy),
                fontsize=7, xytext=(5, 4), textcoords="offset points",
            )  # fmt: skip
    axes.set(title="What compression costs", xlabel="MB sent by all peers", ylabel="accuracy")
    axes.set_xscale("log")
    place_legend(axes, "mode")
    return save(figure, path)
