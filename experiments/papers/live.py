"""Studies of live peers: `gossamer paper newcomers`, `widths` and `compression`.

Newcomers: four peers trained apart join four that gossip, with their cells aligned, and as they are. What
they know counts with their own weight from the moment they join. Without alignment the average mixes cells
that mean different things, and everybody's accuracy falls. How far depends on the network, and this one was
chosen because it shows it: two hidden layers of ReLU. With one hidden layer of 30 sigmoid or tanh cells on
the same digits, the mean of unaligned networks was hardly worse than each of them.

Widths: peers of widths 40, 60 and 100 in one partial model, averaging at the common width, against the same
peers on the same samples in the same order that share nothing, in the arena.

Compression: how much accuracy do we lose? The deck's question, answered by running live swarms beside their
uncompressed twins. Eight peers with digits of their own share their hidden cells, in every mode, with every
compressor; in async mode also with pushes skipped while a model has hardly moved (dynamic averaging). Twins
differ in nothing but that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...models import Learner
from ...peer import BrokerAddress, LocalSwarm, PeerError, RecordFile, SwarmSpec
from ..arena import Arena
from ..arena.simulation import Simulation
from ..build import Swarm, make_learner
from ..config.tables import Config, Data, Gossip, Model, Network, Size, TaskEntry, Training
from ..live.layout import plan
from ..live.run import Outcome, broker_for, run_live
from ..results import Record, cannot_write, make_folder, read_records, replacing
from ..study import EachCell, Frame, Job, Study, StudyCell, as_text, frame_of
from . import Paper


def run_quietly(config: Config, name: str, job: Job) -> Outcome:
    """Run a swarm of live peers on a broker of its own, in a folder of the study."""
    with broker_for(None, say=False) as broker:
        return run_live(config, job.empty_folder(name), broker, quiet=True)


# --- newcomers --------------------------------------------------------------------------------------

FOUNDERS, NEWCOMERS = 4, 4
KINDS = ("align", "none")
_LABELS = {"align": "aligned before they count", "none": "as they are"}
_FOUNDERS_TIMEOUT = 300.0
"""Seconds that a newcomer's process waits for the founders to be far enough."""


@dataclass(frozen=True)
class Sizes:
    """How long everybody trains, in rounds of local training.

    together, apart: founders and newcomers before their processes start.
    before, founders: live founders until the newcomers are called, and in all.
    newcomers: live newcomers.
    """

    together: int = 300
    apart: int = 300
    before: int = 40
    founders: int = 300
    newcomers: int = 50


def newcomers_config(matching: str, sizes: Sizes) -> Config:
    """The swarm of both kinds; newcomers are its last four peers."""
    table = {"name": "global", "layout": "64-40-20-10", "matching": matching}
    return Config(
        name=f"newcomers-{matching}", peers=FOUNDERS + NEWCOMERS, rounds=sizes.founders,
        data=Data(set="digits", samples=100, partition="iid"),
        network=Network(layout="64=40=20=10", activation="relu", output="none"),
        models=[Model.model_validate(table)],
        training=Training(local_samples=20, rate=0.05, loss="cross-entropy", reduction="mean"),
        gossip=Gossip(checkpoint=False),
    )  # fmt: skip


def train_before(out: Path, sizes: Sizes) -> list[Path]:
    """Return files of the networks that everybody starts from, trained if they are not there.

    Founders' are averaged after every round, newcomers' trained on their own data alone, from starts of
    their own.
    """
    make_folder(out)
    config = newcomers_config("none", sizes)
    members = Swarm(config).members()
    files = [out / f"{member.name}.safetensors" for member in members]
    if all(file.exists() for file in files):
        return files
    founders = Arena([member.learner for member in members[:FOUNDERS]])
    for _ in range(sizes.together):
        founders.train()
        founders.average()
    for index, member in enumerate(members[FOUNDERS:], FOUNDERS):
        # The same data and order of samples, but cells that start elsewhere.
        other = Swarm(config.model_copy(update={"seed": 1000 + index})).member(index)
        member.network.flat.copy_(other.network.flat)
        member.learner.train(sizes.apart)
    for member, file in zip(members, files, strict=True):
        with replacing(file) as part:
            member.network.save(part)
    return files


def spec_of(
    config: Config, sizes: Sizes, networks: list[Path], folder: Path, broker: BrokerAddress
) -> SwarmSpec:
    """All eight processes; those of newcomers wait for the file `go` in the folder before they join."""
    spec = plan(config, folder, broker)
    founders = tuple(peer.name for peer in spec.peers[:FOUNDERS])
    peers = []
    for index, (peer, file) in enumerate(zip(spec.peers, networks, strict=True)):
        if index < FOUNDERS:
            peer = replace(peer, settings=peer.settings.updated(expect=founders))
        else:
            late = {"expect": (), "founder": False, "trained": True, "rounds": sizes.newcomers}
            peer = replace(
                peer,
                settings=peer.settings.updated(**late),
                entry=f"{__name__}:make_late_learner",
                arguments={**peer.arguments, "go": str(folder / "go")},
            )
        peers.append(replace(peer, network=str(file)))
    return replace(spec, peers=peers)


