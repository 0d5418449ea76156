"""Runs a live swarm of local processes: shows a table while it runs, then writes its results and a plot."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from math import isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from gossamer.files import RecordFile

from ...gossip.compress import Traffic
from ...models import Gain, SgdLearner, SwarmGain, norm_layers
from ...models.sharing import MIN_PEERS, Assignment, SharingReport, by_hand_text, untrained_text
from ...peer import (
    Broker,
    BrokerAddress,
    LocalSwarm,
    PeerError,
    SwarmSpec,
    broker_kind,
    is_record,
    label,
    stop_signals,
)
from ..build import Member, Swarm, shared_models, write_peers
from ..cli import console
from ..cli.live import broker_password
from ..cli.views import watching
from ..config.examples import example_path
from ..config.tables import Config, ConfigError, parse_config, read_table, without_networks
from ..results import (
    EVENTS_FILE,
    PEERS_FILE,
    SHARING_FILE,
    cannot_write,
    make_folder,
    read_records,
    write_json,
)
from .hosts import HostPart
from .layout import SwarmLayout

Record = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The results of a live swarm."""

    accuracy: dict[str, float]
    """The final test accuracy of every peer that finished."""
    consensus: dict[str, float]
    """Per shared model, the largest relative distance of a peer's values from the mean. Models whose width
    differs between peers are left out."""
    weight: dict[str, tuple[float, float]]
    """Per shared model, the push-sum weight that all peers held at the end, and the weight that they
    injected; 1.0 is the weight of one peer."""
    records: Path
    """The file of the swarm's metrics (JSON lines)."""
    events: list[str]
    """Messages for the user, such as a restart of a peer."""
    traffic: Traffic = field(default_factory=Traffic)
    """What compression and skipped pushes did to messages, summed over all peers and models."""
    gain: SwarmGain | None = None
    """How much better peers are than their lone twins (copies that never average); None if there are none."""
    decided: list[str] = field(default_factory=list)
    """With `sharing = "auto"`: the changes of what is shared that peers decided on, a sentence each."""

    @property
    def bytes(self) -> int:
        """Bytes that all peers sent for gossip, by the last metrics record of each peer."""
        sent = {r["peer"]: r["bytes"] for r in read_records(self.records) if "bytes" in r}
        return sum(sent.values())


@contextlib.contextmanager
def broker_for(
    broker: str | None,
    say: bool = True,
    address_of: Callable[[str], BrokerAddress] = BrokerAddress,
) -> Iterator[BrokerAddress]:
    """Yield the address of a broker: of the one at a URL, or of a local one that runs until the block ends.

    broker: a URL, or the program to start ("nats" or "mosquitto"); if left out, whichever is installed.
    say: print which broker was started. address_of: makes the address of a started broker from its URL.
    """
    program = broker_kind(broker)
    if broker is not None and program is None:
        yield BrokerAddress(broker, password=broker_password(broker))
        return
    with Broker(kind=program) as local_broker:
        if say:
            console.warn(
                f"broker: {local_broker.kind} on {local_broker.url} ({local_broker.reason})"
            )
        yield address_of(local_broker.url)


def run_live(
    config: Config,
    folder: Path,
    broker: AbstractContextManager[BrokerAddress],
    *,
    source: str = "config",
    quiet: bool = False,
    watch: bool = False,
    log_json: bool = False,
    on_planned: Callable[[], None] = lambda: None,
    peers: Sequence[int] | None = None,
) -> Outcome:
    """Run a config as a live swarm of processes and return its results.

    source: the config's file, for error messages.
    folder: where results are written. Must be new or empty, or peers would resume from the checkpoints of
        another run; it may have the subfolder `trust` with the peers' key files.
    broker: what `broker_for` returns, or nullcontext(address); entered when the config has been checked.
    watch: serve a page of the swarm while it runs, and print its address.
    log_json: write the peers' log lines as JSON objects.
    on_planned: called when the config has been checked, before the first results are written.
    peers: the indices of the peers that run here; all others run on other hosts (see hosts.py).

    If the metrics cannot be written, for example because the disk is full, the swarm still runs to its end;
    then this raises a ConfigError.
    """
    layout = SwarmLayout(config, source, Swarm(config, source))
    peer_specs = layout.peer_specs(folder)
    with broker as address:
        spec, part = replace(layout.spec(peer_specs, folder, address), log_json=log_json), None
        if peers is not None:
            part = HostPart(config, spec.swarm, spec.broker, peers)
            spec = replace(spec, peers=[peer_specs[index] for index in peers])
            part.announce()
        try:
            on_planned()
            if config.sharing == "auto":
                _warn_what_stays_shared(layout)
        except BaseException:
            if part is not None:
                part.withdraw()
            raise
        return _run_planned(layout, spec, part, quiet=quiet, watch=watch)


