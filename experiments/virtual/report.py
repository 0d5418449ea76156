"""A config in virtual time, and what it leaves in a folder: metrics, summary, accuracy against time."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ..config.needs import heed
from ..config.tables import Config
from ..results import RecordFile, Results, read_records, write_csv, write_json
from ..simulation import save_networks
from .learning import LearningSwarm, Reading
from .standing import RULE, Lives, Test, lives_of, read_lives, standing, write_lives
from .wire import write_traffic

_MARKS = 100  # moments at which a curve is drawn


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
        member = swarm.members[tested.peer]
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
            next_mean = tested.time + swarm.seconds / _MARKS
            on_mean(Mean.of(tests, lives, tested.time))

    heed(config, "virtual", source)
    # First, since it finds what is wrong with the config: until then no folder is taken.
    swarm = LearningSwarm(config, source, threads=threads, on_test=note)
    names = [member.name for member in swarm.members]
    lives = lives_of(swarm.world, names)
    with results.begun() as out:
        with RecordFile(out / "metrics.jsonl") as file:
            on_start(swarm.seconds)
            write_json(out / "config.json", config.model_dump(mode="json"))
            write_lives(out / "presence.csv", lives)
            try:
                swarm.run()
                on_mean(Mean.of(tests, lives, swarm.seconds))
            except KeyboardInterrupt:
                swarm.stop()
                if networks:
                    save_networks(swarm.members, out)
                raise
            finally:
                written = [*summarise(out, config.name), _traffic(swarm, out / "traffic.csv")]
        return [*written, *(save_networks(swarm.members, out) if networks else [])]


@dataclass(frozen=True)
class Mean:
    """The mean accuracy of those who count at a moment, and how many they are; NaN if nobody does."""

    time: float
    accuracy: float
    peers: int

    @classmethod
    def of(cls, tests: Mapping[str, Sequence[Test]], lives: Lives, time: float) -> Mean:
        """By the rule of `standing`."""
        found = standing(tests, lives, time)
        return cls(time, fmean(found.values()) if found else math.nan, len(found))


def _traffic(swarm: LearningSwarm, path: Path) -> Path:
    return write_traffic(
        path, ((lane.shared.name, lane.bytes, lane.traffic) for lane in swarm.swarm.lanes)
    )


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
    lives = read_lives(out / "presence.csv")
    end = max(rows[-1][0] for rows in tests.values())
    mean, here = Mean.of(tests, lives, end), standing(tests, lives, end)
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
    band(axes, curve(tests, lives))
    axes.set(title=title, xlabel="virtual time in seconds", ylabel="accuracy")
    return [table, *save(figure, out / "accuracy")]


def curve(
    tests: Mapping[str, Sequence[Test]], lives: Lives | None = None
) -> dict[Any, list[float]]:
    """At moments from the first test to the last, the accuracy of everybody who counts, if any do."""
    first = min(rows[0][0] for rows in tests.values())
    last = max(rows[-1][0] for rows in tests.values())
    found: dict[Any, list[float]] = {}
    for mark in range(_MARKS + 1):
        time = last if mark == _MARKS else first + (last - first) * mark / _MARKS
        if here := standing(tests, lives or {}, time):
            found[time] = list(here.values())
    return found
