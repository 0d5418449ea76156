"""Reads results folders for reports and playback: of single runs, and of studies (sweep, compare, paper)."""

from __future__ import annotations

import csv
import json
import re
import shlex
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite, nan
from os import SEEK_END
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...peer import label
from ..config.tables import Config, Experiment, flat_keys, parse_table
from ..errors import ConfigError
from ..results import (
    EVENTS_FILE,
    PEERS_FILE,
    RUN_FILE,
    SHARING_FILE,
    Record,
    find_run,
    read_records,
)
from .history import Event, History, Kind, Observation, group_peers, natural_key

if TYPE_CHECKING:
    from ..config.needs import Need

Timed = TypeVar("Timed", Observation, Event)
SAMPLES = 200
"""The most points of a curve of a run that is timed in seconds; a run in rounds has a point for each."""
STOPPING_SHARE = 0.05
"""The last part of a live run, as a share of it: a peer that ends then was stopped with the others."""


@dataclass(frozen=True)
class Folder:
    """What every results folder has: its config, and what its command says about itself.

    command: the name of the gossamer command. info: the content of run.json. damaged: its files that cannot
    be read.
    """

    path: Path
    name: str
    command: str
    config: Record
    info: Record
    damaged: Sequence[str] = ()

    @property
    def repeat(self) -> str:
        """The command that repeats the run; empty if an older version has written the folder."""
        arguments = self.info.get("arguments")
        return shlex.join(["gossamer", *map(str, arguments)]) if arguments else ""

    @property
    def problems(self) -> list[str]:
        """One line for each thing that a reader must know about an incomplete or old folder."""
        lines = []
        if not self.info.get("finished", False):
            lines.append(f"{self.path}: the run was not finished; this is what it had written")
        lines += [
            f"{self.path}: {name} is damaged, perhaps half written; what cannot be read is left out"
            for name in self.damaged
        ]
        if "versions" not in self.info and RUN_FILE not in self.damaged:
            lines.append(
                f"{self.path}: written by an older version of gossamer, which kept neither the command nor "
                "the versions nor the links"
            )
        return lines

    @cached_property
    def settings(self) -> dict[str, str]:
        """The config's keys as dotted paths with their values as text, without empty ones."""
        return flat_keys(self.config)

    @cached_property
    def changed(self) -> dict[str, str]:
        """The settings that are not at their default, without those that have no effect in the run.

        All of them if the folder has no config that this version can read.
        """
        model: type[Experiment] = Config
        if "methods" in self.config:
            from ..federated.comparison import Comparison  # takes half a second

            model = Comparison
        try:
            config = parse_table(model, self.config, str(self.path))
            no_effect = [key for key, _ in self._unused(config)]
        except ConfigError:
            return self.settings
        changed = config.model_dump(mode="json", exclude_defaults=True)
        return {
            key: text
            for key, text in flat_keys(changed).items()
            if not any(f"{key}.".startswith(f"{unused_key}.") for unused_key in no_effect)
        }

    def _unused(self, config: Experiment) -> Iterator[tuple[str, Need]]:
        """Yield the keys of the config that have no effect in the run, or in any run of a sweep."""
        from ..config.needs import unused, unused_in_sweep

        if not isinstance(config, Config):
            return unused(config, "compare")
        if self.command == "sweep":
            from ..study.sweep import axes_of, expand

            runs = [cell.config for cell in expand(config)]
            return unused_in_sweep(config, axes_of(config), runs)
        if self.command in ("swarm", "demo"):
            return unused(config, "live")
        return unused(config, "lockstep" if config.time is None else "virtual")