def _run_planned(
    layout: SwarmLayout, spec: SwarmSpec, part: HostPart | None, *, quiet: bool, watch: bool
) -> Outcome:
    """Run the peers of a swarm, write what they report, and return the results; see `run_live`."""
    config, folder = layout.config, spec.folder
    if (folder / "config.json").exists():
        raise ConfigError(f"{folder}: holds the results of another swarm; name another folder")
    write_json(make_folder(folder) / "config.json", config.model_dump(mode="json"))
    graph = None if layout.graph is None else layout.graph.graph
    write_peers(folder / PEERS_FILE, [layout.facts(i) for i in range(config.peers)], graph)
    events: list[str] = []
    board, records = Board(config, events), folder / "metrics.jsonl"
    with (
        RecordFile(records) as metrics_file,
        RecordFile(folder / EVENTS_FILE) as event_file,
        watching(watch, spec.broker, spec.swarm, spec.peers[0].settings.owner),
    ):

        def add_event(event: str) -> None:
            events.append(event)
            event_file.write({"time": time.time(), "text": event})

        def add_record(values: Record) -> None:
            is_complete = not metrics_file.unwritten
            metrics_file.write(values)
            if is_complete and metrics_file.failure is not None:
                reason = metrics_file.failure.strerror or metrics_file.failure
                add_event(f"{records}: cannot be written: {reason}; the peers keep running")
            board.update(values)

        swarm = LocalSwarm(spec, on_record=add_record, on_event=add_event)
        if quiet:
            asyncio.run(_run_until_stopped(swarm, lambda: None, part))
        else:
            try:
                with Live(board.table(), console=console.err, refresh_per_second=4) as live:
                    asyncio.run(_run_until_stopped(swarm, lambda: live.update(board.table()), part))
            finally:
                if not console.err.is_terminal:
                    console.err.print()  # without a terminal, rich does not end the table's last line
    outcome = collect(config, spec, events, part)
    if metrics_file.failure is not None:
        raise cannot_write(records, metrics_file.failure)
    return outcome


def _warn_what_stays_shared(layout: SwarmLayout) -> None:
    """Warn of what peers will not change although they decide by themselves what they share.

    That is: cells of partial models that the config names, everything if peers are too few, and parts that
    are not trained.
    """
    config = layout.config
    assignment = layout.initial_assignment
    if assignment is not None and (text := by_hand_text(assignment)):
        console.warn(text)
    if config.peers < MIN_PEERS:
        console.warn(
            f"everything stays shared: {config.peers} peers are too few to decide; it takes {MIN_PEERS}"
        )
    learner = layout.swarm.member(0).learner
    if isinstance(learner, SgdLearner) and (text := untrained_text(learner)):
        console.warn(text)


async def _run_until_stopped(
    swarm: LocalSwarm, show: Callable[[], None], part: HostPart | None
) -> None:
    """Run a swarm until it ends or a signal stops it. Calls `show` four times per second and at the end.

    part: this host's part of the swarm, if others run the rest. Raises KeyboardInterrupt if a signal stopped
    it.
    """
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()

    def stop() -> None:
        stopped.set()
        swarm.stop()

    for number in stop_signals():
        loop.add_signal_handler(number, stop)
    async with contextlib.nullcontext() if part is None else part.keep_published():
        task = asyncio.create_task(swarm.run())
        while not task.done():
            await asyncio.wait({task}, timeout=0.25)
            show()
        task.result()
    if stopped.is_set():
        raise KeyboardInterrupt


