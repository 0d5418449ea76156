"""A config in virtual time, and what it leaves in a folder: metrics, summary, accuracy against time.

Whose accuracy counts at a moment: peers that are present at that moment, each by its latest test until then.
A peer that has left counts no more, whatever it knew; one that is back but was not tested since counts by the
test before it left. Curves, means and sweeps all follow this rule.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ...gossip.compress import Traffic
from ..config.needs import heed
from ..config.tables import Config
from ..results import RecordFile, Results, read_records, write_csv, write_json
from ..simulation import save_networks
from .learning import LearningSimulation, Reading
from .network import World

RULE = "peers that are there at the time, each by its latest test on its own task"
"""Whose accuracy counts, for captions."""
_MARKS = 100  # moments at which a curve is drawn

Test = tuple[float, int, float]
"""When, after how many rounds of the peer's own, and the accuracy."""
Presence = Mapping[str, Sequence[tuple[float, float]]]
"""Per peer when it came and when it left, in order; infinity if it did not leave."""


def simulate_in_time(
    config: Config,
    results: Results,
    source: str = "config",
    *,
    networks: bool = False,
    threads: int = 1,
    on_start: Callable[[float], None] = lambda seconds: None,
    on_test: Callable[[Reading], None] = lambda _: None,
    on_mean: Callable[[Mean], None] = lambda _: None,
) -> list[Path]:
    """Run a config with a [time] table.

    Leaves config.json, metrics.jsonl, presence.csv (who was there when, where peers come and go),
    summary.csv, accuracy.png / .svg, and traffic.csv: for each shared model the bytes of values that were
    sent, and what compression and skipped pushes saved. With `networks` every peer's network is left as
    safetensors too. Stopped by Ctrl-C, the files hold what there was until then; a config that cannot be
    run takes no folder.

    on_mean: called about a hundred times, and at the end, with what the peers that are there have.
    """
    tests: dict[str, list[Test]] = {}
    next_mean = 0.0

    def note(tested: Reading) -> None:
        nonlocal next_mean
        member = run.members[tested.peer]
        file.write(
            {
                "time": tested.time,
                "round": tested.round,
                "peer": member.name,
                "task": member.task,
                "accuracy": tested.metrics.accuracy,
                "loss": tested.metrics.mean_loss,
            }
        )
        row = (tested.time, tested.round, tested.metrics.accuracy)
        insort(tests.setdefault(member.name, []), row)
        on_test(tested)
        if tested.time >= next_mean:
            next_mean = tested.time + run.seconds / _MARKS
            on_mean(Mean.of(tests, presence, tested.time))

    heed(config, "virtual", source)
    # First, since it finds what is wrong with the config: until then no folder is taken.
    run = LearningSimulation(config, source, threads=threads, on_test=note)
    names = [member.name for member in run.members]
    presence = presence_of(run.world, names)
    with results.begun() as out:
        with RecordFile(out / "metrics.jsonl") as file:
            on_start(run.seconds)
            write_json(out / "config.json", config.model_dump(mode="json"))
            write_presence(out / "presence.csv", presence)
            try:
                run.run()
                on_mean(Mean.of(tests, presence, run.seconds))
            except KeyboardInterrupt:
                run.stop()
                if networks:
                    save_networks(run.members, out)
                raise
            finally:
                sizes = run.events.counted()
                written = [*summarise(out, config.name), write_traffic(out / "traffic.csv", sizes)]
        return [*written, *(save_networks(run.members, out) if networks else [])]


@dataclass(frozen=True)
class Mean:
    """The mean accuracy of those who count at a moment, and how many they are; NaN if nobody does."""

    time: float
    accuracy: float
    peers: int

    @classmethod
    def of(cls, tests: Mapping[str, Sequence[Test]], presence: Presence, time: float) -> Mean:
        """By the rule of `accuracies_at`."""
        counted = accuracies_at(time, tests, presence)
        return cls(time, fmean(counted.values()) if counted else math.nan, len(counted))


