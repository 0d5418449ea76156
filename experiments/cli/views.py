"""The commands that show swarms: `gossamer status` in a terminal; `report`, `watch`, `lab` in a browser."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..errors import ConfigError
from ..results import find_run, require_folder
from . import console
from .console import Port, command
from .live import PASSWORD_VARIABLE, ConnectionOptions, MetricsOptions

if TYPE_CHECKING:
    from ...gossip import MqttTransport
    from ...peer import BrokerAddress, ObservedPeer, Observer, Problem, SwarmState, TimelineEvent

REFRESH = 1.0
"""Seconds from one update to the next with --follow."""
SHOWN_EVENTS = 8
"""Events of the timeline that are shown, the latest ones."""
REASON_WIDTH = 26
"""The least width of the last column of the table of peers, _ACTIVITY."""
ID_LETTERS = 4
"""Letters of a peer's id that are shown on a narrow terminal."""
DATE = "%Y-%m-%d %H:%M:%S"
NEEDS_ATTENTION = 1
"""The exit code if something needs attention."""

_COLOURS = {"online": "green", "offline": "yellow", "lost": "red", "dead": "red", "unknown": "red"}


# --- the connection to a swarm ----------------------------------------------------------------------


def _observer(
    url: str, swarm: str, connection: ConnectionOptions, owner: str | None
) -> tuple[Observer, MqttTransport]:
    """Return an observer of a swarm, and its transport; neither is connected yet."""
    from ...gossip import topics
    from ...gossip.security import read_public
    from ...peer import Observer, mqtt_transport

    topics.check_name("swarm", swarm)
    key = None if owner is None else read_public(owner)
    name = f"gossamer-observer-{secrets.token_hex(4)}"
    transport = mqtt_transport(connection.running_broker(url), name)
    return Observer(lambda: transport, swarm, owner=key), transport


@contextlib.asynccontextmanager
async def _connected(observer: Observer, transport: MqttTransport) -> AsyncIterator[None]:
    """Connect an observer, and wait until it knows the swarm; ConfigError if the broker falls silent."""
    async with observer:
        await observer.settle()
        if not observer.connected:
            why = observer.connection_problem
            raise ConfigError(
                f"{transport.address}: the connection was lost at once{': ' * bool(why)}{why}; is that "
                "an MQTT broker?"
            )
        yield


# --- in a browser -----------------------------------------------------------------------------------


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
    from ..page import PlaybackSource, RunFolder, read_folders, serve_page

    first, *others = read_folders([Path(what)])
    if not isinstance(first, RunFolder):
        raise ConfigError(
            f"{what}: holds the results of many runs, which cannot be played back; gossamer report {what} "
            "makes a page of them"
        )
    if others:
        console.warn(f"{what}: holds {1 + len(others)} swarms; this is {first.path}")
    _serve_until_interrupt(
        serve_page(lambda: PlaybackSource(first), host=host, port=port, on_ready=_print_address)
    )


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

    build = partial(build_lab, results=out)
    _serve_until_interrupt(
        serve(build, every=LAB_POLL_SECONDS, host=host, port=port, on_ready=_print_address)
    )


def _watch_broker(
    url: str, swarm: str, connection: ConnectionOptions, owner: str | None, host: str, port: int
) -> None:
    from ...gossip import Address
    from ..page import POLL_SECONDS, LiveSource, serve_page

    observer, transport = _observer(url, swarm, connection, owner)

    async def watch() -> None:
        async with _connected(observer, transport):
            # Without user and password.
            where = ", ".join(f"{each.host}:{each.port}" for each in Address.parse_all(url))
            source = LiveSource(observer, where)

            async def follow() -> None:  # curves grow while no window is open
                while True:
                    source.poll()
                    await asyncio.sleep(POLL_SECONDS)

            following = asyncio.create_task(follow(), name="follow the swarm")
            try:
                await serve_page(lambda: source, host=host, port=port, on_ready=_print_address)
            finally:
                following.cancel()

    _serve_until_interrupt(watch())


@contextlib.contextmanager
def watching(
    wanted: bool, address: BrokerAddress, swarm: str, owner: str | None = None
) -> Iterator[None]:
    """While the block runs, serve the page of a swarm from a process of its own, if that is wanted.

    Drawing for the browser must not slow down this process, which supervises the peers. The other process
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


def _print_address(url: str) -> None:
    console.say(f"page: {url}")


def _serve_until_interrupt(page: Coroutine[Any, Any, None]) -> None:
    """Serve a page until Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(page)


# --- in the terminal --------------------------------------------------------------------------------


