"""Makes paho's websocket connections fit for large messages.

As paho 2 stands, a frame that the socket takes in two goes loses its packet (the wrapper reports
"0 bytes sent", and paho forgets what it was sending), masking is a Python loop over every byte
(0.1 s and more per MB, in the event loop), and a packet is one frame, which servers refuse above
1 MB. `mend` gives one connection a sender without these three faults.
"""

from __future__ import annotations

import os
import struct
from typing import Any

import numpy as np

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


def mend(wrapper: Any) -> None:
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
