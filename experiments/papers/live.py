"""Studies of live peers: `gossamer paper newcomers`, `widths` and `compression`.

Newcomers: four peers that were trained separately join four peers that gossip, once with their cells aligned
first, once without alignment. From the moment they join, their networks enter the average with their own
weight. Without alignment, the average mixes cells that compute different features, and the accuracy of all
peers falls. How far it falls depends on the network. This network was chosen because the effect is large: two
hidden layers of ReLU. With one hidden layer of 30 sigmoid or tanh cells on the same digits, the mean of
unaligned networks was hardly worse than each of them.

Widths: peers with hidden layers of 40, 60 and 100 cells share one partial model, which is averaged at a
common width. In the baseline, the same peers, with the same samples in the same order, share nothing; it is
simulated in the arena.

Compression: how much accuracy is lost? Live swarms are compared with an uncompressed baseline that differs in
nothing else. Eight peers, each with its own digits, share their hidden cells, in the modes rounds,
server and async, with several compressors; in async mode also with pushes skipped while a model has hardly
changed (dynamic averaging).

In layouts, '=' joins the layers of a network, and '-' the cells per layer of a partial model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gossamer.files import RecordFile

from ...models import Learner
from ...peer import BrokerAddress, LocalSwarm, PeerError, SwarmSpec
from ..arena import Arena
from ..arena.simulation import Simulation
from ..build import Swarm, make_learner
from ..config.tables import Config, Data, Gossip, Model, Network, Size, TaskEntry, Training
from ..live.layout import plan
from ..live.run import Outcome, broker_for, run_live
from ..results import Record, atomic_path, cannot_write, make_folder, read_records
from ..study import EachCell, Frame, Job, Study, StudyCell, as_text, frame_of
from . import StudyEntry


def run_quietly(config: Config, name: str, job: Job) -> Outcome:
    """Run a swarm of live peers on a broker of its own, in a subfolder of the study, without printing."""
    broker = broker_for(None, say=False)
    return run_live(config, job.empty_folder(name), broker, quiet=True)


# --- newcomers --------------------------------------------------------------------------------------

FOUNDERS, NEWCOMERS = 4, 4
MATCHINGS = ("align", "none")
"""Values of `matching` in a model's config: newcomers align their cells before they join, or do not."""
_LABELS = {"align": "aligned before joining the average", "none": "not aligned"}
_FOUNDERS_TIMEOUT = 300.0
"""Seconds that a newcomer's process waits until the founders have trained `founders_before_join` rounds."""


@dataclass(frozen=True)
class Durations:
    """How long founders and newcomers train, in rounds of local training.

    founders_pretraining: the founders, in the arena, before their processes start.
    newcomers_pretraining: each newcomer, on its own, before its process starts.
    founders_before_join: the live founders, before the newcomers join.
    founders_live: the live founders, in all.
    newcomers_live: the live newcomers, after they joined.
    """

    founders_pretraining: int = 300
    newcomers_pretraining: int = 300
    founders_before_join: int = 40
    founders_live: int = 300
    newcomers_live: int = 50


def newcomers_config(matching: str, durations: Durations) -> Config:
    """Return the config of a swarm of founders and newcomers; the newcomers are its last four peers."""
    model = {"name": "global", "layout": "64-40-20-10", "matching": matching}
    return Config(
        name=f"newcomers-{matching}", peers=FOUNDERS + NEWCOMERS, rounds=durations.founders_live,
        data=Data(set="digits", samples=100, partition="iid"),
        network=Network(layout="64=40=20=10", activation="relu", output="none"),
        models=[Model.model_validate(model)],
        training=Training(local_samples=20, rate=0.05, loss="cross-entropy", reduction="mean"),
        gossip=Gossip(checkpoint=False),
    )  # fmt: skip


