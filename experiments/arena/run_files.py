"""The files that a simulation writes into its results folder, and how accuracy is averaged over peers."""

from __future__ import annotations

import csv
import json
import math
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import networkx as nx

from ...gossip.compress import Traffic
from ...models import Callback, Gain, Metrics, SwarmGain, as_record, make_callbacks
from ..build import Member, PeerFacts, write_peers
from ..config.tables import Config
from ..results import (
    PEERS_FILE,
    RecordFile,
    Results,
    atomic_path,
    read_records,
    write_csv,
    write_json,
)
from .network import World

TrafficByModel = Callable[[], Iterable[tuple[str, int, Traffic]]]
"""Returns for each partial model its name, the bytes sent, and statistics of its compression."""


def all_callbacks(callbacks: Sequence[Callback], config: Config, folder: Path) -> list[Callback]:
    """Return the given callbacks and those that a config names; folder: where the latter write results."""
    return [*callbacks, *make_callbacks(config.callbacks, folder, config.name)]


@contextmanager
def open_run_folder(
    config: Config,
    members: Sequence[Member],
    peers: Sequence[PeerFacts],
    graph: nx.Graph | None,
    results: Results,
    networks: bool,
    traffic_by_model: TrafficByModel | None,
) -> Iterator[tuple[RecordFile, list[Path]]]:
    """Create a run's folder and its metrics.jsonl; when the run ends, write tables, figure and networks.

    Yields metrics.jsonl, and a list to which the paths of the other files are added when the run ends.

    members: the peers whose networks are saved. peers: all peers of the run.
    traffic_by_model: returns what traffic.csv tells; None if nothing counts bytes.
    """
    written: list[Path] = []
    with results.run_folder() as out:
        try:
            with RecordFile(out / "metrics.jsonl") as file:
                write_json(out / "config.json", config.model_dump(mode="json"))
                write_peers(out / PEERS_FILE, peers, graph)
                yield file, written
        except KeyboardInterrupt:
            if networks:
                save_networks(members, out)
            raise
        finally:
            written += summarise(out, config.name)
            if traffic_by_model is not None:
                written.append(_write_traffic(out / "traffic.csv", traffic_by_model()))
        if networks:
            written += save_networks(members, out)


def test_record(peer: Member | PeerFacts, test: Metrics) -> dict[str, object]:
    """Return the record of a peer's test in metrics.jsonl, without round and time."""
    return {"peer": peer.name, "task": peer.task, **as_record(test)}


def gain_record(gain: Gain) -> dict[str, object]:
    """Return the fields that the record of a test has in addition if the peer has a lone twin."""
    return {"alone_accuracy": gain.alone_accuracy, "alone_loss": gain.alone_loss}


def write_gains(out: Path, gains: Sequence[Gain], peers: int) -> list[Path]:
    """Write the gains of peers with a lone twin to gain.json; nothing if there are none."""
    if not gains:
        return []
    swarm = SwarmGain.of(gains, peers).as_dict()
    write_json(out / "gain.json", {"swarm": swarm, "peers": [gain.as_dict() for gain in gains]})
    return [out / "gain.json"]


def read_gain(out: Path) -> SwarmGain | None:
    """Return the gain of a run's swarm, read from its gain.json; None if there is no such file."""
    path = out / "gain.json"
    if not path.exists():
        return None
    table = json.loads(path.read_text("utf-8"))
    gains = [Gain.from_dict(record) for record in table["peers"]]
    return SwarmGain.of(gains, table["swarm"]["peers"])


def save_networks(members: Sequence[Member], out: Path) -> list[Path]:
    """Save every peer's current network as safetensors; return the paths of the files."""
    files = []
    for member in members:
        files.append(out / f"{member.name}.safetensors")
        with atomic_path(files[-1]) as temporary:
            member.network.save(temporary)
    return files


