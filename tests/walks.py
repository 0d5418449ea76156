"""Walks: in how many modules something must run until something is done. `python tests/house.py` shows them.

A module counts when one of its functions runs, other than while modules are being imported. Each walk has
a process of its own, so that nothing was computed or imported before: `python tests/walks.py NAME` prints
its modules as JSON.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import FrameType
from typing import Any

EXACT = Path(__file__).parent / "golden" / "runs" / "exact.toml"
WALKS = {
    "exact": "config → exact round → metrics.jsonl",
    "int8": 'the same on a ring with compress = "int8"',
    "time": "the same with [time]",
    "packet": "packet → credited → network, plain",
    "sealed": "packet → credited → network, with trust",
    "join": "gossamer join → about to live",
}
LIMIT = 120
"""Seconds after which a walk is given up."""


def modules(name: str) -> list[str]:
    """The modules on a walk, found by a process that goes it. RuntimeError if it does not arrive."""
    command = [sys.executable, __file__, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"walk {name}: did not arrive within {LIMIT} s") from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise RuntimeError(f"walk {name}: {done.stderr.strip()[-500:] or 'printed nothing'}")
    return json.loads(lines[-1])


class Recorder:
    """Notes the modules of gossamer in which a function runs, on all threads that start from now on.

    wanted: whether to note what runs now, asked on the thread that runs it.
    on_call, on_return: told every function of gossamer that is called, and every one that has returned.
    """

    def __init__(
        self,
        wanted: Callable[[], bool] = lambda: True,
        *,
        on_call: Callable[[FrameType], None] = lambda _: None,
        on_return: Callable[[], None] = lambda: None,
    ) -> None:
        self.seen: set[str] = set()
        self._over = threading.Lock()
        self._wanted, self._on_call, self._on_return = wanted, on_call, on_return

    def start(self) -> None:
        """Begin, on this thread and on those that it starts."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        module = _module(frame)
        if module != "gossamer" and not module.startswith("gossamer."):
            return
        if event == "return":
            self._on_return()
            return
        # Bodies of modules and classes have no locals of their own.
        is_function = frame.f_code.co_flags & inspect.CO_NEWLOCALS
        if not is_function or not self._wanted() or _importing(frame):
            return
        self.seen.add(module)
        self._on_call(frame)

    def tell(self) -> None:
        """Print what was noted, and end the process: the walk is over, whatever still runs."""
        sys.setprofile(None)
        if self._over.acquire(blocking=False):  # several threads may see that it is
            print(json.dumps(sorted(self.seen.copy())), file=sys.__stdout__, flush=True)
            os._exit(0)


