"""What all commands share: the terminal, how functions become commands, results' folders, and torch.

Help and mistakes should answer at once, so the modules of commands import what a command needs inside the
command: torch alone takes two seconds, matplotlib and scipy another.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from rich import box
from rich import progress as bars
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...peer import exit_on_interrupt
from ..errors import Stopped
from ..results import Results

if TYPE_CHECKING:
    from ..config.tables import Config

# --- the terminal -----------------------------------------------------------------------------------

WIDTH_WITHOUT_TERMINAL = 160
"""Width in characters of output to a file or a pipe, so that rows of tables do not wrap."""

FIRST_COLUMN_WIDTH = 16
"""On a narrow screen the first column of a table, which names the row, shrinks to this and not further."""

_NUMBER = re.compile(r"[-+]?(nan|inf|\d+\.?\d*(e[-+]?\d+)?)")

# Rich would turn `:boom:` in a name such as `mine:boom:` into a picture.
out = Console(highlight=False, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)
for _console in (out, err):
    if not _console.is_terminal and "COLUMNS" not in os.environ:
        _console.width = WIDTH_WITHOUT_TERMINAL


def say(text: str) -> None:
    """Print a line of a command's result as it is, brackets too; only the terminal wraps it."""
    out.print(text, soft_wrap=True, markup=False)


def warn(text: str) -> None:
    """Print a line for people on stderr, in the same way."""
    err.print(text, soft_wrap=True, markup=False)


def progress(unit: str) -> bars.Progress:
    """Return a progress bar: counts of a unit, the task's field `latest`, the time taken and left."""
    return bars.Progress(
        bars.SpinnerColumn(),
        "{task.description}",
        bars.BarColumn(bar_width=32),
        bars.MofNCompleteColumn(),
        unit,
        "{task.fields[latest]}",
        bars.TimeElapsedColumn(),
        "left",
        bars.TimeRemainingColumn(),
        console=err,
    )


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table of plain text; columns that hold only numbers are right-aligned."""
    shown = Table(
        title=escape(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD
    )
    for index, name in enumerate(header):
        cells = [str(row[index]) for row in rows]
        longest = max((len(line) for cell in cells for line in cell.split("\n")), default=0)
        shown.add_column(
            name,
            justify="right" if cells and all(map(_NUMBER.fullmatch, cells)) else "left",
            min_width=min(longest, FIRST_COLUMN_WIDTH) if index == 0 else None,
        )
    for row in rows:
        shown.add_row(*(escape(str(cell)) for cell in row))
    out.print(shown)


def note_defaults(path: Path, config: Config) -> None:
    """Tell the user if a config file sets no keys: it runs with all defaults, but may be the wrong file."""
    if not config.model_fields_set:
        warn(
            f"{path}: sets no keys, so the defaults are used: {config.peers} peers with network "
            f"{config.network.layout} on data set {config.data.set}, no model shared"
        )


def print_written(files: Sequence[Path]) -> None:
    """Print the path of each file that was written."""
    for file in files:
        say(f"wrote {file}")


# --- functions as commands --------------------------------------------------------------------------

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Out = Annotated[Path | None, typer.Option("--out", "-o")]
AtLeastOne = Annotated[int, typer.Option(min=1)]
AtLeastOneIfGiven = Annotated[int | None, typer.Option(min=1)]
YesOrNo = Annotated[bool, typer.Option()]
"""An option that can be negated: `--shrink` and `--no-shrink`."""

SHARED = {
    "show_settings": "Print every setting and where it comes from, and stop there.",
    "jobs": "Worker processes; one per core if left out.",
    "ca": "The authority that signed the broker's certificate.",
    "password_file": "A file with the password of the URL's user; else GOSSAMER_BROKER_PASSWORD is used.",
}
"""The help of options that several commands have."""

Command = Callable[..., None]


def command(name: str, of: typer.Typer = app) -> Callable[[Command], Command]:
    """Make a function a command: positional parameters are its arguments, keyword-only ones its options.

    What the help says of each stands below `Args:` in the docstring, or in SHARED. A keyword-only parameter
    whose type is a dataclass stands for its fields, each an option. Whatever else typer must know of an
    option, such as a second name, stands in the annotation: `Annotated[str, typer.Option("--input")]`.
    """

    def add(function: Command) -> Command:
        of.command(name, help=_described(function)[0])(with_options(function))
        return function

    return add


def with_options(function: Command) -> Command:
    """Return a function as typer wants it: its parameters are annotated, those of dataclasses taken apart."""
    parameters = list(_parameters(function))
    groups = {key: kind for key, kind in get_type_hints(function).items() if _is_group(kind)}

    def run(**given: Any) -> None:
        for key, kind in groups.items():
            given[key] = kind(**{each.name: given.pop(each.name) for each in fields(kind)})
        function(**given)

    run.__dict__["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _parameters(function: Callable[..., object]) -> Iterator[inspect.Parameter]:
    """A function's parameters as typer reads them, each with its help."""
    texts = SHARED | _described(function)[1]
    hints = get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters.values():
        kind, name = hints[parameter.name], parameter.name
        if _is_group(kind):
            yield from _parameters(kind)
            continue
        if get_origin(kind) is Annotated:
            kind, given = get_args(kind)
            info = copy(given)
        elif parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            info = typer.Argument()
        elif kind is bool:
            info = typer.Option(f"--{name.replace('_', '-')}")
        else:
            info = typer.Option()
        info.help = info.help or texts.get(name)
        yield parameter.replace(annotation=Annotated[kind, info])


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)


def _described(function: Callable[..., object]) -> tuple[str, dict[str, str]]:
    """Return what a docstring says of a command, and of each of its parameters."""
    text, _, rest = inspect.cleandoc(function.__doc__ or "").partition("Args:\n")
    entries = re.split(r"^    (\w+): ", rest, flags=re.MULTILINE)[1:]
    texts = (" ".join(entry.split()) for entry in entries[1::2])
    return text.strip(), dict(zip(entries[::2], texts, strict=True))


# --- what they compute with -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Output:
    """Options of commands that leave results.

    Args:
        out: An empty folder for results; a new one below results/ if left out.
        force: Replace the newest results, or those in --out, by this run's.
    """

    out: Out = None
    force: bool = False

    def results(self, default: Path | str, command: str) -> Results:
        """Where a command leaves its results: in the folder `out`, or in the next number below `default`."""
        exact = self.out is not None
        return Results(self.out or Path(default), command, exact=exact, force=self.force)


@contextmanager
def report_interruption(folder: Path) -> Iterator[None]:
    """A live swarm that is interrupted is over: its peers have left, and cannot go on another time."""
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(
            f"interrupted; records, networks and reports are kept in {folder}; the next run starts anew"
        ) from None


class Torch:
    """Torch as commands load it. threads: how many one of its products may use, as --threads says."""

    threads = 1


def load_torch() -> None:
    """Import torch, with the threads of --threads.

    It takes two seconds, in which Ctrl-C ends the process without a word. A command calls this when it begins
    to compute: help and the news that a file is missing should not wait for it.
    """
    with exit_on_interrupt():
        import torch
    torch.set_num_threads(Torch.threads)
