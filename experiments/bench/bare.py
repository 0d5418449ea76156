"""The baseline of gossip: `python bare.py SPEC.json`, clients that move bytes with aiomqtt and no more.

In every turn each client sends `messages` payloads to its neighbours, one after the other, and waits
until it has received as many. Started as a script it imports nothing heavy: what it costs is what
aiomqtt and the broker cost. Turns are gates, which the benchmark's peers pass as well:

The parent holds a lock on one file per turn; whoever waits for that turn asks for a shared lock on
it, and gets it when the parent lets go. Waiting costs nothing, and a killed parent opens every gate.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiomqtt

READY = -1
"""The turn before the first: to be through with it is to wait for the first."""
_POLL_SECONDS = 0.02


def wait_for_turn(folder: Path, side: str, turn: int) -> None:
    """Block until the parent opens this turn of this side."""
    descriptor = os.open(folder / f"gate-{side}-{turn}", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def say_through(folder: Path, side: str, turn: int, name: str) -> None:
    """Tell the parent that `name` is through with this turn, and what its process has cost so far."""
    part = folder / f"part-{side}-{turn}-{name}"
    stamp = f"{time.monotonic_ns()} {os.getpid()} {time.process_time_ns()}"
    part.write_text(stamp, encoding="utf-8")
    part.replace(folder / f"through-{side}-{turn}-{name}")


class Gates:
    """The parent's end, for one side of a comparison.

    names: who takes part. alive: called while waiting; raises if a process ended before its time.
    """

    def __init__(
        self, folder: Path, side: str, turns: int, names: Sequence[str], alive: Callable[[], None]
    ):
        self._folder, self._side, self._names, self._alive = folder, side, names, alive
        self._locks: list[int] = []
        self._processor = 0
        for turn in range(turns):
            flags = os.O_RDWR | os.O_CREAT
            self._locks.append(os.open(folder / f"gate-{side}-{turn}", flags, 0o600))
            fcntl.flock(self._locks[-1], fcntl.LOCK_EX)

    def ready(self, timeout: float) -> None:
        """Wait until everybody waits for the first turn."""
        _, self._processor = self._wait(READY, timeout)

    def open(self, turn: int) -> None:
        """Let everybody begin a turn."""
        os.close(self._locks[turn])

    def run(self, turn: int, timeout: float) -> tuple[float, float]:
        """Open a turn; the seconds until the last was through, and the processor seconds of all."""
        started = time.monotonic_ns()
        self.open(turn)
        ended, processor = self._wait(turn, timeout)
        used, self._processor = processor - self._processor, processor
        return (ended - started) / 1e9, used / 1e9

    def _wait(self, turn: int, timeout: float) -> tuple[int, int]:
        """When the last was through, and the processor time of all processes since they began."""
        deadline = time.monotonic() + timeout
        files = [self._folder / f"through-{self._side}-{turn}-{name}" for name in self._names]
        while missing := [file for file in files if not file.exists()]:
            self._alive()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"benchmark {self._side}, turn {turn}: {len(missing)} of {len(files)} were not "
                    f"through after {timeout:g} s; the machine may be busy: try again"
                )
            time.sleep(_POLL_SECONDS)
        stamps = [[int(word) for word in file.read_text("utf-8").split()] for file in files]
        processor: dict[int, int] = {}
        for _, process, used in stamps:  # peers that share a process: its latest figure counts
            processor[process] = max(used, processor.get(process, 0))
        return max(stamp[0] for stamp in stamps), sum(processor.values())


# --- the clients ------------------------------------------------------------------------------------


async def run(spec: dict[str, Any], name: str, neighbours: list[str]) -> None:
    """One client: take part in every turn."""
    folder, messages, window = Path(spec["folder"]), spec["messages"], 2 * len(neighbours)
    payload = bytes(spec["bytes"])
    received = 0
    arrived = asyncio.Condition()

    # The receiver in a group of its own: whatever ends the client, it is seen to its end too.
    client = aiomqtt.Client("127.0.0.1", spec["port"], identifier=f"bare-{name}")
    async with client, asyncio.TaskGroup() as group:
        await client.subscribe(f"bare/{name}")

        async def receive() -> None:
            nonlocal received
            async for message in client.messages:
                if len(message.payload) != len(payload):
                    raise RuntimeError(f"client {name} received something else than was sent")
                received += 1
                async with arrived:
                    arrived.notify_all()

        async def until(count: int) -> None:
            async with arrived:
                await arrived.wait_for(lambda: received >= count)

        receiver = group.create_task(receive())
        say_through(folder, "bare", READY, name)
        for turn in range(spec["turns"]):
            await asyncio.to_thread(wait_for_turn, folder, "bare", turn)
            for index in range(messages):
                # Never far ahead of what comes in, or the broker would have to hold it all.
                await until(turn * messages + index - window)
                await client.publish(f"bare/{neighbours[index % len(neighbours)]}", payload)
            await until((turn + 1) * messages)
            say_through(folder, "bare", turn, name)
        receiver.cancel()


async def main(spec: dict[str, Any]) -> None:
    """All clients of this process."""
    async with asyncio.TaskGroup() as group:
        for name, neighbours in spec["clients"].items():
            group.create_task(run(spec, name, neighbours))


def _first(errors: BaseExceptionGroup) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    try:
        asyncio.run(main(json.loads(Path(sys.argv[1]).read_text("utf-8"))))
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseExceptionGroup as errors:
        if not isinstance(_first(errors), aiomqtt.MqttError):
            raise
        sys.exit(f"bare client: {_first(errors)}")  # the broker ended first: one line will do