def _write_traffic(path: Path, traffic_by_model: Iterable[tuple[str, int, Traffic]]) -> Path:
    """Write a table with a row for each model: bytes sent, bytes without compression, distortion.

    Only the bytes of values are counted, not those of headers and acknowledgements.
    """
    header = ["model", "bytes", "plain_bytes", "skipped", "mean_distortion", "worst_distortion"]
    rows = [
        [
            model, sent, sent + traffic.saved, traffic.skipped,
            f"{traffic.mean_distortion:.4g}", f"{traffic.worst:.4g}",
        ]
        for model, sent, traffic in traffic_by_model
    ]  # fmt: skip
    write_csv(path, header, rows)
    return path


def summarise(out: Path, title: str) -> list[Path]:
    """Write a table and a figure from metrics.jsonl and presence.csv; nothing if no peer was tested.

    title: the first words of the figure's title. Returns the paths of the files.
    """
    tests, tasks = AccuracyLog(read_presence(out / "presence.csv")), dict[str, str]()
    accuracies_by_round: dict[int, list[float]] = {}
    named_metrics: dict[str, dict[str, float]] = {}
    in_virtual_time = False
    for record in read_records(out / "metrics.jsonl"):
        peer, round, accuracy = record["peer"], record["round"], record["accuracy"]
        in_virtual_time, tasks[peer] = "time" in record, record["task"]
        tests.add(peer, record.get("time", round), round, accuracy)
        accuracies_by_round.setdefault(round, []).append(accuracy)
        named_metrics[peer] = record.get("metrics", {})
    if not tasks:
        return []
    from ..study.figures import (
        band,
        canvas,
        draw_metrics,
        save,
        whole_rounds,
    )  # matplotlib is slow to import

    mean, latest = tests.mean(tests.last_time), tests.at(tests.last_time)
    legend, peers = "peers; line: mean, band: worst to best", len(tests.by_peer)
    if in_virtual_time:
        header = ["peer", "task", "rounds", "accuracy", "there"]
        last_tests = {peer: peer_tests[-1] for peer, peer_tests in tests.by_peer.items()}
        rows = [
            [peer, tasks[peer], round, f"{accuracy:.4f}", "yes" if peer in latest else "no"]
            # By length first, so that peer 10 comes after peer 9.
            for peer, (_, round, accuracy) in sorted(
                last_tests.items(), key=lambda item: (len(item[0]), item[0])
            )
        ]
        rows.append(["mean", "", "", f"{mean.accuracy:.4f}", f"{mean.peers}"])
        figure, axes = canvas(
            f"{peers} {legend}, of the peers online at the time, each by its latest test; "
            f"at the last test {mean.accuracy:.3f}, the mean of {mean.peers}"
        )
    else:
        header = ["peer", "task", "accuracy"]
        rows = [[peer, tasks[peer], f"{accuracy:.4f}"] for peer, accuracy in latest.items()]
        figure, axes = canvas(f"{peers} {legend} peer")
    names = sorted({name for values in named_metrics.values() for name in values})
    for row in rows:
        values = named_metrics.get(row[0], {})
        row += [f"{values[name]:.4f}" if name in values else "" for name in names]
    write_csv(out / "summary.csv", [*header, *names], rows)
    band(axes, tests.curve() if in_virtual_time else accuracies_by_round)
    x_label = "virtual time in seconds" if in_virtual_time else "round"
    after = (
        f"{tests.last_time:.4g} virtual seconds"
        if in_virtual_time
        else f"{tests.last_time:g} rounds"
    )
    heading = f"{title}: accuracy {mean.accuracy:.3f} after {after}" if mean.peers else title
    axes.set(xlabel=x_label, ylabel="accuracy")
    if not in_virtual_time:
        whole_rounds(axes)
    axes.set_title("\n".join([heading, *_what_was_run(out, peers)]), fontsize=11)
    pictures = save(figure, out / "accuracy")
    return [out / "summary.csv", *pictures, *draw_metrics(out, title, x_label)]


