"""Four peers trained apart join four that gossip: with their cells aligned, and as they are.

Live processes on a real broker. The newcomers are trained before, from starts of their own; what they
know counts with their own weight from the moment they join. Without alignment the average mixes cells
that mean different things, and everybody's accuracy falls; the two swarms are drawn in one picture.

How far it falls depends on the network, and this one was chosen because it shows it: two hidden layers of
ReLU. With one hidden layer of 30 sigmoid or tanh cells on the same digits, the mean of unaligned networks
was hardly worse than each of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...models import Learner
from ...peer import BrokerAddress, LocalSwarm, PeerError, RecordFile, SwarmSpec
from ..arena import Arena
from ..build import Swarm, make_learner
from ..config.tables import Config, Data, Gossip, Model, Network, Training
from ..live import plan
from ..results import Record, cannot_write, make_folder, read_records, replacing, write_csv

FOUNDERS, NEWCOMERS = 4, 4
KINDS = ("align", "none")
_LABELS = {"align": "aligned before they count", "none": "as they are"}
_PATIENCE = 300.0
"""Seconds that a newcomer's process waits for the founders to be far enough."""


@dataclass(frozen=True)
class Sizes:
    """How long everybody trains, in stretches.

    together, apart: founders and newcomers before their processes start.
    before, founders: live founders until the newcomers are called, and in all.
    newcomers: live newcomers.
    """

    together: int = 300
    apart: int = 300
    before: int = 40
    founders: int = 300
    newcomers: int = 50


def newcomers_config(matching: str, sizes: Sizes, seed: int = 0) -> Config:
    """The swarm of both kinds; newcomers are its last four peers."""
    table = {"name": "global", "layout": "64-40-20-10", "matching": matching}
    return Config(
        name=f"newcomers-{matching}",
        seed=seed,
        peers=FOUNDERS + NEWCOMERS,
        rounds=sizes.founders,
        data=Data(set="digits", samples=100, partition="iid"),
        network=Network(layout="64=40=20=10", activation="relu", output="none"),
        models=[Model.model_validate(table)],
        training=Training(stretch=20, rate=0.05, loss="cross-entropy", reduction="mean"),
        gossip=Gossip(checkpoint=False),
    )


def train_before(out: Path, sizes: Sizes, seed: int = 0) -> list[Path]:
    """The networks that everybody starts from, by peer: founders' averaged after every stretch,
    newcomers' trained on their own data alone, from starts of their own."""
    make_folder(out)
    config = newcomers_config("none", sizes, seed)
    members = Swarm(config).members()
    founders = Arena([member.learner for member in members[:FOUNDERS]])
    for _ in range(sizes.together):
        founders.train()
        founders.average()
    for index, member in enumerate(members[FOUNDERS:], FOUNDERS):
        # The same data and order of samples, but cells that start elsewhere.
        other = Swarm(config.model_copy(update={"seed": seed + 1000 + index})).member(index)
        member.network.flat.copy_(other.network.flat)
        member.learner.train(sizes.apart)
    files = [out / f"{member.name}.safetensors" for member in members]
    for member, file in zip(members, files, strict=True):
        with replacing(file) as part:
            member.network.save(part)
    return files


def spec_of(
    config: Config, sizes: Sizes, networks: list[Path], folder: Path, broker: BrokerAddress
) -> SwarmSpec:
    """All eight processes; those of newcomers wait for the file `go` in the folder before they join."""
    spec = plan(config, folder, broker)
    names = tuple(peer.name for peer in spec.peers)[:FOUNDERS]
    peers = [
        replace(peer, settings=peer.settings.updated(expect=names), network=str(file))
        for peer, file in zip(spec.peers[:FOUNDERS], networks, strict=False)
    ]
    for peer, file in zip(spec.peers[FOUNDERS:], networks[FOUNDERS:], strict=True):
        settings = peer.settings.updated(
            expect=(), founder=False, trained=True, rounds=sizes.newcomers
        )
        arguments = {**peer.arguments, "go": str(folder / "go")}
        entry = f"{__name__}:make_late_learner"
        peers.append(
            replace(peer, settings=settings, network=str(file), entry=entry, arguments=arguments)
        )
    return replace(spec, peers=peers)


def make_late_learner(config: str, index: int, go: str, source: str = "config") -> Learner:
    """The entry point of a newcomer's process: everything is loaded, then it waits to be called."""
    learner = make_learner(config, index, source)
    deadline = time.monotonic() + _PATIENCE
    while not Path(go).exists():
        if time.monotonic() > deadline:
            raise PeerError(f"peer {index}: the founders were not ready within {_PATIENCE:g} s")
        time.sleep(0.02)
    return learner