def make_late_learner(config: str, index: int, go: str, source: str = "config") -> Learner:
    """The entry point of a newcomer's process: everything is loaded, then it waits to be called."""
    learner = make_learner(config, index, source)
    deadline = time.monotonic() + _FOUNDERS_TIMEOUT
    while not Path(go).exists():
        if time.monotonic() > deadline:
            raise PeerError(
                f"peer {index}: the founders were not ready within {_FOUNDERS_TIMEOUT:g} s"
            )
        time.sleep(0.02)
    return learner


def run_newcomers(
    matching: str, networks: list[Path], folder: Path, broker: BrokerAddress, sizes: Sizes
) -> Path:
    """Run one of the two swarms; its metrics are in the file that is returned."""
    make_folder(folder)
    go = folder / "go"
    go.unlink(missing_ok=True)
    spec = spec_of(newcomers_config(matching, sizes), sizes, networks, folder, broker)
    reached: dict[str, int] = {}
    metrics = folder / "metrics.jsonl"
    with RecordFile(metrics, fresh=True) as file:

        def record(values: Record) -> None:
            file.write(values)
            reached[values["peer"]] = values["round"]
            if min(reached.get(str(index), 0) for index in range(FOUNDERS)) >= sizes.before:
                go.touch()

        asyncio.run(LocalSwarm(spec, on_record=record).run())
    if file.failure is not None:  # the peers went on to their end all the same
        raise cannot_write(metrics, file.failure)
    return metrics


def read_joining(metrics: Path) -> Record:
    """Return what became of the newcomers of one swarm, by its metrics.

    own: each newcomer's accuracy before it joined.
    first: its accuracy when its weight had just been added.
    worst: the lowest that it ever had after that.
    last: the one that it went home with.
    curves: per peer, its rounds since the newcomers came, and its accuracy, while it trained.
    """
    own: dict[str, float] = {}
    came: dict[str, float] = {}
    tested: dict[str, list[Record]] = {}
    for record in read_records(metrics):
        if "own_accuracy" in record:
            own[record["peer"]] = record["own_accuracy"]
            came[record["peer"]] = record["time"]
        elif "accuracy" in record:
            tested.setdefault(record["peer"], []).append(record)
    start = min(came.values(), default=0.0)
    curves: dict[str, list[tuple[float, float]]] = {}
    for peer, records in tested.items():
        before = max((r["round"] for r in records if r["time"] < start), default=0)
        line = [(r["round"] - before, r["accuracy"]) for r in records if r["phase"] == "training"]
        curves[peer] = [(0, own[peer]), *line] if peer in own else line
    seen = {p: [r["accuracy"] for r in tested.get(p, []) if r["counts"]] for p in own}
    seen = {peer: values for peer, values in seen.items() if values}
    return {
        "own": own,
        "first": {peer: values[0] for peer, values in seen.items()},
        "worst": {peer: min(values) for peer, values in seen.items()},
        "last": {peer: values[-1] for peer, values in seen.items()},
        "curves": curves,
    }


def run_newcomer_cell(cell: StudyCell, job: Job) -> Record:
    """Run a swarm; the cell's line is the kind of matching."""
    sizes = Sizes()
    networks = train_before(job.folder / "networks", sizes)
    with broker_for(None, say=False) as broker:
        metrics = run_newcomers(cell.line, networks, job.empty_folder(cell.line), broker, sizes)
    return {"matching": cell.line, **read_joining(metrics)}


def newcomers(paper: Paper, quick: bool, seeds: range) -> Study[StudyCell]:
    """Return the study of newcomers."""
    return Study(
        paper.name, [StudyCell(kind) for kind in KINDS], EachCell(run_newcomer_cell),
        newcomers_table, draw_newcomers,
        titles={"summary": "accuracy of newcomers that were trained apart"},
        latest=lambda record: f"matching {record['matching']}", live=True,
    )  # fmt: skip


def newcomers_table(records: Sequence[Record]) -> dict[str, Frame]:
    """Return a row for every newcomer of every swarm."""
    names = {"own": "own", "first": "first averaged", "worst": "worst", "last": "last"}
    frame = frame_of(
        [
            {"matching": r["matching"], "newcomer": peer}
            | {name: r[part][peer] for part, name in names.items()}
            for r in records
            for peer in sorted(r["first"])
        ]
    )
    frame["first / own"] = frame["first averaged"] / frame["own"]
    formats = dict.fromkeys(names.values(), ".3f") | {"first / own": ".2f"}
    return {"summary": as_text(frame, formats)}


