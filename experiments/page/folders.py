"""Reads results folders for reports and playback: of single runs, and of studies (sweep, compare, paper)."""

from __future__ import annotations

import csv
import json
import re
import shlex
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite, nan
from os import SEEK_END
from pathlib import Path
from typing import Any, TypeVar

from ...peer import label
from ..config.tables import flat_keys
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

Timed = TypeVar("Timed", Observation, Event)
SAMPLES = 200
"""How many times the curves of a run in seconds are sampled; of a run in rounds, every round is."""


STOPPING = 0.05
"""The share of a live run, at its end, in which a peer that leaves was stopped with the others."""


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
        from ..config.needs import unused
        from ..config.tables import Config, Experiment, parse_table

        is_comparison = "methods" in self.config
        model = Experiment if is_comparison else Config
        known = {key: value for key, value in self.config.items() if key in model.model_fields}
        others = {key: value for key, value in self.config.items() if key not in known}
        try:
            config = parse_table(model, known, str(self.path))
        except ConfigError:
            return self.settings
        run = "live" if self.command in ("swarm", "demo") else "lockstep"
        if is_comparison:
            run = "compare"
        elif isinstance(config, Config) and config.time is not None:
            run = "virtual"
        # A sweep may give a key its effect in some of its runs.
        no_effect = [] if self.command == "sweep" else [key for key, _ in unused(config, run)]
        changed = config.model_dump(mode="json", exclude_defaults=True) | others
        return {
            key: text
            for key, text in flat_keys(changed).items()
            if not any(f"{key}.".startswith(f"{each}.") for each in no_effect)
        }


@dataclass(frozen=True)
class RunFolder(Folder):
    """The results of one swarm, simulated or live.

    observations, events: in order of time. x_label: what time is counted in. began: the wall clock's time at
    0, of a live run. parts: the folders of the hosts that ran it together, if there are several.
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
        """See Folder; of a run on several hosts, the command of each."""
        commands = [part.repeat for part in self.parts] or [super().repeat]
        return " and ".join(filter(None, commands))

    @property
    def problems(self) -> list[str]:
        """See Folder."""
        lines = (
            super().problems
            if not self.parts
            else [line for part in self.parts for line in super(RunFolder, part).problems]
        )
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
        """Whether a host ran this part of a swarm, or several hosts did."""
        arguments = self.info.get("arguments")
        return self.command == "swarm" and any(
            str(each).partition("=")[0] == "--peers" for each in arguments or ()
        )

    def fits(self, other: RunFolder) -> bool:
        """Return whether both are of hosts that ran different peers of one swarm at the same time."""
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
        """The peers that something was recorded of."""
        return frozenset(seen.peer for seen in self.observations)

    @property
    def start(self) -> float:
        """The time of the first observation."""
        return self.observations[0].time if self.observations else 0.0

    @property
    def end(self) -> float:
        """The time of the last observation or event."""
        return max(each.time for each in (*self.observations[-1:], *self.events[-1:]))

    def history(self, until: float | None = None) -> History:
        """Return the run's history up to a time; all of it if left out."""
        return Playback(self).advance(self.end if until is None else until)

    @cached_property
    def by_round(self) -> dict[int, float]:
        """The mean accuracy of all peers that were tested in a round, by round."""
        rounds: dict[int, list[float]] = {}
        for seen in self.observations:
            if seen.round is not None and isfinite(seen.accuracy):
                rounds.setdefault(seen.round, []).append(seen.accuracy)
        return {round: sum(all) / len(all) for round, all in sorted(rounds.items())}


class Playback:
    """A run's history that grows as its time goes on."""

    def __init__(self, run: RunFolder):
        self.run = run
        self.history = History(run.name, run.x_label)
        self._items = sorted((*run.observations, *run.events), key=lambda item: item.time)
        self._next = 0
        timed = run.x_label != "round"
        self._step = max((run.end - run.start) / SAMPLES, 1e-9) if timed else 0.0
        self._sampled = run.start
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
            if item.time > self._sampled + self._step:
                history.sample(self._sampled)
                self._sampled = item.time
            if isinstance(item, Event):
                history.add(item)
            else:
                history.apply(item)
        if end > self._next:
            history.sample(self._sampled if self._step == 0 else items[end - 1].time)
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
        for index, other in enumerate(folders):
            if (
                isinstance(folder, RunFolder)
                and isinstance(other, RunFolder)
                and other.fits(folder)
            ):
                folders[index] = _joined(other, folder)
                break
        else:
            folders.append(folder)
    names = [folder.name for folder in folders]
    doubled = {name for name in names if names.count(name) > 1}
    for folder in folders:
        if folder.name in doubled:  # two runs of one config
            object.__setattr__(folder, "name", f"{folder.name} {folder.path.name}")
    return folders