def run_newcomers(
    matching: str,
    networks: list[Path],
    folder: Path,
    broker: BrokerAddress,
    sizes: Sizes,
    *,
    seed: int = 0,
    on_record: Callable[[Record], None] = lambda _: None,
) -> Path:
    """Run one of the two swarms; its metrics are in the file that is returned."""
    make_folder(folder)
    go = folder / "go"
    go.unlink(missing_ok=True)
    spec = spec_of(newcomers_config(matching, sizes, seed), sizes, networks, folder, broker)
    reached: dict[str, int] = {}
    metrics = folder / "metrics.jsonl"
    with RecordFile(metrics, fresh=True) as file:

        def record(values: Record) -> None:
            file.write(values)
            on_record(values)
            reached[values["peer"]] = values["round"]
            founders = [reached.get(str(index), 0) for index in range(FOUNDERS)]
            if min(founders) >= sizes.before:
                go.touch()

        asyncio.run(LocalSwarm(spec, on_record=record).run())
    if file.failure is not None:  # the peers went on to their end all the same
        raise cannot_write(metrics, file.failure)
    return metrics


@dataclass(frozen=True)
class Joining:
    """What became of the newcomers of one swarm.

    own: each newcomer's accuracy before it joined.
    first: its accuracy when its weight had just been added.
    worst: the lowest that it ever had after that.
    last: the one that it went home with.
    curves: per peer, its rounds since the newcomers came, and its accuracy, while it trained.
    """

    own: dict[str, float]
    first: dict[str, float]
    worst: dict[str, float]
    last: dict[str, float]
    curves: dict[str, list[tuple[float, float]]]


def read_joining(metrics: Path) -> Joining:
    """Read a swarm's metrics."""
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
    seen = {
        peer: [record["accuracy"] for record in tested.get(peer, []) if record["counts"]]
        for peer in own
    }
    seen = {peer: values for peer, values in seen.items() if values}
    return Joining(
        own,
        {peer: values[0] for peer, values in seen.items()},
        {peer: min(values) for peer, values in seen.items()},
        {peer: values[-1] for peer, values in seen.items()},
        curves,
    )


def report(out: Path) -> list[Path]:
    """The table and the picture of both swarms, from their metrics."""
    from ..study.figures import COLOURS, canvas, place_legend, save

    found = {kind: read_joining(out / kind / "metrics.jsonl") for kind in KINDS}
    table = out / "summary.csv"
    rows = [
        [kind, peer, *(f"{part[peer]:.3f}" for part in (one.own, one.first, one.worst, one.last))]
        for kind, one in found.items()
        for peer in sorted(one.first)
    ]
    write_csv(table, ["newcomers", "peer", "own", "first averaged", "worst", "last"], rows)
    figure, axes = canvas(
        "live processes on the built-in digits, 100 samples each, 64=40=20=10; solid: the four newcomers' "
        "mean, band: worst to best of them; dashed: mean of the four that they join, which were trained "
        "together. The network was chosen to show the fall: with one hidden layer there is hardly any.\n"
        "dotted: the newcomers' own accuracy before they joined (mean), and 0.9 of it."
    )
    own = float(np.mean(list(found["align"].own.values())))
    for level, style in ((own, ":"), (0.9 * own, (0, (1, 4)))):
        axes.axhline(level, color="#444444", linestyle=style, linewidth=1.2)
    for colour, (kind, one) in zip(COLOURS, found.items(), strict=False):
        late = {peer: line for peer, line in one.curves.items() if peer in one.own}
        end = min(line[-1][0] for line in late.values())
        grid = np.linspace(0.0, end, 200)
        values = _on(grid, list(late.values()))
        axes.fill_between(
            grid, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0
        )
        axes.plot(grid, values.mean(axis=0), color=colour, linewidth=2, label=_LABELS[kind])
        early = [line for peer, line in one.curves.items() if peer not in one.own]
        wide = np.linspace(-0.25 * end, end, 250)  # the others trained for long before
        axes.plot(wide, _on(wide, early).mean(axis=0), color=colour, linewidth=1.2, linestyle="--")
    axes.set(
        title="Four peers trained apart join four that gossip",
        xlabel="rounds since the newcomers joined",
        ylabel="accuracy",
        ylim=(0.2, 1),
    )
    place_legend(axes, "newcomers' cells")
    return [table, *save(figure, out / "figure")]


def _on(grid: np.ndarray, lines: list[list[tuple[float, float]]]) -> np.ndarray:
    """Curves of different moments, read off at the same ones."""
    return np.stack([np.interp(grid, *np.array(sorted(line)).T) for line in lines])
