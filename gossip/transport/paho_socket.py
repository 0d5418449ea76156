"""What paho does slowly or wrong, done by a socket of ours that stands between paho and the real one.

`PacketSocket`: paho copies what is left of a packet before every write to the socket, grows a packet byte
string by byte string as it is read, and cuts topic and payload off one after the other. For a megabyte of
parameters that is most of what a message costs: sending and receiving it takes 0.6 ms of processor time, and
1.3 with paho alone. So a large payload is written from where it lies and read into the place where it stays;
all packets but messages at QoS 0 are handed on to paho.

It frames websockets, too. As paho 2 stands, a frame that the socket takes in two goes loses its packet (the
wrapper reports "0 bytes sent", and paho forgets what it was sending), masking is a Python loop over every
byte (0.1 s and more per MB, in the event loop), and a packet is one frame, which servers refuse above 1 MB.

`TidySocket`: paho does not close a socket whose handshake fails.
"""

from __future__ import annotations

import itertools
import os
import ssl
import struct
import time
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numpy as np
import paho.mqtt.client as paho

from .base import Payload

Deliver: TypeAlias = Callable[[str, bytes | memoryview, bool], None]
"""Called with topic, payload and whether it was retained, for every message at QoS 0. Only a large
payload is a view: of memory that nobody else uses."""

_FIRST_ID = 1 << 16  # of messages at QoS 0, which need none on the wire; paho's own are below
_PUBLISH, _PUBACK = 0x30, 0x40
_PINGRESP = b"\xd0\0"
_TOO_LARGE, _UNSPECIFIED = 0x95, 0x80
_SCRATCH = 64 * 1024  # what one read takes in while no large packet is open
_READS = 64  # per turn of the event loop: other connections want theirs too
FRAME_BYTES = 256 * 1024


