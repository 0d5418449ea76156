"""Shared by all commands: printing to the terminal, turning functions into commands, output options, torch.

Modules of commands import slow packages only inside their commands, so that help and errors about the command
line are printed at once: importing torch takes two seconds, matplotlib and scipy another second.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

import typer
from rich import box
from rich import progress as bars
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

from gossamer import __version__
from gossamer.errors import GossamerError

from ...peer import exit_on_interrupt
from ..errors import Stopped
from ..results import Record, Results

if TYPE_CHECKING:
    from ..config.tables import Config

# --- the terminal -----------------------------------------------------------------------------------

WIDTH_WITHOUT_TERMINAL = 160
"""Width in characters of output to a file or a pipe, so that rows of tables do not wrap."""

FIRST_COLUMN_WIDTH = 16
"""The least width of a table's first column, which names the row, on a narrow terminal."""

REPORT_AFTER = 30.0
"""Seconds that a run must have taken for `leave_report` to write a page of it without being asked."""
REPORT_FILE = "report.html"

_NUMBER = re.compile(r"[-+]?(nan|inf|\d+\.?\d*(e[-+]?\d+)?)")

# Without emoji=False, rich would replace `:boom:` in a name such as `mine:boom:`.
out = Console(highlight=False, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)
for _console in (out, err):
    if not _console.is_terminal and "COLUMNS" not in os.environ:
        _console.width = WIDTH_WITHOUT_TERMINAL


def say(text: str) -> None:
    """Print a line of a command's result to stdout, without rich's markup and line breaks."""
    out.print(text, soft_wrap=True, markup=False)


def warn(text: str) -> None:
    """Print a warning or a note to stderr, without rich's markup and line breaks."""
    Invocation.warnings.append(text)
    err.print(text, soft_wrap=True, markup=False)