@dataclass(frozen=True)
class RunFolder(Folder):
    """The results of one swarm, simulated or live.

    observations, events: in order of time. x_label: what time is counted in. links: pairs of peers; None if
    unknown. facts: each peer's task, partial models and group. traffic: the rows of traffic.csv.
    began: the wall clock's time at 0, of a live run. parts: the folders of the hosts that ran it together, if
    there are several.
    """

    x_label: str = "round"
    observations: Sequence[Observation] = ()
    events: Sequence[Event] = ()
    links: Sequence[Sequence[str]] | None = None
    facts: Mapping[str, Record] = field(default_factory=dict)
    traffic: Sequence[Mapping[str, str]] = ()
    began: float = 0.0
    parts: tuple[RunFolder, ...] = ()

    @property
    def repeat(self) -> str:
        """The command that repeats the run; for a run on several hosts, the command of each."""
        commands = [part.repeat for part in self.parts] or [super().repeat]
        return " and ".join(filter(None, commands))

    @property
    def problems(self) -> list[str]:
        """What a reader must know, as in `Folder`; for a run on several hosts, the lines of all folders."""
        lines = [p for part in self.parts or [self] for p in super(RunFolder, part).problems]
        elsewhere = [name for name in self.facts if name not in self.peers]
        if elsewhere and self.is_part:
            names = ", ".join(elsewhere[:3]) + f" and {len(elsewhere) - 3} more" * (
                len(elsewhere) > 3
            )
            lines.append(
                f"{self.path}: peers {names} ran on other hosts; name the folders of those too"
            )
        return lines

    @property
    def is_part(self) -> bool:
        """Whether this host ran only some of the swarm's peers: `gossamer swarm --peers`."""
        arguments = self.info.get("arguments")
        return self.command == "swarm" and any(
            str(argument).partition("=")[0] == "--peers" for argument in arguments or ()
        )

    def ran_together_with(self, other: RunFolder) -> bool:
        """Return whether two hosts ran different peers of one swarm at the same time."""
        return (
            self.is_part
            and other.is_part
            and self.config == other.config
            and not self.peers & other.peers
            and self.began <= other.began + other.end
            and other.began <= self.began + self.end
        )

    @cached_property
    def peers(self) -> frozenset[str]:
        """The peers of which there are observations."""
        return frozenset(observation.peer for observation in self.observations)

    @property
    def start(self) -> float:
        """The time of the first observation."""
        return self.observations[0].time if self.observations else 0.0

    @property
    def end(self) -> float:
        """The time of the last observation or event."""
        return max(last.time for last in (*self.observations[-1:], *self.events[-1:]))

    def history(self, until: float | None = None) -> History:
        """Return the run's history up to a time; all of it if left out."""
        return Playback(self).advance(self.end if until is None else until)

    @cached_property
    def accuracy_by_round(self) -> dict[int, float]:
        """The mean accuracy of all peers that were tested in a round, by round."""
        accuracies: dict[int, list[float]] = {}
        for test in self.observations:
            if test.round is not None and isfinite(test.accuracy):
                accuracies.setdefault(test.round, []).append(test.accuracy)
        return {round: sum(values) / len(values) for round, values in sorted(accuracies.items())}


class Playback:
    """The history of a finished run up to a moment that `advance` moves on."""

    def __init__(self, run: RunFolder):
        self.run = run
        self.history = History(run.name, run.x_label)
        self._items = sorted((*run.observations, *run.events), key=lambda item: item.time)
        self._next = 0
        in_seconds = run.x_label != "round"
        self._step = max((run.end - run.start) / SAMPLES, 1e-9) if in_seconds else 0.0
        self._sample_time = run.start
        for name, fact in run.facts.items():
            models = tuple(fact.get("models", ()))
            group = fact.get("group")
            self.history.apply(
                Observation(name, run.start, state="starting", models=models, group=group)
            )
        neighbours: dict[str, list[str]] = {}
        for a, b in run.links or ():
            neighbours.setdefault(a, []).append(b)
        if run.links is not None:
            for peer in run.facts:
                self.history.connect(peer, neighbours.get(peer, ()))

    def advance(self, until: float) -> History:
        """Apply everything up to this time, and return the history."""
        history, items = self.history, self._items
        end = bisect_right(items, until, lo=self._next, key=lambda item: item.time)
        for item in items[self._next : end]:
            if item.time > self._sample_time + self._step:
                history.sample(self._sample_time)
                self._sample_time = item.time
            if isinstance(item, Event):
                history.add(item)
            else:
                history.apply(item)
        if end > self._next:
            history.sample(self._sample_time if self._step == 0 else items[end - 1].time)
        self._next = end
        if end == len(items) and self.run.info.get("finished"):
            for peer in history.peers.values():
                peer.state = peer.state if peer.gone else "done"
        return history


