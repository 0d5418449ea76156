"""A small MQTT 3.1.1 broker for tests that can be made to lack what peers need."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Self

from gossamer.gossip.topics import matches


class BadBroker:
    """Speaks enough of MQTT 3.1.1 for one check.

    wildcards_get_retained: False as in RabbitMQ, which sends retained messages for exact filters alone.
    publishes_wills: whether it publishes the will of a client whose connection is lost.
    has_qos_1: False to hang up on clients that publish at QoS 1, as mosquitto with `max_qos 0` does.
    """

    def __init__(
        self,
        *,
        wildcards_get_retained: bool = True,
        publishes_wills: bool = True,
        has_qos_1: bool = True,
    ) -> None:
        self._has_qos_1 = has_qos_1
        self._wildcards_get_retained = wildcards_get_retained
        self._publishes_wills = publishes_wills
        self._retained: dict[str, bytes] = {}
        self._filters: dict[asyncio.StreamWriter, list[str]] = {}

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.stop_listening()

    def stop_listening(self) -> None:
        """Accept no further connections."""
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        will: tuple[str, bytes] | None = None
        self._filters[writer] = []
        try:
            while True:
                kind, body = await self._packet(reader)
                match kind >> 4:
                    case 1:  # CONNECT
                        if body[6] != 4:
                            writer.write(b"\x20\x02\x00\x01")  # unacceptable protocol version
                            return
                        will = self._will(body) if self._publishes_wills else None
                        writer.write(b"\x20\x02\x00\x00")
                    case 3:  # PUBLISH
                        if kind & 6 and not self._has_qos_1:
                            return
                        self._receive(kind, body, writer)
                    case 8:  # SUBSCRIBE
                        self._subscribe(body, writer)
                    case 12:
                        writer.write(b"\xd0\x00")
                    case 14:
                        will = None
                        return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            del self._filters[writer]
            if will is not None:
                self._publish(*will, retain=True)
            writer.close()

    async def _packet(self, reader: asyncio.StreamReader) -> tuple[int, bytes]:
        kind, length, shift = (await reader.readexactly(1))[0], 0, 0
        while True:
            byte = (await reader.readexactly(1))[0]
            length |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return kind, await reader.readexactly(length)

    def _will(self, body: bytes) -> tuple[str, bytes] | None:
        if not body[7] & 4:
            return None
        fields, at = [], 10
        for _ in range(3):  # client id, topic, payload
            length = int.from_bytes(body[at : at + 2], "big")
            fields.append(body[at + 2 : at + 2 + length])
            at += 2 + length
        return fields[1].decode(), fields[2]

    def _receive(self, kind: int, body: bytes, writer: asyncio.StreamWriter) -> None:
        end = 2 + int.from_bytes(body[:2], "big")
        topic = body[2:end].decode()
        if kind & 6:  # QoS 1
            writer.write(b"\x40\x02" + body[end : end + 2])
            end += 2
        self._publish(topic, body[end:], retain=bool(kind & 1))

    def _publish(self, topic: str, payload: bytes, *, retain: bool) -> None:
        if retain:
            self._retained[topic] = payload
        for writer, filters in self._filters.items():
            if any(matches(each, topic) for each in filters):
                self._send(writer, topic, payload, retain=False)

    def _subscribe(self, body: bytes, writer: asyncio.StreamWriter) -> None:
        filters, at = [], 2
        while at < len(body):
            length = int.from_bytes(body[at : at + 2], "big")
            filters.append(body[at + 2 : at + 2 + length].decode())
            at += length + 3
        self._filters[writer] += filters
        writer.write(bytes((0x90, 2 + len(filters))) + body[:2] + bytes(len(filters)))
        for each in filters:
            if self._wildcards_get_retained or not {"+", "#"} & set(each):
                for topic, payload in self._retained.items():
                    if payload and matches(each, topic):
                        self._send(writer, topic, payload, retain=True)

    def _send(
        self, writer: asyncio.StreamWriter, topic: str, payload: bytes, *, retain: bool
    ) -> None:
        body = len(topic).to_bytes(2, "big") + topic.encode() + payload
        length, rest = bytearray(), len(body)
        while True:
            rest, digit = divmod(rest, 128)
            length.append(digit | (128 if rest else 0))
            if not rest:
                break
        with suppress(ConnectionError):
            writer.write(bytes((0x30 | retain,)) + length + body)