class PacketSocket:
    """The socket that a paho client reads from and writes to, made of the one that it has just opened.

    `error` is what reading failed with, which paho only logs: a TLS alert says there why the broker hung up.
    """

    def __init__(self, client: paho.Client, deliver: Deliver, *, version5: bool) -> None:
        self._client, self._sock = cast(Any, client), cast(Any, client.socket())
        # paho keeps no place for a socket of ours: its name for it is private.
        self._client._sock = self
        # The socket inside paho's wrapper for websockets, whose own way of writing loses packets.
        self._inner = getattr(self._sock, "_socket", None)
        self._deliver, self._version5 = deliver, version5
        self.error: OSError | None = None
        self.too_large: set[int] = set()
        """Ids of messages that the broker refused for their size."""
        self._over = False
        self._ids = itertools.count(_FIRST_ID)
        self._scratch = memoryview(bytearray(_SCRATCH))
        self._rest = b""  # the beginning of a packet whose length is not known yet
        self._head = b""  # of the packet that is not complete yet
        self._packet: memoryview | None = None
        self._filled = 0
        self._for_paho = b""
        self._told = time.monotonic()
        self._frame, self._framed = memoryview(b""), 0

    def fileno(self) -> int:
        """The file descriptor, for the event loop."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close the real socket."""
        self._sock.close()

    def pending(self) -> int:
        """Bytes that were read already: the event loop does not tell of these."""
        return len(self._for_paho) + (self._sock.pending() if hasattr(self._sock, "pending") else 0)

    def hang_up(self) -> None:
        """Cut the connection without a word to the broker, and let paho find out at once."""
        self._over = True
        self._client.disconnect()
        self._client.loop_write()

    # --- writing --------------------------------------------------------------------------------

    def publish(self, topic: str, payload: Payload) -> paho.MQTTMessageInfo:
        """Send at QoS 0, not retained, as paho's `publish` does; `payload` must not change until sent."""
        name = topic.encode()
        body = len(name).to_bytes(2, "big") + name + (b"\0" if self._version5 else b"")
        head = bytes((_PUBLISH,)) + _varint(len(body) + len(payload)) + body
        info = paho.MQTTMessageInfo(next(self._ids))
        # paho's queue of what is to be written: put there directly, a payload is copied by nobody.
        queue = getattr(self._client, "_out_packet", None)
        if queue is None:  # another version of paho: slower, and otherwise the same
            return self._client.publish(topic, payload)
        if len(payload) <= _SCRATCH:
            queue.append(_entry(_PUBLISH, head + payload, info))
        else:
            # Two entries, one packet: nobody else writes in between, and what is not a PUBLISH is written
            # without further ado.
            queue.append(_entry(0, head, None))
            queue.append(_entry(_PUBLISH, memoryview(payload), info))
        self._client.loop_write()
        return info

    def send(self, data: Any) -> int:
        """Write what the socket takes, in frames over websockets; paho calls this."""
        if self._over:
            raise ConnectionAbortedError("hung up")
        if self._inner is None:
            return self._sock.send(data)
        if not self._frame:
            part = memoryview(data)[:FRAME_BYTES]
            self._frame, self._framed = memoryview(frame(part)), len(part)
        self._frame = self._frame[self._inner.send(self._frame) :]
        if self._frame:
            raise BlockingIOError  # paho keeps the packet and calls again with the same bytes
        return self._framed

    # --- reading --------------------------------------------------------------------------------

    def recv(self, count: int) -> bytes:
        """Take in what the socket has, and return what of it is paho's to handle; paho calls this."""
        if not self._for_paho and not self._over:
            try:
                self._read()
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if not self._for_paho:
                    raise
            except OSError as error:
                self.error = error
                raise
        data, self._for_paho = self._for_paho[:count], self._for_paho[count:]
        return data

    def _read(self) -> None:
        for _ in range(_READS):
            target = self._scratch if self._packet is None else self._packet[self._filled :]
            count = self._read_into(target)
            if count == 0:
                self._over = True
                return
            if (now := time.monotonic()) - self._told >= 1.0:
                # Whatever comes shows that the broker lives, as well as the answer to a ping, which may
                # have to wait behind it for longer than paho does.
                self._told = now
                self._for_paho += _PINGRESP
            if self._packet is None:
                self._cut(count)
            else:
                self._fill(self._packet, count)
            if count < len(target) and self._inner is None and not hasattr(self._sock, "pending"):
                break  # the socket is empty: asking once more would only tell us so
        if not self._for_paho:
            raise BlockingIOError

    def _read_into(self, target: memoryview) -> int:
        if self._inner is None:
            return self._sock.recv_into(target)
        data = self._sock.recv(len(target))
        target[: len(data)] = data
        return len(data)

    def _fill(self, packet: memoryview, count: int) -> None:
        """Count what was read into the open packet, and hand it on when it is complete."""
        self._filled += count
        if self._filled == len(packet):
            self._packet = None
            self._handle(self._head, packet)

    def _cut(self, count: int) -> None:
        """Cut what was read into packets; the last one may have just begun."""
        data = self._scratch[:count]
        if self._rest:
            data, self._rest = memoryview(self._rest + bytes(data)), b""
        while data:
            length, start = _varint_at(data, 1)
            # A topic's length is needed to place its payload, so wait for that too.
            if start == 0 or (length > 2 and len(data) < start + 2):
                self._rest = bytes(data)
                return
            head, body = bytes(data[:start]), data[start : start + length]
            if len(body) < length:
                self._head, self._filled = head, len(body)
                self._packet = _room(length, 2 + int.from_bytes(body[:2], "big") + self._version5)
                self._packet[: len(body)] = body
                return
            data = data[start + length :]
            self._handle(head, body)

    def _handle(self, head: bytes, packet: memoryview) -> None:
        if head[0] & 0xF6 == _PUBLISH:  # at QoS 0
            self._message(packet, retain=bool(head[0] & 1))
            return
        if self._version5 and head[0] == _PUBACK and packet[2:3] == bytes((_TOO_LARGE,)):
            # mosquitto says so, though MQTT has no such answer to a message: paho would hang up on it.
            self.too_large.add(int.from_bytes(packet[:2], "big"))
            packet = memoryview(bytes((*packet[:2], _UNSPECIFIED, *packet[3:])))
        self._for_paho += head + packet

    def _message(self, packet: memoryview, *, retain: bool) -> None:
        start = 2 + int.from_bytes(packet[:2], "big")
        try:
            topic = str(packet[2:start], "utf-8")
        except UnicodeDecodeError:
            raise _malformed("a topic that is not text") from None
        if self._version5:
            length, end = _varint_at(packet, start)
            start = end + length if end else len(packet) + 1
        if start > len(packet):
            raise _malformed("a topic or properties longer than their packet")
        payload = packet[start:]
        self._deliver(topic, bytes(payload) if len(payload) <= _SCRATCH else payload, retain)


def _malformed(what: str) -> OSError:
    return OSError(f"the broker sent a malformed packet: {what}")


def _entry(command: int, data: Any, info: paho.MQTTMessageInfo | None) -> dict[str, Any]:
    """An entry of paho's queue of what is to be written."""
    return {
        "command": command,
        "mid": 0 if info is None else info.mid,
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


def _varint_at(data: memoryview, start: int) -> tuple[int, int]:
    """A length in MQTT's own notation, and where it ends: 0 if it is cut off."""
    value = 0
    for place, byte in enumerate(data[start : start + 4]):
        value |= (byte & 127) << (7 * place)
        if byte < 128:
            return value, start + place + 1
    if len(data) >= start + 4:
        raise _malformed("a length of five digits")
    return 0, 0


def _varint(value: int) -> bytes:
    digits = bytearray()
    while True:
        value, digit = divmod(value, 128)
        digits.append(digit | (128 if value else 0))
        if not value:
            return bytes(digits)


def frame(data: memoryview) -> bytearray:
    """`data` as one masked binary frame of a websocket (RFC 6455, 5.2)."""
    size, key = len(data), os.urandom(4)
    masked = 0x80
    if size < 126:
        out = bytearray((0x82, masked | size))
    elif size < 1 << 16:
        out = bytearray(struct.pack("!BBH", 0x82, masked | 126, size))
    else:
        out = bytearray(struct.pack("!BBQ", 0x82, masked | 127, size))
    out += key
    mask = np.tile(np.frombuffer(key, np.uint8), size // 4 + 1)[:size]
    out += np.bitwise_xor(np.frombuffer(data, np.uint8), mask).data
    return out


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