@dataclass(frozen=True)
class StudyFolder(Folder):
    """The results of a sweep, a comparison, or the study of a paper: records, tables and pictures."""

    records: Sequence[Record] = ()
    tables: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    pictures: Sequence[Path] = ()

    @cached_property
    def curves(self) -> dict[str, list[list[Record]]]:
        """By method, the curve of every run of a comparison; empty for other studies."""
        curves: dict[str, list[list[Record]]] = {}
        for record in self.records:
            curve = record.get("curve")
            if isinstance(curve, list) and curve and isinstance(curve[0], dict):
                name = str(record.get("method", record.get("line", "")))
                curves.setdefault(name, []).append(curve)
        return curves

    @cached_property
    def outcomes(self) -> dict[str, list[float]]:
        """The final accuracy of every run, by the settings that were swept, seeds together."""
        outcomes: dict[str, list[float]] = {}
        for record in self.records:
            settings = record.get("settings")
            if isinstance(settings, dict) and isinstance(record.get("accuracy"), float):
                swept = {key: value for key, value in settings.items() if key != "seed"}
                name = ", ".join(f"{key.split('.')[-1]} {value}" for key, value in swept.items())
                outcomes.setdefault(name or "all runs", []).append(record["accuracy"])
        return outcomes


def read_folders(paths: Sequence[Path]) -> list[RunFolder | StudyFolder]:
    """Read results folders; one that holds several swarms, such as that of the demo, gives several.

    Folders of several hosts that ran one swarm together (`gossamer swarm --peers`) give one.
    Raises ConfigError, one line that names the folder, if it holds no results or nothing was recorded.
    """
    folders: list[RunFolder | StudyFolder] = []
    for folder in (folder for path in paths for folder in _read(path)):
        if any(folder.path.resolve() == other.path.resolve() for other in folders):
            continue  # named twice: results/garden is its latest run
        for index, other in enumerate(folders):
            if (
                isinstance(folder, RunFolder)
                and isinstance(other, RunFolder)
                and other.ran_together_with(folder)
            ):
                folders[index] = _joined(other, folder)
                break
        else:
            folders.append(folder)
    names = Counter(folder.name for folder in folders)
    numbers = Counter((folder.name, folder.path.name) for folder in folders)

    def name(folder: Folder) -> str:
        if names[folder.name] == 1:
            return folder.name
        if numbers[folder.name, folder.path.name] == 1:  # two runs of one config
            return f"{folder.name} {folder.path.name}"
        return str(folder.path)  # one of them live, and both the first of their kind

    return [replace(folder, name=name(folder)) for folder in folders]


def _joined(first: RunFolder, second: RunFolder) -> RunFolder:
    """Return two hosts' parts of a run as one run."""
    began = min(first.began, second.began)

    def merged(items: Callable[[RunFolder], Sequence[Timed]]) -> list[Timed]:
        shifted = [
            replace(item, time=item.time + run.began - began)
            for run in (first, second)
            for item in items(run)
        ]
        return sorted(shifted, key=lambda item: item.time)

    return replace(
        first,
        path=Path(f"{first.path} and {second.path}"),
        info={**first.info, "finished": all(run.info.get("finished") for run in (first, second))},
        observations=merged(lambda run: run.observations),
        events=merged(lambda run: run.events),
        began=began,
        parts=(*(first.parts or (first,)), second),
    )