def pretrained_networks(out: Path, durations: Durations) -> list[Path]:
    """Return the files of all peers' pretrained networks; train those networks if a file is missing.

    The founders' networks are averaged after every round. The newcomers' networks are trained only on their
    own data, from their own random initial values.
    """
    make_folder(out)
    config = newcomers_config("none", durations)
    members = Swarm(config).members()
    files = [out / f"{member.name}.safetensors" for member in members]
    if all(file.exists() for file in files):
        return files
    founders = Arena([member.learner for member in members[:FOUNDERS]])
    for _ in range(durations.founders_pretraining):
        founders.train()
        founders.average()
    for index, member in enumerate(members[FOUNDERS:], FOUNDERS):
        # The same data and sample order, but other initial values.
        other = Swarm(config.model_copy(update={"seed": 1000 + index})).member(index)
        member.network.flat.copy_(other.network.flat)
        member.learner.train(durations.newcomers_pretraining)
    for member, file in zip(members, files, strict=True):
        with atomic_path(file) as temporary:
            member.network.save(temporary)
    return files


def spec_of(
    config: Config, durations: Durations, networks: list[Path], folder: Path, broker: BrokerAddress
) -> SwarmSpec:
    """Return the spec of all eight processes; newcomers wait for a file in the folder before they join."""
    spec = plan(config, folder, broker)
    founders = tuple(peer.name for peer in spec.peers[:FOUNDERS])
    peers = []
    for index, (peer, file) in enumerate(zip(spec.peers, networks, strict=True)):
        if index < FOUNDERS:
            peer = replace(peer, settings=peer.settings.updated(expect=founders))
        else:
            # Newcomers begin with values of peers whose weight counts already, not with their own.
            newcomer_settings = {
                "expect": (), "founder": False, "trained": True, "rounds": durations.newcomers_live,
            }  # fmt: skip
            peer = replace(
                peer,
                settings=peer.settings.updated(**newcomer_settings),
                entry=f"{__name__}:make_newcomer",
                arguments={**peer.arguments, "join_file": str(folder / "go")},
            )
        peers.append(replace(peer, network=str(file)))
    return replace(spec, peers=peers)


def make_newcomer(config: str, index: int, join_file: str, source: str = "config") -> Learner:
    """Load a newcomer's learner, wait until `join_file` exists, and return the learner.

    This is the entry point of a newcomer's process.
    """
    learner = make_learner(config, index, source)
    deadline = time.monotonic() + _FOUNDERS_TIMEOUT
    while not Path(join_file).exists():
        if time.monotonic() > deadline:
            raise PeerError(
                f"peer {index}: the founders did not finish their first rounds within "
                f"{_FOUNDERS_TIMEOUT:g} s"
            )
        time.sleep(0.02)
    return learner


def run_newcomers(
    matching: str, networks: list[Path], folder: Path, broker: BrokerAddress, durations: Durations
) -> Path:
    """Run the swarm with or without alignment; return the file of its metrics."""
    make_folder(folder)
    join_file = folder / "go"
    join_file.unlink(missing_ok=True)
    spec = spec_of(newcomers_config(matching, durations), durations, networks, folder, broker)
    rounds_done: dict[str, int] = {}
    metrics = folder / "metrics.jsonl"
    with RecordFile(metrics, overwrite=True) as file:

        def record(values: Record) -> None:
            file.write(values)
            rounds_done[values["peer"]] = values["round"]
            slowest_founder = min(rounds_done.get(str(index), 0) for index in range(FOUNDERS))
            if slowest_founder >= durations.founders_before_join:
                join_file.touch()

        asyncio.run(LocalSwarm(spec, on_record=record).run())
    if file.failure is not None:  # a failed write did not stop the peers; report it now
        raise cannot_write(metrics, file.failure)
    return metrics


