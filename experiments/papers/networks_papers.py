"""`gossamer paper networks-cifar` and `gossamer paper networks-hapt`: what is run, and the command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ..cli import console
from ..config.tables import ConfigError
from ..results import Results
from ..study.sweep_run import open_runs
from .networks_study import Cell, Scheme, Setting, run_cells

LOCAL = Scheme("local", 0.0)
FULL = Scheme("full averaging", 1.0, "shared", buffers="average")
FEDPER = Scheme("FedPer", 1.0)
"""A shared backbone under outputs of each peer's own."""
FEDBN = Scheme("FedBN", 1.0, "shared", buffers="local")
PARTIAL = Scheme("partial 0.8", 0.8)
APART = ", apart"
SCHEMES = (
    LOCAL, FULL, FEDPER, FEDBN, PARTIAL,
    Scheme("partial 0.5", 0.5),
    Scheme("partial 0.8 + outputs", 0.8, "shared"),
    replace(FEDPER, name=FEDPER.name + APART, start="apart"),
    replace(PARTIAL, name=PARTIAL.name + APART, start="apart"),
)  # fmt: skip
"""Statistics of batch norm are averaged where everything is, and taken anew from a peer's samples where it
has cells of its own: on the built-in digits each did better so than the other way."""
REFERENCES = (LOCAL.name, FULL.name, FEDPER.name)
"""What differences are taken to."""


@dataclass(frozen=True)
class NetworksStudy:
    """A study: one setting for every network, full and quick."""

    name: str
    section: str
    title: str
    full: Mapping[str, Setting]
    quick: Mapping[str, Setting]
    seeds: int = 3

    def cells(self, quick: bool, seeds: int) -> list[Cell]:
        """All runs; FedBN only where there is a norm."""
        return [
            Cell(line, setting, scheme, seed)
            for line, setting in (self.quick if quick else self.full).items()
            for scheme in SCHEMES
            for seed in range(seeds)
            if scheme is not FEDBN or setting.normed
        ]


_DIGITS = {"samples": 60, "test": 360, "rounds": 15, "test_every": 5, "stretch": 100, "batch": 20}
_CNN, _LSTM, _CNN1D = "small CNN, batch norm", "LSTM", "1-D CNN, batch norm"

NETWORKS_STUDIES: Mapping[str, NetworksStudy] = MappingProxyType(
    {
        study.name: study
        for study in (
            NetworksStudy(
                "networks-cifar", "003, other networks", "Partial sharing of a small CNN, CIFAR-10",
                full={
                    _CNN: Setting(
                        "cifar10", "small-cnn", "images",
                        {"widths": (8, 16), "hidden": 64, "norm": True},
                        samples=500, test=800, rounds=15, test_every=5, stretch=250, batch=25,
                    ),
                },
                quick={
                    _CNN: Setting(
                        "digits", "small-cnn", "images",
                        {"widths": (8, 16), "hidden": 32, "norm": True}, **_DIGITS,
                    ),
                },
            ),
            NetworksStudy(
                "networks-hapt", "003, other networks", "Partial sharing of an LSTM and a 1-D CNN, HAPT",
                full={
                    _LSTM: Setting(
                        "hapt-raw", "lstm", "series", {"hidden": 32}, peers=16,
                        samples=40, test=50, rounds=20, test_every=5, stretch=80, batch=20, rate=0.5,
                    ),
                    _CNN1D: Setting(
                        "hapt-raw", "cnn1d", "channels", {"widths": (16, 32)}, peers=16,
                        samples=40, test=50, rounds=20, test_every=5, stretch=80, batch=20,
                    ),
                },
                quick={
                    _LSTM: Setting("digits", "lstm", "series", {"hidden": 32}, rate=0.5, **_DIGITS),
                    _CNN1D: Setting(
                        "digits", "cnn1d", "channels", {"widths": (16, 32), "kernel": 3}, **_DIGITS
                    ),
                },
            ),
        )
    }
)  # fmt: skip


def paper_networks(
    name: str,
    *,
    quick: bool,
    runs: int | None,
    jobs: int | None,
    only: Sequence[str] | None,
    results: Results,
) -> None:
    """The command behind `gossamer paper NAME` for these; stopped, it goes on where it was."""
    from .networks_report import report

    study = NETWORKS_STUDIES[name]
    cells = study.cells(quick, runs or study.seeds)
    known = list(dict.fromkeys(cell.scheme.name for cell in cells))
    if unknown := [line for line in only or () if line not in known]:
        raise ConfigError(
            f"{name} has no line {unknown[0]!r}; lines are {', '.join(map(repr, known))}"
        )
    cells = [cell for cell in cells if not only or cell.scheme.name in only]
    with open_runs(results, cells) as (folder, grid):
        try:
            with console.progress("runs") as bar:
                task = bar.add_task(name, total=None, latest="")
                grid.go(
                    run_cells,
                    jobs=jobs,
                    on_start=lambda done, total: bar.update(task, completed=done, total=total),
                    on_record=lambda record: bar.update(
                        task, advance=1, latest=f"{record['scheme']}: {record['own']:.3f}"
                    ),
                )
        finally:
            if records := grid.records():
                tables, files = report(folder, study.title, cells, records)
                for title, header, rows in tables:
                    console.table(title, header, rows)
                console.wrote([folder / "runs.jsonl", *files])
