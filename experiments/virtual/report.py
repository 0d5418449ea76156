"""A config in virtual time, and what it leaves in a folder: metrics, summary, accuracy against time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config import Config
from ..results import RecordFile, read_records, write_csv, write_json
from .learning import LearningSwarm, Reading

_MARKS = 100  # moments at which a curve is drawn


def simulate_in_time(
    config: Config,
    out: Path,
    source: str = "config",
    *,
    networks: bool = False,
    threads: int = 1,
    on_start: Callable[[float], None] = lambda seconds: None,
    on_test: Callable[[Reading], None] = lambda _: None,
) -> list[Path]:
    """Run a config with a [time] table.

    Leaves config.json, metrics.jsonl, summary.csv, accuracy.png / .svg, and traffic.csv: for each shared
    model the bytes of values that were sent, and what compression and skipped pushes saved. Stopped by
    Ctrl-C, the files hold what there was until then.
    """
    with RecordFile(out / "metrics.jsonl") as file:

        def note(tested: Reading) -> None:
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
            on_test(tested)

        swarm = LearningSwarm(config, source, threads=threads, on_test=note)
        on_start(swarm.seconds)
        write_json(out / "config.json", config.model_dump(mode="json"))
        try:
            swarm.run()
        finally:
            written = [*summarise(out, config.name), _traffic(swarm, out / "traffic.csv")]
    if networks:
        for member in swarm.members:
            written.append(out / f"peer-{member.name}.safetensors")
            member.network.save(written[-1])
    return written


def _traffic(swarm: LearningSwarm, path: Path) -> Path:
    header = ["model", "bytes", "plain_bytes", "skipped", "mean_distortion", "worst_distortion"]
    rows = []
    for lane in swarm.swarm.lanes:
        traffic, name = lane.traffic, lane.shared.name
        distortion = f"{traffic.mean_distortion:.4g}", f"{traffic.worst:.4g}"
        rows.append([name, lane.bytes, lane.bytes + traffic.saved, traffic.skipped, *distortion])
    write_csv(path, header, rows)
    return path


def summarise(out: Path, title: str) -> list[Path]:
    """Draw and tabulate whatever metrics.jsonl holds; nothing if it is empty."""
    tests: dict[str, list[tuple[float, int, float]]] = {}
    tasks: dict[str, str] = {}
    for record in read_records(out / "metrics.jsonl"):
        row = (record["time"], record["round"], record["accuracy"])
        tests.setdefault(record["peer"], []).append(row)
        tasks[record["peer"]] = record["task"]
    if not tests:
        return []
    from ..figures import band, canvas, save  # matplotlib takes a second

    for rows in tests.values():
        rows.sort()
    table = out / "summary.csv"
    by_number = sorted(tests, key=lambda peer: (len(peer), peer))
    lines = ([p, tasks[p], tests[p][-1][1], f"{tests[p][-1][2]:.4f}"] for p in by_number)
    write_csv(table, ["peer", "task", "rounds", "accuracy"], lines)
    figure, axes = canvas(
        f"{len(tests)} peers; line: mean, band: worst to best peer, each by its latest test on its own task"
    )
    band(axes, curve(tests))
    axes.set(title=title, xlabel="virtual time in seconds", ylabel="accuracy")
    return [table, *save(figure, out / "accuracy")]


def curve(tests: dict[str, list[tuple[float, int, float]]]) -> dict[Any, list[float]]:
    """At moments from the first test to the last, the latest accuracy of every peer tested by then."""
    first = min(rows[0][0] for rows in tests.values())
    last = max(rows[-1][0] for rows in tests.values())
    found: dict[Any, list[float]] = {}
    for mark in range(_MARKS + 1):
        time = last if mark == _MARKS else first + (last - first) * mark / _MARKS
        places = ((rows, bisect_right(rows, time, key=lambda r: r[0])) for rows in tests.values())
        found[time] = [rows[place - 1][2] for rows, place in places if place]
    return found
