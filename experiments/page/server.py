"""Serves a page about a swarm on this machine: a Bokeh server that only reads.

A page polls its `Source` once a second and draws what has changed: a finished run that is played back, or a
running swarm, from what its peers publish on the broker. Every browser window has its own figures.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from math import nan
from time import monotonic
from typing import Any, Protocol, cast, get_args

from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.document import Document
from bokeh.server.auth_provider import AuthProvider
from bokeh.server.server import BaseServer
from bokeh.server.tornado import BokehTornado
from bokeh.server.util import bind_sockets
from tornado.httpserver import HTTPServer
from tornado.ioloop import IOLoop
from tornado.web import HTTPError, RequestHandler

from ...peer import ObservedPeer, Observer, TimelineEvent, is_loopback, label
from ..errors import ConfigError
from .figures import Panels
from .folders import Playback, RunFolder
from .history import Event, History, Kind, Observation, group_peers, natural_key
from .style import TEMPLATE, WIDGET_STYLE, Section, bk, variables

POLL_SECONDS = 1.0
MIN_UPDATE_SECONDS = 0.5
"""Least seconds between two updates of a live history, which several browser windows may share."""
_KINDS = frozenset(get_args(Kind))
PLAY_SECONDS = 20.0
"""How long the playback of a whole run takes."""
REFUSED_LINE = (
    "refused: open the address with the token that gossamer printed when it started this page\n"
)


class Source(Protocol):
    """Where the history on a page comes from.

    title, subtitle: the page's heading. controls: widgets above the figures, if any. final: the history
    of the finished run, if it is finished.
    """

    title: str
    subtitle: str
    controls: Any
    final: History | None

    @property
    def history(self) -> History:
        """What is known now."""
        ...

    def poll(self) -> str:
        """Bring the history up to date; return a line for the reader about the source, often empty."""
        ...


class PlaybackSource:
    """Plays a finished run in PLAY_SECONDS; a slider goes to any moment, a button stops and goes on."""

    def __init__(self, run: RunFolder, clock: Callable[[], float] = monotonic):
        self._run, self._clock = run, clock
        self._playback = Playback(run)
        self.final: History | None = run.history()
        self.title, self.subtitle = run.name, f"playback of {run.path}"
        start, end = run.start, max(run.end, run.start + 1e-6)
        self._speed = (end - start) / PLAY_SECONDS
        self._position, self._polled = start, clock()
        self._slider = bk.Slider(
            start=start, end=end, value=start, step=(end - start) / 500, title=run.x_label,
            format="0,0.0" if run.x_label != "round" and end - start < 100 else "0,0",
            sizing_mode="stretch_width",
            stylesheets=[WIDGET_STYLE],
        )  # fmt: skip
        self._play = bk.Toggle(label="stop", active=True, width=80, stylesheets=[WIDGET_STYLE])
        self._play.on_change("active", self._switch)
        self._slider.on_change("value_throttled", self._move)
        self.controls = [self._play, self._slider]
        self._playback.advance(start)

    @property
    def history(self) -> History:
        """The history at the present moment of the playback."""
        return self._playback.history

    def _switch(self, _attribute: str, _old: bool, playing: bool) -> None:
        self._play.label = "stop" if playing else "play"
        if playing and self._position >= self._run.end:
            self._go_to(self._run.start)

    def _move(self, _attribute: str, _old: float, position: float) -> None:
        self._play.active = False
        self._go_to(position)

    def _go_to(self, position: float) -> None:
        if position < self._position:
            self._playback = Playback(self._run)
        self._position = position
        self._playback.advance(position)

    def poll(self) -> str:
        """Advance by the time since the last call; return what is wrong with the folder, if anything."""
        now = self._clock()
        passed, self._polled = now - self._polled, now
        if self._play.active:
            self._go_to(min(self._position + passed * self._speed, self._run.end))
            self._slider.value = self._position
            self._play.active = self._position < self._run.end
        return " ".join(self._run.problems)


class LiveSource:
    """Turns the records of an `Observer` into a history; publishes nothing.

    where: the broker's address, for the page's heading. wall: the wall clock.
    """

    controls: Any = None
    final: History | None = None

    def __init__(self, observer: Observer, where: str, wall: Callable[[], float] = time.time):
        self._observer, self._wall = observer, wall
        swarm = observer.swarm.swarm
        self.title, self.subtitle = swarm, f"live at {where}"
        self._history = History(swarm, "seconds watched", origin=wall())
        self._update_time = float("-inf")
        self._applied: dict[str, ObservedPeer] = {}
        self._last_event: TimelineEvent | None = None

    @property
    def history(self) -> History:
        """What is known now."""
        return self._history

    def poll(self) -> str:
        """Apply what is new; return what is wrong with the connection or the swarm, if anything."""
        now = self._wall()
        if now - self._update_time >= MIN_UPDATE_SECONDS:
            self._update_time = now
            self._apply(now)
        return self._problem()

    def _apply(self, now: float) -> None:
        history, state = self._history, self._observer.swarm
        origin = history.origin or 0.0
        for name, peer in sorted(state.peers.items(), key=lambda item: natural_key(item[0])):
            if self._applied.get(name) is not peer:
                self._applied[name] = peer
                history.apply(observation(peer, now - origin, origin))
        # After the records: an event names the reason, and its peer must be known.
        for event in self._new_events():
            kind: Any = event.kind if event.kind in _KINDS else "note"
            history.add_to_timeline(Event(event.time - origin, kind, label(event.peer), event.text))
        models = {name: peer.models for name, peer in history.peers.items()}
        groups = group_peers(dict.fromkeys(models, ""), models)
        for name, peer in history.peers.items():
            peer.group = groups[name]
        history.sample(now - origin)

    def _new_events(self) -> list[TimelineEvent]:
        """The events that were noticed since the last call, in the order of their times."""
        new: list[TimelineEvent] = []
        for event in reversed(self._observer.swarm.timeline):
            if event is self._last_event:
                break
            new.append(event)
        if new:
            self._last_event = new[0]
        return sorted(new, key=lambda event: event.time)

    def _problem(self) -> str:
        observer, state = self._observer, self._observer.swarm
        if not observer.connected:
            cause = observer.connection_problem
            return f"the broker is not connected{': ' * bool(cause)}{cause}; the page shows its last state"
        if not state.peers:
            return f"no peer of swarm {state.swarm} is on this broker yet; is that its name?"
        if not state.summaries:
            return (
                "no peer has published a summary: they run an older version of gossamer, or have only just "
                "started; the page can show only which peers are there"
            )
        return ""


def observation(peer: ObservedPeer, now: float, origin: float) -> Observation:
    """Convert a peer's record. now: the time on the page's axis. origin: the wall clock's time at its 0."""
    summary = peer.summary
    heard = now if peer.last_heard is None else peer.last_heard - origin
    checked = "" if peer.checked == "unsigned" else peer.checked
    common: dict[str, Any] = {
        "state": state_of(peer), "reason": peer.problem or peer.reason, "models": peer.models,
        "checked": checked,
    }  # fmt: skip
    if summary is None:
        return Observation(label(peer.name), heard, **common)
    accuracy = _metric(summary.metrics, "accuracy")
    neighbours = [label(name) for name in summary.neighbours]
    return Observation(
        label(peer.name), heard, round=summary.round, accuracy=accuracy,
        loss=_metric(summary.metrics, "loss"), bytes=summary.sent_bytes,
        metrics={n: v for n, v in summary.named_metrics.items() if v is not None},
        neighbours=neighbours,
        bytes_to=dict(zip(neighbours, summary.neighbour_bytes, strict=False)),
        disagreement={
            name: model.disagreement
            for name, model in summary.models.items()
            if model.disagreement is not None
        },
        gain=accuracy - _metric(summary.metrics, "alone_accuracy"), **common,
    )  # fmt: skip


