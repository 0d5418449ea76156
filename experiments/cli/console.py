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

WIDTH_WITHOUT_TERMINAL = 160
"""Width in characters of output to a file or a pipe, so that rows of tables do not wrap."""

FIRST_COLUMN_WIDTH = 16
"""On a narrow screen the first column of a table, which names the row, shrinks to this and not further."""

# Rich would turn `:boom:` in a name such as `mine:boom:` into a picture.
out = Console(highlight=False, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)
for _console in (out, err):
    if not _console.is_terminal and "COLUMNS" not in os.environ:
        _console.width = WIDTH_WITHOUT_TERMINAL


def progress(unit: str) -> Progress:
    """Return a progress bar: counts of a unit, the task's field `latest`, the time taken and left."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TextColumn(unit),
        TextColumn("{task.fields[latest]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=err,
    )


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; columns that hold only numbers are right-aligned."""
    shown = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for index, name in enumerate(header):
        numeric = bool(rows) and all(_is_number(str(row[index])) for row in rows)
        longest = max(
            (len(line) for row in rows for line in str(row[index]).split("\n")), default=0
        )
        shown.add_column(
            name,
            justify="right" if numeric else "left",
            min_width=min(longest, FIRST_COLUMN_WIDTH) if index == 0 else None,
        )
    for row in rows:
        shown.add_row(*(str(cell) for cell in row))
    out.print(shown)


def note_defaults(path: Path, config: Config) -> None:
    """Tell the user if a config file sets no keys: it runs with all defaults, but may be the wrong file."""
    if not config.model_fields_set:
        err.print(
            f"{path}: sets no keys, so the defaults are used: {config.peers} peers with network "
            f"{config.network.layout} on data set {config.data.set}, no model shared",
            soft_wrap=True,
        )


def print_written(files: Sequence[Path]) -> None:
    """Print the path of each file that was written."""
    for file in files:
        out.print(f"wrote {file}", soft_wrap=True)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
