"""Pages and reports in a real browser: a swarm that loses two peers, the playback of a run, a report."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser_kit import Browser, a_browser
from page_kit import write_live, write_run
from swarm_kit import small_config
from waiting import until, wait_until

from gossamer.experiments.live.layout import plan
from gossamer.experiments.page import (
    LiveSource,
    PlaybackSource,
    Source,
    read_folders,
    serve_page,
    write_report,
)
from gossamer.peer import Broker, BrokerAddress, LocalSwarm, Observer, mqtt_transport

pytestmark = pytest.mark.live

KILLED, LEAVING = "6", "7"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with a_browser() as browser:
        yield browser


@asynccontextmanager
async def serving(
    serve: Callable[[Callable[[str], None]], Coroutine[Any, Any, None]],
) -> AsyncIterator[str]:
    """The address of a page while it is served. serve: is given what to call with the address."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(serve(ready.set_result))
    try:
        yield await ready
    finally:
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)


def page(make_source: Callable[[], Source]) -> AbstractAsyncContextManager[str]:
    """The address of the page of a source while it is served."""
    return serving(lambda ready: serve_page(make_source, on_ready=ready))


async def shows(ask: Callable[[], Any], what: str) -> None:
    """Wait until the page shows something; asks the browser in a thread, since the page needs the loop."""
    await until_asked(lambda: asyncio.to_thread(ask), what)


async def until_asked(ask: Callable[[], Any], what: str) -> None:
    answer: list[Any] = [False]

    async def keep_asking() -> None:
        while not answer[0]:
            answer[0] = await ask()

    asking = asyncio.create_task(keep_asking())
    try:
        await until(asking.done, what, pause=0.05)
        asking.result()
    finally:
        asking.cancel()


def live_swarms(folder: Path, url: str) -> list[LocalSwarm]:
    """Eight peers in three processes: six together, and two that can be killed or told to leave alone."""
    config = small_config(8, 100_000, checkpoint=False, save_every=1000.0)
    config = config.model_copy(update={"topology": "ring", "test_every": 1})
    spec = plan(config, folder, BrokerAddress(url))
    parts = {"rest": spec.peers[:6], KILLED: spec.peers[6:7], LEAVING: spec.peers[7:]}
    return [
        LocalSwarm(replace(spec, folder=folder / name, peers=peers, per_process=len(peers)))
        for name, peers in parts.items()
    ]


@pytest.mark.timeout(600)
def test_page_of_a_swarm_that_loses_two_peers(tmp_path: Path, browser: Browser) -> None:
    async def watch(url: str) -> None:
        rest, killed, leaving = live_swarms(tmp_path, url)
        killed.disable_restart(KILLED)
        running = [asyncio.create_task(swarm.run()) for swarm in (rest, killed, leaving)]

        def connect() -> Any:
            return mqtt_transport(BrokerAddress(url), "observer-test")

        try:
            async with Observer(connect, rest.spec.swarm) as observer:
                source = LiveSource(observer, "the test's broker")
                async with page(lambda: source) as address:
                    await asyncio.to_thread(browser.open, address)
                    await shows(lambda: len(browser.rows("peers")) == 8, "eight peers")
                    await shows(lambda: browser.points() > 2, "a curve")
                    before = await asyncio.to_thread(browser.points)
                    await shows(lambda: browser.points() > before, "the curve grows")
                    links = source.history.links
                    assert links is not None
                    assert len(links) == 8  # a ring

                    os.kill(killed.pids[KILLED], signal.SIGKILL)
                    os.kill(leaving.pids[LEAVING], signal.SIGTERM)
                    await shows(
                        lambda: row_with(browser, KILLED, "dead", "killed by signal 9"), "the death"
                    )
                    await shows(
                        lambda: row_with(browser, LEAVING, "left", "told to stop"), "a goodbye"
                    )
                    await shows(lambda: "6 peers, 2 gone" in browser.text(), "the headline")

                    await asyncio.to_thread(browser.click_peer, KILLED)
                    await shows(lambda: len(browser.rows("peers")) == 1, "one peer alone")
                    assert row_with(browser, KILLED, "dead")
                    assert all(f"\n{KILLED}\n" in row for row in browser.rows("events"))
                    assert f"only peer {KILLED}" in browser.text()
                    await asyncio.to_thread(check_quiet, browser)
        finally:
            for swarm in (rest, killed, leaving):
                swarm.stop()
            await asyncio.gather(*running, return_exceptions=True)

    with Broker() as broker:
        asyncio.run(watch(broker.url))


def row_with(browser: Browser, peer: str, *texts: str) -> bool:
    """Whether the table has a row of this peer with these texts."""
    rows = [row for row in browser.rows("peers") if row.split("\n")[0] == peer]
    return len(rows) == 1 and all(text in rows[0] for text in texts)


def check_quiet(browser: Browser) -> None:
    """No errors on the console, and nothing was asked of another machine; closes the page."""
    assert browser.errors() == []
    assert browser.hosts() <= {"127.0.0.1"}
    browser.open("about:blank")  # else the page complains when its server ends


def test_page_of_a_swarm_that_is_not_there_says_so(mosquitto: Broker, browser: Browser) -> None:
    async def watch() -> None:
        def connect() -> Any:
            return mqtt_transport(BrokerAddress(mosquitto.url), "observer-test")

        async with Observer(connect, "gardenn") as observer:
            source = LiveSource(observer, "the test's broker")
            async with page(lambda: source) as address:
                await asyncio.to_thread(browser.open, address)
                line = "no peer of swarm gardenn is on this broker yet; is that its name?"
                await shows(lambda: line in browser.text(), "the line")
                await asyncio.to_thread(check_quiet, browser)

    asyncio.run(watch())


def test_playback_of_a_results_folder(tmp_path: Path, browser: Browser) -> None:
    async def watch() -> None:
        (run,) = read_folders([write_live(tmp_path / "run")])
        clock = iter(range(0, 10_000, 5))  # every look is five seconds after the last
        async with page(lambda: PlaybackSource(run, lambda: next(clock))) as address:
            await asyncio.to_thread(browser.open, address)
            await shows(lambda: row_with(browser, "1", "dead", "killed by signal 9"), "the death")
            await shows(lambda: row_with(browser, "2", "left", "asked to leave"), "the goodbye")
            await shows(lambda: browser.points() > 1, "the curve")
            await asyncio.to_thread(check_quiet, browser)

    asyncio.run(watch())


def test_report_opens_without_a_network(tmp_path: Path, browser: Browser) -> None:
    write_report(
        [write_run(tmp_path / "a", links=[["0", "1"]]), write_live(tmp_path / "b")],
        tmp_path / "report.html",
    )
    browser.hosts()  # those of the tests before
    browser.open((tmp_path / "report.html").as_uri())
    wait_until(lambda: "killed by signal 9" in browser.text(), "the report is drawn", pause=0.05)
    assert "what differs between the runs" in browser.text()
    assert browser.errors() == []
    assert browser.hosts() == set()