def draw_newcomers(folder: Path, records: Sequence[Record]) -> list[Path]:
    """Draw both swarms in one picture."""
    from ..study.figures import COLOURS, canvas, place_legend, save

    figure, axes = canvas(
        "live processes on the built-in digits, 100 samples each, 64=40=20=10; solid: the four newcomers' "
        "mean, band: worst to best of them; dashed: mean of the four that they join, which were trained "
        "together. The network was chosen to show the fall: with one hidden layer there is hardly any.\n"
        "dotted: the newcomers' own accuracy before they joined (mean), and 0.9 of it."
    )
    own = float(np.mean(list(records[0]["own"].values())))
    for level, style in ((own, ":"), (0.9 * own, (0, (1, 4)))):
        axes.axhline(level, color="#444444", linestyle=style, linewidth=1.2)
    for colour, record in zip(COLOURS, records, strict=False):
        curves = record["curves"]
        late = [line for peer, line in curves.items() if peer in record["own"]]
        end = min(line[-1][0] for line in late)
        grid = np.linspace(0.0, end, 200)
        values = _on(grid, late)
        axes.fill_between(
            grid, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0
        )
        label = _LABELS[record["matching"]]
        axes.plot(grid, values.mean(axis=0), color=colour, linewidth=2, label=label)
        early = [line for peer, line in curves.items() if peer not in record["own"]]
        wide = np.linspace(-0.25 * end, end, 250)  # the others trained for long before
        axes.plot(wide, _on(wide, early).mean(axis=0), color=colour, linewidth=1.2, linestyle="--")
    axes.set(
        title="Four peers trained apart join four that gossip",
        xlabel="rounds since the newcomers joined",
        ylabel="accuracy",
        ylim=(0.2, 1),
    )
    place_legend(axes, "newcomers' cells")
    return save(figure, folder / "figure")


def _on(grid: np.ndarray, lines: list[list[tuple[float, float]]]) -> np.ndarray:
    """Curves of different moments, read off at the same ones."""
    return np.stack([np.interp(grid, *np.array(sorted(line)).T) for line in lines])


# --- widths -----------------------------------------------------------------------------------------

WIDTHS = (40, 60, 100)
EACH = 2
"""Peers of every width."""


def widths_config(rounds: int = 60, *, alone: bool = False) -> Config:
    """Two peers of each width, 40 samples each."""
    groups = {width: [EACH * place + k for k in range(EACH)] for place, width in enumerate(WIDTHS)}
    widest = max(WIDTHS)
    models = [
        Model(
            name="global", layout=f"64-{width}-10", peers=peers, matching="fuse",
            width=f"64-{widest}-10",
        )
        for width, peers in groups.items()
    ]  # fmt: skip
    sizes = [Size(layout=f"64={width}=10", peers=peers) for width, peers in groups.items()]
    return Config(
        name="widths", peers=EACH * len(WIDTHS), rounds=rounds, test_every=2,
        data=Data(set="digits", samples=40, partition="iid"),
        network=Network(layout=f"64={widest}=10", activation="relu", output="none", sizes=sizes),
        models=[] if alone else models,
        training=Training(local_samples=40, rate=0.1, loss="cross-entropy", reduction="mean"),
        gossip=Gossip(checkpoint=False),
    )  # fmt: skip