def summarise_newcomers(metrics: Path) -> Record:
    """Return the newcomers' accuracies before and after joining, read from the metrics of one swarm.

    own: each newcomer's accuracy before it joined.
    first: its accuracy just after its weight was added to the average.
    worst: its lowest accuracy after that.
    last: its final accuracy.
    curves: for each peer, (rounds since the newcomers joined, accuracy) while it trained.
    """
    own: dict[str, float] = {}
    join_times: dict[str, float] = {}
    tests_by_peer: dict[str, list[Record]] = {}
    for record in read_records(metrics):
        if "own_accuracy" in record:
            own[record["peer"]] = record["own_accuracy"]
            join_times[record["peer"]] = record["time"]
        elif "accuracy" in record:
            tests_by_peer.setdefault(record["peer"], []).append(record)
    first_join = min(join_times.values(), default=0.0)
    curves: dict[str, list[tuple[float, float]]] = {}
    for peer, records in tests_by_peer.items():
        rounds_before = max((r["round"] for r in records if r["time"] < first_join), default=0)
        curve = [
            (r["round"] - rounds_before, r["accuracy"]) for r in records if r["phase"] == "training"
        ]
        curves[peer] = [(0, own[peer]), *curve] if peer in own else curve
    # Accuracies of each newcomer from the moment its weight is part of the average.
    after_join = {
        peer: [r["accuracy"] for r in tests_by_peer.get(peer, []) if r["counts"]] for peer in own
    }
    after_join = {peer: accuracies for peer, accuracies in after_join.items() if accuracies}
    return {
        "own": own,
        "first": {peer: accuracies[0] for peer, accuracies in after_join.items()},
        "worst": {peer: min(accuracies) for peer, accuracies in after_join.items()},
        "last": {peer: accuracies[-1] for peer, accuracies in after_join.items()},
        "curves": curves,
    }


def run_newcomer_cell(cell: StudyCell, job: Job) -> Record:
    """Run a swarm and return the newcomers' accuracies; `cell.line` is its matching, "align" or "none"."""
    durations = Durations()
    networks = pretrained_networks(job.folder / "networks", durations)
    with broker_for(None, say=False) as broker:
        metrics = run_newcomers(cell.line, networks, job.empty_folder(cell.line), broker, durations)
    return {"matching": cell.line, **summarise_newcomers(metrics)}


def newcomers(entry: StudyEntry, quick: bool, seeds: range) -> Study[StudyCell]:
    """Return the study of newcomers."""
    return Study(
        entry.name, [StudyCell(matching) for matching in MATCHINGS], EachCell(run_newcomer_cell),
        newcomers_table, draw_newcomers,
        titles={"summary": "accuracy of newcomers that were trained separately"},
        latest=lambda record: f"matching {record['matching']}", live=True,
    )  # fmt: skip


def newcomers_table(records: Sequence[Record]) -> dict[str, Frame]:
    """Return a row for every newcomer of every swarm."""
    columns = {"own": "before joining", "first": "just after", "worst": "worst", "last": "last"}
    frame = frame_of(
        [
            {"matching": r["matching"], "newcomer": peer}
            | {column: r[key][peer] for key, column in columns.items()}
            for r in records
            for peer in sorted(r["first"])
        ]
    )
    frame["after / before"] = frame["just after"] / frame["before joining"]
    formats = dict.fromkeys(columns.values(), ".3f") | {"after / before": ".2f"}
    return {"summary": as_text(frame, formats)}


