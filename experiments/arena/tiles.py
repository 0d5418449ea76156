"""Coordinates as few regular pieces, so that reading and writing them is copying, not picking.

The coordinates of a slice in a weight matrix are some first columns of some first rows: rows of equal
length at equal distances. A tile is such a set; a slice of a whole network is about one per parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

MEAN_RUN = 16
"""Coordinates that follow each other, on average, from which tiles beat picking one by one."""


@dataclass(frozen=True)
class Tile:
    """`count` runs of `length` coordinates, the first at `start`, each `stride` after the one before."""

    start: int
    count: int
    stride: int
    length: int

    @property
    def size(self) -> int:
        """Coordinates in it."""
        return self.count * self.length

    def of(self, rows: Tensor) -> Tensor:
        """The tile's values in rows of a stack, [rows, count, length]: a view."""
        return rows.as_strided(
            (len(rows), self.count, self.length),
            (rows.stride(0), self.stride, 1),
            rows.storage_offset() + self.start,
        )

    def cut(self, first: int, last: int) -> list[Tile]:
        """The part of its coordinates from `first` to `last`, counted in their order."""
        found: list[Tile] = []
        while first < last:
            run, inside = divmod(first, self.length)
            if inside or last - first < self.length:  # a run that begins or ends in the middle
                size = min(self.length - inside, last - first)
                found.append(Tile(self.start + run * self.stride + inside, 1, 0, size))
            else:
                runs = (last - first) // self.length
                size = runs * self.length
                found.append(Tile(self.start + run * self.stride, runs, self.stride, self.length))
            first += size
        return found


def tiles(where: slice | np.ndarray) -> list[Tile] | None:
    """Coordinates as tiles, in their order; None where they are too scattered for it."""
    if isinstance(where, slice):
        size = where.stop - where.start
        return [Tile(where.start, 1, 0, size)]
    breaks = np.flatnonzero(np.diff(where) != 1) + 1
    starts = np.concatenate([[0], breaks])
    lengths = np.diff(np.concatenate([starts, [len(where)]]))
    if len(where) < MEAN_RUN * len(starts):
        return None
    found: list[Tile] = []
    for first, length in zip(where[starts].tolist(), lengths.tolist(), strict=True):
        if found and found[-1].length == length:
            last = found[-1]
            stride = first - (last.start + (last.count - 1) * last.stride)
            if stride > 0 and (last.count == 1 or stride == last.stride):
                found[-1] = Tile(last.start, last.count + 1, stride, length)
                continue
        found.append(Tile(first, 1, 0, length))
    return found


def span(tiled: list[Tile], first: int, last: int) -> list[Tile]:
    """The part of some tiles' coordinates from `first` to `last`, counted in their order."""
    found: list[Tile] = []
    at = 0
    for tile in tiled:
        a, b = max(first - at, 0), min(last - at, tile.size)
        if a < b:
            found += tile.cut(a, b)
        at += tile.size
    return found


def as_rows(rows: Sequence[int], device: torch.device) -> slice | Tensor:
    """Row numbers as a slice where they are evenly spaced, which needs no copy."""
    steps = {b - a for a, b in pairwise(rows)}
    if len(steps) <= 1 and (step := steps.pop() if steps else 1) > 0:
        return slice(rows[0], rows[-1] + 1, step)
    return torch.tensor(rows, device=device)