def _joined(one: RunFolder, other: RunFolder) -> RunFolder:
    """Return two hosts' parts of a run as one run."""
    began = min(one.began, other.began)

    def together(items: Callable[[RunFolder], Sequence[Timed]]) -> list[Timed]:
        shifted = [
            replace(item, time=item.time + run.began - began)
            for run in (one, other)
            for item in items(run)
        ]
        return sorted(shifted, key=lambda item: item.time)

    return replace(
        one,
        path=Path(f"{one.path} and {other.path}"),
        info={**one.info, "finished": all(each.info.get("finished") for each in (one, other))},
        observations=together(lambda run: run.observations),
        events=together(lambda run: run.events),
        began=began,
        parts=(*(one.parts or (one,)), other),
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


def _common(folder: Path, shown: Path, info: Record | None = None) -> dict[str, Any]:
    info, config = info or _json(folder / RUN_FILE), _json(folder / "config.json")
    study = _json(folder / "study.json")
    damaged = [
        name
        for name in (RUN_FILE, "config.json", PEERS_FILE, "study.json")
        if (folder / name).exists() and not _json(folder / name)
    ]
    if info.get("finished"):  # else a line may be being written
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
    live, timed = "phase" in records[0], "time" in records[0]
    origin = min(r["time"] for r in records) if live else 0.0
    observations = [_observation(r, origin if live else None) for r in records]
    observations.sort(key=lambda seen: seen.time)
    # When the last peer had reached each round.
    ends = {seen.round: seen.time for seen in observations if seen.round is not None}
    events = [*_decisions(folder, ends)]
    if live:
        events += _live_events(folder, origin, observations)
    else:
        events += _stays(folder)
    events.sort(key=lambda event: event.time)
    return RunFolder(
        **_common(folder, shown, info),
        x_label="seconds" if live else "virtual seconds" if timed else "round",
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


def _stays(folder: Path) -> Iterator[Event]:
    """When peers came and went in virtual time."""
    last: dict[str, float] = {}
    for row in _csv(folder / "presence.csv"):
        peer, start, end = row["peer"], float(row["from"]), float(row["until"])
        if start > 0:
            kind: Kind = "back" if peer in last else "joined"
            away = f"after {start - last[peer]:.1f} s" if peer in last else "for the first time"
            yield Event(start, kind, peer, f"came {'back ' * (peer in last)}{away}")
        if isfinite(end):
            last[peer] = end
            yield Event(end, "left", peer, "left (churn)")


_KINDS: Sequence[tuple[str, Kind]] = (
    (r"is restarted", "restarted"),
    (r"was killed|is killed", "dead"),
    (r"crashed", "lost"),
    (r"refused|cannot take part|banned", "refused"),
)


def _live_events(
    folder: Path, origin: float, observations: Sequence[Observation]
) -> Iterator[Event]:
    seen: set[str] = set()
    for each in observations:
        if each.peer not in seen:
            seen.add(each.peer)
            yield Event(each.time, "joined", each.peer, f"in round {each.round}")
    for record in read_records(folder / EVENTS_FILE):
        text, time = str(record.get("text", "")), _number(record.get("time", nan))
        kinds: list[Kind] = [kind for pattern, kind in _KINDS if re.search(pattern, text)]
        kind = kinds[0] if kinds else "note"
        named = re.match(r"peers? ([^ ]+(?:, [^ ]+)*) ", text)
        for peer in named[1].split(", ") if named else [""]:
            yield Event(max(time - origin, 0.0), kind, label(peer), text)
    last = {each.peer: each.time for each in observations}
    start, end = observations[0].time, observations[-1].time
    stopping = end - STOPPING * (end - start)
    for path in folder.glob("*.report.json"):
        report = _json(path)
        peer, ended = label(str(report.get("peer", ""))), report.get("ended", "")
        if peer in last and ended != "finished" and last[peer] < stopping:
            text = f"{'' if ended == 'left' else ended}: {report.get('reason', '')}".strip(": ")
            # A network's report has no time; its peer's last record is a moment older.
            yield Event(last[peer], "left", peer, text)


def _read_study(folder: Path, shown: Path) -> StudyFolder:
    records = list(read_records(folder / "runs.jsonl"))
    if not records:
        raise ConfigError(f"{shown}: nothing was recorded yet; wait until the run has results")
    tables = {}
    for path in sorted(folder.glob("*.csv"), key=lambda path: (path.stem != "summary", path.stem)):
        with path.open(newline="", encoding="utf-8") as file:
            tables[path.stem] = list(csv.reader(file))
    pictures = sorted(folder.glob("*.png"))
    return StudyFolder(**_common(folder, shown), records=records, tables=tables, pictures=pictures)


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