def progress(unit: str) -> bars.Progress:
    """Return a progress bar on stderr with a count, the task's field `latest`, elapsed and remaining time.

    unit: what is counted, as in "rounds".
    """
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
    rich_table = Table(
        title=escape(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD
    )
    for index, name in enumerate(header):
        texts = [str(row[index]) for row in rows]
        longest = max((len(line) for text in texts for line in text.split("\n")), default=0)
        rich_table.add_column(
            name,
            justify="right" if texts and all(map(_NUMBER.fullmatch, texts)) else "left",
            min_width=min(longest, FIRST_COLUMN_WIDTH) if index == 0 else None,
        )
    for row in rows:
        rich_table.add_row(*(escape(str(value)) for value in row))
    out.print(rich_table)


def note_defaults(path: Path, config: Config) -> None:
    """Print a note if a config file sets no keys: it is valid, but may be the wrong file."""
    if not config.model_fields_set:
        warn(
            f"{path}: sets no keys, so the defaults are used: {config.peers} peers with network "
            f"{config.network.layout} on data set {config.data.set}, no model shared"
        )


def print_written(files: Sequence[Path]) -> None:
    """Print the path of each file that was written."""
    for file in files:
        say(f"wrote {file}")


def leave_report(
    folder: Path, seconds: float | None = None, find: Callable[[str], object] = find_spec
) -> None:
    """Write a page of a finished run's results, or print the command that writes it.

    Writing one takes three seconds and 2 MB, so only runs of at least REPORT_AFTER seconds get one.

    seconds: the run's duration; if left out, the time since the command began.
    find: finds out whether Bokeh is installed.
    """
    seconds = Invocation.elapsed() if seconds is None else seconds
    has_bokeh = find("bokeh") is not None
    if seconds < REPORT_AFTER or not has_bokeh:
        install = "" if has_bokeh else "pip install 'gossamer[page]', then "
        say(f"a page of these results: {install}gossamer report {folder}")
        return
    from ..page import write_report

    try:
        problems = write_report([folder], folder / REPORT_FILE)
    except GossamerError as error:  # the results are there all the same
        warn(f"no page of these results: {error}")
        return
    for problem in problems:
        warn(problem)
    print_written([folder / REPORT_FILE])


# --- functions as commands --------------------------------------------------------------------------


def _with_short_types(params: list[Any]) -> list[Any]:
    """Make help list flags without `<bool>`, and repeatable options as `<str>`, not `<list[str]>`."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
        elif getattr(param, "multiple", False):
            param.metavar = "<str>"
    return params


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _with_short_types(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _with_short_types(super().get_params(ctx))


def command_group(**settings: Any) -> typer.Typer:
    """Return a new group of commands; settings: those of typer.Typer."""
    names = {"help_option_names": ["-h", "--help"]}
    return typer.Typer(cls=_Group, context_settings=names, **settings)


app = command_group(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _port(text: str) -> int:
    """Return a port; typer's own check of a range would fill a third of the help's lines with it."""
    if not str(text).isdecimal() or int(text) > LAST_PORT:
        raise typer.BadParameter(f"{text} is not a port, 0 to {LAST_PORT}")
    return int(text)


LAST_PORT = 65535
Port = Annotated[int, typer.Option(parser=_port, metavar="PORT")]
PortIfGiven = Annotated[int | None, typer.Option(parser=_port, metavar="PORT")]
Out = Annotated[Path | None, typer.Option("--out", "-o")]
AtLeastOne = Annotated[int, typer.Option(min=1, metavar="N")]
AtLeastOneIfGiven = Annotated[int | None, typer.Option(min=1, metavar="N")]
Seed = Annotated[int, typer.Option(min=0, metavar="N")]
YesOrNo = Annotated[bool, typer.Option()]
"""An option that can be negated: `--shrink` and `--no-shrink`."""

COMMON_HELP = {
    "show_settings": "Print every setting and where its value comes from, and exit without running.",
    "watch": "Show the swarm in the browser while it runs, at the address that is printed.",
    "on": "Where to compute: local:4 (four processes on this machine), dask:tcp://host:8786 (the workers of "
    "a Dask scheduler) or ray:auto (a Ray cluster); one process per core of this machine if left out.",
}
"""The help of options that several commands have, by the name of the parameter."""

Command = Callable[..., None]


def command(
    name: str, of: typer.Typer = app, *, slow: bool = False
) -> Callable[[Command], Command]:
    """Make a function a command: positional parameters become arguments, keyword-only ones options.

    The help of each parameter is taken from `Args:` in the docstring, or from COMMON_HELP. A keyword-only
    parameter whose type is a dataclass is replaced by one option for each field. An option with another
    name is annotated with it: `Annotated[str, typer.Option("--input")]`.

    of: the group to which the command is added.
    slow: whether seconds pass before the command's first output; it then prints at once that it has begun.
    """

    def add(function: Command) -> Command:
        def begin() -> None:
            if err.is_terminal:
                err.print(f"{name}: loading …", style="dim")

        run = with_options(function, begin if slow else None)
        of.command(name, cls=_Command, help=command_help(function))(run)
        return function

    return add


def command_help(function: Command) -> str:
    """Return the help of a command: its docstring without the parameters."""
    return help_text(_parse_docstring(function)[0])


def help_text(text: str) -> str:
    """Return a text for typer: paragraphs in one line, for the terminal to wrap; [brackets] escaped."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    is_prose = ["\n " not in text and "\n-" not in text for text in paragraphs]
    lines = (
        text.replace("\n", " ") if prose else text
        for text, prose in zip(paragraphs, is_prose, strict=True)
    )
    return escape("\n\n".join(lines))


def with_options(function: Command, begin: Callable[[], None] | None = None) -> Command:
    """Return a function for typer: its parameters have typer's annotations, and dataclasses are replaced by
    one parameter for each field.

    begin: called before the function.
    """
    parameters = list(_parameters(function))
    groups = {name: hint for name, hint in get_type_hints(function).items() if _is_group(hint)}

    def run(**values: Any) -> None:
        if begin is not None:
            begin()
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        function(**values)

    run.__dict__["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameters(function: Callable[..., object]) -> Iterator[inspect.Parameter]:
    """Yield a function's parameters with typer's annotations, each with its help."""
    texts = COMMON_HELP | _parse_docstring(function)[1]
    hints = get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters.values():
        hint, name = hints[parameter.name], parameter.name
        if hint is typer.Context:
            yield parameter.replace(annotation=hint)
            continue
        if _is_group(hint):
            yield from _parameters(hint)
            continue
        if get_origin(hint) is Annotated:
            hint, shared_info = get_args(hint)
            info = copy(shared_info)
        elif parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            info = typer.Argument()
        elif hint is bool:
            info = typer.Option(f"--{name.replace('_', '-')}")
        else:
            info = typer.Option()
        info.help = help_text(info.help or texts.get(name) or "") or None
        yield parameter.replace(annotation=Annotated[hint, info])


def _is_group(hint: Any) -> bool:
    """Return whether a type hint is a dataclass: a group of options."""
    return isinstance(hint, type) and is_dataclass(hint)


def _parse_docstring(function: Callable[..., object]) -> tuple[str, dict[str, str]]:
    """Return the text of a docstring before `Args:`, and the text of each parameter."""
    text, _, rest = inspect.cleandoc(function.__doc__ or "").partition("Args:\n")
    entries = re.split(r"^    (\w+): ", rest, flags=re.MULTILINE)[1:]
    texts = (" ".join(entry.split()) for entry in entries[1::2])
    return text.strip(), dict(zip(entries[::2], texts, strict=True))


class Invocation:
    """The command that this process runs: its arguments, the time at which it began, and its warnings."""

    arguments: ClassVar[list[str]] = []
    warnings: ClassVar[list[str]] = []
    started: ClassVar[str] = ""

    @classmethod
    def begin(cls, arguments: Sequence[str]) -> None:
        """Record a new command; tests run several commands in one process."""
        # Results are passed on to others, so they must not contain a broker's password.
        cls.arguments = [re.sub(r"(://[^:/@]*):[^/]*@", r"\1@", text) for text in arguments]
        cls.warnings, cls.started = [], _utc_now()

    @classmethod
    def elapsed(cls) -> float:
        """Return the seconds since the command began."""
        began = datetime.fromisoformat(cls.started or _utc_now())
        return (datetime.now(UTC) - began).total_seconds()

    @classmethod
    def details(cls) -> Record:
        """Return what a run's folder tells about the command: arguments, warnings, times and versions."""
        import platform
        from importlib.metadata import version

        packages = ("torch", "numpy", "networkx")
        return {
            "arguments": cls.arguments, "started": cls.started, "written": _utc_now(),
            "warnings": list(cls.warnings),
            "versions": {"gossamer": __version__, "python": platform.python_version()}
            | {name: version(name) for name in packages},
        }  # fmt: skip


def _utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# --- output options and torch -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Output:
    """Options of commands that write results.

    Args:
        out: An empty or new folder for the results; if left out, a new one below results/.
        force: Replace the results in --out, or, without --out, the newest results.
    """

    out: Out = None
    force: bool = False

    def results(self, default: Path | str, command: str) -> Results:
        """Return the results folder of a command: `out`, or the next numbered folder in `default`."""
        exact = self.out is not None
        return Results(
            self.out or Path(default),
            command,
            exact=exact,
            force=self.force,
            details=Invocation.details,
        )


@contextmanager
def report_interruption(folder: Path) -> Iterator[None]:
    """Turn Ctrl-C into `Stopped`, with a message for live swarms, which cannot be resumed."""
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(
            f"interrupted; records, networks and reports are kept in {folder}; the next run starts anew"
        ) from None


class Torch:
    """How commands use torch."""

    threads = 1
    """The value of --threads: how many threads torch may use."""


def load_torch() -> None:
    """Import torch, and let it use as many threads as --threads says.

    This takes two seconds, during which Ctrl-C ends the process silently. Commands call it after they have
    checked their input, so that help and errors are printed at once.
    """
    with exit_on_interrupt():
        import torch
    torch.set_num_threads(Torch.threads)


# --- named metrics in tables --------------------------------------------------------------------------

MAX_METRIC_COLUMNS = 4
"""The most named metrics that a table of peers has columns for; files and pages have all."""


def metric_columns(metrics: Iterable[Mapping[str, float | None]]) -> list[str]:
    """Return the names of the metrics that peers have, as many as a table has columns for."""
    return sorted({name for peer_metrics in metrics for name in peer_metrics})[:MAX_METRIC_COLUMNS]


def metric_cells(metrics: Mapping[str, float | None], names: Iterable[str]) -> list[str]:
    """Return a peer's values of these metrics; empty text for one that it does not have."""
    cells = []
    for name in names:
        value = metrics.get(name)
        cells.append("" if name not in metrics else f"{nan if value is None else value:.3f}")
    return cells