@command("status", slow=True)
def status_command(
    url: str,
    swarm: str,
    *,
    connection: ConnectionOptions,
    owner: str | None = None,
    follow: bool = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    quiet: bool = False,
    metrics: MetricsOptions,
) -> None:
    """Show who is in a swarm, who left and why, and how its partial models are doing.

    Only reads: no peer notices. The exit code is 1 if something needs attention: a model that nobody counts
    in, a peer past its lease, a peer that diverged, failed, was refused or revoked, or one that cannot be
    judged; one line says what and what to do. It is 2 if the broker or the swarm cannot be found, else 0.

    Args:
        url: The broker's address: mqtt://, mqtts://, ws:// or wss://.
        swarm: The swarm's name.
        owner: The public key of the swarm's owner, gossamer-ed25519:…, for a swarm with trust: without it,
            peers' signatures are checked, but not whether they were invited.
        follow: Stay, and show what changes, until Ctrl-C: in the tables on a terminal, else in one line each.
        as_json: Print all of it as one line of JSON; with --follow, a line whenever something has changed.
        quiet: Print only what needs attention; for cron.
    """
    if metrics.metrics_port is not None and not follow:
        raise ConfigError("status: --metrics-port needs --follow: it serves until Ctrl-C")
    observer, transport = _observer(url, swarm, connection, owner)
    printer = _StatusPrinter(as_json=as_json, quiet=quiet)
    try:
        problems = asyncio.run(
            _observe(observer, transport, printer, follow=follow, metrics=metrics)
        )
    except KeyboardInterrupt:
        if not follow:
            raise
        return  # Ctrl-C is how --follow ends
    if problems:
        raise typer.Exit(NEEDS_ATTENTION)


async def _observe(
    observer: Observer,
    transport: MqttTransport,
    printer: _StatusPrinter,
    *,
    follow: bool,
    metrics: MetricsOptions,
) -> list[Problem]:
    """Look at the swarm once, or until cancelled; return what needs attention."""
    from ...peer import serve_swarm_metrics

    async with _connected(observer, transport):
        if not observer.swarm.peers and not follow:
            raise ConfigError(
                f"{transport.address}: no peer of a swarm {observer.swarm.swarm!r} has published a card "
                "here: check the swarm's name, and with access rules, that this user may read it"
            )
        if not follow:
            return printer.once(observer)
        if metrics.metrics_port is None:
            await printer.follow(observer)
            return []
        with serve_swarm_metrics(
            observer.swarm, metrics.metrics_port, metrics.metrics_host
        ) as port:
            console.warn(f"figures for Prometheus: http://{metrics.metrics_host}:{port}/metrics")
            await printer.follow(observer)
        return []


class _StatusPrinter:
    """Prints a swarm's state: as tables, as JSON, or only what needs attention."""

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self._as_json, self._quiet = as_json, quiet

    def once(self, observer: Observer) -> list[Problem]:
        """Print the state, and return what needs attention."""
        from ...peer import find_problems

        state, now = observer.swarm, time.time()
        problems = find_problems(state, now)
        if self._as_json:
            console.say(_as_json_line(state, problems))
        elif self._quiet:
            for problem in problems:
                console.say(problem.text)
        else:
            console.out.print(_status_tables(state, problems, now))
        return problems

    async def follow(self, observer: Observer) -> None:
        """Print the state whenever it has changed, until cancelled."""
        from ...peer import find_problems

        is_table = console.out.is_terminal and not (self._as_json or self._quiet)
        live = Live(console=console.out, auto_refresh=False) if is_table else None
        changes, last, lost = ChangeLog(only_problems=self._quiet), "", ""
        with live if live is not None else contextlib.nullcontext():
            while True:
                observer.check()
                state, now = observer.swarm, time.time()
                problems = find_problems(state, now)
                # While the next attempt is made the observer has no cause: show the last one.
                lost = "" if observer.connected else observer.connection_problem or lost
                if live is not None:
                    live.update(_status_tables(state, problems, now, lost), refresh=True)
                elif self._as_json:
                    line = _as_json_line(state, problems)
                    if line != last:
                        console.say(line)
                    last = line
                else:
                    for line in changes.lines(state, problems, now, lost):
                        console.say(line)
                await asyncio.sleep(REFRESH)


