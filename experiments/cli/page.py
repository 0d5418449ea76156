"""The commands that show swarms in a browser: `gossamer report`, `gossamer watch` and `gossamer lab`."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError
from ..results import find_run, require_folder
from . import console
from .console import command
from .live import PASSWORD_VARIABLE, ConnectionOptions, Port

if TYPE_CHECKING:
    from ...peer import BrokerAddress
    from ..page import Source


def require_bokeh(find: Callable[[str], object | None] = find_spec) -> None:
    """Raise ConfigError, which names the extra, if Bokeh is not installed. find: finds a module by name."""
    if find("bokeh") is None:
        raise ConfigError(
            "pages and reports are drawn by Bokeh, which is not installed: pip install 'gossamer[page]'"
        )


@command("report", slow=True)
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
        out = (find_run(results[0]) if len(results) == 1 else Path()) / console.REPORT_FILE
    elif out.is_dir():
        raise ConfigError(f"--out {out}: is a folder; name a file, such as {out / 'report.html'}")
    require_folder(out.parent)
    from ..page import write_report

    for problem in write_report(results, out):
        console.warn(problem)
    console.print_written([out])


@command("watch", slow=True)
def watch_command(
    what: str,
    swarm: str | None = None,
    *,
    host: str = "127.0.0.1",
    port: Port = 0,
    owner: str | None = None,
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
        owner: The public key of the swarm's owner, gossamer-ed25519:…, to check who is a member.
    """
    require_bokeh()
    if "://" in what:
        if swarm is None:
            raise ConfigError(f"gossamer watch {what}: name the swarm too, as in gossamer join")
        _watch_broker(what, swarm, connection, owner, host, port)
        return
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
    _run(_page(lambda: PlaybackSource(first), host, port))


@command("lab", slow=True)
def lab_command(
    *,
    host: str = "127.0.0.1",
    port: Port = 0,
    out: Annotated[Path, typer.Option("--out", "-o")] = Path("results"),
) -> None:
    """Try graphs and swarms in the browser: draw two, see how fast they average, simulate them side by side.

    Prints the page's address and runs until Ctrl-C. What is tried can be downloaded as a config that
    gossamer simulate and gossamer swarm take.

    Args:
        host: The address to serve the page on. On another one than this machine's loopback, the page's
            address has a secret token, without which nothing is answered.
        port: The port to serve the page on; 0 chooses a free one.
        out: The folder below which the results of runs are written.
    """
    require_bokeh()
    require_folder(out)
    from ..page import LAB_POLL_SECONDS, build_lab, serve

    _run(serve(lambda doc: build_lab(doc, out), every=LAB_POLL_SECONDS, **_served(host, port)))


def _watch_broker(
    url: str, swarm: str, connection: ConnectionOptions, owner: str | None, host: str, port: int
) -> None:
    import asyncio

    from ...gossip import topics
    from ...gossip.security import read_public
    from ...peer import Observer, mqtt_transport
    from ..page import POLL_SECONDS, LiveSource

    topics.check_name("swarm", swarm)
    address = connection.running_broker(url)
    key = None if owner is None else read_public(owner)
    name = f"observer-{secrets.token_hex(4)}"

    async def watch() -> None:
        async with Observer(lambda: mqtt_transport(address, name), swarm, owner=key) as observer:
            await observer.settle()
            source = LiveSource(observer, _shown(url))

            async def follow() -> None:  # curves grow while no window is open
                while True:
                    source.poll()
                    await asyncio.sleep(POLL_SECONDS)

            following = asyncio.create_task(follow(), name="follow the swarm")
            try:
                await _page(lambda: source, host, port)
            finally:
                following.cancel()

    _run(watch())


@contextlib.contextmanager
def watching(
    wanted: bool, address: BrokerAddress, swarm: str, owner: str | None = None
) -> Iterator[None]:
    """While the block runs, serve the page of a swarm from a process of its own, if that is wanted.

    A process of its own, since drawing for the browser must not slow the supervisor of the peers down. It
    prints the page's address.
    """
    if not wanted:
        yield
        return
    options = {
        "--ca": address.ca, "--certificate": address.certificate, "--key": address.key,
        "--mqtt": address.version, "--owner": owner,
    }  # fmt: skip
    arguments = [text for name, value in options.items() if value for text in (name, str(value))]
    environment = dict(os.environ)
    if address.password:
        environment[PASSWORD_VARIABLE] = address.password
    page = subprocess.Popen(
        [sys.executable, "-m", "gossamer", "watch", address.url, swarm, *arguments], env=environment
    )
    try:
        yield
    finally:
        page.terminate()
        page.wait()


def _shown(url: str) -> str:
    """Return a broker's address without user and password."""
    from ...gossip import Address

    return ", ".join(f"{each.host}:{each.port}" for each in Address.parse_all(url))


def _page(make_source: Callable[[], Source], host: str, port: int) -> Coroutine[Any, Any, None]:
    from ..page import serve_page

    return serve_page(make_source, **_served(host, port))


def _served(host: str, port: int) -> dict[str, Any]:
    """How a page is served: with a token, unless only this machine can reach it."""
    from ..page import is_loopback

    return {
        "host": host, "port": port, "token": None if is_loopback(host) else secrets.token_urlsafe(16),
        "on_ready": lambda url: console.say(f"page: {url}"),
    }  # fmt: skip


def _run(page: Coroutine[Any, Any, None]) -> None:
    """Serve a page until Ctrl-C."""
    import asyncio

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(page)
