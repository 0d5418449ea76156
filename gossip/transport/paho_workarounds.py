"""What paho does slowly or wrong, done here: large packets, websockets, sockets of failed handshakes.

`Packets`: paho copies what is left of a packet before every write to the socket, grows a packet byte string
by byte string as it is read, and cuts topic and payload off one after the other. For a megabyte of parameters
that is most of what a message costs. `Packets` stands between paho and the socket instead: a large payload is
written from where it lies, and read into the place where it stays. Where a version of paho lacks a private
name that this needs, `supports` says so and paho does the work itself: slower, and otherwise the same.

`patch_sender`: as paho 2 stands, a websocket frame that the socket takes in two goes loses its packet (the
wrapper reports "0 bytes sent", and paho forgets what it was sending), masking is a Python loop over every
byte (0.1 s and more per MB, in the event loop), and a packet is one frame, which servers refuse above 1 MB.

`TidySocket`: paho does not close a socket whose handshake fails.
"""

from __future__ import annotations

import itertools
import logging
import os
import ssl
import struct
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import paho.mqtt.client as paho
from paho.mqtt import MQTTException
from paho.mqtt.enums import MQTTErrorCode

from .base import Payload

Deliver = Callable[[str, bytes | memoryview, bool], None]
"""Called with topic, payload and whether it was retained, for every message at QoS 0. Only a large
payload is a view: of memory that nobody else uses."""

_log = logging.getLogger(__name__)
_FIRST_ID = 1 << 16  # of messages at QoS 0, which need none on the wire; paho's own are below
_PUBLISH, _PUBACK = 0x30, 0x40
_TOO_LARGE, _UNSPECIFIED = 0x95, 0x80
_SCRATCH = 64 * 1024  # what one read takes in while no large packet is open
_READS = 64  # per turn of the event loop: other connections want theirs too
_SUCCESS, _AGAIN = paho.MQTT_ERR_SUCCESS, paho.MQTT_ERR_AGAIN
_LOST, _BROKEN = paho.MQTT_ERR_CONN_LOST, paho.MQTT_ERR_PROTOCOL
# What pays for them: sending and receiving 1 MB takes 0.6 ms of processor time (median of 7), 3.2 ms if only
# the writing half is used, 4.2 ms with paho alone.
_NEEDED = ("_packet_read", "_packet_handle", "_in_packet", "_out_packet", "_last_bytes_received")


def supports(client: paho.Client) -> bool:
    """Whether this version of paho has all that `Packets` needs."""
    return all(hasattr(client, name) for name in _NEEDED)


class Packets:
    """Reads and writes packets for a paho client over TCP or TLS (not websockets, which frame them).

    Attach it before the client connects. Everything but messages at QoS 0 is still handled by paho.
    """

    def __init__(
        self,
        client: paho.Client,
        deliver: Deliver,
        *,
        version5: bool,
        log: logging.Logger = _log,
    ) -> None:
        self._client = cast(Any, client)
        self._deliver, self._version5, self._log = deliver, version5, log
        self._ids = itertools.count(_FIRST_ID)
        self._scratch = memoryview(bytearray(_SCRATCH))
        self._rest = b""  # the beginning of a packet whose length is not known yet
        self._command = 0
        self._packet: memoryview | None = None  # a packet that is not complete yet
        self._filled = 0
        self.too_large: set[int] = set()
        """Ids of messages that the broker refused for their size."""
        self._client._packet_read = self.read

    # --- writing --------------------------------------------------------------------------------

    def publish(self, topic: str, payload: Payload) -> paho.MQTTMessageInfo:
        """Send at QoS 0, not retained, as paho's `publish` does; `payload` must not change until sent."""
        name = topic.encode()
        properties = b"\0" if self._version5 else b""
        length = 2 + len(name) + len(properties) + len(payload)
        head = b"".join(
            (bytes((_PUBLISH,)), _varint(length), len(name).to_bytes(2, "big"), name, properties)
        )
        client, mid = self._client, next(self._ids)
        info = paho.MQTTMessageInfo(mid)
        if len(payload) <= _SCRATCH:
            client._out_packet.append(_entry(_PUBLISH, mid, head + payload, info))
        else:
            # Two entries of paho's queue, one packet: nobody else writes in between, and what is not
            # a PUBLISH is written without further ado.
            client._out_packet.append(_entry(0, 0, head, None))
            client._out_packet.append(_entry(_PUBLISH, mid, memoryview(payload), info))
        client.loop_write()
        return info

    # --- reading --------------------------------------------------------------------------------

    def read(self) -> MQTTErrorCode:
        """Take in what the socket has; paho calls this where it would read one packet."""
        for _ in range(_READS):
            sock = self._client.socket()
            if sock is None:
                return _LOST
            target = self._scratch if self._packet is None else self._packet[self._filled :]
            try:
                count = sock.recv_into(target)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return _AGAIN  # what TLS wants to write goes out with the next message or ping
            except OSError as error:
                self._log.error("failed to receive on socket: %s", error)  # a TLS alert says why
                return _LOST
            if count == 0:
                return _LOST
            self._client._last_bytes_received = paho.time_func()
            code = self._fill(count) if self._packet is not None else self._cut(count)
            if code != _SUCCESS:
                return code
            if count < len(target) and not isinstance(sock, ssl.SSLSocket):
                return _AGAIN  # the socket is empty: asking once more would only tell us so
        return _SUCCESS

    def _fill(self, count: int) -> MQTTErrorCode:
        """Count what was read into the open packet, and hand it on when it is complete."""
        packet = cast(memoryview, self._packet)
        self._filled += count
        if self._filled < len(packet):
            return _SUCCESS
        self._packet = None
        return self._handle(self._command, packet)

    def _cut(self, count: int) -> MQTTErrorCode:
        """Cut what was read into packets; the last one may have just begun."""
        data = self._scratch[:count]
        if self._rest:
            data, self._rest = memoryview(self._rest + bytes(data)), b""
        while data:
            length, start = _length(data)
            if start < 0:
                return _BROKEN
            # A topic's length is needed to place its payload, so wait for that too.
            if start == 0 or (length > 2 and len(data) < start + 2):
                self._rest = bytes(data)
                return _SUCCESS
            command, body = data[0], data[start : start + length]
            if len(body) < length:
                self._command, self._filled = command, len(body)
                self._packet = _room(length, 2 + int.from_bytes(body[:2], "big") + self._version5)
                self._packet[: len(body)] = body
                return _SUCCESS
            data = data[start + length :]
            code = self._handle(command, body)
            if code != _SUCCESS or self._client.socket() is None:
                return code
        return _SUCCESS

    def _handle(self, command: int, packet: memoryview) -> MQTTErrorCode:
        if command & 0xF6 == _PUBLISH:  # at QoS 0
            return self._message(command, packet)
        if self._version5 and command == _PUBACK and packet[2:3] == bytes((_TOO_LARGE,)):
            # mosquitto says so, though MQTT has no such answer to a message: paho would hang up on it.
            self.too_large.add(int.from_bytes(packet[:2], "big"))
            packet = memoryview(bytes((*packet[:2], _UNSPECIFIED, *packet[3:])))
        self._client._in_packet = {
            "command": command,
            "have_remaining": 1,
            "remaining_count": [],
            "remaining_mult": 1,
            "remaining_length": len(packet),
            "packet": bytearray(packet),
            "to_process": 0,
            "pos": 0,
        }
        try:
            return self._client._packet_handle()
        except (ValueError, IndexError, KeyError, MQTTException):
            return _BROKEN

    def _message(self, command: int, packet: memoryview) -> MQTTErrorCode:
        start = 2 + int.from_bytes(packet[:2], "big")
        try:
            topic = str(packet[2:start], "utf-8")
        except UnicodeDecodeError:
            return _BROKEN
        if self._version5:
            length, size = _varint_at(packet, start)
            start = size + length if size > 0 else len(packet) + 1
        if start > len(packet):
            return _BROKEN
        payload = packet[start:]
        small = len(payload) <= _SCRATCH
        self._deliver(topic, bytes(payload) if small else payload, bool(command & 1))
        return _SUCCESS