class Board:
    """The table that is shown while a swarm runs: one row per peer."""

    def __init__(self, config: Config, events: list[str]):
        self._config, self._events = config, events
        self._latest: dict[str, Record] = {str(index): {} for index in range(config.peers)}
        self._received_at: dict[str, float] = {}
        self._started = time.monotonic()
        self._decided: dict[str, None] = {}
        """The sentences of `Outcome.decided` so far, each once, in the order of arrival."""

    def update(self, record: Record) -> None:
        """Store a peer's metrics record; ignores an invalid record and one of a peer not in the config."""
        if not is_record(record):
            return
        peer = label(record["peer"])
        if peer not in self._latest:
            return
        self._latest[peer] = {**self._latest[peer], **record}
        self._received_at[peer] = time.monotonic()
        decided = record.get("decided")
        if isinstance(decided, list):
            self._decided |= dict.fromkeys(each for each in decided if isinstance(each, str))

    def table(self) -> Table:
        """Return the table with the latest record of every peer."""
        config, now = self._config, time.monotonic()
        latest = self._latest.values()
        accuracies = [r["accuracy"] for r in latest if isfinite(r.get("accuracy", nan))]
        mean = f", mean accuracy {np.mean(accuracies):.3f}" if accuracies else ""
        title = f"{config.name}: {config.peers} peers, {config.gossip.mode}"
        table = Table(
            title=escape(f"{title}, {now - self._started:.0f} s{mean}"), title_justify="left",
            caption=escape("\n".join([*self._decided, *self._events[-3:]])) or None,
            caption_justify="left",
        )  # fmt: skip
        decides = config.sharing == "auto"
        groups_column = ["groups"] if decides else []
        for name in ("peer", "session", "phase", "peers averaged", *groups_column):
            table.add_column(name)
        named_metrics = console.metric_columns(record.get("metrics", {}) for record in latest)
        for name in (
            "round", "accuracy", *named_metrics, "disagreement", "packets", "MB sent", "s ago",
        ):  # fmt: skip
            table.add_column(name, justify="right")
        for peer, record in self._latest.items():
            if not record:
                table.add_row(peer, "", "starting")
                continue
            disagreement = [
                f"{model} {distance:.0e}" for model, distance in record["disagreement"].items()
            ]
            accuracy = f"{record['accuracy']:.3f}" if "accuracy" in record else ""
            rounds = "" if config.rounds == "forever" else f"/{config.rounds}"
            table.add_row(
                peer, record["session"][:6], record["phase"], _averaged_members(record),
                *([_groups(record)] if decides else []), f"{record['round']}{rounds}", accuracy,
                *console.metric_cells(record.get("metrics", {}), named_metrics), "  ".join(disagreement),
                str(record["packets"]), f"{record['bytes'] / 1e6:.1f}",
                f"{now - self._received_at[peer]:.1f}",
            )  # fmt: skip
        return table


def _groups(record: Record) -> str:
    """Return the groups that a peer is in, and how many peers each has: "group2-0 of 5".

    They have partial models with names such as group2-0-1f3a: the number of the scheme, that of the group,
    and a suffix that depends on the assignment (see models/sharing/assignment.py).
    """
    groups = {
        model.rpartition("-")[0]: members
        for model, (_, members) in record.get("members", {}).items()
        if model.startswith("group") and model.count("-") == 2
    }
    return "  ".join(f"{group} of {count}" for group, count in sorted(groups.items()))


def _averaged_members(record: Record) -> str:
    """Return how many members' weights count in each shared model, by one peer's record.

    "all" if every member's weight counts in every model, else for example "global 3 of 4".
    """
    if "members" not in record:
        return ""
    incomplete = [
        f"{model} {counting} of {members}"
        for model, (counting, members) in record["members"].items()
        if counting < members
    ]
    return "  ".join(incomplete) or "all"


