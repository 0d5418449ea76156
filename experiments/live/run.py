"""Running a live swarm and watching it: one table while it runs, files and a picture when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from ...gossip.compress import Traffic
from ...peer import (
    Broker,
    BrokerAddress,
    LocalSwarm,
    PeerError,
    RecordFile,
    SwarmSpec,
    broker_kind,
    is_record,
    label,
    stop_signals,
)
from ..build import Member, Swarm
from ..cli import console
from ..cli.live import broker_password
from ..config.tables import Config, ConfigError, parse_config, without_networks
from ..results import cannot_write, make_folder, read_records, write_json
from .layout import plan, shared_models

Record = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """How a live swarm ended."""

    accuracy: dict[str, float]
    consensus: dict[str, float]
    """Per shared model that has one width, the largest relative distance of a peer's values from the
    mean."""
    weight: dict[str, tuple[float, float]]
    """Per shared model: weight held at the end, and weight injected, in peers."""
    records: Path
    events: list[str]
    traffic: Traffic = field(default_factory=Traffic)
    """What compression and skipped pushes saved, over all peers and models."""

    @property
    def bytes(self) -> int:
        """Bytes that all peers sent for gossip, as they last said."""
        sent = {r["peer"]: r["bytes"] for r in read_records(self.records) if "bytes" in r}
        return sum(sent.values())


@contextlib.contextmanager
def broker_for(named: str | None, say: bool = True) -> Iterator[BrokerAddress]:
    """The broker at a URL, or one of our own, of the kind that is named, for as long as the block lasts."""
    kind = broker_kind(named)
    if named is not None and kind is None:
        yield BrokerAddress(named, password=broker_password(named))
        return
    with Broker(kind=kind) as broker:
        if say:
            console.warn(f"broker: {broker.kind} on {broker.url} ({broker.reason})")
        yield BrokerAddress(broker.url)


def run_live(
    config: Config,
    folder: Path,
    broker: BrokerAddress,
    *,
    source: str = "config",
    quiet: bool = False,
    on_planned: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run a config as a live swarm of processes and collect what it left in the folder.

    folder: new or empty, but for the keys in `trust`; peers would go on from another run's checkpoints.
    on_planned: called when nothing can be wrong with the config any more, before the first file.

    A disk without room for metrics does not end the peers: the swarm goes on to its end, and then raises
    a ConfigError that says so.
    """
    spec = plan(config, folder, broker, source)
    on_planned()
    if (folder / "config.json").exists():
        raise ConfigError(f"{folder}: holds the results of another swarm; name another folder")
    write_json(make_folder(folder) / "config.json", config.model_dump(mode="json"))
    events: list[str] = []
    board = Board(config, events)
    with _MetricsFile(folder / "metrics.jsonl", events) as file:

        def record(values: Record) -> None:
            file.write(values)
            board.update(values)

        swarm = LocalSwarm(spec, on_record=record, on_event=events.append)
        live = Live(board.table(), console=console.err, refresh_per_second=4)
        try:
            with contextlib.nullcontext() if quiet else live:
                asyncio.run(_run(swarm, lambda: live.update(board.table())))
        finally:
            if not quiet and not console.err.is_terminal:
                console.err.print()  # the table's last line has no end there
    outcome = collect(config, spec, events)
    if file.failure is not None:
        raise cannot_write(outcome.records, file.failure)
    return outcome


class _MetricsFile(RecordFile):
    """The metrics of a swarm; the first failure to write them is an event among the others."""

    def __init__(self, path: Path, events: list[str]):
        self._events = events
        super().__init__(path)

    def _fail(self, error: OSError) -> None:
        if self.failure is None:
            why = error.strerror or str(error)
            self._events.append(f"{self._path}: cannot be written: {why}; the peers go on")
            self.failure = error