def _importing(frame: FrameType | None) -> bool:
    """Whether a module of gossamer is being imported above this frame."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and _module(frame).startswith("gossamer"):
            return True
        frame = frame.f_back
    return False


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__") or ""


# --- simulations --------------------------------------------------------------------------------


def simulate(folder: Path, *, before: str = "", after: str = "") -> None:
    """`gossamer simulate`, of the golden run `exact` with more keys before and more tables after it."""
    config = folder / "config.toml"
    config.write_text(f"{before}\n{EXACT.read_text('utf-8')}\n{after}\n", "utf-8")
    recorder = Recorder()
    recorder.start()
    _gossamer("simulate", str(config), "--out", str(folder / "out"))
    if not (folder / "out" / "metrics.jsonl").exists():
        raise RuntimeError("gossamer simulate left no metrics.jsonl")
    recorder.tell()


def _gossamer(*arguments: str) -> None:
    from gossamer.experiments.cli.app import main

    try:
        main(arguments)
    except SystemExit as stop:
        if stop.code:
            raise


# --- a device joins -----------------------------------------------------------------------------


def join(folder: Path) -> None:
    """`gossamer join` until its peer is about to live: connected, and ready to hear what others send."""
    from gossamer.peer import Broker

    (folder / "peer.toml").write_text(f'name = "ann"\nconfig = "{EXACT}"\nindex = 0\n', "utf-8")

    def arrived(frame: FrameType) -> None:
        if frame.f_code.co_qualname.endswith("Transport.messages"):
            sys.setprofile(None)
            broker.close()
            recorder.tell()

    recorder = Recorder(on_call=arrived)
    with Broker() as broker:
        url = broker.url
        recorder.start()
        _gossamer(
            "join", "--broker", url, "--swarm", "house",
            "--config", str(folder / "peer.toml"), "--out", str(folder / "out"),
        )  # fmt: skip
    raise RuntimeError("gossamer join ended, and nobody asked its transport for messages")


# --- a packet arrives ---------------------------------------------------------------------------

_whose = contextvars.ContextVar("whose", default="")
LEAST = 2048
"""Bytes of the smallest packet that must be a transfer: other messages are shorter."""
PACKETS = 21
"""Transfers that are followed on their way."""


class Adder:
    """A learner that trains by adding a number to all its parameters."""

    def __init__(self, number: float) -> None:
        from gossamer.models import Metrics, SlicedNetwork, mlp

        self.network = SlicedNetwork(mlp("20=40=10"), {"global": "20-40-10"}, seed=0)
        self.thread = 0
        """The thread that trains, and averages."""
        self._number, self._metrics = number, Metrics(0.0, 1, 1)

    def train(self, steps: int) -> Any:
        self.thread = threading.get_ident()
        self.network.flat.detach().add_(self._number)
        return self._metrics

    def test(self) -> Any:
        return self._metrics

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


def packet(folder: Path, *, trust: bool) -> None:
    """A transfer between two peers, from the packet that the transport hands over until its value is in
    the receiver's network.

    Ann has trained her only round and waits for Bob, who trains and pushes on and on. A module is on the way
    if it was on that of most of his transfers: what else Ann does now and then is on that of few. What Bob's
    side does at the same time does not count.
    """
    import torch

    from gossamer.gossip import MemoryBroker, MemoryTransport
    from gossamer.peer import Peer, Settings

    settings = {
        "ann": Settings(swarm="nest", rounds=1),
        "bob": Settings(swarm="nest", rounds=1_000_000),
    }
    if trust:
        from papers_kit import Papers

        papers = Papers(folder)
        papers.names(*settings)
        settings = {label: papers.settings(label, each) for label, each in settings.items()}
    learners = {"ann": Adder(0.0), "bob": Adder(1e-4)}  # so little that no guard minds
    ann = learners["ann"]
    before: list[torch.Tensor] = []
    """Ann's parameters when a packet arrived that is on its way; else empty."""
    ways: Counter[str] = Counter()
    arrived = 0

    class Watched(MemoryTransport):
        """Ann's transport, which sees transfers arrive."""

        async def messages(self) -> AsyncIterator[Any]:
            async for message in super().messages():
                if ann.thread and not before and len(message.payload) >= LEAST:
                    recorder.seen.clear()
                    before.append(ann.network.flat.detach().clone())
                yield message

    def wanted() -> bool:
        return bool(before) and (_whose.get() == "ann" or threading.get_ident() == ann.thread)

    def look() -> None:
        nonlocal arrived
        if wanted() and not torch.equal(ann.network.flat, before[0]):
            ways.update(recorder.seen.copy())
            before.clear()
            arrived += 1
        if arrived == PACKETS:
            recorder.seen = {module for module, times in ways.items() if times > PACKETS / 2}
            recorder.tell()

    recorder = Recorder(wanted, on_return=look)
    broker = MemoryBroker()

    async def live(label: str) -> None:
        _whose.set(label)
        kind = Watched if label == "ann" else MemoryTransport
        await Peer(
            label, learners[label], settings[label],
            lambda client, will, hook: kind(broker, client, will=will, on_connect=hook),
        ).run()  # fmt: skip

    async def swarm() -> None:
        async with asyncio.timeout(LIMIT), asyncio.TaskGroup() as group:
            for label in learners:
                group.create_task(live(label))

    recorder.start()
    asyncio.run(swarm())


GO: dict[str, Callable[[Path], None]] = {
    "exact": simulate,
    "int8": lambda folder: simulate(
        folder, before='topology = "ring"', after='[gossip]\ncompress = "int8"'
    ),
    "time": lambda folder: simulate(folder, after="[time]"),
    "packet": lambda folder: packet(folder, trust=False),
    "sealed": lambda folder: packet(folder, trust=True),
    "join": join,
}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as here:
        GO[sys.argv[1]](Path(here))