class ChangeLog:
    """What changes in a swarm, as lines for a log.

    only_problems: leave out all but what needs attention, and leave out the times.
    """

    def __init__(self, *, only_problems: bool = False) -> None:
        self._only_problems = only_problems
        self._is_first = True
        self._events: frozenset[TimelineEvent] = frozenset()
        self._problems: frozenset[tuple[str, str, str]] = frozenset()
        self._lost = ""

    def lines(
        self, state: SwarmState, problems: Sequence[Problem], now: float, lost: str = ""
    ) -> list[str]:
        """Return what has changed since the last call; lost: why the broker cannot be reached."""
        texts = {(each.kind, each.peer, each.model): each.text for each in problems}
        new = [text for key, text in texts.items() if key not in self._problems]
        if self._only_problems:
            self._problems = frozenset(texts)
            return new
        lines: list[tuple[float, str]] = []
        if self._is_first:
            lines.append((now, _headline(state, "")))
        self._is_first = False
        lines += [
            (event.time, f"{event.peer} {event.text}")
            for event in sorted(state.timeline, key=lambda event: event.time)
            if event not in self._events
        ]
        lines += [(now, f"needs attention: {text}") for text in new]
        if self._problems and not texts:
            lines.append((now, "nothing needs attention any more"))
        if bool(lost) != bool(self._lost):
            reached = "the broker is reached again"
            lines.append((now, f"the broker cannot be reached: {lost}" if lost else reached))
        self._events, self._problems = frozenset(state.timeline), frozenset(texts)
        self._lost = lost
        return [f"{time.strftime(DATE, time.localtime(when))}  {line}" for when, line in lines]


def _as_json_line(state: SwarmState, problems: list[Problem]) -> str:
    record = state.as_record() | {"problems": [asdict(problem) for problem in problems]}
    return json.dumps(record, allow_nan=False)


def _status_tables(
    state: SwarmState, problems: list[Problem], now: float, connection_problem: str = ""
) -> Group:
    """Return the tables of peers, models and events, and what needs attention."""
    parts: list[Table | Text] = [Text(_headline(state, connection_problem), style="bold")]
    peers, names = _peer_table(state, now, console.out.width)
    parts.append(peers)
    if (models := _model_table(state, names)).row_count:
        parts.append(models)
    events = sorted(state.timeline, key=lambda event: event.time)[-SHOWN_EVENTS:]
    if events:
        parts.append(Text("latest events", style="bold"))
        listed = Table.grid(padding=(0, 2))
        for event in events:
            text = f"{event.peer} {event.text}"
            for name, short in names.items():
                text = text.replace(name, short)
            listed.add_row(f"  {_clock(event.time, now)}", Text(text))
        parts += [listed, Text("")]
    for problem in problems:
        parts.append(Text(f"needs attention: {problem.text}", style="bold red"))
    if not problems:
        has_offline = any(peer.presence == "offline" for peer in state.peers.values())
        parts.append(Text(f"nothing needs attention{' yet' * has_offline}", style="green"))
    return Group(*parts)


def _headline(state: SwarmState, connection_problem: str) -> str:
    counts: dict[str, int] = {}
    for peer in state.peers.values():
        counts[peer.presence] = counts.get(peer.presence, 0) + 1
    listed = ", ".join(f"{counts[each]} {each}" for each in _ORDER if each in counts)
    rounds = [p.round for p in state.peers.values() if p.is_present and p.round is not None]
    spread = f"; rounds {min(rounds)} to {max(rounds)}" if rounds else ""
    lost = f"; the broker cannot be reached: {connection_problem}" if connection_problem else ""
    return f"swarm {state.swarm}: {listed or 'no peers'}{spread}{lost}"


_ORDER = ("online", "offline", "lost", "unknown", "dead", "left")


def _peer_table(state: SwarmState, now: float, width: int) -> tuple[Table, dict[str, str]]:
    """Return the table of peers, and how it names them.

    If it is too wide, names are shortened first; then the columns that matter least are left out.
    """
    summaries = [peer.summary for peer in state.peers.values() if peer.summary is not None]
    metrics = console.metric_columns(summary.named_metrics for summary in summaries)
    rounds = [p.round for p in state.peers.values() if p.is_present and p.round is not None]
    median_round = median(rounds) if rounds else 0.0
    peers = sorted(state.peers.values(), key=lambda p: (_ORDER.index(p.presence), p.name))
    rows = [_row(peer, now, median_round, metrics) for peer in peers]
    columns = ["peer", "state", "since", "round", "behind", "accuracy", *metrics, *_TRAFFIC]
    columns += ["checked"] * state.is_signed + [_ACTIVITY]
    drop_order = [*reversed(_TRAFFIC), "behind", *reversed(metrics), "checked", "accuracy"]
    names = {peer.name: peer.name for peer in peers}
    while _least_width(table := _table_of(columns, rows, names)) > width:
        if names != (short := short_names(names)):
            names = short
        elif dropped := next((column for column in drop_order if column in columns), None):
            columns.remove(dropped)
        else:
            table.columns[-1].min_width = None  # a very narrow terminal
            break
    return table, names


_TRAFFIC = ("neighbours", "MB in", "MB out")
_ACTIVITY = "why, or what it does"


