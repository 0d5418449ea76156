"""The commands that show swarms in a browser: `gossamer report` and `gossamer watch`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError
from ..results import find_run, require_folder
from . import console
from .console import command
from .live import ConnectionOptions, Port

if TYPE_CHECKING:
    from ..page import Source


def require_bokeh(find: Callable[[str], object | None] = find_spec) -> None:
    """Raise ConfigError, which names the extra, if Bokeh is not installed. find: finds a module by name."""
    if find("bokeh") is None:
        raise ConfigError(
            "pages and reports are drawn by Bokeh, which is not installed: pip install 'gossamer[page]'"
        )


@command("report")
def report_command(
    results: list[Path],
    *,
    out: Annotated[Path | None, typer.Option("--out", "-o")] = None,
) -> None:
    """Make one HTML file of results: curves, tables, graph, events, config. It needs no network to open.

    Takes what simulate, swarm, demo, sweep, compare, paper and study have written; several runs are shown
    side by side, with what differs between them.

    Args:
        results: Folders of results, such as results/digits (its latest run) or results/digits/001.
        out: The file to write; if left out, report.html in the folder of the results, or, for several
            folders, in the working folder.
    """
    require_bokeh()
    if out is None:
        out = (find_run(results[0]) if len(results) == 1 else Path()) / "report.html"
    elif out.is_dir():
        raise ConfigError(f"--out {out}: is a folder; name a file, such as {out / 'report.html'}")
    require_folder(out.parent)
    from ..page import write_report

    for problem in write_report(results, out):
        console.warn(problem)
    console.print_written([out])


@command("watch")
def watch_command(
    what: str,
    swarm: str | None = None,
    *,
    host: str = "127.0.0.1",
    port: Port = 0,
    connection: ConnectionOptions,
) -> None:
    """Show a swarm in the browser: its graph, curves, peers and events. It only reads.

    gossamer watch mqtts://user@broker:8883 garden shows a running swarm; gossamer watch results/garden plays
    a finished run back. Prints the page's address and runs until Ctrl-C.

    Args:
        what: The address of a broker, or a folder of results.
        swarm: The swarm's name, if a broker is named.
        host: The address to serve the page on. On another one than this machine's loopback, the page's
            address has a secret token, without which nothing is answered.
        port: The port to serve the page on; 0 chooses a free one.
    """
    require_bokeh()
    if "://" in what:
        raise ConfigError(f"{what}: running swarms cannot be watched yet; name a folder of results")
    if swarm is not None:
        raise ConfigError(
            f"{swarm}: a folder of results is played back without the name of a swarm"
        )
    from ..page import PlaybackSource, RunFolder, read_folders

    first, *others = read_folders([Path(what)])
    if not isinstance(first, RunFolder):
        raise ConfigError(
            f"{what}: holds the results of many runs, which cannot be played back; gossamer report {what} "
            "makes a page of them"
        )
    if others:
        console.warn(f"{what}: holds {1 + len(others)} swarms; this is {first.path}")
    _serve(lambda: PlaybackSource(first), host, port)


def _serve(make_source: Callable[[], Source], host: str, port: int) -> None:
    import asyncio
    import secrets

    from ..page import is_loopback, serve_page

    token = None if is_loopback(host) else secrets.token_urlsafe(16)
    show = serve_page(
        make_source,
        host=host,
        port=port,
        token=token,
        on_ready=lambda url: console.say(f"page: {url}"),
    )
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(show)
