"""What a comparison comes to: accuracy at equal rounds and at equal bytes, over clients and seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ..results import Record, write_json
from ..study import Frame, as_text, frame_of


@dataclass(frozen=True)
class Standing:
    """One method over its seeds.

    `accuracy` and `worst` (the worst decile) are means over seeds after the last round; `deviation` is
    the standard deviation of accuracy over seeds, None of a single one; `at_bytes` and `worst_at_bytes`
    are the same at the common budget, None for a bound.
    """

    method: str
    bound: bool
    seeds: int
    rounds: int
    accuracy: float
    deviation: float | None
    worst: float
    at_bytes: float | None
    worst_at_bytes: float | None
    bytes: int
    seconds: float


def worst_decile(accuracies: Sequence[float]) -> float:
    """The mean of the worst tenth of the clients, of one client at least."""
    count = math.ceil(len(accuracies) / 10)
    return float(np.mean(sorted(accuracies)[:count]))


def budget(records: Sequence[Record]) -> int | None:
    """The most bytes that every run which sends any has sent in the end; None if none does."""
    ends = [record["curve"][-1]["bytes"] for record in records if not record["bound"]]
    return min(ends, default=None)


def at(record: Record, limit: int) -> Record:
    """The last test of a run before it had sent more than `limit` bytes."""
    return [point for point in record["curve"] if point["bytes"] <= limit][-1]


def by_method(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Runs by method, in the order in which methods first occur."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record["method"], []).append(record)
    return found


def standings(records: Sequence[Record]) -> list[Standing]:
    """One entry per method, in the order in which they first occur."""
    limit = budget(records)
    found = []
    for method, runs in by_method(records).items():
        ends = [run["curve"][-1] for run in runs]
        means = [float(np.mean(end["accuracy"])) for end in ends]
        paid = None
        if limit is not None and not runs[0]["bound"]:
            paid = [at(run, limit)["accuracy"] for run in runs]
        found.append(
            Standing(
                method=method,
                bound=runs[0]["bound"],
                seeds=len(runs),
                rounds=min(end["round"] for end in ends),
                accuracy=float(np.mean(means)),
                deviation=float(np.std(means, ddof=1)) if len(means) > 1 else None,
                worst=float(np.mean([worst_decile(end["accuracy"]) for end in ends])),
                at_bytes=None if paid is None else float(np.mean([np.mean(p) for p in paid])),
                worst_at_bytes=None
                if paid is None
                else float(np.mean([worst_decile(p) for p in paid])),
                bytes=round(np.mean([end["bytes"] for end in ends])),
                seconds=float(np.mean([end["seconds"] for end in ends])),
            )
        )
    return found


def coverage(records: Sequence[Record], planned: int | None = None) -> str:
    """Over how many seeds a method's mean goes: `3 seeds`, or, of a comparison that was stopped, `2 to 3
    seeds; 31 of 39 runs`. planned: runs of the whole comparison; as many as there are if left out.
    """
    counts = [len({run["seed"] for run in runs}) for runs in by_method(records).values()]
    fewest, most = min(counts), max(counts)
    seeds = f"{most} seed{'s' * (most != 1)}"
    if fewest < most:
        seeds = f"{fewest} to {seeds}"
    missing = planned is not None and len(records) < planned
    return f"{seeds}; {len(records)} of {planned} runs" if missing else seeds


def write_report(
    records: Sequence[Record], out: Path, title: str, caption: str, planned: int | None = None
) -> list[Path]:
    """Write summary.json and draw comparison.png and .svg from the records; nothing if there are none.

    planned: runs of the whole comparison, where it may have been stopped.
    """
    if not records:
        return []
    from .picture import draw  # matplotlib takes a second

    summary = out / "summary.json"
    write_json(
        summary,
        {
            "name": title,
            "setting": caption,
            "budget": budget(records),
            "methods": [asdict(one) for one in standings(records)],
        },
    )
    return [summary, *draw(records, out / "comparison", title, caption, planned)]


def table(records: Sequence[Record]) -> dict[str, Frame]:
    """Return the same as a table, best first; bounds last."""
    limit = budget(records)
    paid = "equal bytes" if limit is None else f"at {limit / 1e6:.3g} MB"
    rows = [
        {
            "method": one.method + (" (bound)" if one.bound else ""),
            "seeds": one.seeds,
            "accuracy": one.accuracy,
            "± sd": one.deviation,
            "worst decile": one.worst,
            paid: one.at_bytes,
            f"worst decile {paid}": one.worst_at_bytes,
            "MB sent": one.bytes / 1e6 or None,
            "CPU s": one.seconds,
        }
        for one in sorted(standings(records), key=lambda s: (s.bound, -s.accuracy))
    ]
    three = ("accuracy", "± sd", "worst decile", paid, f"worst decile {paid}")
    formats = {**dict.fromkeys(three, ".3f"), "MB sent": ".2f", "CPU s": ".1f"}
    return {"summary": as_text(frame_of(rows), formats)}