def _what_was_run(out: Path, peers: int) -> list[str]:
    """Return a line about a run's peers, data, network and graph, from its config.json; none without it."""
    try:
        config = json.loads((out / "config.json").read_text("utf-8"))
        data, network, graph = config["data"]["set"], config["network"], config.get("topology")
    except (OSError, ValueError, LookupError):
        return []
    name = network.get("name") or network.get("entry") or network["layout"]
    kind = graph.get("kind", "graph") if isinstance(graph, dict) else graph
    return [f"{peers} peers, {data}, {name}{f', {kind}' if kind else ''}"]


CURVE_POINTS = 100
"""The number of points of a drawn curve."""


Presence = Mapping[str, Sequence[tuple[float, float]]]
"""For each peer the periods in which it was online, in order: when it arrived, and when it left. A peer that
did not leave again has infinity there."""


@dataclass(frozen=True)
class Mean:
    """The mean accuracy, at one time, of the peers that are online and were tested, and their number.

    The mean over no peers is NaN.
    """

    time: float
    accuracy: float
    peers: int


class AccuracyLog:
    """The accuracies of all tests by virtual time; in lockstep, by round.

    The accuracy of a swarm at a time is taken over the peers that are online then and were tested before,
    each with its latest test. A peer that has come back and was not tested since has the accuracy of its last
    test before it left. Curves, means and sweeps all follow this rule.

    presence: a peer without an entry is always online; at the time of leaving, a peer is offline.
    by_peer: for each peer its tests in order of time: (time, rounds that it had trained, accuracy).
    """

    def __init__(self, presence: Presence):
        self.presence = presence
        self.by_peer: dict[str, list[tuple[float, int, float]]] = {}

    @property
    def last_time(self) -> float:
        """The time of the last test."""
        return max(tests[-1][0] for tests in self.by_peer.values())

    def add(self, peer: str, time: float, round: int, accuracy: float) -> None:
        """Add a test: when it was, how many rounds the peer had trained, and its result."""
        insort(self.by_peer.setdefault(peer, []), (time, round, accuracy))

    def at(self, time: float) -> dict[str, float]:
        """Return the latest accuracy of every peer that is online at this time and was tested by then."""
        accuracies: dict[str, float] = {}
        for peer, tests in self.by_peer.items():
            tests_so_far = bisect_right(tests, time, key=lambda test: test[0])
            online_periods = self.presence.get(peer, [(-math.inf, math.inf)])
            is_online = any(arrived <= time < left for arrived, left in online_periods)
            if tests_so_far and is_online:
                *_, accuracies[peer] = tests[tests_so_far - 1]
        return accuracies

    def mean(self, time: float) -> Mean:
        """Return the mean of the accuracies at this time."""
        accuracies = self.at(time)
        mean = fmean(accuracies.values()) if accuracies else math.nan
        return Mean(time, mean, len(accuracies))

    def curve(self) -> dict[Any, list[float]]:
        """Return the accuracies at evenly spaced times from the first test to the last."""
        start = min(tests[0][0] for tests in self.by_peer.values())
        end = self.last_time
        steps = (start + (end - start) * step / CURVE_POINTS for step in range(CURVE_POINTS))
        by_time = {time: list(self.at(time).values()) for time in [*steps, end]}
        return {time: accuracies for time, accuracies in by_time.items() if accuracies}


def presence_of(world: World, names: Sequence[str]) -> Presence:
    """Return the periods in which each peer of a world is online; empty if all always are."""
    if not world.churns:
        return {}
    return {
        name: [
            (float(arrived), float(left))
            for arrived, left in zip(starts, ends, strict=True)
            if arrived < math.inf
        ]
        for name, starts, ends in zip(names, world.starts, world.ends, strict=True)
    }


def read_presence(path: Path) -> Presence:
    """Read the online periods from a run's presence.csv; empty if there is no such file."""
    presence: dict[str, list[tuple[float, float]]] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                online_period = (float(row["from"]), float(row["until"]))
                presence.setdefault(row["peer"], []).append(online_period)
    return presence
