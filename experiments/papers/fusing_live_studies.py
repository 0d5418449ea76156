"""`gossamer paper newcomers` and `gossamer paper widths`: matching among live peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..cli import console
from ..results import Results, make_folder
from ..watch import broker_for, run_live
from . import fusing_newcomers as newcomers
from . import fusing_widths as widths


@dataclass(frozen=True)
class LiveStudy:
    """A study of live processes; it takes a minute or two and is run anew each time."""

    name: str
    section: str
    title: str
    run: Callable[[Path], list[Path]]


def _newcomers(out: Path) -> list[Path]:
    sizes = newcomers.Sizes()
    networks = newcomers.train_before(out / "networks", sizes)
    with broker_for(None) as broker:
        for kind in newcomers.KINDS:
            console.err.print(f"newcomers, matching {kind}: {newcomers.FOUNDERS} founders first …")
            newcomers.run_newcomers(kind, networks, out / kind, broker, sizes)
    files = newcomers.report(out)
    rows = []
    for kind in newcomers.KINDS:
        found = newcomers.read_joining(out / kind / "metrics.jsonl")
        for peer in sorted(found.first):
            own = found.own[peer]
            after = (found.first[peer], found.worst[peer], found.last[peer])
            ratio = f"{found.first[peer] / own:.2f}"
            rows.append((kind, peer, f"{own:.3f}", *(f"{value:.3f}" for value in after), ratio))
    header = ["matching", "newcomer", "own", "first averaged", "worst", "last", "first / own"]
    console.table("accuracy of newcomers that were trained apart", header, rows)
    return files


def _widths(out: Path) -> list[Path]:
    together, alone = widths.widths_config(), widths.widths_config(alone=True)
    make_folder(out / "alone")
    widths.run_alone(alone, out / "alone" / "metrics.jsonl")
    with broker_for(None) as broker:
        run_live(together, out / "fused", broker)
    files = widths.report(out)
    lines = [widths.curves(out / each / "metrics.jsonl") for each in ("alone", "fused")]
    rows = [
        (width, *(f"{line[width][max(line[width])]:.3f}" for line in lines)) for width in lines[0]
    ]
    console.table("accuracy at the end, mean by width", ["width", "alone", "together"], rows)
    return files


LIVE_STUDIES: dict[str, LiveStudy] = {
    study.name: study
    for study in (
        LiveStudy("newcomers", "live", "peers trained apart join, aligned or not", _newcomers),
        LiveStudy("widths", "live", "peers of three widths in one partial model", _widths),
    )
}


def paper_live(name: str, results: Results) -> None:
    """The command behind `gossamer paper NAME` for these."""
    with results.begun() as folder:
        console.wrote(LIVE_STUDIES[name].run(folder))
