"""Encoding and decoding a model's values, against copying the same bytes."""

from __future__ import annotations

import numpy as np

from ...gossip import ONE, Chunker, Give, Reassembler, decode, encode
from .harness import Row, alternate

PARAMETERS = 266_610
_LIMIT = 4 << 20
_LOOPS = 20


def codec() -> list[Row]:
    """Message to packet and back: header, the copy into the packet, checks, the finite check."""
    value = np.random.default_rng(0).standard_normal(PARAMETERS).astype(np.float32)
    give = Give("global", "a", "s", 1, "b", "t", ONE, value)
    chunker, reassembler = Chunker("a/s", _LIMIT), Reassembler()
    target = np.empty_like(value)

    def work() -> None:
        for _ in range(_LOOPS):
            for packet in chunker.split(encode(give, "schema")):
                whole = reassembler.add(packet)
                assert whole is not None
                decode(whole)

    def copy() -> None:
        for _ in range(_LOOPS):
            np.copyto(target, value)

    mine, plain = (_LOOPS * value.nbytes / seconds / 1e9 for seconds in alternate(work, copy))
    return [
        Row("encode + decode", "GB/s", mine, 1.0, mine, 1.0, note="baseline: the wanted 1 GB/s"),
        Row("encode + decode, against memcpy", "GB/s", mine, plain, mine / plain),
    ]
