"""Wrappers of the socket that paho uses, where paho is slow or has bugs.

`PacketSocket`: paho copies the rest of a packet before every write to the socket, concatenates byte strings
as it reads a packet, and copies again to separate topic and payload. For a megabyte of parameters these
copies are most of the cost: sending and receiving it takes 0.6 ms of processor time with this class, and
1.3 ms with paho only. Here a large payload is written from the caller's buffers, and read into the buffer
that the receiver gets. Messages at QoS 0 bypass paho, unless the socket is full; all other packets are
passed on to it.

The class also frames websockets, because in paho 2 a packet is lost if its frame needs two writes (the
wrapper reports "0 bytes sent", and paho discards the packet), masking is a Python loop over every byte (0.1 s
and more per MB, in the event loop), and each packet is one frame, which servers reject above 1 MB.

`SelfClosingSocket`: paho does not close a socket whose handshake fails, so this one closes itself.
"""

from __future__ import annotations

import itertools
import os
import socket
import ssl
import struct
import time
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numpy as np
import paho.mqtt.client as paho

from .base import Buffers, Payload

Deliver: TypeAlias = Callable[[str, bytes | memoryview, bool], None]
"""Called with topic, payload and whether it was retained, for every message at QoS 0. A payload above
_READ_BYTES is a view of memory that nothing else uses, others are bytes."""

_FIRST_ID = 1 << 16  # for messages at QoS 0, which have no id on the wire; paho's ids are smaller
_PUBLISH, _PUBACK = 0x30, 0x40  # first byte of these MQTT packets
_PINGRESP = b"\xd0\0"
_PACKET_TOO_LARGE, _UNSPECIFIED_ERROR = 0x95, 0x80  # MQTT 5 reason codes
_READ_BYTES = 64 * 1024  # size of the read buffer; larger payloads are not copied
_MAX_READS = 64  # per callback of the event loop, so that other connections are served too
FRAME_BYTES = 256 * 1024
"""Most bytes of payload in one websocket frame."""


