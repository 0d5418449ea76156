"""What commands show on a terminal: progress bars, tables, one-line errors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

if TYPE_CHECKING:
    from ..config.tables import Config

WIDE = 160
"""Columns where nobody looks on: in a file or a pipe, rows should stay on their lines."""

NAMES_WIDTH = 16
"""Columns that the names of a table's rows have at least, if they need them."""

# No emoji: a user's `mine:boom` followed by a colon is a name, not a picture.
out = Console(highlight=False, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)
for _console in (out, err):
    if not _console.is_terminal and "COLUMNS" not in os.environ:
        _console.width = WIDE


def progress(what: str) -> Progress:
    """A progress bar with counts, the latest accuracy, the time taken and the time left."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TextColumn(what),
        TextColumn("{task.fields[latest]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=err,
    )


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; numbers stand right."""
    shown = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for index, name in enumerate(header):
        numeric = bool(rows) and all(_is_number(str(row[index])) for row in rows)
        # What a row is called stays readable, however many numbers follow on a narrow screen.
        longest = max(
            (len(line) for row in rows for line in str(row[index]).split("\n")), default=0
        )
        shown.add_column(
            name,
            justify="right" if numeric else "left",
            min_width=min(longest, NAMES_WIDTH) if index == 0 else None,
        )
    for row in rows:
        shown.add_row(*(str(cell) for cell in row))
    out.print(shown)


def note_defaults(path: Path, config: Config) -> None:
    """Say so when a config file has no keys: it is an empty file, or a wrong one, that runs all the same."""
    if not config.model_fields_set:
        err.print(
            f"{path}: has no keys, so all are at their defaults: {config.peers} peers of "
            f"{config.network.layout} on {config.data.set}, nothing shared",
            soft_wrap=True,
        )


def wrote(files: Sequence[Path]) -> None:
    """Say where the results are."""
    for file in files:
        out.print(f"wrote {file}", soft_wrap=True)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
