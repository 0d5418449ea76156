"""Independent random streams, named so that any peer can draw the same one without asking."""

from __future__ import annotations

import hashlib

import numpy as np


def stream(seed: int, *names: object) -> np.random.Generator:
    """The generator that belongs to a seed and a path of names, the same on every machine."""
    text = "\x1f".join([str(seed), *map(str, names)]).encode()
    return np.random.default_rng(int.from_bytes(hashlib.sha256(text).digest()[:16], "little"))
