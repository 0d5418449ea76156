"""Pen digits: 10992 digits by 44 real writers, drawn from pen strokes as 28×28 images."""

from __future__ import annotations

from .dataset import Dataset, samples
from .files import Places, read_npz


def pendigits(places: Places) -> Dataset:
    """About 250 digits for each of 44 writers; `group` is the writer. No test part of its own."""
    key = "handwriting/pendigits_writers.npz"
    path = places.need("pendigits", key, "set GOSSAMER_DATA to the folder above handwriting/")
    x, y, writer = read_npz(path, "x", "y", "writer")
    return Dataset("pendigits", samples(x[:, None], y, writer), None, 10, "grouped by writer")