def state_of(peer: ObservedPeer) -> str:
    """A peer's state in one word: what it does, or why it does not take part."""
    if peer.checked in ("refused", "revoked"):
        return "refused"
    if peer.presence != "online":
        return peer.presence
    return peer.summary.state.replace("_", " ") if peer.summary is not None else peer.phase


def _metric(metrics: Mapping[str, float | None], name: str) -> float:
    value = metrics.get(name)
    return nan if value is None else value


def build_page(doc: Any, source: Source) -> Callable[[], None]:
    """Fill a Bokeh document with the page of a source; returns the function that brings it up to date."""
    section = Section("")
    note = bk.Div(stylesheets=[":host { color: var(--bad); }"], sizing_mode="stretch_width")
    panels = Panels(source.history, source.final)
    top: dict[str, Any] = {"note": note}
    if source.controls:
        top["playback"] = bk.Row(children=source.controls, sizing_mode="stretch_width")
    section.place(top)
    section.roots |= dict.fromkeys(top, "bare wide")
    section.place(panels.roots)
    doc.title, doc.template = source.title, TEMPLATE
    doc.template_variables.update(variables(source.subtitle, [section]))
    for root in section.models.values():
        doc.add_root(root)

    def update() -> None:
        note.text = source.poll()
        note.visible = bool(note.text)
        panels.update(source.history)

    update()
    return update