def _table_of(
    columns: Sequence[str], rows: Sequence[Mapping[str, str]], names: Mapping[str, str]
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in columns[:-1]:
        is_text = column in ("peer", "state", "since", "checked")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    longest = max(len(each) for each in (_ACTIVITY, *(row[_ACTIVITY] for row in rows)))
    table.add_column(_ACTIVITY, min_width=min(longest, REASON_WIDTH))
    for row in rows:
        styles = {"state": _COLOURS.get(row["state"], "dim")}
        shown = {**row, "peer": names[row["peer"]]}
        table.add_row(*(Text(shown[column], styles.get(column, "")) for column in columns))
    return table


def _least_width(table: Table) -> int:
    """Return the width below which cells of a table would be cut."""
    unlimited = console.out.options.update(width=10_000)
    return table.__rich_measure__(console.out, unlimited).minimum


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return a short name for each name LABEL@ID: with as many letters of the id as tell them apart."""
    full, letters = list(names), ID_LETTERS

    def cut(name: str) -> str:
        label, at, number = name.rpartition("@")
        return f"{label}{at}{number[:letters]}…" if at and len(number) > letters + 1 else name

    while len({cut(name) for name in full}) < len(full):
        letters += 1
    return {name: cut(name) for name in full}


def _row(
    peer: ObservedPeer, now: float, median_round: float, metrics: Sequence[str]
) -> dict[str, str]:
    """Return a peer's row, by column; median_round: that of all peers that are present."""
    row = {"peer": peer.name, "state": peer.presence, "since": _since(peer, now)}
    row |= {"checked": peer.checked, _ACTIVITY: _activity(peer, now)}
    summary = peer.summary
    if summary is None:
        return row | dict.fromkeys(["round", "behind", "accuracy", *metrics, *_TRAFFIC], "")
    total = "" if summary.rounds is None else f"/{summary.rounds}"
    lag = median_round - summary.round if peer.is_present else 0
    (accuracy,) = console.metric_cells(summary.metrics, ["accuracy"])
    traffic = (
        str(summary.neighbour_count) if peer.is_present else "",
        f"{summary.received_bytes / 1e6:.1f}",
        f"{summary.sent_bytes / 1e6:.1f}",
    )
    row |= {"round": f"{summary.round}{total}", "behind": f"{lag:.0f}" if lag >= 1 else ""}
    row |= {"accuracy": accuracy} | dict(zip(_TRAFFIC, traffic, strict=True))
    metric_cells = console.metric_cells(summary.named_metrics, metrics)
    return row | dict(zip(metrics, metric_cells, strict=True))


def _activity(peer: ObservedPeer, now: float) -> str:
    """Return what a peer does, or why it does nothing: its problem, or the reason of its last status."""
    from ...peer import LEASE_MARGIN, duration

    if peer.problem:
        return peer.problem
    if peer.presence == "offline" and peer.last_heard is not None:
        left = peer.last_heard + LEASE_MARGIN * peer.lease - now
        return f"{peer.reason}; given up in {duration(max(0.0, left))} unless it returns"
    if peer.presence != "online":
        return peer.reason
    state = peer.phase if peer.summary is None else peer.summary.state.replace("_", " ")
    waiting = [model for model in peer.models if model not in peer.counts]
    return f"{state}, waits for {', '.join(waiting)}" if waiting else state


def _model_table(state: SwarmState, names: Mapping[str, str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("partial model", no_wrap=True)
    for name in ("members", "count", "disagreement", "weights"):
        table.add_column(name, justify="right", no_wrap=True)
    present = {name for name, peer in state.peers.items() if peer.is_present}
    show_members = any(present - {*model.members} for model in state.models.values())
    if show_members:
        table.add_column("who", no_wrap=True, overflow="ellipsis")
    for model in state.models.values():
        if len(model.members) == 1 and model.counting:
            continue  # local to one peer: there is nothing to agree on
        distance, weights = model.disagreement, model.weights
        table.add_row(
            escape(model.name),
            str(len(model.members)),
            str(len(model.counting)),
            "" if distance is None else f"{distance:.1e}",
            "" if weights is None else f"{weights[0]:.2f} to {weights[1]:.2f}",
            *([escape(_members_text(model.members, present, names))] if show_members else []),
        )
    return table


def _members_text(
    members: Collection[str], present: Collection[str], names: Mapping[str, str]
) -> str:
    """Return the names of a partial model's members; "all" if every present peer is one."""
    if not {*present} - {*members}:
        return "all"
    return ", ".join(names[each] for each in sorted(members, key=lambda name: (len(name), name)))


def _since(peer: ObservedPeer, now: float) -> str:
    from ...peer import duration

    return "" if peer.since is None else f"{duration(max(0.0, now - peer.since))}"


def _clock(when: float, now: float) -> str:
    """Return a time of day; with the date if it is not of the last day."""
    pattern = "%H:%M:%S" if abs(now - when) < 86400 else "%Y-%m-%d %H:%M"
    return time.strftime(pattern, time.localtime(when))