def _read(path: Path) -> Iterator[RunFolder | StudyFolder]:
    if not path.exists():
        raise ConfigError(
            f"{path}: there is no such folder; name one of gossamer's results folders"
        )
    folder = find_run(path).resolve() if path.is_dir() else path
    shown = path if folder == path.resolve() else path / folder.name
    if not path.is_dir() or not any(
        (folder / name).exists() for name in (RUN_FILE, "config.json", "metrics.jsonl")
    ):
        raise ConfigError(
            f"{path}: holds no results of gossamer; name a folder such as results/digits/001"
        )
    if (folder / "metrics.jsonl").exists():
        yield _read_run(folder, shown)
        return
    if (folder / "runs.jsonl").exists():
        yield _read_study(folder, shown)
        return
    swarms = sorted(p for p in folder.iterdir() if (p / "metrics.jsonl").exists())
    if not swarms:
        raise ConfigError(f"{shown}: nothing was recorded yet; wait until the run has results")
    info = _json(folder / RUN_FILE)
    for swarm in swarms:
        yield _read_run(swarm, shown / swarm.name, info)


def _folder_fields(folder: Path, shown: Path, info: Record | None = None) -> dict[str, Any]:
    """Return the values of the fields of `Folder`. shown: the folder's path as the user named it."""
    info, config = info or _json(folder / RUN_FILE), _json(folder / "config.json")
    study = _json(folder / "study.json")
    damaged = [
        name
        for name in (RUN_FILE, "config.json", PEERS_FILE, "study.json")
        if (folder / name).exists() and not _json(folder / name)
    ]
    if info.get("finished"):  # until then, the last line may be incomplete
        files = ("metrics.jsonl", "runs.jsonl", EVENTS_FILE)
        damaged += [name for name in files if _is_cut(folder / name)]
    command = str(info.get("command", ""))
    name = str(config.get("name") or study.get("name") or folder.name)
    return {
        "path": shown, "name": name, "command": command, "config": config or study, "info": info,
        "damaged": damaged,
    }  # fmt: skip


def _read_run(folder: Path, shown: Path, info: Record | None = None) -> RunFolder:
    records = [r for r in read_records(folder / "metrics.jsonl") if "peer" in r and "round" in r]
    if not records:
        raise ConfigError(f"{shown}: nothing was recorded yet; wait until the run has results")
    facts = _facts(folder, records)
    live, in_seconds = "phase" in records[0], "time" in records[0]
    origin = min(r["time"] for r in records) if live else 0.0
    observations = [_observation(r, origin if live else None) for r in records]
    observations.sort(key=lambda observation: observation.time)
    # The time at which the last peer reached each round.
    time_of_round = {item.round: item.time for item in observations if item.round is not None}
    events = [*_decisions(folder, time_of_round)]
    if live:
        events += _live_events(folder, origin, observations)
    else:
        events += _presence_events(folder)
    events.sort(key=lambda event: event.time)
    return RunFolder(
        **_folder_fields(folder, shown, info),
        x_label="seconds" if live else "virtual seconds" if in_seconds else "round",
        observations=observations,
        events=events,
        links=_json(folder / PEERS_FILE).get("links"),
        facts=facts,
        traffic=_csv(folder / "traffic.csv"),
        began=origin,
    )


def _observation(record: Record, origin: float | None) -> Observation:
    """One line of metrics.jsonl. origin: the time that a live run's seconds are counted from."""
    time = record.get("time", record["round"]) - (origin or 0.0)
    alone, accuracy = record.get("alone_accuracy", nan), record.get("accuracy", nan)
    return Observation(
        label(record["peer"]), time, round=record["round"],
        accuracy=_number(accuracy), loss=_number(record.get("loss", nan)),
        metrics={name: _number(value) for name, value in record.get("metrics", {}).items()},
        bytes=record.get("bytes"), state=record.get("phase", "training"),
        disagreement=record.get("disagreement", {}), gain=_number(accuracy) - _number(alone),
    )  # fmt: skip


def _facts(folder: Path, records: Sequence[Record]) -> dict[str, Record]:
    """The peers of a run with their tasks, partial models and groups, in natural order."""
    table = _json(folder / PEERS_FILE).get("peers", [])
    peers = {str(peer["name"]): dict(peer) for peer in table if isinstance(peer, dict)}
    for record in records:  # of an older version, or of a peer that joined by itself
        name = label(record["peer"])
        peer = peers.setdefault(name, {"task": "", "models": []})
        peer["task"] = record.get("task", peer["task"])
        if not peer["models"]:
            peer["models"] = list(record.get("members", {}))
    peers = dict(sorted(peers.items(), key=lambda item: natural_key(item[0])))
    groups = group_peers(
        {name: str(peer["task"]) for name, peer in peers.items()},
        {name: peer["models"] for name, peer in peers.items()},
    )
    for name, peer in peers.items():
        peer["group"] = groups[name]
    return peers