def width_of(peer: str) -> int:
    """The width of a peer, by its number."""
    return WIDTHS[int(peer) // EACH]


def run_width_cell(cell: StudyCell, job: Job) -> Record:
    """Run the peers alone, in the arena, or together, as live processes."""
    if cell.line == "alone":
        simulation = Simulation.of(widths_config(alone=True))
        tests = [
            (member.name, round.index, test.accuracy)
            for round in simulation.rounds()
            for member, test in zip(simulation.members, round.tests, strict=False)
        ]
    else:
        tests = tests_of(run_quietly(widths_config(), cell.line, job).records)
    return {"how": cell.line, "tests": tests}


def tests_of(metrics: Path) -> list[tuple[str, int, float]]:
    """Return peer, round and accuracy of every test; settled values, which come last, replace others."""
    found = {
        (r["peer"], r["round"]): r["accuracy"] for r in read_records(metrics) if "accuracy" in r
    }
    return [(peer, number, accuracy) for (peer, number), accuracy in found.items()]


def widths(paper: Paper, quick: bool, seeds: range) -> Study[StudyCell]:
    """Return the study of widths."""
    cells = [StudyCell(how) for how in ("alone", "together")]
    return Study(
        paper.name, cells, EachCell(run_width_cell), widths_table, draw_widths,
        titles={"summary": "accuracy at the end, mean by width"},
        latest=lambda record: record["how"], live=True,
    )  # fmt: skip


def curves(records: Sequence[Record]) -> Frame:
    """Return mean accuracies of the peers of a width: rows by width and round, columns alone and together."""
    rows = [
        (record["how"], width_of(peer), number, accuracy)
        for record in records
        for peer, number, accuracy in record["tests"]
    ]
    frame = frame_of(rows, columns=["how", "width", "round", "accuracy"])
    return frame.pivot_table("accuracy", ["width", "round"], "how", aggfunc="mean")


def widths_table(records: Sequence[Record]) -> dict[str, Frame]:
    """Return the accuracies after the last round."""
    last = curves(records).groupby("width").last().reset_index()
    return {"summary": as_text(last, {"alone": ".3f", "together": ".3f"})}


def draw_widths(folder: Path, records: Sequence[Record]) -> list[Path]:
    """Draw accuracy over rounds, a colour for every width."""
    from ..study.figures import COLOURS, canvas, place_legend, save

    figure, axes = canvas(
        f"{EACH} live peers of every width, 40 of the built-in digits each, 64=WIDTH=10; mean over the peers "
        "of a width. solid: together, averaged at the common width of 100; dashed: each alone."
    )
    found = curves(records)
    for colour, width in zip(COLOURS, WIDTHS, strict=False):
        for how, style in (("together", "-"), ("alone", "--")):
            if how not in found:
                continue
            line = found.loc[width][how].dropna()
            label = f"{width} cells" if style == "-" else None
            axes.plot(line.index, line, style, color=colour, linewidth=1.8, label=label)
    axes.set(
        title="Peers of three widths share one partial model", xlabel="round", ylabel="accuracy"
    )
    place_legend(axes)
    return save(figure, folder / "figure")


# --- compression ------------------------------------------------------------------------------------

TWIN = "uncompressed"
COMPRESSORS = (
    "float16", "int8", "int4", "top-k:0.1", "top-k:0.05+int8", "mask:0.25", "subsample:0.5", "low-rank:4",
)  # fmt: skip
BOUNDS = (0.05, 0.1, 0.2)


@dataclass(frozen=True)
class Compressed(StudyCell):
    """One swarm: a compressor or a bound on drift, and all other settings of its gossip."""

    gossip: Gossip
    rounds: int

    @property
    def name(self) -> str:
        """Mode and compressor, as one word for a folder."""
        name = f"{self.gossip.mode}-{self.line}"
        return name.replace(" ", "-").replace(":", "-").replace("+", "-")


def compression(paper: Paper, quick: bool, seeds: range) -> Study[Compressed]:
    """Return the study: in each mode the uncompressed twin first."""
    rounds = 15 if quick else 40
    names = {
        "rounds": ("int8",) if quick else COMPRESSORS,
        "server": ("int8", "top-k:0.05+int8"),
        "async": () if quick else ("int8", "top-k:0.05+int8"),
    }

    def cell(mode: str, line: str, **changed: object) -> Compressed:
        common = {"mode": mode, "per_process": 4, "checkpoint": False}
        return Compressed(line, Gossip.model_validate({**common, **changed}), rounds)

    cells = []
    for mode, compressors in names.items():
        cells.append(cell(mode, TWIN))
        cells += [cell(mode, name, compress=name) for name in compressors]
    bounds = BOUNDS[-1:] if quick else BOUNDS
    cells += [cell("async", f"drift {bound:g}", drift=bound) for bound in bounds]
    title = f"8 live peers, 13,000 shared values, {rounds} rounds of training"
    return Study(
        paper.name, cells, EachCell(run_compressed), compression_table, draw_compression,
        titles={"summary": title},
        latest=lambda record: f"{record['mode']}, {record['what']}: {record['accuracy']:.3f}",
        always={TWIN}, live=True,
    )  # fmt: skip


def compression_config(cell: Compressed) -> Config:
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


def run_compressed(cell: Compressed, job: Job) -> Record:
    """Run a swarm in a folder of its own."""
    outcome = run_quietly(compression_config(cell), cell.name, job)
    traffic = outcome.traffic
    return {
        "mode": cell.gossip.mode, "what": cell.line,
        "accuracy": float(np.mean(list(outcome.accuracy.values()))), "bytes": outcome.bytes,
        "distortion": traffic.mean_distortion, "worst": traffic.worst, "skipped": traffic.skipped,
    }  # fmt: skip


def compression_table(records: Sequence[Record]) -> dict[str, Frame]:
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


def draw_compression(folder: Path, records: Sequence[Record]) -> list[Path]:
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
