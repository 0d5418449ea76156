"""The server of pages, without a browser: who is let in, and what a page gets from its source."""

from __future__ import annotations

import asyncio
import http.client
import logging
import re
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from bokeh.document import Document
from bokeh.server.connection import ServerConnection
from page_kit import write_live, write_run

from gossamer.experiments.page import (
    History,
    LiveSource,
    Observation,
    PlaybackSource,
    read_folders,
    serve_page,
)
from gossamer.experiments.page.figures import Panels
from gossamer.experiments.page.history import Event
from gossamer.experiments.page.peer_map import find_names_below
from gossamer.experiments.page.server import build_page, host_in_url
from gossamer.experiments.page.style import LEGEND_ROW_HEIGHT
from gossamer.peer import ObservedPeer, Summary, SwarmState, TimelineEvent, is_loopback


def test_a_watcher_loads_neither_torch_nor_what_draws_files() -> None:
    heavy = ("torch", "matplotlib", "scipy.optimize", "pandas")
    code = (
        "import sys; from gossamer.peer import Observer; "
        "from gossamer.experiments.page import LiveSource, serve_page; "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def visit(tmp_path: Path, token: str | None, visits: Callable[[str], Awaitable[None]]) -> None:
    """Serve the playback of a run while `visits` asks for pages."""
    (run,) = read_folders([write_run(tmp_path / "run")])

    async def serve() -> None:
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        page = asyncio.create_task(
            serve_page(lambda: PlaybackSource(run), token=token, on_ready=ready.set_result)
        )
        try:
            await visits(await ready)
        finally:
            page.cancel()
            await asyncio.gather(page, return_exceptions=True)

    asyncio.run(serve())


async def fetch(
    address: str, path: str, headers: dict[str, str] | None = None
) -> tuple[int, str, http.client.HTTPMessage]:
    def ask() -> tuple[int, str, http.client.HTTPMessage]:
        place = urlsplit(address).netloc
        with closing(http.client.HTTPConnection(place, timeout=30)) as connection:
            connection.request("GET", path, headers=headers or {})
            answer = connection.getresponse()
            # A websocket that is opened has no length: all that comes until it is closed.
            content = (
                connection.sock.makefile("rb").read() if answer.status == 101 else answer.read()
            )
            answer.close()
            return answer.status, content.decode(), answer.headers

    return await asyncio.to_thread(ask)


def upgrade(address: str) -> dict[str, str]:
    return {
        "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Origin": f"http://{urlsplit(address).netloc}",
    }  # fmt: skip


def test_page_on_loopback_needs_no_token(tmp_path: Path) -> None:
    async def visits(address: str) -> None:
        assert urlsplit(address).hostname == "127.0.0.1"
        status, text, _ = await fetch(address, "/")
        assert status == 200
        assert "garden" in text

    visit(tmp_path, None, visits)


def test_wrong_token_is_refused_with_one_line(tmp_path: Path) -> None:
    async def visits(address: str) -> None:
        assert address.endswith("?token=secret")
        for path in ("/", "/?token=wrong", "/?token="):
            status, _, headers = await fetch(address, path)
            assert status == 302
            status, text, _ = await fetch(address, headers["Location"])
            assert status == 403
            assert text.startswith("refused: ")
            assert text.count("\n") == 1
        status, text, headers = await fetch(address, "/?token=secret")
        assert status == 200
        assert "garden" in text
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        status, _, _ = await fetch(address, "/", {"Cookie": cookie.partition(";")[0]})
        assert status == 200

    visit(tmp_path, "secret", visits)


def test_websocket_without_the_token_gets_nothing(tmp_path: Path) -> None:
    async def visits(address: str) -> None:
        _, text, _ = await fetch(address, "/ws", upgrade(address))  # returns when it is closed
        assert text == ""

    visit(tmp_path, "secret", visits)


def test_a_window_that_was_closed_leaves_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def visits(address: str) -> None:
        nothing: Any = None
        session: Any = SimpleNamespace(subscribe=id, unsubscribe=id)
        closed = ServerConnection(nothing, nothing, nothing, session)
        closed.detach_session()
        log = logging.getLogger("tornado.application")
        for ask in (lambda: closed.session, lambda: 1 / 0):
            try:
                ask()
            except (AssertionError, ZeroDivisionError):
                log.exception("uncaught exception")

    visit(tmp_path, None, visits)
    assert [type(each.exc_info[1]) for each in caplog.records if each.exc_info] == [
        ZeroDivisionError
    ]


def test_other_addresses_need_a_token() -> None:
    async def address() -> str:
        ready = asyncio.get_running_loop().create_future()
        page = serve_page(
            lambda: pytest.fail("nobody asked"), host="0.0.0.0", on_ready=ready.set_result
        )
        serving = asyncio.create_task(page)
        try:
            return await ready
        finally:
            serving.cancel()
            await asyncio.wait([serving])

    assert re.search(r"\?token=.{16}", asyncio.run(address()))
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("garden.lan")


def test_a_page_on_all_addresses_is_opened_by_the_name_of_the_machine() -> None:
    assert host_in_url("0.0.0.0") == host_in_url("::") == socket.gethostname()
    assert host_in_url("::1") == "[::1]"
    assert host_in_url("garden.lan") == "garden.lan"


def test_playback_goes_on_and_stops_at_the_end(tmp_path: Path) -> None:
    (run,) = read_folders([write_live(tmp_path / "run")])
    now = [0.0]
    source = PlaybackSource(run, lambda: now[0])
    update = build_page(Document(), source)
    assert source.history.peers["0"].round == 1
    now[0] = 10.0  # half of the playback
    update()
    assert source.history.peers["0"].round == 3
    now[0] = 1000.0
    update()
    assert source.history.peers["1"].state == "dead"
    assert source.history.peers["0"].state == "done"


def test_page_shows_what_has_changed_since_the_last_look(tmp_path: Path) -> None:
    (run,) = read_folders([write_live(tmp_path / "run")])
    now, doc = [0.0], Document()
    update = build_page(doc, PlaybackSource(run, lambda: now[0]))
    table = doc.get_model_by_name("peers")
    assert table is not None
    peers: Any = table.source  # type: ignore[attr-defined]
    assert peers.data["round"] == [1, 1, 1, 1]
    now[0] = 1000.0
    update()
    assert peers.data["state"] == ["done", "dead", "left", "done"]
    assert peers.data["round"] == [6, 4, 4, 6]


def test_a_peer_without_accuracy_is_shown_by_its_loss() -> None:
    history = History("garden", "seconds")
    history.apply(Observation("0", 1.0, loss=0.25))
    history.apply(Observation("1", 1.0, accuracy=0.5, loss=0.75))
    first, second = Panels(history).peers.data["loss"]
    assert first == 0.25
    assert second != second  # its accuracy is shown


class StandIn:
    """An observer whose state a test writes."""

    connected, connection_problem = True, ""

    def __init__(self) -> None:
        self.swarm = SwarmState("garden")


def summary(time: float, accuracy: float, round: int, *neighbours: str) -> Summary:
    return Summary(
        session="s", time=time, since=0.0, state="training", phase="training", round=round, rounds=None,
        version="0.1.0", metrics={"accuracy": accuracy, "alone_accuracy": accuracy - 0.1},
        neighbours=neighbours, sent_bytes=1000 * round,
    )  # fmt: skip


def test_live_swarm_becomes_a_history() -> None:
    observer, now = StandIn(), [1000.0]
    source = LiveSource(observer, "broker.lan:1883", lambda: now[0])  # type: ignore[arg-type]
    assert "no peer of swarm garden" in source.poll()
    state = observer.swarm
    for name, other in (("anna@1", "ben@2"), ("ben@2", "anna@1")):
        state.peers[name] = ObservedPeer(
            name, "online", last_heard=1001.0, models=("global",),
            summary=summary(1001.0, 0.5, 3, other),
        )  # fmt: skip
    state.timeline.append(TimelineEvent(990.0, "joined", "anna@1", "joined garden"))
    now[0] = 1002.0
    source.poll()
    history = source.history
    assert history.links == {("anna", "ben")}
    assert history.mean_accuracy.y == [0.5]
    assert history.peers["anna"].gain == pytest.approx(0.1)
    assert [(event.time, event.peer) for event in history.events] == [(-10.0, "anna")]
    state.peers["ben@2"] = ObservedPeer(
        "ben@2", "left", reason="its battery is empty", last_heard=1003.0, models=("global",),
        summary=summary(1003.0, 0.7, 4),
    )  # fmt: skip
    state.timeline.append(TimelineEvent(1003.0, "left", "ben@2", "left: its battery is empty"))
    now[0] = 1004.0
    source.poll()
    assert (history.peers["ben"].state, history.peers["ben"].reason) == (
        "left",
        "its battery is empty",
    )
    assert history.mean_accuracy.y == [0.5, 0.5]
    assert len(history.events) == 2
    observer.connected, observer.connection_problem = False, "connection refused"
    assert "connection refused" in source.poll()


def test_peers_of_an_older_version_are_shown_and_a_line_says_why_there_is_no_more() -> None:
    observer = StandIn()
    observer.swarm.peers["anna"] = ObservedPeer("anna", "online", phase="training")
    source = LiveSource(observer, "broker.lan:1883", lambda: 1000.0)  # type: ignore[arg-type]
    assert source.poll().startswith("no peer has published a summary: they run an older version")
    assert source.history.peers["anna"].state == "training"


def test_links_are_as_thick_as_what_was_sent_over_them() -> None:
    observer = StandIn()
    source = LiveSource(observer, "broker.lan:1883", lambda: 1000.0)  # type: ignore[arg-type]
    counted = {"hub": (9000, 100), "a": (1000,), "b": (50,)}
    neighbours = {"hub": ("a", "b"), "a": ("hub",), "b": ("hub",)}
    for name, others in neighbours.items():
        told = replace(summary(1000.0, 0.5, 3, *others), neighbour_bytes=counted[name])
        observer.swarm.peers[name] = ObservedPeer(name, "online", summary=told)
    source.poll()
    panels = Panels(source.history)
    links = panels.map.links.data
    widths = {
        a + b: width for a, b, width in zip(links["a"], links["b"], links["width"], strict=True)
    }
    assert widths["ahub"] > 2 * widths["bhub"]
    assert "estimated" not in panels.roots["graph"].title.text
    plain = ObservedPeer("a", "online", summary=summary(1001.0, 0.5, 4, "hub"))
    observer.swarm.peers["a"] = plain  # of an older version
    source.history.peers["a"].bytes_to = {}
    panels.update(source.history)
    assert "estimated" in panels.roots["graph"].title.text


def test_peers_stand_in_natural_order_and_a_clicked_one_stays_chosen() -> None:
    history = History("garden")
    for name in ("bed-10", "bed-2"):
        history.apply(Observation(name, 1.0, accuracy=0.5))
    panels = Panels(history)
    assert panels.peers.data["peer"] == panels.lines.data["peer"] == ["bed-2", "bed-10"]
    panels.peers.selected.indices = [1]
    history.apply(Observation("annex", 2.0, accuracy=0.5))
    panels.update()
    assert panels.peers.data["peer"] == ["annex", "bed-2", "bed-10"]
    assert panels.peers.selected.indices == [2]


def test_what_a_peer_sent_before_it_was_restarted_counts() -> None:
    history = History("garden")
    for time, sent in enumerate((3_000_000, 5_000_000, 1_000_000, 4_000_000)):
        history.apply(Observation("anna", float(time), bytes=sent))
        history.sample(float(time))
    assert history.megabytes_sent.y == [3.0, 5.0, 6.0, 9.0]


def test_an_offline_peer_does_not_hide_how_far_the_others_agree() -> None:
    history = History("garden")
    for name, state, distance in (("anna", "offline", 0.9), ("ben", "training", 0.1)):
        history.apply(Observation(name, 0.0, state=state, disagreement={"global": distance}))
    history.sample(0.0)
    assert history.disagreement["global"].y == [0.1]


def test_the_map_explains_crossed_out_peers_where_there_are_any() -> None:
    history = History("garden")
    history.apply(Observation("anna", 0.0, state="training", accuracy=0.5))
    panels = Panels(history)
    (bar,) = panels.roots["graph"].below[1:]
    assert bar.title == "accuracy"
    history.apply(Observation("ben", 1.0, state="lost"))
    panels.update()
    assert bar.title == "accuracy (crossed out: gone)"


def test_names_that_would_overlap_are_written_on_different_sides() -> None:
    at = {
        "greenhouse-1": (0.0, 0.0),
        "greenhouse-2": (0.2, 0.0),
        "far": (1.0, 0.0),
        "top": (0.5, 1.0),
    }
    assert find_names_below(at) == {"greenhouse-2"}
    crossing = {"low": (0.0, 0.0), "high": (0.0, 0.15), "left": (-1.0, 1.0), "right": (1.0, 0.0)}
    assert find_names_below(crossing) == {"low"}  # else the other peer would hide it
    assert find_names_below({}) == frozenset()
    square = {"a": (0.0, 0.0), "b": (1.0, 0.0), "c": (1.0, 1.0), "d": (0.0, 1.0)}
    assert find_names_below(square) == frozenset()
    around = frozenset({("a", "b"), ("b", "c"), ("c", "d"), ("a", "d")})
    assert find_names_below(square, around) == {"a", "b"}  # whose links go up


def test_what_has_nothing_to_show_yet_is_hidden() -> None:
    history = History("garden")
    panels = Panels(history)

    def hidden() -> set[str]:
        return {name for name, root in panels.roots.items() if root.css_classes}

    assert hidden() == {*panels.roots} - {"headline", "controls"}
    history.apply(Observation("anna", 0.0, accuracy=0.5, bytes=10))
    history.sample(0.0)
    panels.update()
    assert hidden() == {"metrics", "disagreement", "timeline", "events"}


def test_tables_are_as_high_as_their_rows_up_to_a_limit() -> None:
    history = History("garden")
    history.apply(Observation("anna", 0.0))
    panels = Panels(history)
    heights = [panels.roots["peers"].height]
    for name in ("ben", "carl", *(f"more-{i}" for i in range(20))):
        history.apply(Observation(name, 1.0))
        panels.update()
        heights.append(panels.roots["peers"].height)
    assert heights[0] < heights[1] < heights[2] < heights[-1]
    assert heights[-1] == heights[-2]  # scrolled


def test_peers_that_are_equally_good_have_the_colour_of_the_middle() -> None:
    history = History("garden")
    for name in ("anna", "ben"):
        history.apply(Observation(name, 0.0, accuracy=0.7))
    (bar,) = Panels(history).roots["graph"].below[1:]
    mapper = bar.color_mapper
    assert mapper.high - 0.7 == pytest.approx(0.7 - mapper.low)
    assert mapper.high > mapper.low


def test_figures_grow_with_their_legends() -> None:
    history = History("garden")
    panels = Panels(history)
    before = panels.roots["disagreement"].height
    history.apply(Observation("anna", 0.0, disagreement={f"group-{i}": 0.1 for i in range(7)}))
    history.sample(0.0)
    panels.update()
    assert panels.roots["disagreement"].height == before + 2 * LEGEND_ROW_HEIGHT


def test_marks_at_both_ends_of_the_timeline_are_whole() -> None:
    history = History("garden", origin=1000.0)
    for time in (-60.0, 0.0):
        history.add_to_timeline(Event(time, "joined", "anna", "joined garden"))
    shown = Panels(history).roots["timeline"].x_range
    assert shown.start < -60.0
    assert shown.end > 1.0


def test_matching_is_seen_in_the_timeline() -> None:
    observer = StandIn()
    source = LiveSource(observer, "broker.lan:1883", lambda: 1000.0)  # type: ignore[arg-type]
    observer.swarm.peers["anna"] = ObservedPeer("anna", "online", summary=summary(1000.0, 0.5, 3))
    for kind in ("aligned", "fused"):
        text = f"{kind} with ben, and counts in global"
        observer.swarm.timeline.append(TimelineEvent(1000.0, kind, "anna", text))
    source.poll()
    events = Panels(source.history).events.data
    assert set(events["row"]) == {"took part"}
    assert set(events["kind"]) == {"aligned", "fused"}


def test_peer_that_cannot_be_checked_is_marked() -> None:
    observer = StandIn()
    observer.swarm.peers["eve@3"] = ObservedPeer(
        "eve@3", "online", checked="refused", problem="its card is not signed by its key"
    )
    source = LiveSource(observer, "broker.lan:1883", lambda: 1000.0)  # type: ignore[arg-type]
    source.poll()
    eve = source.history.peers["eve"]
    assert (eve.state, eve.reason, eve.checked) == (
        "refused", "its card is not signed by its key", "refused",
    )  # fmt: skip