def write_traffic(path: Path, counted: Iterable[tuple[str, int, Traffic]]) -> Path:
    """A table of bytes that were sent, and what was saved and distorted, from a row for each model.

    Sizes are those of the values alone: headers and answers are left out.
    """
    header = ["model", "bytes", "plain_bytes", "skipped", "mean_distortion", "worst_distortion"]
    rows = [
        [name, size, size + each.saved, each.skipped, f"{each.mean_distortion:.4g}", f"{each.worst:.4g}"]
        for name, size, each in counted
    ]  # fmt: skip
    write_csv(path, header, rows)
    return path


def summarise(out: Path, title: str) -> list[Path]:
    """Draw and tabulate whatever metrics.jsonl and presence.csv hold; nothing if nobody was tested."""
    tests: dict[str, list[Test]] = {}
    tasks: dict[str, str] = {}
    for record in read_records(out / "metrics.jsonl"):
        row = (record["time"], record["round"], record["accuracy"])
        tests.setdefault(record["peer"], []).append(row)
        tasks[record["peer"]] = record["task"]
    if not tests:
        return []
    from ..study.figures import band, canvas, save  # matplotlib takes a second

    for rows in tests.values():
        rows.sort()
    presence = read_presence(out / "presence.csv")
    end = max(rows[-1][0] for rows in tests.values())
    mean, here = Mean.of(tests, presence, end), accuracies_at(end, tests, presence)
    table = out / "summary.csv"
    lines = [
        [p, tasks[p], tests[p][-1][1], f"{tests[p][-1][2]:.4f}", "yes" if p in here else "no"]
        for p in sorted(tests, key=lambda peer: (len(peer), peer))
    ]
    lines.append(["mean", "", "", f"{mean.accuracy:.4f}", f"{mean.peers}"])
    write_csv(table, ["peer", "task", "rounds", "accuracy", "there"], lines)
    figure, axes = canvas(
        f"{len(tests)} peers; line: mean, band: worst to best, of {RULE}; at the last test "
        f"{mean.accuracy:.3f}, the mean of {mean.peers}"
    )
    band(axes, curve(tests, presence))
    axes.set(title=title, xlabel="virtual time in seconds", ylabel="accuracy")
    return [table, *save(figure, out / "accuracy")]


def curve(
    tests: Mapping[str, Sequence[Test]], presence: Presence | None = None
) -> dict[Any, list[float]]:
    """At moments from the first test to the last, the accuracy of everybody who counts, if any do."""
    first = min(rows[0][0] for rows in tests.values())
    last = max(rows[-1][0] for rows in tests.values())
    accuracies: dict[Any, list[float]] = {}
    for mark in range(_MARKS + 1):
        time = last if mark == _MARKS else first + (last - first) * mark / _MARKS
        if here := accuracies_at(time, tests, presence or {}):
            accuracies[time] = list(here.values())
    return accuracies


# --- presence ---------------------------------------------------------------------------------------


def accuracies_at(
    time: float, tests: Mapping[str, Sequence[Test]], presence: Presence
) -> dict[str, float]:
    """The accuracy of every peer that counts at a moment. Tests of a peer are sorted by time.

    A peer without an entry in `presence` is there all the time; at the very moment of leaving it is not.
    """
    accuracies: dict[str, float] = {}
    for peer, rows in tests.items():
        place = bisect_right(rows, time, key=lambda row: row[0])
        stays = presence.get(peer, [(-math.inf, math.inf)])
        if place and any(start <= time < end for start, end in stays):
            accuracies[peer] = rows[place - 1][2]
    return accuracies


def presence_of(world: World, names: Sequence[str]) -> Presence:
    """When peers come and go in a world; empty if nobody does."""
    if not world.churns:
        return {}
    return {
        name: [(float(a), float(b)) for a, b in zip(starts, ends, strict=True) if a < math.inf]
        for name, starts, ends in zip(names, world.starts, world.ends, strict=True)
    }


def write_presence(path: Path, presence: Presence) -> None:
    """A table of who was there from when until when, without those who were there all the time."""
    rows = ([peer, start, end] for peer, stays in presence.items() for start, end in stays)
    write_csv(path, ["peer", "from", "until"], rows)


def read_presence(path: Path) -> Presence:
    """What `write_presence` wrote; empty if there is no such file."""
    presence: dict[str, list[tuple[float, float]]] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                stay = (float(row["from"]), float(row["until"]))
                presence.setdefault(row["peer"], []).append(stay)
    return presence