def _decisions(folder: Path, time_of_round: Mapping[int, float]) -> Iterator[Event]:
    for decision in _json(folder / SHARING_FILE).get("decisions", []):
        round = decision.get("round", 0)
        yield Event(time_of_round.get(round, float(round)), "decided", "", decision["sentence"])


def _presence_events(folder: Path) -> Iterator[Event]:
    """The events of peers that came and left in virtual time, from presence.csv."""
    left_at: dict[str, float] = {}
    for row in _csv(folder / "presence.csv"):
        peer, start, end = row["peer"], float(row["from"]), float(row["until"])
        if start > 0:
            if peer in left_at:
                yield Event(start, "back", peer, f"came back after {start - left_at[peer]:.1f} s")
            else:
                yield Event(start, "joined", peer, "came for the first time")
        if isfinite(end):
            left_at[peer] = end
            yield Event(end, "left", peer, "left (churn)")


_KIND_PATTERNS: Sequence[tuple[str, Kind]] = (
    (r"is restarted", "restarted"),
    (r"was killed|is killed", "dead"),
    (r"crashed", "lost"),
    (r"refused|cannot take part|banned", "refused"),
)


def _live_events(
    folder: Path, origin: float, observations: Sequence[Observation]
) -> Iterator[Event]:
    """The events of a live run: first observations, the lines of its event file, and ends of peers."""
    joined: set[str] = set()
    for observation in observations:
        if (peer := observation.peer) not in joined:
            joined.add(peer)
            yield Event(observation.time, "joined", peer, f"in round {observation.round}")
    for record in read_records(folder / EVENTS_FILE):
        text, time = str(record.get("text", "")), _number(record.get("time", nan))
        kinds: list[Kind] = [kind for pattern, kind in _KIND_PATTERNS if re.search(pattern, text)]
        kind = kinds[0] if kinds else "note"
        named = re.match(r"peers? ([^ ]+(?:, [^ ]+)*) ", text)
        for peer in named[1].split(", ") if named else [""]:
            yield Event(max(time - origin, 0.0), kind, label(peer), text)
    last_seen = {observation.peer: observation.time for observation in observations}
    start, end = observations[0].time, observations[-1].time
    stopping = end - STOPPING_SHARE * (end - start)
    for path in folder.glob("*.report.json"):
        report = _json(path)
        peer, ended = label(str(report.get("peer", ""))), report.get("ended", "")
        if peer in last_seen and ended != "finished" and last_seen[peer] < stopping:
            text = f"{'' if ended == 'left' else ended}: {report.get('reason', '')}".strip(": ")
            # A report has no time; the peer's last observation is a moment older.
            yield Event(last_seen[peer], "left", peer, text)


def _read_study(folder: Path, shown: Path) -> StudyFolder:
    records = list(read_records(folder / "runs.jsonl"))
    if not records:
        raise ConfigError(f"{shown}: nothing was recorded yet; wait until the run has results")
    tables = {}
    for path in sorted(folder.glob("*.csv"), key=lambda path: (path.stem != "summary", path.stem)):
        with path.open(newline="", encoding="utf-8") as file:
            tables[path.stem] = list(csv.reader(file))
    pictures = sorted(folder.glob("*.png"))
    return StudyFolder(
        **_folder_fields(folder, shown), records=records, tables=tables, pictures=pictures
    )


def _json(path: Path) -> Record:
    """Return the table of a JSON file; empty if there is no valid one."""
    try:
        table = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}


def _is_cut(path: Path) -> bool:
    """Return whether a file ends within a line."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, SEEK_END)
        return file.read() != b"\n"


def _csv(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else nan