async def _run(swarm: LocalSwarm, show: Callable[[], None]) -> None:
    """Run a swarm until it ends or a signal stops it; `show` is called every now and then, and at the end."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()

    def stop() -> None:
        stopped.set()
        swarm.stop()

    for number in stop_signals():
        loop.add_signal_handler(number, stop)
    task = asyncio.create_task(swarm.run())
    while not task.done():
        await asyncio.wait({task}, timeout=0.25)
        show()
    task.result()
    if stopped.is_set():
        raise KeyboardInterrupt


class Board:
    """The live table: one line per peer."""

    def __init__(self, config: Config, events: list[str]):
        self._config, self._events = config, events
        self._latest: dict[str, Record] = {str(index): {} for index in range(config.peers)}
        self._seen: dict[str, float] = {}
        self._started = time.monotonic()

    def update(self, record: Record) -> None:
        """Take in a metrics record; one that is none, or of somebody else, is passed over."""
        if not is_record(record):
            return
        peer = label(record["peer"])
        if peer not in self._latest:
            return
        self._latest[peer] = {**self._latest[peer], **record}
        self._seen[peer] = time.monotonic()

    def table(self) -> Table:
        """Everything known now."""
        config, now = self._config, time.monotonic()
        known = [r["accuracy"] for r in self._latest.values() if isfinite(r.get("accuracy", nan))]
        mean = f", mean accuracy {np.mean(known):.3f}" if known else ""
        title = f"{config.name}: {config.peers} peers, {config.gossip.mode}"
        shown = Table(
            title=escape(f"{title}, {now - self._started:.0f} s{mean}"), title_justify="left",
            caption=escape("\n".join(self._events[-3:])) or None, caption_justify="left",
        )  # fmt: skip
        for name in ("peer", "session", "phase", "counts"):
            shown.add_column(name)
        for name in ("round", "accuracy", "disagreement", "packets", "MB sent", "lag s"):
            shown.add_column(name, justify="right")
        for peer, record in self._latest.items():
            if not record:
                shown.add_row(peer, "", "starting", *[""] * 7)
                continue
            apart = [f"{model} {far:.0e}" for model, far in record["disagreement"].items()]
            accuracy = f"{record['accuracy']:.3f}" if "accuracy" in record else ""
            shown.add_row(
                peer, record["session"][:6], record["phase"], _counts(record),
                f"{record['round']}/{config.rounds}", accuracy, "  ".join(apart),
                str(record["packets"]), f"{record['bytes'] / 1e6:.1f}",
                f"{now - self._seen[peer]:.1f}",
            )  # fmt: skip
        return shown


def _counts(record: Record) -> str:
    """Say in which shared models how many members' weights count, as far as one peer knows."""
    members = record.get("members")
    if not isinstance(members, dict):
        return ""
    lacking = {m: row for m, row in members.items() if isinstance(row, list) and row[0] < row[1]}
    if not lacking:
        return "all"
    return "  ".join(f"{model} {row[0]} of {row[1]}" for model, row in lacking.items())


def collect(config: Config, spec: SwarmSpec, events: list[str]) -> Outcome:
    """Read what the peers left: networks, reports, metrics."""
    members: list[Member] = []
    accuracy: dict[str, float] = {}
    weights: dict[str, np.ndarray] = {}
    """Held and injected, by partial model."""
    traffic = Traffic()
    for member in Swarm(without_networks(config)).members():
        report, network = _report(spec.folder, member), spec.folder / f"{member.name}.safetensors"
        if not report or not network.exists():
            continue
        members.append(member)
        member.network.load(network)
        accuracy[member.name] = report["accuracy"]
        for counted in report["compression"].values():
            counted.pop("mean_distortion")
            traffic += Traffic(**counted)
        for vector, (held, open_, injected) in report["weight"].items():
            own = np.array([held + open_, injected]) / 2**32
            weights[vector] = weights.get(vector, np.zeros(2)) + own
    if not members:
        raise PeerError(f"no peer finished; their logs are in {spec.folder}")
    consensus = {}
    shared = shared_models(members)
    for owner, who in shared.items():
        if len({members[index].network.slicing.schema(owner) for index in who}) > 1:
            continue  # of different widths: each has its own part of what they agree on
        values = torch.stack([members[index].network.read(owner) for index in who]).double()
        mean = values.mean(dim=0)
        consensus[owner] = float((values - mean).norm(dim=1).max() / mean.norm())
    held = {owner: (float(weights[owner][0]), float(weights[owner][1])) for owner in shared}
    outcome = Outcome(accuracy, consensus, held, spec.folder / "metrics.jsonl", events, traffic)
    table = asdict(outcome) | {"bytes": outcome.bytes}
    del table["records"]
    write_json(spec.folder / "outcome.json", table)
    return outcome


def curves(path: Path) -> dict[int, list[float]]:
    """Accuracies of all peers by round, from a swarm's metrics."""
    found: dict[int, dict[str, float]] = {}
    for record in read_records(path):
        if "accuracy" in record:
            found.setdefault(record["round"], {})[record["peer"]] = record["accuracy"]
    return {number: list(by_peer.values()) for number, by_peer in sorted(found.items())}


