"""A faulty TCP proxy on loopback, between MQTT clients and their broker.

It knows just enough MQTT to cut the stream into packets. PUBLISH packets at QoS 0 are dropped or
duplicated with given probabilities, from a seed; everything else passes. It can also pause, as a
congested link does, and cut every connection, as a failing one does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any, Self

import numpy as np

_PUBLISH = 3


class FaultyProxy:
    """`async with FaultyProxy(broker.port, drop=0.1) as proxy:` then connect to `proxy.url`."""

    def __init__(
        self,
        port: int,
        *,
        host: str = "127.0.0.1",
        drop: float = 0.0,
        duplicate: float = 0.0,
        seed: int | np.random.Generator = 0,
    ) -> None:
        self.drop = drop
        self.duplicate = duplicate
        self.counters: Counter[str] = Counter()
        self._target = (host, port)
        self._random = np.random.default_rng(seed)
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"mqtt://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        assert self._server is not None
        self._server.close()
        self.resume()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def pause(self) -> None:
        """Let nothing through, in either direction, until `resume`."""
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    def cut(self) -> None:
        """Cut every connection, without a goodbye to either side. New ones are accepted."""
        for writer in self._writers:
            self.counters["cut"] += 1
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            up_reader, up_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            self._tasks.discard(task)
            return
        self._writers |= {writer, up_writer}
        pumps = [
            asyncio.create_task(self._pump(reader, up_writer)),
            asyncio.create_task(self._pump(up_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for one in (writer, up_writer):
                self._writers.discard(one)
                one.close()
                with contextlib.suppress(OSError):
                    await one.wait_closed()
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                packet = await read_packet(reader)
                await self._flowing.wait()
                for _ in range(self._copies(packet)):
                    writer.write(packet)
                await writer.drain()

    def _copies(self, packet: bytes) -> int:
        if packet[0] >> 4 != _PUBLISH or packet[0] & 0b0110:
            return 1
        self.counters["gossip"] += 1
        if self._random.random() < self.drop:
            self.counters["drop"] += 1
            return 0
        if self._random.random() < self.duplicate:
            self.counters["duplicate"] += 1
            return 2
        return 1


async def read_packet(reader: asyncio.StreamReader) -> bytes:
    """One MQTT packet, header included."""
    head = bytearray(await reader.readexactly(1))
    size = shift = 0
    while True:
        head += await reader.readexactly(1)
        size |= (head[-1] & 0x7F) << shift
        shift += 7
        if head[-1] < 0x80:
            break
        if shift > 21:
            raise ConnectionError("not MQTT: a length of more than four bytes")
    return bytes(head) + await reader.readexactly(size)