def draw_newcomers(folder: Path, records: Sequence[Record]) -> list[Path]:
    """Draw both swarms in one picture."""
    from ..study.figures import COLOURS, canvas, place_legend, save

    figure, axes = canvas(
        "Live processes have 100 of the built-in digits each, and networks 64=40=20=10. A solid line is the "
        "mean of the four newcomers, its band goes from the worst to the best newcomer; a dashed line is the "
        "mean of the four founders that they join, which were trained together. With one hidden layer "
        "instead of two, accuracy hardly falls.\n"
        "The dotted lines are the newcomers' mean accuracy before they joined, and 0.9 of it."
    )
    own = float(np.mean(list(records[0]["own"].values())))
    for level, style in ((own, ":"), (0.9 * own, (0, (1, 4)))):
        axes.axhline(level, color="#444444", linestyle=style, linewidth=1.2)
    for colour, record in zip(COLOURS, records, strict=False):
        curves = record["curves"]
        newcomer_curves = [curve for peer, curve in curves.items() if peer in record["own"]]
        end = min(curve[-1][0] for curve in newcomer_curves)
        grid = np.linspace(0.0, end, 200)
        values = _interpolate(grid, newcomer_curves)
        axes.fill_between(
            grid, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0
        )
        label = _LABELS[record["matching"]]
        axes.plot(grid, values.mean(axis=0), color=colour, linewidth=2, label=label)
        founder_curves = [curve for peer, curve in curves.items() if peer not in record["own"]]
        grid = np.linspace(-0.25 * end, end, 250)  # the founders had trained for long before
        mean = _interpolate(grid, founder_curves).mean(axis=0)
        axes.plot(grid, mean, color=colour, linewidth=1.2, linestyle="--")
    axes.set(
        title="Four separately trained peers join four that gossip",
        xlabel="rounds since the newcomers joined",
        ylabel="accuracy",
        ylim=(0.2, 1),
    )
    place_legend(axes, "newcomers' cells")
    return save(figure, folder / "figure")


def _interpolate(grid: np.ndarray, curves: list[list[tuple[float, float]]]) -> np.ndarray:
    """Return the values of each curve at the points of `grid`: one row per curve."""
    return np.stack([np.interp(grid, *np.array(sorted(curve)).T) for curve in curves])


# --- widths -----------------------------------------------------------------------------------------

WIDTHS = (40, 60, 100)
"""Cells in the hidden layer."""
PEERS_PER_WIDTH = 2


def widths_config(rounds: int = 60, *, alone: bool = False) -> Config:
    """Return the config of two peers of each width with 40 samples each; `alone`: they share nothing."""
    groups = {
        width: list(range(index * PEERS_PER_WIDTH, (index + 1) * PEERS_PER_WIDTH))
        for index, width in enumerate(WIDTHS)
    }
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
        name="widths", peers=PEERS_PER_WIDTH * len(WIDTHS), rounds=rounds, test_every=2,
        data=Data(set="digits", samples=40, partition="iid"),
        network=Network(layout=f"64={widest}=10", activation="relu", output="none", sizes=sizes),
        models=[] if alone else models,
        training=Training(local_samples=40, rate=0.1, loss="cross-entropy", reduction="mean"),
        gossip=Gossip(checkpoint=False),
    )  # fmt: skip