def print_outcome(config: Config, outcome: Outcome) -> None:
    """Accuracy, agreement and where the weight is."""
    values = [value for value in outcome.accuracy.values() if isfinite(value)] or [nan]
    rows = [
        ("peers that finished", f"{len(outcome.accuracy)} of {config.peers}"),
        ("accuracy, mean", f"{np.mean(values):.3f}"),
        ("accuracy, worst and best peer", f"{min(values):.3f} to {max(values):.3f}"),
    ]
    for model, (held, injected) in outcome.weight.items():
        if model in outcome.consensus:
            rows.append((f"{model}: distance from the mean", f"{outcome.consensus[model]:.1e}"))
        rows.append((f"{model}: weight held / injected", f"{held:.6f} / {injected:.6f}"))
    traffic, sent = outcome.traffic, outcome.bytes
    rows.append(("bytes sent", f"{sent / 1e6:.2f} MB"))
    if sent and (traffic.messages or traffic.skipped):  # compressed, or not sent at all
        twin = sent + traffic.saved
        distortion = f"{traffic.mean_distortion:.2g} mean, {traffic.worst:.2g} worst"
        times = f"{twin / 1e6:.2f} MB, {twin / sent:.2f} times as many"
        rows.append(("bytes of an uncompressed twin", times))
        rows.append(("relative distortion of a message", distortion))
        rows.append(("messages skipped", str(traffic.skipped)))
    console.table(config.name, ["what", "value"], rows)
    for line in outcome.events:
        console.say(line)


def draw_swarm(config: Config, folder: Path) -> list[Path]:
    """Draw accuracy over rounds, from the swarm's metrics file."""
    return _draw(folder / "accuracy", config.name, {"": folder})


def _draw(path: Path, title: str, folders: Mapping[str, Path]) -> list[Path]:
    """Draw the accuracies of swarms, by what each is called, from the metrics in their folders."""
    from ..study.figures import COLOURS, band, canvas, place_legend, save

    figure, axes = canvas("line: mean over peers, band: worst to best peer, each on its own task")
    for colour, (name, folder) in zip(COLOURS, folders.items(), strict=False):
        band(axes, curves(folder / "metrics.jsonl"), colour, name)
    axes.set(title=title, xlabel="round", ylabel="accuracy")
    if len(folders) > 1:
        axes.set_ylim(0, 1)
        place_legend(axes)
    return save(figure, path)


def _report(folder: Path, member: Member) -> Record:
    """A peer's report; empty if it left none, or was killed while it wrote it."""
    try:
        return json.loads((folder / f"{member.name}.report.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}


# --- the demo: sixteen live peers, sixteen tasks, three ways to live together ---------------------------

# Every peer swaps a pair of labels of its own, so what an output cell means is the peer's own
# business; what the hidden cells see is everybody's.
SCHEMES = {"alone": None, "everything averaged": "64-30-10", "partial models": "64-30-0"}
"""The slice of the global model, if there is one."""


def demo_config(scheme: str) -> Config:
    """One of the demo's three swarms; they differ in their partial models alone."""
    layout = SCHEMES[scheme]
    return parse_config(
        {
            "name": f"demo-{scheme.replace(' ', '-')}",
            "peers": 16,
            "rounds": 80,
            "test_every": 4,
            "data": {"set": "digits", "samples": 50},
            "tasks": [{"kind": "swaps"}],
            "network": {"layout": "64=30=10", "activation": "sigmoid", "output": "sigmoid"},
            "models": [{"name": "global", "layout": layout}] if layout else [],
            "training": {"local_samples": 80, "rate": 0.3, "loss": "squared", "reduction": "sum"},
            "gossip": {"per_process": 8},
        }
    )


def run_demo(out: Path, broker: str | None = None) -> None:
    """Run the three swarms on one broker, print their accuracy and draw it."""
    rows = []
    folders = {scheme: out / scheme.replace(" ", "-") for scheme in SCHEMES}
    with broker_for(broker) as address:
        for scheme, folder in folders.items():
            outcome = run_live(demo_config(scheme), folder, address)
            values = list(outcome.accuracy.values())
            spread = (f"{value:.3f}" for value in (np.mean(values), min(values), max(values)))
            apart = max(outcome.consensus.values(), default=nan)
            rows.append((scheme, *spread, "" if np.isnan(apart) else f"{apart:.0e}"))
    console.table(
        "16 live peers, 50 digits and a label swap of its own each; accuracy on its own task",
        ["", "mean", "worst peer", "best peer", "distance from the mean"],
        rows,
    )
    console.print_written(_draw(out / "demo", "Sixteen peers, sixteen tasks", folders))