class PacketSocket:
    """Replaces the socket that a paho client has just opened, and forwards to it.

    `error` is the exception that reading raised, which paho only logs: a TLS alert in it tells why the broker
    closed the connection.
    """

    def __init__(self, client: paho.Client, deliver: Deliver, *, version5: bool) -> None:
        self._client, self._sock = cast(Any, client), cast(Any, client.socket())
        # paho has no public way to replace its socket.
        self._client._sock = self
        # The socket inside paho's wrapper for websockets; None without websockets. We bypass the wrapper's
        # `send`, which loses packets.
        self._websocket_inner = getattr(self._sock, "_socket", None)
        # Sockets of TLS cannot write several buffers at once.
        self._can_sendmsg = isinstance(self._sock, socket.socket) and not isinstance(
            self._sock, ssl.SSLSocket
        )
        self._deliver, self._version5 = deliver, version5
        self.error: OSError | None = None
        self.too_large: set[int] = set()
        """Ids of messages that the broker rejected as too large."""
        self._closed = False
        self._ids = itertools.count(_FIRST_ID)
        self._read_buffer = memoryview(bytearray(_READ_BYTES))
        self._partial_head = b""  # start of a packet whose topic's length has not arrived
        self._head = b""  # fixed header of the incomplete packet in `_packet`
        self._packet: memoryview | None = None
        self._filled = 0  # bytes of `_packet` that have been read
        self._for_paho = b""  # packets that paho has not read yet
        self._last_pingresp = time.monotonic()
        self._frame = memoryview(b"")  # rest of the websocket frame that is being written
        self._frame_payload_bytes = 0  # bytes of paho's data in that frame

    def fileno(self) -> int:
        """Return the file descriptor, for the event loop."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close the real socket."""
        self._sock.close()

    def pending(self) -> int:
        """Return the number of bytes already read from the operating system: no event will announce them."""
        return len(self._for_paho) + (self._sock.pending() if hasattr(self._sock, "pending") else 0)

    def hang_up(self) -> None:
        """Close the connection without sending a DISCONNECT, and make paho notice it at once."""
        self._closed = True
        self._client.disconnect()
        self._client.loop_write()

    # --- writing --------------------------------------------------------------------------------

    def publish(self, topic: str, payload: Payload) -> paho.MQTTMessageInfo | None:
        """Send at QoS 0, not retained; `payload` must not change until it is sent.

        Returns None if all of it was written, else what paho's `publish` returns.
        """
        name = topic.encode()
        variable_header = len(name).to_bytes(2, "big") + name + (b"\0" if self._version5 else b"")
        length = _encode_varint(len(variable_header) + len(payload))
        header = bytes((_PUBLISH,)) + length + variable_header
        views = [header, *(payload.views if isinstance(payload, Buffers) else (payload,))]
        # We append to paho's private queue of outgoing packets, because its `publish` copies the payload.
        queue = getattr(self._client, "_out_packet", None)
        if queue is None:  # a version of paho without this queue: slower, with the same result
            return self._client.publish(topic, bytes(payload))
        if self._can_sendmsg:
            if not queue and not self._closed:
                views = self._write(views)
                if not views:
                    return None
        elif len(payload) <= _READ_BYTES:
            views = [b"".join(views)]
        else:
            views = [b"".join(views[:-1]), views[-1]]
        info = paho.MQTTMessageInfo(next(self._ids))
        # Several entries for one packet: nothing is written between them, and paho writes an entry with the
        # command 0 without further processing.
        *first, last = (memoryview(view) for view in views if len(view))
        queue.extend(_entry(0, view, None) for view in first)
        queue.append(_entry(_PUBLISH, last, info))
        self._client.loop_write()
        return info

    def _write(self, views: list[Any]) -> list[Any]:
        """Write as much as the socket accepts, bypassing paho, and return the rest."""
        try:
            count = self._sock.sendmsg(views)
        except OSError:
            return views  # the socket is full, or the connection is lost, which paho will notice
        for index, view in enumerate(views):
            if count < len(view):
                return [memoryview(view)[count:], *views[index + 1 :]]
            count -= len(view)
        return []

    def send(self, data: Any) -> int:
        """Write as much as the socket accepts, in frames over websockets; paho calls this."""
        if self._closed:
            raise ConnectionAbortedError("the connection was closed")
        if self._websocket_inner is None:
            return self._sock.send(data)
        if not self._frame:
            payload = memoryview(data)[:FRAME_BYTES]
            self._frame, self._frame_payload_bytes = memoryview(frame(payload)), len(payload)
        self._frame = self._frame[self._websocket_inner.send(self._frame) :]
        if self._frame:
            raise BlockingIOError  # paho keeps the packet and calls again with the same bytes
        return self._frame_payload_bytes

    # --- reading --------------------------------------------------------------------------------

    def read(self) -> bool:
        """Read and deliver messages; return True if paho must call `recv`, for a packet or the end."""
        try:
            self._read()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError as error:
            self.error = error
        return bool(self._for_paho) or self._closed or self.error is not None

    def recv(self, count: int) -> bytes:
        """Return bytes of those packets that paho handles; paho calls this."""
        if not self._for_paho and not self.read():
            raise BlockingIOError
        if not self._for_paho and self.error is not None:
            raise self.error
        data, self._for_paho = self._for_paho[:count], self._for_paho[count:]
        return data

    def _read(self) -> None:
        if self._closed or self.error is not None:
            return
        for _ in range(_MAX_READS):
            target = self._read_buffer if self._packet is None else self._packet[self._filled :]
            count = self._read_into(target)
            if count == 0:
                self._closed = True
                return
            if (now := time.monotonic()) - self._last_pingresp >= 1.0:
                # Any data proves that the broker is alive. The real answer to a ping may be queued behind a
                # large message for longer than paho waits: so we give paho one of our own.
                self._last_pingresp = now
                self._for_paho += _PINGRESP
            if self._packet is None:
                self._split(count)
            else:
                self._fill(self._packet, count)
            if (
                count < len(target)
                and self._websocket_inner is None
                and not hasattr(self._sock, "pending")
            ):
                break  # the socket is empty: another read would only raise BlockingIOError

    def _read_into(self, target: memoryview) -> int:
        if self._websocket_inner is None:
            return self._sock.recv_into(target)
        data = self._sock.recv(len(target))
        target[: len(data)] = data
        return len(data)

    def _fill(self, packet: memoryview, count: int) -> None:
        """Record that `count` bytes were read into the incomplete packet; handle it once it is complete."""
        self._filled += count
        if self._filled == len(packet):
            self._packet = None
            self._handle(self._head, packet)

    def _split(self, count: int) -> None:
        """Split the first `count` bytes of the read buffer into packets; the last one may be incomplete."""
        data = self._read_buffer[:count]
        if self._partial_head:
            data, self._partial_head = memoryview(self._partial_head + bytes(data)), b""
        while data:
            length, start = _decode_varint(data, 1)
            # The length of the topic is needed to align the payload, so wait for that too.
            if start == 0 or (length > 2 and len(data) < start + 2):
                self._partial_head = bytes(data)
                return
            head, body = bytes(data[:start]), data[start : start + length]
            if len(body) < length:
                self._head, self._filled = head, len(body)
                self._packet = _aligned_buffer(
                    length, 2 + int.from_bytes(body[:2], "big") + self._version5
                )
                self._packet[: len(body)] = body
                return
            data = data[start + length :]
            self._handle(head, body)

    def _handle(self, head: bytes, packet: memoryview) -> None:
        if head[0] & 0xF6 == _PUBLISH:  # at QoS 0
            self._deliver_message(packet, retain=bool(head[0] & 1))
            return
        if self._version5 and head[0] == _PUBACK and packet[2:3] == bytes((_PACKET_TOO_LARGE,)):
            # mosquitto sends this code, which the standard does not allow in a PUBACK: paho would close the
            # connection.
            self.too_large.add(int.from_bytes(packet[:2], "big"))
            packet = memoryview(bytes((*packet[:2], _UNSPECIFIED_ERROR, *packet[3:])))
        self._for_paho += head + packet

    def _deliver_message(self, packet: memoryview, *, retain: bool) -> None:
        start = 2 + int.from_bytes(packet[:2], "big")
        try:
            topic = str(packet[2:start], "utf-8")
        except UnicodeDecodeError:
            raise _malformed("a topic that is not UTF-8") from None
        if self._version5:
            length, end = _decode_varint(packet, start)
            start = end + length if end else len(packet) + 1
        if start > len(packet):
            raise _malformed("a topic or properties longer than their packet")
        payload = packet[start:]
        self._deliver(topic, bytes(payload) if len(payload) <= _READ_BYTES else payload, retain)


