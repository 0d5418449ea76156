"""`gossamer paper multitask`: MOCHA, separate and pooled linear models by samples per subject."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..federated import mocha
from ..results import Record, RecordFile, read_records, write_csv
from ..study.figures import Line, draw_lines

SAMPLES = (10, 30, 70)
FIRST = 10
"""The first draw. Settings were tried out on those before, by their test samples: they prove nothing."""
HEADER = ["method", "samples", "accuracy", "worst subject", "best in", "F fell at every step"]


def run_multitask(
    out: Path, seeds: int, on_record: Callable[[Record], None] = lambda _: None
) -> tuple[list[list[str]], list[Path]]:
    """Run every method on every seed and number of samples; returns the table's rows and the files."""
    people = mocha.subjects()
    with RecordFile(out / "runs.jsonl") as file:
        for seed in range(FIRST, FIRST + seeds):
            for samples in SAMPLES:
                data = mocha.split(people, samples, seed)
                for name in mocha.METHODS:
                    found = mocha.run(name, data, seed)
                    record: Record = {
                        "data": people.name, "subjects": len(people.tasks), "seed": seed,
                        "samples": samples, "method": name, "accuracy": float(np.mean(found.accuracy)),
                        "by_subject": found.accuracy, "strength": found.strength,
                        "objectives": found.objectives,
                    }  # fmt: skip
                    file.write(record)
                    on_record(record)
    return report(out)


def report(out: Path) -> tuple[list[list[str]], list[Path]]:
    """The table and the picture of whatever runs.jsonl holds."""
    records = list(read_records(out / "runs.jsonl"))
    rows, lines = [], []
    for place, name in enumerate(mocha.METHODS):
        means, lows, highs = [], [], []
        for samples in SAMPLES:
            mine = _select(records, name, samples)
            found = [r["accuracy"] for r in mine]
            means.append(float(np.mean(found)))
            lows.append(min(found))
            highs.append(max(found))
            wins = sum(_wins(records, r) for r in mine)
            fell = all(np.diff(r["objectives"]).max() <= 1e-9 * r["objectives"][0] for r in mine)
            worst = float(np.mean([min(r["by_subject"]) for r in mine]))
            rows.append(
                [
                    name, str(samples), f"{means[-1]:.3f}", f"{worst:.3f}",
                    f"{wins} of {len(mine)}", "yes" if fell else "no",
                ]
            )  # fmt: skip
        beside = [
            samples + 0.8 * (place - 1) for samples in SAMPLES
        ]  # so that bars do not hide bars
        lines.append(Line(name, beside, means, lows, highs))
    write_csv(out / "summary.csv", HEADER, rows)
    first = records[0]
    what = (
        "sitting against standing, 100 spectral features of a phone's sensors, a task per person"
        if first["data"] == mocha.SENSORS
        else "made-up tasks of three kinds, for want of the sensor data (set GOSSAMER_DATA)"
    )
    draws = len({r["seed"] for r in records})
    files = draw_lines(
        out / "figure", lines,
        title="One linear model each, one for all, or related ones",
        x_label="training samples per subject", y_label="accuracy, mean over subjects",
        caption=(
            f"001, federated multi-task learning: {first['subjects']} subjects, {what}. Hinge loss; "
            f"regularisation chosen on held-back training samples; mean of {draws} draws, bars: lowest and "
            "highest. A third of MOCHA's nodes are stragglers that do 0, ¼ or ½ of an epoch in a round."
        ),
    )  # fmt: skip
    return [HEADER, *rows], [out / "summary.csv", *files]


def _select(records: list[Record], method: str, samples: int) -> list[Record]:
    return [r for r in records if r["method"] == method and r["samples"] == samples]


def _wins(records: list[Record], one: Record) -> bool:
    same = [r for r in records if (r["seed"], r["samples"]) == (one["seed"], one["samples"])]
    return one["accuracy"] == max(r["accuracy"] for r in same)