def host_in_url(host: str) -> str:
    """Return a host as a URL has it; for "all addresses of this machine", which is no address, its name."""
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


async def serve_page(make_source: Callable[[], Source], **options: Any) -> None:
    """Serve pages of sources until cancelled. make_source: called for every window. options: see `serve`."""
    await serve(lambda doc: build_page(doc, make_source()), **options)


async def serve(
    fill: Callable[[Document], Callable[[], None]],
    *,
    every: float = POLL_SECONDS,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve pages until cancelled.

    fill: fills the document of a browser window, and returns the function that brings it up to date.
    every: the seconds between two calls of that function. port: 0 chooses a free one.
    token: what an address must have to be answered; if left out, a random one if other machines can reach
        `host`, else none. on_ready: called with the address.
    """
    # Bokeh logs an error for every update to a window that was just closed: these are left out.
    logging.getLogger("bokeh.server.views.ws").setLevel(logging.ERROR)
    for name in ("bokeh.server.protocol_handler", "tornado.application"):
        logging.getLogger(name).addFilter(_concerns_open_window)
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(16)

    def prepare(doc: Document) -> None:
        doc.add_periodic_callback(fill(doc), round(1000 * every))

    try:
        sockets, port = bind_sockets(host, port)
    except OSError as error:
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        option = f"--port {port}" if is_port else f"--host {host}"
        raise ConfigError(
            f"{option}: cannot listen on {host}:{port}: {error.strerror or error}; name another"
        ) from None
    url_host = host_in_url(host)
    # With a token, the page may be reached under any name of this machine: the cookie says who may read.
    origins = ["*"] if token is not None else [f"{url_host}:{port}", f"localhost:{port}"]
    auth: dict[str, Any] = {} if token is None else {"auth_provider": _TokenAuth(token)}
    tornado = BokehTornado(
        {"/": Application(FunctionHandler(prepare))}, extra_websocket_origins=origins, **auth
    )
    connections = HTTPServer(tornado)
    connections.add_sockets(sockets)
    server = BaseServer(IOLoop.current(), tornado, connections)
    server.start()
    on_ready(f"http://{url_host}:{port}/" + ("" if token is None else f"?token={token}"))
    try:
        await asyncio.Event().wait()
    finally:
        # Without this, the event loop might end while a page is being written.
        for session in server.get_sessions():
            stopping = session.with_document_locked(_stop_updating, session.document)
            await cast("Awaitable[None]", stopping)
        server.stop(wait=False)
        await connections.close_all_connections()


def _concerns_open_window(record: logging.LogRecord) -> bool:
    """Return False for what Bokeh logs about a window that was closed while its page was being written."""
    trace = None if record.exc_info is None else record.exc_info[2]
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is None or trace.tb_frame.f_globals.get("__name__") != "bokeh.server.connection"


def _stop_updating(doc: Any) -> None:
    for callback in doc.session_callbacks:
        doc.remove_periodic_callback(callback)


class _TokenAuth(AuthProvider):
    """Lets in who names the token in the address; a cookie carries it to the page's websocket."""

    COOKIE = "gossamer-page"

    def __init__(self, token: str):
        self._token = token
        super().__init__()

    @property
    def get_user(self) -> Any:
        """A function that returns None for a request without the token."""

        def user(handler: RequestHandler) -> str | None:
            token = handler.get_query_argument("token", "")
            if hmac.compare_digest(token.encode(), self._token.encode()):
                if handler.request.headers.get("Upgrade", "").lower() != "websocket":
                    handler.set_cookie(self.COOKIE, token, httponly=True, samesite="Strict")
                return "reader"
            cookie = handler.get_cookie(self.COOKIE, "") or ""
            if hmac.compare_digest(cookie.encode(), self._token.encode()):
                return "reader"
            if handler.request.headers.get("Upgrade", "").lower() == "websocket":
                # A websocket cannot be redirected to the page of `login_url`.
                raise HTTPError(403, "without the page's token")
            return None

        return user

    @property
    def login_url(self) -> str:
        """Where requests without the token are sent."""
        return "/refused"

    @property
    def login_handler(self) -> type[RequestHandler]:
        """Answers with one line."""
        return _Refused


class _Refused(RequestHandler):
    """Says in one line that the token was missing or wrong."""

    def get(self) -> None:
        """Answer with 403."""
        self.set_status(403)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(REFUSED_LINE)