def _malformed(what: str) -> OSError:
    return OSError(f"the broker sent a malformed packet: {what}")


def _entry(command: int, data: Any, info: paho.MQTTMessageInfo | None) -> dict[str, Any]:
    """Return an entry of paho's queue of outgoing packets."""
    return {
        "command": command,
        "mid": 0 if info is None else info.mid,
        "qos": 0,
        "pos": 0,
        "to_process": len(data),
        "packet": data,
        "info": info,
    }


def _aligned_buffer(length: int, payload_at: int) -> memoryview:
    """Return a buffer of `length` bytes in which offset `payload_at`, the payload, is aligned for numpy."""
    shift = -payload_at % 8
    return np.empty(shift + length, np.uint8).data[shift:]


def _decode_varint(data: memoryview, start: int) -> tuple[int, int]:
    """Read MQTT's variable byte integer; return (value, offset of its end), or (0, 0) if incomplete."""
    value = 0
    for index, byte in enumerate(data[start : start + 4]):
        value |= (byte & 127) << (7 * index)
        if byte < 128:
            return value, start + index + 1
    if len(data) >= start + 4:
        raise _malformed("a length of more than four bytes")
    return 0, 0


def _encode_varint(value: int) -> bytes:
    """Encode MQTT's variable byte integer."""
    encoded = bytearray()
    while True:
        value, digit = divmod(value, 128)
        encoded.append(digit | (128 if value else 0))
        if not value:
            return bytes(encoded)


def frame(data: memoryview) -> bytearray:
    """Return `data` as one masked binary frame of a websocket (RFC 6455, 5.2)."""
    size, key = len(data), os.urandom(4)
    final_binary, masked = 0x82, 0x80  # FIN bit and opcode 2; MASK bit
    if size < 126:
        out = bytearray((final_binary, masked | size))
    elif size < 1 << 16:
        out = bytearray(struct.pack("!BBH", final_binary, masked | 126, size))
    else:
        out = bytearray(struct.pack("!BBQ", final_binary, masked | 127, size))
    out += key
    mask = np.tile(np.frombuffer(key, np.uint8), size // 4 + 1)[:size]
    out += np.bitwise_xor(np.frombuffer(data, np.uint8), mask).data
    return out


class SelfClosingSocket(ssl.SSLSocket):
    """Closes itself if the handshake of TLS or of websockets fails, which paho does not do."""

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
            if self.gettimeout():  # as during the handshakes; after them the socket is non-blocking
                self.close()
            raise