def collect(
    config: Config, spec: SwarmSpec, events: list[str], part: HostPart | None = None
) -> Outcome:
    """Read the networks, reports and metrics that the peers wrote; return and save the swarm's results.

    part: if the swarm runs on several hosts. The host that collects reports has the accuracies and weights of
        all peers, other hosts those of their own; distances from the mean are among the peers of this host.
    """
    members: list[Member] = []
    accuracy: dict[str, float] = {}
    weights: dict[str, np.ndarray] = {}
    """By partial model: the weight held at the end, and the weight injected."""
    traffic = Traffic()
    sharing_records: list[Record] = []
    gains: list[Gain] = []
    # Do not load the files of the key network.trained: each peer's final network is read below.
    all_members = Swarm(without_networks(config)).members()
    reports = {
        member.name: report for member in all_members if (report := _report(spec.folder, member))
    }
    if part is not None:
        reports = part.exchange_reports(reports)
    for member in all_members:
        report, network = reports.get(member.name), spec.folder / f"{member.name}.safetensors"
        is_here = network.exists()
        if not report or not (is_here or part is not None):
            continue
        if is_here:
            members.append(member)
            member.network.load(network)
        accuracy[member.name] = report["accuracy"]
        if (sharing_record := report.get("sharing")) is not None:
            sharing_records.append(sharing_record)
            if is_here:
                _share_as_decided(member, report["peer"], sharing_record["assignment"])
        if report.get("gain"):
            gains.append(Gain.from_dict(report["gain"]))
        for counts in report["compression"].values():
            counts.pop("mean_distortion")  # Traffic computes it from the other counts
            traffic += Traffic(**counts)
        for model, (held, in_transfer, injected) in report["weight"].items():
            # Push-sum weights are integers: 2**32 is the weight of one peer.
            held_and_injected = np.array([held + in_transfer, injected]) / 2**32
            weights[model] = weights.get(model, np.zeros(2)) + held_and_injected
    if not members:
        raise PeerError(f"no peer finished; their logs are in {spec.folder}")
    consensus = {}
    peers_of_model = shared_models(members)
    for model, peers in peers_of_model.items():
        if len({members[index].network.slicing.schema(model) for index in peers}) > 1:
            continue  # the model's width differs between peers: their vectors cannot be compared
        values = torch.stack([members[index].network.read(model) for index in peers]).double()
        mean = values.mean(dim=0)
        consensus[model] = float((values - mean).norm(dim=1).max() / mean.norm())
    # On several hosts, other hosts may have models that no peer of this one has.
    models = peers_of_model if part is None else weights
    weight = {model: (float(weights[model][0]), float(weights[model][1])) for model in models}
    sentences: list[str] = []
    if sharing_records:
        merged = SharingReport.merged(sharing_records)
        write_json(spec.folder / SHARING_FILE, merged)
        sentences = [decision["sentence"] for decision in merged["decisions"]]
    gain = SwarmGain.of(gains, config.peers) if gains else None
    metrics = spec.folder / "metrics.jsonl"
    outcome = Outcome(accuracy, consensus, weight, metrics, events, traffic, gain, sentences)
    values_to_save = asdict(outcome) | {"bytes": outcome.bytes}
    del values_to_save["records"]
    write_json(spec.folder / "outcome.json", values_to_save)
    return outcome


def _share_as_decided(member: Member, peer: str, record: Record) -> None:
    """Give a network the partial models that its peer had at the end.

    peer: its name in the swarm (with trust, that of its key). record: the last assignment of cells to peers.
    """
    network = member.network
    # With norm parts, norm layers too can belong to a partial model.
    anatomy = network.slicing.anatomy.with_norm_parts(norm_layers(network.module))
    slices, graph = Assignment.from_record(anatomy, record).slices(peer)
    network.reslice(slices, graph, anatomy=anatomy)


def accuracies_by_round(path: Path) -> dict[int, list[float]]:
    """Return the accuracies of all peers by round, from a swarm's file of metrics."""
    accuracies: dict[int, dict[str, float]] = {}
    for record in read_records(path):
        if "accuracy" in record:
            accuracies.setdefault(record["round"], {})[record["peer"]] = record["accuracy"]
    return {number: list(by_peer.values()) for number, by_peer in sorted(accuracies.items())}


def print_outcome(config: Config, outcome: Outcome) -> None:
    """Print accuracy, distance from the mean, push-sum weight and bytes sent, then the swarm's events."""
    values = [value for value in outcome.accuracy.values() if isfinite(value)] or [nan]
    rows = [
        ("peers that finished", f"{len(outcome.accuracy)} of {config.peers}"),
        ("accuracy, mean", f"{np.mean(values):.3f}"),
        ("accuracy, worst and best peer", f"{min(values):.3f} to {max(values):.3f}"),
    ]
    if outcome.gain is not None:
        rows.append(("what peers gain by taking part", str(outcome.gain)))
    for model, (held, injected) in outcome.weight.items():
        if model in outcome.consensus:
            rows.append((f"{model}: distance from the mean", f"{outcome.consensus[model]:.1e}"))
        rows.append((f"{model}: weight held / injected", f"{held:.6f} / {injected:.6f}"))
    traffic, sent = outcome.traffic, outcome.bytes
    rows.append(("bytes sent", f"{sent / 1e6:.2f} MB"))
    if sent and (traffic.messages or traffic.skipped):  # compression or skipped pushes were on
        uncompressed = sent + traffic.saved
        distortion = f"{traffic.mean_distortion:.2g} mean, {traffic.worst:.2g} worst"
        comparison = f"{uncompressed / 1e6:.2f} MB, {uncompressed / sent:.2f} times as many"
        rows.append(("bytes of an uncompressed run", comparison))
        rows.append(("relative distortion of a message", distortion))
        rows.append(("messages skipped", str(traffic.skipped)))
    console.table(config.name, ["what", "value"], rows)
    for line in (*outcome.decided, *outcome.events):
        console.say(line)