def width_of(peer: str) -> int:
    """Return the hidden width of the peer with this name, which is its index."""
    return WIDTHS[int(peer) // PEERS_PER_WIDTH]


def run_width_cell(cell: StudyCell, job: Job) -> Record:
    """Run the variant `cell.line`: "alone" in the arena, "together" as live processes."""
    if cell.line == "alone":
        simulation = Simulation.of(widths_config(alone=True))
        tests = [
            (member.name, round.index, test.accuracy)
            for round in simulation.rounds()
            for member, test in zip(simulation.members, round.tests, strict=False)
        ]
    else:
        tests = tests_of(run_quietly(widths_config(), cell.line, job).records)
    return {"variant": cell.line, "tests": tests}


def tests_of(metrics: Path) -> list[tuple[str, int, float]]:
    """Return peer, round and accuracy of every test.

    A peer tests its network again after the last averages have converged. That record has the number of the
    last round too, comes later in the file, and replaces the earlier one.
    """
    accuracies = {
        (r["peer"], r["round"]): r["accuracy"] for r in read_records(metrics) if "accuracy" in r
    }
    return [(peer, number, accuracy) for (peer, number), accuracy in accuracies.items()]


def widths(entry: StudyEntry, quick: bool, seeds: range) -> Study[StudyCell]:
    """Return the study of widths."""
    cells = [StudyCell(variant) for variant in ("alone", "together")]
    return Study(
        entry.name, cells, EachCell(run_width_cell), widths_table, draw_widths,
        titles={"summary": "accuracy at the end, mean by width"},
        latest=lambda record: record["variant"], live=True,
    )  # fmt: skip


def curves(records: Sequence[Record]) -> Frame:
    """Return mean accuracies over the peers of a width: a row per width and round, a column per variant."""
    rows = [
        (record["variant"], width_of(peer), number, accuracy)
        for record in records
        for peer, number, accuracy in record["tests"]
    ]
    frame = frame_of(rows, columns=["variant", "width", "round", "accuracy"])
    return frame.pivot_table("accuracy", ["width", "round"], "variant", aggfunc="mean")


def widths_table(records: Sequence[Record]) -> dict[str, Frame]:
    """Return the accuracies after the last round."""
    last = curves(records).groupby("width").last().reset_index()
    return {"summary": as_text(last, {"alone": ".3f", "together": ".3f"})}


def draw_widths(folder: Path, records: Sequence[Record]) -> list[Path]:
    """Draw accuracy over rounds, a colour for every width."""
    from ..study.figures import COLOURS, canvas, place_legend, save

    figure, axes = canvas(
        f"{PEERS_PER_WIDTH} live peers of every width have 40 of the built-in digits each, and networks "
        "64=WIDTH=10. Lines are means over the peers of a width: solid if peers average together at the "
        "common width of 100, dashed if each peer learns alone."
    )
    accuracies = curves(records)
    for colour, width in zip(COLOURS, WIDTHS, strict=False):
        for variant, style in (("together", "-"), ("alone", "--")):
            if variant not in accuracies:
                continue
            curve = accuracies.loc[width][variant].dropna()
            label = f"{width} cells" if style == "-" else None
            axes.plot(curve.index, curve, style, color=colour, linewidth=1.8, label=label)
    axes.set(
        title="Peers of three widths share one partial model", xlabel="round", ylabel="accuracy"
    )
    place_legend(axes)
    return save(figure, folder / "figure")


# --- compression ------------------------------------------------------------------------------------

BASELINE = "uncompressed"
"""The name of the runs that others are compared with."""
COMPRESSORS = (
    "float16", "int8", "int4", "top-k:0.1", "top-k:0.05+int8", "mask:0.25", "subsample:0.5", "low-rank:4",
)  # fmt: skip
DRIFT_BOUNDS = (0.05, 0.1, 0.2)
"""A push is skipped while the model has changed by less than this fraction since the last one (`drift`)."""


@dataclass(frozen=True)
class CompressionRun(StudyCell):
    """One swarm, by its gossip settings; `line` is the name of its compressor or drift bound."""

    gossip: Gossip
    rounds: int

    @property
    def name(self) -> str:
        """Mode and compressor, as the name of a folder."""
        name = f"{self.gossip.mode}-{self.line}"
        return name.replace(" ", "-").replace(":", "-").replace("+", "-")


def compression(entry: StudyEntry, quick: bool, seeds: range) -> Study[CompressionRun]:
    """Return the study of compressors; in each mode, the uncompressed baseline runs first."""
    rounds = 15 if quick else 40
    compressors_of_mode = {
        "rounds": ("int8",) if quick else COMPRESSORS,
        "server": ("int8", "top-k:0.05+int8"),
        "async": () if quick else ("int8", "top-k:0.05+int8"),
    }

    def cell(mode: str, compressor: str, **options: object) -> CompressionRun:
        common = {"mode": mode, "per_process": 4, "checkpoint": False}
        return CompressionRun(compressor, Gossip.model_validate({**common, **options}), rounds)

    cells = []
    for mode, compressors in compressors_of_mode.items():
        cells.append(cell(mode, BASELINE))
        cells += [cell(mode, name, compress=name) for name in compressors]
    bounds = DRIFT_BOUNDS[-1:] if quick else DRIFT_BOUNDS
    cells += [cell("async", f"drift {bound:g}", drift=bound) for bound in bounds]
    title = f"8 live peers, 13,000 shared values, {rounds} rounds of training"
    return Study(
        entry.name, cells, EachCell(run_compression_cell), compression_table, draw_compression,
        titles={"summary": title},
        latest=lambda record: f"{record['mode']}, {record['compressor']}: {record['accuracy']:.3f}",
        always_run={BASELINE}, live=True,
    )  # fmt: skip


def compression_config(cell: CompressionRun) -> Config:
    """Return the config of eight peers with 13,000 shared values.

    Two labels are swapped for each peer, another pair for each, so output cells are not shared.
    """
    return Config(
        name=f"compression-{cell.name}", peers=8, rounds=cell.rounds, test_every=cell.rounds,
        data=Data(set="digits", samples=50),
        tasks=[TaskEntry(kind="swaps")],
        network=Network(layout="64=200=10", activation="tanh", output="sigmoid"),
        models=[Model(name="global", layout="64-200-0")],
        training=Training(local_samples=80, rate=0.03, loss="squared", reduction="sum"),
        gossip=cell.gossip,
    )  # fmt: skip


def run_compression_cell(cell: CompressionRun, job: Job) -> Record:
    """Run one swarm in a folder of its own and return its record; accuracy is the mean over peers."""
    outcome = run_quietly(compression_config(cell), cell.name, job)
    traffic = outcome.traffic
    return {
        "mode": cell.gossip.mode, "compressor": cell.line,
        "accuracy": float(np.mean(list(outcome.accuracy.values()))), "bytes": outcome.bytes,
        "distortion": traffic.mean_distortion, "worst": traffic.worst, "skipped": traffic.skipped,
    }  # fmt: skip


def compression_table(records: Sequence[Record]) -> dict[str, Frame]:
    """Return a row for every swarm, compared with the uncompressed baseline of its mode."""
    frame = frame_of(records)
    baselines = frame[frame["compressor"] == BASELINE].set_index("mode")
    columns = {
        "mode": frame["mode"],
        "compressor": frame["compressor"],
        "accuracy": frame["accuracy"],
        "accuracy lost": frame["mode"].map(baselines["accuracy"]) - frame["accuracy"],
        "MB sent": frame["bytes"] / 1e6,
        "bytes saved ×": frame["mode"].map(baselines["bytes"]) / frame["bytes"],
        "distortion": frame["distortion"],
        "worst distortion": frame["worst"],
        "skipped": frame["skipped"],
    }
    formats = {
        "accuracy": ".3f", "accuracy lost": "+.3f", "MB sent": ".2f", "bytes saved ×": ".2f",
        "distortion": ".4f", "worst distortion": ".3f",
    }  # fmt: skip
    return {"summary": as_text(frame_of(columns), formats)}


def draw_compression(folder: Path, records: Sequence[Record]) -> list[Path]:
    """Draw accuracy against bytes, one colour per mode; filled markers are the uncompressed baselines."""
    from ..study.figures import COLOURS, MARKERS, canvas, place_legend, save

    caption = (
        "mean accuracy of 8 live peers, each on its own task; filled: the uncompressed baseline"
    )
    figure, axes = canvas(caption, width=9.0, height=5.4)
    modes = list(dict.fromkeys(r["mode"] for r in records))
    for record in records:
        index, is_baseline = modes.index(record["mode"]), record["compressor"] == BASELINE
        point = record["bytes"] / 1e6, record["accuracy"]
        axes.plot(
            *point, MARKERS[index], color=COLOURS[index], markersize=9 if is_baseline else 6,
            fillstyle="full" if is_baseline else "none", label=record["mode"] if is_baseline else None,
        )  # fmt: skip
        axes.annotate(
            record["compressor"], point, fontsize=7, xytext=(5, 4), textcoords="offset points"
        )
    axes.set(
        title="Accuracy and bytes by compressor", xlabel="MB sent by all peers", ylabel="accuracy"
    )
    axes.set_xscale("log")
    place_legend(axes, "mode")
    return save(figure, folder / "figure")