def _entry(command: int, mid: int, data: Any, info: paho.MQTTMessageInfo | None) -> dict[str, Any]:
    """An entry of paho's queue of what is to be written."""
    return {
        "command": command,
        "mid": mid,
        "qos": 0,
        "pos": 0,
        "to_process": len(data),
        "packet": data,
        "info": info,
    }


def _room(length: int, payload_at: int) -> memoryview:
    """Room for a packet, placed so that what follows `payload_at` bytes is aligned for numpy."""
    shift = -payload_at % 8
    return np.empty(shift + length, np.uint8).data[shift:]


def _length(data: memoryview) -> tuple[int, int]:
    """The remaining length of a packet, and where it begins: 0 if not known yet, -1 if malformed."""
    return _varint_at(data, 1)


def _varint_at(data: memoryview, start: int) -> tuple[int, int]:
    """A length in MQTT's own notation, and where it ends: 0 if cut off, -1 if malformed."""
    value = 0
    for place in range(4):
        if start + place >= len(data):
            return 0, 0
        byte = data[start + place]
        value |= (byte & 127) << (7 * place)
        if byte < 128:
            return value, start + place + 1
    return 0, -1


def _varint(value: int) -> bytes:
    digits = bytearray()
    while True:
        value, digit = divmod(value, 128)
        digits.append(digit | (128 if value else 0))
        if not value:
            return bytes(digits)


# --- websockets --------------------------------------------------------------------------------------

FRAME_BYTES = 256 * 1024
_BINARY_FINAL = 0x82
_MASKED = 0x80


def frame(data: memoryview) -> bytearray:
    """`data` as one masked binary frame (RFC 6455, 5.2)."""
    size, key = len(data), os.urandom(4)
    out = bytearray([_BINARY_FINAL])
    if size < 126:
        out.append(_MASKED | size)
    elif size < 1 << 16:
        out += struct.pack("!BH", _MASKED | 126, size)
    else:
        out += struct.pack("!BQ", _MASKED | 127, size)
    out += key
    mask = np.tile(np.frombuffer(key, np.uint8), size // 4 + 1)[:size]
    out += np.bitwise_xor(np.frombuffer(data, np.uint8), mask).data
    return out


def patch_sender(wrapper: Any) -> None:
    """Replace the sender of a paho websocket wrapper; anything else is left as it is."""
    if not hasattr(wrapper, "_send_impl"):
        return
    waiting = memoryview(b"")
    promised = 0

    def send(data: bytes | bytearray) -> int:
        nonlocal waiting, promised
        if not waiting:
            part = memoryview(data)[:FRAME_BYTES]
            waiting, promised = memoryview(frame(part)), len(part)
        waiting = waiting[wrapper._socket.send(waiting) :]
        if waiting:
            raise BlockingIOError  # paho keeps the packet and calls again with the same bytes
        return promised

    wrapper._send_impl = send


class TidySocket(ssl.SSLSocket):
    """Closes itself when its handshake, or that of websockets, fails; paho forgets to."""

    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except BaseException:
            self.close()
            raise

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        try:
            return super().recv(buflen, flags)
        except OSError:
            if self.gettimeout():  # paho lets a socket block only until it is connected
                self.close()
            raise