def draw_swarm(config: Config, folder: Path) -> list[Path]:
    """Draw accuracy and named metrics over rounds, from the swarm's metrics file."""
    from ..study.figures import draw_metrics

    pictures = _draw(folder / "accuracy", config.name, {"": folder})
    return [*pictures, *draw_metrics(folder, config.name)]


def _draw(path: Path, title: str, folders: Mapping[str, Path]) -> list[Path]:
    """Draw the accuracies of swarms by round; the legend or title has the last mean of each.

    folders: the results folder of each swarm, by its name in the plot.
    """
    from ..study.figures import COLOURS, band, canvas, place_legend, save

    figure, axes = canvas("line: mean over peers, band: worst to best peer, each on its own task")
    for colour, (name, folder) in zip(COLOURS, folders.items(), strict=False):
        curve = accuracies_by_round(folder / "metrics.jsonl")
        last = max(curve, default=0)
        mean = f"{np.mean(curve[last]):.3f}" if curve else "not tested"
        band(axes, curve, colour, f"{name}: {mean}")
        heading = title if len(folders) > 1 else f"{title}: accuracy {mean} in round {last}"
        axes.set(title=heading, xlabel="round", ylabel="accuracy")
    if len(folders) > 1:
        axes.set_ylim(0, 1)
        place_legend(axes)
    return save(figure, path)


def _report(folder: Path, member: Member) -> Record:
    """Return a peer's report; empty if it wrote none, or was killed while it wrote it."""
    try:
        return json.loads((folder / f"{member.name}.report.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}


# --- the demo: sixteen live peers, sixteen tasks, four ways to share -----------------------------------

# In all of them every peer swaps a different pair of labels, so output cells mean something else on every
# peer, while the features that hidden cells compute are useful to all peers.
AUTO = "decided by the peers"
"""The demo's swarm in which peers decide what they share."""
SCHEMES = {
    "alone": None,
    "everything averaged": "64-30-10",
    AUTO: None,
    "partial models by hand": "64-30-0",
}
"""The demo's swarms: for each, the layout of the global model's slice; None if the config has no model."""


def demo_config(scheme: str, rounds: int = 80) -> Config:
    """Return the config of one of the demo's swarms: that of example:digits, with what is shared changed."""
    layout = SCHEMES[scheme]
    changes: dict[str, Any] = {
        "name": f"demo-{scheme.replace(' ', '-')}",
        "rounds": rounds,
        "test_every": 4,
        "sharing": "auto" if scheme == AUTO else "models",
        "models": [{"name": "global", "layout": layout}] if layout else [],
        # No peer is restarted, and saving before every push would take most of the time.
        "gossip": {"per_process": 8, "checkpoint": False},
    }
    return parse_config(read_table(example_path("digits")) | changes)


def run_demo(out: Path, broker: BrokerAddress, *, rounds: int = 80, watch: bool = False) -> None:
    """Run the swarms on one broker, print their accuracy and what was decided, and draw the accuracy.

    watch: serve a page of each swarm while it runs.
    """
    rows, decided = [], list[str]()
    folders = {scheme: out / scheme.replace(" ", "-") for scheme in SCHEMES}
    for scheme, folder in folders.items():
        config = demo_config(scheme, rounds)
        outcome = run_live(config, folder, contextlib.nullcontext(broker), watch=watch)
        decided += outcome.decided
        values = list(outcome.accuracy.values())
        columns = (f"{value:.3f}" for value in (np.mean(values), min(values), max(values)))
        distance = max(outcome.consensus.values(), default=nan)
        rows.append((scheme, *columns, "" if np.isnan(distance) else f"{distance:.0e}"))
    console.table(
        "16 live peers, each with 50 digits and its own label swap; accuracy on each peer's own task",
        ["", "mean", "worst peer", "best peer", "distance from the mean"],
        rows,
    )
    for sentence in decided:
        console.say(f"{AUTO}: {sentence}")
    console.print_written(_draw(out / "demo", "Sixteen peers, sixteen tasks", folders))
