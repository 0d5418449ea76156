"""Benchmarks of views of large swarms: `gossamer topology show`, `topology.facts()`, and a live page.

Each measurement is made in a new process, without torch, so that its memory is that of the work.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

from . import Row, in_own_process, within_limit

# --- graphs of up to 100,000 peers ------------------------------------------------------------------

MAX_SECONDS, MAX_GB = 30.0, 2.0
"""The limits on time and memory for graphs."""
SIZES = (1_000, 10_000, 100_000)
SHOWN_PEERS = 10_000


def topology() -> list[Row]:
    """Measure `show` on 10,000 peers, `facts` on random 4-regular graphs, and how its time grows."""
    cost = in_own_process(measure_graph, "show", SHOWN_PEERS)
    rows = _rows(f"topology show, {SHOWN_PEERS:,} peers", *cost)
    costs = {size: in_own_process(measure_graph, "facts", size) for size in SIZES}
    rows += _rows(f"topology facts, {SIZES[-1]:,} peers", *costs[SIZES[-1]])
    for small, large in pairwise(SIZES):
        small_seconds, large_seconds = costs[small][0], costs[large][0]
        power = log(large_seconds / small_seconds) / log(large / small)
        note = f"ten times the peers; time grows as peers^{power:.2f}"
        name = f"facts, {large:,} against {small:,} peers"
        rows.append(Row(name, "s", large_seconds, small_seconds, note=note))
    return rows


def _rows(name: str, seconds: float, peak: float) -> list[Row]:
    return [
        within_limit(name, "s", seconds, MAX_SECONDS),
        within_limit(f"{name}, memory", "GB", peak / 1e9, MAX_GB, "peak of the whole process"),
    ]


def measure_graph(function: str, peers: int) -> tuple[float, float]:
    """Return the seconds of `function` ("show" or "facts") without imports, and this process's peak bytes."""
    from ...topology import facts
    from ..arena import peak_memory
    from ..graphs import load_graph
    from ..graphs.show import examine, show

    started = time.perf_counter()
    topology = load_graph("regular:4", peers, check_connected=False)  # facts() checks it
    if function == "show":
        with tempfile.TemporaryDirectory(prefix="gossamer-bench-") as folder:
            show(examine(topology), Path(folder))
    else:
        facts(topology.graph)
    return time.perf_counter() - started, float(peak_memory())


# --- a page of 500 peers that publish a summary once a second, with one browser window --------------
# Every peer also has a card, and a status that it repeats. Messages are read, applied and drawn by the code
# of `gossamer watch`, and encoded as they would be sent to the window; the network and the browser are left
# out.

SWARM = "crowd"
PEERS, WATCHED_SECONDS, DEGREE, STATUS_SECONDS = 500, 120, 4, 15
"""Peers, simulated seconds, links of each peer, and seconds between two statuses of one peer."""
GROUPS = 10
"""Partial models that some of the peers share, beside the one of all."""
START = 1_000_000.0
"""When the simulated seconds begin, by the wall clock."""
MAX_CORE_SHARE, MAX_MEGABYTES, MAX_DELAY = 0.5, 250.0, 2.0
"""The limits: share of a core, resident megabytes, and seconds from a message to the page."""


def page() -> list[Row]:
    """Measure the processor time and memory of watching a large swarm, and the delay of the page."""
    share, megabytes, delay, sent = in_own_process(watch, OMP_NUM_THREADS="1")
    name = f"page of {PEERS} peers"
    memory_note = "peak of the whole process, Bokeh included"
    note = f"the pause between two updates and the slowest update; {sent:.2f} MB an update"
    return [
        within_limit(f"{name}, share of a core", "cores", share, MAX_CORE_SHARE),
        within_limit(f"{name}, memory", "MB", megabytes, MAX_MEGABYTES, memory_note),
        within_limit(f"{name}, age of what it shows", "s", delay, MAX_DELAY, note),
    ]


def watch() -> tuple[float, float, float, float]:
    """Return the share of a core, peak megabytes, the greatest delay, and megabytes sent per update."""
    from bokeh.document import Document
    from bokeh.protocol import Protocol

    from ...peer import SwarmState
    from ..arena import peak_memory
    from ..page import POLL_SECONDS, LiveSource, build_page

    state, now = SwarmState(SWARM), [START]
    observer: Any = _Connected(state)
    source = LiveSource(observer, "nowhere", lambda: now[0])
    names = [f"peer-{index}" for index in range(PEERS)]
    doc = Document()
    changes: list[Any] = []
    used, slowest, sent = 0.0, 0.0, 0
    update = None
    for second in range(WATCHED_SECONDS):
        messages = [m for index in range(PEERS) for m in _messages(names, index, second)]
        now[0] = START + second
        started = time.process_time()
        for topic, payload in messages:
            state.receive(topic, payload, now[0], retained=second == 0)
        if update is None:
            update = build_page(doc, source)
            doc.on_change(changes.append)
        update()
        if changes:
            message: Any = Protocol().create("PATCH-DOC", changes)
            sent += len(message.content_json)
            sent += sum(len(buffer.to_bytes()) for buffer in message.buffers)
            changes.clear()
        cost = time.process_time() - started
        if second >= WATCHED_SECONDS // 4:  # the page was made, and the curves have some points
            used, slowest = used + cost, max(slowest, cost)
    share = used / (WATCHED_SECONDS - WATCHED_SECONDS // 4)
    return share, peak_memory() / 1e6, POLL_SECONDS + slowest, sent / WATCHED_SECONDS / 1e6


class _Connected:
    """Stands for an `Observer` that is connected; the benchmark passes messages to `swarm` itself."""

    connected, connection_problem = True, ""

    def __init__(self, swarm: object) -> None:
        self.swarm = swarm


def _messages(names: list[str], index: int, second: int) -> Iterator[tuple[str, bytes]]:
    """What a peer publishes in one second: the topic and the payload of each message."""
    from ...gossip import topics
    from ...peer import Card, ModelSummary, Status, Summary

    name = names[index]
    draw = random.Random(f"{index} {second}")
    models = ("global", f"group-{index % GROUPS}")
    if second == 0:
        card = Card("s", START, 100, {model: [] for model in models})
        yield topics.card(SWARM, name), card.encode()
    if second == 0 or second % STATUS_SECONDS == index % STATUS_SECONDS:
        status = Status("online", "s", "training", counts=dict.fromkeys(models, second))
        yield topics.status(SWARM, name), status.encode()
    links = [names[(index + step) % PEERS] for step in range(1, DEGREE // 2 + 1)]
    encoded = Summary(
        session="s", time=START + second, since=START, state="training", phase="training",
        round=second, rounds=None, version="0", neighbours=tuple(links), neighbour_count=len(links),
        models={model: ModelSummary(True, second, 1, 1, draw.random(), 1.0) for model in models},
        metrics={"accuracy": min(0.95, second / 100 + draw.random() / 10), "loss": draw.random()},
        sent_bytes=1000 * second,
    ).encode()  # fmt: skip
    assert encoded is not None
    yield topics.summary(SWARM, name), encoded
